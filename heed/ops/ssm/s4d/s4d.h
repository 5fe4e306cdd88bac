// S4D: a time-invariant state space model of N complex modes per channel.
//
//   h_t = a .* h_{t-1} + b u_t,  o_t = 2 Re(<C, h_t>) + D u_t        h: [N], complex
//
// where a and b come from rates A = -exp(log_A_real) + i A_imag, with real part below 0, and a time
// step dt = exp(log_dt), z = dt A:
//
//   zero-order hold   a = e^z,                    b = dt (e^z - 1) / z
//   bilinear          a = (1 + z/2) / (1 - z/2),  b = dt / (1 - z/2)
//
// Each mode represents itself and its conjugate, hence twice the real part. Equivalently it is a long convolution with
// the kernel K_l = 2 Re(<C, a^l .* b>).
//
// Source: Gu, Goel, Gupta, Re, "On the Parameterization and Initialization of Diagonal State Space
// Models", arXiv:2206.11893.
#ifndef HEED_OPS_SSM_S4D_S4D_H_
#define HEED_OPS_SSM_S4D_S4D_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::s4d {

template <class View>
struct Tensors {
  View u;           // [B, D, T]: inputs
  View log_dt;      // [D]: natural logarithms of time steps
  View log_A_real;  // [D, N]: natural logarithms of minus the real parts of rates
  View A_imag;      // [D, N]: the imaginary parts
  View C;           // [D, N, 2]: output projection of the state, real and imaginary parts
  View D = {};      // [D]: factors of the inputs, added to o; absent: 0
};

template <class View>
struct States {
  View S;  // [B, D, N, 2]: h after the last token, real and imaginary parts
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
  kConvolution,  // 'convolution': with K, except where there is a state, which needs the recurrence
};

enum class Discretization {
  kZeroOrderHold,  // 'zoh': zero-order hold
  kBilinear,       // 'bilinear': the bilinear transform
};

struct Options : scanning::Options {
  Method method = Method::kAuto;
  Discretization discretization = Discretization::kZeroOrderHold;
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any of B, D and T may be 0; without tokens the final state is the initial one. A NaN stays in
// its channel.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are f64 or f32. a and b and
// their powers are computed in f64 and rounded once; a chunk of 16 tokens adds one rounding. The error bound of the
// convolution is that of long_convolution. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. A sequence
// split into calls agrees up to rounding.
//
// Cost. The recurrence takes some 8 N + 32 operations per token and channel, compute-bound, and tables of 16 powers
// once per channel; the convolution costs as much as long_convolution, plus K. Memory beyond the arguments:
// Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does token by token in double, written for reading: scalar and single-threaded. Outputs may be
// f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With l the gradient of h, including that of the final
// state, such that dh changes the sum by Re(l dh):
//
//   l_t = 2 C d_o_t + a .* l_{t+1},  du_t = Re(<b, l_t>) + D d_o_t
//   da = sum l_t h_{t-1},  db = sum l_t u_t,  dC = conj(2 sum d_o_t h_t)
//
// and from da and db those of log_dt, log_A_real and A_imag.
//
// Precision and reproducibility as above. States are stored every 16 tokens; sums are in f32 over 128 tokens and in f64
// over more. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates the state in place.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Computes the kernel of the convolution: [D, L] for any L, with K_l at l. Reads log_dt, log_A_real, A_imag and C.
HEED_API void Kernel(Context& ctx, const Inputs& in, const Options& options, const TensorView& kernel);

// Computes the gradients of sum <dkernel, K>: those of log_dt, log_A_real, A_imag and C.
HEED_API void KernelBackward(Context& ctx, const Inputs& in, const ConstTensorView& dkernel, const Options& options,
                             const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, M modes in
// whole 16, S the tokens of the longest sequence, W = 16 if channels are contiguous, else 1, at most, as a recurrence,
//
//   forward   threads (W (E (S + 76 M + 96) + 64 M + 1024) + 40 E M + a few KiB)
//   backward  threads (W (E (2 S + 160 M + 192) + 192 M + 2048) + E M (S / 4 + 96) + a few KiB)
//
// and as a convolution additionally that of long_convolution, with W = 1.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::s4d

#endif  // HEED_OPS_SSM_S4D_S4D_H_
