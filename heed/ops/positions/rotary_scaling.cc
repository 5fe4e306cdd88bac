// Scalings of rotary position encoding.
#include "heed/ops/positions/rotary_scaling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "heed/mechanism/check_internal.h"

namespace heed {
namespace {

using mechanism::Fail;
using mechanism::Text;

constexpr char kOp[] = "rotary";
constexpr const char* kNames[] = {"default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"};

constexpr unsigned Bit(RopeType type) { return 1u << static_cast<unsigned>(type); }

constexpr unsigned kYarn = Bit(RopeType::kYarn);
constexpr unsigned kLlama3 = Bit(RopeType::kLlama3);
constexpr unsigned kLongrope = Bit(RopeType::kLongrope);
constexpr unsigned kNeedFactor = Bit(RopeType::kLinear) | Bit(RopeType::kNtk) | Bit(RopeType::kDynamic) | kLlama3;
constexpr unsigned kEvery = ~0u;

// A numeric field: the types that use it, the types that require it, and its range.
struct Number {
  const char* name;
  std::optional<double> RotaryScaling::* value;
  unsigned used_by, needed_by;
  bool zero_allowed = false;
};

constexpr Number kNumbers[] = {
    {"scaling.factor", &RotaryScaling::factor, kNeedFactor | kYarn | kLongrope, kNeedFactor},
    {"scaling.original_max_position_embeddings", &RotaryScaling::original_max_position_embeddings, kEvery, 0},
    {"scaling.max_position_embeddings", &RotaryScaling::max_position_embeddings, kEvery, 0},
    {"scaling.attention_factor", &RotaryScaling::attention_factor, kYarn | kLongrope, 0},
    {"scaling.beta_fast", &RotaryScaling::beta_fast, kYarn, 0},
    {"scaling.beta_slow", &RotaryScaling::beta_slow, kYarn, 0},
    {"scaling.mscale", &RotaryScaling::mscale, kYarn, 0, true},
    {"scaling.mscale_all_dim", &RotaryScaling::mscale_all_dim, kYarn, 0, true},
    {"scaling.low_freq_factor", &RotaryScaling::low_freq_factor, kLlama3, kLlama3},
    {"scaling.high_freq_factor", &RotaryScaling::high_freq_factor, kLlama3, kLlama3},
};

std::string OfType(RopeType type) { return std::string(" for rope_type '") + kNames[static_cast<size_t>(type)] + "'"; }

[[noreturn]] void FailUnused(const char* name, RopeType type) { Fail(kOp, name, "is given", "none" + OfType(type)); }

void CheckFactors(const char* name, const std::vector<double>& factors, RopeType type, int64_t dim) {
  if (type != RopeType::kLongrope) {
    if (!factors.empty()) FailUnused(name, type);
    return;
  }
  if (static_cast<int64_t>(factors.size()) != dim / 2) {
    Fail(kOp, name, "has " + std::to_string(factors.size()) + " numbers", std::to_string(dim / 2) + ", half of dim");
  }
  for (const double factor : factors) {
    if (!(factor > 0) || std::isinf(factor)) {
      Fail(kOp, name, "contains " + Text(factor), "finite numbers above 0");
    }
  }
}

void Check(int64_t dim, double base, const RotaryScaling& s) {
  if (dim < 2 || dim % 2 != 0) {
    Fail(kOp, "dim", "is " + std::to_string(dim), "an even number of at least 2");
  }
  if (!(base > 1) || std::isinf(base)) {
    Fail(kOp, "base", "is " + Text(base), "a finite number above 1");
  }
  if (static_cast<size_t>(s.rope_type) >= std::size(kNames)) {
    Fail(kOp, "scaling.rope_type", "is unknown", "a RopeType");
  }
  const unsigned type = Bit(s.rope_type);
  for (const Number& number : kNumbers) {
    const std::optional<double>& value = s.*number.value;
    if (!value) {
      if (number.needed_by & type) Fail(kOp, number.name, "is missing", "a number" + OfType(s.rope_type));
      continue;
    }
    if (!(number.used_by & type)) FailUnused(number.name, s.rope_type);
    const bool in_range = number.zero_allowed ? *value >= 0 : *value > 0;
    if (!in_range || std::isinf(*value)) {
      Fail(kOp, number.name, "is " + Text(*value),
           number.zero_allowed ? "a finite number of at least 0" : "a finite number above 0");
    }
  }
  if (s.truncate && s.rope_type != RopeType::kYarn) FailUnused("scaling.truncate", s.rope_type);
  CheckFactors("scaling.short_factor", s.short_factor, s.rope_type, dim);
  CheckFactors("scaling.long_factor", s.long_factor, s.rope_type, dim);
}

// L0. It must be above 1 where its logarithm is a divisor.
double OriginalLength(const RotaryScaling& s) {
  constexpr char kName[] = "scaling.original_max_position_embeddings";
  const auto& given =
      s.original_max_position_embeddings ? s.original_max_position_embeddings : s.max_position_embeddings;
  if (!given) Fail(kOp, kName, "is missing", "a number" + OfType(s.rope_type));
  if (s.rope_type == RopeType::kLongrope && !(*given > 1)) Fail(kOp, kName, "is " + Text(*given), "a number above 1");
  return *given;
}

// s of yarn and longrope, which a config may leave out to be derived.
double Factor(const RotaryScaling& s) {
  if (s.factor) return *s.factor;
  if (!s.max_position_embeddings) {
    Fail(kOp, "scaling.factor", "is missing", "it or max_position_embeddings" + OfType(s.rope_type));
  }
  return *s.max_position_embeddings / OriginalLength(s);
}

std::vector<double> Unscaled(int64_t dim, double base) {
  std::vector<double> w(static_cast<size_t>(dim / 2));
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = std::pow(base, -2 * static_cast<double>(i) / static_cast<double>(dim));
  }
  return w;
}

// The base of ntk and dynamic. For dim = 2 it is infinite, which gives the only frequency its right value 1.
double StretchedBase(int64_t dim, double base, double by) {
  const double d = static_cast<double>(dim);
  return by == 1 ? base : base * std::pow(by, d / (d - 2));
}

double YarnMagnitude(double factor, double weight) { return factor <= 1 ? 1 : 0.1 * weight * std::log(factor) + 1; }

void ApplyYarn(int64_t dim, double base, const RotaryScaling& s, RotaryFrequencies& f) {
  const double beta_fast = s.beta_fast.value_or(32);
  const double beta_slow = s.beta_slow.value_or(1);
  if (beta_fast < beta_slow) {
    Fail(kOp, "scaling.beta_fast", "is " + Text(beta_fast), "at least beta_slow, " + Text(beta_slow));
  }
  const double d = static_cast<double>(dim), factor = Factor(s);
  const double length = OriginalLength(s);
  // The pair that makes this many turns within the original length.
  const auto pair_of = [&](double turns) {
    return d * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double low = pair_of(beta_fast), high = pair_of(beta_slow);
  if (s.truncate.value_or(true)) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < f.frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    double& w = f.frequencies[i];
    w = w / factor * ramp + w * (1 - ramp);
  }
  const bool both = s.mscale.value_or(0) != 0 && s.mscale_all_dim.value_or(0) != 0;
  f.attention_factor = s.attention_factor.value_or(
      both ? YarnMagnitude(factor, *s.mscale) / YarnMagnitude(factor, *s.mscale_all_dim) : YarnMagnitude(factor, 1));
}

void ApplyLlama3(const RotaryScaling& s, RotaryFrequencies& f) {
  const double low = *s.low_freq_factor, high = *s.high_freq_factor;
  if (!(low < high)) {
    Fail(kOp, "scaling.high_freq_factor", "is " + Text(high), "more than low_freq_factor, " + Text(low));
  }
  const double length = OriginalLength(s);
  for (double& w : f.frequencies) {
    const double turns = length * w / (2 * std::numbers::pi);  // L0 / wavelength
    const double t = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    w = (1 - t) * w / *s.factor + t * w;
  }
}

void ApplyLongrope(const RotaryScaling& s, int64_t length, RotaryFrequencies& f) {
  const double original = OriginalLength(s);
  const auto& factors = static_cast<double>(length) > original ? s.long_factor : s.short_factor;
  for (size_t i = 0; i < f.frequencies.size(); ++i) {
    f.frequencies[i] /= factors[i];
  }
  if (s.attention_factor) {
    f.attention_factor = *s.attention_factor;
    return;
  }
  const double factor = Factor(s);
  f.attention_factor = factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
}

}  // namespace

