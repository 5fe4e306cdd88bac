// Efficient attention in the harness, with and without masks.
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"

namespace heed::efficient_attention {
namespace {

recurrent::Mechanism Mechanism() {
  return recurrent::Bound<Structs, Options>(
      "efficient_attention", DefinitionOf({}), {},
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS_WITHOUT_STEP, &Tolerance, &BackwardTolerance});
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = mechanism::EntryOf({.family = "linear",
                                      .variants = {"lengths=62", "kv_mask"},
                                      .flops = "4 D Dv per token and value head, backward 10 D Dv",
                                      .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
                                      .state = "none: not causal"},
                                     Mechanism().of_problems);
  entry.inputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}};
  entry.make_case = [](const CaseRequest& request) {
    Case c = recurrent::MakeCase(Mechanism(), request);
    if (request.pass == "backward") c.flops *= 10.0 / 12;
    return c;
  };
  entry.random_case = [](DType dtype, uint64_t seed) { return recurrent::RandomCase(Mechanism(), dtype, seed); };
  return entry;
}

}  // namespace heed::efficient_attention
