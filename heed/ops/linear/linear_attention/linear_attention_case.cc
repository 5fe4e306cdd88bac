// Linear attention in the harness: every feature map, with and without causality and normaliser.
#include <iterator>
#include <string>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"

namespace heed::linear_attention {
namespace {

constexpr struct {
  const char* name;
  FeatureMap map;
} kMaps[] = {{"elu1", FeatureMap::kElu1}, {"relu", FeatureMap::kRelu},         {"relu_sq", FeatureMap::kReluSquared},
             {"exp", FeatureMap::kExp},   {"identity", FeatureMap::kIdentity}, {"softmax", FeatureMap::kSoftmax}};

recurrent::Mechanism MechanismOf(const Options& own) {
  std::string text;
  for (const auto& [name, map] : kMaps) {
    if (map == own.feature_map) text = std::string(" ") + name;
  }
  if (!own.causal) text += " not causal";
  if (!own.normalize) text += " not normalized";
  return recurrent::Bound<Structs, Options>("linear_attention", DefinitionOf(own), own, HEED_FUNCTIONS, &Math, text);
}

Case MakeCase(const CaseRequest& request) {
  Options options;
  const mechanism::Words words(request.variant);
  for (const auto& [name, map] : kMaps) {
    if (words.Has(name)) options.feature_map = map;
  }
  options.causal = !words.Has("not_causal");
  options.normalize = !words.Has("not_normalized") && !words.Has("identity");
  return recurrent::MakeCase(MechanismOf(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.feature_map = kMaps[random.Integer(0, std::size(kMaps) - 1)].map;
  // A sum that can vanish or change its sign is not used as a denominator, since no tolerance bounds it: a relu of few
  // channels is 0 for many tokens.
  const bool positive = options.feature_map == FeatureMap::kElu1 || options.feature_map == FeatureMap::kExp ||
                        options.feature_map == FeatureMap::kSoftmax;
  options.normalize = positive && random.Chance(0.6);
  options.causal = random.Chance(0.7);
  if (random.Chance(0.3)) options.eps = random.Uniform(0, 0.5);
  return recurrent::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::LinearEntry(MechanismOf(Options()), {});
  for (const auto& [name, map] : kMaps) entry.variants.emplace_back(name);
  entry.variants.insert(entry.variants.end(), {"not_causal", "not_normalized"});
  Options simple;
  simple.normalize = false;
  static const recurrent::Mechanism tested = MechanismOf(simple);
  entry.recurrent = &tested;
  entry.make_case = &MakeCase;
  entry.random_case = &RandomCase;
  entry.weights = [](int64_t, int64_t) {
    return ImpliedWeights{.form = "elu1", .normalize = true, .eps = Options().eps, .sees_all = true};
  };
  return entry;
}

}  // namespace heed::linear_attention
