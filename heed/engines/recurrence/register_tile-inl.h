// The recurrence in registers: a tile of a few tokens updates and reads a column block of the state.
//
// Compiled once per SIMD target. The block's tokens pass over the state tile by tile. Each row of the column block is
// loaded once per tile, updated by all of its TB tokens, stored, and multiplied into the tokens' outputs, which stay in
// registers as C vectors per token. Per row and vector of the state this is
//
//   1 load, 1 store, 2 TB fused multiply-adds
//
// With TB = 4 and C = 4 there are 32 multiply-adds, 28 loads and 4 stores per row, so that multiply-adds are the bound
// and not stores, of which one starts per cycle. The forward pass broadcasts elements of q and k and has columns of v
// and o in lanes; for the gradients of q and k the state is transposed.
#if defined(HEED_ENGINES_RECURRENCE_REGISTER_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_REGISTER_TILE_INL_H_
#undef HEED_ENGINES_RECURRENCE_REGISTER_TILE_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_REGISTER_TILE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/recurrence/problem.h"
#include "heed/simd/shapes-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The maximal number of vectors C of a column block: TB C sums, C vectors of the state and a few more are in registers.
inline constexpr int kColumnBlockVectors = hs::kShapes.column_block;
// Tokens of a tile without decays.
inline constexpr int64_t kUngatedTokens = hs::kShapes.ungated_tokens;

// The axes along which decays vary. A scalar decay is handled as one of lanes. If rows and lanes decay, the decay of
// keys is applied first, so that a state and its transpose have the same bits.
enum class Decay { kNone, kRows, kLanes, kRowsLanes, kLanesRows };

// A decay with E - 1 between this and 0 is slow: the state remembers hundreds of tiles.
template <class T>
inline constexpr T kSlow = T{-1} / 64;

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> IsSlow(D d, V decay) {
  return hn::And(hn::Lt(decay, hn::Zero(d)), hn::Gt(decay, hn::Set(d, kSlow<hn::TFromD<D>>)));
}

// Compares integers, because float comparisons occupy the multiply units.
template <class T>
HWY_INLINE bool IsSlow(T decay) {
  using TI = hwy::SignedFromSize<sizeof(T)>;
  return hwy::BitCastScalar<TI>(decay) < hwy::BitCastScalar<TI>(kSlow<T>);  // for negative floats the order is reversed
}

// Prefetches the rows that the next block reads or writes. They are too far apart for hardware prefetchers. A core has
// 10 to 16 misses in flight and stalls on one more, so prefetches are distributed over the rows of the tiles, a few
// lines at a time.
class RowPrefetch {
 public:
  static constexpr size_t kMaxTensors = 16;
  static constexpr size_t kPrefetchRows = 8;  // rows of a tile between two calls of Issue()

  // Adds a tensor with rows of `bytes`, the first at `row`, `stride` bytes apart.
  void Add(const void* row, int64_t stride, size_t bytes) {
    if (num_tensors_ == kMaxTensors) return;
    tensors_[num_tensors_++] = {static_cast<const char*>(row), stride, bytes};
    steps_ += (bytes + kStepBytes - 1) / kStepBytes;
  }
  // Divides the rows of `num_tokens` tokens evenly over this many calls of Issue().
  void Begin(size_t num_tokens, size_t num_calls) {
    tokens_ = num_tokens;
    calls_ = num_calls;
    steps_ *= num_tokens;
  }
  HWY_INLINE void Issue() {
    for (owed_ += steps_; owed_ >= calls_ && tokens_ > 0; owed_ -= calls_) Step();
  }

 private:
  static constexpr size_t kStepBytes = 256;

  struct Tensor {
    const char* row;
    int64_t stride;
    size_t bytes;
  };

