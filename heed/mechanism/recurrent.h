// Arguments, options and states of recurrent mechanisms.
//
// Sizes: B sequences, T tokens, H key heads, HV value heads (a multiple of H; head h reads
// key head h / (HV / H)), K and V key and value channels, all but B, T and H >= 1.
//
// The header of each mechanism lists the tensors that it takes.
//
// Tensors may be on a GPU, all on the same one, if the call has a GPU kernel (docs/cpp.md), except those that the call
// itself reads: decays without axes of sequences and tokens, lengths, starts and cu_seqlens. Values on a GPU are not
// checked.
#ifndef HEED_MECHANISM_RECURRENT_H_
#define HEED_MECHANISM_RECURRENT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "heed/core/tensor.h"

namespace heed::recurrent {

// The state between two calls, one per sequence: f64 for f64, else f32, any strides. Tensors that a mechanism does not
// have are absent. An absent input state is zeros (-infinity for m of random features), and an absent output state is
// not computed.
struct ConstState {
  ConstTensorView S;       // [B, HV, K, V]; unscaled, with all decays up to the last token
  ConstTensorView z;       // [B, HV, K], the normaliser
  ConstTensorView m = {};  // [B, HV], the running maximum that S and z are relative to
};

// An output state.
struct State {
  TensorView S;
  TensorView z;
  TensorView m = {};
};

// One float dtype for queries, keys and values, the last axis contiguous, any other strides. Factors and decays may
// also be f32 or f64.
struct Inputs {
  ConstTensorView q;                // [B, T, H, K]: queries
  ConstTensorView k;                // [B, T, H, K]: keys
  ConstTensorView v;                // [B, T, HV, V]: values
  ConstTensorView log_decay;        // natural logarithms of decay factors, <= 0
  ConstTensorView projection = {};  // [M, K]: rows of random features, in q's dtype
  ConstState initial;
  ConstTensorView u = {};            // [HV, K]: the bonus of the current token, any float dtype
  ConstTensorView log_decay_v = {};  // [B, T, HV, V]: log_decay of value channels; may be absent
  ConstTensorView beta = {};         // [B, T, HV]: step size of the delta rule
  ConstTensorView p = {};            // [B, T, H, K]: the key that reads the state, like k
  ConstTensorView erase = {};        // [B, T, HV, K]: factors of the key that erases
  ConstTensorView write = {};        // [B, T, HV, V]: factors of the values that are written
  ConstTensorView a = {};            // [B, T, H, K]: the key that reads the state, like k
  ConstTensorView b = {};            // [B, T, H, K]: the key that the read value is written to, like k
  ConstTensorView i = {};            // [B, T, HV]: the input gate before its exponential
  ConstTensorView f = {};            // [B, T, HV]: the forget gate before its sigmoid
};

struct Options {
  std::optional<double> scale;      // factor of q; the default is the mechanism's
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states have N instead of B
  bool reverse = false;             // from the last token to the first; the final state is after the first
};

// Tokens outside lengths, starts or cu_seqlens have o = 0.
struct Outputs {
  TensorView o;  // [B, T, HV, V] in q's dtype
  State final;
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // gradient of o, in its shape and dtype
  ConstState d_final;   // gradient of the final state; zero if absent
};

// Only present tensors are computed, in the shapes and dtypes of their inputs; zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dlog_decay, dprojection;
  State dinitial;  // without m, which counts as a constant
  TensorView du = {}, dlog_decay_v = {};
  TensorView dbeta = {}, dp = {}, derase = {}, dwrite = {}, da = {}, db = {}, di = {}, df = {};
};

// One token of each sequence: [B, H, K], [B, HV, V], and decays [B, HV] or [B, HV, K], or constants. All states are
// present, S with contiguous rows, and o is [B, HV, V].
struct StepInputs {
  ConstTensorView q, k, v, log_decay;
  ConstTensorView projection = {};   // [M, K]
  ConstTensorView u = {};            // [HV, K]
  ConstTensorView log_decay_v = {};  // [B, HV, V]
  // The tensors of Inputs, without the axis of tokens.
  ConstTensorView beta = {}, p = {}, erase = {}, write = {}, a = {}, b = {}, i = {}, f = {};
};

struct Explanation {
  std::string kernel, target, why;
  double flops;             // 4 K V per token and value head, plus features
  double bytes;             // inputs read once, outputs written once
  int64_t workspace_bytes;  // reserved by the forward pass, for all threads
};

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_RECURRENT_H_
