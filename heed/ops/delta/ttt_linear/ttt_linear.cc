// TTT-Linear: the checks of a call, and its tokens outside sequences.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_calls.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using test_time_training::InputAxes;

struct Memory {
  using Inputs = ttt_linear::Inputs;
  using BackwardInputs = ttt_linear::BackwardInputs;
  using Options = ttt_linear::Options;
  using Outputs = ttt_linear::Outputs;
  using Gradients = ttt_linear::Gradients;
  using Call = ttt_linear::Call;
  static constexpr test_time_training::Tensor<Inputs, Gradients> kTensors[] = {
      {"q", &Inputs::q, "dq", &Gradients::dq, InputAxes::kTokenRows},
      {"k", &Inputs::k, "dk", &Gradients::dk, InputAxes::kTokenRows},
      {"v", &Inputs::v, "dv", &Gradients::dv, InputAxes::kTokenRows},
      {"weight", &Inputs::weight, "dweight", &Gradients::dweight, InputAxes::kHeadRows},
      {"bias", &Inputs::bias, "dbias", &Gradients::dbias, InputAxes::kHeadRows},
      {"eta", &Inputs::eta, "deta", &Gradients::deta, InputAxes::kTokens},
      {"lr", &Inputs::lr, "dlr", &Gradients::dlr, InputAxes::kTokens, true}};

  static mechanism::Axes StateShape(const Call& call) {
    return {static_cast<int64_t>(call.sequences.size()), call.H, 2, call.K + 1, call.K};
  }
  static void CheckOptions(const char* op, const Options& options, Call& call) {
    if (options.residual != Residual::kQuery && options.residual != Residual::kOutput) {
      mechanism::Fail(op, "residual", "is " + std::to_string(static_cast<int>(options.residual)), "kQuery or kOutput");
    }
    call.query_residual = options.residual == Residual::kQuery;
  }
};

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  return test_time_training::CheckedForward<Memory>(op, in, options, out, wide);
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  return test_time_training::CheckedBackward<Memory>(op, in, options, out, wide);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  test_time_training::CallForward<Memory>("ttt_linear::Forward", ctx, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  test_time_training::CallBackward<Memory>("ttt_linear::Backward", ctx, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  test_time_training::CallStep<Memory>("ttt_linear::Step", ctx, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("ttt_linear::Workspace", in, options);
  return ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("ttt_linear::BackwardWorkspace", in, options);
  return BackwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("ttt_linear::Explain", in, options);
  const auto K = static_cast<double>(call.K), pairs = static_cast<double>(2 * std::min<int64_t>(call.mini_batch, 16)),
             tokens = static_cast<double>(call.H * mechanism::NumTokens(call.sequences));
  Explanation e = test_time_training::Explained<Memory>(ctx, in);
  e.kernel = "ttt_linear_chunks";
  e.why = "chunks of up to 16 tokens of a mini-batch, which multiply by its W and by each other";
  // Three products with W, and the pairs of a chunk.
  const double products = call.mini_batch > 16 ? 4 : 3;
  e.flops = tokens * (products * 2 * K * (K + 1) + pairs * (2 * K + 1));
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::ttt_linear
