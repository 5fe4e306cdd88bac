// Cases of recurrent mechanisms from their definitions.
#ifndef HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_
#define HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::recurrent {

template <class Own>
using Functions = mechanism::Functions<Api, Own>;

// One mechanism with bound options.
struct Mechanism {
  std::string name;
  Definition definition;
  // For tests of properties that all mechanisms share.
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)> backward;
  std::function<void(Context&, const StepInputs&, const Options&, const State&, const TensorView&)> step;
  mechanism::Mechanism of_problems;
};

// The structs of problems, from a definition.
mechanism::Structs<Api> StructsOf(const Definition& definition);
void Describe(const Definition& definition, mechanism::Mechanism& m);

// Binds the options of a mechanism whose functions take its own type of options. Tolerances follow from the equations
// of its reference, or are functions if there is no `math`; Explain follows from the definition unless it is given too.
template <class Own, class MathOfReference = ReferenceMath>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own, Functions<Own> f,
                std::type_identity_t<MathOfReference (*)(const Inputs&, const Own&)> math = nullptr,
                const std::string& options = "") {
  if (math != nullptr) {
    f.tolerance = [=](const Inputs& in, const Own& with, const Outputs& expected, const Outputs& tolerance) {
      Tolerance(in, with, math(in, with), expected, tolerance);
    };
    f.backward_tolerance = [=](const BackwardInputs& in, const Own& with, const Gradients& expected,
                               const Gradients& tolerance) {
      BackwardTolerance(in, with, math(in, with), expected, tolerance);
    };
  }
  if (!f.explain) {
    f.explain = [=](const Context& ctx, const Inputs& in, const Own& with) {
      return Explain(name.c_str(), ctx, definition, in, with);
    };
  }
  if (!f.backward_workspace) {
    f.backward_workspace = [=](const Context& ctx, const Inputs& in, const Own& with) {
      return BackwardWorkspace(name.c_str(), ctx, definition, in, with);
    };
  }
  Mechanism m;
  m.name = name;
  m.definition = definition;
  m.forward = [own, call = f.forward](Context& ctx, const Inputs& in, const Options& common, const Outputs& out) {
    call(ctx, in, With(own, common), out);
  };
  m.backward = [own, call = f.backward](Context& ctx, const BackwardInputs& in, const Options& common,
                                        const Gradients& out) { call(ctx, in, With(own, common), out); };
  m.step = [own, call = f.step](Context& ctx, const StepInputs& in, const Options& common, const State& state,
                                const TensorView& o) { call(ctx, in, With(own, common), state, o); };
  m.of_problems.name = name;
  m.of_problems.options = options;
  Describe(definition, m.of_problems);
  mechanism::Bind(StructsOf(definition), own, f, m.of_problems);
  return m;
}

// Variants of every recurrent mechanism.
inline const std::vector<std::string> kVariants = {"state", "lengths=62", "reverse"};

// Variants of mechanisms with decays also have: -1e4 now and then ("strong=5": -5 everywhere), all decays 1 - 1e-6, and
// all decays closer to 1 than f32 resolves.
inline const std::vector<std::string> kGatedVariants = {"state",  "lengths=62", "reverse",
                                                        "strong", "vanishing",  "faint"};

// Fills a tensor that is not a decay; `keys` are those of the call, or absent.
const Buffer& FillValues(const mechanism::Row& row, const Buffer& buffer, uint64_t seed, const ConstTensorView& keys);

// Decays of ordinary strength, unless words of the variant say otherwise.
Case MakeCase(const mechanism::Mechanism& m, const Definition& definition, const CaseRequest& request);
Case RandomCase(const mechanism::Mechanism& m, const Definition& definition, DType dtype, uint64_t seed);

inline Case MakeCase(const Mechanism& m, const CaseRequest& request) {
  return MakeCase(m.of_problems, m.definition, request);
}
inline Case RandomCase(const Mechanism& m, DType dtype, uint64_t seed) {
  return RandomCase(m.of_problems, m.definition, dtype, seed);
}

// The entry of a mechanism without options of its own, which lives as long as the program.
OpEntry EntryOf(const Mechanism& m, OpEntry said);
OpEntry GatedEntry(const Mechanism& m, const char* bytes);
OpEntry DeltaEntry(const Mechanism& m);

// Common parts of the entries of linear mechanisms; make_case and random_case bind options.
OpEntry LinearEntry(const Mechanism& plain, const std::vector<std::string>& more_variants);

}  // namespace heed::recurrent

#endif  // HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_
