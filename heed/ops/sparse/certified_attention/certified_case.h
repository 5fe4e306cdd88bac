// Keys and queries that are difficult to bound, and the exact results of a row in double, for tests of all levels.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CASE_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/buffer.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"

namespace heed::certified_attention {

inline Options OptionsWith(double epsilon, Level level = Level::kAuto, bool causal = false,
                           std::optional<double> scale = {}) {
  Options options;
  options.epsilon = epsilon;
  options.level = level;
  options.causal = causal;
  options.scale = scale;
  return options;
}

enum class Keys {
  kNormal,
  kClustered,
  kLowRank,
  kInTime,
  kOneHuge,
  kNotFinite,
  kEqual,
  kOutlierChannel,
  kNeedle,
  kTiny
};
inline constexpr Keys kAllKeys[] = {Keys::kNormal,  Keys::kClustered, Keys::kLowRank, Keys::kInTime,
                                    Keys::kOneHuge, Keys::kNotFinite, Keys::kEqual,   Keys::kOutlierChannel,
                                    Keys::kNeedle,  Keys::kTiny};

// Fills k [B, T, H, D], drawing each head separately.
inline void FillKeys(Keys kind, Random& random, const Buffer& k) {
  const TensorView& v = k.view();
  const int64_t T = v.size(1), D = v.size(3);
  const int64_t parts = kind == Keys::kLowRank ? std::min<int64_t>(3, D) : 8;
  const double size = random.Pick({0.3, 1.0, 4.0});
  for (int64_t b = 0; b < v.size(0); ++b) {
    for (int64_t h = 0; h < v.size(2); ++h) {
      std::vector<std::vector<double>> of(static_cast<size_t>(parts), std::vector<double>(static_cast<size_t>(D)));
      for (auto& center : of) {
        for (double& x : center) x = size * random.Normal();
      }
      std::vector<double> row(static_cast<size_t>(D));
      const int64_t odd = T == 0 ? 0 : random.Integer(0, T - 1), channel = random.Integer(0, D - 1);
      for (int64_t t = 0; t < T; ++t) {
        const auto& center = of[static_cast<size_t>(random.Integer(0, parts - 1))];
        std::vector<double> weights(static_cast<size_t>(parts));
        for (double& x : weights) x = random.Normal();
        for (int64_t e = 0; e < D; ++e) {
          const auto i = static_cast<size_t>(e);
          switch (kind) {
            case Keys::kClustered: row[i] = center[i] + 0.1 * random.Normal(); break;
            case Keys::kLowRank:
              row[i] = 0.02 * random.Normal();
              for (size_t p = 0; p < of.size(); ++p) row[i] += weights[p] * of[p][i];
              break;
            case Keys::kInTime: row[i] = 0.99 * row[i] + 0.3 * size * random.Normal(); break;
            case Keys::kEqual: row[i] = of[0][i]; break;
            case Keys::kTiny: row[i] = 1e-30 * random.Normal(); break;
            default: row[i] = size * random.Normal();
          }
        }
        const auto at = static_cast<size_t>(channel);
        if (kind == Keys::kOutlierChannel) row[at] += 50;
        if (kind == Keys::kNotFinite && t == odd) {
          row[at] =
              random.Chance(0.5) ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
        }
        const double factor = kind == Keys::kOneHuge && t == odd  ? random.Pick({30.0, 1e3, 1e30})
                              : kind == Keys::kNeedle && t == odd ? 6.0
                                                                  : 1.0;
        for (int64_t e = 0; e < D; ++e) k.Set({b, t, h, e}, factor * row[static_cast<size_t>(e)]);
      }
    }
  }
}

// Fills q [B, T, H, D] with magnitudes that differ by row; some rows are zero, have one huge element, or are parallel
// to a key.
inline void FillQueries(Random& random, const ConstTensorView& k, const Buffer& q) {
  const TensorView& v = q.view();
  const int64_t group = v.size(2) / k.size(2);
  for (int64_t b = 0; b < v.size(0); ++b) {
    for (int64_t i = 0; i < v.size(1); ++i) {
      for (int64_t h = 0; h < v.size(2); ++h) {
        const double size = random.Pick({0.0, 0.2, 1.0, 1.0, 3.0, 20.0});
        const int64_t along = random.Chance(0.3) && k.size(1) > 0 ? random.Integer(0, k.size(1) - 1) : -1;
        for (int64_t e = 0; e < v.size(3); ++e) {
          double x = random.Normal();
          if (along >= 0) x = GetElement(k, std::vector<int64_t>{b, along, h / group, e});
          q.Set({b, i, h, e}, std::isfinite(x) ? std::clamp(size * x, -1e4, 1e4) : size);
        }
        const double odd = random.Pick({1e3, 1e3, 1e3, std::nan("")});
        if (random.Chance(0.05)) q.Set({b, i, h, random.Integer(0, v.size(3) - 1)}, odd);
      }
    }
  }
}

// A target with the dtype's kernel, by seed: CPUs with int8 dot products have a separate kernel on the best target.
inline std::string TargetOf(DType dtype, uint64_t seed) {
  std::vector<std::string> targets = AvailableTargets(dtype);
  targets.push_back("tiles");
  return targets[seed / 7 % targets.size()];
}

// The logits of a row in double, [visible keys].
inline std::vector<double> LogitsOf(const ConstTensorView& q, const ConstTensorView& k, int64_t b, int64_t i, int64_t h,
                                    int64_t visible, double scale) {
  const int64_t D = q.size(3), key_head = h / (q.size(2) / k.size(2));
  std::vector<double> row(static_cast<size_t>(D)), s(static_cast<size_t>(visible));
  for (int64_t e = 0; e < D; ++e) row[static_cast<size_t>(e)] = GetElement(q, std::vector<int64_t>{b, i, h, e});
  for (int64_t j = 0; j < visible; ++j) {
    const int64_t at = b * k.stride(0) + j * k.stride(1) + key_head * k.stride(2);
    double sum = 0;
    for (int64_t e = 0; e < D; ++e) {
      sum += row[static_cast<size_t>(e)] * LoadAsDouble(k.dtype(), k.data(), at + e * k.stride(3));
    }
    s[static_cast<size_t>(j)] = scale * sum;
  }
  return s;
}

// The probability of the keys whose blocks of 64 are not kept; NaN if a logit is NaN.
template <class F>
double DroppedMass(const std::vector<double>& s, const F& is_kept) {
  double most = -std::numeric_limits<double>::infinity(), dropped = 0, all = 0;
  for (const double x : s) most = std::isnan(x) ? x : std::max(most, x);
  for (size_t j = 0; j < s.size(); ++j) {
    const double weight = std::exp(s[j] - most);
    all += weight;
    if (!is_kept(static_cast<int64_t>(j) / 64)) dropped += weight;
  }
  return dropped / all;
}

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CASE_H_
