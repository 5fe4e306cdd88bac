// Shared by the files of attention: checking the arguments, once for all passes.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// The arguments that an entry point requires.
enum class Use {
  kForward,    // all tensors present, dtypes as documented
  kReference,  // outputs may also be f64
  kExplain,    // no outputs; data pointers may be null
  kInputs,     // no outputs
};

// Checks every argument and returns the problem; the pattern is not placed in it. Tensors are on `device`, except log
// decays and tensors with an element per sequence or token, which are read here, and so are numbers per head that are
// not on the device. Throws InvalidArgument; writes nothing.
softmax::Problem CheckedProblem(const char* op, const Inputs& in, const Options& options, const Outputs& out, Use use,
                                Device device = {});

// The sizes of keys and values that are in pages. Keys have the channels of q.
struct KeySizes {
  int64_t tokens;  // of the longest sequence; of all together if they are packed
  int64_t heads;
  int64_t channels;  // of values, at least 1
};

// Does the same for keys and values that are no tensors: checks q, the options and the outputs. The caller points the
// problem to its keys and values.
softmax::Problem CheckedQueries(const char* op, const ConstTensorView& q, const KeySizes& keys, const Options& options,
                                const Outputs& out, Use use, Device device = {});

// A backward pass, and the accumulators that its results are rounded from.
struct BackwardProblem {
  softmax::Problem problem;
  softmax::Gradients gradients;
  std::vector<double> dsinks, dalibi, drelative_bias;
};

// Checks the arguments of the forward call, then all others. kForward reads o and lse, kReference does not; kExplain
// reads no data. Throws InvalidArgument; writes nothing.
BackwardProblem CheckedBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out,
                                Use use);

// Fills rows of packed outputs that belong to no sequence: o = 0, lse = -inf, gradients 0.
void FillSurplusRows(const softmax::Problem& problem, const ConstTensorView& q, const Outputs& out);
void ClearSurplusRows(const softmax::Problem& problem, const Gradients& out);

// Throws InvalidArgument unless the pattern fits.
void CheckPattern(const char* op, const Pattern& pattern, softmax::Problem* problem);

// Lists the pairs that the pattern keeps, over all keys of a sequence or, with `to_lengths`, the valid ones. Throws
// InvalidArgument if it does not fit.
void PlacePattern(const char* op, const Pattern& pattern, bool to_lengths, softmax::Problem* problem);

// Lists the rows that keep each tile instead, if the pattern lists blocks per row and that is faster.
void PlaceTileRows(const char* op, const Pattern& pattern, softmax::Problem* problem);

// A call computes a pattern's pairs in one or more layers, which are disjoint sets of pairs.
struct Layer {
  enum Kind {
    kTiles,     // tiles of consecutive keys that hold a kept pair
    kWindow,    // p - left <= j <= p + right
    kResidues,  // j = p + step c, shift - left <= c <= shift + right
    kRows,      // keys listed for each row
    kTileRows,  // blocks listed for each row; rows that keep a tile are computed together
  } kind;
  int64_t step = 1, shift = 0, left = 0, right = 0;
};

// Returns the layers of a call, at least one, from its options only: attention_subproblems.cc.
std::vector<Layer> LayersOf(const softmax::Problem& whole, const Options& options);

// A problem for the engine.
struct Subproblem {
  softmax::Problem problem;
  softmax::Gradients gradients;
};

// Returns problems, one or one per key head, in which each row of the whole problem is a sequence of its own, with the
// keys that the pattern lists for it. The pattern must outlive them.
std::vector<Subproblem> ProblemsOfRows(softmax::Problem whole, const Pattern& pattern,
                                       const softmax::Gradients& gradients = {});

// Returns the problems of a layer. Together they write all rows and gradients of the whole problem.
std::vector<Subproblem> SubproblemsOf(const char* op, softmax::Problem whole, const Options& options,
                                      const Layer& layer, const softmax::Gradients& gradients = {});

// Runs a problem layer by layer, and places its pattern if a layer needs lists of tiles: attention_layers.cc.
void Run(const char* op, Context& ctx, const Options& options, softmax::Problem* whole);
void RunBackward(const char* op, Context& ctx, const Options& options, const softmax::Gradients& gradients,
                 softmax::Problem* whole);

// Calls run(part, problem) for each part of a call, which see disjoint sets of keys, and merges their results into o
// and lse of `whole`. A part's problem is `whole` with o and lse in tables, in the accumulation dtype, and without
// sinks. The tables are ctx.Tables(), which `run` must not reserve.
using RunPart = std::function<void(size_t part, const softmax::Problem& problem)>;
void RunParts(Context& ctx, const softmax::Problem& whole, size_t parts, const RunPart& run);
int64_t PartBytes(const softmax::Problem& whole, size_t parts);  // of these tables

// Runs the backward pass of rows with listed keys: attention_rows_backward.cc.
void RunBackwardOfRows(const char* op, Context& ctx, const Pattern& pattern, const softmax::Gradients& gradients,
                       const softmax::Problem& whole);
int64_t BackwardBytesOfRows(const char* op, const Context& ctx, const Pattern& pattern,
                            const softmax::Gradients& gradients, const softmax::Problem& whole);

// Bytes that Run needs, for all threads together.
int64_t BytesOf(const char* op, const Context& ctx, const softmax::Problem& whole, const Options& options);
int64_t BackwardBytesOf(const char* op, const Context& ctx, const softmax::Problem& whole, const Options& options,
                        const softmax::Gradients& gradients);

// The reason for the choice of kernel, and further remarks of Explain: a mask or bias that is read one element at a
// time, and a precision without effect.
std::string Why(const softmax::Kernel& kernel, const softmax::Problem& problem);

// Throws Unsupported where `ctx` is strict and a mask or bias is read one element at a time.
void RefuseSlowPairs(const char* op, const Context& ctx, const softmax::Problem& problem);

// Computes the cumulative sums of a problem's log decays, if it has any; where `ctx` asks for checks, throws
// InvalidArgument for one above 0 or NaN.
void SumLogDecays(const char* op, Context& ctx, softmax::Problem* problem);

// Checks an output beside o and lse: present, of this shape and dtype, with contiguous rows, writable, and without
// overlap with any input. Throws InvalidArgument.
void CheckOutput(const char* op, const char* name, const TensorView& out, std::span<const int64_t> shape, DType dtype,
                 const Inputs& in, const Options& options, Device device = {});

// Returns the device of q, if attention has kernels for it.
Device DeviceOf(const ConstTensorView& q);

// Prepares a problem of a device for its kernel, which it returns. Such kernels read the pattern's block mask as a
// whole, and write rows of packed tensors that belong to no sequence as rows of a sequence that sees no key. `num_keys`
// is the number of keys with those that belong to no sequence.
const softmax::Kernel& ForDevice(const char* op, const Context& ctx, const Options& options, const ConstTensorView& q,
                                 int64_t num_keys, bool to_lengths, softmax::Problem* problem,
                                 softmax::Pass pass = softmax::Pass::kForward);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_
