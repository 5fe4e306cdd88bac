// Norms, activations and sums of rows, compiled once per SIMD target. All are bound by memory, or by the exponential of
// an activation.
#include <cmath>
#include <cstddef>

#include "heed/core/targets.h"
#include "heed/layers/rows_kernels_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/layers/rows_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/export_passes.h"
#include "heed/simd/activation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::layers::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// The normal distribution's probability beyond |x|: e^{-x^2 / 2} times a polynomial in 1 / (1 + 0.29 |x|), with a
// relative error of 2.1e-8.
HWY_INLINE V NormalTail(D d, V x) {
  const V size = hn::Abs(x), one = hn::Set(d, 1.f);
  const V t = hs::FastDivide(d, one, hn::MulAdd(hn::Set(d, .29f), size, one));
  constexpr float kCoefficients[] = {.0406950967f, -.199771796f, .321206421f, -.169520695f,  .199276927f,
                                     .0705344763f, .122616431f,  .114926361f, 3.67716668e-5f};
  V p = hn::Set(d, kCoefficients[0]);
  HWY_UNROLL(8)
  for (size_t i = 1; i < 9; ++i) p = hn::MulAdd(p, t, hn::Set(d, kCoefficients[i]));
  return hn::Mul(p, hs::Exp(d, hn::Mul(hn::Mul(size, size), hn::Set(d, -.5f))));
}

HWY_INLINE V Gelu(D d, V x) {
  const V tail = NormalTail(d, x);
  return hn::Mul(x, hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(hn::Set(d, 1.f), tail)));
}

// x (1 + tanh(u)) / 2 = x sigmoid(2 u)
HWY_INLINE V GeluTanh(D d, V x) {
  constexpr float kTwice = 1.59576912160573071f;  // 2 sqrt(2 / pi)
  const V cube = hn::MulAdd(hn::Mul(hn::Set(d, .044715f), hn::Mul(x, x)), x, x);
  return hn::Mul(x, hs::Sigmoids(d, hn::Mul(cube, hn::Set(d, kTwice))).s);
}

// Calls f(vector, offset, count) for each vector; count is less than its lanes for the last one only.
template <class F>
HWY_INLINE void ForVectors(size_t size, const F& f) {
  const size_t N = hn::Lanes(D());
  size_t i = 0;
  for (; i + N <= size; i += N) f(i, N);
  if (i < size) f(i, size - i);
}

HWY_INLINE V LoadSome(const float* HWY_RESTRICT from, size_t count) {
  const D d;
  return count == hn::Lanes(d) ? hn::LoadU(d, from) : hn::LoadN(d, from, count);
}

HWY_INLINE void StoreSome(V x, float* HWY_RESTRICT to, size_t count) {
  const D d;
  if (count == hn::Lanes(d)) {
    hn::StoreU(x, d, to);
  } else {
    hn::StoreN(x, d, to, count);
  }
}

// The sum of f(x), in two chains per lane.
template <class F>
HWY_INLINE float SumOf(const float* x, size_t size, const F& f) {
  const D d;
  const size_t N = hn::Lanes(d);
  V even = hn::Zero(d), odd = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * N <= size; i += 2 * N) {
    even = hn::Add(even, f(hn::LoadU(d, x + i)));
    odd = hn::Add(odd, f(hn::LoadU(d, x + i + N)));
  }
  for (; i < size; i += N) {
    const size_t count = HWY_MIN(N, size - i);
    even = hn::Add(even, hn::IfThenElseZero(hn::FirstN(d, count), f(LoadSome(x + i, count))));
  }
  return hn::ReduceSum(d, hn::Add(even, odd));
}

void ScaleOneHead(const ScaleRows& c, const float* x, const float* gate, const float* weight, const float* bias,
                  float* y) {
  const D d;
  if (gate != nullptr && c.gate_first) {
    ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR {
      StoreSome(hn::Mul(LoadSome(x + i, n), hs::Silu(d, LoadSome(gate + i, n))), y + i, n);
    });
    x = y;
  }
  const double count = static_cast<double>(c.size);
  float mean = 0;
  if (c.scaling == Scaling::kLayer) {
    mean = static_cast<float>(SumOf(x, c.size, [](V v) HWY_ATTR { return v; }) / count);
  }
  const V middle = hn::Set(d, mean);
  const double squares = SumOf(x, c.size, [&](V v) HWY_ATTR {
    const V off = hn::Sub(v, middle);
    return hn::Mul(off, off);
  });
  const double size = c.scaling == Scaling::kUnit ? 1 : count;
  const V factor = hn::Set(d, static_cast<float>(1 / std::sqrt(squares / size + c.eps)));
  ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR {
    V v = hn::Mul(hn::Sub(LoadSome(x + i, n), middle), factor);
    if (weight != nullptr) v = hn::Mul(v, LoadSome(weight + i, n));
    if (bias != nullptr) v = hn::Add(v, LoadSome(bias + i, n));
    if (gate != nullptr && !c.gate_first) v = hn::Mul(v, hs::Silu(d, LoadSome(gate + i, n)));
    StoreSome(v, y + i, n);
  });
}

