// Cases of recurrent mechanisms from their definitions.
#ifndef HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_
#define HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::recurrent {

// One mechanism with bound options.
struct Mechanism {
  std::string name;
  Definition definition;
  // For tests of properties that all mechanisms share.
  std::function<void(Context&, const Arguments&, const Options&, const Results&)> forward, backward, step;
  mechanism::Mechanism of_problems;
};

// Sets what problems of a mechanism need to know of its definition.
void Describe(const Definition& definition, mechanism::Mechanism& m);

// The states that calls with a definition have, which are the first ones of its table.
std::span<const StateTensor> StatesOf(const Definition& definition);

Mechanism Bound(const std::string& name, const Definition& definition,
                const std::shared_ptr<const mechanism::Calls>& calls, const std::string& options = "");

// Binds the options of a mechanism whose functions take its own type of options.
template <class Structs, class Own>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own,
                const mechanism::CaseFunctions<Structs, Own>& f, const std::string& options = "") {
  return Bound(name, definition, std::make_shared<const mechanism::BoundCalls<Structs, Own>>(own, f), options);
}

// This overload has tolerances that follow from the equations of its reference.
template <class Structs, class Own, class Math>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own,
                const mechanism::Functions<Structs, Own>& f, Math (*math)(const typename Structs::Inputs&, const Own&),
                const std::string& options = "") {
  mechanism::CaseFunctions<Structs, Own> functions = {f};
  functions.tolerance = [=](const typename Structs::Inputs& in, const Own& with,
                            const typename Structs::Outputs& expected, const typename Structs::Outputs& tolerance) {
    Tolerance(AsReference(in), with, math(in, with), OutputsAsReference(expected), OutputsAsReference(tolerance));
  };
  functions.backward_tolerance = [=](const typename Structs::BackwardInputs& in, const Own& with,
                                     const typename Structs::Gradients& expected,
                                     const typename Structs::Gradients& tolerance) {
    BackwardTolerance(AsReference(in), with, math(in, with), GradientsAsReference(expected),
                      GradientsAsReference(tolerance));
  };
  return Bound<Structs>(name, definition, own, functions, options);
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

// The entry of a mechanism without options of its own, which lives as long as the program. Its variants and formulas
// follow from its table.
OpEntry EntryOf(const Mechanism& m, const char* family);

// Common parts of the entries of linear mechanisms; make_case and random_case bind options.
OpEntry LinearEntry(const Mechanism& plain, const std::vector<std::string>& more_variants);

}  // namespace heed::recurrent

#endif  // HEED_HARNESS_MECHANISM_RECURRENT_CASE_H_
