// One token of the recurrence: S <- a .* S + k v^T and o = S^T q in one pass over the state in the caller's memory.
//
// Compiled once per SIMD target. This takes 4 flops per 8 bytes of an f32 state, so that memory is the bound. It is
// best reached by one stream in order of addresses: .9 of a loop that only reads and writes, where four rows side by
// side reach .5. A sum over rows is one accumulation chain, so that a step without decays has the bits of the forward
// pass.
#if defined(HEED_ENGINES_RECURRENCE_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_STEP_INL_H_
#undef HEED_ENGINES_RECURRENCE_STEP_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_STEP_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
struct StepBuffers {
  BlockRows<T> rows;
  T *v, *o, *gate;  // [padded V]

  static int64_t Bytes(const Problem& p) {
    StepBuffers unused = {};
    return unused.LayOut(p, nullptr);
  }
  void Init(const Problem& p) { LayOut(p, this); }

 private:
  int64_t LayOut(const Problem& p, void* base) {
    Carver carver(base, (sizeof(StepBuffers) + 127) / 128 * 128);
    const auto value_row = static_cast<int64_t>(Padded<T>(p.value_size));
    rows.LayOut(p, carver, 1);
    carver.Next(v, value_row);
    carver.Next(o, value_row);
    carver.Next(gate, value_row);
    return carver.bytes();
  }
};

// The form of the update. kBonus: with decays, and the query reads the state before it; kBoth: columns decay too.
enum class StepForm { kUngated, kGated, kBonus, kBoth };

// Applies a decay in the form of TileDecay().
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Decayed(D d, V decay, V s) {
  return hn::MulAdd(decay, s, hn::IfThenElseZero(hn::Lt(decay, hn::Zero(d)), s));
}

// Updates a vector of the state in memory, and returns the vector that the query reads.
template <StepForm kForm, class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE V StepVector(D d, V decay, V value_decay, V key, V value, size_t count, T* at) {
  constexpr size_t N = hn::MaxLanes(D());
  V s = count == N ? hn::LoadU(d, at) : hn::LoadN(d, at, count);
  const V before = s;
  if constexpr (kForm == StepForm::kUngated) {
    s = hn::MulAdd(key, value, s);
  } else {
    if constexpr (kForm == StepForm::kBoth) s = Decayed(d, decay, s);
    const V last = kForm == StepForm::kBoth ? value_decay : decay, rest = s;
    const auto slow = IsSlow(d, last);
    const auto rounded = hn::AndNot(slow, hn::Lt(last, hn::Zero(d)));
    s = hn::MulAdd(key, value, hn::MulAdd(last, s, hn::IfThenElseZero(rounded, s)));
    s = hn::MaskedAddOr(s, slow, rest, s);
  }
  if (count == N) {
    hn::StoreU(s, d, at);
  } else {
    hn::StoreN(s, d, at, count);
  }
  return kForm == StepForm::kBonus ? before : s;
}

// Updates and reads C vectors of columns of a state whose rows are `stride` apart: S <- a .* S [.* b] + k v^T, o = S^T
// q. If C is 1, the vector has `count` elements.
template <int C, StepForm kForm, class D, class T = hn::TFromD<D>>
HWY_INLINE void StepColumns(D d, const T* HWY_RESTRICT q, const T* HWY_RESTRICT k, const T* HWY_RESTRICT a,
                            const T* HWY_RESTRICT b, size_t num_rows, const T* HWY_RESTRICT v, size_t count,
                            int64_t stride, T* HWY_RESTRICT state, T* HWY_RESTRICT o) {
  constexpr size_t N = hn::MaxLanes(D());
  hn::Vec<D> sum[C];
  HWY_UNROLL(8)
  for (int c = 0; c < C; ++c) sum[c] = hn::Zero(d);
  for (size_t r = 0; r < num_rows; ++r, state += stride) {
    const auto query = hn::Set(d, q[r]), key = hn::Set(d, k[r]);
    const auto decay = kForm != StepForm::kUngated ? hn::Set(d, a[r]) : hn::Zero(d);
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const auto column_decay = kForm == StepForm::kBoth ? hn::Load(d, b + c * N) : hn::Zero(d);
      const auto s =
          StepVector<kForm>(d, decay, column_decay, key, hn::Load(d, v + c * N), C == 1 ? count : N, state + c * N);
      sum[c] = hn::MulAdd(query, s, sum[c]);
    }
  }
  HWY_UNROLL(8)
  for (int c = 0; c < C; ++c) hn::Store(sum[c], d, o + c * N);
}

