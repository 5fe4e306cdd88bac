// Selective scans, backward, for one dtype of states.
//
// Compiled once per SIMD target. A forward pass stores the states at the boundaries of tiles of 16 tokens. Then, tile
// by tile from the last, the forward pass's own function recomputes the tile and stores a and a h_{t-1} of each token.
// With p the gradient of h, the tile is traversed in reverse, per vector of states and token:
//
//   p += dy C,  dB += p (s x),  dx' += p B,  r = p a h_{t-1},  ds' += r A,  dA += r s,  p = a p
//
// with the same lanes: 8 multiply-adds and 10 loads and stores. All together this takes three times as long as the
// forward pass. dB and dC are sums over channels: each lane sums its own during a tile, lanes are added at its end, and
// column blocks add theirs in ascending order, 128 tokens at a time. Gradients of constants are summed in the compute
// type over 128 tokens, beyond that in f64, and then over sequences in order (constant_sums-inl.h).
#if defined(HEED_ENGINES_SCAN_SELECTIVE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_SELECTIVE_BACKWARD_INL_H_
#undef HEED_ENGINES_SCAN_SELECTIVE_BACKWARD_INL_H_
#else
#define HEED_ENGINES_SCAN_SELECTIVE_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/core/ticket.h"
#include "heed/engines/scan/constant_sums-inl.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/selective-inl.h"
#include "heed/engines/scan/tasks.h"
#include "heed/simd/activation-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The rows of ConstantSums: the states of A, those of B and C if they are constants, skip, and bias.
struct SelectiveRows {
  int64_t A, B, C, skip, bias, count;
  explicit SelectiveRows(const Problem& p) {
    const auto of = [&](const Weights& w) { return w.constants.data != nullptr ? p.states : 0; };
    A = 0;
    B = p.states;
    C = B + of(p.B);
    skip = C + of(p.C);
    bias = skip + 1;
    count = bias + 1;
  }
};

// The scratch memory of one thread.
template <class T>
struct SelectiveBackwardBuffers {
  TileBuffers<T> tile;
  BlockBuffers<T> block;
  Trace<T> trace;
  T *x, *d_o, *dx, *ds;  // [kTile][width]; dx and ds first hold the sums dx' and ds'
  T* p;                  // [states][width]: the gradient of h
  T* B_sums;             // p s x, like Trace::C_sums; unless B is constant
  T *B_part, *C_part;    // [kChunkTokens][states]: sums over the column block
  ConstantSums<T> constants;
  T* boundary_states;  // [tiles][states][width]

  void LayOut(const Problem& problem, Carver& carver) {
    constexpr auto width = static_cast<int64_t>(BlockWidth<T>());
    constexpr auto lanes = static_cast<int64_t>(Lanes<T>());
    const auto row = static_cast<int64_t>(RoundedUp<T>(static_cast<size_t>(problem.states)));
    tile.LayOut(problem, carver);
    block.LayOut(problem, carver);
    carver.Next(trace.kept, kTileTokens * 3 * static_cast<int64_t>(kManyStates) * lanes);
    for (T** rows : {&trace.dy, &x, &d_o, &dx, &ds}) carver.Next(*rows, kTileTokens * width);
    carver.Next(p, problem.states * width);
    carver.Next(B_sums, kTileTokens * problem.states * lanes);
    carver.Next(trace.C_sums, kTileTokens * problem.states * lanes);
    carver.Next(B_part, kChunkTokens * row);
    carver.Next(C_part, kChunkTokens * row);
    constants.LayOut(SelectiveRows(problem).count, carver);
    carver.Next(boundary_states, NumTiles(MostTokens(problem)) * problem.states * width);
  }
};

