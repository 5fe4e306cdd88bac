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

// The gate of a row at compile time.
enum class Gate { kNone, kSilu, kSigmoid, kLogSigmoid };

template <Gate kGate, class D, class V = hn::Vec<D>>
HWY_INLINE V GateOf(D d, V g) {
  if constexpr (kGate == Gate::kLogSigmoid) return hn::Neg(hs::Softplus(d, hn::Neg(g)));
  const V s = hs::Sigmoids(d, g).s;
  return kGate == Gate::kSilu ? hn::Mul(g, s) : s;
}

// With `is_read` false, `a` may have any value.
template <Gate kGate, class D, class V = hn::Vec<D>>
HWY_INLINE GateValue<V> GateAndSlope(D d, V g, bool is_read) {
  const hs::SigmoidPair<V> pair = hs::Sigmoids(d, g);
  if constexpr (kGate == Gate::kLogSigmoid) {
    return {is_read ? hn::Neg(hs::Softplus(d, hn::Neg(g))) : g, pair.complement};
  }
  if constexpr (kGate == Gate::kSilu) return {hn::Mul(g, pair.s), hs::SiluSlope(g, pair)};
  return {pair.s, hn::Mul(pair.s, pair.complement)};
}

// Calls f(offset, count) for each vector of a row; count is less than its lanes for the last one only. There is one
// call, so that compilers inline it.
template <class D, class F>
HWY_INLINE void ForVectors(D d, size_t size, const F& f) {
  const size_t N = hn::Lanes(d);
  for (size_t i = 0; i < size; i += N) f(i, HWY_MIN(N, size - i));
}

// Elements beyond `count` are 0.
template <class D, class S>
HWY_INLINE hn::Vec<D> Load(D d, const S* HWY_RESTRICT from, size_t count) {
  return count == hn::Lanes(d) ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, count);
}

// Loads as Load does, or ones for an absent row.
template <class D, class S>
HWY_INLINE hn::Vec<D> LoadOrOnes(D d, const S* HWY_RESTRICT from, size_t i, size_t count) {
  return from == nullptr ? hn::Set(d, hn::TFromD<D>{1}) : Load(d, from + i, count);
}

// 1 / sqrt(mean or sum of squares + eps)
template <class T>
HWY_INLINE T FactorOf(const GatedRows& in, T squares, T share_of_element) {
  return 1 / std::sqrt((in.norm == RowNorm::kUnit ? squares : squares * share_of_element) + static_cast<T>(in.eps));
}

template <Gate kGate, class T, class S>
void Forward(const GatedRows& in, const Row<T, S>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const bool gate_first = kGate != Gate::kNone && in.gate_first, gate_last = kGate != Gate::kNone && !in.gate_first;
  const auto normed = [&](size_t i, size_t n) HWY_ATTR {
    const V x = LoadOrOnes(d, row.x, i, n);
    return gate_first ? hn::Mul(x, GateOf<kGate>(d, Load(d, row.gate + i, n))) : x;
  };
  V factor = hn::Set(d, static_cast<T>(in.factor));
  // Only y of the type of the arithmetic holds z without rounding it.
  const bool is_kept = std::is_same_v<T, S> && in.norm != RowNorm::kNone && gate_first;
  if (in.norm != RowNorm::kNone) {
    V even = hn::Zero(d), odd = hn::Zero(d);
    ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
      const V z = normed(i, n);
      if (is_kept) hs::StoreRounded(d, z, row.y + i, n);
      const V sum = hn::MulAdd(z, z, even);
      even = odd;
      odd = sum;
    });
    factor = hn::Set(d, FactorOf(in, hn::ReduceSum(d, hn::Add(even, odd)), 1 / static_cast<T>(row.size)));
  }
  ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
    V y = hn::Mul(is_kept ? Load(d, row.y + i, n) : normed(i, n), factor);
    if (row.weight != nullptr) y = hn::Mul(y, Load(d, row.weight + i, n));
    if (gate_last) y = hn::Mul(y, GateOf<kGate>(d, Load(d, row.gate + i, n)));
    hs::StoreRounded(d, y, row.y + i, n);
  });
}

