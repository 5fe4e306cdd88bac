// References of Mamba and Mamba2.
#include <cmath>
#include <vector>

#include "heed/layers/mamba.h"
#include "heed/layers/mamba2.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::layers {

using reference::Array;
using reference::Tensor;

namespace {

double MinusExp(double x) { return -std::exp(x); }

}  // namespace

void Mamba::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                      const TensorView& y) {
  const int64_t inner = config.inner == 0 ? 2 * config.width : config.inner, N = config.state;
  const int64_t rank = config.step_rank == 0 ? (config.width + 15) / 16 : config.step_rank;
  const Array projected = Product(Array(x), weights, {"in_proj", 2 * inner, config.bias});
  const Array u = Convolved(projected.Channels(0, inner), weights, "conv1d", config.conv, config.conv_bias, call);
  const Array selected = Product(u, weights, {"x_proj", rank + 2 * N, false});
  const Array delta = Product(selected.Channels(0, rank), weights, {"dt_proj", inner, true}).Swapped();
  const Array A = Map(Tensor(weights, "A_log", {inner, N}), MinusExp), D = Tensor(weights, "D", {inner});
  const Array B = selected.Channels(rank, rank + N).Swapped(), C = selected.Channels(rank + N, rank + 2 * N).Swapped();
  const Array z = projected.Channels(inner, 2 * inner).Swapped(), swapped = u.Swapped();
  selective_scan::Options options;
  options.delta_softplus = true;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  selective_scan::Inputs in;
  in.u = swapped.view();
  in.delta = delta.view();
  in.A = A.view();
  in.B = B.view();
  in.C = C.view();
  in.D = D.view();
  in.z = z.view();
  Array o(swapped.sizes);
  selective_scan::Outputs out;
  out.o = o.view();
  selective_scan::Reference(in, options, out);
  Product(o.Swapped(), weights, {"out_proj", config.width, config.bias}).Store(y);
}

void Mamba2::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                       const TensorView& y) {
  const int64_t H = config.heads, P = config.head_dim, G = config.groups, N = config.state;
  const int64_t inner = H * P, mixed = inner + 2 * G * N;
  const Array projected = Product(Array(x), weights, {"in_proj", inner + mixed + H, config.bias});
  const Array z = projected.Channels(0, inner), dt = projected.Channels(inner + mixed, inner + mixed + H);
  const Array convolved =
      Convolved(projected.Channels(inner, inner + mixed), weights, "conv1d", config.conv, config.conv_bias, call);
  const Array written = convolved.Channels(0, inner, {H, P}), B = convolved.Channels(inner, inner + G * N, {G, N}),
              C = convolved.Channels(inner + G * N, mixed, {G, N});
  const Array A = Map(Tensor(weights, "A_log", {H}), MinusExp), D = Tensor(weights, "D", {H}),
              bias = Tensor(weights, "dt_bias", {H});
  ssd::Options options;
  options.dt_softplus = true;
  options.dt_min = config.step_min;
  options.dt_max = config.step_max;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  ssd::Inputs in;
  in.x = written.view();
  in.dt = dt.view();
  in.A = A.view();
  in.B = B.view();
  in.C = C.view();
  in.D = D.view();
  in.dt_bias = bias.view();
  Array o(written.sizes);
  ssd::Outputs out;
  out.o = o.view();
  ssd::Reference(in, options, out);
  const Array gated =
      Times(o.Reshaped(z.sizes), Map(z, [](double v) { return ActivationReference(Activation::kSilu, v); }));
  const int64_t group = inner / G;
  Array normed = RmsNorm(gated, Array({group}, 1), config.norm_eps);
  const Array weight = Tensor(weights, "norm.weight", {inner});
  for (int64_t i = 0; i < std::ssize(normed.values); ++i) normed[i] *= weight[i % inner];
  Product(normed, weights, {"out_proj", config.width, config.bias}).Store(y);
}

}  // namespace heed::layers
