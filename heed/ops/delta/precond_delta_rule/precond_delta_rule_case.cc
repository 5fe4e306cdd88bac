// The preconditioned gated delta rule in the harness.
#include "heed/harness/mechanism/preconditioned_case.h"
#include "heed/ops/delta/precond_delta_rule/precond_delta_rule_internal.h"

namespace heed::precond_delta_rule {
namespace {

recurrent::Mechanism MechanismOf(const Options& own) {
  return recurrent::BoundPreconditioned<Structs, Options>("precond_delta_rule", DefinitionOf(own), own, HEED_FUNCTIONS,
                                                          &Math);
}

Case RandomCase(DType dtype, uint64_t seed) {
  return recurrent::RandomCase(MechanismOf(recurrent::RandomPreconditioner<Options>(seed)), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = MechanismOf({});
  OpEntry entry = recurrent::EntryOf(mechanism, "delta");
  entry.random_case = &RandomCase;
  return entry;
}

}  // namespace heed::precond_delta_rule
