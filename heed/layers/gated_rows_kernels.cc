// Gated rows, compiled once per SIMD target. Forward passes read each row twice, the second time from the cache; they
// are bound by memory, or by the exponential of the gate. Backward passes compute the gate twice.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/targets.h"
#include "heed/layers/gated_rows_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/layers/gated_rows_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/export_passes.h"
#include "heed/simd/activation-inl.h"
#include "heed/simd/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::layers::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// One unit of a call. Absent tensors are null; dweight has partial sums of type T.
template <class T, class S>
struct Row {
  const S *x, *gate, *weight, *dy;
  S *y, *dx, *dgate;
  T* dweight;
  size_t size;
};

template <class V>
struct GateValue {
  V a, slope;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE V GateOf(D d, RowGate gate, V g) {
  if (gate == RowGate::kLogSigmoid) return hn::Neg(hs::Softplus(d, hn::Neg(g)));
  const V s = hs::Sigmoids(d, g).s;
  return gate == RowGate::kSilu ? hn::Mul(g, s) : s;
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE GateValue<V> GateAndSlope(D d, RowGate gate, V g) {
  const hs::SigmoidPair<V> pair = hs::Sigmoids(d, g);
  if (gate == RowGate::kLogSigmoid) return {hn::Neg(hs::Softplus(d, hn::Neg(g))), pair.complement};
  if (gate == RowGate::kSilu) return {hn::Mul(g, pair.s), hs::SiluSlope(g, pair)};
  return {pair.s, hn::Mul(pair.s, pair.complement)};
}

// Calls f(offset, count) for each vector of a row; count is less than its lanes for the last one only.
template <class D, class F>
HWY_INLINE void ForVectors(D d, size_t size, const F& f) {
  const size_t N = hn::Lanes(d);
  size_t i = 0;
  for (; i + N <= size; i += N) f(i, N);
  if (i < size) f(i, size - i);
}

// Elements beyond `count` are 0.
template <class D, class S>
HWY_INLINE hn::Vec<D> Load(D d, const S* HWY_RESTRICT from, size_t count) {
  return count == hn::Lanes(d) ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, count);
}

// 1 / sqrt(mean or sum of squares + eps)
template <class T>
HWY_INLINE T FactorOf(const GatedRows& in, double squares, size_t size) {
  const double count = in.norm == RowNorm::kUnit ? 1 : static_cast<double>(size);
  return static_cast<T>(1 / std::sqrt(squares / count + in.eps));
}

template <class T, class S>
void Forward(const GatedRows& in, const Row<T, S>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const bool has_norm = in.norm != RowNorm::kNone, gate_first = row.gate != nullptr && in.gate_first;
  const bool gate_last = row.gate != nullptr && !in.gate_first;
  const auto normed = [&](size_t i, size_t n) HWY_ATTR {
    const V x = row.x == nullptr ? hn::Set(d, T{1}) : Load(d, row.x + i, n);
    return gate_first ? hn::Mul(x, GateOf(d, in.activation, Load(d, row.gate + i, n))) : x;
  };
  V factor = hn::Set(d, static_cast<T>(in.factor));
  // Only y of the type of the arithmetic holds z without rounding it.
  const bool is_kept = std::is_same_v<T, S> && has_norm && gate_first;
  if (has_norm) {
    V even = hn::Zero(d), odd = hn::Zero(d);
    ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
      const V z = normed(i, n);
      if (is_kept) hs::StoreRounded(d, z, row.y + i, n);
      const V sum = hn::MulAdd(z, z, even);
      even = odd;
      odd = sum;
    });
    factor = hn::Set(d, FactorOf<T>(in, static_cast<double>(hn::ReduceSum(d, hn::Add(even, odd))), row.size));
  }
  ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
    V y = hn::Mul(is_kept ? Load(d, row.y + i, n) : normed(i, n), factor);
    if (row.weight != nullptr) y = hn::Mul(y, Load(d, row.weight + i, n));
    if (gate_last) y = hn::Mul(y, GateOf(d, in.activation, Load(d, row.gate + i, n)));
    hs::StoreRounded(d, y, row.y + i, n);
  });
}

