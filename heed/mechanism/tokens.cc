// The valid tokens of a call, and zeros for the others.
#include "heed/mechanism/tokens_internal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"

namespace heed::mechanism {
namespace {

// Reads integers; empty if the tensor is absent, or described without its data.
std::vector<int64_t> Integers(const char* op, const char* name, const ConstTensorView& t, int64_t size, bool data) {
  if (!t.present()) return {};
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  }
  if (t.rank() != 1 || (size >= 0 && t.size(0) != size)) {
    Fail(op, name, "has shape " + t.ShapeString(), size >= 0 ? ShapeString(Axes{size}) : "[N + 1]");
  }
  if (!data && t.data() == nullptr) return {};
  mechanism::CheckReadable(op, name, t);
  std::vector<int64_t> values;
  for (int64_t i = 0; i < t.size(0); ++i) {
    values.push_back(LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)));
  }
  return values;
}

std::string At(const char* name, size_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

// Clears tokens [begin, end) of sequence b, with the smallest strides innermost.
void Clear(const TensorView& t, int token, int64_t b, int64_t begin, int64_t end) {
  std::vector<int> order;
  for (int axis = 1; axis < t.rank(); ++axis) order.push_back(axis);
  std::sort(order.begin(), order.end(), [&](int x, int y) { return std::abs(t.stride(x)) > std::abs(t.stride(y)); });
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

ConstTensorView OneToken(const char* op, const char* name, const ConstTensorView& t) {
  if (!t.present() || t.rank() < 2) return t;
  if (t.rank() == kMaxRank) {
    Fail(op, name, "has shape " + t.ShapeString(), "one token of each sequence: [B, H, ...]");
  }
  Axes sizes = {t.size(0), 1}, strides = {t.stride(0), 0};
  for (int axis = 1; axis < t.rank(); ++axis) {
    sizes.Append(t.size(axis));
    strides.Append(t.stride(axis));
  }
  return {t.data(), t.dtype(), sizes, strides, t.device()};
}

void ClearOthers(const std::vector<TokenRange>& ranges, const TensorView& t, int token_axis) {
  if (!t.present() || t.num_elements() == 0) return;
  ForOthers(ranges, t.size(0), t.size(token_axis),
            [&](int64_t b, int64_t begin, int64_t end) { Clear(t, token_axis, b, begin, end); });
}

void Ranges(const char* op, const char* name, const ConstTensorView& t, int token_axis, const Sequences& options,
            bool data, std::vector<TokenRange>& ranges) {
  const int64_t B = t.size(0), T = t.size(token_axis);
  ranges.clear();
  if (options.cut != nullptr) {
    ranges = options.cut->ranges;
    return;
  }
  if (options.cu_seqlens.present()) {
    if (options.lengths.present() || options.starts.present()) {
      Fail(op, options.lengths.present() ? "lengths" : "starts", "is given", "none beside cu_seqlens");
    }
    if (B != 1) {
      Fail(op, name, "has shape " + t.ShapeString(), "a leading axis of 1 with cu_seqlens");
    }
    auto bounds = Integers(op, "cu_seqlens", options.cu_seqlens, -1, data);
    if (const int64_t count = options.cu_seqlens.size(0); bounds.empty() && count > 0) {
      for (int64_t i = 0; i < count; ++i) {
        bounds.push_back(T / std::max<int64_t>(count - 1, 1) * i);
      }
    }
    if (bounds.empty() || bounds[0] != 0) {
      Fail(op, "cu_seqlens", bounds.empty() ? "is empty" : "begins with " + std::to_string(bounds[0]), "0");
    }
    for (size_t i = 1; i < bounds.size(); ++i) {
      if (bounds[i] < bounds[i - 1] || bounds[i] > T) {
        Fail(op, At("cu_seqlens", i).c_str(), "is " + std::to_string(bounds[i]),
             std::to_string(bounds[i - 1]) + " to T = " + std::to_string(T));
      }
      ranges.push_back({0, bounds[i - 1], bounds[i]});
    }
    return;
  }
  const auto lengths = Integers(op, "lengths", options.lengths, B, data);
  const auto starts = Integers(op, "starts", options.starts, B, data);
  for (size_t b = 0; b < static_cast<size_t>(B); ++b) {
    const int64_t end = lengths.empty() ? T : lengths[b];
    const int64_t begin = starts.empty() ? 0 : starts[b];
    const std::string expected = "0 to T = " + std::to_string(T);
    if (end < 0 || end > T) {
      Fail(op, At("lengths", b).c_str(), "is " + std::to_string(end), expected);
    }
    if (begin < 0 || begin > T) {
      Fail(op, At("starts", b).c_str(), "is " + std::to_string(begin), expected);
    }
    ranges.push_back({static_cast<int64_t>(b), std::min(begin, end), end});
  }
}

}  // namespace heed::mechanism
