// Selective scans, forward and one token, for one dtype of states.
//
// Compiled once per SIMD target. Lanes are channels. For one vector of channels, 16 states are in registers during a
// tile of 16 tokens; B and C are broadcast, and y is a sum over registers, not over lanes. Per vector of states and
// token:
//
//   h = 2^(s A log2 e) h + (s x) B,  y += C h
//
// The exponential is the bound, with 9 of 13 operations. If there are more than 16 states, they are processed 16 at a
// time, with y in memory, in the same order of additions.
#if defined(HEED_ENGINES_SCAN_SELECTIVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_SELECTIVE_INL_H_
#undef HEED_ENGINES_SCAN_SELECTIVE_INL_H_
#else
#define HEED_ENGINES_SCAN_SELECTIVE_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/decay-inl.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/tasks.h"
#include "heed/simd/activation-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/shapes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

inline constexpr size_t kTile = static_cast<size_t>(kTileTokens);

// The maximal number of states in registers.
inline constexpr size_t kManyStates = static_cast<size_t>(hs::kShapes.scan_states);

// The results that a pass over a tile stores.
enum class Stores { kOutputs, kStates, kTrace };

// Constants and states of a column block, [states][width] or [width].
template <class T>
struct BlockBuffers {
  T *A, *h;  // A: A log2 e
  T *B, *C;  // only if they are constants
  T *skip, *bias;

  void LayOut(const Problem& p, Carver& carver) {
    constexpr auto width = static_cast<int64_t>(BlockWidth<T>());
    carver.Next(A, p.states * width);
    carver.Next(h, p.states * width);
    carver.Next(B, p.B.constants.data != nullptr ? p.states * width : 0);
    carver.Next(C, p.C.constants.data != nullptr ? p.states * width : 0);
    carver.Next(skip, width);
    carver.Next(bias, width);
  }
};

// The rows of the current tile, one per token.
template <class T>
struct TileBuffers {
  T *steps, *inputs, *y, *gate;  // [width]: s, s x, y, z
  T *B, *C;                      // [states], unless they are constants

  void LayOut(const Problem& p, Carver& carver) {
    constexpr auto width = static_cast<int64_t>(BlockWidth<T>());
    const auto states = static_cast<int64_t>(RoundedUp<T>(static_cast<size_t>(p.states)));
    for (T** rows : {&steps, &inputs, &y, &gate}) carver.Next(*rows, kTileTokens * width);
    carver.Next(B, kTileTokens * states);
    carver.Next(C, kTileTokens * states);
  }
};

// The results that the backward pass needs, for one vector of channels and its states in registers.
template <class T>
struct Trace {
  // [kTile][states in registers][3][lanes]: f and 2^n with a = (1 + f) 2^n, and a h_{t-1}. Three arrays would be a
  // multiple of 4 KiB apart, so that loads would wait for stores.
  T* kept;
  T* dy;      // [kTile][width]
  T* C_sums;  // dy h summed over vectors, [kTile][states][lanes]; if C is constant, summed over tokens, [states][width]
};

// Calls f(first state, number of states as an integral constant) for runs of states that fit the registers.
template <class F>
HWY_INLINE void ForEachRun(size_t states, const F& f) {
  size_t n = 0;
  for (; n + kManyStates <= states; n += kManyStates) {
    f(n, std::integral_constant<size_t, kManyStates>());
  }
  if constexpr (kManyStates > 4) {
    for (; n + 4 <= states; n += 4) f(n, std::integral_constant<size_t, 4>());
  }
  for (; n < states; ++n) f(n, std::integral_constant<size_t, 1>());
}

// A column block of channels.
template <class T>
class SelectiveBlock {
 public:
  SelectiveBlock(const Problem& p, const TileBuffers<T>& tile, const BlockBuffers<T>& buffers, const ColumnBlock& block)
      : p_(p), tile_(tile), b_(buffers), block_(block), channels_(static_cast<size_t>(block.channels)),
        vectors_((channels_ + N - 1) / N), states_(static_cast<size_t>(p.states)), row_(RoundedUp<T>(states_)) {
    LoadRows(ViewOf(p.A, 0, states_, block.first, channels_), b_.A, kWidth);
    const auto log2e = hn::Set(d_, static_cast<T>(hs::kLog2E));
    for (size_t n = 0; n < states_; ++n) {
      for (size_t v = 0; v < vectors_; ++v) {
        T* at = b_.A + n * kWidth + v * N;
        hn::Store(ClampLog2Decay(d_, hn::Mul(hn::Load(d_, at), log2e)), d_, at);
      }
    }
    for (const auto& [numbers, to] : {std::pair(&p.skip, b_.skip), {&p.bias, b_.bias}}) {
      if (numbers->data == nullptr) {
        ClearRows(to, kWidth, 1, channels_);
      } else {
        LoadRows(ViewOf(*numbers, 0, 1, block.first, channels_), to, kWidth);
      }
    }
    for (const auto& [weights, to] : {std::pair(&p.B, b_.B), {&p.C, b_.C}}) {
      if (weights->constants.data == nullptr) continue;
      LoadRows(ViewOf(weights->constants, 0, states_, block.first, channels_), to, kWidth);
    }
  }

