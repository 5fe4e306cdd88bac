// Gradients of TTT-Linear: a pass forward that makes the states, then the chunks from the last to the first.
//
// With dy_t the gradient of what a query reads, dW and dG those of the state after a chunk, and E = -eta_last dW where
// the chunk ends a mini-batch, else dG:
//
//   dg_s = lr_s (E^T k_s - sum_{t >= s} eta_t P_ts dy_t)
//   dq_t = (W - eta_t G) dy_t - eta_t sum_{s <= t} lr_s <dy_t, g_s> k_s
//   dk_s = lr_s (E g_s - sum_{t >= s} eta_t <dy_t, g_s> q_t) + W dz_s + de_s
//
// dz follows from dg by the derivative of a gradient of LN (README.md). The states of some chunks are kept, and those
// between are made again; z is kept for all tokens.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/delta/ttt_linear/ttt_linear_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/delta/ttt_linear/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::ttt_linear::HWY_NAMESPACE {

constexpr int64_t kMostChunks = 64;  // between two states that are kept

// 64 tokens between two states that are kept, or a few more.
inline int64_t GroupChunks(const Call& call) {
  return std::clamp<int64_t>(kMostChunks / std::min(call.mini_batch, kTokens), 4, kMostChunks);
}

// The chunks of a sequence.
inline int64_t NumChunks(const Call& call, int64_t offset, int64_t tokens) {
  int64_t chunks = 0;
  while (tokens > 0) {
    const int64_t count = ChunkTokens(call, offset, tokens);
    offset = (offset + count) % call.mini_batch;
    tokens -= count;
    ++chunks;
  }
  return chunks;
}

template <class T>
HWY_INLINE void Save(const Chunk<T>& c, int64_t place) {
  T* to = c.kept + place * (c.sums ? 2 : 1) * c.size;
  Copy(c.W, c.size, to);
  if (c.sums) Copy(c.G, c.size, to + c.size);
}
template <class T>
HWY_INLINE void Restore(const Chunk<T>& c, int64_t place) {
  const T* from = c.kept + place * (c.sums ? 2 : 1) * c.size;
  Copy(from, c.size, c.W);
  if (c.sums) {
    Copy(from + c.size, c.size, c.G);
  } else {
    Clear(c.G, c.size);
  }
}

// <a, b>, in f64 over sums of 4096 products.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE double LongProduct(D d, const T* a, const T* b, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i += 4096) {
    total += static_cast<double>(Product(d, a + i, b + i, std::min<int64_t>(4096, n - i)));
  }
  return total;
}

// outT += M fromT: a matrix of the size of W times rows of V channels, one for each token.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void TimesRows(D d, const T* M, const T* fromT, Chunk<T>& c) {
  hs::Multiply(d, M, c.Vp, 1, fromT, kTokens, c.K, c.rows, kTokens, c.outT, kTokens);
}
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void TransposeTokens(D d, T* rows, Chunk<T>& c, T* to) {
  Clear(rows + c.count * c.Vp, (kTokens - c.count) * c.Vp);
  Transpose(d, rows, c.Vp, kTokens, c.Vp, to, kTokens);
}

// The gradients dy of what the queries read, and of eta as a factor of it.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfOutputs(D d, const Call& call, Chunk<T>& c, T* deta) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t t = 0; t < c.count; ++t) {
    T* dy = c.dy + t * c.Vp;
    const T *d_o = c.d_o + t * c.Vp, *yx = c.yx + t * c.Vp;
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto of_o = hn::Load(d, d_o + i);
      hn::Store(hn::Mul(hn::Load(d, c.w + i), of_o), d, dy + i);
      hn::Store(hn::MulAdd(of_o, hn::Load(d, yx + i), hn::Load(d, c.dw + i)), d, c.dw + i);
      hn::Store(hn::Add(of_o, hn::Load(d, c.dc + i)), d, c.dc + i);
    }
    GradientOfNorm(d, yx, c.yr[t], dy, c.K, c.Vp, T{0}, dy);
    if (!call.query_residual) AddScaled(d, T{1}, d_o, c.Vp, dy);
    deta[t] = -Product(d, dy, c.read + t * c.Vp, c.Vp);
  }
}