  HWY_INLINE void Step() {
    Tensor& tensor = tensors_[tensor_];
    const size_t begin = done_, end = HWY_MIN(begin + kStepBytes, tensor.bytes);
    for (size_t at = begin; at < end; at += 64) hs::PrefetchToL2(tensor.row + at);
    done_ = end;
    if (end < tensor.bytes) return;
    done_ = 0;
    tensor.row += tensor.stride;
    if (++tensor_ < num_tensors_) return;
    tensor_ = 0;
    --tokens_;
  }

  Tensor tensors_[kMaxTensors];
  size_t num_tensors_ = 0, steps_ = 0, calls_ = 1, owed_ = 0;
  size_t tokens_ = 0, tensor_ = 0,
         done_ = 0;  // remaining tokens; the next tensor, and the bytes of its row that are done
};

// The operands of one pass over the tokens of a block, in order of time.
template <class T>
struct Product {
  const T* read;   // a_t, broadcast
  const T* write;  // b_t, broadcast
  size_t row_stride;
  const T* lanes;  // w_t
  ptrdiff_t lane_stride;
  T* out;
  ptrdiff_t out_stride;
  // Per tile of kTileTokens: the decays E of rows and of lanes over the tile, each as E or as E - 1 < 0 (TileDecay()),
  // and the products of pairs of its tokens, [TB][TB] in order of processing, or null. Decay::kLanes without lane_decay
  // uses the first of row_decay for all lanes.
  const T *row_decay = nullptr, *lane_decay = nullptr;  // with the strides above
  const T* pairs = nullptr;
};

