// Scans with one state per channel, h_t = a_t h_{t-1} + b_t, forward, one token and backward, for one dtype of states.
//
// Compiled once per SIMD target. Lanes are channels, of which a task owns a few vectors of one sequence. The state is
// one register per vector and is the output. With given decays memory is the bound, with gates the exponentials are.
//
// Backward, the states at the boundaries of tiles of 16 tokens are stored and the others recomputed. With p the
// gradient of h_t and b' the derivative of b by log a: db = p, dlog a = p a h_{t-1} + p b', p <- a p.
#if defined(HEED_ENGINES_SCAN_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_ELEMENTWISE_INL_H_
#undef HEED_ENGINES_SCAN_ELEMENTWISE_INL_H_
#else
#define HEED_ENGINES_SCAN_ELEMENTWISE_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/constant_sums-inl.h"
#include "heed/engines/scan/decay-inl.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/tasks.h"
#include "heed/simd/activation-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Column blocks that a task processes side by side, tile by tile, if channels are contiguous. It then reads 1 KiB per
// row instead of 256 bytes; each row is in another page of memory.
inline constexpr int64_t kBlocksAtOnce = 4;

// The buffers of a column block, in rows of its width.
template <class T>
struct ElementwiseBlockBuffers {
  T *h, *p;                   // the state, and its gradient
  T *rate, *slope;            // -c softplus(lambda), and -c times its derivative
  T* boundary_states;         // [tiles][width]
  ConstantSums<T> constants;  // the gradient of lambda without the factor `slope`

  void LayOut(const Problem& problem, bool backward, Carver& carver) {
    constexpr auto width = static_cast<int64_t>(BlockWidth<T>());
    for (T** row : {&h, &p, &rate, &slope}) carver.Next(*row, width);
    carver.Next(boundary_states, backward ? NumTiles(MostTokens(problem)) * width : 0);
    constants.LayOut(backward ? 1 : 0, carver);
  }
};

// The scratch memory of one thread.
template <class T>
struct ElementwiseBuffers {
  T *x, *first, *second;  // [kTile][width]: x; log_decay, or recurrence and input gates
  T* o;                   // [kTile][width]; in the backward pass, h before each token
  T* d_o;                 // [kTile][width]
  std::array<ElementwiseBlockBuffers<T>, kBlocksAtOnce> own;

  void LayOut(const Problem& problem, bool backward, Carver& carver) {
    constexpr auto width = static_cast<int64_t>(BlockWidth<T>());
    for (T** rows : {&x, &first, &second, &o, &d_o}) carver.Next(*rows, kTileTokens * width);
    for (auto& block : own) block.LayOut(problem, backward, carver);
  }
};

template <class T, Rule kRule>
class ElementwiseBlock {
 public:
  ElementwiseBlock(const Problem& p, const ElementwiseBuffers<T>& buffers, const ElementwiseBlockBuffers<T>& own,
                   const ColumnBlock& block)
      : p_(p), b_(buffers), own_(own), block_(block), channels_(static_cast<size_t>(block.channels)),
        vectors_((channels_ + N - 1) / N) {
    if constexpr (kRule == Rule::kGates) {
      LoadRows(ViewOf(p.lambda, 0, 1, block.first, channels_), own_.rate, kWidth);
      const V minus_c = hn::Set(d_, static_cast<T>(-p.c));
      for (size_t at = 0; at < vectors_ * N; at += N) {
        const V lambda = hn::Load(d_, own_.rate + at);
        hn::Store(hn::Mul(minus_c, hs::Softplus(d_, lambda)), d_, own_.rate + at);
        hn::Store(hn::Mul(minus_c, hs::Sigmoids(d_, lambda).s), d_, own_.slope + at);
      }
    }
  }

  // Begins a sequence, whose tiles are then processed in order, and in reverse by the backward pass.
  void Begin(const Sequence& s) { LoadRow(p_.initial, s, own_.h); }

