// One token of a delta rule on a column block of a state.
//
// Compiled once per SIMD target. A delta rule (problem.h) writes k_t (w_t - S~_t^T r_t)^T: what a token writes depends
// on what its read key retrieves from the whole state, so tokens are sequential. Each token passes over the state once.
// In this pass the state decays, is updated, and is multiplied by the token's query and by the next token's read key,
// whose product the next token needs before it writes. This takes 6 or 8 flops per load and store of an element. Each
// element has one accumulation chain over tokens, and each sum one chain over rows, so that the bits are the same for
// any split of a sequence, in the forward pass, in steps and in the transposed states of the backward pass.
#if defined(HEED_ENGINES_RECURRENCE_DELTA_TOKEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DELTA_TOKEN_INL_H_
#undef HEED_ENGINES_RECURRENCE_DELTA_TOKEN_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DELTA_TOKEN_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/recurrence/block-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The maximal number of vectors of a column block. A broadcast serves all of them.
inline constexpr int kDeltaBlockVectors = hs::kShapes.delta_block;
using DeltaShape = BlockedShape<kDeltaBlockVectors>;

// The operations on a state row, in this order. The decay is applied after kErase.
enum TokenOps : unsigned {
  kErase = 1,        // subtracts an outer product
  kReadBefore = 2,   // sums over rows, before the writes
  kRead2Before = 4,  // likewise, with the rows of read2
  kDot = 8,          // sums over lanes, before the writes
  kDot2 = 16,
  kWrite = 32,  // adds an outer product
  kWrite2 = 64,
  kRead = 128,  // sums over rows
  kRead2 = 256,
};

// The operands of a token: `_row` pointers have an element per row of the state, which is broadcast, and `_lanes` one
// per column. Decays are in the form of TileDecay(), per row or per lane.
template <class T>
struct Token {
  const T* decay = nullptr;
  const T *erase_row = nullptr, *erase_lanes = nullptr;
  const T *write_row = nullptr, *write_lanes = nullptr;
  const T *write2_row = nullptr, *write2_lanes = nullptr;
  const T* before_row = nullptr;
  T* before_out = nullptr;
  const T* read_row = nullptr;
  T* read_out = nullptr;
  const T* read2_row = nullptr;
  T* read2_out = nullptr;
  const T *dot_lanes = nullptr, *dot2_lanes = nullptr;
  T *dot_out = nullptr, *dot2_out = nullptr;  // per row, added to
  RowPrefetch* prefetch = nullptr;            // called once per N rows
};

// The number of calls of RowPrefetch::Issue() while tokens pass over all column blocks of a state.
template <class T>
size_t NumTokenPrefetches(const DeltaShape& shape, size_t passes) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  return NumColumnBlocks<T>(shape) * passes * ((shape.rows + N - 1) / N);
}

// Returns the sum over the lanes of v[i] in lane i, for vectors of one or two 128-bit blocks: first blocks are added,
// then halves of blocks. Adding during the transpose takes two thirds of its shuffles.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LaneSums(D d, const V* v) {
  constexpr size_t N = hn::MaxLanes(D()), kPerBlock = 16 / sizeof(hn::TFromD<D>);
  V w[kPerBlock];
  HWY_UNROLL(4)
  for (size_t i = 0; i < kPerBlock; ++i) {
    if constexpr (N == kPerBlock) {
      w[i] = v[i];
    } else {
      w[i] = hn::Add(hn::ConcatLowerLower(d, v[i + kPerBlock], v[i]), hn::ConcatUpperUpper(d, v[i + kPerBlock], v[i]));
    }
  }
  const auto interleaved = [&](V a, V b)
                               HWY_ATTR { return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
  if constexpr (kPerBlock == 2) {
    return interleaved(w[0], w[1]);
  } else {
    const hn::Repartition<double, D> wide;
    const auto a = hn::BitCast(wide, interleaved(w[0], w[1])), b = hn::BitCast(wide, interleaved(w[2], w[3]));
    return hn::Add(hn::BitCast(d, hn::InterleaveLower(wide, a, b)), hn::BitCast(d, hn::InterleaveUpper(wide, a, b)));
  }
}

// Sums over the lanes of a state's rows, kRows at a time. AddTo() is not inlined: it is long and rarely called.
template <class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
class RowSums {
 public:
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t kRows = N * hs::kShapes.delta_row_sums;