// Updates and reads columns [begin, end).
template <StepForm kForm, class D, class T = hn::TFromD<D>>
HWY_INLINE void StepRows(D d, const T* q, const T* k, const T* a, const T* b, size_t num_rows, const T* v, size_t begin,
                         size_t end, int64_t stride, T* state, T* o) {
  constexpr size_t N = hn::MaxLanes(D());
  const size_t whole = begin + (end - begin) / N * N;
  hs::ForTiles<8>(begin / N, whole / N, [&](auto vectors, size_t i) HWY_ATTR {
    const size_t c = i * N;
    StepColumns<vectors.value, kForm>(d, q, k, a, b + c, num_rows, v + c, N, stride, state + c, o + c);
  });
  if (whole == end) return;
  StepColumns<1, kForm>(d, q, k, a, b + whole, num_rows, v + whole, end - whole, stride, state + whole, o + whole);
}

// Updates a row of a transposed state, in which rows are value channels, and returns the row's product with q.
template <StepForm kForm, class D, class T = hn::TFromD<D>>
HWY_INLINE T StepTransposed(D d, const T* HWY_RESTRICT q, const T* HWY_RESTRICT k, const T* HWY_RESTRICT a, T b, T v,
                            size_t features, T* HWY_RESTRICT state) {
  constexpr size_t N = hn::MaxLanes(D());
  const auto value = hn::Set(d, v), column_decay = hn::Set(d, b);
  auto sum = hn::Zero(d);
  const auto column = [&](size_t c, size_t count) HWY_ATTR {
    const auto decay = kForm != StepForm::kUngated ? hn::Load(d, a + c) : hn::Zero(d);
    const auto s = StepVector<kForm>(d, decay, column_decay, hn::Load(d, k + c), value, count, state + c);
    sum = hn::MulAdd(hn::Load(d, q + c), s, sum);
  };
  size_t c = 0;
  for (; c + N <= features; c += N) column(c, N);
  if (c < features) column(c, features - c);
  return hn::ReduceSum(d, sum);
}

// The u term: o += (q . (u .* k)) v.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void AddOwnValue(D d, const StepBuffers<T>& b, size_t row, size_t value_row) {
  constexpr size_t N = hn::MaxLanes(D());
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < row; i += N) {
    const auto own = hn::Mul(hn::Load(d, b.rows.q + i), hn::Load(d, b.rows.bonus + i));
    sum = hn::MulAdd(own, hn::Load(d, b.rows.k + i), sum);
  }
  const auto pair = hn::Set(d, hn::ReduceSum(d, sum));
  for (size_t i = 0; i < value_row; i += N) {
    hn::Store(hn::MulAdd(pair, hn::Load(d, b.v + i), hn::Load(d, b.o + i)), d, b.o + i);
  }
}

