// Arguments, options and states of mechanisms on the scan engine.
//
// Sizes: B sequences, T tokens, D channels, N states per channel, G groups of channels, which
// divide D; N and G are at least 1. L taps, at most T. H heads of d channels, D = H d; W taps, at least
// 1, of their keys.
//
// The header of each mechanism lists the tensors that it takes.
#ifndef HEED_MECHANISM_SCANNING_H_
#define HEED_MECHANISM_SCANNING_H_

#include <cstdint>
#include <string>

#include "heed/core/tensor.h"

namespace heed::scanning {

// One token of each sequence: the tensors below without their axis T.
struct StepInputs {
  ConstTensorView u;                // [B, D, T]: inputs
  ConstTensorView delta;            // [B, D, T]: time steps, before delta_bias and delta_softplus
  ConstTensorView A;                // [D, N]: decay rates of states, < 0
  ConstTensorView B;                // [B, G, N, T], [B, N, T] or [D, N]: input projection of the state
  ConstTensorView C;                // [B, G, N, T], [B, N, T] or [D, N]: output projection of the state
  ConstTensorView D;                // [D], or [H]: factors of the inputs, added to o; absent: 0
  ConstTensorView z;                // [B, D, T]: o is multiplied by silu(z); absent: by 1
  ConstTensorView delta_bias;       // [D]: added to delta; absent: 0
  ConstTensorView x;                // [B, T, D]: inputs
  ConstTensorView input_gate;       // [B, T, D]: the input gate before its sigmoid
  ConstTensorView recurrence_gate;  // [B, T, D]: the recurrence gate before its sigmoid
  ConstTensorView a;                // [D]: parameter of the decay, exp(-c softplus(a)) at the largest gate
  ConstTensorView log_decay;        // [B, T, D]: natural logarithms of decay factors, <= 0
  ConstTensorView log_dt;           // [D], or [H]: natural logarithms of time steps
  ConstTensorView log_A_real;       // [D, N], or [H, N]: natural logarithms of minus the real parts of rates
  ConstTensorView A_imag;           // [D, N], or [H, N]: the imaginary parts
  ConstTensorView kernel;           // [D, L]: taps of the convolution, by distance
  ConstTensorView q;                // [B, T, H, d]: queries
  ConstTensorView k;                // [B, T, H, d]: keys
  ConstTensorView v;                // [B, T, H, d]: values
  ConstTensorView shift;            // [D, W]: taps of the filter over keys, by distance
  ConstTensorView shift_D;          // [D]: added to shift[:, 0]; absent: 0
};

// Any strides; fast where tokens or channels are contiguous, otherwise refused by a strict Context. Tensors over tokens
// have the dtype of the first tensor or of states, which is f64 for f64 and else f32; constants have any float dtype.
struct Inputs : StepInputs {
  ConstTensorView initial;       // [B, D, N], or [B, D] for one state per channel: state before the first token; f32
                                 // (f64 for f64); absent: zeros
  ConstTensorView initial_tail;  // [B, W - 1, H, d]: keys before the first token, oldest first; f32 (f64 for f64);
                                 // absent: zeros
};

struct Options {
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states have N instead of B, one per sequence
  bool reverse = false;             // from the last token to the first; the final state is after the first
};

// Tokens outside lengths, starts or cu_seqlens do not change the state and have o = 0.
struct Outputs {
  TensorView o;           // the shape and dtype of the inputs
  TensorView final;       // the state after the last token, like initial; absent: not computed
  TensorView final_tail;  // the last W - 1 keys
};

// The state that a step updates in place, with the shape of the final state.
struct StepState {
  TensorView state;  // [B, D, N], like the initial one
  TensorView tail;   // for mechanisms with a tail
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;      // gradient of o, in its shape and dtype
  ConstTensorView d_final;  // gradient of the final state; zero if absent
  ConstTensorView d_final_tail;
};

// Only present tensors are computed, in the shapes and dtypes of their inputs; zero for excluded tokens.
struct Gradients {
  TensorView du, ddelta, dA, dB, dC, dD, dz, ddelta_bias;
  TensorView dx, dinput_gate, drecurrence_gate, da, dlog_decay, dkernel;
  TensorView dlog_dt, dlog_A_real, dA_imag;
  TensorView dq, dk, dv, dshift, dshift_D;
  TensorView dinitial, dinitial_tail;
};

struct Explanation {
  std::string kernel, target, why;
  double flops;             // of the recurrence
  double bytes;             // inputs read once, outputs written once
  int64_t workspace_bytes;  // reserved by the forward pass, for all threads
};

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_SCANNING_H_
