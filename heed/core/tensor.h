// Views: a pointer, a dtype, sizes and strides. A view owns nothing.
//
// Strides count elements and may be zero or negative on inputs. A default constructed view is absent: an optional
// tensor that is left out.
#ifndef HEED_CORE_TENSOR_H_
#define HEED_CORE_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/export.h"

namespace heed {

inline constexpr int kMaxRank = 6;

enum class DeviceType : int32_t { kCpu = 1, kCuda = 2 };  // DLPack's numbers
struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

class HEED_API ConstTensorView {
 public:
  ConstTensorView() = default;

  // Makes a row-major view. Throws InvalidArgument for a rank above kMaxRank, a negative size, or sizes whose bytes
  // overflow int64.
  ConstTensorView(const void* data, DType dtype, std::span<const int64_t> sizes, Device device = {});
  ConstTensorView(const void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device = {});

  // Makes a view of any strides, in elements, one for each size.
  ConstTensorView(const void* data, DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides,
                  Device device = {});
  ConstTensorView(const void* data, DType dtype, std::initializer_list<int64_t> sizes,
                  std::initializer_list<int64_t> strides, Device device = {});

  bool present() const { return rank_ >= 0; }
  explicit operator bool() const { return present(); }

  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int rank() const { return rank_ < 0 ? 0 : rank_; }
  int64_t size(int axis) const { return sizes_[axis]; }
  int64_t stride(int axis) const { return strides_[axis]; }
  std::span<const int64_t> sizes() const;
  std::span<const int64_t> strides() const;
  int64_t num_elements() const;

  const void* data() const { return data_; }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }

  // Rows [begin, end) of `axis`; the other axes stay whole.
  ConstTensorView Slice(int axis, int64_t begin, int64_t end) const;

  // "[2,7,3,16]".
  std::string ShapeString() const;

 protected:
  const void* data_ = nullptr;
  int64_t sizes_[kMaxRank] = {};
  int64_t strides_[kMaxRank] = {};
  int rank_ = -1;
  DType dtype_ = DType::kF32;
  Device device_;
};

// A view through which elements may be written.
class HEED_API TensorView : public ConstTensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, std::span<const int64_t> sizes, Device device = {});
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device = {});
  TensorView(void* data, DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides,
             Device device = {});
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
             Device device = {});

  void* data() const { return const_cast<void*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  TensorView Slice(int axis, int64_t begin, int64_t end) const;
};

// "[2,7,3,16]" for any list of sizes.
HEED_API std::string ShapeString(std::span<const int64_t> sizes);

// True unless it is certain that the views share no byte. Views that interleave in one buffer, such as the q, k and v
// slices of a fused projection, do not overlap.
HEED_API bool Overlap(const ConstTensorView& a, const ConstTensorView& b);

// True if two different indices reach the same byte, or if this cannot be excluded.
HEED_API bool SelfOverlaps(const ConstTensorView& view);

}  // namespace heed

#endif  // HEED_CORE_TENSOR_H_