// Without decays (kNone), the tokens t of the tile update and read the state one after the other:
//
//   S[r] += b_t[r] w_t,  out_t = sum_r a_t[r] S[r]
//
// Each element of S and each sum over r is one accumulation chain, so that any split of a sequence has the same bits.
// With decays, a and b contain the decays from the beginning and to the end of the tile (block-inl.h), all tokens read
// the state before the tile, and pairs of tokens contribute by a table:
//
//   out_t = sum_r a_t[r] S[r] + sum_{j <= t} pairs_tj w_j
//   S[r]  = E S[r] + sum_t b_t[r] w_t
//
// The second sum of out_t is only computed for Decay::kRows and kLanes with `pairs`. This takes 9 operations per state
// element and four tokens, instead of 12 if each token's decay were applied. If a decay is slow, (E - 1) S and the
// updates are summed before S is added, and S is rounded once, so that a decay smaller than a rounding is not lost. A
// `step` of 1 or -1 is the direction of processing from token 0. Without kRead only the state is updated, with the same
// bits.
template <Decay kDecay, bool kRead, int TB, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void StateTile(D d, const Product<T>& x, ptrdiff_t step, size_t num_rows, T* HWY_RESTRICT state,
                          RowPrefetch& prefetch) {
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  const ptrdiff_t row = step * static_cast<ptrdiff_t>(x.row_stride);
  const ptrdiff_t lane_row = step * x.lane_stride, out_row = step * x.out_stride;
  constexpr bool kGated = kDecay != Decay::kNone;
  constexpr bool kByLane = kGated && kDecay != Decay::kRows;
  constexpr bool kLanesLast = kDecay == Decay::kLanes || kDecay == Decay::kRowsLanes;
  V sum[TB][C], lanes[TB][C], decay[C];
  hn::Mask<D> less_one[C];          // true if `decay` is E - 1
  hn::Mask<D> slow[C], rounded[C];  // true if it is E - 1 and slow, or not slow
  bool any_slow = false;
  HWY_UNROLL(16)
  for (int c = 0; c < C; ++c) {
    decay[c] = !kByLane                  ? hn::Zero(d)
               : x.lane_decay == nullptr ? hn::Set(d, *x.row_decay)
                                         : hn::Load(d, x.lane_decay + c * N);
    less_one[c] = hn::Lt(decay[c], hn::Zero(d));
    slow[c] = IsSlow(d, decay[c]);
    rounded[c] = hn::AndNot(slow[c], less_one[c]);
    any_slow |= kLanesLast && !hn::AllFalse(d, slow[c]);
    HWY_UNROLL(16)
    for (int t = 0; t < TB; ++t) {
      sum[t][c] = hn::Zero(d);
      lanes[t][c] = hn::LoadU(d, x.lanes + t * lane_row + c * N);
    }
  }
  const auto one_row = [&](size_t r) HWY_ATTR {
    const T* HWY_RESTRICT read = kRead ? x.read + r : nullptr;
    const T* HWY_RESTRICT write = x.write + r;
    V s[C], before[C];
    HWY_UNROLL(16)
    for (int c = 0; c < C; ++c) before[c] = s[c] = hn::Load(d, state + c * N);
    // With decays all tokens read the state before the tile, which also separates the dependent updates of S.
    const auto write_all = [&]() HWY_ATTR {
      const V* seen = kGated ? before : s;
      HWY_UNROLL(16)
      for (int t = 0; t < TB; ++t) {
        const V b = hn::Set(d, write[t * row]);
        HWY_UNROLL(16)
        for (int c = 0; c < C; ++c) s[c] = hn::MulAdd(b, lanes[t][c], s[c]);
        if constexpr (!kRead) continue;
        const V a = hn::Set(d, read[t * row]);
        HWY_UNROLL(16)
        for (int c = 0; c < C; ++c) sum[t][c] = hn::MulAdd(a, seen[c], sum[t][c]);
      }
    };
    const auto decay_lanes = [&](const hn::Mask<D>* near) HWY_ATTR {
      HWY_UNROLL(16)
      for (int c = 0; c < C; ++c) {
        s[c] = hn::MulAdd(decay[c], s[c], hn::IfThenElseZero(near[c], s[c]));
      }
    };
    // A mask selects E or E - 1. With a decay per row, a branch would be mispredicted for every other row, which took a
    // third of the time.
    const auto decay_row = [&]() HWY_ATTR {
      const V factor = hn::Set(d, x.row_decay[r]);
      const V near = hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(hn::RebindToSigned<D>(), factor)));
      HWY_UNROLL(16)
      for (int c = 0; c < C; ++c) s[c] = hn::MulAdd(factor, s[c], hn::And(near, s[c]));
    };
    if constexpr (kDecay == Decay::kLanesRows) decay_lanes(less_one);
    if constexpr (kDecay == Decay::kRowsLanes) decay_row();
    if constexpr (!kGated) {
      write_all();
    } else if (kLanesLast ? any_slow : IsSlow(x.row_decay[r])) {
      V rest[C];
      HWY_UNROLL(16)
      for (int c = 0; c < C; ++c) rest[c] = s[c];
      if constexpr (kLanesLast) {
        decay_lanes(rounded);
      } else {
        const V factor = hn::Set(d, x.row_decay[r]);
        HWY_UNROLL(16)
        for (int c = 0; c < C; ++c) s[c] = hn::Mul(factor, s[c]);
      }
      write_all();
      HWY_UNROLL(16)
      for (int c = 0; c < C; ++c) {
        s[c] = kLanesLast ? hn::MaskedAddOr(s[c], slow[c], rest[c], s[c]) : hn::Add(rest[c], s[c]);
      }
    } else {
      if constexpr (kLanesLast) {
        decay_lanes(less_one);
      } else {
        decay_row();
      }
      write_all();
    }
    HWY_UNROLL(16)
    for (int c = 0; c < C; ++c) {
      hn::Store(s[c], d, state + c * N);
    }
    state += C * N;
  };
  size_t r = 0;
  for (; r + RowPrefetch::kPrefetchRows <= num_rows; r += RowPrefetch::kPrefetchRows) {
    prefetch.Issue();
#pragma GCC unroll 2  // 6 % faster with states of 128 x 128
    for (size_t i = 0; i < RowPrefetch::kPrefetchRows; ++i) one_row(r + i);
  }
  for (; r < num_rows; ++r) one_row(r);
  if constexpr (!kRead) return;
  HWY_UNROLL(16)
  for (int t = 0; t < TB; ++t) {
    if ((kDecay == Decay::kRows || kDecay == Decay::kLanes) && x.pairs != nullptr) {
      HWY_UNROLL(16)
      for (int j = 0; j <= t; ++j) {
        const V pair = hn::Set(d, x.pairs[t * TB + j]);
        HWY_UNROLL(16)
        for (int c = 0; c < C; ++c) {
          sum[t][c] = hn::MulAdd(pair, lanes[j][c], sum[t][c]);
        }
      }
    }
    HWY_UNROLL(16)
    for (int c = 0; c < C; ++c) hn::StoreU(sum[t][c], d, x.out + t * out_row + c * N);
  }
}