template <class T>
HWY_NOINLINE HWY_ATTR void StepHead(const Problem& p, const Task& task, const StepBuffers<T>& b) {
  const hn::ScalableTag<T> d;
  const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
  const int64_t head = task.head;
  const RowReader<T> reader(p, s, head, b.rows);
  reader.Begin();
  reader.Queries(0, 1);
  reader.Keys(0, 1);
  const size_t value_row = Padded<T>(p.value_size);
  const auto features = static_cast<size_t>(p.features());
  const auto values = static_cast<size_t>(p.value_size);
  reader.Values(0, 1, b.v, value_row);
  std::memset(b.o, 0, value_row * sizeof(T));
  const size_t begin = std::min(FirstColumn(task.part, task.parts, value_row), values);
  const size_t end = std::min(FirstColumn(task.part + 1, task.parts, value_row), values);
  const bool gated = p.gate != Gate::kNone, scalar = p.gate == Gate::kScalar;

  // The token is a tile of its own.
  const auto to_tile_decays = [&](const T* decay, size_t row, bool one, T* tile_decay) HWY_ATTR {
    for (size_t i = 0; i < row; i += hn::MaxLanes(d)) {
      const auto a = one ? hn::Set(d, *decay) : hn::Load(d, decay + i);
      hn::Store(TileDecay(d, a, hn::Load(d, tile_decay + i)), d, tile_decay + i);
    }
  };
  if (gated) {
    to_tile_decays(b.rows.decay, Padded<T>(p.features()), scalar, b.rows.tile_decay);
  }
  const T* value_decay = b.o;  // any memory if columns do not decay
  if (p.has_value_decay) {
    reader.ValueDecays(0, 1, value_row);
    to_tile_decays(b.rows.value_decay, value_row, false, b.rows.value_tile_decay);
    value_decay = b.rows.value_tile_decay;
  }
  T* state = StateAt<T>(p.final, s.state, head);
  const auto step = [&](auto form) HWY_ATTR {
    if (p.final.value_stride == 1 || values == 1) {
      return StepRows<form.value>(d, b.rows.q, b.rows.k, b.rows.tile_decay, value_decay, features, b.v, begin, end,
                                  p.final.key_stride, state, b.o);
    }
    for (size_t r = begin; r < end; ++r) {
      b.o[r] = StepTransposed<form.value>(d, b.rows.q, b.rows.k, b.rows.tile_decay, value_decay[r], b.v[r], features,
                                          state + static_cast<int64_t>(r) * p.final.value_stride);
    }
  };
  if (p.has_bonus) {
    step(std::integral_constant<StepForm, StepForm::kBonus>());
    AddOwnValue(d, b, Padded<T>(p.features()), value_row);
  } else if (p.has_value_decay) {
    step(std::integral_constant<StepForm, StepForm::kBoth>());
  } else if (gated) {
    step(std::integral_constant<StepForm, StepForm::kGated>());
  } else {
    step(std::integral_constant<StepForm, StepForm::kUngated>());
  }

  T factor = 1;
  if (p.normalize) {
    constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
    T* z = StateAt<T>(p.final_z, s.state, head);
    const int64_t stride = p.final_z.key_stride;
    auto sum = hn::Zero(d);
    for (size_t i = 0; i < features; i += N) {
      HWY_ALIGN T z_vector[N] = {};
      const size_t count = std::min(N, features - i);
      T* at = z + static_cast<int64_t>(i) * stride;
      for (size_t lane = 0; lane < count; ++lane) {
        z_vector[lane] = at[static_cast<int64_t>(lane) * stride];
      }
      const auto decay = gated ? hn::Load(d, b.rows.tile_decay + i) : hn::Set(d, T{1});
      const auto next = NextNormalizer(d, decay, hn::Load(d, z_vector), hn::Load(d, b.rows.k + i));
      sum = hn::MulAdd(hn::Load(d, b.rows.q + i), next, sum);
      hn::Store(next, d, z_vector);
      for (size_t lane = 0; lane < count; ++lane) {
        at[static_cast<int64_t>(lane) * stride] = z_vector[lane];
      }
    }
    factor = 1 / Denominator(p, b.rows, hn::ReduceSum(d, sum), 0);
    reader.StoreMax();
  }
  const OutputRows<T> rows(p, s, head, 0, 1, b.v, b.gate, value_row, begin, end);
  StoreRows(d, b.o, value_row, p.o, s, head, 0, 1, begin, end, [&](auto x, size_t t, size_t i) HWY_ATTR {
    if (p.normalize) x = hn::Mul(x, hn::Set(d, factor));
    return rows.Finished(x, t, i);
  });
}

// Reads and writes the state in p.final, which is contiguous in values or in keys.
template <class T>
void Step(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(StepBuffers<T>::Bytes(p));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<StepBuffers<T>*>(ctx.Scratch(worker))->Init(p);
  }
  // The normaliser is updated with the state, by one task.
  const int64_t whole = static_cast<int64_t>(p.sequences.size()) * p.value_heads;
  const int64_t parts = NumParts(whole, ctx.num_threads(), p.normalize ? 0 : p.value_size);
  ctx.ParallelFor(whole * parts, [&](int64_t index, int worker) HWY_ATTR {
    const auto& buffers = *static_cast<const StepBuffers<T>*>(ctx.Scratch(worker));
    const int64_t of = index / parts;
    StepHead<T>(p, {of / p.value_heads, of % p.value_heads, index % parts, parts}, buffers);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_STEP_INL_H_
