// Titans' linear memory: the checks of a call, and its tokens outside sequences.
#include "heed/ops/delta/titans/titans.h"

#include <algorithm>
#include <cstdint>

#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_calls.h"
#include "heed/ops/delta/titans/titans_internal.h"

namespace heed::titans {
namespace {

using test_time_training::InputAxes;

struct Memory {
  using Inputs = titans::Inputs;
  using BackwardInputs = titans::BackwardInputs;
  using Options = titans::Options;
  using Outputs = titans::Outputs;
  using Gradients = titans::Gradients;
  using Call = titans::Call;
  static constexpr test_time_training::Tensor<Inputs, Gradients> kTensors[] = {
      {"q", &Inputs::q, "dq", &Gradients::dq, InputAxes::kTokenRows},
      {"k", &Inputs::k, "dk", &Gradients::dk, InputAxes::kTokenRows},
      {"v", &Inputs::v, "dv", &Gradients::dv, InputAxes::kTokenRows},
      {"weight", &Inputs::weight, "dweight", &Gradients::dweight, InputAxes::kHeadRows},
      {"bias", &Inputs::bias, "dbias", &Gradients::dbias, InputAxes::kHeadRows},
      {"theta", &Inputs::theta, "dtheta", &Gradients::dtheta, InputAxes::kTokens},
      {"alpha", &Inputs::alpha, "dalpha", &Gradients::dalpha, InputAxes::kTokens},
      {"eta", &Inputs::eta, "deta", &Gradients::deta, InputAxes::kTokens}};

  static mechanism::Axes StateShape(const Call& call) {
    return {static_cast<int64_t>(call.sequences.size()), call.H, 3, call.K, call.K};
  }
  static void CheckOptions(const char* /*op*/, const Options& /*options*/, Call& /*call*/) {}
};

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  return test_time_training::CheckedForward<Memory>(op, in, options, out, wide);
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  return test_time_training::CheckedBackward<Memory>(op, in, options, out, wide);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  test_time_training::CallForward<Memory>("titans::Forward", ctx, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  test_time_training::CallBackward<Memory>("titans::Backward", ctx, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  test_time_training::CallStep<Memory>("titans::Step", ctx, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("titans::Workspace", in, options);
  return ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("titans::BackwardWorkspace", in, options);
  return BackwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = test_time_training::Planned<Memory>("titans::Explain", in, options);
  const auto K = static_cast<double>(call.K), pairs = static_cast<double>(2 * std::min<int64_t>(call.mini_batch, 16)),
             tokens = static_cast<double>(call.H * mechanism::NumTokens(call.sequences));
  Explanation e = test_time_training::Explained<Memory>(ctx, in);
  e.kernel = "titans_chunks";
  e.why = "chunks of up to 16 tokens of a mini-batch, which multiply by its memory, the momentum and each other";
  // Products with A, M and S, those that change M and S, and the pairs of a chunk.
  e.flops = tokens * (10 * K * K + pairs * 2 * K);
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::titans
