// A check of a sketch against its keys, for tests: in double, from the comment of SketchBlocks alone.
#ifndef HEED_STATE_SKETCH_CASE_H_
#define HEED_STATE_SKETCH_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "heed/core/tensor.h"
#include "heed/state/kv_view.h"

namespace heed {

// Describes the first error; empty if none exists. Either rounding is accepted where x / step is a half.
inline std::string SketchDifference(const KVView& view) {
  const SketchBlocks& sketch = view.sketch;
  for (int64_t b = 0; b < view.batch; ++b) {
    const int64_t length = view.lengths[static_cast<size_t>(b)];
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t h = 0; h < view.heads; ++h) {
        const std::string where =
            " of token " + std::to_string(t) + ", head " + std::to_string(h) + " of sequence " + std::to_string(b);
        const std::byte* const page = view.pages[b][t / view.page_tokens];
        const int64_t in_page = t % view.page_tokens, in_block = in_page % 64;
        const std::byte* const block = sketch.At(page, h, in_page);
        const auto number = [&](int64_t at, int64_t i) {
          float x;
          std::memcpy(&x, block + at + 4 * i, 4);
          return static_cast<double>(x);
        };
        const auto key = [&](int64_t token, int64_t e) {
          return LoadAsDouble(
              view.dtype,
              page + view.key.begin + h * view.key.head_stride + (in_page + token - t) * view.key.token_stride, e);
        };
        bool finite = true;
        double most = 0, sum = 0;
        for (int64_t e = 0; e < view.dim; ++e) {
          finite = finite && std::isfinite(key(t, e));
          most = std::max(most, std::abs(key(t, e)));
        }
        const double step = number(sketch.step, in_block), error = number(sketch.error, in_block);
        for (int64_t e = 0; e < view.dim; ++e) {
          const int n = std::to_integer<int>(block[e / 4 * 256 + in_block * 4 + e % 4]) - 128;
          const double left = finite ? key(t, e) - step * n : n;
          if (std::abs(n) > 127 || std::abs(left) > (finite ? 0.50002 * step : 0.0)) return "bytes" + where;
          sum += left * left;
        }
        if (!finite) {
          if (!std::isinf(step) || !std::isinf(error)) return "step or error" + where;
        } else {
          const double largest = std::max(most / 127, std::ldexp(1.0, -126));
          if (std::abs(step - (most == 0 ? 1 : largest)) > 1e-7 * step) return "step" + where;
          const double norm = std::sqrt(sum);
          if (error < norm || error > std::max(norm * 1.00001, std::ldexp(1.0, -126))) return "error" + where;
        }
        if (in_block != 63) continue;
        for (int64_t e = 0; e < view.dim; ++e) {
          double least = key(t, e), greatest = least, total = 0, size = 0;
          bool nan = false;
          for (int64_t j = t - 63; j <= t; ++j) {
            const double x = key(j, e);
            nan = nan || std::isnan(x);
            least = std::min(least, x);
            greatest = std::max(greatest, x);
            total += x;
            size += std::abs(x);
          }
          const double min = number(sketch.min, e), max = number(sketch.max, e), mean = number(sketch.mean, e);
          if (nan) {
            if (!std::isnan(min) || !std::isnan(max) || !std::isnan(mean)) return "statistics with NaN" + where;
            continue;
          }
          if (min != least || max != greatest) return "min or max" + where;
          const double expected = total / 64;
          if (std::isfinite(expected) ? std::abs(mean - expected) >
                                            std::max(6e-8 * std::abs(expected) + 1e-15 * size, std::ldexp(1.0, -126))
                                      : !(mean == expected || (std::isnan(mean) && std::isnan(expected)))) {
            return "mean" + where;
          }
        }
      }
    }
  }
  return "";
}

}  // namespace heed

#endif  // HEED_STATE_SKETCH_CASE_H_
