// Files that claim what they do not hold. What the command line says about
// ordinary files is tested through it, in python/tests/test_cli_files.py.
#include "heed/harness/tensor_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace heed {
namespace {

// A file of q, k and v of that dtype and shape, without any element.
std::string EmptyTensors(const std::string& dtype, const std::string& shape) {
  std::string text = "{";
  for (const char* name : {"q", "k", "v"}) {
    text += std::string(text.size() > 1 ? "," : "") + "\"" + name +
            "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
            ",\"data_offsets\":[0,0]}";
  }
  text += "}";
  std::string file(8, '\0');
  const uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  return file + text;
}

TensorSet Load(const std::string& file, const TensorChoice& choice) {
  return LoadTensors(
      "F", {reinterpret_cast<const uint8_t*>(file.data()), file.size()},
      choice);
}

// Found by fuzzing: a list of 2^40 heads was made, or 2^40 batches counted.
TEST(TensorFile, SizesWithoutElementsCostNothing) {
  for (const char* shape : {"[0,1099511627776,1]", "[1099511627776,0,1,1]",
                            "[1048576,1073741824,0,1]"}) {
    for (const char* dtype : {"F16", "BF16", "F32"}) {
      const std::string file = EmptyTensors(dtype, shape);
      const TensorSet set = Load(file, {"", "", DType::kF64});
      EXPECT_EQ(set.q.num_elements(), 0);
      EXPECT_EQ(set.q.dtype(), DType::kF64);
    }
  }
}

TEST(TensorFile, ChosenHeadsOfNoTokens) {
  const std::string file = EmptyTensors("F32", "[0,1099511627776,1]");
  const TensorSet set = Load(file, {"", "3,1", {}});
  EXPECT_EQ(set.q.ShapeString(), "[1,0,2,1]");
  EXPECT_EQ(set.k.ShapeString(), "[1,0,2,1]");
}

}  // namespace
}  // namespace heed
