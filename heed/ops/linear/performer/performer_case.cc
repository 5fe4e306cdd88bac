// Performer in the harness: both kernels, with and without causality.
#include <string>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/linear/performer/performer_internal.h"

namespace heed::performer {
namespace {

recurrent::Mechanism MechanismOf(const Options& own) {
  return recurrent::Bound<Structs, Options>(
      "performer", DefinitionOf(own), own, HEED_FUNCTIONS, &Math,
      std::string(own.kernel == Kernel::kRelu ? " relu" : "") + (own.causal ? " causal" : ""));
}

Case MakeCase(const CaseRequest& request) {
  const mechanism::Words words(request.variant);
  Options options;
  // Only the causal form has states, a direction and steps.
  options.causal = request.pass == "step" || words.Has("causal") || words.Has("state") || words.Has("reverse");
  if (words.Has("relu")) options.kernel = Kernel::kRelu;
  return recurrent::MakeCase(MechanismOf(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.causal = random.Chance(0.6);
  if (random.Chance(0.3)) options.kernel = Kernel::kRelu;
  if (random.Chance(0.3)) options.eps = random.Uniform(1e-6, 0.1);
  return recurrent::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::LinearEntry(MechanismOf(Options()), {"causal", "relu", "causal+relu"});
  entry.flops = "4 M (D + Dv) per token and value head, backward 12 M (D + Dv)";
  entry.state = "B Hq (M (Dv + 1) + 1) 4";
  entry.make_case = &MakeCase;
  entry.random_case = &RandomCase;
  return entry;
}

}  // namespace heed::performer
