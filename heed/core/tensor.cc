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
// The addresses of all bytes of a view that is not empty.
struct Extent {
  uintptr_t begin = 0, end = 0;
};

Extent ExtentOf(const ConstTensorView& view) {
  const int64_t element = static_cast<int64_t>(SizeOf(view.dtype()));
  Extent extent;
  extent.begin = reinterpret_cast<uintptr_t>(view.data());
  extent.end = extent.begin + static_cast<uintptr_t>(element);
  for (int i = 0; i < view.rank(); ++i) {
    if (view.size(i) == 1) continue;  // its stride is arbitrary
    const int64_t reach = view.stride(i) * element * (view.size(i) - 1);
    if (reach < 0) {
      extent.begin -= static_cast<uintptr_t>(-reach);
    } else {
      extent.end += static_cast<uintptr_t>(reach);
    }
  }
  return extent;
}

// The contiguous runs of bytes of which a view consists that is not empty.
struct Runs {
  int64_t bytes = 0;  // of one run
  // Axes above the run as (stride in bytes, size) in ascending order, from `first` to `last`. Nothing is allocated,
  // because every call of every operation comes here.
  std::array<std::pair<int64_t, int64_t>, kMaxRank> all_axes;
  size_t first = 0, last = 0;

  auto axes() const { return std::span(all_axes).subspan(first, last - first); }
};

Runs RunsOf(const ConstTensorView& view) {
  Runs runs;
  runs.bytes = static_cast<int64_t>(SizeOf(view.dtype()));
  for (int i = 0; i < view.rank(); ++i) {
    if (view.size(i) <= 1) continue;
    auto* const end = runs.all_axes.data() + runs.last++;
    *end = {std::abs(view.stride(i) * runs.bytes), view.size(i)};
    std::rotate(std::upper_bound(runs.all_axes.data(), end, *end), end, end + 1);
  }
  // The innermost axes that continue the run without a gap are merged into it.
  while (runs.first < runs.last && runs.all_axes[runs.first].first == runs.bytes) {
    runs.bytes *= runs.all_axes[runs.first++].second;
  }
  return runs;
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

// Strides of an empty view are arbitrary.
bool SelfOverlaps(const ConstTensorView& view) {
  if (view.num_elements() == 0) return false;
  const Runs runs = RunsOf(view);
  int64_t extent = runs.bytes;
  for (const auto& [stride, size] : runs.axes()) {
    if (stride < extent) return true;
    extent += stride * (size - 1);
  }
  return false;
}

bool Overlap(const ConstTensorView& a, const ConstTensorView& b) {
  if (!a.present() || !b.present() || a.num_elements() == 0 || b.num_elements() == 0) return false;
  const Extent of_a = ExtentOf(a), of_b = ExtentOf(b);
  if (of_a.end <= of_b.begin || of_b.end <= of_a.begin) return false;
  // Interleaved runs: every run begins at its view's first one plus a multiple of the greatest common stride g, so
  // positions modulo g decide.
  const Runs runs_a = RunsOf(a), runs_b = RunsOf(b);
  int64_t g = 0;
  for (const auto& axis : runs_a.axes()) g = std::gcd(g, axis.first);
  for (const auto& axis : runs_b.axes()) g = std::gcd(g, axis.first);
  if (g == 0 || runs_a.bytes > g || runs_b.bytes > g) return true;
  const int64_t difference = static_cast<int64_t>(of_b.begin - of_a.begin);
  const int64_t offset = ((difference % g) + g) % g;
  return offset < runs_a.bytes || offset + runs_b.bytes > g;
}

}  // namespace heed
