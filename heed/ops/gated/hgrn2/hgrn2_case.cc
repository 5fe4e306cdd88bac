// HGRN2 in the harness.
#include "heed/ops/gated/hgrn2/hgrn2.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/ops/parts/recurrent_case.h"

namespace heed::hgrn2 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "hgrn2",
      {.decay = recurrent::DecayShape::kKey,
       .complement_keys = true,
       .value_name = "i"},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &Math,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  return {.name = "hgrn2",
          .family = "gated",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = recurrent::kGatedVariants,
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = "B Tq (Hkv D + Hq D + 2 Hq Dv) size",
          .state = "B Hq D Dv 4",
          .make_case = [](const CaseRequest& request) {
            return recurrent::MakeCase(Mechanism(), request);
          },
          .random_case = [](DType dtype, uint64_t seed) {
            return recurrent::RandomCase(Mechanism(), dtype, seed);
          },
          .recurrent = &Mechanism(),
          .inputs = recurrent::InputsOf(Mechanism().definition),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return recurrent::CallOn(Mechanism(), ctx, tensors, scale);
          }};
}

}  // namespace heed::hgrn2
