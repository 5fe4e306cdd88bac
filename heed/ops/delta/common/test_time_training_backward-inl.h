// Gradients of memories that are trained while they read: what the mechanisms share of a backward pass.
//
// Compiled once per SIMD target. A pass forward makes the states, then the chunks are passed from the last to the
// first. The states of some chunks are kept, and those between are made again; z is kept for all tokens.
#if defined(HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_BACKWARD_INL_H_
#undef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_BACKWARD_INL_H_
#else
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "heed/core/carver.h"
#include "heed/ops/delta/common/test_time_training-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::test_time_training::HWY_NAMESPACE {

constexpr int64_t kMostChunks = 64;  // between two states that are kept

// 64 tokens between two states that are kept, or a few more.
inline int64_t GroupChunks(const Call& call) {
  return std::clamp<int64_t>(kMostChunks / std::min(call.mini_batch, kTokens), 4, kMostChunks);
}

// The memory of a backward pass: states that are kept, and tokens of the longest sequence.
struct Kept {
  int64_t states = 0, tokens = 0;
};
inline Kept KeptBy(const Call& call) {
  Kept kept;
  int64_t most = 0;
  for (size_t n = 0; n < call.sequences.size(); ++n) {
    int64_t left = call.sequences[n].end - call.sequences[n].begin, offset = call.offsets[n], chunks = 0;
    kept.tokens = std::max(kept.tokens, left);
    for (; left > 0; ++chunks) {
      const int64_t count = ChunkTokens(call, offset, left);
      offset = (offset + count) % call.mini_batch;
      left -= count;
    }
    most = std::max(most, chunks);
  }
  const int64_t group = GroupChunks(call);
  kept.states = group + (most + group - 1) / group;
  return kept;
}

template <class T>
HWY_INLINE void Save(const Chunk<T>& c, int64_t place) {
  T* to = c.kept + place * c.kept_parts * c.size;
  for (int part = 0; part < c.kept_parts; ++part) Copy(c.parts[part], c.size, to + part * c.size);
}
template <class T>
HWY_INLINE void Restore(const Chunk<T>& c, int64_t place) {
  const T* from = c.kept + place * c.kept_parts * c.size;
  for (int part = 0; part < c.num_parts; ++part) {
    if (part < c.kept_parts) {
      Copy(from + part * c.size, c.size, c.parts[part]);
    } else {
      Clear(c.parts[part], c.size);
    }
  }
}

// The passes of one sequence, whose first state is in `c`. load(token, offset) loads the chunk there, advance() makes
// the state after it. Where all states have been made, start(offset) loads the gradient of the last; then back(token)
// is called for each chunk, from the last to the first, with the chunk and its g, and the state before it.
template <class D, class C, class Load, class Advance, class Start, class Back>
HWY_INLINE void ForChunksInReverse(D d, const Call& call, int64_t n, C& c, const Load& load, const Advance& advance,
                                   const Start& start, const Back& back) {
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  const int64_t first_offset = call.offsets[static_cast<size_t>(n)], group = GroupChunks(call);
  const auto offset_of = [&](int64_t token) { return (first_offset + token - s.begin) % call.mini_batch; };
  const auto z_of = [&](int64_t token) { return c.all_z + (token - s.begin) * c.Vp; };

  int64_t chunks = 0;
  for (int64_t token = s.begin; token < s.end; token += c.count, ++chunks) {
    if (chunks % group == 0) Save(c, group + chunks / group);
    load(token, offset_of(token));
    ReadRows(d, c, c.k, c.trained, z_of(token));
    Train(d, call, z_of(token), c);
    advance();
  }
  start(offset_of(s.end));

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
        load(begins[i % group], offset_of(begins[i % group]));
        Train(d, call, z_of(begins[i % group]), c);
        advance();
      }
    }
    const int64_t token = begins[chunk % group];
    Restore(c, chunk % group);
    load(token, offset_of(token));
    Train(d, call, z_of(token), c);
    back(token);
  }
}

