// RWKV-4, a weighted mean per channel: forward, backward and one token, for one dtype of states.
//
// Compiled once per SIMD target. Lanes are channels, which are independent; a task owns a few vectors of channels of
// one sequence. Per token and channel there are two pairs of weights, each relative to the larger one, which is 1, so
// that each pair takes one exponential. With the state (num, den) relative to exp(p):
//
//   o_t = (A num + B v_t) / (A den + B)        A, B = exp(p - m), exp(u + k_t - m),  m = max(p, u + k_t)
//   num' = E num + F v_t,  den' = E den + F    E, F = exp(p + w - p'), exp(k_t - p'),  p' = max(p + w, k_t)
//
// p + w is rounded, and w may be smaller than the rounding. E includes what the sum has lost; otherwise a channel with
// slow decay would decay by multiples of a rounding of p.
//
// Backward, p and m are treated as constants, because they cancel. States are stored at the boundaries of blocks of 64
// tokens. In a block, the state before each token is recomputed, then the gradients of (num, den) are computed in
// reverse, with four exponentials per token and channel.
#if defined(HEED_ENGINES_RECURRENCE_CHANNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_CHANNELS_INL_H_
#undef HEED_ENGINES_RECURRENCE_CHANNELS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_CHANNELS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Vectors of channels per task: the chains over tokens of several vectors overlap.
inline constexpr int kChannelVectors = hs::kVectorRegisters == 32 ? 4 : 2;

// Channels per task.
template <class T>
constexpr int64_t ChannelWidth() {
  return kChannelVectors * static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<T>()));
}

// The scratch memory of one thread.
template <class T>
struct ChannelBuffers {
  T *w, *u;            // [width]
  T *num, *den, *max;  // [width]: the initial state, then the final one
  T *d_num, *d_den;    // [width]
  T *dw, *du;          // [width]: sums over a block
  T* before;           // [kBlock][3][width]: states before each token
  T* boundary_states;  // [blocks][3][width]

  static int64_t Bytes(const Problem& p, bool backward) {
    ChannelBuffers unused = {};
    return unused.LayOut(p, backward, nullptr);
  }
  void Init(const Problem& p, bool backward) { LayOut(p, backward, this); }

 private:
  int64_t LayOut(const Problem& p, bool backward, void* base) {
    Carver carver(base, (sizeof(ChannelBuffers) + 127) / 128 * 128);
    constexpr int64_t width = ChannelWidth<T>();
    for (T** row : {&w, &u, &num, &den, &max, &d_num, &d_den, &dw, &du}) carver.Next(*row, width);
    int64_t blocks = 0;
    for (const Sequence& s : p.sequences) blocks = std::max(blocks, NumBlocks(s.count));
    carver.Next(before, backward ? kBlockTokens * 3 * width : 0);
    carver.Next(boundary_states, backward ? blocks * 3 * width : 0);
    return carver.bytes();
  }
};

template <class T>
class ChannelTask {
 public:
  ChannelTask(const Problem& p, int64_t index, const ChannelBuffers<T>& buffers)
      : p_(p), s_(p.sequences[static_cast<size_t>(index / PerSequence(p))]), b_(buffers),
        first_(index % PerSequence(p) * ChannelWidth<T>()),
        count_(static_cast<size_t>(std::min(ChannelWidth<T>(), p.value_heads - first_))) {
    const auto zero = hn::Zero(d_);
    for (size_t i = 0; i < kWidth; i += N) {
      for (T* row : {b_.w, b_.u}) hn::Store(zero, d_, row + i);
    }
    for (size_t i = 0; i < count_; ++i) {
      const int64_t channel = first_ + static_cast<int64_t>(i);
      const T w = static_cast<const T*>(p.log_decay.data)[channel * p.log_decay.head_stride];
      b_.w[i] = w > 0 ? 0 : w < kNothing ? kNothing : w;  // NaN propagates
      b_.u[i] = static_cast<T>(LoadAsDouble(p.bonus.dtype, p.bonus.data, channel * p.bonus.head_stride));
    }
  }

