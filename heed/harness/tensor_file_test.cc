// Files that claim more than they hold. python/tests/test_cli_files.py tests ordinary files through the command line.
#include "heed/harness/tensor_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "heed/core/error.h"

namespace heed {
namespace {

// A file of q, k and v of this dtype and shape, without any element.
std::string EmptyTensors(const std::string& dtype, const std::string& shape) {
  std::string text = "{";
  for (const char* name : {"q", "k", "v"}) {
    text += std::string(text.size() > 1 ? "," : "") + "\"" + name + "\":{\"dtype\":\"" + dtype +
            "\",\"shape\":" + shape + ",\"data_offsets\":[0,0]}";
  }
  text += "}";
  std::string file(8, '\0');
  const uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  return file + text;
}

TensorSet Load(const std::string& file, const TensorChoice& choice) {
  return LoadTensors("F", {reinterpret_cast<const uint8_t*>(file.data()), file.size()}, choice);
}

// Fuzzing found this: a list of 2^40 heads was made, or 2^40 batches were counted.
TEST(TensorFile, HugeSizesWithoutElementsAreRefused) {
  for (const char* shape : {"[0,1099511627776,1]", "[1099511627776,0,1,1]", "[1048576,1073741824,0,1]",
                            "[1024,2048,0,1]", "[0,1048577,1]"}) {
    try {
      Load(EmptyTensors("BF16", shape), {});
      ADD_FAILURE() << shape << " was read";
    } catch (const FileError& e) {
      EXPECT_EQ(std::string(e.what()).find("F: q has shape ["), 0u) << e.what();
    }
  }
}

TEST(TensorFile, OrdinarySizesWithoutElementsAreRead) {
  const TensorSet all = Load(EmptyTensors("F16", "[0,1048576,1]"), {});
  EXPECT_EQ(all.q.ShapeString(), "[1,0,1048576,1]");
  const TensorSet two = Load(EmptyTensors("F32", "[3,0,8,4]"), {"", "3,1", {}});
  EXPECT_EQ(two.q.ShapeString(), "[3,0,2,4]");
  EXPECT_EQ(two.k.ShapeString(), "[3,0,2,4]");
}

}  // namespace
}  // namespace heed
