// References of LongformerAttention and H3.
#include <vector>

#include "heed/layers/h3_layer.h"
#include "heed/layers/longformer_attention.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/sparse/longformer/longformer.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::layers {

using reference::Array;
using reference::Tensor;

void LongformerAttention::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                    const Call& call, const TensorView& y) {
  const Array rows(x);
  const int64_t width = config.width, heads = config.heads, dim = width / heads, B = rows.sizes[0], T = rows.sizes[1];
  const auto project = [&](const std::string& kind) {
    return Product(rows, weights, {"self." + kind, width, true}).Reshaped({B, T, heads, dim});
  };
  const Array q = project("query"), k = project("key"), v = project("value");
  const Array qg = project("query_global"), kg = project("key_global"), vg = project("value_global");
  const int64_t none = -1;
  longformer::Options options;
  options.window = config.window;
  options.tokens = call.global_tokens ? call.global_tokens : ConstTensorView(&none, DType::kI64, {1});
  options.key_lengths = call.lengths;
  options.cu_seqlens_q = call.cu_seqlens;
  Array o(q.sizes);
  longformer::Reference({q.view(), k.view(), v.view(), qg.view(), kg.view(), vg.view()}, options, {o.view(), {}});
  Product(o.Reshaped({B, T, width}), weights, {"output.dense", width, true}).Store(y);
}

void H3::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                   const TensorView& y) {
  const Array rows(x);
  const int64_t width = config.width, heads = config.heads == 0 ? width : config.heads, d = width / heads,
                modes = config.modes;
  const int64_t B = rows.sizes[0], T = rows.sizes[1];
  const auto project = [&](const std::string& kind) {
    return Product(rows, weights, {kind + "_proj", width, config.bias}).Reshaped({B, T, heads, d});
  };
  const Array q = project("q"), k = project("k"), v = project("v");
  const Array shift = Tensor(weights, "shift", {width, config.shift}), shift_D = Tensor(weights, "shift_D", {width}),
              log_dt = Tensor(weights, "log_dt", {heads}), log_A_real = Tensor(weights, "log_A_real", {heads, modes}),
              A_imag = Tensor(weights, "A_imag", {heads, modes}), C = Tensor(weights, "C", {heads, modes, 2}),
              D = Tensor(weights, "D", {heads});
  h3::Inputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.shift = shift.view();
  in.shift_D = shift_D.view();
  in.log_dt = log_dt.view();
  in.log_A_real = log_A_real.view();
  in.A_imag = A_imag.view();
  in.C = C.view();
  in.D = D.view();
  h3::Options options;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  Array o(q.sizes);
  h3::Outputs out;
  out.o = o.view();
  h3::Reference(in, options, out);
  Product(o.Reshaped({B, T, width}), weights, {"out_proj", width, config.bias}).Store(y);
}

}  // namespace heed::layers
