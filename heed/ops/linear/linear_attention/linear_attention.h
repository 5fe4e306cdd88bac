// Linear attention: softmax replaced by an inner product of features, so that the past is summed in a matrix of fixed
// size.
//
//   S_t = sum_{s <= t} phi(k_s) v_s^T,  z_t = sum_{s <= t} phi(k_s)      S: [F, V], z: [F]
//   o_t = scale S_t^T phi(q_t), or normalised, / (scale z_t . phi(q_t) + eps)
//
// Without causality the sums are over all tokens, for every t.
//
// Source: Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs",
// arXiv:2006.16236. Derivation of the gradients: README.md.
#ifndef HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_H_
#define HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::linear_attention {

template <class View>
struct Tensors {
  View q;  // [B, T, H, K]: queries
  View k;  // [B, T, H, K]: keys
  View v;  // [B, T, HV, V]: values
};

// Only the causal form has states.
template <class View>
struct States {
  View S;       // [B, HV, K, V]: the sum of features of keys times values
  View z = {};  // [B, HV, K]: the sum of features of keys, if outputs are normalised
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

enum class FeatureMap {
  kElu1,         // x + 1 if x > 0, else exp(x)
  kRelu,         // max(x, 0)
  kReluSquared,  // 'relu_sq': max(x, 0)^2
  kExp,          // exp(min(x, 80))
  kIdentity,     // denominators can vanish: use without normalize
  kSoftmax,      // over the channels
};

// The default scale is 1.
struct Options : recurrent::Options {
  FeatureMap feature_map = FeatureMap::kElu1;  // phi:
  bool causal = true;                          // a token sees no later token
  bool normalize = true;                       // outputs are divided by z . phi(q)
  double eps = 1e-6;                           // >= 0, added to the denominator
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A NaN propagates to all later tokens;
// without causality, to its whole sequence.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides, nor, in the
// causal form, on the split of a sequence into calls.
//
// Cost. 4 K V flops per token and value head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens or eps are
// out of range; Unsupported for a dtype without a kernel. On throw, nothing has been
// written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With d_t the denominator,
// or 1, e_t = d_o_t / d_t and f_t = -<e_t, o_t>, or 0, and phi' the derivative of phi:
//
//   D_t  = scale sum_{s >= t} phi(q_s) e_s^T,  y_t = scale sum_{s >= t} f_s phi(q_s)
//   dq_t = scale phi'(q_t)^T (S_t e_t + f_t z_t)
//   dk_t = phi'(k_t)^T (D_t v_t + y_t),  dv_t = D_t^T phi(k_t)
//
// dq and dk are summed over the value heads of a key head. Precision and reproducibility
// as above. Cost: 12 K V flops per token and value head, 10 without causality. Throws
// as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S and z in place. Only the options in the equations above have an effect.
// Memory-bound by S; allocates nothing after a thread's first step. Also throws InvalidArgument if not causal.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V rounded up to whole vectors, and at least 8 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (K V + 64 (2 K + 2 V)) + a few KiB
//   backward  threads E (ceil(T / 64) (K + 128) + 3 K (V + 1) + 64 (6 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K
//
// For bf16 on AMX (recurrence_tiles), with K and V rounded up to 32, forward takes
// threads (4 K V + 576 K + 128 V + 62 KiB), and backward additionally threads 4 ceil(T / 64) K V.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::linear_attention

#endif  // HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_H_
