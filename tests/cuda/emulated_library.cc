// The emulated device as a libheed_cuda file, which records the stream of the last call.
#include <cstdint>

#include "heed/cuda/library.h"
#include "tests/cuda/device.h"

namespace {

void* last_stream = nullptr;

const char* CheckStream(int32_t, void* stream) {
  last_stream = stream;
  return nullptr;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) const heed::cuda::Library* heed_cuda_library() {
  static const heed::cuda::Library library = [] {
    heed::cuda::Library emulated = *heed::cuda::EmulatedDevice().library();
    emulated.check_stream = &CheckStream;
    return emulated;
  }();
  return &library;
}

__attribute__((visibility("default"))) void* emulated_last_stream() { return last_stream; }

}  // extern "C"
