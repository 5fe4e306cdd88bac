// Efficient attention: two softmaxes instead of one over all pairs, so that keys and values are summed in a matrix of
// fixed size.
//
//   k~_s = exp(k_s) / sum_s exp(k_s)            per channel, over all valid tokens
//   S    = sum_s k~_s v_s^T                     S: [K, V]
//   o_t  = scale S^T softmax(q_t)               over channels
//
// Every token sees all others: a causal form, a state and a step are not defined. scale is
// K^-1/2 by default.
//
// Source: Shen, Zhang, Zhao, Yi, Li, "Efficient Attention: Attention with Linear
// Complexities", arXiv:1812.01243; the scale follows the package linear_attention_transformer. Derivation of the
// gradients: README.md.
#ifndef HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_
#define HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::efficient_attention {

template <class View>
struct Tensors {
  View q;             // [B, T, H, K]: queries
  View k;             // [B, T, H, K]: keys
  View v;             // [B, T, HV, V]: values
  View kv_mask = {};  // [B, T] bool: keys and values where it is false are masked; absent: none. It has no gradient
};

using Structs = mechanism::Structs<Tensors, mechanism::NoStates>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using recurrent::Explanation;

// `reverse` stays false, since there is no direction.
using recurrent::Options;

// Computes o.
//
// Edges. Without a valid key, o is 0. A NaN in a key propagates to its head, a NaN in a value to one channel of all
// outputs; masked keys and values may be NaN.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. No
// exponential has a positive argument. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
//
// Cost. 4 K V flops and 3 K exponentials per token and value head. Memory beyond the
// arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if o overlaps an input, or if lengths, starts or cu_seqlens are out of range;
// Unsupported for a dtype without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. o may be f64 whatever the
// dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of <d_o, o>. With q~ = scale softmax(q), D = sum_t q~_t d_o_t^T and
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

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V rounded up to whole vectors, and at least 8 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (K V + 64 (2 K + 2 V)) + a few KiB
//   backward  threads E (ceil(T / 64) K V + 2 K (V + 1) + 64 (5 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::efficient_attention

#endif  // HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_H_
