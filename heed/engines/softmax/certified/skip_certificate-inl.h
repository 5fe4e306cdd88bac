// Bounds of the softmax sums of the rows of a block that skips values: a lower bound of the sum over tiles that a row
// keeps, and an upper bound of the sum over tiles that it skips.
//
// Compiled once per SIMD target, operand type and number of vectors. For each tile of keys a row gets the sum w of its
// exponentials relative to e^shift. The logits behind w have been rounded, by at most
//
//   gamma = (D + 8 [+ 24]) 2^-24 |scale| |q| |K| [+ 4 2^-24 |slope| distance] [+ 2 2^-24 |shift|]
//
// where |K| is the norm of all keys of the tile that the row sees, taken together, and the terms in brackets are for a
// soft cap, for ALiBi and for a bias. The true sum therefore lies between w (1 - gamma) and w (1 + 1.1 gamma) if gamma
// <= .1. A tile with a larger gamma is kept and adds nothing to the lower bound. All sums are relative to e^best, where
// best is the largest logit that counts.
//
// The tile in which a row's keys end is computed before all others and always kept, because near keys often have the
// largest probabilities. A learned sink is known from the beginning.
#if defined(HEED_ENGINES_SOFTMAX_CERTIFIED_SKIP_CERTIFICATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIP_CERTIFICATE_INL_H_
#undef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIP_CERTIFICATE_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKIP_CERTIFICATE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Returns acc + row[e]^2, summed lane by lane.
template <class D, class S, class V = hn::Vec<D>>
HWY_INLINE V AddSquares(D d, const S* HWY_RESTRICT row, size_t depth, V acc) {
  constexpr size_t N = hn::MaxLanes(D());
  size_t e = 0;
  for (; e + N <= depth; e += N) {
    const V x = hs::LoadWide(d, row + e);
    acc = hn::MulAdd(x, x, acc);
  }
  if (e < depth) {
    const V x = hs::LoadWideN(d, row + e, depth - e);
    acc = hn::MulAdd(x, x, acc);
  }
  return acc;
}

// Returns an upper bound of the norm, given a sum of squares. The sum's relative error is far below 1/1000, and squares
// below 2^-126 are lost.
inline double NormAbove(double squares) { return 1.001 * std::sqrt(squares) + 0x1p-52; }

template <size_t W>
class SkipCertificate {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  using M = hn::Mask<D>;
  static constexpr size_t N = hn::MaxLanes(D());

 public:
  // Terms that all rows share.
  struct Terms {
    double epsilon = 0, scale = 0;
    int64_t depth = 0;
    bool capped = false;
    int biases = 0;
  };
  // The keys that a row sees: `keys` of them from `begin` on, counted from the sequence's first valid key, in `tiles`
  // tiles. The last of these begins at key `last`, counted from key 0.
  struct Keys {
    int64_t begin = 0, keys = 0, tiles = 0, last = -1;
  };
  void SetRow(size_t lane, const Terms& terms, double query_squares, const Keys& keys, double sink) {
    const double roundings = static_cast<double>(terms.depth) + (terms.capped ? 32 : 8);
    unit_[lane] = static_cast<float>(1.001 * roundings * 0x1p-24 * std::abs(terms.scale) * NormAbove(query_squares));
    rounding_[lane] = terms.biases * kBiasRounding + kRounding + static_cast<double>(keys.tiles) * kTileRounding;
    epsilon_[lane] = static_cast<float>(terms.epsilon * std::max(1 - 4 * rounding_[lane], 0.0));
    per_key_[lane] = static_cast<float>(1 / static_cast<double>(std::max<int64_t>(keys.keys, 1)));
    begin_[lane] = static_cast<float>(keys.begin);
    last_[lane] = static_cast<int32_t>(keys.last);
    most_ = std::max(most_, keys.last);
    last_best_[lane] = std::numeric_limits<float>::lowest();
    last_known_[lane] = 0;
    if (const auto best = static_cast<float>(sink); std::isfinite(best)) {
      last_best_[lane] = best;
      last_known_[lane] = static_cast<float>((1 - 1e-6) * std::exp(sink - static_cast<double>(best)));
    } else if (std::isnan(sink)) {
      last_known_[lane] = best;  // a NaN sink makes every comparison false: no tile is skipped
    }
  }
  // Marks a lane without a row.
  void SetNoRow(size_t lane) { SetRow(lane, {}, 0, {}, -std::numeric_limits<double>::infinity()); }

  // Restores the state after the last tiles, before all others.
  void Begin() {
    std::copy(last_best_, last_best_ + W, best_);
    std::copy(last_known_, last_known_ + W, known_);
    std::fill(left_, left_ + W, 0.0f);
  }

  // Adds the last tile of a row: its largest logit, the sum of its exponentials, and the norm of the keys that the row
  // sees. `more` is added to gamma.
  void AddLastTile(size_t lane, float max, float weight, double norm, double more) {
    const double gamma = static_cast<double>(unit_[lane]) * norm + more;
    if (!(gamma <= kMostGamma && std::isfinite(max))) return;
    const float own = weight * static_cast<float>(1 - gamma);
    if (last_known_[lane] == 0) {
      last_best_[lane] = max;
      last_known_[lane] = own;
      return;
    }
    const auto at = [&](float logit, float best) {
      return std::exp(static_cast<double>(logit) - static_cast<double>(best));
    };
    const float best = std::max(last_best_[lane], max);
    const double known = static_cast<double>(last_known_[lane]) * at(last_best_[lane], best);
    last_known_[lane] = static_cast<float>((1 - 1e-6) * (known + static_cast<double>(own) * at(max, best)));
    last_best_[lane] = best;
  }

