// What the rows of a block know of their weights while they leave values out: from below of those that they keep, from
// above of those that they do not.
//
// Compiled once per SIMD target, operand type and number of vectors. Of a tile of keys a row learns the sum w of its
// weights, relative to e^shift. Its logits have been rounded: by at most
//
//   gamma = (D + 8) 2^-24 |scale| |q| |K|      |K|: the norm of the tile's keys, all of them together,
//
// so that the sum in truth lies between w (1 - gamma) and w (1 + 1.1 gamma) as long as gamma <= .1; a tile of which no
// more is known is kept, and counts as nothing. All sums are relative to e^best, the largest logit that counts.
//
// The tile in which a row's keys end is weighed before all others, and always kept: what is near often weighs most.
#if defined(HEED_ENGINES_SOFTMAX_SKIP_CERTIFICATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_SKIP_CERTIFICATE_INL_H_
#undef HEED_ENGINES_SOFTMAX_SKIP_CERTIFICATE_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_SKIP_CERTIFICATE_INL_H_
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

// acc += row[e]^2, lane by lane.
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

// A norm from a sum of squares, from above: sums are off by far less than a thousandth, and squares below 2^-126 are lost.
inline double NormAbove(double squares) { return 1.001 * std::sqrt(squares) + 0x1p-52; }

template <size_t W>
class SkipCertificate {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  using M = hn::Mask<D>;
  static constexpr size_t N = hn::MaxLanes(D());

 public:
  // A row that sees `keys` keys, in `tiles` tiles of which the last begins at `last`.
  void SetRow(size_t lane, double epsilon, double scale, double query_squares, int64_t depth, int64_t keys, int64_t tiles,
              int64_t last) {
    const double unit = (static_cast<double>(depth) + 8) * 0x1p-24 * std::abs(scale) * NormAbove(query_squares);
    unit_[lane] = static_cast<float>(1.001 * unit);
    rounding_[lane] = kRounding + static_cast<double>(tiles) * kTileRounding;
    epsilon_[lane] = static_cast<float>(epsilon * std::max(1 - 4 * rounding_[lane], 0.0));
    per_key_[lane] = static_cast<float>(1 / static_cast<double>(std::max<int64_t>(keys, 1)));
    last_[lane] = static_cast<int32_t>(last);
    most_ = std::max(most_, last);
    last_best_[lane] = std::numeric_limits<float>::lowest();
    last_known_[lane] = 0;
  }
  // A lane that no row is in.
  void SetNoRow(size_t lane) { SetRow(lane, 0, 0, 0, 0, 0, 0, -1); }

  // Nothing has been weighed but last tiles.
  void Begin() {
    std::copy(last_best_, last_best_ + W, best_);
    std::copy(last_known_, last_known_ + W, known_);
    std::fill(left_, left_ + W, 0.0f);
  }

  // The last tile of a row, of which it sees keys with this sum of squares: its largest logit, and its weights.
  void WeighLast(size_t lane, float max, float weight, double key_squares) {
    const double gamma = static_cast<double>(unit_[lane]) * NormAbove(key_squares);
    if (!(gamma <= kMostGamma && std::isfinite(max))) return;
    last_best_[lane] = max;
    last_known_[lane] = weight * static_cast<float>(1 - gamma);
  }

  // The rows from `lane` on that see keys of the tile that begins here.
  HWY_INLINE M Sees(size_t lane, int64_t begin) const {
    const hn::RebindToSigned<D> di;
    return hn::RebindMask(D(), hn::Ge(hn::Load(di, last_ + lane), hn::Set(di, static_cast<int32_t>(begin))));
  }

  // Whether any row sees keys behind the tile that begins here.
  bool AnyGoesOnAfter(int64_t begin) const { return begin < most_; }

  // A tile that begins at `begin`, `end` keys from where those of the sequence do to its end, with keys of this norm: the
  // rows from `lane` on that leave it out.
  HWY_INLINE M Weigh(size_t lane, int64_t begin, int64_t end, float norm, V max, V shift, V weight) {
    const D d;
    const hn::RebindToSigned<D> di;
    const V one = hn::Set(d, 1.0f);
    const V gamma = hn::Mul(hn::Load(d, unit_ + lane), hn::Set(d, norm));
    const M before_last = hn::RebindMask(d, hn::Lt(hn::Set(di, static_cast<int32_t>(begin)), hn::Load(di, last_ + lane)));
    const M close = hn::And(before_last, hn::Le(gamma, hn::Set(d, static_cast<float>(kMostGamma))));
    const V old = hn::Load(d, best_ + lane);
    // A larger logit of which less is known may have taken all digits of the weights.
    const V largest = hn::Max(old, max);
    const M known = hn::And(close, hn::Le(shift, largest));
    const V best = hn::IfThenElse(known, largest, old);
    const V scale = hs::Exp(d, hn::Sub(old, best));
    const V sum = hn::Mul(weight, hs::Exp(d, hn::Sub(shift, best)));
    const V factor = hn::MulAdd(gamma, hn::Set(d, 1.1f), one);
    // What is left out does not vanish, however little it is.
    const V had = hn::Load(d, left_ + lane);
    const V left = hn::IfThenZeroElse(hn::Eq(had, hn::Zero(d)), hn::Max(hn::Mul(had, scale), hn::Set(d, kLeast)));
    const V with = hn::Add(left, hn::MulAdd(sum, factor, hn::Set(d, kLeast)));
    const V kept = hn::Mul(hn::Load(d, known_ + lane), scale);
    const V share = hn::Min(one, hn::Mul(hn::Set(d, static_cast<float>(end)), hn::Load(d, per_key_ + lane)));
    const V limit = hn::Mul(hn::Mul(hn::Load(d, epsilon_ + lane), share), hn::Add(kept, with));
    const M out = hn::And(known, hn::Le(with, limit));
    const V more = hn::IfThenElseZero(known, hn::Mul(sum, hn::Sub(one, gamma)));
    hn::Store(best, d, best_ + lane);
    hn::Store(hn::IfThenElse(out, with, left), d, left_ + lane);
    hn::Store(hn::IfThenElse(out, kept, hn::Add(kept, more)), d, known_ + lane);
    return out;
  }

  // At least the share that a row has left out.
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
  // Relative errors: of exponentials (3 ulp), of their arguments, which are at most 88 apart where anything is left of
  // them, and of sums of up to 128, twice over; and of what a tile adds, as much as a dozen roundings.
  static constexpr double kRounding = 4e-5, kTileRounding = 0x1p-20;
  // Weights that are flushed, 128 times 2^-126 at most.
  static constexpr float kLeast = 0x1p-100f;

  HWY_ALIGN float unit_[W], epsilon_[W], per_key_[W];
  HWY_ALIGN float last_best_[W], last_known_[W];  // of last tiles
  HWY_ALIGN float best_[W], known_[W], left_[W];
  HWY_ALIGN int32_t last_[W];
  double rounding_[W];
  int64_t most_ = -1;  // of last_
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_SKIP_CERTIFICATE_INL_H_
