// Gradients of log-linear attention: a pass forward that makes the states, then the chunks from the last to the first.
//
// A chunk that ends at a multiple of 64 makes one state, which is kept: T / 64 of them, whatever the number of levels.
// The gradient of a state is a sum over the chunks that read it. It reaches the tokens and the older states that the
// state was made of when the pass comes to the chunk that made it.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/gated/log_linear_attention/log_linear_attention_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                                    // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/gated/log_linear_attention/chunk-inl.h"

#ifndef HEED_OPS_GATED_LOG_LINEAR_ATTENTION_BACKWARD_ONCE_
#define HEED_OPS_GATED_LOG_LINEAR_ATTENTION_BACKWARD_ONCE_
namespace heed::log_linear_attention {

// The states before a chunk, as they were when the pass forward came to it.
template <class T>
struct Before {
  int64_t p, count;
  T* state[64];
  T factor[64];
};

// The chunks of a sequence share these, after the buffers of a chunk.
template <class T>
struct Shared {
  T *dq, *dk;         // [T, K]: gradients of the queries and keys of a key head, which its value heads add to
  Before<T>* before;  // of each chunk
  int64_t bytes;

  Shared(int64_t begin, int64_t tokens, int64_t Kp, int64_t chunks, void* base) {
    Carver carver(base, begin);
    carver.Next(dq, tokens * Kp);
    carver.Next(dk, tokens * Kp);
    carver.Next(before, chunks);
    bytes = carver.bytes();
  }
};

}  // namespace heed::log_linear_attention
#endif  // HEED_OPS_GATED_LOG_LINEAR_ATTENTION_BACKWARD_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::log_linear_attention::HWY_NAMESPACE {

// sum_i a[i] b[i] in ascending order of vectors, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE double Product(D d, const T* a, const T* b, int64_t n) {
  constexpr int64_t N = hn::MaxLanes(D());
  double total = 0;
  // Sums of 4096 products are in f64, so that the error of a long one does not grow.
  for (int64_t begin = 0; begin < n; begin += 4096) {
    auto sum = hn::Zero(d);
    for (int64_t i = begin; i < std::min(n, begin + 4096); i += N) {
      sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
    }
    total += static_cast<double>(hn::ReduceSum(d, sum));
  }
  return total;
}

// The gradients that one value head of a sequence has: of its states by place, and of the logarithms of their factors.
template <class T>
struct StateGradients {
  bool present[64] = {};
  double factor[64] = {};
};

// From the states after a chunk to the states before it, and to its tokens.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Unmerge(D d, int64_t K, int64_t V, const Before<T>& before, Chunk<T>& chunk, StateGradients<T>& g) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t p = before.p, count = before.count, after = p + count, Kp = chunk.Kp, Vp = chunk.Vp;
  const T all = chunk.since[count - 1];
  for (int64_t j = 0; after >> j != 0; ++j) {  // from the lowest place up: what a state adds to is above it
    if ((after >> j & 1) == 0 || !g.present[j]) continue;
    const int64_t begin = BeginOf(after, j), end = begin + (int64_t{1} << j);
    if (end <= p) {
      chunk.db[count - 1] += g.factor[j];
      continue;
    }
    g.present[j] = false;
    const T* HWY_RESTRICT from = chunk.dstate[j];
    const int64_t first = std::max(begin, p) - p, last = std::min(end, after) - p;
    // dT: [K][64], <dstate row, v>.
    std::memset(chunk.dT, 0, static_cast<size_t>(Kp * kTokens) * sizeof(T));
    Multiply(d, from, Vp, 1, chunk.vT, kTokens, V, K, count, chunk.dT, kTokens);
    const T* HWY_RESTRICT decays = chunk.decay + (count - 1) * kTokens;
    for (int64_t i = first; i < last; ++i) {
      double term = 0;
      for (int64_t c = 0; c < K; ++c) {
        const T x = decays[i] * chunk.dT[c * kTokens + i];
        chunk.dk[i * Kp + c] += x;
        term += static_cast<double>(x) * static_cast<double>(chunk.k[i * Kp + c]);
        chunk.qs[i * Kp + c] = decays[i] * chunk.k[i * Kp + c];
      }
      if (i + 1 < count) {
        chunk.db[count - 1] += term;
        chunk.db[i] -= term;
      }
    }
    Multiply(d, chunk.qs + first * Kp, Kp, 1, from, Vp, K, last - first, V, chunk.dv + first * Vp, Vp);
    for (int64_t old = 0; old < j && p >> old != 0; ++old) {
      if ((p >> old & 1) == 0 || BeginOf(p, old) < begin) continue;
      const T weight = before.factor[old] * all;
      g.present[old] = true;
      g.factor[old] = weight == 0 ? 0 : static_cast<double>(weight) * Product(d, from, before.state[old], K * Vp);
      chunk.db[count - 1] += g.factor[old];
      const auto factor = hn::Set(d, weight);
      for (int64_t at = 0; at < K * Vp; at += N) {
        hn::Store(hn::Mul(factor, hn::Load(d, from + at)), d, chunk.dstate[old] + at);
      }
    }
  }
}