  void Put(D d, size_t r, V sum) { hn::Store(sum, d, sums_ + r % kRows * N); }
  // Adds the sums of the last `count` rows, which begin at a multiple of kRows, to to[0 .. count).
  HWY_NOINLINE HWY_ATTR void AddTo(D d, size_t count, T* to) const {
    for (size_t begin = 0; begin < (kRows == N ? 1 : count); begin += N) {
      const T* HWY_RESTRICT sums = sums_ + begin * N;
      V v[N];
      HWY_UNROLL(16)
      for (size_t i = 0; i < N; ++i) v[i] = begin + i < count ? hn::Load(d, sums + i * N) : hn::Zero(d);
      V sum;
      if constexpr (N > 1 && N * sizeof(T) <= 32) {
        sum = LaneSums(d, v);
      } else {
        hs::Transpose(d, v);
        HWY_UNROLL(4)
        for (size_t step = N / 2; step > 0; step /= 2) {
          for (size_t i = 0; i < step; ++i) v[i] = hn::Add(v[i], v[i + step]);
        }
        sum = v[0];
      }
      hn::StoreU(hn::Add(hn::LoadU(d, to + begin), sum), d, to + begin);
    }
  }

 private:
  HWY_ALIGN T sums_[kRows * N];
};

// A token's decay with E - 1 between this and 0 is slow: (E - 1) S and the writes are summed before S is added, so that
// it is not lost to rounding.
template <class T>
inline constexpr T kSlowToken = T{-1} / 65536;

// The forms of a token's decays.
enum class Decays : uint8_t {
  kNear,   // all are E - 1, and none is slow
  kMixed,  // none is slow
  kSlow,   // some are slow
};

// Passes over a column block of C vectors, whose rows are `stride` apart. kDecay is kNone, kRows or kLanes.
template <unsigned kOps, Decay kDecay, Decays kKind, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void PassToken(D d, const Token<T>& x, size_t num_rows, size_t stride, T* HWY_RESTRICT state) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr auto has = [](unsigned what) { return (kOps & what) != 0; };
  constexpr bool kBeforeWrites = has(kReadBefore | kRead2Before | kDot | kDot2);
  constexpr bool kChanges = has(kErase | kWrite | kWrite2) || kDecay != Decay::kNone;
  constexpr bool kNear = kKind == Decays::kNear, kSlow = kKind == Decays::kSlow;
  constexpr bool kByLane = kDecay == Decay::kLanes, kByRow = kDecay == Decay::kRows;
  V erased[C], write[C], write2[C], decay[C];
  V read[C], read2[C], read_before[C], dot[C], dot2[C];
  RowSums<D> sums, sums2;
  hn::Mask<D> near[C], slow[C], rounded[C];
  HWY_UNROLL(4)
  for (int c = 0; c < C; ++c) {
    const auto load = [&](bool exists, const T* from)
                          HWY_ATTR { return exists ? hn::LoadU(d, from + c * N) : hn::Zero(d); };
    erased[c] = load(has(kErase), x.erase_lanes);
    write[c] = load(has(kWrite), x.write_lanes);
    write2[c] = load(has(kWrite2), x.write2_lanes);
    decay[c] = load(kByLane, x.decay);
    near[c] = hn::Lt(decay[c], hn::Zero(d));
    slow[c] = hn::And(near[c], hn::Gt(decay[c], hn::Set(d, kSlowToken<T>)));
    rounded[c] = hn::AndNot(slow[c], near[c]);
    dot[c] = load(has(kDot), x.dot_lanes);
    dot2[c] = load(has(kDot2), x.dot2_lanes);
    read[c] = read2[c] = read_before[c] = hn::Zero(d);
  }
  const auto one_row = [&](size_t r) HWY_ATTR {
    T* HWY_RESTRICT at = state + r * stride;
    V s[C];
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) s[c] = hn::LoadU(d, at + c * N);
    const auto add = [&](const T* row, const V(&lanes)[C]) HWY_ATTR {
      const V factor = hn::Set(d, row[r]);
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) s[c] = hn::MulAdd(factor, lanes[c], s[c]);
    };
    const auto sum = [&](const T* row, V(&to)[C]) HWY_ATTR {
      const V factor = hn::Set(d, row[r]);
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) to[c] = hn::MulAdd(factor, s[c], to[c]);
    };
    const auto decay_row = [&](bool slow_too) HWY_ATTR {
      const V factor = hn::Set(d, x.decay[r]);
      const auto is_near = hn::Lt(factor, hn::Zero(d));  // a branch would be mispredicted, as channels differ
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        s[c] = slow_too ? hn::Mul(factor, s[c])
                        : hn::MulAdd(factor, s[c], kNear ? s[c] : hn::IfThenElseZero(is_near, s[c]));
      }
    };
    const auto decay_lanes = [&](const hn::Mask<D>(&is_near)[C]) HWY_ATTR {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        s[c] = hn::MulAdd(decay[c], s[c], kNear ? s[c] : hn::IfThenElseZero(is_near[c], s[c]));
      }
    };
    const auto writes = [&]() HWY_ATTR {
      if constexpr (has(kWrite)) add(x.write_row, write);
      if constexpr (has(kWrite2)) add(x.write2_row, write2);
    };
    const auto over_lanes = [&](const V(&lanes)[C]) HWY_ATTR {
      V product = hn::Mul(s[0], lanes[0]);
      HWY_UNROLL(4)
      for (int c = 1; c < C; ++c) product = hn::MulAdd(s[c], lanes[c], product);
      return product;
    };
    const auto before_writes = [&]() HWY_ATTR {
      if constexpr (has(kReadBefore)) sum(x.before_row, read_before);
      if constexpr (has(kRead2Before)) sum(x.read2_row, read2);
      if constexpr (has(kDot)) sums.Put(d, r, over_lanes(dot));
      if constexpr (has(kDot2)) sums2.Put(d, r, over_lanes(dot2));
    };
    if constexpr (has(kErase)) {
      const V factor = hn::Set(d, x.erase_row[r]);
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) s[c] = hn::NegMulAdd(factor, erased[c], s[c]);
    }
    bool is_slow = kSlow;
    if constexpr (kByRow && kSlow) is_slow = x.decay[r] < 0 && x.decay[r] > kSlowToken<T>;
    if (!is_slow) {
      if constexpr (kByRow) decay_row(false);
      if constexpr (kByLane) decay_lanes(near);
      before_writes();
      writes();
    } else if constexpr (kByRow || kByLane) {
      V before[C];
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) before[c] = s[c];
      if constexpr (kBeforeWrites) {
        if constexpr (kByRow) decay_row(false);
        if constexpr (kByLane) decay_lanes(near);
        before_writes();
        HWY_UNROLL(4)
        for (int c = 0; c < C; ++c) s[c] = before[c];
      }
      if constexpr (kByRow) decay_row(true);
      if constexpr (kByLane) decay_lanes(rounded);
      writes();
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        s[c] = kByLane ? hn::MaskedAddOr(s[c], slow[c], before[c], s[c]) : hn::Add(before[c], s[c]);
      }
    }
    if constexpr (has(kRead)) sum(x.read_row, read);
    if constexpr (has(kRead2)) sum(x.read2_row, read2);
    HWY_UNROLL(4)
    for (int c = 0; kChanges && c < C; ++c) hn::StoreU(s[c], d, at + c * N);
  };
  constexpr size_t kSummed = RowSums<D>::kRows;  // a multiple of N
  for (size_t group = 0; group < num_rows; group += N) {
    const size_t end = HWY_MIN(group + N, num_rows);
    if (x.prefetch != nullptr) x.prefetch->Issue();
    for (size_t r = group; r < end; ++r) one_row(r);
    if (kSummed != N && end % kSummed != 0 && end != num_rows) continue;
    const size_t begin = kSummed == N ? group : group / kSummed * kSummed;
    if constexpr (has(kDot)) sums.AddTo(d, end - begin, x.dot_out + begin);
    if constexpr (has(kDot2)) sums2.AddTo(d, end - begin, x.dot2_out + begin);
  }
  HWY_UNROLL(4)
  for (int c = 0; c < C; ++c) {
    if constexpr (has(kRead)) hn::StoreU(read[c], d, x.read_out + c * N);
    if constexpr (has(kRead2 | kRead2Before)) hn::StoreU(read2[c], d, x.read2_out + c * N);
    if constexpr (has(kReadBefore)) hn::StoreU(read_before[c], d, x.before_out + c * N);
  }
}

