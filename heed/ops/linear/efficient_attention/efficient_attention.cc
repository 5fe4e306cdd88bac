// Efficient attention on the recurrence engine: sums over all tokens, with a softmax over channels for queries and a
// softmax over tokens for keys.
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"

#include <string>
#include <vector>

#include "heed/mechanism/check_internal.h"

namespace heed::efficient_attention {
namespace {

using mechanism::Fail;
using recurrence::Feature;

recurrent::Surroundings Checked(const char* op, const Inputs& in, const Options& options, bool data) {
  if (options.reverse) Fail(op, "reverse", "is true", "false: there is no direction");
  const ConstTensorView& mask = options.kv_mask;
  recurrent::Surroundings around;
  if (!mask.present()) return around;
  if (in.q.present() && in.q.rank() == 4) {
    mechanism::CheckTensor(op, "kv_mask", mask, {in.q.size(0), in.q.size(1)}, DType::kBool, data);
    around.key_mask = mask;
  }
  return around;
}

void CheckApart(const char* op, const char* name, const TensorView& t, const Options& options) {
  if (!t.present() || !options.kv_mask.present()) return;
  mechanism::CheckWritable(op, name, t, "kv_mask", options.kv_mask);
}

}  // namespace

recurrent::Definition DefinitionOf(const recurrent::Surroundings* around) {
  return {.root_scale = true,
          .feature = Feature::kSoftmax,
          .key_feature = Feature::kSoftmaxOfTokens,
          .causal = false,
          .surroundings = around};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "efficient_attention::Forward";
  const recurrent::Surroundings around = Checked(kOp, in, options, true);
  CheckApart(kOp, "o", out.o, options);
  recurrent::Forward(kOp, ctx, DefinitionOf(&around), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "efficient_attention::Backward";
  const recurrent::Surroundings around = Checked(kOp, in, options, true);
  CheckApart(kOp, "dq", out.dq, options);
  CheckApart(kOp, "dk", out.dk, options);
  CheckApart(kOp, "dv", out.dv, options);
  recurrent::Backward(kOp, ctx, DefinitionOf(&around), in, options, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "efficient_attention::Workspace";
  const recurrent::Surroundings around = Checked(kOp, in, options, false);
  return recurrent::Workspace(kOp, ctx, DefinitionOf(&around), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "efficient_attention::BackwardWorkspace";
  const recurrent::Surroundings around = Checked(kOp, in, options, false);
  return recurrent::BackwardWorkspace(kOp, ctx, DefinitionOf(&around), in, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "efficient_attention::Explain";
  const recurrent::Surroundings around = Checked(kOp, in, options, false);
  return recurrent::Explain(kOp, ctx, DefinitionOf(&around), in, options);
}

}  // namespace heed::efficient_attention