// Sums over tasks: those of constants, and dB and dC of the column blocks of a group.
template <class T>
struct SelectiveShared {
  SharedSums sums;
  TicketCounter* counters = nullptr;                  // [sequence][group][chunk], orders column blocks
  T *B_stage = nullptr, *C_stage = nullptr;           // partial sums: [sequence][group][token][states]
  std::vector<int64_t> tokens_before, chunks_before;  // per sequence
  int64_t num_counters = 0;

  int64_t LayOut(const Problem& p, const ColumnBlocks& blocks, void* base) {
    tokens_before.clear();
    chunks_before.clear();
    int64_t tokens = 0;
    num_counters = 0;
    for (const Sequence& s : p.sequences) {
      tokens_before.push_back(tokens);
      chunks_before.push_back(num_counters);
      tokens += s.count * p.groups;
      num_counters += NumChunks(s.count) * p.groups;
    }
    const auto row = static_cast<int64_t>(RoundedUp<T>(static_cast<size_t>(p.states)));
    const bool staged = blocks.per_group() > 1;
    Carver carver(base);
    sums.LayOut(SelectiveRows(p).count, p.channels, blocks.size(), carver);
    carver.Next(counters, num_counters);
    carver.Next(B_stage, staged && p.B.constants.data == nullptr ? tokens * row : 0);
    carver.Next(C_stage, staged && p.C.constants.data == nullptr ? tokens * row : 0);
    return carver.bytes();
  }
};

template <class T>
class SelectiveBackwardBlock : public SelectiveBlock<T> {
 public:
  SelectiveBackwardBlock(const Problem& p, const Gradients& g, const SelectiveBackwardBuffers<T>& buffers,
                         const ColumnBlocks& blocks, const ColumnBlock& block, SelectiveShared<T>& shared)
      : SelectiveBlock<T>(p, buffers.tile, buffers.block, block), g_(g), back_(buffers), rows_(p),
        per_group_(blocks.per_group()), shared_(shared) {
    trace_ = buffers.trace;
    if (p.C.constants.data != nullptr) trace_.C_sums = back_.constants.Row(rows_.C);
    back_.constants.Clear();
  }

  void Backward(int64_t sequence) {
    const Sequence& s = p_.sequences[static_cast<size_t>(sequence)];
    const bool states_alone = OfStatesAlone(g_);
    if (!states_alone) StoreBoundaryStates(s);
    if (g_.d_final.data != nullptr) {
      LoadRows(ViewOf(g_.d_final, s.state, states_, block_.first, channels_), back_.p, kWidth);
    } else {
      ClearRows(back_.p, kWidth, states_, channels_);
    }
    for (int64_t tile = NumTiles(s.count); tile-- > 0;) {
      const int64_t begin = tile * kTileTokens;
      if (states_alone) {
        StateTile(s, begin);
        continue;
      }
      OneTile(s, begin);
      if (begin % kChunkTokens != 0) continue;
      ReduceOverBlocks(sequence, s, begin);
      back_.constants.EndChunk();
    }
    if (g_.dinitial.data != nullptr) {
      StoreRows(back_.p, kWidth, ViewOf(g_.dinitial, s.state, states_, block_.first, channels_));
    }
    shared_.sums.Add(back_.constants, block_, sequence);
  }

 private:
  using Base = SelectiveBlock<T>;
  using typename Base::V;
  using Base::b_, Base::channels_, Base::d_, Base::ForEachVector, Base::kWidth, Base::N, Base::next_, Base::p_,
      Base::row_, Base::states_, Base::block_, Base::tile_, Base::TokensAt, Base::trace_, Base::vectors_;

  // Stores the states before each tile.
  void StoreBoundaryStates(const Sequence& s) {
    this->LoadState(s);
    for (int64_t begin = 0; begin < s.count; begin += kTileTokens) {
      std::copy_n(b_.h, states_ * kWidth, BoundaryStateOf(begin));
      if (begin + kTileTokens >= s.count) break;
      this->LoadTile(s, begin, kTile, tile_.inputs);
      this->LoadWeights(s, begin);
      this->FindLines(s, begin + kTileTokens, {&p_.x, &p_.delta}, next_);
      for (size_t v = 0; v < vectors_; ++v) this->template Advance<Stores::kStates>(v, kTile);
    }
  }
  T* BoundaryStateOf(int64_t begin) const {
    return back_.boundary_states + static_cast<size_t>(begin / kTileTokens) * states_ * kWidth;
  }

