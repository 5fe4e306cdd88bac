// Bindings of heed.causal_conv1d, heed.causal_conv1d_backward and heed.causal_conv1d_step.
#include <string>

#include "docstrings/causal_conv1d.h"
#include "python/mechanism/describe.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  const bool silu = !settings.Get<std::string>("activation").empty();
  own.activation = silu ? Activation::kSilu : Activation::kNone;
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m,
      {.name = "causal_conv1d",
       .settings = {{"activation", std::string(), {"silu", "swish"}}},
       .docs = doc::kDocs,
       .in_python = {{"activation", "'silu', which is 'swish' too, or None"},
                     {"initial_state",
                      "[B, D, W - 1]: the inputs before the first token, oldest first; f32, or f64 beside f64; absent: "
                      "zeros"}},
       .state_last = true},
      DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::causal_conv1d