// dg, the first terms of dk, and dq; then dW and dG before the chunk but for what z gives to dW.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfReads(D d, Chunk<T>& c, T* deta, T* dlr) {
  const T last = c.eta[c.count - 1], factor = c.ends ? -last : T{1};
  const T* E = c.ends ? c.dW : c.dG;
  TransposeTokens(d, c.g, c, c.gT);
  TransposeTokens(d, c.dy, c, c.dyT);

  Clear(c.outT, c.Kp * kTokens);
  TimesRows(d, E, c.gT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dk, c.Kp);
  T of_last = 0;
  for (int64_t s = 0; s < c.count; ++s) {
    T* dk = c.dk + s * c.Kp;
    of_last += c.lr[s] * Product(d, c.k + s * c.Kp, dk, c.Kp);
    Scale(d, factor * c.lr[s], dk, c.Kp, dk);
  }
  if (c.ends) {
    const double of_sums = c.begins ? 0 : LongProduct(d, c.dW, c.G, c.size);
    deta[c.count - 1] -= of_last + static_cast<T>(of_sums);
  }

  Clear(c.dg, c.count * c.Vp);
  hs::Multiply(d, c.k, c.Kp, 1, E, c.Vp, c.rows, c.count, c.Vp, c.dg, c.Vp);
  if (c.ends) Scale(d, factor, c.dg, c.count * c.Vp, c.dg);
  WeightPairs(d, c.count, c.eta, T{-1}, static_cast<const T*>(nullptr), c.pairs, c.weighted);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.dy, c.Vp, c.count, c.Vp, c.dg, c.Vp);
  for (int64_t s = 0; s < c.count; ++s) {
    T* dg = c.dg + s * c.Vp;
    dlr[s] = Product(d, dg, c.g + s * c.Vp, c.Vp);
    Scale(d, c.lr[s], dg, c.Vp, dg);
  }

  Clear(c.outT, c.Kp * kTokens);
  TimesRows(d, c.W, c.dyT, c);
  if (!c.begins) {
    for (int64_t t = 0; t < c.count; ++t) Scale(d, -c.eta[t], c.dy + t * c.Vp, c.Vp, c.y + t * c.Vp);
    TransposeTokens(d, c.y, c, c.dzT);
    TimesRows(d, c.G, c.dzT, c);
    if (c.ends) Scale(d, factor, c.dW, c.size, c.dG);
    hs::Multiply(d, c.q, 1, c.Kp, c.y, c.Vp, c.count, c.rows, c.Vp, c.dG, c.Vp);
  }
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dq, c.Kp);
  hs::MultiplyPairs(d, c.dy, c.Vp, c.gT, c.K, c.count, c.pairs, kTokens);
  WeightPairs(d, c.count, c.eta, T{-1}, c.lr, c.pairs, c.weighted);
  hs::MultiplyLower(d, c.weighted, kTokens, c.k, c.Kp, c.count, c.Kp, c.dq, c.Kp);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.q, c.Kp, c.count, c.Kp, c.dk, c.Kp);
  hs::Multiply(d, c.q, 1, c.Kp, c.dy, c.Vp, c.count, c.rows, c.Vp, c.dW, c.Vp);
}