  // Loads the rows of a tile, and computes dy.
  HWY_ATTR void LoadBackwardTile(const Sequence& s, int64_t begin, size_t tokens) {
    const auto view = [&](const Tokens& x) { return ViewOf(x, s, begin, tokens, 0, block_.first, channels_); };
    this->LoadTile(s, begin, tokens, back_.x);
    this->LoadWeights(s, begin);
    this->FindLines(s, begin - kTileTokens, {&p_.x, &p_.delta, &g_.d_o, &p_.gate}, next_);
    const bool gated = p_.gate.data != nullptr;
    LoadRows(view(g_.d_o), gated ? back_.d_o : trace_.dy, kWidth);
    if (!gated) return;
    LoadRows(view(p_.gate), tile_.gate, kWidth);
    ForEachVector(tokens, [&](size_t at) HWY_ATTR {
      const V silu = hs::Silu(d_, hn::Load(d_, tile_.gate + at));
      hn::Store(hn::Mul(hn::Load(d_, back_.d_o + at), silu), d_, trace_.dy + at);
    });
  }

  // Computes the gradient of the state before a tile alone.
  HWY_NOINLINE HWY_ATTR void StateTile(const Sequence& s, int64_t begin) {
    const size_t tokens = TokensAt(s, begin);
    LoadBackwardTile(s, begin, tokens);
    for (size_t v = 0; v < vectors_; ++v) {
      ForEachRun(states_, [&](size_t n, auto count) HWY_ATTR {
        if (this->has_constants()) {
          BackwardRun<count, true, false>(v, n, tokens);
        } else {
          BackwardRun<count, false, false>(v, n, tokens);
        }
      });
    }
  }

  HWY_NOINLINE HWY_ATTR void OneTile(const Sequence& s, int64_t begin) {
    const size_t tokens = TokensAt(s, begin);
    const auto view = [&](const Tokens& x) { return ViewOf(x, s, begin, tokens, 0, block_.first, channels_); };
    std::copy_n(BoundaryStateOf(begin), states_ * kWidth, b_.h);
    LoadBackwardTile(s, begin, tokens);
    const bool gated = p_.gate.data != nullptr;
    if (p_.C.constants.data == nullptr) std::fill_n(trace_.C_sums, tokens * states_ * N, T{0});
    if (p_.B.constants.data == nullptr) std::fill_n(back_.B_sums, tokens * states_ * N, T{0});

    for (size_t v = 0; v < vectors_; ++v) {
      ForEachRun(states_, [&](size_t n, auto count) HWY_ATTR {
        if (this->has_constants()) {
          this->template AdvanceRun<Stores::kTrace, count, true>(v, n, tokens);
          BackwardRun<count, true, true>(v, n, tokens);
        } else {
          this->template AdvanceRun<Stores::kTrace, count, false>(v, n, tokens);
          BackwardRun<count, false, true>(v, n, tokens);
        }
      });
    }
    const auto place = static_cast<size_t>(begin % kChunkTokens) * row_;
    if (p_.B.constants.data == nullptr) SumLanes(back_.B_sums, tokens, back_.B_part + place);
    if (p_.C.constants.data == nullptr) SumLanes(trace_.C_sums, tokens, back_.C_part + place);

    Finish(tokens);
    if (gated && g_.dgate.data != nullptr) {
      ForEachVector(tokens, [&](size_t at) HWY_ATTR {
        const V z = hn::Load(d_, tile_.gate + at);
        const V slope = hs::SiluSlope(z, hs::Sigmoids(d_, z));
        const V dy = hn::Mul(hn::Load(d_, back_.d_o + at), hn::Load(d_, tile_.y + at));
        hn::Store(hn::Mul(dy, slope), d_, tile_.gate + at);
      });
      StoreRows(tile_.gate, kWidth, view(g_.dgate));
    }
    if (g_.dx.data != nullptr) StoreRows(back_.dx, kWidth, view(g_.dx));
    if (g_.ddelta.data != nullptr) StoreRows(back_.ds, kWidth, view(g_.ddelta));
  }

