// Checks before launches, and device memory of a call.
#include "heed/cuda/calls.h"

#include <cstring>

#include "heed/core/device_name.h"
#include "heed/core/error.h"

namespace heed::cuda {
namespace {

const Library& Found() {
  std::string unused;
  return *Find(&unused);
}

}  // namespace

std::string Declines(Device device, int64_t shared_bytes) {
  std::string why_not;
  const Library* library = Find(&why_not);
  if (library == nullptr) return "is not there: " + why_not;
  DeviceFacts facts;
  if (const char* reason = library->examine(device.index, &facts)) return std::string("cannot run: ") + reason;
  if (facts.major < 8) {
    return "needs compute capability 8.0, not " + std::to_string(facts.major) + "." + std::to_string(facts.minor);
  }
  if (shared_bytes > facts.shared_bytes) {
    return "needs " + std::to_string(shared_bytes) + " bytes of shared memory for these channels, not " +
           std::to_string(facts.shared_bytes);
  }
  return "";
}

Call::Call(const char* kernel, const Context& ctx, Device device)
    : kernel_(kernel), device_(device), stream_(ctx.stream()), library_(Found()) {
  if (const char* wrong = library_.check_stream(device.index, stream_)) {
    throw InvalidArgument(std::string(kernel) + ": the Context's stream " + wrong + ", expected one of " +
                          NameOf(device));
  }
}

void Call::Check(const char* error) const {
  if (error != nullptr) throw InternalError(std::string(kernel_) + ": " + error);
}

DeviceMemory::DeviceMemory(const Call& call, size_t num_bytes) : call_(call) {
  if (const char* error = call.library_.allocate(call.device_.index, call.stream_, num_bytes, &data_)) {
    throw Unsupported(std::string(call.kernel_) + ": cannot have " + std::to_string(num_bytes) +
                      " bytes of the device: " + error);
  }
}

const void* Uploads::PutBytes(const void* data, size_t num_bytes) {
  std::vector<uint64_t> words(num_bytes / sizeof(uint64_t) + 1);  // rounded up to whole words
  if (num_bytes > 0) std::memcpy(words.data(), data, num_bytes);
  const size_t whole = words.size() * sizeof(uint64_t);
  const DeviceMemory& memory = memory_.emplace_back(call_, whole);
  call_.Upload(memory.data(), words.data(), whole);
  return memory.data();
}

}  // namespace heed::cuda
