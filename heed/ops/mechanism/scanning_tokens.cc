// Which tokens of a scan count, and zeros for the others.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "heed/ops/mechanism/scanning_internal.h"

namespace heed::scanning {
namespace {

// Zeros for tokens [begin, end) of sequence b, the smallest strides inside.
void Clear(const TensorView& t, const std::string& axes, int64_t b, int64_t begin, int64_t end) {
  const auto token = static_cast<int>(axes.find('T'));
  std::vector<int> order;
  for (int axis = 1; axis < t.rank(); ++axis) order.push_back(axis);
  std::sort(order.begin(), order.end(), [&](int x, int y) {
    return std::abs(t.stride(x)) > std::abs(t.stride(y));
  });
  const auto count = [&](int axis) { return axis == token ? end - begin : t.size(axis); };
  const auto size = static_cast<int64_t>(SizeOf(t.dtype()));
  const int inner = order.back();
  order.pop_back();
  int64_t rows = 1;
  for (const int axis : order) rows *= count(axis);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = b * t.stride(0) + begin * t.stride(token), rest = row;
    for (size_t i = order.size(); i-- > 0; rest /= count(order[i])) {
      at += rest % count(order[i]) * t.stride(order[i]);
    }
    char* to = t.as<char>() + at * size;
    if (t.stride(inner) == 1) {
      std::memset(to, 0, static_cast<size_t>(count(inner) * size));
      continue;
    }
    for (int64_t i = 0; i < count(inner); ++i) {
      std::memset(to + i * t.stride(inner) * size, 0, static_cast<size_t>(size));
    }
  }
}

}  // namespace

void Ranges(const char* op, int64_t B, int64_t T, const Options& options, bool data,
            std::vector<recurrent::TokenRange>& ranges) {
  recurrent::Options of;
  of.lengths = options.lengths;
  of.starts = options.starts;
  of.cu_seqlens = options.cu_seqlens;
  // Of a tensor it looks at the first two axes alone.
  recurrent::Ranges(op, {nullptr, DType::kF32, {B, T, 0}, {0, 0, 0}}, of, data, ranges);
}

void ClearOthers(const Call& call, const TensorView& t, const std::string& axes) {
  if (!t.present() || t.num_elements() == 0) return;
  for (int64_t b = 0; b < call.sizes.B; ++b) {
    int64_t after = 0;  // of the ranges so far: ascending
    for (const recurrent::TokenRange& range : call.ranges) {
      if (range.batch != b || call.sizes.D == 0) continue;
      if (after < range.begin) Clear(t, axes, b, after, range.begin);
      after = std::max(after, range.end);
    }
    if (after < call.sizes.T) Clear(t, axes, b, after, call.sizes.T);
  }
}

}  // namespace heed::scanning
