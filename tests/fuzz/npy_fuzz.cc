// Any bytes as an NPY file: a FileError of one line, or a tensor inside the bytes.
#include <cstdint>

#include "heed/core/error.h"
#include "heed/io/npy.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const heed::NpyFile file("F", {data, size});
    heed::fuzz::ReadAll(file.tensor());
  } catch (const heed::FileError& e) {
    heed::fuzz::CheckMessage(e.what());
  }
  return 0;
}
