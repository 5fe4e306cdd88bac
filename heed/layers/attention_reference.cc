// References of the attention layers.
#include <numeric>
#include <vector>

#include "heed/layers/grouped_query_attention.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::layers {

using reference::Array;

namespace {

// Rotates each sequence of a call separately, with positions from 0: some scalings depend on its length.
Array RotatedBySequence(const Array& x, const CacheRotary& rotary, const Call& call) {
  const int64_t B = x.sizes[0], T = x.sizes[1], row = x.sizes[2] * x.sizes[3];
  Array rotated(x.sizes);
  const auto rotate = [&](int64_t begin, int64_t end) {  // rows of B T
    std::vector<int64_t> positions(static_cast<size_t>(end - begin));
    std::iota(positions.begin(), positions.end(), 0);
    const std::vector<int64_t> sizes = {1, end - begin, x.sizes[2], x.sizes[3]};
    RotaryReference(ConstTensorView(x.values.data() + begin * row, DType::kF64, sizes),
                    ConstTensorView(positions.data(), DType::kI64, {end - begin}), rotary.pairs, rotary.options,
                    TensorView(rotated.values.data() + begin * row, DType::kF64, sizes));
  };
  const auto integer = [](const ConstTensorView& t, int64_t i) {
    return LoadAsInt64(t.dtype(), t.data(), i * t.stride(0));
  };
  for (int64_t b = 0; b < B && !call.cu_seqlens; ++b)
    rotate(b * T, b * T + (call.lengths ? integer(call.lengths, b) : T));
  for (int64_t i = 0; call.cu_seqlens && i + 1 < call.cu_seqlens.size(0); ++i)
    rotate(integer(call.cu_seqlens, i), integer(call.cu_seqlens, i + 1));
  return rotated;
}

}  // namespace

void MultiHeadAttention::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                   const Call& call, const TensorView& y) {
  const Names& names = config.names;
  const int64_t heads = config.heads, dim = config.head_dim == 0 ? config.width / heads : config.head_dim;
  const Array rows(x), other = call.memory ? Array(call.memory) : rows;
  const std::vector<int64_t> split = {heads, dim};
  Array q, k, v;
  if (names.fused.empty()) {
    const auto project = [&](const Array& from, const std::string& name, bool bias) {
      const Array all = Product(from, weights, {name, heads * dim, bias}, names.transposed);
      return all.Channels(0, heads * dim, split);
    };
    q = project(rows, names.query, config.bias);
    k = project(other, names.key, config.bias && config.key_bias);
    v = project(other, names.value, config.bias);
  } else {
    const int64_t inner = heads * dim;
    const Array all = Product(rows, weights, {names.fused, 3 * inner, config.bias}, names.transposed);
    q = all.Channels(0, inner, split);
    k = all.Channels(inner, 2 * inner, split);
    v = all.Channels(2 * inner, 3 * inner, split);
  }
  attention::Options options;
  options.causal = config.causal;
  options.pattern = config.pattern;
  options.align = attention::Align::kTopLeft;
  options.scale = config.scale;
  options.mask = call.mask;
  options.key_lengths = config.memory_width != 0 ? call.memory_lengths : call.lengths;
  options.cu_seqlens_q = call.cu_seqlens;
  Array o(q.sizes);
  attention::Reference({q.view(), k.view(), v.view()}, options, {.o = o.view(), .lse = {}});
  const Array flat = o.Reshaped({rows.sizes[0], rows.sizes[1], heads * dim});
  Product(flat, weights, {names.output, config.width, config.bias}, names.transposed).Store(y);
}

void GroupedQueryAttention::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                      const Call& call, const TensorView& y) {
  const int64_t heads = config.heads, kv_heads = config.kv_heads == 0 ? heads : config.kv_heads;
  const int64_t dim = config.head_dim == 0 ? config.width / heads : config.head_dim;
  const Array rows(x);
  const int64_t B = rows.sizes[0], T = rows.sizes[1];
  const auto project = [&](const std::string& name, int64_t count) {
    return Product(rows, weights, {name + "_proj", count * dim, config.bias}).Channels(0, count * dim, {count, dim});
  };
  const auto rotated = [&](const std::string& name, int64_t count) {
    Array heads_of = project(name, count);
    if (config.qk_norm)
      heads_of = RmsNorm(heads_of, reference::Tensor(weights, name + "_norm.weight", {dim}), config.norm_eps);
    return config.rotary ? RotatedBySequence(heads_of, *config.rotary, call) : heads_of;
  };
  const Array q = rotated("q", heads), k = rotated("k", kv_heads), v = project("v", kv_heads);
  attention::Options options;
  options.causal = config.causal;
  options.align = attention::Align::kTopLeft;
  options.scale = config.scale;
  if (config.window > 0)
    options.window =
        config.causal ? attention::Window{config.window - 1, -1} : attention::Window{config.window, config.window};
  options.mask = call.mask;
  options.key_lengths = call.lengths;
  options.cu_seqlens_q = call.cu_seqlens;
  Array o(q.sizes);
  attention::Reference({q.view(), k.view(), v.view()}, options, {.o = o.view(), .lse = {}});
  Product(o.Reshaped({B, T, heads * dim}), weights, {"o_proj", config.width, config.output_bias}).Store(y);
}

}  // namespace heed::layers
