// mLSTM in the harness.
#include <string>
#include <vector>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"

namespace heed::mlstm {
namespace {

recurrent::Mechanism MechanismOf(const Options& own) {
  return recurrent::Bound<Structs, Options>("mlstm", DefinitionOf(own), own, HEED_FUNCTIONS, &Math);
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
  OpEntry entry = recurrent::EntryOf(mechanism, "gated");
  // Without decay a denominator is a sum of terms of both signs, however many.
  std::erase_if(entry.variants,
                [](const std::string& variant) { return variant == "vanishing" || variant == "faint"; });
  entry.random_case = &RandomCase;
  return entry;
}

}  // namespace heed::mlstm
