// heed.efficient_attention and heed.efficient_attention_backward.
#include "heed/ops/linear/efficient_attention/efficient_attention.h"

#include "docstrings/efficient_attention.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::efficient_attention {
namespace {

using Common = recurrent::Options;

Options With(const recurrent::Arguments& in, const Common& common) {
  Options options;
  static_cast<Common&>(options) = common;
  const auto mask = in.others.find("kv_mask");
  if (mask != in.others.end()) options.kv_mask = mask->second;
  return options;
}

recurrent::Functions BindSettings(const recurrent::Settings&) {
  using recurrent::Arguments;
  return {.forward = [](Context& ctx, const Arguments& in, const Common& options,
                        const Outputs& out) { Forward(ctx, in, With(in, options), out); },
          .backward =
              [](Context& ctx, const Arguments& in, const Common& options,
                 const recurrent::Results& out) { Backward(ctx, in, With(in, options), out); },
          .explain = [](const Context& ctx, const Arguments& in,
                        const Common& options) { return Explain(ctx, in, With(in, options)); }};
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "efficient_attention",
                      .inputs = {"q", "k", "v", {"kv_mask", recurrent::Input::kMask, true}},
                      .has_state = false,
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::efficient_attention
