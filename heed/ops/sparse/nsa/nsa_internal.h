// Common parts of the files of nsa: a checked call as three calls of attention, and the computations between them.
#ifndef HEED_OPS_SPARSE_NSA_NSA_INTERNAL_H_
#define HEED_OPS_SPARSE_NSA_NSA_INTERNAL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/os.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/sparse/nsa/nsa.h"

namespace heed::nsa {

enum Branch { kCompressed, kSelected, kWindowed, kBranches };

// Sizes of a call, its windows of tokens, and their blocks.
struct Shape {
  int64_t B = 0, Tq = 0, Tk = 0, Hq = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t block = 0, stride = 0, length = 0;
  int64_t columns = 0;          // largest number of blocks that a row selects
  int64_t windows = 0;          // windows that are complete in Tk tokens
  std::vector<int64_t> starts;  // position of row 0 of each sequence
  std::vector<int64_t> rows;    // rows of each sequence; further rows of the call select nothing
  int64_t group() const { return Hkv == 0 ? 1 : Hq / Hkv; }
};

struct Call {
  Shape shape;
  attention::Options options[kBranches];  // that of the selected branch has no pattern; views of shape.starts
  bool means = false;                     // true if k_cmp and v_cmp are not given
};

// Throws InvalidArgument for a size out of range.
void CheckOptions(const char* op, const Options& options);

// Checks the inputs and, for Forward and its reference, o. Throws InvalidArgument.
Call CheckedCall(const char* op, const Inputs& in, const Options& options, const TensorView& o, attention::Use use);

// Checks the arguments of BackwardReference. Throws InvalidArgument.
void CheckBackwardReference(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out);

// All inputs, for the overlap checks of outputs.
mechanism::Apart Reads(const BackwardInputs& in);

// q with the keys and values of a branch, compressed ones for the compressed branch.
attention::Inputs BranchInputs(const Inputs& in, const ConstTensorView& k_cmp, const ConstTensorView& v_cmp,
                               int64_t branch);

// Branch c of branches or of lse.
TensorView Of(const TensorView& all, int64_t branch);
ConstTensorView Of(const ConstTensorView& all, int64_t branch);

// Row-major memory of one call.
class Memory {
 public:
  // Gives `view` these sizes now and an address in Allocate(); until then the view must not move.
  void Want(TensorView* view, DType dtype, std::vector<int64_t> sizes);
  void Allocate();
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::pair<TensorView*, int64_t>> wanted_;  // each view and the offset of its elements
  int64_t bytes_ = 0;
  std::unique_ptr<void, decltype(&os::FreeAligned)> memory_{nullptr, &os::FreeAligned};
};

// The pattern of the selected blocks, [B, Tq, Hkv, columns] i32.
Pattern Selected(const Shape& s, const ConstTensorView& blocks);

// The blocks that are selected if all importances are equal.
Pattern FirstBlocks(const Shape& s);

// Writes the blocks of a row that do not depend on importances: all blocks if there are few, else three. Returns the
// number to select among blocks [1, own - 1); the others are in `row` [columns], then -1.
int64_t FixedBlocks(const Shape& s, int64_t position, int32_t* row);

// Selects blocks, [B, Tq, Hkv, columns] i32, by the probabilities of compressed keys: nsa_choice.cc. lse is that of the
// compressed branch.
void ChooseBlocks(Context& ctx, const Shape& s, double scale, const ConstTensorView& q, const ConstTensorView& k_cmp,
                  const ConstTensorView& lse, const TensorView& blocks);
int64_t ChoiceBytes(const Shape& s, DType dtype);  // of scratch, per thread

// Row-wise computations, on tensors [B, T, H, C] of one dtype with contiguous rows: nsa_rows.cc.

// The mean over each complete window of x, [B, windows, H, C].
void Means(Context& ctx, const Shape& s, const ConstTensorView& x, const TensorView& means);

// o = sum_c gates[..., c] branches[c].
void AddGated(Context& ctx, const ConstTensorView& branches, const ConstTensorView& gates, const TensorView& o);

// dgates[..., c] = <d_o, branch>, if dgates is present, and gated = gates[..., c] d_o, if gated is present.
void GateGradients(Context& ctx, int64_t c, const ConstTensorView& d_o, const ConstTensorView& gates,
                   const ConstTensorView& branch, const TensorView& dgates, const TensorView& gated);

// to += the sum of `others` and, if d_means is present, its contribution to each token; rounded once.
void AddTo(Context& ctx, const Shape& s, const TensorView& to, std::span<const ConstTensorView> others,
           const ConstTensorView& d_means);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_INTERNAL_H_