// Reads of the states before a chunk.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void ReadGradients(D d, const Call& call, const Before<T>& before, Chunk<T>& chunk, StateGradients<T>& g) {
  const int64_t K = call.K, V = call.V, Kp = chunk.Kp, Vp = chunk.Vp, p = before.p, count = before.count;
  for (int64_t j = 0; p >> j != 0; ++j) {
    if ((p >> j & 1) == 0) continue;
    chunk.factor[j] = before.factor[j];
    WeightQueries(d, call, p, count, j, chunk);
    if (!g.present[j]) {
      std::memset(chunk.dstate[j], 0, static_cast<size_t>(K * Vp) * sizeof(T));
      g.present[j] = true;
      g.factor[j] = 0;
    }
    Multiply(d, chunk.qs, 1, Kp, chunk.d_o, Vp, count, K, V, chunk.dstate[j], Vp);
    std::memset(chunk.dT, 0, static_cast<size_t>(Kp * kTokens) * sizeof(T));
    Multiply(d, before.state[j], Vp, 1, chunk.d_oT, kTokens, V, K, count, chunk.dT, kTokens);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t level = LevelOf(p + i, BeginOf(p, j));
      const T seen = chunk.since[i] * before.factor[j], lambda = chunk.Scale(i, level);
      double term = 0;
      for (int64_t c = 0; c < K; ++c) {
        const T x = seen * chunk.dT[c * kTokens + i];
        term += static_cast<double>(x) * static_cast<double>(chunk.q[i * Kp + c]);
        chunk.dq[i * Kp + c] += lambda * x;
      }
      chunk.dlevels[i * call.L + level] += static_cast<T>(term);
      term *= static_cast<double>(lambda);
      chunk.db[i] += term;
      g.factor[j] += term;
    }
  }
}

// Pairs of tokens of a chunk.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void PairGradients(D d, const Call& call, int64_t p, int64_t count, Chunk<T>& chunk) {
  const int64_t K = call.K, V = call.V, Kp = chunk.Kp, Vp = chunk.Vp;
  TransposeRows(chunk.k, Kp, count, K, chunk.kT, kTokens);
  MultiplyPairs(d, chunk.q, Kp, chunk.kT, K, count, chunk.pairs, kTokens);
  MultiplyPairs(d, chunk.d_o, Vp, chunk.vT, V, count, chunk.dpairs, kTokens);
  for (int64_t i = 0; i < count; ++i) {
    T *HWY_RESTRICT row = chunk.pairs + i * kTokens, *HWY_RESTRICT of_row = chunk.dpairs + i * kTokens;
    const T* HWY_RESTRICT decays = chunk.decay + i * kTokens;
    double* HWY_RESTRICT db = chunk.db;
    ForRuns(p, i, [&](int64_t level, int64_t first, int64_t last) HWY_ATTR {
      const T lambda = chunk.Scale(i, level);
      double sum = 0, of_decays = 0;
      for (int64_t r = first; r < last; ++r) {
        const T decay = decays[r], term = decay * row[r] * of_row[r];
        const auto of_decay = static_cast<double>(lambda * term);
        sum += static_cast<double>(term);
        of_decays += of_decay;
        db[r] -= of_decay;
        row[r] *= lambda * decay;
        of_row[r] *= lambda * decay;
      }
      chunk.dlevels[i * call.L + level] += static_cast<T>(sum);
      db[i] += of_decays;  // at level 0, without a decay between, both are of token i
    });
    std::fill(row + i + 1, row + count, T{-0.0});
    std::fill(of_row + i + 1, of_row + count, T{-0.0});
  }
  MultiplyUpper(d, chunk.pairs, kTokens, chunk.d_o, Vp, count, V, chunk.dv, Vp);
  MultiplyLower(d, chunk.dpairs, kTokens, chunk.k, Kp, count, K, chunk.dq, Kp);
  MultiplyUpper(d, chunk.dpairs, kTokens, chunk.q, Kp, count, K, chunk.dk, Kp);
}

