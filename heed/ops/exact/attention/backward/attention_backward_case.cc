// The backward pass of attention in the harness, alone or after the forward pass, and the tolerances of its kernels
// against the reference.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string_view>
#include <utility>

#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"

namespace heed::attention {
namespace {

// The allowed error of an element of a gradient.
//
// Each is a sum over pairs. A pair's contribution has, relative to its magnitude without cancellation (A = P (|dP| +
// |delta|) times its other factor), an error of
//
//   base (1 + S / 8)
//
// with S as for the forward pass (attention_case.cc): the error of P = exp(s - lse), which includes the rounding of
// lse, |lse| <= S + log n. base is 1e-5, or 1e-13 in f64, which covers the chains over D, Dv, keys and rows: their
// errors are sums of independent roundings of at most A. Over elements this is stricter than the same bound on norms.
//
// 16-bit tensors add the rounding of o in delta, and of P and dS where a kernel rounds them: 4 u A, and 2^-25 for an
// element of o that is subnormal in f16; and the rounding of the result.
//
// dlog_decay of a step is a running sum in double-double that larger terms have entered and left, so it adds 2^-96 of
// the largest A of the call: some hundred roundings of 2^-106.
struct Epsilon {
  double base, input, floor, of_o = 0;
};

Epsilon EpsilonOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {1e-13, 0, 1e-290};
    case DType::kBF16: return {1e-5, 4 * 0x1p-8, 1e-30};
    case DType::kF16: return {1e-5, 4 * 0x1p-11, 1e-30, 0x1p-25};
    default: return {1e-5, 0, 1e-30};
  }
}

// Unit roundoff of the result's dtype, and the magnitude that may be flushed to zero in it; for f16 half of its least
// subnormal.
std::pair<double, double> RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0x1p-53, 0};
    case DType::kBF16: return {1.01 * 0x1p-8, 0x1p-126};
    case DType::kF16: return {1.01 * 0x1p-11, 0x1p-25};
    default: return {0x1p-24, 0x1p-126};
  }
}

double BytesOf(DType dtype, std::span<const int64_t> sizes) {
  double bytes = static_cast<double>(SizeOf(dtype));
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  return bytes;
}

Roundoff RoundoffOf(DType dtype) {
  const Epsilon eps = EpsilonOf(dtype);
  const auto relative = [eps](const ReferenceRow& row) {
    double S = 0;
    for (const ReferencePair& pair : row.pairs) {
      if (pair.logit >= row.lse - 750) S = std::max(S, pair.magnitude);
    }
    return eps.base * (1 + S / 8) + eps.input;
  };
  return {relative, eps.of_o};
}

void FinishTolerance(DType dtype, DType stored, const TensorView& expected, const TensorView& tolerance) {
  const auto [unit, subnormal] = RoundingOf(stored);
  if (expected.num_elements() == 0) return;
  std::vector<int64_t> index(expected.sizes().size());
  do {
    double value = GetElement(expected, index), rounded = 0;
    StoreDouble(stored, &rounded, 0, value);
    rounded = LoadAsDouble(stored, &rounded, 0);
    if (std::isinf(rounded)) SetElement(expected, index, value = rounded);  // rounds to infinity
    SetElement(tolerance, index,
               GetElement(tolerance, index) + unit * std::abs(value) + subnormal + EpsilonOf(dtype).floor);
  } while (NextIndex(expected.sizes(), index));
}

void AddPassing(DType dtype, const TensorView& tolerance) {
  if (tolerance.num_elements() == 0) return;
  double largest = 0;
  std::vector<int64_t> index(tolerance.sizes().size());
  do largest = std::max(largest, GetElement(tolerance, index));
  while (NextIndex(tolerance.sizes(), index));
  const double passing = 0x1p-96 / EpsilonOf(dtype).base * largest;
  do SetElement(tolerance, index, GetElement(tolerance, index) + passing);
  while (NextIndex(tolerance.sizes(), index));
}

}  // namespace

Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views) {
  Gradients gradients;
  ForEachGradient({}, {}, [&](const char* name, TensorView Gradients::* gradient, const char*, const ConstTensorView&) {
    for (size_t i = 0; i < views.size(); ++i) {
      if (specs[i].name == name) gradients.*gradient = views[i];
    }
  });
  return gradients;
}