  HWY_NOINLINE HWY_ATTR void ForwardTile(const Sequence& s, int64_t begin) {
    const size_t tokens = TokensAt(s, begin);
    LoadTile(s, begin, tokens);
    FindLines(s, begin + kTileTokens, {&p_.x, &FirstOf(p_), &p_.input_gate, &p_.o});
    for (size_t v = 0; v < vectors_; ++v) {
      V h = hn::Load(d_, own_.h + v * N);
      for (size_t t = 0; t < tokens; ++t) {
        const size_t at = t * kWidth + v * N;
        h = After(TokenAt(at, IsFirst(begin, t)), h);
        hn::Store(h, d_, b_.o + at);
        Prefetch(v, t);
      }
      hn::Store(h, d_, own_.h + v * N);
    }
    StoreRows(b_.o, kWidth, ViewAt(p_.o, s, begin, tokens));
  }

  void End(const Sequence& s) { StoreRow(own_.h, p_.final, s); }

  // Stores the states before a tile.
  void StoreBoundaryState(int64_t begin) {
    std::copy_n(own_.h, kWidth, own_.boundary_states + begin / kTileTokens * static_cast<int64_t>(kWidth));
  }

  // Advances the states over a tile without storing outputs.
  HWY_NOINLINE HWY_ATTR void PassTile(const Sequence& s, int64_t begin) {
    const size_t tokens = TokensAt(s, begin);
    LoadTile(s, begin, tokens);
    FindLines(s, begin + kTileTokens, {&p_.x, &FirstOf(p_), &p_.input_gate});
    for (size_t v = 0; v < vectors_; ++v) {
      V h = hn::Load(d_, own_.h + v * N);
      for (size_t t = 0; t < tokens; ++t) {
        h = After(TokenAt(t * kWidth + v * N, IsFirst(begin, t)), h);
        Prefetch(v, t);
      }
      hn::Store(h, d_, own_.h + v * N);
    }
  }

  void BeginBackward(const Sequence& s, const Gradients& g) {
    own_.constants.Clear();
    LoadRow(g.d_final, s, own_.p);
  }

  // Computes gradients of a tile's tensors, or if none are wanted only that of the state before the tile.
  void BackwardTile(const Sequence& s, int64_t begin, const Gradients& g, bool states_alone) {
    if (states_alone) return OneTile<false>(s, begin, g);
    OneTile<true>(s, begin, g);
    if (begin % kChunkTokens == 0) own_.constants.EndChunk();
  }

  void EndBackward(const Sequence& s, const Gradients& g, int64_t sequence, const SharedSums& shared) {
    StoreRow(own_.p, g.dinitial, s);
    if constexpr (kRule == Rule::kGates) {
      for (size_t i = 0; i < kWidth; ++i) {
        own_.constants.total[i] *= static_cast<double>(own_.slope[i]);
      }
      shared.Add(own_.constants, block_, sequence);
    }
  }

 private:
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = Lanes<T>();
  static constexpr size_t kWidth = BlockWidth<T>();

  // The numbers that are computed from the tensors of a token.
  struct Token {
    Decay<V> decay;  // a
    V written;       // b
    // For gates: the sigmoids of r and i, sqrt(1 - a^2), and 1 - a^2.
    hs::SigmoidPair<V> recurrence, input;
    V root, square, a;
  };

  static const Tokens& FirstOf(const Problem& p) { return kRule == Rule::kDecay ? p.log_decay : p.recurrence_gate; }
  static size_t TokensAt(const Sequence& s, int64_t begin) {
    return static_cast<size_t>(std::min(kTileTokens, s.count - begin));
  }
  // True for the first token of a sequence without an initial state.
  bool IsFirst(int64_t begin, size_t t) const { return begin == 0 && t == 0 && p_.initial.data == nullptr; }
  MatrixView ViewAt(const Tokens& x, const Sequence& s, int64_t begin, size_t tokens) const {
    return ViewOf(x, s, begin, tokens, 0, block_.first, channels_);
  }

