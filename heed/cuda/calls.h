// Host code that all calls of GPU kernels share.
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

// Returns why the device cannot run a kernel with this many bytes of shared memory per block; empty if it can.
std::string Declines(Device device, int64_t shared_bytes);

// A call of a kernel; errors use the name `kernel`. The library is loaded: Declines() has checked that.
class Call {
 public:
  // Throws InvalidArgument if the Context's stream belongs to another device.
  Call(const char* kernel, const Context& ctx, Device device);

  const Library& library() const { return library_; }
  Launch Of(int64_t blocks, int64_t heads, size_t sequences) const {
    return {.device = device_.index,
            .stream = stream_,
            .blocks = {static_cast<int32_t>(blocks), static_cast<int32_t>(heads), static_cast<int32_t>(sequences)}};
  }
  // Copies host bytes to device memory; they are read before this returns.
  void Upload(void* to, const void* from, size_t num_bytes) const {
    if (num_bytes > 0) Check(library_.upload(device_.index, stream_, to, from, num_bytes));
  }
  // Encodes a tensor map for TMA loads. Returns false if TMA cannot load these rows.
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

// Device memory of a call, freed in stream order.
class DeviceMemory {
 public:
  // Throws Unsupported if the allocation fails.
  DeviceMemory(const Call& call, size_t num_bytes);
  ~DeviceMemory() { call_.library_.free(call_.device_.index, call_.stream_, data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }

 private:
  const Call& call_;
  void* data_ = nullptr;
};

// Host data uploaded to device memory that lives as long as this object.
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
