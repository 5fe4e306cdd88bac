// One token: the state read, updated and written in place, once.
//
// Compiled once per SIMD target. 4 flops for 8 bytes of an f32 state: memory is the bound,
// and kRows streams of whole rows in address order are what reaches it. Sums over rows
// are one chain, so that an ungated step has the bits of the forward pass.
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

// Rows [r, r + R) of a state whose rows are `stride` apart:
// s = a .* s + k v^T, o += q s.
template <int R, bool kGated, class D, class T = hn::TFromD<D>>
HWY_INLINE void StepRows(D d, const T* q, const T* k, const T* a, const T* HWY_RESTRICT v, size_t begin, size_t end, int64_t stride,
                         T* HWY_RESTRICT state, T* HWY_RESTRICT o) {
  constexpr size_t N = hn::MaxLanes(D());
  hn::Vec<D> query[R], key[R], decay[R];
  hn::Mask<D> less_one[R];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    query[r] = hn::Set(d, q[r]);
    key[r] = hn::Set(d, k[r]);
    decay[r] = kGated ? hn::Set(d, a[r]) : hn::Zero(d);
    less_one[r] = hn::Lt(decay[r], hn::Zero(d));
  }
  const auto columns = [&](size_t c, auto load, auto store) HWY_ATTR {
    const auto value = hn::Load(d, v + c);
    auto sum = hn::Load(d, o + c);
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      T* at = state + r * stride + static_cast<int64_t>(c);
      auto s = load(at);
      if constexpr (kGated) {
        s = hn::MulAdd(decay[r], s, hn::IfThenElseZero(less_one[r], s));
      }
      s = hn::MulAdd(key[r], value, s);
      store(s, at);
      sum = hn::MulAdd(query[r], s, sum);
    }
    hn::Store(sum, d, o + c);
  };
  size_t c = begin;
  for (; c + N <= end; c += N) {
    columns(c, [d](const T* at) HWY_ATTR { return hn::LoadU(d, at); },
            [d](auto s, T* at) HWY_ATTR { hn::StoreU(s, d, at); });
  }
  if (c == end) return;
  const size_t rest = end - c;
  columns(c, [d, rest](const T* at) HWY_ATTR { return hn::LoadN(d, at, rest); },
          [d, rest](auto s, T* at) HWY_ATTR { hn::StoreN(s, d, at, rest); });
}

// The same of a state whose rows are values: rows [r, r + R), o[r] = sum of q .* s.
template <int R, bool kGated, class D, class T = hn::TFromD<D>>
HWY_INLINE void StepTransposed(D d, const T* HWY_RESTRICT q, const T* HWY_RESTRICT k,
                               const T* HWY_RESTRICT a, const T* v,
                               size_t features, int64_t stride, T* HWY_RESTRICT state,
                               T* o) {
  constexpr size_t N = hn::MaxLanes(D());
  hn::Vec<D> value[R], sum[R];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    value[r] = hn::Set(d, v[r]);
    sum[r] = hn::Zero(d);
  }
  const auto columns = [&](size_t c, auto load, auto store) HWY_ATTR {
    const auto query = hn::Load(d, q + c), key = hn::Load(d, k + c);
    const auto decay = kGated ? hn::Load(d, a + c) : hn::Zero(d);
    const auto less_one = hn::Lt(decay, hn::Zero(d));
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      T* at = state + r * stride + static_cast<int64_t>(c);
      auto s = load(at);
      if constexpr (kGated) {
        s = hn::MulAdd(decay, s, hn::IfThenElseZero(less_one, s));
      }
      s = hn::MulAdd(key, value[r], s);
      store(s, at);
      sum[r] = hn::MulAdd(query, s, sum[r]);
    }
  };
  size_t c = 0;
  for (; c + N <= features; c += N) {
    columns(c, [d](const T* at) HWY_ATTR { return hn::LoadU(d, at); },
            [d](auto s, T* at) HWY_ATTR { hn::StoreU(s, d, at); });
  }
  if (c < features) {
    const size_t rest = features - c;
    columns(c, [d, rest](const T* at) HWY_ATTR { return hn::LoadN(d, at, rest); },
            [d, rest](auto s, T* at) HWY_ATTR { hn::StoreN(s, d, at, rest); });
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) o[r] = hn::ReduceSum(d, sum[r]);
}

