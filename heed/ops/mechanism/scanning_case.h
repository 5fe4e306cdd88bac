// Problems of mechanisms on the scan engine: what their cases are made of.
#ifndef HEED_OPS_MECHANISM_SCANNING_CASE_H_
#define HEED_OPS_MECHANISM_SCANNING_CASE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/mechanism/scanning.h"
#include "heed/ops/mechanism/scanning_internal.h"

namespace heed::scanning {

// One mechanism, with options of its own bound.
struct Mechanism {
  std::string name;
  Definition definition;
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)> backward;
  std::function<void(const Inputs&, const Options&, const Outputs&)> reference;
  std::function<void(const BackwardInputs&, const Options&, const Gradients&)> backward_reference;
  std::function<void(Context&, const StepInputs&, const StepState& state, const TensorView& o)>
      step;
  // The allowed error of each output.
  std::function<void(const Inputs&, const Options&, const Outputs& tolerance)> tolerance;
  std::function<void(const BackwardInputs&, const Options&, const Gradients& expected,
                     const Gradients& tolerance)>
      backward_tolerance;
  std::string options = {};  // for titles
};

// Adds to the allowed errors of the gradient of a constant or of shared weights, which several
// channels have added up, what rounding their sum takes.
void RoundSums(const ConstTensorView& input, const ConstTensorView& expected,
               const TensorView& tolerance);

// One whose functions take options of its own kind: with these.
template <class Own>
struct OwnFunctions {
  void (*forward)(Context&, const Inputs&, const Own&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Own&, const Gradients&);
  void (*reference)(const Inputs&, const Own&, const Outputs&);
  void (*backward_reference)(const BackwardInputs&, const Own&, const Gradients&);
  void (*step)(Context&, const StepInputs&, const Own&, const StepState&, const TensorView&);
  void (*tolerance)(const Inputs&, const Own&, const Outputs&);
  void (*backward_tolerance)(const BackwardInputs&, const Own&, const Gradients&,
                             const Gradients&);
};
template <class Own>
Mechanism Bound(const char* name, const Definition& definition, const Own& own,
                const OwnFunctions<Own>& f, const std::string& options = "") {
  Mechanism m;
  m.name = name;
  m.definition = definition;
  m.options = options;
  m.forward = [=](Context& ctx, const Inputs& in, const Options& common, const Outputs& out) {
    f.forward(ctx, in, With(own, common), out);
  };
  m.backward = [=](Context& ctx, const BackwardInputs& in, const Options& common,
                   const Gradients& out) { f.backward(ctx, in, With(own, common), out); };
  m.reference = [=](const Inputs& in, const Options& common, const Outputs& out) {
    f.reference(in, With(own, common), out);
  };
  m.backward_reference = [=](const BackwardInputs& in, const Options& common,
                             const Gradients& out) {
    f.backward_reference(in, With(own, common), out);
  };
  m.tolerance = [=](const Inputs& in, const Options& common, const Outputs& out) {
    f.tolerance(in, With(own, common), out);
  };
  m.backward_tolerance = [=](const BackwardInputs& in, const Options& common,
                             const Gradients& expected, const Gradients& out) {
    f.backward_tolerance(in, With(own, common), expected, out);
  };
  if (f.step == nullptr) return m;
  m.step = [=](Context& ctx, const StepInputs& in, const StepState& state, const TensorView& o) {
    f.step(ctx, in, own, state, o);
  };
  return m;
}

// Which of the optional tensors a random problem has, and which of their forms others have.
struct Choice {
  std::vector<std::string> absent;  // names
  int64_t groups = 1;               // 0: a form without groups
  std::vector<std::string> constant;  // names
  int64_t states = 16;
  int64_t taps = std::numeric_limits<int64_t>::max();  // of at most as many as tokens
  int64_t shifts = 4;         // taps of keys
  int64_t head_channels = 8;  // at most
  bool steps_are_positive = true;  // no softplus makes them so
};

// N(0, 1) tensors with T and D contiguous or D and T; decays of ordinary strength, but for words of
// the variant: "strong", "vanishing".
Case MakeCase(const Mechanism& mechanism, const CaseRequest& request, const Choice& choice);

// Random sizes, layouts, forms and options; forward and backward, or a step.
Case RandomCase(const Mechanism& mechanism, DType dtype, uint64_t seed);

// Words of variants that every one of them has.
inline const std::vector<std::string> kVariants = {"state",   "lengths=62", "reverse",
                                                   "strided", "strong",     "vanishing"};

// OpEntry's `inputs` and `call`.
std::vector<InputSpec> InputsOf(const Definition& definition);
TensorCall CallOn(const Mechanism& mechanism, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_CASE_H_
