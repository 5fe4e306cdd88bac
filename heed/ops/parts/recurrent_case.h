// Problems of recurrent mechanisms: what their cases are made of.
#ifndef HEED_OPS_PARTS_RECURRENT_CASE_H_
#define HEED_OPS_PARTS_RECURRENT_CASE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/parts/recurrent.h"
#include "heed/ops/parts/recurrent_internal.h"
#include "heed/ops/parts/recurrent_reference_internal.h"

namespace heed::recurrent {

// One mechanism, with options of its own bound.
struct Mechanism {
  std::string name;
  Definition definition;
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)>
      backward;
  std::function<void(const Inputs&, const Options&, const Outputs&)> reference;
  std::function<void(const BackwardInputs&, const Options&, const Gradients&)>
      backward_reference;
  std::function<void(Context&, const StepInputs&, const Options&, const State&,
                     const TensorView&)>
      step;
  std::function<ReferenceMath(const Inputs&, const Options&)> math;
  std::string options;  // for titles

  // Null where the definition says it all.
  std::function<Explanation(const Context&, const Inputs&, const Options&)> explain = {};
};

// Variants that every one of them has.
inline const std::vector<std::string> kVariants = {"state", "lengths=62", "reverse"};

// And those of mechanisms with decays: -1e4 here and there, and all of them 1 - 1e-6.
inline const std::vector<std::string> kGatedVariants = {"state", "lengths=62", "reverse",
                                                        "strong", "vanishing"};

// N(0, 1) rows of any size, decays of ordinary strength.
Case MakeCase(const Mechanism& mechanism, const CaseRequest& request);

// Random sizes, layouts, options and strengths of decays; forward and backward.
Case RandomCase(const Mechanism& mechanism, DType dtype, uint64_t seed);

// OpEntry's `inputs` and `call`.
std::vector<InputSpec> InputsOf(const Definition& definition);
TensorCall CallOn(const Mechanism& mechanism, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale);

}  // namespace heed::recurrent

#endif  // HEED_OPS_PARTS_RECURRENT_CASE_H_
