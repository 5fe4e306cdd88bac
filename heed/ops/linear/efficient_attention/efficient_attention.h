// Efficient attention: two softmaxes instead of one over all pairs, so that keys and values
// meet in a matrix of fixed size.
//
//   k~_s = exp(k_s) / sum_s exp(k_s)            per channel, over the tokens that count
//   S    = sum_s k~_s v_s^T                     S: [K, V]
//   o_t  = scale S^T softmax(q_t)               over channels
//
// Every token sees all others: there is no causal form, no state and no step. scale is
// K^-1/2 by default.
//
// Source: Shen, Zhang, Zhao, Yi, Li, "Efficient Attention: Attention with Linear
// Complexities", arXiv:1812.01243; the scale is that of the package
// linear_attention_transformer. Derivation of the gradients: README.md.
#ifndef HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_
#define HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::efficient_attention {

// log_decay and states are absent.
using recurrent::BackwardInputs;
using recurrent::Explanation;
using recurrent::Gradients;
using recurrent::Inputs;
using recurrent::Outputs;

// `reverse` stays false, as there is no direction.
struct Options : recurrent::Options {
  ConstTensorView kv_mask;  // [B, T] bool: keys and values of false are left out
};

// Computes o.
//
// Edges. Where no key counts, o is 0. A NaN in a key spreads to its head, one in a value to
// a channel of all outputs; what kv_mask leaves out may hold anything.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once. No
// exponential has a positive argument. Subnormal results are flushed.
//
// Reproducibility. The bits do not depend on threads, batch neighbours, padding or strides.
//
// Cost. 4 K V flops and 3 K exponentials per token and value head. Memory beyond the
// arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if o overlaps an input, or if lengths, starts or cu_seqlens are out of range;
// Unsupported for a dtype that has no kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. o may be f64
// whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of <d_o, o>. With q~ = scale softmax(q), D = sum_t q~_t d_o_t^T and
// c = sum_s k~_s .* (D v_s) = rowsum(S .* D):
//
//   dq_t = q~_t .* (S d_o_t - <softmax(q_t), S d_o_t>)
//   dk_s = k~_s .* (D v_s - c),  dv_s = D^T k~_s
//
// dq and dk are summed over the value heads of a key head; dk and dv are 0 where kv_mask is
// false. Precision and reproducibility as above. Cost: 10 K V flops per token and value
// head. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64,
// and K, V rounded up to whole vectors, at most
//
//   forward   threads E (K V + 64 (2 K + 2 V)) + a few KiB
//   backward  threads E (ceil(T / 64) K V + 2 K (V + 1) + 64 (5 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::efficient_attention

#endif  // HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_