// Adds what dg gives to the norm, v, k and W. The gradient of g = r (y - mean(y) - x mean(x .* y)) by x, where y is
// w .* e, is -r (dg mean(x .* y) + y mean(x .* dg)); that by r beyond x is <dg, g> / r.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfTraining(D d, Chunk<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const T size = static_cast<T>(c.K);
  for (int64_t s = 0; s < c.count; ++s) {
    const T *x = c.x + s * c.Vp, *e = c.e + s * c.Vp, *dg = c.dg + s * c.Vp, *g = c.g + s * c.Vp;
    T *of_e = c.de + s * c.Vp, *dz = c.dz + s * c.Vp, *dk = c.dk + s * c.Kp;
    const T r = c.r[s], along = GradientOfNorm(d, x, r, dg, c.K, c.Vp, T{0}, of_e);
    auto products = hn::Zero(d), with_g = hn::Zero(d);
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto y = hn::Mul(hn::Load(d, c.w + i), hn::Load(d, e + i));
      products = hn::MulAdd(hn::Load(d, x + i), y, products);
      with_g = hn::MulAdd(hn::Load(d, dg + i), hn::Load(d, g + i), with_g);
    }
    const auto of_dg = hn::Set(d, r * (hn::ReduceSum(d, products) / size)), of_y = hn::Set(d, r * along);
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto w = hn::Load(d, c.w + i), dy = hn::Load(d, of_e + i), ei = hn::Load(d, e + i), xi = hn::Load(d, x + i);
      const auto de = hn::Mul(w, dy);
      hn::Store(de, d, of_e + i);
      hn::Store(hn::MulAdd(ei, dy, hn::MulAdd(xi, de, hn::Load(d, c.dw + i))), d, c.dw + i);
      hn::Store(hn::Add(de, hn::Load(d, c.dc + i)), d, c.dc + i);
      hn::Store(hn::Add(de, hn::Load(d, dk + i)), d, dk + i);
      const auto of_x = hn::NegMulAdd(of_dg, hn::Load(d, dg + i), hn::Mul(w, de));
      hn::Store(hn::NegMulAdd(of_y, hn::Mul(w, ei), of_x), d, dz + i);
    }
    GradientOfNorm(d, x, r, dz, c.K, c.Vp, -r * (hn::ReduceSum(d, with_g) / size), dz);
  }
  TransposeTokens(d, c.dz, c, c.dzT);
  Clear(c.outT, c.Kp * kTokens);
  TimesRows(d, c.W, c.dzT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.scaled, c.Kp);
  for (int64_t s = 0; s < c.count; ++s) AddScaled(d, T{1}, c.scaled + s * c.Kp, c.Kp, c.dk + s * c.Kp);
  hs::Multiply(d, c.k, 1, c.Kp, c.dz, c.Vp, c.count, c.rows, c.Vp, c.dW, c.Vp);
}

template <class T, class S, class D>
HWY_NOINLINE void StoreGradients(D d, const Call& call, const Gradients& out, int64_t b, int64_t token, int64_t h,
                                 const T* deta, const T* dlr, Chunk<T>& c) {
  for (int64_t t = 0; t < c.count; ++t) {
    const auto number = [&](const TensorView& to, T value) {
      if (!to.present()) return;
      StoreDouble(to.dtype(), to.data(), b * to.stride(0) + (token + t) * to.stride(1) + h * to.stride(2),
                  static_cast<double>(value));
    };
    const auto rows = [&](const TensorView& to, const T* from) HWY_ATTR {
      if (to.present()) hs::StoreRow(d, from, c.K, At<S>(to, b, token + t, h));
    };
    T *dq = c.dq + t * c.Kp, *dv = c.de + t * c.Vp;
    if (call.query_residual) AddScaled(d, T{1}, c.d_o + t * c.Vp, c.Vp, dq);
    if (call.scale != 1) Scale(d, static_cast<T>(call.scale), dq, c.Kp, dq);
    Scale(d, T{-1}, dv, c.Vp, dv);
    rows(out.dq, dq);
    rows(out.dk, c.dk + t * c.Kp);
    rows(out.dv, dv);
    number(out.deta, deta[t]);
    number(out.dlr, dlr[t]);
  }
}