template <class T, class S>
HWY_INLINE void BackwardHead(const Call& call, const BackwardInputs& in, const Gradients& out, int64_t n, int64_t h,
                             const Shared<T>& shared, Chunk<T>& chunk) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const Sequence& s = call.sequences[static_cast<size_t>(n)];
  const int64_t K = call.K, V = call.V, Kp = chunk.Kp, Vp = chunk.Vp, kh = h / (call.G / call.H);
  const int64_t end = s.position + s.end - s.begin;
  chunk.LoadStates(in, n, h, s.position);
  int64_t made = 0, num_chunks = 0;
  for (int64_t p = s.position; p < end;) {
    const int64_t count = std::min(kTokens - p % kTokens, end - p);
    Before<T>& before = shared.before[num_chunks++];
    before.p = p;
    before.count = count;
    std::copy(chunk.state, chunk.state + std::min(call.L, kMaxLevels), before.state);
    std::copy(chunk.factor, chunk.factor + std::min(call.L, kMaxLevels), before.factor);
    if (p + count < end) {
      LoadChunk<S>(d, call, in, s.batch, s.begin + p - s.position, count, h, kh, chunk);
      Merge(d, K, V, p, count, chunk, [&](int64_t /*place*/) { return chunk.made + made++ * Kp * Vp; });
    }
    p += count;
  }

  StateGradients<T> g;
  if (in.d_final_state.present()) {
    const ConstTensorView& t = in.d_final_state;
    // A state that the last chunk did not make is its old value times its factor.
    const int64_t last = num_chunks > 0 ? shared.before[num_chunks - 1].p : end;
    T all = 1;
    if (num_chunks > 0) {
      LoadChunk<S>(d, call, in, s.batch, s.begin + last - s.position, end - last, h, kh, chunk);
      all = chunk.since[end - last - 1];
    }
    for (int64_t j = 0; end >> j != 0; ++j) {
      if ((end >> j & 1) == 0) continue;
      const bool old = BeginOf(end, j) + (int64_t{1} << j) <= last;
      const T* of = num_chunks == 0 ? chunk.state[j] : shared.before[num_chunks - 1].state[j];
      const T factor = !old || num_chunks == 0 ? T{1} : shared.before[num_chunks - 1].factor[j] * all;
      std::memset(chunk.dstate[j], 0, static_cast<size_t>(K * Vp) * sizeof(T));
      for (int64_t i = 0; i < K; ++i) {
        for (int64_t c = 0; c < V; ++c) {
          const int64_t at = n * t.stride(0) + h * t.stride(1) + j * t.stride(2) + i * t.stride(3) + c * t.stride(4);
          chunk.dstate[j][i * Vp + c] = factor * t.as<T>()[at];
        }
      }
      g.present[j] = true;
      g.factor[j] = old && num_chunks > 0 && factor != 0 ? Product(d, chunk.dstate[j], of, K * Vp) : 0;
    }
  }

  for (int64_t at = num_chunks; at-- > 0;) {
    const Before<T>& before = shared.before[at];
    const int64_t p = before.p, count = before.count, token = s.begin + p - s.position;
    LoadChunk<S>(d, call, in, s.batch, token, count, h, kh, chunk);
    for (int64_t i = 0; i < count; ++i) {
      const ConstTensorView& t = in.d_o;
      LoadRow(d, t.as<S>() + s.batch * t.stride(0) + (token + i) * t.stride(1) + h * t.stride(2), V, Vp,
              chunk.d_o + i * Vp);
    }
    TransposeRows(chunk.d_o, Vp, count, V, chunk.d_oT, kTokens);
    TransposeRows(chunk.v, Vp, count, V, chunk.vT, kTokens);
    std::memset(chunk.dq, 0, static_cast<size_t>(count * Kp) * sizeof(T));
    std::memset(chunk.dk, 0, static_cast<size_t>(count * Kp) * sizeof(T));
    std::memset(chunk.dv, 0, static_cast<size_t>(count * Vp) * sizeof(T));
    std::memset(chunk.dlevels, 0, static_cast<size_t>(count * call.L) * sizeof(T));
    std::fill_n(chunk.db, count, 0.0);
    Unmerge(d, K, V, before, chunk, g);
    ReadGradients(d, call, before, chunk, g);
    PairGradients(d, call, p, count, chunk);

    const T scale = static_cast<T>(call.scale);
    double decays = 0;
    for (int64_t i = count; i-- > 0;) {
      T* HWY_RESTRICT dq = shared.dq + (p + i - s.position) * Kp;
      T* HWY_RESTRICT dk = shared.dk + (p + i - s.position) * Kp;
      for (int64_t c = 0; c < Kp; c += N) {
        const auto x = hn::Mul(hn::Set(d, scale), hn::Load(d, chunk.dq + i * Kp + c));
        hn::Store(hn::Add(hn::Load(d, dq + c), x), d, dq + c);
        hn::Store(hn::Add(hn::Load(d, dk + c), hn::Load(d, chunk.dk + i * Kp + c)), d, dk + c);
      }
      if (out.dv.present()) {
        const TensorView& t = out.dv;
        StoreRow(d, chunk.dv + i * Vp, V,
                 t.as<S>() + s.batch * t.stride(0) + (token + i) * t.stride(1) + h * t.stride(2));
      }
      for (int64_t level = 0; level < call.L && out.dlevel_scales.present(); ++level) {
        const TensorView& t = out.dlevel_scales;
        StoreDouble(t.dtype(), t.data(),
                    s.batch * t.stride(0) + (token + i) * t.stride(1) + h * t.stride(2) + level * t.stride(3),
                    static_cast<double>(chunk.dlevels[i * call.L + level]));
      }
      decays += chunk.db[i];
      if (out.dlog_decay.present()) {
        const TensorView& t = out.dlog_decay;
        StoreDouble(t.dtype(), t.data(), s.batch * t.stride(0) + (token + i) * t.stride(1) + h * t.stride(2), decays);
      }
    }
  }
  if (!out.dinitial_state.present()) return;
  const TensorView& t = out.dinitial_state;
  for (int64_t j = 0; j < call.L; ++j) {
    const bool live = (s.position >> j & 1) != 0 && g.present[j];
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t c = 0; c < V; ++c) {
        const int64_t to = n * t.stride(0) + h * t.stride(1) + j * t.stride(2) + i * t.stride(3) + c * t.stride(4);
        t.as<T>()[to] = live ? chunk.dstate[j][i * Vp + c] : T{0};
      }
    }
  }
}

