// Bindings of heed.efficient_attention and heed.efficient_attention_backward.
#include "docstrings/efficient_attention.h"
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"
#include "python/mechanism/binding.h"

namespace heed::efficient_attention {

void Bind(nanobind::module_& m) {
  binding::Bind<Api, Options>(m,
                              {.name = "efficient_attention",
                               .inputs = "q k v * kv_mask",
                               .docs = doc::kDocs,
                               .has_direction = false,
                               .output = "v"},
                              {binding::PlacesOf<Api>(kTensors, {{'G', "HV"}})},
                              {.forward = [](Context& ctx, const Masked& in, const Options& options,
                                             const Outputs& out) { Forward(ctx, in, in.With(options), out); },
                               .backward = [](Context& ctx, const Masked& in, const Options& options,
                                              const Gradients& out) { Backward(ctx, in, in.With(options), out); },
                               .step = nullptr,
                               .explain = [](const Context& ctx, const Masked& in,
                                             const Options& options) { return Explain(ctx, in, in.With(options)); }});
}

}  // namespace heed::efficient_attention