// With z = x, or x a(g) if the gate is first, u = r z, and e = dy w, or dy w a(g) if it is not: dz = r (e - u <e, u> /
// n), n = 1 for kUnit, and dz = r e without a norm.
template <class T, class S>
void Backward(const GatedRows& in, const Row<T, S>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const bool gate_first = row.gate != nullptr && in.gate_first, gate_last = row.gate != nullptr && !in.gate_first;
  const V one = hn::Set(d, T{1});
  const auto x_at = [&](size_t i, size_t n) HWY_ATTR { return row.x == nullptr ? one : Load(d, row.x + i, n); };
  const auto weighted = [&](size_t i, size_t n) HWY_ATTR {
    const V dy = Load(d, row.dy + i, n);
    return row.weight == nullptr ? dy : hn::Mul(dy, Load(d, row.weight + i, n));
  };
  V r = hn::Set(d, static_cast<T>(in.factor)), share = hn::Zero(d);
  if (in.norm != RowNorm::kNone) {
    V squares = hn::Zero(d), along = hn::Zero(d);
    ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
      V z = x_at(i, n), e = weighted(i, n);
      if (row.gate != nullptr) {
        V& gated = gate_first ? z : e;
        gated = hn::Mul(gated, GateOf(d, in.activation, Load(d, row.gate + i, n)));
      }
      squares = hn::MulAdd(z, z, squares);
      along = hn::MulAdd(e, z, along);
    });
    const T factor = FactorOf<T>(in, static_cast<double>(hn::ReduceSum(d, squares)), row.size);
    const double count = in.norm == RowNorm::kUnit ? 1 : static_cast<double>(row.size);
    r = hn::Set(d, factor);
    share =
        hn::Set(d, static_cast<T>(static_cast<double>(factor) * static_cast<double>(hn::ReduceSum(d, along)) / count));
  }
  ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
    const V x = x_at(i, n), dyw = weighted(i, n);
    GateValue<V> gate = {one, one};
    if (row.gate != nullptr) gate = GateAndSlope(d, in.activation, Load(d, row.gate + i, n));
    const V u = hn::Mul(gate_first ? hn::Mul(x, gate.a) : x, r);
    const V e = gate_last ? hn::Mul(dyw, gate.a) : dyw;
    const V dz = hn::Mul(r, hn::NegMulAdd(u, share, e));
    if (row.dx != nullptr) hs::StoreRounded(d, gate_first ? hn::Mul(dz, gate.a) : dz, row.dx + i, n);
    if (row.dgate != nullptr) {
      const V by = gate_first ? hn::Mul(dz, x) : hn::Mul(dyw, u);
      hs::StoreRounded(d, hn::Mul(by, gate.slope), row.dgate + i, n);
    }
    if (row.dweight != nullptr) {
      const V term = hn::Mul(Load(d, row.dy + i, n), gate_last ? hn::Mul(u, gate.a) : u);
      hs::StoreRounded(d, hn::Add(Load(d, row.dweight + i, n), term), row.dweight + i, n);
    }
  });
}

template <class S>
HWY_INLINE S* At(const TensorView& t, const int64_t* index, int64_t column) {
  if (!t.present()) return nullptr;
  int64_t offset = column;
  for (int axis = 0; axis + 1 < t.rank(); ++axis) offset += index[axis] * t.stride(axis);
  return t.as<S>() + offset;
}
template <class S>
HWY_INLINE const S* At(const ConstTensorView& t, const int64_t* index, int64_t column) {
  if (!t.present()) return nullptr;
  int64_t offset = column;
  for (int axis = 0; axis + 1 < t.rank(); ++axis) offset += index[axis] * t.stride(axis);
  return t.as<S>() + offset;
}

template <class T, class S>
void RunUnits(const GatedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const ConstTensorView &like = c.like(), &weight = c.in.weight;
  const int last = like.rank() - 1;
  const int64_t width = like.size(last);
  int64_t index[kMaxRank] = {};
  T* partials = c.partials == nullptr ? nullptr : static_cast<T*>(c.partials) + task * weight.num_elements();
  for (int64_t unit = begin; unit < end; ++unit) {
    int64_t rest = unit / c.units_of_row;
    const int64_t column = unit % c.units_of_row * c.columns;
    for (int axis = last - 1; axis >= 0; --axis) {
      index[axis] = rest % like.size(axis);
      rest /= like.size(axis);
    }
    Row<T, S> row;
    row.size = static_cast<size_t>(std::min(c.columns, width - column));
    row.x = At<S>(c.in.x, index, column);
    row.gate = At<S>(c.in.gate, index, column);
    const int64_t head = weight.rank() == 2 ? index[last - 1] : 0;
    row.weight = weight.present() ? weight.as<S>() + (weight.rank() == 2 ? head * weight.stride(0) : 0) : nullptr;
    row.dweight = partials == nullptr ? nullptr : partials + head * width;
    row.dy = At<S>(c.dy, index, column);
    row.y = At<S>(c.y, index, column);
    row.dx = At<S>(c.out.dx, index, column);
    row.dgate = At<S>(c.out.dgate, index, column);
    if (row.dy == nullptr) {
      Forward(c.in, row);
    } else {
      Backward(c.in, row);
    }
  }
}

void RunOfTarget(const GatedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const DType dtype = c.like().dtype();
  if (dtype == DType::kF64) return RunUnits<double, double>(c, task, begin, end);
  hs::WithStorage<float>(dtype, [&](auto of) HWY_ATTR { RunUnits<float, decltype(of)>(c, task, begin, end); });
}

GatedRowsKernel KernelOfTarget() { return &RunOfTarget; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::layers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::layers {
HEED_EXPORT(GatedRowsKernel, KernelOfTarget)

GatedRowsKernel GatedRowsKernelFor(const Context& ctx) { return KernelOfTarget(ctx); }

}  // namespace heed::layers
#endif  // HWY_ONCE
