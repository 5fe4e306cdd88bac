// What calls of kernels for GPUs have in common, on the side of the host.
#ifndef HEED_CUDA_CALLS_H_
#define HEED_CUDA_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <type_traits>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/cuda/library.h"

namespace heed::cuda {

// Why a device runs no kernel whose blocks take so many bytes of shared memory; empty if it does.
std::string Declines(Device device, int64_t shared_bytes);

// A call of a kernel that errors call by this name. It is there: Declines() said so.
class Call {
 public:
  // Throws InvalidArgument if the Context's stream is of another device.
  Call(const char* kernel, const Context& ctx, Device device);

  const Library& library() const { return library_; }
  Launch Of(int64_t blocks, int64_t heads, size_t sequences) const {
    return {.device = device_.index,
            .stream = stream_,
            .blocks = {static_cast<int32_t>(blocks), static_cast<int32_t>(heads), static_cast<int32_t>(sequences)}};
  }
  // Bytes of the host to memory of the device, read before this returns.
  void Upload(void* to, const void* from, size_t num_bytes) const {
    if (num_bytes > 0) Check(library_.upload(device_.index, stream_, to, from, num_bytes));
  }
  // For bulk copies; false if they do not take these rows.
  bool EncodeTensorMap(const TensorMapSource& rows, TensorMap* map) const {
    return library_.encode_tensor_map(device_.index, rows, map) == nullptr;
  }
  // Throws InternalError unless a launch returned null.
  void Check(const char* error) const;

 private:
  friend class DeviceMemory;
  const char* const kernel_;
  const Device device_;
  void* const stream_;
  const Library& library_;
};

// A call's memory on the device, given back in the order of the stream.
class DeviceMemory {
 public:
  // Throws Unsupported if the device has not as much.
  DeviceMemory(const Call& call, size_t num_bytes);
  ~DeviceMemory() { call_.library_.free(call_.device_.index, call_.stream_, data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }

 private:
  const Call& call_;
  void* data_ = nullptr;
};

// Numbers of the host in memory of the device, while this lives.
class Uploads {
 public:
  explicit Uploads(const Call& call) : call_(call) {}

  template <class T>
  const T* Put(const std::vector<T>& numbers) {
    static_assert(std::is_trivially_copyable_v<T>);
    return static_cast<const T*>(PutBytes(numbers.data(), numbers.size() * sizeof(T)));
  }

 private:
  const void* PutBytes(const void* data, size_t num_bytes);

  const Call& call_;
  std::list<DeviceMemory> memory_;
};

}  // namespace heed::cuda

#endif  // HEED_CUDA_CALLS_H_
