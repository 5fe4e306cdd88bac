// The long convolution: what a token takes from another depends on how long ago that was, in each
// channel by a kernel of its own, which may be as long as the sequence.
//
//   o_t = sum_{s <= min(t, L - 1)} kernel_s u_{t-s} + D u_t
//
// with t counted within a sequence. What state spaces that do not depend on their input compute is of
// this form: s4d_kernel makes its kernel.
//
// Source: Gu, Goel, Re, "Efficiently Modeling Long Sequences with Structured State Spaces",
// arXiv:2111.00396; Poli et al., "Hyena Hierarchy", arXiv:2302.10866.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::long_convolution {

// It takes u, kernel and D, which may be absent. There is no state.
using scanning::BackwardInputs;
using scanning::Explanation;
using scanning::Gradients;
using scanning::Inputs;
using scanning::Options;
using scanning::Outputs;

// Computes o.
//
// Edges. Any of B, D, T and L may be 0: without taps only D u is left. A sequence that is shorter than
// the kernel meets fewer taps. A NaN or an infinity stays in its channel and sequence, but not in the
// tokens after it: a transform spreads it over all of its block.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once. By transforms an
// element is off by at most 13 (log2 n + 4) u |kernel|_2 |u|_2, with u the unit roundoff, n the elements
// of a block, and the norm of u that of two blocks: it is the size of its neighbours, not its
// own, that bounds the error of an element. Tap by tap it is the sum of absolute values, times L + 2
// roundings. Subnormal results are flushed.
//
// Reproducibility. The bits depend neither on threads, batch neighbours, padding nor strides;
// those of a sequence's beginning do depend on how long it and the kernel are.
//
// Cost. Of a sequence the kernel chooses by its length and the taps: tap by tap, 2 L operations per
// token; or transforms of blocks of n elements, the least power of two that has all taps, at least 256,
// some 20 log2 n operations per token however long the sequence. Explain says which.
// Memory beyond the arguments: Workspace(). Tables of about 3 n / 8 elements are kept until the
// process ends.
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if the kernel
// has more taps than there are tokens, if an output overlaps an input, if lengths, starts or cu_seqlens
// are out of range, or if a state is given or asked for. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: a sum over taps, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o>, each of which is a convolution too:
//
//   du_t = sum_s kernel_s d_o_{t+s} + D d_o_t,  dkernel_s = sum_t d_o_t u_{t-s},  dD = sum_t d_o_t u_t
//
// Precision and reproducibility as above; spectra of up to 8 blocks add up before they are
// transformed back, sums over more are in f64. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64, S the tokens
// of the longest sequence in whole blocks, n the elements of a block (of no more than 512 tap
// by tap), and W = 16 where channels are contiguous and else 1, at most
//
//   forward   threads (E (W (S + 3 n + 512) + 2 n + 512) + a few KiB)
//   backward  threads (E (W (2 S + 4 n + 1024) + 8 n + 2048) + 128 L + a few KiB)
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_H_