  void LoadRow(const Numbers& from, const Sequence& s, T* to) const {
    if (from.data == nullptr) return ClearRows(to, kWidth, 1, channels_);
    LoadRows(ViewOf(from, s.state, 1, block_.first, channels_), to, kWidth);
  }
  void StoreRow(const T* from, const Numbers& to, const Sequence& s) const {
    if (to.data == nullptr) return;
    StoreRows(from, kWidth, ViewOf(to, s.state, 1, block_.first, channels_));
  }
  void LoadTile(const Sequence& s, int64_t begin, size_t tokens) const {
    LoadRows(ViewAt(p_.x, s, begin, tokens), b_.x, kWidth);
    LoadRows(ViewAt(FirstOf(p_), s, begin, tokens), b_.first, kWidth);
    if constexpr (kRule == Rule::kGates) {
      LoadRows(ViewAt(p_.input_gate, s, begin, tokens), b_.second, kWidth);
    }
  }

  void FindLines(const Sequence& s, int64_t begin, std::initializer_list<const Tokens*> tensors) {
    NextLines* next = next_;
    for (const Tokens* x : tensors) {
      const bool exists = begin >= 0 && begin < s.count && x->data != nullptr;
      *next++ = exists ? NextLines(ViewAt(*x, s, begin, TokensAt(s, begin)), N) : NextLines();
    }
  }
  HWY_INLINE void Prefetch(size_t v, size_t t) const {
    for (const NextLines& next : next_) next.Prefetch(v, static_cast<int64_t>(t));
  }

  HWY_INLINE Token TokenAt(size_t at, bool is_first) const {
    Token token;
    const V x = hn::Load(d_, b_.x + at);
    if constexpr (kRule == Rule::kDecay) {
      token.decay = DecayFrom(hs::AtMost(d_, hn::Load(d_, b_.first + at), T{0}));
      token.written = x;
    } else {
      const V one = hn::Set(d_, T{1});
      token.recurrence = hs::Sigmoids(d_, hn::Load(d_, b_.first + at));
      token.input = hs::Sigmoids(d_, hn::Load(d_, b_.second + at));
      const V rate = hn::Load(d_, own_.rate + at % kWidth);
      token.decay = DecayFrom(hn::Mul(token.recurrence.s, rate));
      // 1 - a^2 = (1 - a) (1 + a), which does not cancel if a is near 1.
      const V power = PowerOf(d_, token.decay);
      const V less = hn::MulAdd(power, token.decay.fraction, hn::Sub(power, one));  // a - 1
      token.a = hn::MulAdd(power, token.decay.fraction, power);
      token.square = hn::Neg(hn::Mul(less, hn::Add(one, token.a)));
      token.root = is_first ? one : hn::Sqrt(token.square);
      token.written = hn::Mul(token.root, hn::Mul(token.input.s, x));
    }
    return token;
  }
  // Returns exp(log_decay).
  HWY_INLINE Decay<V> DecayFrom(V log_decay) const {
    const V log2e = hn::Set(d_, static_cast<T>(hs::kLog2E));
    return DecayOf(d_, ClampLog2Decay(d_, hn::Mul(log_decay, log2e)));
  }
  // Returns a h + b. If a is near 1, (a - 1) h is added to b before h is added: by itself, a decay by less than half a
  // rounding of h would be lost, always in the same direction.
  HWY_INLINE V After(const Token& token, V h) const {
    const V changed = hn::Add(h, hn::MulAdd(token.decay.fraction, h, token.written));
    const V decayed = hn::Add(Decayed(d_, token.decay, h), token.written);
    return hn::IfThenElse(IsNearOne(d_, token.decay), changed, decayed);
  }