  int64_t group() const { return block_.group; }

  void LoadState(const Sequence& s) const {
    if (p_.initial.data == nullptr) return ClearRows(b_.h, kWidth, states_, channels_);
    LoadRows(ViewOf(p_.initial, s.state, states_, block_.first, channels_), b_.h, kWidth);
  }
  void StoreState(const Sequence& s, const Numbers& to) const {
    if (to.data == nullptr) return;
    StoreRows(b_.h, kWidth, ViewOf(to, s.state, states_, block_.first, channels_));
  }

  // Loads B and, if it is wanted, C of a tile, which all column blocks of the group share.
  void LoadWeights(const Sequence& s, int64_t begin, bool outputs = true) const {
    for (const auto& [weights, to] : {std::pair(&p_.B, tile_.B), {&p_.C, tile_.C}}) {
      if (weights->constants.data != nullptr || (weights == &p_.C && !outputs)) continue;
      LoadRows(ViewOf(weights->tokens, s, begin, TokensAt(s, begin), block_.group, 0, states_), to, row_);
    }
  }

  // Computes the outputs of a tile, or without `o` only the states after it, and prefetches the tile of `next` that
  // begins at `begin_of_next`.
  void Forward(const Sequence& s, int64_t begin, const SelectiveBlock& next, int64_t begin_of_next) {
    const size_t tokens = TokensAt(s, begin);
    LoadTile(s, begin, tokens, tile_.inputs);
    if (p_.o.data == nullptr) {
      next.FindLines(s, begin_of_next, {&p_.x, &p_.delta}, next_);
      for (size_t v = 0; v < vectors_; ++v) Advance<Stores::kStates>(v, tokens);
      return;
    }
    next.FindLines(s, begin_of_next, {&p_.x, &p_.delta, &p_.o, &p_.gate}, next_);
    for (size_t v = 0; v < vectors_; ++v) Advance<Stores::kOutputs>(v, tokens);
    if (p_.gate.data != nullptr) {
      LoadRows(ViewOf(p_.gate, s, begin, tokens, 0, block_.first, channels_), tile_.gate, kWidth);
      ForEachVector(tokens, [&](size_t at) HWY_ATTR {
        const auto silu = hs::Silu(d_, hn::Load(d_, tile_.gate + at));
        hn::Store(hn::Mul(hn::Load(d_, tile_.y + at), silu), d_, tile_.y + at);
      });
    }
    StoreRows(tile_.y, kWidth, ViewOf(p_.o, s, begin, tokens, 0, block_.first, channels_));
  }

 protected:
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = Lanes<T>();
  static constexpr size_t kWidth = BlockWidth<T>();

  static size_t TokensAt(const Sequence& s, int64_t begin) {
    return static_cast<size_t>(std::min(kTileTokens, s.count - begin));
  }

