// Performer in the harness: both kernels, with and without causality.
#include <string>

#include "heed/ops/linear/performer/performer.h"
#include "heed/ops/linear/performer/performer_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::performer {
namespace {

recurrent::Mechanism Bound(const Options& own) {
  recurrent::Mechanism m = recurrent::Bound<Options>(
      "performer", DefinitionOf(own), own,
      {&Forward, &Backward, &Reference, &BackwardReference, &Step, &Math});
  if (own.kernel == Kernel::kRelu) m.options += " relu";
  if (own.causal) m.options += " causal";
  return m;
}

Case MakeCase(const CaseRequest& request) {
  const std::string words = "+" + request.variant + "+";
  Options options;
  // Only the causal form has states, a direction and steps.
  options.causal = request.pass == "step" || words.find("+causal+") != std::string::npos ||
                   words.find("+state+") != std::string::npos ||
                   words.find("+reverse+") != std::string::npos;
  if (words.find("+relu+") != std::string::npos) options.kernel = Kernel::kRelu;
  return recurrent::MakeCase(Bound(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.causal = random.Chance(0.6);
  if (random.Chance(0.3)) options.kernel = Kernel::kRelu;
  if (random.Chance(0.3)) options.eps = random.Uniform(1e-6, 0.1);
  return recurrent::RandomCase(Bound(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.insert(variants.end(), {"causal", "relu", "causal+relu"});
  return {.name = "performer",
          .family = "linear",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = variants,
          .flops = "4 M (D + Dv) per token and value head, backward 12 M (D + Dv)",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
          .state = "B Hq (M (Dv + 1) + 1) 4",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = recurrent::InputsOf(DefinitionOf({})),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return recurrent::CallOn(Bound(Options()), ctx, tensors, scale);
          }};
}

}  // namespace heed::performer