// Passes over one column block with all tiles of `num_tokens`, forward or reversed in time. With decays, tiles begin at
// multiples of kTileTokens in both directions. Without decays each element is one chain over tokens, so that tiles may
// have any size.
template <Decay kDecay, bool kRead, int C, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void SweepColumnBlock(D d, Product<T> x, size_t num_tokens, bool reversed, size_t num_rows,
                                   T* HWY_RESTRICT state, RowPrefetch& prefetch) {
  constexpr auto kTile = static_cast<size_t>(kDecay == Decay::kNone ? kUngatedTokens : kTileTokens);
  const size_t num_tiles = (num_tokens + kTile - 1) / kTile;
  for (size_t i = 0; i < num_tiles; ++i) {
    const size_t tile = reversed ? num_tiles - 1 - i : i;
    const size_t begin = tile * kTile, count = HWY_MIN(kTile, num_tokens - begin);
    const size_t first = reversed ? begin + count - 1 : begin;
    Product<T> at = x;
    if constexpr (kRead) at.read += first * x.row_stride;
    at.write += first * x.row_stride;
    at.lanes += static_cast<ptrdiff_t>(first) * x.lane_stride;
    if constexpr (kRead) at.out += static_cast<ptrdiff_t>(first) * x.out_stride;
    if (at.row_decay != nullptr) at.row_decay += tile * x.row_stride;
    if (at.lane_decay != nullptr) {
      at.lane_decay += static_cast<ptrdiff_t>(tile) * x.lane_stride;
    }
    if (at.pairs != nullptr) at.pairs += tile * kTile * kTile;
    const ptrdiff_t step = reversed ? -1 : 1;
    switch (count) {
      case 1: StateTile<kDecay, kRead, 1, C>(d, at, step, num_rows, state, prefetch); break;
      case 2: StateTile<kDecay, kRead, 2, C>(d, at, step, num_rows, state, prefetch); break;
      case 3: StateTile<kDecay, kRead, 3, C>(d, at, step, num_rows, state, prefetch); break;
      default: StateTile<kDecay, kRead, kTile, C>(d, at, step, num_rows, state, prefetch);
    }
  }
}

// Passes over all column blocks of columns [begin, end), which are whole vectors. In memory the state is a sequence of
// column blocks [num_rows][width] from column `begin` on; `lanes`, `out` and `lane_decay` point to column 0.
template <Decay kDecay, bool kRead = true, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void SweepColumnBlocks(D d, const Product<T>& x, size_t num_tokens, bool reversed, size_t num_rows,
                                    size_t begin, size_t end, T* state, RowPrefetch& prefetch) {
  constexpr size_t N = hn::MaxLanes(D());
  hs::ForTiles<kColumnBlockVectors>(begin / N, end / N, [&](auto vectors, size_t c) HWY_ATTR {
    Product<T> column_block = x;
    column_block.lanes += c * N;
    if constexpr (kRead) column_block.out += c * N;
    if (column_block.lane_decay != nullptr) column_block.lane_decay += c * N;
    SweepColumnBlock<kDecay, kRead, vectors.value>(d, column_block, num_tokens, reversed, num_rows,
                                                   state + (c * N - begin) * num_rows, prefetch);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_REGISTER_TILE_INL_H_
