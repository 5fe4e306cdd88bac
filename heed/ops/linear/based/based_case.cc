// Based in the harness, with and without its normaliser.
#include <cmath>
#include <string>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/linear/based/based_internal.h"

namespace heed::based {
namespace {

recurrent::Mechanism MechanismOf(const Options& own) {
  return recurrent::Bound<Structs, Options>("based", DefinitionOf(own), own, HEED_FUNCTIONS, &Math,
                                            own.normalize ? "" : " not normalized");
}

Case MakeCase(const CaseRequest& request) {
  Options options;
  options.normalize = !mechanism::Words(request.variant).Has("not_normalized");
  return recurrent::MakeCase(MechanismOf(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.normalize = random.Chance(0.6);
  if (random.Chance(0.3)) options.eps = random.Uniform(0, 0.5);
  return recurrent::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::LinearEntry(MechanismOf(Options()), {"not_normalized"});
  Options simple;
  simple.normalize = false;
  static const recurrent::Mechanism tested = MechanismOf(simple);
  entry.recurrent = &tested;
  entry.flops = "4 F Dv per token and value head, F = 1 + D + D (D + 1) / 2, backward 12 F Dv";
  entry.state = "B Hq F (Dv + 1) 4";
  entry.make_case = &MakeCase;
  entry.random_case = &RandomCase;
  entry.weights = [](int64_t, int64_t channels) {
    return ImpliedWeights{.form = "taylor",
                          .scale = 1 / std::sqrt(static_cast<double>(channels)),
                          .normalize = true,
                          .eps = Options().eps};
  };
  return entry;
}

}  // namespace heed::based