  static int64_t PerSequence(const Problem& p) { return (p.value_heads + ChannelWidth<T>() - 1) / ChannelWidth<T>(); }

  HWY_NOINLINE HWY_ATTR void Forward() {
    LoadStates();
    hs::WithStorage<T>(p_.dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      State state = Load(b_.num, b_.den, b_.max);
      const int64_t outputs = p_.o.data == nullptr ? 0 : s_.count;
      for (int64_t t = outputs; t < s_.count; ++t) AdvanceRow<S>(t, state);  // only the states
      for (int64_t t = 0; t < outputs; ++t) {
        Vectors k, v, o;
        for (const Rows* rows : {&p_.q, &p_.v, &p_.o}) Prefetch<S>(*rows, t + kAhead);
        ReadRow<S>(p_.q, t, k);
        ReadRow<S>(p_.v, t, v);
        HWY_UNROLL(4)
        for (int c = 0; c < kChannelVectors; ++c) {
          const Output out = OutputOf(c, k.x[c], v.x[c], state);
          o.x[c] = out.o;
          Advance(c, k.x[c], v.x[c], state);
        }
        WriteRow<S>(o, p_.o, t);
      }
      Store(state, b_.num, b_.den, b_.max);
    });
    StoreStates(p_.final, b_.num);
    StoreStates(p_.final_z, b_.den);
    StoreStates(p_.final_m, b_.max);
  }

  // Adds to `dw` and `du`, which are sums over this task's sequence, per channel.
  HWY_NOINLINE HWY_ATTR void Backward(const Gradients& g, double* dw, double* du) {
    LoadStates();
    LoadNumbers(g.d_final, 0, b_.d_num);
    LoadNumbers(g.d_final_z, 0, b_.d_den);
    const int64_t blocks = NumBlocks(s_.count);
    hs::WithStorage<T>(p_.dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      State state = Load(b_.num, b_.den, b_.max);
      for (int64_t block = 0; block + 1 < blocks; ++block) {
        StoreTo(state, b_.boundary_states + block * 3 * ChannelWidth<T>());
        for (int64_t t = 0; t < kBlockTokens; ++t) AdvanceRow<S>(block * kBlockTokens + t, state);
      }
      for (int64_t block = blocks; block-- > 0;) {
        if (block + 1 < blocks) state = LoadFrom(b_.boundary_states + block * 3 * ChannelWidth<T>());
        OneBlock<S>(block, state, g);
        for (size_t i = 0; i < count_; ++i) {
          dw[first_ + static_cast<int64_t>(i)] += static_cast<double>(b_.dw[i]);
          du[first_ + static_cast<int64_t>(i)] += static_cast<double>(b_.du[i]);
        }
      }
    });
    StoreStates(g.d_initial, b_.d_num);
    StoreStates(g.d_initial_z, b_.d_den);
  }

 private:
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr auto kWidth = static_cast<size_t>(ChannelWidth<T>());
  static constexpr int64_t kAhead = 8;
  static constexpr T kNothing = T{-1e38f};  // the maximum p before the first token

  struct Vectors {
    V x[kChannelVectors];
  };
  struct State {
    Vectors num, den, max;
  };
  struct Output {
    V o, state, token, inverse;  // o, A, B and 1 / (A den + B)
  };
  struct Weights {
    V kept_less, written;  // E - 1 if `stays`, else E; and F
    hn::Mask<D> stays;     // true if p' is p + w
    V max;                 // p'
  };

  HWY_INLINE V ExpOfDistance(V difference) const { return hs::Exp(d_, hn::Neg(hn::Abs(difference))); }

  HWY_INLINE Output OutputOf(int c, V k, V v, const State& s) const {
    const V one = hn::Set(d_, T{1}), own = hn::Add(hn::Load(d_, b_.u + OffsetOf(c)), k);
    const V difference = hn::Sub(s.max.x[c], own), e = ExpOfDistance(difference);
    const auto token_is_larger = hn::Lt(difference, hn::Zero(d_));
    Output out;
    out.state = hn::IfThenElse(token_is_larger, e, one);
    out.token = hn::IfThenElse(token_is_larger, one, e);
    out.inverse = hn::Div(one, hn::MulAdd(out.state, s.den.x[c], out.token));
    out.o = hn::Mul(hn::MulAdd(out.state, s.num.x[c], hn::Mul(out.token, v)), out.inverse);
    return out;
  }

  HWY_INLINE Weights WeightsOf(int c, V k, V max) const {
    const V w = hn::Load(d_, b_.w + OffsetOf(c)), faded = hn::Add(max, w);
    const V part = hn::Sub(faded, max);  // the rounding error of the sum, as in TwoSum
    const V lost = hn::Add(hn::Sub(max, hn::Sub(faded, part)), hn::Sub(w, part));
    const V difference = hn::Sub(faded, k), e = ExpOfDistance(difference);
    Weights x;
    x.stays = hn::Ge(difference, hn::Zero(d_));
    x.kept_less = hn::IfThenElse(x.stays, lost, hn::MulAdd(e, lost, e));
    x.written = hn::IfThenElse(x.stays, e, hn::Set(d_, T{1}));
    x.max = hn::IfThenElse(x.stays, faded, k);
    return x;
  }

  // Returns E x + written.
  HWY_INLINE V Kept(const Weights& w, V x, V written) const {
    return hn::Add(hn::IfThenElseZero(w.stays, x), hn::MulAdd(w.kept_less, x, written));
  }

  HWY_INLINE void Advance(int c, V k, V v, State& s) const {
    const Weights w = WeightsOf(c, k, s.max.x[c]);
    s.num.x[c] = Kept(w, s.num.x[c], hn::Mul(w.written, v));
    s.den.x[c] = Kept(w, s.den.x[c], w.written);
    s.max.x[c] = w.max;
  }

  template <class S>
  HWY_INLINE void AdvanceRow(int64_t t, State& state) const {
    Vectors k, v;
    for (const Rows* rows : {&p_.q, &p_.v}) Prefetch<S>(*rows, t + kAhead);
    ReadRow<S>(p_.q, t, k);
    ReadRow<S>(p_.v, t, v);
    HWY_UNROLL(4)
    for (int c = 0; c < kChannelVectors; ++c) Advance(c, k.x[c], v.x[c], state);
  }

  template <class S>
  HWY_NOINLINE HWY_ATTR void OneBlock(int64_t block, State state, const Gradients& g) {
    const int64_t first = block * kBlockTokens, n = std::min(kBlockTokens, s_.count - first);
    for (int64_t t = 0; t < n; ++t) {
      StoreTo(state, b_.before + t * 3 * ChannelWidth<T>());
      if (t + 1 < n) AdvanceRow<S>(first + t, state);
    }
    Vectors d_num = LoadRow(b_.d_num), d_den = LoadRow(b_.d_den), dw, du;
    for (int c = 0; c < kChannelVectors; ++c) dw.x[c] = du.x[c] = hn::Zero(d_);
    for (int64_t t = n; t-- > 0;) {
      const State before = LoadFrom(b_.before + t * 3 * ChannelWidth<T>());
      Vectors k, v, d_o, dk, dv;
      for (const Rows* rows : {&p_.q, &p_.v, &g.d_o, &g.dq, &g.dv}) {
        Prefetch<S>(*rows, first + t - kAhead);
      }
      ReadRow<S>(p_.q, first + t, k);
      ReadRow<S>(p_.v, first + t, v);
      ReadRow<S>(g.d_o, first + t, d_o);
      HWY_UNROLL(4)
      for (int c = 0; c < kChannelVectors; ++c) {
        const Weights w = WeightsOf(c, k.x[c], before.max.x[c]);
        const V num = before.num.x[c], den = before.den.x[c];
        // Gradients through the state after the token.
        const V d_write = hn::MulAdd(d_num.x[c], v.x[c], d_den.x[c]);
        dv.x[c] = hn::Mul(w.written, d_num.x[c]);
        dk.x[c] = hn::Mul(w.written, d_write);
        d_num.x[c] = Kept(w, d_num.x[c], hn::Zero(d_));
        d_den.x[c] = Kept(w, d_den.x[c], hn::Zero(d_));
        dw.x[c] = hn::Add(dw.x[c], hn::MulAdd(d_num.x[c], num, hn::Mul(d_den.x[c], den)));
        // Gradients through the token's output.
        const Output out = OutputOf(c, k.x[c], v.x[c], before);
        const V d = hn::Mul(d_o.x[c], out.inverse);
        const V d_state = hn::Mul(d, out.state), d_token = hn::Mul(d, out.token);
        d_num.x[c] = hn::Add(d_num.x[c], d_state);
        d_den.x[c] = hn::NegMulAdd(d_state, out.o, d_den.x[c]);
        dv.x[c] = hn::Add(dv.x[c], d_token);
        const V d_weight = hn::Mul(d_token, hn::Sub(v.x[c], out.o));
        dk.x[c] = hn::Add(dk.x[c], d_weight);
        du.x[c] = hn::Add(du.x[c], d_weight);
      }
      if (g.dq.data != nullptr) WriteRow<S>(dk, g.dq, first + t);
      if (g.dv.data != nullptr) WriteRow<S>(dv, g.dv, first + t);
    }
    StoreRow(d_num, b_.d_num);
    StoreRow(d_den, b_.d_den);
    StoreRow(dw, b_.dw);
    StoreRow(du, b_.du);
  }

  static constexpr size_t OffsetOf(int c) { return static_cast<size_t>(c) * N; }

  template <class S>
  HWY_INLINE void ReadRow(const Rows& rows, int64_t t, Vectors& to) const {
    const S* from = RowAt<S>(rows, s_, first_, t);
    HWY_UNROLL(4)
    for (int c = 0; c < kChannelVectors; ++c) {
      const size_t at = OffsetOf(c);
      to.x[c] = at + N <= count_ ? hs::LoadWide(d_, from + at)
                : at < count_    ? hs::LoadWideN(d_, from + at, count_ - at)
                                 : hn::Zero(d_);
    }
  }
  // Rows are too far apart for hardware prefetchers.
  template <class S>
  HWY_INLINE void Prefetch(const Rows& rows, int64_t t) const {
    if (t < 0 || t >= s_.count || rows.data == nullptr) return;
    const char* row = reinterpret_cast<const char*>(RowAt<S>(rows, s_, first_, t));
    for (size_t at = 0; at < count_ * sizeof(S); at += 64) hwy::Prefetch(row + at);
  }

  template <class S>
  HWY_INLINE void WriteRow(const Vectors& from, const Rows& rows, int64_t t) const {
    S* to = RowAt<S>(rows, s_, first_, t);
    HWY_UNROLL(4)
    for (int c = 0; c < kChannelVectors; ++c) {
      const size_t at = OffsetOf(c);
      if (at < count_) hs::StoreRounded(d_, from.x[c], to + at, HWY_MIN(N, count_ - at));
    }
  }

  HWY_INLINE Vectors LoadRow(const T* from) const {
    Vectors to;
    HWY_UNROLL(4)
    for (int c = 0; c < kChannelVectors; ++c) to.x[c] = hn::Load(d_, from + OffsetOf(c));
    return to;
  }
  HWY_INLINE void StoreRow(const Vectors& from, T* to) const {
    HWY_UNROLL(4)
    for (int c = 0; c < kChannelVectors; ++c) hn::Store(from.x[c], d_, to + OffsetOf(c));
  }
  HWY_INLINE State Load(const T* num, const T* den, const T* max) const {
    return {LoadRow(num), LoadRow(den), LoadRow(max)};
  }
  HWY_INLINE void Store(const State& state, T* num, T* den, T* max) const {
    StoreRow(state.num, num);
    StoreRow(state.den, den);
    StoreRow(state.max, max);
  }
  HWY_INLINE State LoadFrom(const T* at) const { return Load(at, at + kWidth, at + 2 * kWidth); }
  HWY_INLINE void StoreTo(const State& state, T* at) const { Store(state, at, at + kWidth, at + 2 * kWidth); }

  void LoadStates() const {
    LoadNumbers(p_.initial, 0, b_.num);
    LoadNumbers(p_.initial_z, 0, b_.den);
    LoadNumbers(p_.initial_m, kNothing, b_.max);
    for (size_t i = 0; i < kWidth; ++i) {
      if (b_.max[i] < kNothing) b_.max[i] = kNothing;
    }
  }
  // Loads this sequence's numbers per channel, padded with `absent`.
  void LoadNumbers(const States& states, T absent, T* to) const {
    std::fill_n(to, kWidth, absent);
    if (states.data == nullptr) return;
    const T* from = StateAt<T>(states, s_.state, first_);
    for (size_t i = 0; i < count_; ++i) {
      to[i] = from[static_cast<int64_t>(i) * states.head_stride];
    }
  }
  void StoreStates(const States& states, const T* from) const {
    if (states.data == nullptr) return;
    T* to = StateAt<T>(states, s_.state, first_);
    for (size_t i = 0; i < count_; ++i) {
      to[static_cast<int64_t>(i) * states.head_stride] = from[i];
    }
  }

  const D d_;
  const Problem& p_;
  const Sequence& s_;
  const ChannelBuffers<T>& b_;
  const int64_t first_;
  const size_t count_;
};