// With z = x, or x a(g) if the gate is first, u = r z, and e = dy w, or dy w a(g) if it is not: dz = r (e - u <e, u> /
// n), n = 1 for kUnit, and dz = r e without a norm.
template <Gate kGate, class T, class S>
void Backward(const GatedRows& in, const Row<T, S>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const bool gate_first = kGate != Gate::kNone && in.gate_first, gate_last = kGate != Gate::kNone && !in.gate_first;
  const bool is_gate_read = gate_first || row.dx != nullptr || row.dweight != nullptr || in.norm != RowNorm::kNone;
  V r = hn::Set(d, static_cast<T>(in.factor)), share = hn::Zero(d);
  if (in.norm != RowNorm::kNone) {
    V squares = hn::Zero(d), along = hn::Zero(d);
    ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
      V z = LoadOrOnes(d, row.x, i, n), e = hn::Mul(Load(d, row.dy + i, n), LoadOrOnes(d, row.weight, i, n));
      if constexpr (kGate != Gate::kNone) {
        V& gated = gate_first ? z : e;
        gated = hn::Mul(gated, GateOf<kGate>(d, Load(d, row.gate + i, n)));
      }
      squares = hn::MulAdd(z, z, squares);
      along = hn::MulAdd(e, z, along);
    });
    const T share_of_element = 1 / static_cast<T>(row.size);
    const T factor = FactorOf(in, hn::ReduceSum(d, squares), share_of_element);
    const T of_all = factor * hn::ReduceSum(d, along);
    r = hn::Set(d, factor);
    share = hn::Set(d, in.norm == RowNorm::kUnit ? of_all : of_all * share_of_element);
  }
  ForVectors(d, row.size, [&](size_t i, size_t n) HWY_ATTR {
    const V x = LoadOrOnes(d, row.x, i, n), dy = Load(d, row.dy + i, n);
    const V dyw = hn::Mul(dy, LoadOrOnes(d, row.weight, i, n));
    GateValue<V> gate = {dy, dy};  // read only where there is a gate
    if constexpr (kGate != Gate::kNone) gate = GateAndSlope<kGate>(d, Load(d, row.gate + i, n), is_gate_read);
    const V u = hn::Mul(gate_first ? hn::Mul(x, gate.a) : x, r);
    const V e = gate_last ? hn::Mul(dyw, gate.a) : dyw;
    const V dz = hn::Mul(r, hn::NegMulAdd(u, share, e));
    if (row.dx != nullptr) hs::StoreRounded(d, gate_first ? hn::Mul(dz, gate.a) : dz, row.dx + i, n);
    if (row.dgate != nullptr) {
      const V by = gate_first ? hn::Mul(dz, x) : hn::Mul(dyw, u);
      hs::StoreRounded(d, hn::Mul(by, gate.slope), row.dgate + i, n);
    }
    if (row.dweight != nullptr) {
      const V term = hn::Mul(dy, gate_last ? hn::Mul(u, gate.a) : u);
      hs::StoreRounded(d, hn::Add(Load(d, row.dweight + i, n), term), row.dweight + i, n);
    }
  });
}

// Advances the places of rows in a tensor with them.
template <class S, class View>
struct Place {
  using Pointer = std::conditional_t<std::is_same_v<View, TensorView>, S*, const S*>;
  explicit Place(const View& t) : view(t), at(t.present() ? t.template as<S>() : nullptr) {}
  void Move(int axis, int64_t count) {
    if (at != nullptr) at += count * view.stride(axis);
  }
  Pointer From(int64_t column) const { return at == nullptr ? nullptr : at + column; }

  const View& view;
  Pointer at;
};

template <Gate kGate, class T, class S>
void RunUnits(const GatedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const ConstTensorView &like = c.like(), &weight = c.in.weight;
  const int last = like.rank() - 1;
  const int64_t width = like.size(last);
  const bool of_heads = weight.rank() == 2;
  T* partials = c.partials == nullptr ? nullptr : static_cast<T*>(c.partials) + task * weight.num_elements();
  Place<S, ConstTensorView> x(c.in.x), gate(c.in.gate), dy(c.dy);
  Place<S, TensorView> y(c.y), dx(c.out.dx), dgate(c.out.dgate);
  int64_t index[kMaxRank] = {};
  const auto move = [&](int axis, int64_t count) {
    index[axis] += count;
    for (auto* place : {&x, &gate, &dy}) place->Move(axis, count);
    for (auto* place : {&y, &dx, &dgate}) place->Move(axis, count);
  };
  int64_t column = begin % c.units_of_row * c.columns;
  for (int64_t axis = last - 1, rest = begin / c.units_of_row; axis >= 0; --axis) {
    move(static_cast<int>(axis), rest % like.size(static_cast<int>(axis)));
    rest /= like.size(static_cast<int>(axis));
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t head = of_heads ? index[last - 1] : 0;
    const S* of_head = weight.present() ? weight.as<S>() + (of_heads ? head * weight.stride(0) : 0) : nullptr;
    const Row<T, S> row = {x.From(column),
                           gate.From(column),
                           of_head,
                           dy.From(column),
                           y.From(column),
                           dx.From(column),
                           dgate.From(column),
                           partials == nullptr ? nullptr : partials + head * width,
                           static_cast<size_t>(std::min(c.columns, width - column))};
    if (row.dy == nullptr) {
      Forward<kGate>(c.in, row);
    } else {
      Backward<kGate>(c.in, row);
    }
    column += c.columns;
    if (column < width) continue;
    column = 0;
    int axis = last - 1;
    for (; axis > 0 && index[axis] + 1 == like.size(axis); --axis) move(axis, -index[axis]);
    if (axis >= 0) move(axis, 1);
  }
}

template <class T, class S>
void RunRows(const GatedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  if (!c.in.gate.present()) return RunUnits<Gate::kNone, T, S>(c, task, begin, end);
  switch (c.in.activation) {
    case RowGate::kSilu: return RunUnits<Gate::kSilu, T, S>(c, task, begin, end);
    case RowGate::kSigmoid: return RunUnits<Gate::kSigmoid, T, S>(c, task, begin, end);
    case RowGate::kLogSigmoid: return RunUnits<Gate::kLogSigmoid, T, S>(c, task, begin, end);
  }
}

void RunOfTarget(const GatedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const DType dtype = c.like().dtype();
  if (dtype == DType::kF64) return RunRows<double, double>(c, task, begin, end);
  hs::WithStorage<float>(dtype, [&](auto of) HWY_ATTR { RunRows<float, decltype(of)>(c, task, begin, end); });
}

GatedRowsKernel GatedRowsOfTarget() { return &RunOfTarget; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::layers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::layers {
HEED_EXPORT(GatedRowsKernel, GatedRowsOfTarget)

GatedRowsKernel GatedRowsKernelFor(const Context& ctx) { return GatedRowsOfTarget(ctx); }

}  // namespace heed::layers
#endif  // HWY_ONCE