  // Returns which of the rows from `lane` on see keys of the tile that begins at `begin`.
  HWY_INLINE M Sees(size_t lane, int64_t begin) const {
    const hn::RebindToSigned<D> di;
    return hn::RebindMask(D(), hn::Ge(hn::Load(di, last_ + lane), hn::Set(di, static_cast<int32_t>(begin))));
  }

  // Returns whether any row sees keys behind the tile that begins at `begin`.
  bool AnyGoesOnAfter(int64_t begin) const { return begin < most_; }

  // Returns the part of gamma that comes from products, for the rows from `lane` on and keys of these norms.
  HWY_INLINE V Gamma(size_t lane, V norm) const { return hn::Mul(hn::Load(D(), unit_ + lane), norm); }

  // Decides about a tile that begins at key `begin` and ends `end` keys behind the sequence's first valid one. Returns
  // which of the rows from `lane` on skip it, among those that see any of it.
  HWY_INLINE M Decide(size_t lane, int64_t begin, int64_t end, V gamma, M sees, V max, V shift, V weight) {
    const D d;
    const hn::RebindToSigned<D> di;
    const V one = hn::Set(d, 1.0f);
    const M before_last =
        hn::RebindMask(d, hn::Lt(hn::Set(di, static_cast<int32_t>(begin)), hn::Load(di, last_ + lane)));
    const M close = hn::And(before_last, hn::Le(gamma, hn::Set(d, static_cast<float>(kMostGamma))));
    const V old = hn::Load(d, best_ + lane);
    // If the shift comes from a larger logit whose error is unknown, it may have underflowed the exponentials.
    const V largest = hn::Max(old, max);
    const M known = hn::And(hn::And(close, sees), hn::Le(shift, largest));
    const V best = hn::IfThenElse(known, largest, old);
    const V scale = hs::Exp(d, hn::Sub(old, best));
    const V sum = hn::Mul(weight, hs::Exp(d, hn::Sub(shift, best)));
    const V factor = hn::MulAdd(gamma, hn::Set(d, 1.1f), one);
    // The bound of what is skipped never becomes 0 by underflow.
    const V had = hn::Load(d, left_ + lane);
    const V left = hn::IfThenZeroElse(hn::Eq(had, hn::Zero(d)), hn::Max(hn::Mul(had, scale), hn::Set(d, kLeast)));
    const V with = hn::Add(left, hn::MulAdd(sum, factor, hn::Set(d, kLeast)));
    const V kept = hn::Mul(hn::Load(d, known_ + lane), scale);
    const V so_far = hn::Max(hn::Sub(hn::Set(d, static_cast<float>(end)), hn::Load(d, begin_ + lane)), hn::Zero(d));
    const V share = hn::Min(one, hn::Mul(so_far, hn::Load(d, per_key_ + lane)));
    const V limit = hn::Mul(hn::Mul(hn::Load(d, epsilon_ + lane), share), hn::Add(kept, with));
    const M out = hn::And(known, hn::Le(with, limit));
    const V more = hn::IfThenElseZero(known, hn::Mul(sum, hn::Sub(one, gamma)));
    hn::Store(best, d, best_ + lane);
    hn::Store(hn::IfThenElse(out, with, left), d, left_ + lane);
    hn::Store(hn::IfThenElse(out, kept, hn::Add(kept, more)), d, known_ + lane);
    return out;
  }

  // Returns an upper bound of the share of probability that a row has skipped.
  float BoundOf(size_t lane) const {
    if (left_[lane] == 0) return 0;
    const double left = static_cast<double>(left_[lane]) * (1 + rounding_[lane]);
    const double kept = static_cast<double>(known_[lane]) * (1 - rounding_[lane]);
    const double bound = left / (kept + left);
    const auto rounded = static_cast<float>(bound);
    return static_cast<double>(rounded) < bound ? std::nextafter(rounded, 1.0f) : rounded;
  }

 private:
  static constexpr double kMostGamma = .1;
  // kRounding bounds the relative errors of exponentials (3 ulp), of their arguments (at most 88 apart where the result
  // is not flushed) and of sums of up to 128 terms, twice over. kTileRounding bounds the error that each tile adds, a
  // dozen roundings.
  static constexpr double kRounding = 4e-5, kTileRounding = 0x1p-20;
  // Bounds 2 2^-24 times the distance of a logit from the shift, which is at most 88.
  static constexpr double kBiasRounding = 1.1e-5;
  // Bounds the exponentials that are flushed to zero: at most 128 of 2^-126.
  static constexpr float kLeast = 0x1p-100f;

  HWY_ALIGN float unit_[W], epsilon_[W], per_key_[W], begin_[W];
  HWY_ALIGN float last_best_[W], last_known_[W];  // from the last tiles
  HWY_ALIGN float best_[W], known_[W], left_[W];
  HWY_ALIGN int32_t last_[W];
  double rounding_[W];
  int64_t most_ = -1;  // of last_
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKIP_CERTIFICATE_INL_H_
