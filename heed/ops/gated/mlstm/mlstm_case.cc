// mLSTM in the harness.
#include <string>
#include <vector>

#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::mlstm {
namespace {

recurrent::Mechanism MechanismOf(const Options& own) {
  return recurrent::Bound<Options>("mlstm", DefinitionOf(own), own,
                                   {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  if (random.Chance(0.3)) options.eps = random.Uniform(0, 0.5);
  return recurrent::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = MechanismOf({});
  OpEntry entry = recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + 2 Hq Dv + 2 Hq) size");
  entry.state = "B Hq (D (Dv + 1) + 1) 4";
  // Without decay a denominator is a sum of terms of both signs, however many.
  std::erase_if(entry.variants,
                [](const std::string& variant) { return variant == "vanishing" || variant == "faint"; });
  entry.random_case = &RandomCase;
  return entry;
}

}  // namespace heed::mlstm