template <class T>
int64_t ChannelBytes(const Problem& p) {
  return ChannelBuffers<T>::Bytes(p, false);
}

// Computes any number of tokens. In a step the final states are also the initial states.
template <class T>
void ChannelForward(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(ChannelBytes<T>(p));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<ChannelBuffers<T>*>(ctx.Scratch(worker))->Init(p, false);
  }
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  ctx.ParallelFor(sequences * ChannelTask<T>::PerSequence(p), [&](int64_t index, int worker) {
    ChannelTask<T>(p, index, *static_cast<const ChannelBuffers<T>*>(ctx.Scratch(worker))).Forward();
  });
}

template <class T>
BackwardBytes ChannelBackwardBytes(const Problem& p) {
  const auto sums = static_cast<int64_t>(p.sequences.size()) * p.value_heads * 2;
  return {ChannelBuffers<T>::Bytes(p, true), sums * static_cast<int64_t>(sizeof(double))};
}

template <class T>
void ChannelBackward(Context& ctx, const Problem& p, const Gradients& g) {
  const BackwardBytes bytes = ChannelBackwardBytes<T>(p);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<ChannelBuffers<T>*>(ctx.Scratch(worker))->Init(p, true);
  }
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  const int64_t C = p.value_heads, tasks = ChannelTask<T>::PerSequence(p);
  auto* dw = static_cast<double*>(ctx.Shared());
  double* du = dw + sequences * C;
  std::fill_n(dw, 2 * sequences * C, 0.0);
  ctx.ParallelFor(sequences * tasks, [&](int64_t index, int worker) {
    const int64_t sums = index / tasks * C;
    ChannelTask<T>(p, index, *static_cast<const ChannelBuffers<T>*>(ctx.Scratch(worker)))
        .Backward(g, dw + sums, du + sums);
  });
  const auto store = [&](const double* sums, const Rows& to) {
    for (int64_t channel = 0; to.data != nullptr && channel < C; ++channel) {
      double total = 0;
      for (int64_t s = 0; s < sequences; ++s) total += sums[s * C + channel];
      StoreDouble(to.dtype, const_cast<void*>(to.data), channel * to.head_stride, total);
    }
  };
  store(dw, g.d_log_decay);
  store(du, g.d_bonus);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_CHANNELS_INL_H_
