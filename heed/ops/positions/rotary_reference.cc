// Rotary position encoding from its formulas, one element at a time.
//
// Written from the definitions, independent of rotary.cc and rotary_scaling.cc, with which it shares only the structs.
#include <cmath>
#include <cstdint>

#include "heed/ops/positions/rotary.h"

namespace heed {
namespace {

using Real = long double;

const Real kTwoPi = 2 * std::acos(Real{-1});

Real Original(const RotaryScaling& s) {
  return s.original_max_position_embeddings.value_or(s.max_position_embeddings.value_or(0));
}

Real Factor(const RotaryScaling& s) { return s.factor ? *s.factor : Real{*s.max_position_embeddings} / Original(s); }

Real Limited(Real x, Real low, Real high) { return x < low ? low : x > high ? high : x; }

// 1 where YaRN interpolates fully, 0 where it leaves the frequency unchanged.
Real YarnRamp(Real i, Real d, Real base, const RotaryScaling& s) {
  const auto dimension = [&](Real rotations) {
    return d * std::log(Original(s) / (rotations * kTwoPi)) / (2 * std::log(base));
  };
  Real low = dimension(s.beta_fast.value_or(32));
  Real high = dimension(s.beta_slow.value_or(1));
  if (s.truncate.value_or(true)) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  if (low < 0) low = 0;
  if (high > d - 1) high = d - 1;
  return Limited((i - low) / (high == low ? Real{0.001} : high - low), 0, 1);
}

Real Frequency(int64_t pair, int64_t dim, Real base, const RotaryScaling& s, Real length) {
  const Real i = static_cast<Real>(pair), d = static_cast<Real>(dim);
  const Real w = std::pow(base, -2 * i / d);
  const auto longer_base = [&](Real by) {
    return pair == 0 ? 1 : std::pow(base * std::pow(by, d / (d - 2)), -2 * i / d);
  };
  switch (s.rope_type) {
    case RopeType::kDefault: return w;
    case RopeType::kLinear: return w / *s.factor;
    case RopeType::kNtk: return longer_base(*s.factor);
    case RopeType::kDynamic: {
      const Real longest = length > Original(s) ? length : Original(s);
      return longer_base(*s.factor * longest / Original(s) - (*s.factor - 1));
    }
    case RopeType::kYarn: {
      const Real ramp = YarnRamp(i, d, base, s);
      return ramp * w / Factor(s) + (1 - ramp) * w;
    }
    case RopeType::kLlama3: {
      const Real wavelength = kTwoPi / w, low = *s.low_freq_factor, high = *s.high_freq_factor;
      if (wavelength < Original(s) / high) return w;
      if (wavelength > Original(s) / low) return w / *s.factor;
      const Real t = (Original(s) / wavelength - low) / (high - low);
      return (1 - t) * w / *s.factor + t * w;
    }
    case RopeType::kLongrope: {
      const auto& factors = length > Original(s) ? s.long_factor : s.short_factor;
      return w / factors[static_cast<size_t>(pair)];
    }
  }
  return 0;
}

Real Amplitude(const RotaryScaling& s) {
  const auto magnitude = [&](Real weight) { return Factor(s) > 1 ? weight * std::log(Factor(s)) / 10 + 1 : 1; };
  if (s.attention_factor) return *s.attention_factor;
  if (s.rope_type == RopeType::kYarn) {
    const Real a = s.mscale.value_or(0), b = s.mscale_all_dim.value_or(0);
    return a > 0 && b > 0 ? magnitude(a) / magnitude(b) : magnitude(1);
  }
  if (s.rope_type == RopeType::kLongrope && Factor(s) > 1)
    return std::sqrt(1 + std::log(Factor(s)) / std::log(Original(s)));
  return 1;
}

}  // namespace

void RotaryReference(const ConstTensorView& x, const ConstTensorView& positions, RotaryPairs pairs,
                     const RotaryOptions& options, const TensorView& y) {
  const int r = x.rank();
  const int64_t B = r == 4 ? x.size(0) : 1, T = x.size(r - 3);
  const int64_t H = x.size(r - 2), D = x.size(r - 1);
  const int64_t dim = options.dim.value_or(D);
  const auto position = [&](int64_t b, int64_t t) {
    const int64_t at =
        positions.rank() == 2 ? b * positions.stride(0) + t * positions.stride(1) : t * positions.stride(0);
    return LoadAsInt64(positions.dtype(), positions.data(), at);
  };
  const auto offset = [&](const ConstTensorView& view, int64_t b, int64_t t, int64_t h, int64_t d) {
    return (r == 4 ? b * view.stride(0) : 0) + t * view.stride(r - 3) + h * view.stride(r - 2) + d * view.stride(r - 1);
  };
  for (int64_t b = 0; b < B; ++b) {
    int64_t length = 0;
    for (int64_t t = 0; t < T; ++t) {
      if (position(b, t) >= length) length = position(b, t) + 1;
    }
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < D; ++d) {
        const bool halves = pairs == RotaryPairs::kHalfSplit;
        const int64_t pair = halves ? d % (dim / 2) : d / 2;
        const bool first = halves ? d < dim / 2 : d % 2 == 0;
        const int64_t step = halves ? dim / 2 : 1;
        const int64_t partner = first ? d + step : d - step;
        Real c = 1, s = 0;
        if (d < dim) {
          const Real angle = static_cast<Real>(position(b, t)) *
                             Frequency(pair, dim, options.base, options.scaling, static_cast<Real>(length));
          c = Amplitude(options.scaling) * std::cos(angle);
          s = Amplitude(options.scaling) * std::sin(angle);
          if (first != options.inverse) s = -s;
        }
        for (int64_t h = 0; h < H; ++h) {
          Real value = LoadAsDouble(x.dtype(), x.data(), offset(x, b, t, h, d));
          if (d < dim) {
            value = value * c + s * LoadAsDouble(x.dtype(), x.data(), offset(x, b, t, h, partner));
          }
          StoreDouble(y.dtype(), y.data(), offset(y, b, t, h, d), static_cast<double>(value));
        }
      }
    }
  }
}

}  // namespace heed
