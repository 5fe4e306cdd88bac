// H3: linear attention with two state space models: a shift filter over keys and a diagonal one over products of keys
// and values.
//
//   k'_t = sum_{s < W} shift_s k_{t-s} + shift_D k_t                       per channel
//   S_t = a S_{t-1} + b k'_t v_t^T,  Y_t = 2 Re(sum_n C_n S_t,n) + D k'_t v_t^T,  o_t = q_t^T Y_t
//
// for heads of d channels: S [d, d, N] is complex, one matrix per mode n of its head, with
//
//   dt = exp(log_dt),  A = -exp(log_A_real) + i A_imag,  a = e^{dt A},  b = dt (e^{dt A} - 1) / (dt A)
//
// Each mode represents itself and its conjugate. Equivalently, as a convolution with K_l = 2 Re(<C, a^l b>):
//
//   o_t = sum_{s <= t} K_{t-s} (q_t . k'_s) v_s + D (q_t . k'_t) v_t
//
// With d = 1 all products are elementwise. The scale is 1.
//
// Source: Fu, Dao, Saab, Thomas, Rudra, Re, "Hungry Hungry Hippos: Towards Language Modeling with State
// Space Models", arXiv:2212.14052. Outputs have heads and channels in the order of the values; two code paths of the
// authors' implementation disagree on this order for d > 1.
#ifndef HEED_OPS_SSM_H3_H3_H_
#define HEED_OPS_SSM_H3_H3_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::h3 {

template <class View>
struct Tensors {
  View q;             // [B, T, H, d]: queries
  View k;             // [B, T, H, d]: keys
  View v;             // [B, T, H, d]: values
  View shift;         // [D, W]: taps of the filter over keys, by distance
  View log_dt;        // [H]: natural logarithms of time steps
  View log_A_real;    // [H, N]: natural logarithms of minus the real parts of rates
  View A_imag;        // [H, N]: the imaginary parts
  View C;             // [H, N, 2]: output projection of the state, real and imaginary parts
  View D = {};        // [H]: factors of k'_t v_t^T, added to Y; absent: 0
  View shift_D = {};  // [D]: added to shift[:, 0]; absent: 0
};

template <class View>
struct States {
  View tail;  // [B, W - 1, H, d]: the last keys, oldest first
  View S;     // [B, H, d, d, N, 2]: over channels of keys, then of values; real and imaginary parts
};

using Structs = mechanism::Structs<Tensors, States>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using StepInputs = Structs::StepInputs;
using State = Structs::State;
using Summary = Structs::Summary;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using scanning::Explanation;

enum class Method {
  kAuto,         // 'auto': the cheaper form for this number of modes
  kRecurrent,    // 'recurrent': the recurrence, token by token
  kConvolution,  // 'convolution': with K, except where S is given or requested, which needs the recurrence
};

struct Options : scanning::Options {
  Method method = Method::kAuto;
};

// Computes o and, if requested, the states after the last token.
//
// Edges. Any of B, H, d and T may be 0; without tokens the final states are the initial ones. A NaN stays in
// its head.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are f64 or f32. A row of
// products k'_i v_j is computed as a channel of s4d, and d rows are summed.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. A sequence
// split into calls agrees up to rounding.
//
// Cost. d times that of s4d per channel: some 8 N + 36 operations per token and pair of channels, compute-bound, and 2
// W per token and channel. Memory beyond the arguments: Workspace(); no tensor of size d^2 T is stored.
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does token by token in double, written for reading: scalar and single-threaded. Outputs may be
// f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With dY_t = q_t d_o_t^T and dX_t the gradient of X_t
// = k'_t v_t^T, which S4D's backward pass computes from dY row by row,
//
//   dq_t = Y_t d_o_t,  dk'_t = dX_t v_t,  dv_t = dX_t^T k'_t
//   dk_t = sum_s shift_s dk'_{t+s} + shift_D dk'_t,  dshift_s = sum_t dk'_t k_{t-s}
//
// and the gradients of the tail in the same way.
//
// Precision and reproducibility as above. The recurrence runs twice if dq is requested. Throws as
// Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates both states in place.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, M modes in
// whole 16, S the tokens of the longest sequence, P = S + 2 W + 192 and R channels at once, max(d, 16 + d) if they are
// contiguous, else d, at most, as a recurrence,
//
//   forward   threads (E (4 R P + R (W + 16)) + W' (E (S + 76 M + 96) + 64 M + 1024) + 40 E M + a few KiB)
//   backward  threads (E (8 R P + R (W + 16) + P) + 8 R (W + 1) +
//                      W' (E (2 S + 160 M + 192) + 192 M + 2048) + E M (S / 4 + 96) + a few KiB)
//
// with W' = R / d heads, and as a convolution additionally that of long_convolution.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::h3

#endif  // HEED_OPS_SSM_H3_H3_H_