  // Traverses the tokens of a tile in reverse, after AdvanceRun() has stored its trace. Without kGradients it needs no
  // trace and computes p alone.
  template <size_t kCount, bool kConstants, bool kGradients>
  HWY_NOINLINE HWY_ATTR void BackwardRun(size_t v, size_t first, size_t tokens) const {
    // Local pointers, because the compiler would reload members after every store of a vector.
    const T* HWY_RESTRICT A = b_.A + first * kWidth + v * N;
    T* HWY_RESTRICT dA = back_.constants.Row(rows_.A) + first * kWidth + v * N;
    const T *HWY_RESTRICT steps = tile_.steps + v * N, *HWY_RESTRICT inputs = tile_.inputs + v * N;
    const T* HWY_RESTRICT dys = trace_.dy + v * N;
    T *HWY_RESTRICT dxs = back_.dx + v * N, *HWY_RESTRICT dss = back_.ds + v * N;
    const T *HWY_RESTRICT rowB = tile_.B + tokens * row_, *HWY_RESTRICT rowC = tile_.C + tokens * row_;
    const T* HWY_RESTRICT trace = trace_.kept + tokens * 3 * kManyStates * N;
    // There is a row of sums per token, or a single one for constants.
    const bool B_is_constant = kConstants && p_.B.constants.data != nullptr;
    const size_t sums_per_token = B_is_constant ? 0 : states_ * N;
    const size_t sums_per_state = B_is_constant ? kWidth : N;
    T* HWY_RESTRICT sums = (B_is_constant ? back_.constants.Row(rows_.B) + v * N : back_.B_sums) +
                           first * sums_per_state + tokens * sums_per_token;
    const size_t row = row_;
    T* state = back_.p + first * kWidth + v * N;
    constexpr size_t kDecays = HWY_MIN(kCount, static_cast<size_t>(hs::kShapes.scan_decays));
    V p[kCount];
    HWY_UNROLL(16)
    for (size_t n = 0; n < kCount; ++n) p[n] = hn::Load(d_, state + n * kWidth);
    for (size_t t = tokens; !kGradients && t-- > 0;) {
      rowC -= row;
      const V step = hn::Load(d_, steps + t * kWidth), dy = hn::Load(d_, dys + t * kWidth);
      if (first == 0) {
        for (const NextLines& lines : next_) lines.Prefetch(v, static_cast<int64_t>(t));
      }
      Decay<V> decays[kDecays];
      HWY_UNROLL(16)
      for (size_t n = 0; n < kCount; ++n) {
        const Decay<V> decay = this->template NextDecay<kDecays>(step, A, n, decays);
        p[n] = hn::MulAdd(dy, this->template WeightOf<kConstants>(p_.C, b_.C, rowC, v, first + n), p[n]);
        p[n] = hn::Mul(hn::MulAdd(decay.fraction, p[n], p[n]), PowerOf(d_, decay));
      }
    }
    for (size_t t = tokens; kGradients && t-- > 0;) {
      rowB -= row;
      rowC -= row;
      trace -= 3 * kManyStates * N;
      sums -= sums_per_token;
      const V step = hn::Load(d_, steps + t * kWidth), input = hn::Load(d_, inputs + t * kWidth);
      const V dy = hn::Load(d_, dys + t * kWidth);
      V dx = first == 0 ? hn::Zero(d_) : hn::Load(d_, dxs + t * kWidth);
      V ds = first == 0 ? hn::Zero(d_) : hn::Load(d_, dss + t * kWidth);
      HWY_UNROLL(16)
      for (size_t n = 0; n < kCount; ++n) {
        const V C = this->template WeightOf<kConstants>(p_.C, b_.C, rowC, v, first + n);
        const V B = this->template WeightOf<kConstants>(p_.B, b_.B, rowB, v, first + n);
        T* sum = sums + n * (kConstants ? sums_per_state : N);
        p[n] = hn::MulAdd(dy, C, p[n]);
        hn::Store(hn::MulAdd(p[n], input, hn::Load(d_, sum)), d_, sum);
        dx = hn::MulAdd(p[n], B, dx);
        const V r = hn::Mul(p[n], hn::Load(d_, trace + (3 * n + 2) * N));
        ds = hn::MulAdd(r, hn::Load(d_, A + n * kWidth), ds);
        hn::Store(hn::MulAdd(r, step, hn::Load(d_, dA + n * kWidth)), d_, dA + n * kWidth);
        p[n] = hn::Mul(hn::MulAdd(hn::Load(d_, trace + 3 * n * N), p[n], p[n]), hn::Load(d_, trace + (3 * n + 1) * N));
      }
      hn::Store(dx, d_, dxs + t * kWidth);
      hn::Store(ds, d_, dss + t * kWidth);
    }
    HWY_UNROLL(16)
    for (size_t n = 0; n < kCount; ++n) hn::Store(p[n], d_, state + n * kWidth);
  }
  // Replaces the sums dx' and ds' by dx and ddelta, and adds to the gradients of D and the bias.
  void Finish(size_t tokens) const {
    T *dskip = back_.constants.Row(rows_.skip), *dbias = back_.constants.Row(rows_.bias);
    const V ln2 = hn::Set(d_, static_cast<T>(hs::kLn2));
    ForEachVector(tokens, [&](size_t at) HWY_ATTR {
      const size_t channel = at % kWidth;
      const V x = hn::Load(d_, back_.x + at), step = hn::Load(d_, tile_.steps + at);
      const V dy = hn::Load(d_, trace_.dy + at), sum = hn::Load(d_, back_.dx + at);
      const V skip = hn::Load(d_, b_.skip + channel);
      hn::Store(hn::MulAdd(step, sum, hn::Mul(skip, dy)), d_, back_.dx + at);
      V ds = hn::MulAdd(ln2, hn::Load(d_, back_.ds + at), hn::Mul(x, sum));
      // The derivative of softplus is 1 - e^-s.
      if (p_.softplus) ds = hn::Neg(hn::Mul(ds, hs::Expm1(d_, hn::Neg(step))));
      hn::Store(ds, d_, back_.ds + at);
      hn::Store(hn::MulAdd(dy, x, hn::Load(d_, dskip + channel)), d_, dskip + channel);
      hn::Store(hn::Add(ds, hn::Load(d_, dbias + channel)), d_, dbias + channel);
    });
  }

