// The exceptions of the library, one class for each kind of error.
//
// Every message names the operation, the argument, its actual and its expected value: "attention::Forward: k has shape
// [1,3,2,8], expected [1,3,2,16]".
#ifndef HEED_CORE_ERROR_H_
#define HEED_CORE_ERROR_H_

#include <stdexcept>
#include <string>

#include "heed/core/export.h"

namespace heed {

// The caller is at fault: a wrong shape, dtype, option or file.
class HEED_API InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The call is valid, but this build or machine has no implementation.
class HEED_API Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The library is at fault: please report it.
class HEED_API InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// A file that cannot be read, written or trusted. what() is "PATH: reason".
class HEED_API FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace heed

#endif  // HEED_CORE_ERROR_H_
