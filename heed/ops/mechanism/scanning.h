// What calls of mechanisms on the scan engine have in common: arguments, options and states.
//
// Sizes: B sequences, T tokens, D channels, N states per channel, G groups of channels, which
// divide D; N and G are at least 1. L taps, at most T. H heads of d channels, D = H d; W taps, at least
// 1, of their keys.
//
// The header of each mechanism says which of the tensors below it takes.
#ifndef HEED_OPS_MECHANISM_SCANNING_H_
#define HEED_OPS_MECHANISM_SCANNING_H_

#include <cstdint>
#include <string>

#include "heed/core/tensor.h"

namespace heed::scanning {

// One token of each sequence: the tensors below without their axis T.
struct StepInputs {
  ConstTensorView u;                // [B, D, T]: inputs
  ConstTensorView delta;            // [B, D, T]: time steps, before delta_bias and delta_softplus
  ConstTensorView A;                // [D, N]: rates at which states decay, < 0
  ConstTensorView B;                // [B, G, N, T], [B, N, T] or [D, N]: what inputs are written by
  ConstTensorView C;                // [B, G, N, T], [B, N, T] or [D, N]: what states are read by
  ConstTensorView D;                // [D], or [H]: the share of the inputs in o; absent: none
  ConstTensorView z;                // [B, D, T]: silu(z) multiplies o; absent: nothing does
  ConstTensorView delta_bias;       // [D]: added to delta; absent: nothing is
  ConstTensorView x;                // [B, T, D]: inputs
  ConstTensorView input_gate;       // [B, T, D]: the gate of inputs before its sigmoid
  ConstTensorView recurrence_gate;  // [B, T, D]: the gate of decays before its sigmoid
  ConstTensorView a;                // [D]: the slowest decays: exp(-c softplus(a))
  ConstTensorView log_decay;        // [B, T, D]: natural logarithms of decay factors, <= 0
  ConstTensorView log_dt;           // [D], or [H]: natural logarithms of time steps
  ConstTensorView log_A_real;       // [D, N], or [H, N]: natural logarithms of minus the real parts of rates
  ConstTensorView A_imag;           // [D, N], or [H, N]: the imaginary parts
  ConstTensorView kernel;           // [D, L]: what inputs are weighted with, by how long ago they were
  ConstTensorView q;                // [B, T, H, d]: queries
  ConstTensorView k;                // [B, T, H, d]: keys
  ConstTensorView v;                // [B, T, H, d]: values
  ConstTensorView shift;            // [D, W]: what keys are weighted with, by how long ago they were
  ConstTensorView shift_D;          // [D]: added to shift[:, 0]; absent: nothing is
};

// Any strides; quick where tokens or channels are contiguous, else refused by a strict Context. Tensors
// over tokens have the dtype of the first or that of states, which is f64 beside f64 and else f32;
// constants have any float dtype.
struct Inputs : StepInputs {
  ConstTensorView initial;       // [B, D, N], or [B, D] where there is one state: before the first
                                 // token; f32 (f64 beside f64); absent: zeros
  ConstTensorView initial_tail;  // [B, W - 1, H, d]: keys before the first, the oldest first; likewise
};

struct Options {
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N sequences one after another, B = 1; states
                                    // have N in the place of B, each sequence has its own
  bool reverse = false;             // from the last token to the first; the final state is after the first
};

// Tokens outside of lengths, starts or cu_seqlens leave the state alone and have o = 0.
struct Outputs {
  TensorView o;           // the shape and dtype of the inputs
  TensorView final;       // the state after the last token, as initial; absent: not asked for
  TensorView final_tail;  // the last W - 1 keys
};

// What a step updates in place: as the final state of a call of one token.
struct StepState {
  TensorView state;  // [B, D, N], as the initial one
  TensorView tail;   // of what has one
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;      // the shape and dtype of o
  ConstTensorView d_final;  // of the final state; absent: zero
  ConstTensorView d_final_tail;
};

// Those that are present are computed, in the shapes and dtypes of what they are the
// gradients of; zero for tokens that do not count.
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
  int64_t workspace_bytes;  // that the forward pass reserves, for all threads
};

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_H_
