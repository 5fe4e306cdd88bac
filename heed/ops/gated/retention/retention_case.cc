// Retention in the harness.
#include <cmath>

#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/parts/recurrent_case.h"

namespace heed::retention {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "retention",
      {.decay = recurrent::DecayShape::kHead},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::OrdinaryMath,
      "",
      &Explain};
  return mechanism;
}

// Decays may be left out.
std::vector<InputSpec> FileInputs() {
  std::vector<InputSpec> inputs = recurrent::InputsOf(Mechanism().definition);
  inputs.back().optional = true;
  return inputs;
}

}  // namespace

OpEntry Entry() {
  return {.name = "retention",
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
          .inputs = FileInputs(),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return recurrent::CallOn(Mechanism(), ctx, tensors, scale);
          },
          .weights = [](int64_t head, int64_t channels) {
            return ImpliedWeights{
                .form = "identity",
                .scale = 1 / std::sqrt(static_cast<double>(channels)),
                .log_decay = LogDecays(head + 1).back()};
          }};
}

}  // namespace heed::retention
