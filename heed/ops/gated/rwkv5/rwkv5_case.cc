// RWKV-5 in the harness.
#include "heed/ops/gated/rwkv5/rwkv5.h"
#include "heed/ops/parts/recurrent_case.h"

namespace heed::rwkv5 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "rwkv5",
      {.decay = recurrent::DecayShape::kHeadKey, .bonus = true, .query_name = "r"},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::BonusMath,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  return {.name = "rwkv5",
          .family = "gated",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = recurrent::kGatedVariants,
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
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

}  // namespace heed::rwkv5