void DescribeGradients(Problem& p, uint64_t seed) {
  const auto keep = [&](const OutputSpec& like, uint64_t stream) {
    const Buffer buffer(like.dtype, like.sizes);
    p.memory.push_back(buffer.FillNormal(seed * 16 + stream));
    return buffer.view();
  };
  p.d_o = keep(p.o, 8);
  p.gradients.clear();
  ForEachGradient(p.in, p.options, [&](const char* name, auto, const char*, const ConstTensorView& of) {
    if (of) p.gradients.push_back({name, of.dtype(), {of.sizes().begin(), of.sizes().end()}, {}});
  });
}

Case MakeBackwardCase(const Problem& problem, bool with_forward) {
  const auto p = std::make_shared<const Problem>(problem);
  const DType dtype = p->in.q.dtype();
  Case c = MakeCase(problem);
  const size_t first = with_forward ? c.outputs.size() : 0;
  const auto forward_reference = c.reference;
  if (!with_forward) c.outputs.clear();
  c.outputs.insert(c.outputs.end(), p->gradients.begin(), p->gradients.end());
  for (const OutputSpec& spec : p->gradients) c.bytes += BytesOf(spec.dtype, spec.sizes);
  c.bytes += BytesOf(p->d_o.dtype(), p->d_o.sizes());  // o and lse are already counted
  if (p->d_lse) c.bytes += BytesOf(p->d_lse.dtype(), p->d_lse.sizes());
  c.pass = "backward";
  c.title += p->d_lse ? " d_lse" : "";

  const auto backward = [p](Context& ctx, const ConstTensorView& o, const ConstTensorView& lse,
                            std::span<const TensorView> views) {
    Backward(ctx, {p->in.q, p->in.k, p->in.v, o, lse, p->d_o, p->d_lse}, p->options, ToGradients(p->gradients, views));
  };
  const Buffer lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, p->LseSizes());
  if (with_forward) {
    c.run = [=](Context& ctx, std::span<const TensorView> outputs) {
      const TensorView of_forward = first > 1 ? outputs[1] : lse.view();
      Forward(ctx, p->in, p->options, {outputs[0], of_forward});
      backward(ctx, outputs[0], of_forward, outputs.subspan(first));
    };
  } else {
    const Buffer o(dtype, p->o.sizes, Placement::kAligned);
    Context ctx;
    Forward(ctx, p->in, p->options, {o.view(), lse.view()});
    c.run = [=](Context& context, std::span<const TensorView> outputs) {
      backward(context, o.view(), lse.view(), outputs);
    };
  }
  c.reference = [=](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    if (with_forward) {
      forward_reference(expected.first(first), tolerance.empty() ? tolerance : tolerance.first(first));
    }
    const auto gradients = expected.subspan(first);
    const BackwardInputs in = {p->in.q, p->in.k, p->in.v, {}, {}, p->d_o, p->d_lse};
    if (tolerance.empty()) {
      return ReferenceGradients(in, p->options, ToGradients(p->gradients, gradients), {}, {});
    }
    const auto allowed = tolerance.subspan(first);
    ReferenceGradients(in, p->options, ToGradients(p->gradients, gradients), ToGradients(p->gradients, allowed),
                       RoundoffOf(dtype));
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (p->gradients[i].name == "dlog_decay") AddPassing(dtype, allowed[i]);
      FinishTolerance(dtype, p->gradients[i].dtype, gradients[i], allowed[i]);
    }
  };
  return c;
}

}  // namespace heed::attention
