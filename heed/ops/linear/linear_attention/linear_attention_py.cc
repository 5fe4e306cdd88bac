// heed.linear_attention, heed.linear_attention_backward and heed.linear_attention_step.
#include "heed/ops/linear/linear_attention/linear_attention.h"

#include <string>

#include "docstrings/linear_attention.h"
#include "heed/core/error.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::linear_attention {
namespace {

constexpr struct {
  const char* name;
  FeatureMap map;
} kMaps[] = {{"elu1", FeatureMap::kElu1},         {"relu", FeatureMap::kRelu},
             {"relu_sq", FeatureMap::kReluSquared}, {"exp", FeatureMap::kExp},
             {"identity", FeatureMap::kIdentity},   {"softmax", FeatureMap::kSoftmax}};

FeatureMap MapOf(const std::string& name) {
  for (const auto& [known, map] : kMaps) {
    if (name == known) return map;
  }
  throw InternalError("linear_attention: no feature map " + name);
}

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.feature_map = MapOf(std::get<std::string>(settings.at("feature_map")));
  own.causal = std::get<bool>(settings.at("causal"));
  own.normalize = std::get<bool>(settings.at("normalize"));
  own.eps = std::get<double>(settings.at("eps"));
  recurrent::Functions functions =
      recurrent::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
  functions.normalizer = own.normalize;
  return functions;
}

}  // namespace

void Bind(nanobind::module_& m) {
  std::vector<std::string> names;
  for (const auto& [name, map] : kMaps) names.emplace_back(name);
  recurrent::Bind(m, {.name = "linear_attention",
                      .inputs = {"q", "k", "v"},
                      .settings = {{"feature_map", std::string("elu1"), names},
                                   {"causal", true, {}},
                                   {"normalize", true, {}},
                                   {"eps", 1e-6, {}}},
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::linear_attention
