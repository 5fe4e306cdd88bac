// Cases of preconditioned delta rules.
#ifndef HEED_HARNESS_MECHANISM_PRECONDITIONED_CASE_H_
#define HEED_HARNESS_MECHANISM_PRECONDITIONED_CASE_H_

#include <cmath>
#include <cstdint>
#include <string>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/mechanism/reference/preconditioned_rounding_internal.h"

namespace heed::recurrent {

// Binds a mechanism whose tolerances follow from its PreconditionedMath.
template <class Structs, class Own>
Mechanism BoundPreconditioned(const std::string& name, const Definition& definition, const Own& own,
                              const mechanism::Functions<Structs, Own>& f,
                              PreconditionedMath (*math)(const typename Structs::Inputs&, const Own&)) {
  mechanism::CaseFunctions<Structs, Own> functions = {f};
  functions.tolerance = [=](const typename Structs::Inputs& in, const Own& with,
                            const typename Structs::Outputs& expected, const typename Structs::Outputs& tolerance) {
    Tolerance(AsPreconditioned(in), with, math(in, with), OutputsAsReference(expected), OutputsAsReference(tolerance),
              tolerance.final.A);
  };
  functions.backward_tolerance = [=](const typename Structs::BackwardInputs& in, const Own& with,
                                     const typename Structs::Gradients& expected,
                                     const typename Structs::Gradients& tolerance) {
    BackwardTolerance(AsPreconditioned(in), with, math(in, with), GradientsAsPreconditioned(expected),
                      GradientsAsPreconditioned(tolerance));
  };
  return Bound<Structs>(name, definition, own, functions);
}

template <class Options>
Options RandomPreconditioner(uint64_t seed) {
  Random random(seed, 1);
  Options options;
  if (random.Chance(0.4)) options.bound = random.Uniform(1, 4);
  if (random.Chance(0.3)) options.eps = std::exp(random.Uniform(-14, 0));
  return options;
}

}  // namespace heed::recurrent

#endif  // HEED_HARNESS_MECHANISM_PRECONDITIONED_CASE_H_
