// Based in the harness, with and without its normaliser.
#include <cmath>
#include <string>

#include "heed/ops/linear/based/based.h"
#include "heed/ops/linear/based/based_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::based {
namespace {

recurrent::Mechanism Bound(const Options& own) {
  recurrent::Mechanism m = recurrent::Bound<Options>(
      "based", DefinitionOf(own), own,
      {&Forward, &Backward, &Reference, &BackwardReference, &Step, &Math});
  if (!own.normalize) m.options += " not normalized";
  return m;
}

Case MakeCase(const CaseRequest& request) {
  Options options;
  options.normalize = request.variant.find("not_normalized") == std::string::npos;
  return recurrent::MakeCase(Bound(options), request);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.normalize = random.Chance(0.6);
  if (random.Chance(0.3)) options.eps = random.Uniform(0, 0.5);
  return recurrent::RandomCase(Bound(options), dtype, seed);
}

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = [] {
    Options options;
    options.normalize = false;
    return Bound(options);
  }();
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.emplace_back("not_normalized");
  return {.name = "based",
          .family = "linear",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = variants,
          .flops = "4 F Dv per token and value head, F = 1 + D + D (D + 1) / 2, backward 12 F Dv",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
          .state = "B Hq F (Dv + 1) 4",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .recurrent = &Mechanism(),
          .inputs = recurrent::InputsOf(Mechanism().definition),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return recurrent::CallOn(Bound(Options()), ctx, tensors, scale);
          },
          .weights = [](int64_t, int64_t channels) {
            return ImpliedWeights{
                .form = "taylor",
                .scale = 1 / std::sqrt(static_cast<double>(channels)),
                .normalize = true,
                .eps = Options().eps};
          }};
}

}  // namespace heed::based
