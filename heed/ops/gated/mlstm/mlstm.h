// mLSTM, the matrix memory of xLSTM: exponential gates and a normaliser, stabilised by a running
// maximum.
//
//   m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)                            m_0 = 0
//   a_t = exp(log sigmoid(f_t) + m_{t-1} - m_t),  b_t = exp(i_t - m_t)
//   S_t = a_t S_{t-1} + b_t k_t v_t^T                                     S: [K, V]
//   z_t = a_t z_{t-1} + b_t k_t                                           z: [K]
//   o_t = scale S_t^T q_t / (max(|scale z_t . q_t|, exp(-m_t)) + eps)
//
// with i and f one number each per token and value head, unbounded, and scale = K^-1/2 by default. S and z are exp(-m)
// times their values without m, and except for eps o does not depend on m.
//
// Source: Beck, Poeppel, Spanring, Auer, Prudnikova, Kopp, Klambauer, Brandstetter, Hochreiter,
// "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517.
#ifndef HEED_OPS_GATED_MLSTM_MLSTM_H_
#define HEED_OPS_GATED_MLSTM_MLSTM_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::mlstm {

template <class View>
struct Tensors {
  View q;  // [B, T, H, K]: queries
  View k;  // [B, T, H, K]: keys
  View v;  // [B, T, HV, V]: values
  View i;  // [B, T, HV]: the input gate before its exponential
  View f;  // [B, T, HV]: the forget gate before its sigmoid
};

template <class View>
struct States {
  View S;  // [B, HV, K, V]: unscaled, relative to exp(m)
  View z;  // [B, HV, K]: the normaliser, relative to exp(m)
  View m;  // [B, HV]: the running maximum, which an initial S requires
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

// The default scale is K^-1/2.
struct Options : recurrent::Options {
  double eps = 1e-6;  // >= 0, added to the denominator
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A forget gate of -infinity clears the
// state, an input gate of -infinity writes nothing; a NaN propagates to all later tokens.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. No exponential that grows with a gate has a positive argument, so input gates of 1000 are accurate too.
// Within a chunk m is in f64, so that decays close to 1 are accurate. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call at a multiple of 64 tokens of a sequence gives bitwise equal results; other splits agree up to rounding.
//
// Cost. 4 K V flops per token and value head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens or eps are out of
// range; Unsupported for a dtype without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>, where m counts as a constant, since it cancels. As a free
// argument the initial m has the gradient <S, dS> + <z, dz>, which heed.torch returns. With d_t the denominator, n_t =
// scale z_t . q_t, e_t = d_o_t / d_t, and y_t = -sign(n_t) <e_t, o_t> where |n_t| > exp(-m_t), else 0:
//
//   D_t  = scale q_t e_t^T + a_{t+1} D_{t+1},  dz_t = scale y_t q_t + a_{t+1} dz_{t+1}
//   dq_t = scale (S_t e_t + y_t z_t),  dv_t = b_t D_t^T k_t,  dk_t = b_t (D_t v_t + dz_t)
//   di_t = <k_t, dk_t>
//   df_t = (1 - sigmoid(f_t)) (sum_{s >= t} (<q_s, dq_s> - <k_s, dk_s>) + <S_T, D_T> + <z_T, dz_T>)
//
// dq and dk are summed over the value heads of a key head. Precision and reproducibility
// as above. Cost: 12 K V flops per token and value head. States are stored at the boundaries of chunks of 64 tokens,
// and rows are read twice. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S, z and m in place. Only the options scale and eps have an effect.
// Memory-bound by S; allocates nothing after a thread's first step.
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
//   backward  threads E (ceil(T / 64) (K (V + 1) + 385) + 2 K (V + 1) + 64 (8 K + 3 V)) + a few KiB
//             + [HV > H] 2 E B T H K + 8 B T HV ceil(K / 32)
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::mlstm

#endif  // HEED_OPS_GATED_MLSTM_MLSTM_H_
