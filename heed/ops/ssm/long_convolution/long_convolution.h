// The long convolution: a causal convolution per channel, with a kernel that may be as long as the sequence.
//
//   o_t = sum_{s <= min(t, L - 1)} kernel_s u_{t-s} + D u_t
//
// with t counted within a sequence. Time-invariant state space models have this form: s4d_kernel computes the kernel of
// S4D.
//
// Source: Gu, Goel, Re, "Efficiently Modeling Long Sequences with Structured State Spaces",
// arXiv:2111.00396; Poli et al., "Hyena Hierarchy", arXiv:2302.10866.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::long_convolution {

template <class View>
struct Tensors {
  View u;       // [B, D, T]: inputs
  View kernel;  // [D, L]: taps of the convolution, by distance
  View D = {};  // [D]: factors of the inputs, added to o; absent: 0
};

using Structs = mechanism::Structs<Tensors, mechanism::NoStates>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using scanning::Explanation;
using scanning::Options;

// Computes o.
//
// Edges. Any of B, D, T and L may be 0: without taps only D u remains. A sequence shorter than the kernel uses only its
// first taps. A NaN or an infinity stays in its channel and sequence, but may reach earlier tokens: an FFT spreads it
// over its whole block.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. With FFTs the error of an element is
// at most 13 (log2 n + 4) e |kernel|_2 |u|_2, with e the unit roundoff, n the elements of a block, and the norm of u
// over two blocks: the magnitude of neighbouring elements bounds the error of an element, not its own. With direct sums
// the error is the sum of absolute values, times L + 2 roundings. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides;
// those of the beginning of a sequence do depend on its length and the kernel's.
//
// Cost. The method depends on the length of the sequence and the number of taps: direct sums, 2 L operations per token;
// or FFTs of blocks of n elements, n the least power of two >= L and >= 256, some 20 log2 n operations per token
// whatever the length of the sequence. Explain says which. Memory beyond the arguments: Workspace(). Tables of about 3
// n / 8 elements are kept until the process ends.
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if the kernel
// has more taps than there are tokens, if an output overlaps an input, or if lengths, starts or
// cu_seqlens are out of range. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does as a sum over taps in double, written for reading: single-threaded. Outputs may be f64
// whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o>, each of which is a convolution too:
//
//   du_t = sum_s kernel_s d_o_{t+s} + D d_o_t,  dkernel_s = sum_t d_o_t u_{t-s},  dD = sum_t d_o_t u_t
//
// Precision and reproducibility as above; spectra of up to 8 blocks are summed before the inverse FFT, sums over more
// are in f64. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, S the tokens
// of the longest sequence in whole blocks, n the elements of a block (at most 512 for direct sums), and W = 16 if
// channels are contiguous, else 1, at most
//
//   forward   threads (E (W (S + 3 n + 512) + 2 n + 512) + a few KiB)
//   backward  threads (E (W (2 S + 4 n + 1024) + 8 n + 2048) + 128 L + a few KiB)
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_