  // Calls f(offset in rows of the tile) for each vector.
  template <class F>
  HWY_INLINE void ForEachVector(size_t tokens, const F& f) const {
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t v = 0; v < vectors_; ++v) f(t * kWidth + v * N);
    }
  }

  // Finds the cache lines of these tensors' tile. A tile beyond the sequence has none.
  void FindLines(const Sequence& s, int64_t begin, std::initializer_list<const Tokens*> tensors,
                 NextLines* lines) const {
    for (const Tokens* x : tensors) {
      *lines++ = begin < 0 || begin >= s.count || x->data == nullptr
                     ? NextLines()
                     : NextLines(ViewOf(*x, s, begin, TokensAt(s, begin), 0, block_.first, channels_), N);
    }
  }

  // Computes s, s x, and D x, which initialises y. `x_rows` receives x and may be the rows of s x.
  void LoadTile(const Sequence& s, int64_t begin, size_t tokens, T* x_rows) const {
    LoadRows(ViewOf(p_.x, s, begin, tokens, 0, block_.first, channels_), x_rows, kWidth);
    LoadRows(ViewOf(p_.delta, s, begin, tokens, 0, block_.first, channels_), tile_.steps, kWidth);
    ForEachVector(tokens, [&](size_t at) HWY_ATTR {
      const size_t channel = at % kWidth;
      const V x = hn::Load(d_, x_rows + at);
      V step = hn::Add(hn::Load(d_, tile_.steps + at), hn::Load(d_, b_.bias + channel));
      if (p_.softplus) step = hs::Softplus(d_, step);
      hn::Store(step, d_, tile_.steps + at);
      hn::Store(hn::Mul(step, x), d_, tile_.inputs + at);
      hn::Store(hn::Mul(hn::Load(d_, b_.skip + channel), x), d_, tile_.y + at);
    });
  }

  // Advances the states of vector `v` of the channels over the tokens of a tile.
  template <Stores kStores>
  HWY_INLINE void Advance(size_t v, size_t tokens) const {
    ForEachRun(states_, [&](size_t n, auto count) HWY_ATTR {
      if (has_constants()) {
        AdvanceRun<kStores, count, true>(v, n, tokens);
      } else {
        AdvanceRun<kStores, count, false>(v, n, tokens);
      }
    });
  }

  bool has_constants() const { return p_.B.constants.data != nullptr || p_.C.constants.data != nullptr; }

  // B or C of state n at a token, for vector `v` of the channels.
  template <bool kConstants>
  HWY_INLINE V WeightOf(const Weights& weights, const T* constants, const T* row, size_t v, size_t n) const {
    if constexpr (kConstants) {
      if (weights.constants.data != nullptr) return hn::Load(d_, constants + n * kWidth + v * N);
    }
    return hn::Set(d_, row[n]);
  }

  // The decay of state n of a run. kDecays decays are computed at a time and stored in `ahead`.
  template <size_t kDecays>
  HWY_INLINE Decay<V> NextDecay(V step, const T* HWY_RESTRICT A, size_t n, Decay<V>* ahead) const {
    if constexpr (kDecays == 1) {
      (void)ahead;
      return DecayOf(d_, hn::Mul(step, hn::Load(d_, A + n * kWidth)));
    } else {
      if (n % kDecays == 0) {
        V logarithms[kDecays];
        HWY_UNROLL(4)
        for (size_t i = 0; i < kDecays; ++i) logarithms[i] = hn::Mul(step, hn::Load(d_, A + (n + i) * kWidth));
        DecaysOf<kDecays>(d_, logarithms, ahead);
      }
      return ahead[n % kDecays];
    }
  }

  template <Stores kStores, size_t kCount, bool kConstants>
  HWY_NOINLINE HWY_ATTR void AdvanceRun(size_t v, size_t first, size_t tokens) const {
    // Local pointers, because the compiler would reload members after every store of a vector.
    const T* HWY_RESTRICT A = b_.A + first * kWidth + v * N;
    const T *HWY_RESTRICT steps = tile_.steps + v * N, *HWY_RESTRICT inputs = tile_.inputs + v * N;
    const auto behind = [](T* rows, size_t elements) { return rows == nullptr ? nullptr : rows + elements; };
    const T* HWY_RESTRICT dys = behind(trace_.dy, v * N);  // null without a trace
    T* HWY_RESTRICT ys = tile_.y + v * N;
    const T *HWY_RESTRICT rowB = tile_.B, *HWY_RESTRICT rowC = tile_.C;
    T* HWY_RESTRICT trace = trace_.kept;
    // There is a row of sums per token, or a single one for constants.
    const bool C_is_constant = kConstants && p_.C.constants.data != nullptr;
    const size_t sums_per_token = C_is_constant ? 0 : states_ * N;
    const size_t sums_per_state = C_is_constant ? kWidth : N;
    T* HWY_RESTRICT sums = behind(trace_.C_sums, (C_is_constant ? v * N : 0) + first * sums_per_state);
    const NextLines next[] = {next_[0], next_[1], next_[2], next_[3]};
    const size_t row = row_;
    T* state = b_.h + first * kWidth + v * N;
    constexpr size_t kDecays = HWY_MIN(kCount, static_cast<size_t>(hs::kShapes.scan_decays));
    V h[kCount];
    HWY_UNROLL(16)
    for (size_t n = 0; n < kCount; ++n) h[n] = hn::Load(d_, state + n * kWidth);
    for (size_t t = 0; t < tokens; ++t, rowB += row, rowC += row) {
      const V step = hn::Load(d_, steps + t * kWidth), input = hn::Load(d_, inputs + t * kWidth);
      if (first == 0) {
        for (const NextLines& lines : next) lines.Prefetch(v, static_cast<int64_t>(t));
      }
      V y = hn::Load(d_, ys + t * kWidth), dy = hn::Zero(d_);
      if constexpr (kStores == Stores::kTrace) dy = hn::Load(d_, dys + t * kWidth);
      Decay<V> decays[kDecays];
      HWY_UNROLL(16)
      for (size_t n = 0; n < kCount; ++n) {
        const Decay<V> decay = NextDecay<kDecays>(step, A, n, decays);
        const V kept = Decayed(d_, decay, h[n]);
        h[n] = hn::MulAdd(input, WeightOf<kConstants>(p_.B, b_.B, rowB, v, first + n), kept);
        if constexpr (kStores == Stores::kTrace) {
          hn::Store(decay.fraction, d_, trace + 3 * n * N);
          hn::Store(PowerOf(d_, decay), d_, trace + (3 * n + 1) * N);
          hn::Store(kept, d_, trace + (3 * n + 2) * N);
          T* sum = sums + n * (kConstants ? sums_per_state : N);
          hn::Store(hn::MulAdd(dy, h[n], hn::Load(d_, sum)), d_, sum);
        }
        if constexpr (kStores != Stores::kStates) {
          y = hn::MulAdd(WeightOf<kConstants>(p_.C, b_.C, rowC, v, first + n), h[n], y);
        }
      }
      if constexpr (kStores != Stores::kStates) hn::Store(y, d_, ys + t * kWidth);
      if constexpr (kStores == Stores::kTrace) {
        trace += 3 * kManyStates * N;
        sums += sums_per_token;
      }
    }
    HWY_UNROLL(16)
    for (size_t n = 0; n < kCount; ++n) hn::Store(h[n], d_, state + n * kWidth);
  }

  const D d_;
  const Problem& p_;
  const TileBuffers<T> tile_;
  const BlockBuffers<T> b_;
  Trace<T> trace_ = {};
  const ColumnBlock block_;
  const size_t channels_, vectors_, states_, row_;
  NextLines next_[4];
};