// PassToken() with the kind of decays as an argument.
template <unsigned kOps, Decay kDecay, int C, class D, class T = hn::TFromD<D>>
HWY_INLINE void PassToken(D d, Decays kind, const Token<T>& x, size_t num_rows, size_t stride, T* state) {
  if (kDecay == Decay::kNone || kind == Decays::kNear) {
    PassToken<kOps, kDecay, Decays::kNear, C>(d, x, num_rows, stride, state);
  } else if (kind == Decays::kMixed) {
    PassToken<kOps, kDecay, Decays::kMixed, C>(d, x, num_rows, stride, state);
  } else {
    PassToken<kOps, kDecay, Decays::kSlow, C>(d, x, num_rows, stride, state);
  }
}

// PassToken() for the tokens at a block boundary, with the same bits. They are few, so one instantiation handles all
// kinds of decays, and all loops over blocks share its code.
template <unsigned kOps, Decay kDecay, int C, class D, class T = hn::TFromD<D>>
HWY_NOINLINE HWY_ATTR void PassBoundaryToken(D d, const Token<T>& x, size_t num_rows, size_t stride, T* state) {
  constexpr Decays kAny = kDecay == Decay::kNone ? Decays::kNear : Decays::kSlow;
  PassToken<kOps, kDecay, kAny, C>(d, x, num_rows, stride, state);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DELTA_TOKEN_INL_H_