template <class T>
HWY_NOINLINE HWY_ATTR void StepHead(const Problem& p, const Task& task,
                                    const StepBuffers<T>& b) {
  constexpr int kRows = 4;
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

  for (size_t i = 0; gated && i < Padded<T>(p.features()); i += hn::MaxLanes(d)) {
    const auto decay =
        scalar ? hn::Set(d, b.rows.decay[0]) : hn::Load(d, b.rows.decay + i);
    T* of_tile = b.rows.tile_decay + i;  // a token is a tile of its own
    hn::Store(TileDecay(d, decay, hn::Load(d, of_tile)), d, of_tile);
  }
  T* state = StateAt<T>(p.final, s.state, head);
  const auto step = [&](auto is_gated) HWY_ATTR {
    constexpr bool kGated = is_gated.value;
    if (p.final.value_stride == 1 || values == 1) {
      hs::ForTiles<kRows>(0, features, [&](auto rows, size_t r) HWY_ATTR {
        StepRows<rows.value, kGated>(
            d, b.rows.q + r, b.rows.k + r, b.rows.tile_decay + r, b.v, begin, end, p.final.key_stride,
            state + static_cast<int64_t>(r) * p.final.key_stride, b.o);
      });
    } else {
      hs::ForTiles<kRows>(begin, end, [&](auto rows, size_t r) HWY_ATTR {
        StepTransposed<rows.value, kGated>(
            d, b.rows.q, b.rows.k, b.rows.tile_decay, b.v + r, features,
            p.final.value_stride, state + static_cast<int64_t>(r) * p.final.value_stride,
            b.o + r);
      });
    }
  };
  if (gated) {
    step(std::true_type());
  } else {
    step(std::false_type());
  }

  T factor = 1;
  if (p.normalize) {
    T* z = StateAt<T>(p.final_z, s.state, head);
    T* next = b.rows.k;
    T sum = 0;
    for (size_t i = 0; i < features; ++i) {
      const T a = !gated ? 1 : scalar ? b.rows.decay[0] : b.rows.decay[i];
      next[i] += a * z[static_cast<int64_t>(i) * p.final_z.key_stride];
      sum += next[i] * b.rows.q[i];
    }
    for (size_t i = 0; i < features; ++i) {
      z[static_cast<int64_t>(i) * p.final_z.key_stride] = next[i];
    }
    factor = 1 / Denominator(p, sum);
    reader.StoreMax();
  }
  const OutputRows<T> rows(p, s, head, 0, 1, b.v, b.gate, value_row);
  StoreRows(d, b.o, value_row, p.o, s, head, 0, 1, begin, end,
            [&](auto x, size_t t, size_t i) HWY_ATTR {
              if (p.normalize) x = hn::Mul(x, hn::Set(d, factor));
              return rows.Finished(x, t, i);
            });
}

template <class T>
int64_t StepBytes(const Problem& p) {
  return StepBuffers<T>::Bytes(p);
}

// `final` is the state: read and written, contiguous in values or in keys.
template <class T>
void Step(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(static_cast<size_t>(StepBuffers<T>::Bytes(p)));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<StepBuffers<T>*>(ctx.Scratch(worker))->Init(p);
  }
  // A normaliser is updated with the state: by one task.
  const int64_t whole = static_cast<int64_t>(p.sequences.size()) * p.value_heads;
  const int64_t parts =
      NumParts(whole, ctx.num_threads(), p.normalize ? 0 : p.value_size);
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