// The memory of a thread.
template <class T>
struct Buffers {
  Chunk<T> chunk;
  Shared<T> shared;

  static int64_t Longest(const Call& call) {
    int64_t longest = 0;
    for (const Sequence& s : call.sequences) longest = std::max(longest, s.end - s.begin);
    return longest;
  }
  static int64_t MostChunks(const Call& call) { return Longest(call) / kTokens + 2; }

  Buffers(const Call& call, void* base)
      : chunk(call, base, true, MostChunks(call)),
        shared(chunk.bytes, Longest(call), chunk.Kp, MostChunks(call), base) {}
};

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto)
                       HWY_ATTR { memory.per_thread = Buffers<decltype(computed)>(call, nullptr).shared.bytes; });
  return memory;
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  BackwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    const int64_t group = call.H == 0 ? 1 : call.G / call.H;
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      const int64_t n = task / call.H, kh = task % call.H;
      const Sequence& s = call.sequences[static_cast<size_t>(n)];
      Buffers<T> buffers(call, ctx.Scratch(worker));
      Chunk<T>& chunk = buffers.chunk;
      const Shared<T>& shared = buffers.shared;
      const auto elements = static_cast<size_t>((s.end - s.begin) * chunk.Kp);
      std::memset(shared.dq, 0, elements * sizeof(T));
      std::memset(shared.dk, 0, elements * sizeof(T));
      for (int64_t h = kh * group; h < (kh + 1) * group; ++h) {
        BackwardHead<T, S>(call, in, out, n, h, shared, chunk);
      }
      for (int64_t i = 0; i < s.end - s.begin; ++i) {
        const auto store = [&](const TensorView& t, const T* from) HWY_ATTR {
          if (!t.present()) return;
          StoreRow(d, from + i * chunk.Kp, call.K,
                   t.as<S>() + s.batch * t.stride(0) + (s.begin + i) * t.stride(1) + kh * t.stride(2));
        };
        store(out.dq, shared.dq);
        store(out.dk, shared.dk);
      }
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::log_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::log_linear_attention {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::log_linear_attention
#endif  // HWY_ONCE
