// What calls of recurrent mechanisms have in common: arguments, options and states.
//
// Sizes: B sequences, T tokens, H key heads, HV value heads (a multiple of H; head h reads
// key head h / (HV / H)), K and V key and value channels, all but B, T and H >= 1.
//
// The header of each mechanism says which of the tensors below it takes.
//
// Tensors may be on a GPU, all on the same one, where a kernel for GPUs takes the call (docs/cpp.md), but for those
// that the call itself reads: decays without axes of sequences and tokens, lengths, starts and cu_seqlens. Values are
// not checked there.
#ifndef HEED_OPS_MECHANISM_RECURRENT_H_
#define HEED_OPS_MECHANISM_RECURRENT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "heed/core/tensor.h"

namespace heed::recurrent {

// The memory between two calls, one per sequence: f64 for f64, else f32, any strides.
// What a mechanism does not have, or an absent one, is left out; absent is zeros on the
// way in (m of random features: -infinity), and not asked for on the way out.
struct ConstState {
  ConstTensorView S;       // [B, HV, K, V]; not scaled, not decayed beyond the last token
  ConstTensorView z;       // [B, HV, K], the normaliser
  ConstTensorView m = {};  // [B, HV], the running maximum that S and z are relative to
};

// A state that is written.
struct State {
  TensorView S;
  TensorView z;
  TensorView m = {};
};

// One float dtype for queries, keys and values, the last axis contiguous, other strides as they
// are. Factors and decays may be f32 too, or f64.
struct Inputs {
  ConstTensorView q;                // [B, T, H, K]: queries
  ConstTensorView k;                // [B, T, H, K]: keys
  ConstTensorView v;                // [B, T, HV, V]: values
  ConstTensorView log_decay;        // natural logarithms of decay factors, <= 0
  ConstTensorView projection = {};  // [M, K]: rows of random features, in q's dtype
  ConstState initial;
  ConstTensorView u = {};            // [HV, K]: the bonus of the present token, any float dtype
  ConstTensorView log_decay_v = {};  // [B, T, HV, V]: log_decay of value channels; may be absent
  ConstTensorView beta = {};         // [B, T, HV]: the share of its error that a key corrects
  ConstTensorView p = {};            // [B, T, H, K]: the key that reads what is corrected, like k
  ConstTensorView erase = {};        // [B, T, HV, K]: factors of what is taken away
  ConstTensorView write = {};        // [B, T, HV, V]: factors of what is written
  ConstTensorView a = {};            // [B, T, H, K]: the key that reads, like k
  ConstTensorView b = {};            // [B, T, H, K]: the key that what was read goes to, like k
  ConstTensorView i = {};            // [B, T, HV]: the input gate before its exponential
  ConstTensorView f = {};            // [B, T, HV]: the forget gate before its sigmoid
};

struct Options {
  std::optional<double> scale;      // factor of q; the default is the mechanism's
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N sequences one after another, B = 1; states
                                    // have N in the place of B
  bool reverse = false;             // from the last token to the first; the final state is after the first
};

// Tokens outside of lengths, starts or cu_seqlens have o = 0.
struct Outputs {
  TensorView o;  // [B, T, HV, V] in q's dtype
  State final;
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // the shape and dtype of o
  ConstState d_final;   // absent: zero
};

// Those that are present are computed, in the shapes and dtypes of what they are the
// gradients of; zero for tokens that do not count.
struct Gradients {
  TensorView dq, dk, dv, dlog_decay, dprojection;
  State dinitial;  // none of m, which counts as a constant
  TensorView du = {}, dlog_decay_v = {};
  TensorView dbeta = {}, dp = {}, derase = {}, dwrite = {}, da = {}, db = {}, di = {}, df = {};
};

// One token of each sequence: [B, H, K], [B, HV, V], and decays [B, HV] or [B, HV, K], or
// constants. The states are all there, S with contiguous rows, and o is [B, HV, V].
struct StepInputs {
  ConstTensorView q, k, v, log_decay;
  ConstTensorView projection = {};   // [M, K]
  ConstTensorView u = {};            // [HV, K]
  ConstTensorView log_decay_v = {};  // [B, HV, V]
  // As those above, without the axis of tokens.
  ConstTensorView beta = {}, p = {}, erase = {}, write = {}, a = {}, b = {}, i = {}, f = {};
};

struct Explanation {
  std::string kernel, target, why;
  double flops;             // 4 K V per token and value head, and features
  double bytes;             // inputs read once, outputs written once
  int64_t workspace_bytes;  // that the forward pass reserves, for all threads
};

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_H_
