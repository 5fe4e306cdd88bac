// The error bounds of kernels of preconditioned delta rules against their references.
#ifndef HEED_MECHANISM_REFERENCE_PRECONDITIONED_ROUNDING_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_PRECONDITIONED_ROUNDING_INTERNAL_H_

#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"

namespace heed::recurrent {

// The delta rule, whose keys that write are M .* k, and how M follows from the keys:
//
//   A_t = exp(log_decay_A_t) A_{t-1} + beta_A_t k_t^2,  r_t = log(A_t + eps) - center
//   M_t = bound^(-r_t / (1 + |r_t|))
struct PreconditionedMath {
  double scale = 1;
  LogDecay log_decay;
  double bound = 1, eps = 0;
};

template <class View>
struct CurvatureTensors {
  View log_decay_A, beta_A, center;  // [B, T, H], [B, T, H], [H]
};
struct PreconditionedInputs {
  ReferenceBackwardInputs rule;  // k is the key of the call
  CurvatureTensors<ConstTensorView> curvature;
  ConstTensorView A, d_A;  // [B, H, K]: initial, and the gradient of the final one
};
struct PreconditionedGradients {
  ReferenceGradients rule;
  CurvatureTensors<TensorView> curvature;
  TensorView A;
};

template <class To, class From>
To CurvatureOf(const From& from) {
  return {from.log_decay_A, from.beta_A, from.center};
}
template <class In>
PreconditionedInputs AsPreconditioned(const In& in) {
  PreconditionedInputs of = {AsReference(in), CurvatureOf<CurvatureTensors<ConstTensorView>>(in), in.initial.A, {}};
  if constexpr (requires { in.d_final; }) of.d_A = in.d_final.A;
  return of;
}
template <class Out>
PreconditionedGradients GradientsAsPreconditioned(const Out& out) {
  return {GradientsAsReference(out), CurvatureOf<CurvatureTensors<TensorView>>(out), out.initial.A};
}

// The tolerance of each output, derived in the .cc file.
void Tolerance(const PreconditionedInputs& in, const Options& options, const PreconditionedMath& math,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance, const TensorView& tolerance_of_A);
void BackwardTolerance(const PreconditionedInputs& in, const Options& options, const PreconditionedMath& math,
                       const PreconditionedGradients& expected, const PreconditionedGradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_REFERENCE_PRECONDITIONED_ROUNDING_INTERNAL_H_
