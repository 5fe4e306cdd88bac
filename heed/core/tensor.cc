// Views: construction, which checks every size, and tests for overlap.
#include "heed/core/tensor.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "heed/core/error.h"

namespace heed {
namespace {

std::span<const int64_t> Span(std::initializer_list<int64_t> list) { return {list.begin(), list.size()}; }

// The bytes that a view can reach: one run [begin, end) and the axes that repeat it.
struct Footprint {
  uintptr_t begin = 0, end = 0;  // of all bytes
  uintptr_t run_begin = 0;       // of the first run, in address order
  int64_t run = 0;               // bytes of one contiguous run
  // Axes above the run as (stride in bytes, size), from `first` to `last`. Nothing is allocated, because every call of
  // every operation comes here.
  std::array<std::pair<int64_t, int64_t>, kMaxRank> all_axes;
  size_t first = 0, last = 0;
  bool empty = false;
  bool self_overlaps = false;

  auto axes() const { return std::span(all_axes).subspan(first, last - first); }
};

Footprint Measure(const ConstTensorView& view) {
  Footprint f;
  const int64_t element = static_cast<int64_t>(SizeOf(view.dtype()));
  f.begin = reinterpret_cast<uintptr_t>(view.data());
  f.end = f.begin + static_cast<uintptr_t>(element);
  f.empty = view.num_elements() == 0;
  if (f.empty) return f;  // strides of an empty view are arbitrary
  for (int i = 0; i < view.rank(); ++i) {
    const int64_t size = view.size(i);
    if (size <= 1) continue;
    const int64_t stride = view.stride(i) * element;
    const int64_t reach = stride * (size - 1);
    if (reach < 0) {
      f.begin -= static_cast<uintptr_t>(-reach);
    } else {
      f.end += static_cast<uintptr_t>(reach);
    }
    f.all_axes[f.last++] = {std::abs(stride), size};
  }
  f.run_begin = f.begin;
  std::sort(f.all_axes.begin(), f.all_axes.begin() + static_cast<ptrdiff_t>(f.last));
  f.run = element;
  // The innermost axes that continue the run without a gap are merged into it.
  while (f.first < f.last && f.all_axes[f.first].first == f.run) {
    f.run *= f.all_axes[f.first++].second;
  }
  int64_t extent = f.run;
  for (const auto& [stride, size] : f.axes()) {
    if (stride < extent) f.self_overlaps = true;
    extent += stride * (size - 1);
  }
  return f;
}

}  // namespace

ConstTensorView::ConstTensorView(const void* data, DType dtype, std::span<const int64_t> sizes,
                                 std::span<const int64_t> strides, Device device)
    : data_(data), dtype_(dtype), device_(device) {
  if (sizes.size() > static_cast<size_t>(kMaxRank)) {
    throw InvalidArgument("tensor has rank " + std::to_string(sizes.size()) + ", expected at most " +
                          std::to_string(kMaxRank));
  }
  if (sizes.size() != strides.size()) {
    throw InvalidArgument("tensor has " + std::to_string(sizes.size()) + " sizes and " +
                          std::to_string(strides.size()) + " strides, expected as many");
  }
  rank_ = static_cast<int>(sizes.size());
  // The distance in bytes from the first to the last element, and the bytes of all elements, must fit into int64.
  int64_t limit = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(SizeOf(dtype));
  int64_t reach = 0, count = 1;
  bool fits = true;
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  for (int i = 0; i < rank_; ++i) {
    sizes_[i] = sizes[static_cast<size_t>(i)];
    strides_[i] = strides[static_cast<size_t>(i)];
    if (sizes_[i] < 0) {
      throw InvalidArgument("tensor has shape " + heed::ShapeString(sizes) + ", expected sizes >= 0");
    }
    if (empty || sizes_[i] == 0) continue;
    int64_t step;
    fits = fits && strides_[i] != std::numeric_limits<int64_t>::min() &&
           !__builtin_mul_overflow(std::abs(strides_[i]), sizes_[i] - 1, &step) &&
           !__builtin_add_overflow(reach, step, &reach) && reach < limit &&
           !__builtin_mul_overflow(count, sizes_[i], &count) && count <= limit;
  }
  if (!fits) {
    throw InvalidArgument("tensor has shape " + heed::ShapeString(sizes) + " and strides " +
                          heed::ShapeString(strides) + ", expected fewer than 2^63 bytes");
  }
}

ConstTensorView::ConstTensorView(const void* data, DType dtype, std::span<const int64_t> sizes, Device device)
    : ConstTensorView(
          data, dtype, sizes,
          [&] {
            std::vector<int64_t> strides(sizes.size(), 1);
            for (size_t i = sizes.size(); i-- > 1;) {
              const int64_t size = std::max<int64_t>(sizes[i], 1);
              if (__builtin_mul_overflow(strides[i], size, &strides[i - 1])) {
                throw InvalidArgument("tensor has shape " + heed::ShapeString(sizes) +
                                      ", expected fewer than 2^63 bytes");
              }
            }
            return strides;
          }(),
          device) {}

ConstTensorView::ConstTensorView(const void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device)
    : ConstTensorView(data, dtype, Span(sizes), device) {}

ConstTensorView::ConstTensorView(const void* data, DType dtype, std::initializer_list<int64_t> sizes,
                                 std::initializer_list<int64_t> strides, Device device)
    : ConstTensorView(data, dtype, Span(sizes), Span(strides), device) {}

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> sizes, Device device)
    : ConstTensorView(data, dtype, sizes, device) {}
