// Gated linear attention: a matrix of memory that forgets channel by channel.
//
//   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with g = log_decay <= 0, one per token, value head and key channel, and scale =
// K^-1/2 by default. Columns may decay too, by h = log_decay_v <= 0, one per token, value
// head and value channel:
//
//   S_t = diag(exp(g_t)) S_{t-1} diag(exp(h_t)) + k_t v_t^T
//
// Source: Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with
// Hardware-Efficient Training", arXiv:2312.06635. Derivation of the gradients: README.md.
#ifndef HEED_OPS_GATED_GLA_GLA_H_
#define HEED_OPS_GATED_GLA_GLA_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::gla {

// log_decay is [B, T, HV, K], log_decay_v [B, T, HV, V] or absent; states have S alone.
using recurrent::BackwardInputs;
using recurrent::Explanation;
using recurrent::Gradients;
using recurrent::Inputs;
using recurrent::Options;
using recurrent::Outputs;
using recurrent::State;
using recurrent::StepInputs;

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Any number of tokens may be 0: the state then passes through. A log decay of
// -infinity forgets everything; a positive one counts as 0, unless the Context checks;
// a NaN spreads to what follows it.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once; states are
// f64 or f32. No exponential has a positive argument. Subnormal results are flushed.
//
// Reproducibility. The bits do not depend on threads, batch neighbours, padding or
// strides. A call split at a multiple of 64 tokens of a sequence has the bits of the
// whole; split elsewhere, it agrees to rounding.
//
// Cost. 4 K V flops per token and value head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype that has no kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>. With D_t = dS_t:
//
//   D_t  = scale q_t d_o_t^T + diag(exp(g_{t+1})) D_{t+1}
//   dq_t = scale S_t d_o_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t
//   dg_t = sum_{s >= t} (q_s .* dq_s - k_s .* dk_s) + rowsum(S_T .* D_T)
//   dh_t = sum_{s >= t} (o_s .* d_o_s - v_s .* dv_s) + colsum(S_T .* D_T)
//
// dq and dk are summed over the value heads of a key head. Precision and reproducibility
// as above. Cost: 12 K V flops per token and value head, 16 for dh. States are kept at the borders
// of blocks of 64 tokens, rows are read twice. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, S read and updated in place; of the options, scale alone. Bound
// by the memory of S; allocates nothing from a thread's second step on.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64,
// and K, V rounded up to whole vectors, at most
//
//   forward   threads E (K V + 64 (4 K + 2 V)) + a few KiB
//   backward  threads E (ceil(T / 64) (K V + 64 K + 256) + 2 K V + 64 (7 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K
//
// and where columns decay threads E 64 (2 V + V / 4) more forward, and backward threads E
// (T V + K V + 64 (3 V + V / 4)).
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::gla

#endif  // HEED_OPS_GATED_GLA_GLA_H_
