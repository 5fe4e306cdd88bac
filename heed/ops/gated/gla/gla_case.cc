// GLA in the harness.
#include "heed/ops/gated/gla/gla.h"
#include "heed/ops/parts/recurrent_case.h"

namespace heed::gla {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "gla",
      {.decay = recurrent::DecayShape::kKey, .value_decay = true},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::OrdinaryMath,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  return {.name = "gla",
          .family = "gated",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"state", "lengths=62", "reverse", "strong", "vanishing", "columns",
                       "columns+strong", "columns+vanishing"},
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = "B Tq (3 Hq D + 2 Hq Dv) size",
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

}  // namespace heed::gla