// Column blocks that a task processes side by side, tile by tile, so that rows are read in longer runs. In steps of
// single tokens it is 1: A then stays in L1 from sequence to sequence, which saves a seventh of the time.
inline constexpr int64_t kBlocksPerTask = 8;

template <class T>
int64_t SelectiveForwardBytes(const Problem& p) {
  Carver carver(nullptr);
  TileBuffers<T> tile;
  tile.LayOut(p, carver);
  BlockBuffers<T> block;
  for (int64_t i = 0; i < kBlocksPerTask; ++i) block.LayOut(p, carver);
  return carver.bytes();
}

template <class T>
HWY_ATTR void SelectiveForwardTask(const Problem& p, const ColumnBlocks& blocks, int64_t first_block,
                                   int64_t last_block, int64_t first, int64_t last, void* scratch) {
  Carver carver(scratch);
  TileBuffers<T> tile;
  tile.LayOut(p, carver);
  std::array<std::optional<SelectiveBlock<T>>, kBlocksPerTask> all;
  const auto count = static_cast<size_t>(last_block - first_block);
  for (size_t i = 0; i < count; ++i) {
    BlockBuffers<T> buffers;
    buffers.LayOut(p, carver);
    all[i].emplace(p, tile, buffers, blocks.At(first_block + static_cast<int64_t>(i)));
  }
  for (int64_t sequence = first; sequence < last; ++sequence) {
    const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
    for (size_t i = 0; i < count; ++i) all[i]->LoadState(s);
    for (int64_t begin = 0; begin < s.count; begin += kTileTokens) {
      for (size_t i = 0; i < count; ++i) {
        if (i == 0 || all[i]->group() != all[i - 1]->group()) all[i]->LoadWeights(s, begin, p.o.data != nullptr);
        const bool is_last = i + 1 == count;
        all[i]->Forward(s, begin, *all[is_last ? 0 : i + 1], is_last ? begin + kTileTokens : begin);
      }
    }
    for (size_t i = 0; i < count; ++i) all[i]->StoreState(s, p.final);
  }
}

template <class T>
void SelectiveForward(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(SelectiveForwardBytes<T>(p));
  const ColumnBlocks blocks(p, BlockWidth<T>());
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  const TaskGrid grid(p, blocks.size(), MostTokens(p) == 1 ? 1 : kBlocksPerTask, ctx.num_threads());
  ctx.ParallelFor(grid.tasks(), [&](int64_t task, int worker) {
    const int64_t block = task % grid.runs_of_blocks * grid.blocks;
    const int64_t sequence = task / grid.runs_of_blocks * grid.sequences;
    SelectiveForwardTask<T>(p, blocks, block, std::min(block + grid.blocks, blocks.size()), sequence,
                            std::min(sequence + grid.sequences, sequences), ctx.Scratch(worker));
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_SELECTIVE_INL_H_