bool DependsOnLength(RopeType type) { return type == RopeType::kDynamic || type == RopeType::kLongrope; }

RopeType RopeTypeFromName(std::string_view name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    Fail(kOp, "scaling.rope_type", "is '" + std::string(name) + "'",
         "'default', 'linear', 'ntk', 'dynamic', 'yarn', 'llama3' or "
         "'longrope'");
  }
  return static_cast<RopeType>(found - std::begin(kNames));
}

RotaryFrequencies ScaledRotaryFrequencies(int64_t dim, double base, const RotaryScaling& scaling, int64_t length) {
  Check(dim, base, scaling);
  double stretch = 1;  // of the base
  if (scaling.rope_type == RopeType::kNtk) stretch = *scaling.factor;
  if (scaling.rope_type == RopeType::kDynamic) {
    const double original = OriginalLength(scaling);
    const double ratio = static_cast<double>(length) / original;
    stretch = 1 + *scaling.factor * (std::max(ratio, 1.0) - 1);
  }
  RotaryFrequencies f;
  f.frequencies = Unscaled(dim, StretchedBase(dim, base, stretch));
  switch (scaling.rope_type) {
    case RopeType::kDefault:
    case RopeType::kNtk:
    case RopeType::kDynamic: break;
    case RopeType::kLinear:
      for (double& w : f.frequencies) w /= *scaling.factor;
      break;
    case RopeType::kYarn: ApplyYarn(dim, base, scaling, f); break;
    case RopeType::kLlama3: ApplyLlama3(scaling, f); break;
    case RopeType::kLongrope: ApplyLongrope(scaling, length, f); break;
  }
  return f;
}

}  // namespace heed