  template <bool kGradients>
  HWY_NOINLINE HWY_ATTR void OneTile(const Sequence& s, int64_t begin, const Gradients& g) {
    const size_t tokens = TokensAt(s, begin);
    LoadTile(s, begin, tokens);
    LoadRows(ViewAt(g.d_o, s, begin, tokens), b_.d_o, kWidth);
    FindLines(s, begin - kTileTokens, {&p_.x, &FirstOf(p_), &p_.input_gate, &g.d_o});
    const T* boundary_state = own_.boundary_states + begin / kTileTokens * static_cast<int64_t>(kWidth);
    for (size_t v = 0; v < vectors_; ++v) {
      V h = kGradients ? hn::Load(d_, boundary_state + v * N) : hn::Zero(d_);
      for (size_t t = 0; t < tokens; ++t) {
        const size_t at = t * kWidth + v * N;
        if constexpr (kGradients) {
          hn::Store(h, d_, b_.o + at);
          h = After(TokenAt(at, IsFirst(begin, t)), h);
        }
        Prefetch(v, t);
      }
      V p = hn::Load(d_, own_.p + v * N);
      for (size_t t = tokens; t-- > 0;) p = BackwardToken<kGradients>(t * kWidth + v * N, IsFirst(begin, t), p);
      hn::Store(p, d_, own_.p + v * N);
    }
    if constexpr (!kGradients) return;
    const auto store = [&](const T* rows, const Tokens& to) {
      if (to.data != nullptr) StoreRows(rows, kWidth, ViewAt(to, s, begin, tokens));
    };
    store(b_.x, g.dx);
    store(b_.first, kRule == Rule::kDecay ? g.dlog_decay : g.drecurrence_gate);
    store(b_.second, g.dinput_gate);
  }

  // Replaces the tensors of a token by their gradients, with kGradients, and returns the gradient of the state before
  // it.
  template <bool kGradients>
  HWY_INLINE V BackwardToken(size_t at, bool is_first, V p) const {
    p = hn::Add(p, hn::Load(d_, b_.d_o + at));
    const Token token = TokenAt(at, is_first);
    const V before = Decayed(d_, token.decay, p);  // a p
    if constexpr (!kGradients) return before;
    V dlog = hn::Mul(before, hn::Load(d_, b_.o + at));
    if constexpr (kRule == Rule::kDecay) {
      hn::Store(p, d_, b_.x + at);
      hn::Store(dlog, d_, b_.first + at);
    } else {
      const V x = hn::Load(d_, b_.x + at);
      const V d_gated = hn::Mul(p, token.root);  // the gradient of sigmoid(i) x
      hn::Store(hn::Mul(d_gated, token.input.s), d_, b_.x + at);
      hn::Store(hn::Mul(hn::Mul(d_gated, x), hn::Mul(token.input.s, token.input.complement)), d_, b_.second + at);
      if (!is_first) {
        // droot / dlog a = -a^2 / root, where 1 / (2 root) is limited to 1000.
        constexpr T kLeast = T{1e-6} / 4;
        const V square = hs::AtLeast(d_, token.square, kLeast);
        const V slope = hn::Div(hn::Mul(token.a, token.a), hn::Sqrt(square));
        dlog = hn::NegMulAdd(hn::Mul(p, hn::Mul(token.input.s, x)), slope, dlog);
      }
      T* sum = own_.constants.Row(0) + at % kWidth;
      hn::Store(hn::MulAdd(dlog, token.recurrence.s, hn::Load(d_, sum)), d_, sum);
      const V rate = hn::Load(d_, own_.rate + at % kWidth);
      hn::Store(hn::Mul(hn::Mul(dlog, rate), hn::Mul(token.recurrence.s, token.recurrence.complement)), d_,
                b_.first + at);
    }
    return before;
  }

  const D d_;
  const Problem& p_;
  const ElementwiseBuffers<T>& b_;
  const ElementwiseBlockBuffers<T>& own_;
  const ColumnBlock block_;
  const size_t channels_, vectors_;
  NextLines next_[4];
};

template <class T>
int64_t ElementwiseBytes(const Problem& p) {
  Carver carver(nullptr);
  ElementwiseBuffers<T> unused;
  unused.LayOut(p, false, carver);
  return carver.bytes();
}

// The column blocks of one task, at most kBlocksAtOnce.
template <class T, Rule kRule>
class ElementwiseBlocks {
 public:
  ElementwiseBlocks(const Problem& p, const ElementwiseBuffers<T>& buffers, const ColumnBlocks& blocks, int64_t first,
                    int64_t last)
      : count_(static_cast<size_t>(last - first)) {
    for (size_t i = 0; i < count_; ++i) {
      all_[i].emplace(p, buffers, buffers.own[i], blocks.At(first + static_cast<int64_t>(i)));
    }
  }
  template <class F>
  void ForEach(const F& f) {
    for (size_t i = 0; i < count_; ++i) f(*all_[i]);
  }