template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadGradients(D d, const ConstTensorView& d_o, int64_t b, int64_t token, int64_t h, Chunk<T>& c) {
  for (int64_t t = 0; t < c.count; ++t) hs::LoadRow(d, At<S>(d_o, b, token + t, h), c.K, c.Vp, c.d_o + t * c.Vp);
  Clear(c.dw, c.Vp);
  Clear(c.dc, c.Vp);
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

// The gradients dy of what the queries read; with `output_residual`, o has what they read as a summand.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfOutputs(D d, bool output_residual, Chunk<T>& c) {
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
    if (output_residual) AddScaled(d, T{1}, d_o, c.Vp, dy);
  }
}

// Adds what dg gives to the norm, v, k and A. The gradient of g = r (y - mean(y) - x mean(x .* y)) by x, where y is
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
  TimesRows(d, c.trained, c.dzT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.scaled, c.Kp);
  for (int64_t s = 0; s < c.count; ++s) AddScaled(d, T{1}, c.scaled + s * c.Kp, c.Kp, c.dk + s * c.Kp);
  hs::Multiply(d, c.k, 1, c.Kp, c.dz, c.Vp, c.count, c.rows, c.Vp, c.d_trained, c.Vp);
}

// Stores the gradients of q, k and v; with `query_residual`, o has the queries as a summand.
template <class S, class D, class Gradients, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreRows(D d, const Call& call, const Gradients& out, bool query_residual, int64_t b, int64_t token,
                            int64_t h, Chunk<T>& c) {
  const auto rows = [&](const TensorView& to, int64_t t, const T* from) HWY_ATTR {
    if (to.present()) hs::StoreRow(d, from, c.K, At<S>(to, b, token + t, h));
  };
  for (int64_t t = 0; t < c.count; ++t) {
    T *dq = c.dq + t * c.Kp, *dv = c.de + t * c.Vp;
    if (query_residual) AddScaled(d, T{1}, c.d_o + t * c.Vp, c.Vp, dq);
    if (call.scale != 1) Scale(d, static_cast<T>(call.scale), dq, c.Kp, dq);
    Scale(d, T{-1}, dv, c.Vp, dv);
    rows(out.dq, t, dq);
    rows(out.dk, t, c.dk + t * c.Kp);
    rows(out.dv, t, dv);
  }
}

// The gradients of weight and bias, sums over sequences in order.
struct NormSums {
  double *dw, *dc;  // [N, H, K]
  int64_t bytes;

  // With a null base only `bytes` is set.
  NormSums(const Call& call, void* base) {
    const int64_t count = std::ssize(call.sequences) * call.H * call.K;
    Carver carver(base);
    for (double** sums : {&dw, &dc}) {
      carver.Next(*sums, count);
      if (base != nullptr) std::fill_n(*sums, count, 0.0);
    }
    bytes = carver.bytes();
  }

  template <class T>
  void Add(int64_t n, int64_t h, const Call& call, const Chunk<T>& c) {
    const int64_t first = (n * call.H + h) * call.K;
    for (int64_t j = 0; j < c.K; ++j) {
      dw[first + j] += static_cast<double>(c.dw[j]);
      dc[first + j] += static_cast<double>(c.dc[j]);
    }
  }

  void Store(const Call& call, const TensorView& dweight, const TensorView& dbias) const {
    for (const auto& [to, of_sequences] : {std::pair{&dweight, dw}, {&dbias, dc}}) {
      for (int64_t i = 0; i < call.H * call.K && to->present(); ++i) {
        double sum = 0;
        for (int64_t n = 0; n < std::ssize(call.sequences); ++n) sum += of_sequences[n * call.H * call.K + i];
        StoreDouble(to->dtype(), to->data(), i / call.K * to->stride(0) + i % call.K * to->stride(1), sum);
      }
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::test_time_training::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_BACKWARD_INL_H_
