// Lightning attention: a matrix-valued state with a constant decay.
//
//   S_t = exp(g) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with g = log_decay <= 0, one per value head (for the values of models, see README.md), and scale = K^-1/2 by default.
//
// Source: Qin, Sun, Li, Shen, Sun, Zhong, "Lightning Attention-2", arXiv:2401.04658.
// Derivation of the gradients: README.md of gla.
#ifndef HEED_OPS_GATED_LIGHTNING_LIGHTNING_H_
#define HEED_OPS_GATED_LIGHTNING_LIGHTNING_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::lightning {

template <class View>
struct Tensors {
  View q;          // [B, T, H, K]: queries
  View k;          // [B, T, H, K]: keys
  View v;          // [B, T, HV, V]: values
  View log_decay;  // [HV]: natural logarithms of decay factors, <= 0, any float dtype
};

template <class View>
struct States {
  View S;  // [B, HV, K, V]: unscaled, with all decays up to the last token
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

// Computes o and, if requested, the state after the last token.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A log decay of -infinity clears the
// state that it multiplies; a positive one counts as 0, unless the Context checks; a NaN propagates to all later
// tokens.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. No exponential has a positive argument. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call at a multiple of 64 tokens of a sequence gives bitwise equal results; other splits agree up to rounding.
//
// Cost. 4 K V flops per token and value head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With D_t = dS_t:
//
//   D_t  = scale q_t d_o_t^T + exp(g) D_{t+1}
//   dq_t = scale S_t d_o_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t
//   dg   = sum over batch and t of sum_{s >= t} (<q_s, dq_s> - <k_s, dk_s>) + <S_T, D_T>
//
// dq and dk are summed over the value heads of a key head. Precision and reproducibility
// as above. Cost: 12 K V flops per token and value head. States are stored at the boundaries of chunks of 64 tokens,
// and rows are read twice. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S in place. Only the option scale has an effect. Memory-bound by S;
// allocates nothing after a thread's first step.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V rounded up to whole vectors, and at least 8 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (K V + 64 (3 K + 2 V)) + a few KiB
//   backward  threads E (ceil(T / 64) (K V + 256) + 2 K V + 64 (7 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K + 8 B T HV ceil(K / 32)
//
// For bf16 on AMX (recurrence_tiles), with K and V rounded up to 32, forward takes
// threads (4 K V + 576 K + 128 V + 62 KiB), and backward that in addition.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::lightning

#endif  // HEED_OPS_GATED_LIGHTNING_LIGHTNING_H_
