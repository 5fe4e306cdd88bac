// Linear attention in the harness: every feature map, with and without causality and
// normaliser.
#include <iterator>
#include <string>

#include "heed/ops/linear/linear_attention/linear_attention.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::linear_attention {
namespace {

constexpr struct {
  const char* name;
  FeatureMap map;
} kMaps[] = {{"elu1", FeatureMap::kElu1},
             {"relu", FeatureMap::kRelu},
             {"relu_sq", FeatureMap::kReluSquared},
             {"exp", FeatureMap::kExp},
             {"identity", FeatureMap::kIdentity},
             {"softmax", FeatureMap::kSoftmax}};

recurrent::Mechanism Bound(const Options& own) {
  recurrent::Mechanism m = recurrent::Bound<Options>(
      "linear_attention", DefinitionOf(own), own,
      {&Forward, &Backward, &Reference, &BackwardReference, &Step, &Math});
  for (const auto& [name, map] : kMaps) {
    if (map == own.feature_map) m.options = std::string(" ") + name;
  }
  if (!own.causal) m.options += " not causal";
  if (!own.normalize) m.options += " not normalized";
  return m;
}

Case MakeCase(const CaseRequest& request) {
  Options options;
  const std::string words = "+" + request.variant + "+";
  const auto has = [&](const std::string& word) {
    return words.find("+" + word + "+") != std::string::npos;
  };
  for (const auto& [name, map] : kMaps) {
    if (has(name)) options.feature_map = map;
  }
  options.causal = !has("not_causal");
  options.normalize = !has("not_normalized") && !has("identity");
  return recurrent::MakeCase(Bound(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.feature_map = kMaps[random.Integer(0, std::size(kMaps) - 1)].map;
  // What can vanish or change its sign is no denominator, nor can a test bound it: a relu of
  // few channels is 0 for many tokens.
  const bool positive = options.feature_map == FeatureMap::kElu1 ||
                        options.feature_map == FeatureMap::kExp ||
                        options.feature_map == FeatureMap::kSoftmax;
  options.normalize = positive && random.Chance(0.6);
  options.causal = random.Chance(0.7);
  if (random.Chance(0.3)) options.eps = random.Uniform(0, 0.5);
  return recurrent::RandomCase(Bound(options), dtype, seed);
}

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = [] {
    Options options;
    options.normalize = false;
    return Bound(options);
  }();
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  for (const auto& [name, map] : kMaps) variants.emplace_back(name);
  variants.insert(variants.end(), {"not_causal", "not_normalized"});
  return {.name = "linear_attention",
          .family = "linear",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = variants,
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
          .state = "B Hq D (Dv + 1) 4",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .recurrent = &Mechanism(),
          .inputs = recurrent::InputsOf(Mechanism().definition),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return recurrent::CallOn(Bound(Options()), ctx, tensors, scale);
          },
          .weights = [](int64_t, int64_t) {
            return ImpliedWeights{.form = "elu1",
                                  .normalize = true,
                                  .eps = Options().eps,
                                  .sees_all = true};
          }};
}

}  // namespace heed::linear_attention
