// The standard classes as which a caller may catch the exceptions.
#include "heed/core/error.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <type_traits>

namespace heed {
namespace {

TEST(ErrorTest, EachDerivesFromTheStandardExceptionThatItsNameSuggests) {
  EXPECT_THROW(throw InvalidArgument("x"), std::invalid_argument);
  EXPECT_THROW(throw Unsupported("x"), std::runtime_error);
  EXPECT_THROW(throw InternalError("x"), std::logic_error);
  EXPECT_THROW(throw FileError("x"), std::runtime_error);
}

TEST(ErrorTest, NoneIsCaughtAsAnother) {
  EXPECT_FALSE((std::is_base_of_v<InvalidArgument, InternalError>));
  EXPECT_FALSE((std::is_base_of_v<Unsupported, FileError>));
  EXPECT_FALSE((std::is_base_of_v<FileError, Unsupported>));
}

TEST(ErrorTest, KeepsItsMessage) {
  EXPECT_STREQ(InvalidArgument("op: a is 1, expected 2").what(), "op: a is 1, expected 2");
}

}  // namespace
}  // namespace heed