TensorView::TensorView(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device)
    : ConstTensorView(data, dtype, sizes, device) {}
TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides,
                       Device device)
    : ConstTensorView(data, dtype, sizes, strides, device) {}
TensorView::TensorView(void* data, DType dtype, std::initializer_list<int64_t> sizes,
                       std::initializer_list<int64_t> strides, Device device)
    : ConstTensorView(data, dtype, sizes, strides, device) {}

std::span<const int64_t> ConstTensorView::sizes() const { return {sizes_, static_cast<size_t>(rank())}; }

std::span<const int64_t> ConstTensorView::strides() const { return {strides_, static_cast<size_t>(rank())}; }

int64_t ConstTensorView::num_elements() const {
  const auto all = sizes();
  if (!present() || std::find(all.begin(), all.end(), 0) != all.end()) return 0;
  return std::accumulate(sizes_, sizes_ + rank_, int64_t{1}, std::multiplies<>());
}

ConstTensorView ConstTensorView::Slice(int axis, int64_t begin, int64_t end) const {
  if (axis < 0 || axis >= rank() || begin < 0 || begin > end || end > sizes_[axis]) {
    throw InvalidArgument("slice [" + std::to_string(begin) + "," + std::to_string(end) + ") of axis " +
                          std::to_string(axis) + " of shape " + ShapeString() + ", expected a range inside it");
  }
  ConstTensorView slice = *this;
  slice.sizes_[axis] = end - begin;
  if (slice.num_elements() == 0) return slice;  // strides of an empty view may be arbitrary
  slice.data_ = static_cast<const char*>(data_) + begin * strides_[axis] * static_cast<int64_t>(SizeOf(dtype_));
  return slice;
}

TensorView TensorView::Slice(int axis, int64_t begin, int64_t end) const {
  TensorView slice;
  static_cast<ConstTensorView&>(slice) = ConstTensorView::Slice(axis, begin, end);
  return slice;
}

std::string ShapeString(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string ConstTensorView::ShapeString() const { return heed::ShapeString(sizes()); }

bool SelfOverlaps(const ConstTensorView& view) {
  const Footprint f = Measure(view);
  return !f.empty && f.self_overlaps;
}

bool Overlap(const ConstTensorView& a, const ConstTensorView& b) {
  if (!a.present() || !b.present()) return false;
  const Footprint fa = Measure(a), fb = Measure(b);
  if (fa.empty || fb.empty) return false;
  if (fa.end <= fb.begin || fb.end <= fa.begin) return false;
  // Interleaved runs: every run begins at its view's first run plus a multiple of the greatest common stride g, so
  // positions modulo g decide.
  int64_t g = 0;
  for (const auto& axis : fa.axes()) g = std::gcd(g, axis.first);
  for (const auto& axis : fb.axes()) g = std::gcd(g, axis.first);
  if (g == 0 || fa.run > g || fb.run > g) return true;
  const int64_t difference = static_cast<int64_t>(fb.run_begin - fa.run_begin);
  const int64_t offset = ((difference % g) + g) % g;
  return offset < fa.run || offset + fb.run > g;
}

}  // namespace heed
