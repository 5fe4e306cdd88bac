// Bindings of heed.linear_attention, heed.linear_attention_backward and heed.linear_attention_step.
#include <string>
#include "docstrings/linear_attention.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "python/mechanism/describe.h"

namespace heed::linear_attention {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.feature_map = static_cast<FeatureMap>(settings.Choice("feature_map"));
  own.causal = settings.Get<bool>("causal");
  own.normalize = settings.Get<bool>("normalize");
  own.eps = settings.Get<double>("eps");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  // Feature maps are in the order of the enumeration.
  binding::Bind<Structs, Options>(
      m,
      {.name = "linear_attention",
       .settings = {{"feature_map", std::string("elu1"), {"elu1", "relu", "relu_sq", "exp", "identity", "softmax"}},
                    {"causal", true},
                    {"normalize", true},
                    {"eps", 1e-6}},
       .docs = doc::kDocs},
      DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::linear_attention
