// Mamba-3: a state space model with a trapezoidal discretisation, queries and keys that are rotated by a running angle,
// and R writes and reads per token (MIMO; R = 1 is SISO).
//
//   delta_t = dt_t,  alpha_t = exp(log_decay_t),  lambda_t = sigmoid(trap_t)
//   angle_t = angle_{t-1} + delta_t theta_t                                     angle: [P]
//   q_tr = rotated(q + q_bias, angle_t),  k_tr likewise                         r = 1 ... R
//   S_t = alpha_t (S_{t-1} + (1 - lambda_t) delta_t sum_r k_{t-1,r} v_{t-1,r}^T) + lambda_t delta_t sum_r k_tr v_tr^T
//   o_tr = scale S_t^T q_tr                                                     S: [K, V]
//
// per value head. Angle i rotates channels 2 i and 2 i + 1, (x, y) to (x cos - y sin, x sin + y cos); channels from 2 P
// on are not rotated. scale is 1 by default. What the original layer does before and after is left to the caller: rates
// theta = pi tanh(angles), dt > 0 by a softplus, v_r = x .* mimo_v_r, the skip D, the gate and the sum of o_r over r.
//
// Source: Lahoti, Li, Chen, Wang, Bick, Kolter, Dao, Gu, "Mamba-3: Improved Sequence Modeling using State Space
// Principles", ICLR 2026, and mamba_ssm.ops.triton.mamba3 of github.com/state-spaces/mamba. Derivation: README.md.
#ifndef HEED_OPS_SSM_MAMBA3_MAMBA3_H_
#define HEED_OPS_SSM_MAMBA3_MAMBA3_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::mamba3 {

// K >= 2 and 1 <= P <= K / 2.
template <class View>
struct Tensors {
  View q;            // [B, T, R, H, K]: queries (C), before bias and rotation
  View k;            // [B, T, R, H, K]: keys (B), before bias and rotation
  View v;            // [B, T, R, HV, V]: values
  View log_decay;    // [B, T, HV]: A delta, <= 0
  View dt;           // [B, T, HV]: steps delta
  View trap;         // [B, T, HV]: lambda before its sigmoid
  View theta;        // [B, T, HV, P]: rates of the angles, in radians per unit of dt
  View q_bias = {};  // [HV, R, K]: added to q; absent: 0
  View k_bias = {};  // [HV, R, K]: added to k; absent: 0
};

template <class View>
struct States {
  View S;      // [B, HV, K, V]: after the last token
  View angle;  // [B, HV, P]: of the last token, between -pi and pi
  View k;      // [B, R, HV, K]: rotated keys of the last token
  View v;      // [B, R, HV, V]: values of the last token
};

using Structs = mechanism::Structs<Tensors, States>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using StepInputs = Structs::StepInputs;
using State = Structs::State;
using Summary = Structs::Summary;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using recurrent::Explanation;
using recurrent::Options;

// Computes o, in the shape of v, and, if requested, the states after the last token. The default scale is 1. A call
// with `segment` is Unsupported: keys are rotated by the angle before a segment.
//
// Edges. Any number of tokens may be 0: the final states are then the initial ones. A log decay of -infinity clears the
// state that it multiplies; a positive one counts as 0, unless the Context checks; a NaN propagates to all later
// tokens.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are f64 or f32. Angles are
// summed in f64 and kept between -pi and pi, so that they do not lose precision in long sequences. No exponential has a
// positive argument. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call anywhere agrees up to rounding.
//
// Cost. 4 R K V flops per token and value head, and sines and cosines of P angles. Memory beyond the arguments:
// Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype without a kernel, and on a GPU. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With q_t and k_t the rotated ones, R = 1 and
// gamma_t = lambda_t delta_t, beta_t = (1 - lambda_t) delta_t:
//
//   D_t = scale q_t d_o_t^T + alpha_{t+1} D_{t+1}              the gradient of S_t
//   dq_t = scale S_t d_o_t
//   dk_t = (gamma_t D_t + beta_{t+1} alpha_{t+1} D_{t+1}) v_t,  dv_t likewise, from k_t
//   dgamma_t = k_t^T D_t v_t,  dbeta_t = alpha_t k_{t-1}^T D_t v_{t-1}
//   dlog_decay_t = alpha_t <D_t, S_{t-1} + beta_t k_{t-1} v_{t-1}^T>
//   dangle_t = dangle_{t+1} + q_t x dq_t + k_t x dk_t          x: x_1 y_2 - x_2 y_1 of each pair of channels
//   dtheta_t = delta_t dangle_t,  ddelta_t = lambda_t dgamma_t + (1 - lambda_t) dbeta_t + <theta_t, dangle_t>
//   dtrap_t = lambda_t (1 - lambda_t) delta_t (dgamma_t - dbeta_t)
//
// dq and dk are then rotated back; they are summed over the value heads of a key head, and those of biases over tokens
// and sequences. The gradient of an initial angle is dangle_1, and the reduction of angles modulo 2 pi is a constant.
// Precision and reproducibility as above. Cost: 14 R K V flops per token and value head. States before each block of
// 128 tokens are stored for two heads per thread, the rest is recomputed. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates the states in place. Only the option scale has an effect. Memory-bound by S.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// Throw Unsupported: a segment of tokens is no map of states, as its keys are rotated by the angle before it.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, and K, V rounded up to whole
// vectors, at most
//
//   forward   threads E (3 K V + 128 R (9 K + 9 V)) + E HV R K + a few KiB
//   backward  threads E ((2 ceil(T / 128) + R + 9) K V + 128 R (21 K + 18 V)) + 6 E HV R K + a few KiB
//             + [HV > 2 H threads] 2 E T R K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::mamba3

#endif  // HEED_OPS_SSM_MAMBA3_MAMBA3_H_