 private:
  const size_t count_;
  std::array<std::optional<ElementwiseBlock<T, kRule>>, kBlocksAtOnce> all_;
};

// Several column blocks per task are only faster if channels are contiguous.
inline TaskGrid ElementwiseGrid(const Problem& p, const ColumnBlocks& blocks, int64_t threads) {
  return TaskGrid(p, blocks.size(), p.x.column == 1 ? kBlocksAtOnce : 1, threads);
}

template <class T, Rule kRule>
void ElementwiseRun(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(ElementwiseBytes<T>(p));
  const ColumnBlocks blocks(p, BlockWidth<T>());
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  const TaskGrid grid = ElementwiseGrid(p, blocks, ctx.num_threads());
  ctx.ParallelFor(grid.tasks(), [&](int64_t task, int worker) {
    Carver carver(ctx.Scratch(worker));
    ElementwiseBuffers<T> buffers;
    buffers.LayOut(p, false, carver);
    const int64_t block = task % grid.runs_of_blocks * grid.blocks;
    ElementwiseBlocks<T, kRule> run(p, buffers, blocks, block, std::min(block + grid.blocks, blocks.size()));
    const int64_t first = task / grid.runs_of_blocks * grid.sequences;
    for (int64_t i = first; i < std::min(first + grid.sequences, sequences); ++i) {
      const Sequence& s = p.sequences[static_cast<size_t>(i)];
      run.ForEach([&](auto& one) { one.Begin(s); });
      for (int64_t begin = 0; begin < s.count; begin += kTileTokens) {
        run.ForEach([&](auto& one) { p.o.data == nullptr ? one.PassTile(s, begin) : one.ForwardTile(s, begin); });
      }
      run.ForEach([&](auto& one) { one.End(s); });
    }
  });
}

template <class T>
BackwardBytes ElementwiseBackBytes(const Problem& p) {
  Carver carver(nullptr), shared(nullptr);
  ElementwiseBuffers<T> unused;
  unused.LayOut(p, true, carver);
  SharedSums sums;
  sums.LayOut(1, p.channels, ColumnBlocks(p, BlockWidth<T>()).size(), shared);
  return {carver.bytes(), shared.bytes()};
}

template <class T, Rule kRule>
void ElementwiseBackRun(Context& ctx, const Problem& p, const Gradients& g) {
  const BackwardBytes bytes = ElementwiseBackBytes<T>(p);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  const ColumnBlocks blocks(p, BlockWidth<T>());
  Carver shared(ctx.Shared());
  SharedSums sums;
  sums.LayOut(1, p.channels, blocks.size(), shared);
  sums.Begin();
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  const TaskGrid grid = ElementwiseGrid(p, blocks, ctx.num_threads());
  const bool states_alone = OfStatesAlone(g);
  ctx.ParallelFor(sequences * grid.runs_of_blocks, [&](int64_t task, int worker) {
    Carver carver(ctx.Scratch(worker));
    ElementwiseBuffers<T> buffers;
    buffers.LayOut(p, true, carver);
    const int64_t block = task % grid.runs_of_blocks * grid.blocks;
    ElementwiseBlocks<T, kRule> run(p, buffers, blocks, block, std::min(block + grid.blocks, blocks.size()));
    const int64_t sequence = task / grid.runs_of_blocks;
    const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
    run.ForEach([&](auto& one) { one.Begin(s); });
    for (int64_t begin = 0; !states_alone && begin < s.count; begin += kTileTokens) {
      run.ForEach([&](auto& one) {
        one.StoreBoundaryState(begin);
        if (begin + kTileTokens < s.count) one.PassTile(s, begin);
      });
    }
    run.ForEach([&](auto& one) { one.BeginBackward(s, g); });
    for (int64_t tile = NumTiles(s.count); tile-- > 0;) {
      run.ForEach([&](auto& one) { one.BackwardTile(s, tile * kTileTokens, g, states_alone); });
    }
    run.ForEach([&](auto& one) { one.EndBackward(s, g, sequence, sums); });
  });
  sums.Store(0, 1, g.dlambda);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_ELEMENTWISE_INL_H_