  // Sums over lanes: [tokens][states][lanes] -> [tokens][states], N states at a time.
  HWY_NOINLINE HWY_ATTR void SumLanes(const T* sums, size_t tokens, T* to) const {
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t n = 0; n < states_; n += N) {
        V v[N];
        for (size_t i = 0; i < N; ++i) {
          v[i] = n + i < states_ ? hn::Load(d_, sums + (t * states_ + n + i) * N) : hn::Zero(d_);
        }
        hs::Transpose(d_, v);
        HWY_UNROLL(4)
        for (size_t half = N / 2; half > 0; half /= 2) {
          for (size_t i = 0; i < half; ++i) v[i] = hn::Add(v[i], v[i + half]);
        }
        hn::Store(v[0], d_, to + t * row_ + n);
      }
    }
  }

  // Adds dB and dC of a chunk to the sums of the group's column blocks, in ascending order. The last block stores them.
  void ReduceOverBlocks(int64_t sequence, const Sequence& s, int64_t begin) const {
    const int64_t tokens = std::min(kChunkTokens, s.count - begin);
    const auto i = static_cast<size_t>(sequence);
    TicketCounter& counter =
        shared_.counters[shared_.chunks_before[i] + block_.group * NumChunks(s.count) + begin / kChunkTokens];
    const int64_t place = shared_.tokens_before[i] + block_.group * s.count + begin;
    const bool is_last = block_.in_group + 1 == per_group_;
    if (block_.in_group > 0) WaitForTicket(counter, block_.in_group);
    const auto reduce = [&](const Weights& weights, const Weights& gradient, T* part, T* stage) {
      if (weights.constants.data != nullptr) return;
      const size_t count = static_cast<size_t>(tokens) * row_;
      T* HWY_RESTRICT staged = stage + static_cast<size_t>(place) * row_;
      if (block_.in_group > 0) {
        for (size_t k = 0; k < count; ++k) part[k] += staged[k];
      }
      if (!is_last) {
        std::copy_n(part, count, staged);
      } else if (gradient.tokens.data != nullptr) {
        StoreRows(part, row_, ViewOf(gradient.tokens, s, begin, static_cast<size_t>(tokens), block_.group, 0, states_));
      }
    };
    reduce(p_.B, g_.dB, back_.B_part, shared_.B_stage);
    reduce(p_.C, g_.dC, back_.C_part, shared_.C_stage);
    if (!is_last) ReleaseTicket(counter);
  }

  const Gradients& g_;
  const SelectiveBackwardBuffers<T>& back_;
  const SelectiveRows rows_;
  const int64_t per_group_;
  SelectiveShared<T>& shared_;
};

