// Shared by the files of attention: checking the arguments, once for all passes.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// What the caller lets be absent or different.
enum class Use {
  kForward,    // everything present, dtypes as documented
  kReference,  // outputs may also be f64
  kExplain,    // no outputs; data pointers may be null
  kInputs,     // no outputs
};

// Checks every argument and returns the problem they pose, the pattern not placed in it. Tensors are on `device`, but
// for log decays and what has a number per sequence or token: these are read here, and so are numbers per head that are
// not there. Throws InvalidArgument; writes nothing.
softmax::Problem CheckedProblem(const char* op, const Inputs& in, const Options& options, const Outputs& out, Use use,
                                Device device = {});

// A backward pass, and the sums that its results are rounded from.
struct BackwardProblem {
  softmax::Problem problem;
  softmax::Gradients gradients;
  std::vector<double> dsinks, dalibi;
};

// Checks the arguments of the forward call, then all others. kForward reads o and lse, which kReference does not;
// kExplain reads nothing. Throws InvalidArgument; writes nothing.
BackwardProblem CheckedBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out,
                                Use use);

// Rows of packed outputs that belong to no sequence: o = 0, lse = -inf, and no gradient.
void FillSurplusRows(const softmax::Problem& problem, const Inputs& in, const Outputs& out);
void ClearSurplusRows(const softmax::Problem& problem, const Gradients& out);

// Throws InvalidArgument unless the pattern fits.
void CheckPattern(const char* op, const Pattern& pattern, softmax::Problem* problem);

// Lists what the pattern keeps of each sequence's keys, those there are or, `to_lengths`, those that are valid. Throws
// InvalidArgument if it does not fit.
void PlacePattern(const char* op, const Pattern& pattern, bool to_lengths, softmax::Problem* problem);

// Lists the rows that keep each tile instead, if the pattern lists blocks for each row and that pays.
void PlaceTileRows(const char* op, const Pattern& pattern, softmax::Problem* problem);

// One of the ways in which a call looks at its pattern's pairs; those of different layers are different pairs.
struct Layer {
  enum Kind {
    kTiles,     // of consecutive keys, which hold some pair
    kWindow,    // p - left <= j <= p + right
    kResidues,  // j = p + step c, shift - left <= c <= shift + right
    kRows,      // those listed for each row
    kTileRows,  // of blocks listed for each row: rows that keep a tile together
  } kind;
  int64_t step = 1, shift = 0, left = 0, right = 0;
};

// The layers of a call, at least one, from its options alone: attention_pieces.cc.
std::vector<Layer> LayersOf(const softmax::Problem& whole, const Options& options);

// What the engine runs.
struct Piece {
  softmax::Problem problem;
  softmax::Gradients gradients;
};

// Those, one or one per key head, in which each row of the problem is a sequence of its own, of the keys that a pattern
// lists for it, which must outlive them.
std::vector<Piece> ProblemsOfRows(softmax::Problem whole, const Pattern& pattern,
                                  const softmax::Gradients& gradients = {});

// The pieces of a layer, which write the rows and gradients of the problem between them.
std::vector<Piece> PiecesOf(const char* op, softmax::Problem whole, const Options& options, const Layer& layer,
                            const softmax::Gradients& gradients = {});

// Runs a problem, layer by layer, and places its pattern if that comes to lists of tiles: attention_layers.cc.
void Run(const char* op, Context& ctx, const Options& options, softmax::Problem* whole);
void RunBackward(const char* op, Context& ctx, const Options& options, const softmax::Gradients& gradients,
                 softmax::Problem* whole);

// Runs the backward pass of such rows: attention_rows_backward.cc.
void RunBackwardOfRows(const char* op, Context& ctx, const Pattern& pattern, const softmax::Gradients& gradients,
                       const softmax::Problem& whole);
int64_t BackwardBytesOfRows(const char* op, const Context& ctx, const Pattern& pattern,
                            const softmax::Gradients& gradients, const softmax::Problem& whole);

// What that takes, of all threads together.
int64_t BytesOf(const char* op, const Context& ctx, const softmax::Problem& whole, const Options& options);
int64_t BackwardBytesOf(const char* op, const Context& ctx, const softmax::Problem& whole, const Options& options,
                        const softmax::Gradients& gradients);

// Why a kernel is chosen, and what Explain says besides: pairs that are read one by one, and a precision that changes
// nothing.
std::string Why(const softmax::Kernel& kernel, const softmax::Problem& problem);

// Throws Unsupported where `ctx` is strict and pairs are read one by one.
void RefuseSlowPairs(const char* op, const Context& ctx, const softmax::Problem& problem);

// Adds up the log decays of a problem, if it has any; where `ctx` asks for checks, throws
// InvalidArgument for one above 0 or NaN.
void SumLogDecays(const char* op, Context& ctx, softmax::Problem* problem);

// Checks an output beside o and lse: there, of this shape and dtype, with contiguous
// rows, writable, and apart from every input. Throws InvalidArgument.
void CheckOutput(const char* op, const char* name, const TensorView& out, std::span<const int64_t> shape, DType dtype,
                 const Inputs& in, const Options& options, Device device = {});

// Where q is, if attention may be computed there.
Device DeviceOf(const Inputs& in);

// On devices, whose kernels write rows of packed tensors that belong to no sequence as those of one that sees nothing.
void AddSurplusRows(const Inputs& in, softmax::Problem* problem);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_