void Scale(const ScaleRows& c, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    for (size_t head = 0; head < c.heads; ++head) {
      const size_t at = head * c.size, weight_offset = c.weight_per_head ? at : 0;
      ScaleOneHead(c, c.x.Row(row) + at, c.gate.data == nullptr ? nullptr : c.gate.Row(row) + at,
                   c.weight == nullptr ? nullptr : c.weight + weight_offset,
                   c.bias == nullptr ? nullptr : c.bias + weight_offset, c.y.Row(row) + at);
    }
  }
}

template <class F>
HWY_INLINE void ActivateWith(const ActivateRows& c, size_t begin, size_t end, const F& f) {
  for (size_t row = begin; row < end; ++row) {
    const float* x = c.x.Row(row);
    float* y = c.y.Row(row);
    if (c.factor.data == nullptr) {
      ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR { StoreSome(f(LoadSome(x + i, n)), y + i, n); });
    } else {
      const float* factor = c.factor.Row(row);
      ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR {
        StoreSome(hn::Mul(f(LoadSome(x + i, n)), LoadSome(factor + i, n)), y + i, n);
      });
    }
  }
}

void Activate(const ActivateRows& c, size_t begin, size_t end) {
  const D d;
  const V zero = hn::Zero(d);
  // ReLU keeps NaN.
  const auto relu = [&](V x) HWY_ATTR { return hn::IfThenElse(hn::Lt(x, zero), zero, x); };
  switch (c.activation) {
    case Activation::kNone: return ActivateWith(c, begin, end, [](V x) HWY_ATTR { return x; });
    case Activation::kGelu: return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return Gelu(d, x); });
    case Activation::kGeluTanh: return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return GeluTanh(d, x); });
    case Activation::kSilu: return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return hs::Silu(d, x); });
    case Activation::kRelu: return ActivateWith(c, begin, end, relu);
    case Activation::kSquaredRelu:
      return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return hn::Mul(relu(x), relu(x)); });
    case Activation::kSigmoid: return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return hs::Sigmoids(d, x).s; });
    case Activation::kTanh: return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return hs::Tanh(d, x); });
    case Activation::kMinusExp:
      return ActivateWith(c, begin, end, [&](V x) HWY_ATTR { return hn::Neg(hs::Exp(d, x)); });
  }
}

void Add(const AddRows& c, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    const float *a = c.a.Row(row), *b = c.b.Row(row);
    float* y = c.y.Row(row);
    ForVectors(c.size, [&](size_t i, size_t n)
                           HWY_ATTR { StoreSome(hn::Add(LoadSome(a + i, n), LoadSome(b + i, n)), y + i, n); });
  }
}

void Mix(const MixRows& c, size_t begin, size_t end) {
  const V one = hn::Set(D(), 1.f);
  for (size_t row = begin; row < end; ++row) {
    const float *x = c.x.Row(row), *before = c.before.Row(row), *mix_row = c.mix.Row(row);
    float* y = c.y.Row(row);
    ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR {
      const V mix = LoadSome(mix_row + i, n);
      StoreSome(hn::MulAdd(mix, LoadSome(x + i, n), hn::Mul(hn::Sub(one, mix), LoadSome(before + i, n))), y + i, n);
    });
  }
}

void Decay(const DecayRows& c, size_t begin, size_t end) {
  const V slope = hn::Set(D(), c.slope);
  for (size_t row = begin; row < end; ++row) {
    const float* x = c.x.Row(row);
    float* y = c.y.Row(row);
    ForVectors(c.size, [&](size_t i, size_t n) HWY_ATTR {
      const V step = hs::Softplus(D(), hn::MulAdd(slope, LoadSome(x + i, n), LoadSome(c.bias + i, n)));
      StoreSome(hn::Mul(LoadSome(c.factor + i, n), step), y + i, n);
    });
  }
}

RowKernels RowKernelsOfTarget() { return {&Scale, &Activate, &Add, &Mix, &Decay}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::layers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::layers {
HEED_EXPORT(RowKernels, RowKernelsOfTarget)

RowKernels RowKernelsFor(const Context& ctx) { return RowKernelsOfTarget(ctx); }

}  // namespace heed::layers
#endif  // HWY_ONCE