template <class T>
BackwardBytes SelectiveBackwardBytes(const Problem& p) {
  Carver carver(nullptr);
  SelectiveBackwardBuffers<T> unused;
  unused.LayOut(p, carver);
  SelectiveShared<T> shared;
  return {carver.bytes(), shared.LayOut(p, ColumnBlocks(p, BlockWidth<T>()), nullptr)};
}

template <class T>
void SelectiveBackward(Context& ctx, const Problem& p, const Gradients& g) {
  const BackwardBytes bytes = SelectiveBackwardBytes<T>(p);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  const ColumnBlocks blocks(p, BlockWidth<T>());
  SelectiveShared<T> shared;
  shared.LayOut(p, blocks, ctx.Shared());
  shared.sums.Begin();
  for (int64_t i = 0; i < shared.num_counters; ++i) new (shared.counters + i) TicketCounter(0);
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  ctx.ParallelFor(sequences * blocks.size(), [&](int64_t task, int worker) {
    Carver carver(ctx.Scratch(worker));
    SelectiveBackwardBuffers<T> buffers;
    buffers.LayOut(p, carver);
    SelectiveBackwardBlock<T> block(p, g, buffers, blocks, blocks.At(task % blocks.size()), shared);
    block.Backward(task / blocks.size());
  });
  const SelectiveRows rows(p);
  shared.sums.Store(rows.A, p.states, g.dA);
  shared.sums.Store(rows.B, p.states, g.dB.constants);
  shared.sums.Store(rows.C, p.states, g.dC.constants);
  shared.sums.Store(rows.skip, 1, g.dskip);
  shared.sums.Store(rows.bias, 1, g.dbias);
}

template <class T>
Passes SelectivePasses() {
  return {.forward = &SelectiveForward<T>,
          .workspace = [](const Context&, const Problem& p) { return SelectiveForwardBytes<T>(p); },
          .backward = &SelectiveBackward<T>,
          .backward_workspace = [](const Context&, const Problem& p,
                                   const Gradients&) { return SelectiveBackwardBytes<T>(p); }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_SELECTIVE_BACKWARD_INL_H_