// The gradients of one head of a sequence. `dw` and `dc` have V sums each.
template <class T, class S>
HWY_INLINE void BackwardHead(const Call& call, const BackwardInputs& in, const Gradients& out, int64_t n, int64_t h,
                             double* dw, double* dc, Chunk<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  const int64_t first_offset = call.offsets[static_cast<size_t>(n)], group = GroupChunks(call);
  const auto offset_of = [&](int64_t token) { return (first_offset + token - s.begin) % call.mini_batch; };
  const auto load = [&](int64_t token)
                        HWY_ATTR { LoadChunk<S>(d, call, in, s.batch, token, offset_of(token), s.end - token, h, c); };
  const auto z_of = [&](int64_t token) { return c.all_z + (token - s.begin) * c.Vp; };

  Begin(call, in, n, h, c);
  int64_t chunks = 0;
  for (int64_t token = s.begin; token < s.end; token += c.count, ++chunks) {
    if (chunks % group == 0) Save(c, group + chunks / group);
    load(token);
    ReadKeys(d, c, z_of(token));
    Train(d, call, z_of(token), c);
    Advance(d, c);
  }
  LoadPart(in.d_final_state, c, n, h, 0, c.dW);
  LoadPart(offset_of(s.end) > 0 ? in.d_final_state : ConstTensorView(), c, n, h, 1, c.dG);

  int64_t begins[kMostChunks];  // of the chunks of a group
  for (int64_t chunk = chunks, end = s.end; chunk-- > 0; end = begins[chunk % group]) {
    const int64_t first = chunk / group * group;
    if (chunk == chunks - 1 || chunk % group == group - 1) {
      for (int64_t i = chunk, after = end; i >= first; --i) {
        after -= std::min(offset_of(after - 1) % kTokens + 1, after - s.begin);
        begins[i % group] = after;
      }
      Restore(c, group + first / group);
      for (int64_t i = first; i <= chunk; ++i) {
        Save(c, i % group);
        if (i == chunk) break;
        load(begins[i % group]);
        Train(d, call, z_of(begins[i % group]), c);
        Advance(d, c);
      }
    }
    const int64_t token = begins[chunk % group];
    Restore(c, chunk % group);
    load(token);
    for (int64_t t = 0; t < c.count; ++t) {
      hs::LoadRow(d, At<S>(in.d_o, s.batch, token + t, h), c.K, c.Vp, c.d_o + t * c.Vp);
    }
    Clear(c.dw, c.Vp);
    Clear(c.dc, c.Vp);
    Train(d, call, z_of(token), c);
    ReadSums(d, c, c.read);
    ReadQueries(d, call, c.read, c);
    T deta[kTokens], dlr[kTokens];
    GradientsOfOutputs(d, call, c, deta);
    GradientsOfReads(d, c, deta, dlr);
    GradientsOfTraining(d, c);
    StoreGradients<T, S>(d, call, out, s.batch, token, h, deta, dlr, c);
    for (int64_t j = 0; j < c.K; ++j) {
      dw[j] += static_cast<double>(c.dw[j]);
      dc[j] += static_cast<double>(c.dc[j]);
    }
  }
  if (first_offset == 0) Clear(c.dG, c.size);
  StorePart(out.dinitial_state, c, n, h, 0, c.dW);
  StorePart(out.dinitial_state, c, n, h, 1, c.dG);
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  const auto num_sequences = static_cast<int64_t>(call.sequences.size());
  // dweight and dbias of each sequence, which are added in order.
  const int64_t sums = num_sequences * call.H * call.K;
  std::vector<double> dw(static_cast<size_t>(sums)), dc(static_cast<size_t>(sums));
  WithTypes(in, [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    int64_t longest = 0, chunks = 0;
    for (size_t n = 0; n < call.sequences.size(); ++n) {
      const int64_t tokens = call.sequences[n].end - call.sequences[n].begin;
      longest = std::max(longest, tokens);
      chunks = std::max(chunks, NumChunks(call, call.offsets[n], tokens));
    }
    const int64_t group = GroupChunks(call), states = group + (chunks + group - 1) / group;
    const Chunk<T> sizes(call, nullptr, true, states, longest);
    ctx.ReserveScratch(sizes.bytes);
    ctx.ParallelFor(num_sequences * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Chunk<T> chunk(call, ctx.Scratch(worker), true, states, longest);
      BackwardHead<T, S>(call, in, out, task / call.H, task % call.H, dw.data() + task * call.K,
                         dc.data() + task * call.K, chunk);
    });
  });
  for (const auto& [to, of_sequences] : {std::pair{&out.dweight, &dw}, {&out.dbias, &dc}}) {
    for (int64_t i = 0; i < call.H * call.K && to->present(); ++i) {
      double sum = 0;
      for (int64_t n = 0; n < num_sequences; ++n) {
        sum += (*of_sequences)[static_cast<size_t>(n * call.H * call.K + i)];
      }
      StoreDouble(to->dtype(), to->data(), i / call.K * to->stride(0) + i % call.K * to->stride(1), sum);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::ttt_linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::ttt_linear {

HWY_EXPORT(BackwardImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}

}  // namespace heed::ttt_linear
#endif  // HWY_ONCE
