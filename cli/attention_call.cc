// AttentionCall: the common part of `heed run` and `heed compare`.
#include "cli/attention_call.h"

#include <algorithm>
#include <vector>

#include "heed/harness/timing.h"

namespace heed::cli {
namespace {

constexpr int kRepeats = 7;
constexpr double kEnoughSeconds = 1.0;

}  // namespace

ConstTensorView DropBatch(const TensorView& x, bool batched) {
  if (batched) return x;
  return ConstTensorView(x.data(), x.dtype(), x.sizes().subspan(1), x.strides().subspan(1));
}

AttentionCall::AttentionCall(const TensorSet& tensors, const attention::Options& options, DType out_dtype)
    : file_(tensors.file), batched_(tensors.batched), in_{tensors.q, tensors.k, tensors.v}, options_(options) {
  const int64_t B = in_.q.size(0), T = in_.q.size(1), H = in_.q.size(2);
  o_ = Buffer(out_dtype, {B, T, H, in_.v.size(3)}, Placement::kAligned);
  lse_ = Buffer(out_dtype == DType::kF64 ? DType::kF64 : DType::kF32, {B, H, T}, Placement::kAligned);
}

void AttentionCall::Forward(Context& ctx) const {
  Named(file_, [&] { attention::Forward(ctx, in_, options_, {o_.view(), lse_.view()}); });
}

void AttentionCall::Reference() const {
  Named(file_, [&] { attention::Reference(in_, options_, {o_.view(), lse_.view()}); });
}

attention::Explanation AttentionCall::Explain(const Context& ctx) const {
  return Named(file_, [&] { return attention::Explain(ctx, in_, options_); });
}

int64_t AttentionCall::Workspace(const Context& ctx) const {
  return Named(file_, [&] { return attention::Workspace(ctx, in_, options_); });
}

ConstTensorView AttentionCall::o() const { return DropBatch(o_.view(), batched_); }

ConstTensorView AttentionCall::lse() const { return DropBatch(lse_.view(), batched_); }

double MedianSeconds(const Context& ctx, const std::function<void()>& call) {
  const double first = TimeOnce(ctx.num_threads(), call).seconds;
  if (first > kEnoughSeconds) return first;
  std::vector<double> seconds;
  for (double total = 0; seconds.size() < kRepeats && total < kEnoughSeconds;) {
    seconds.push_back(TimeOnce(ctx.num_threads(), call).seconds);
    total += seconds.back();
  }
  return Summarize(seconds).median;
}

OutputError AttentionCall::SpotCheck(int64_t num_rows) const {
  const int64_t B = in_.q.size(0), Tq = in_.q.size(1), Tk = in_.k.size(1);
  const int64_t n = std::min(num_rows, Tq);
  OutputErrorSum sum;
  for (const int64_t begin : {int64_t{0}, (Tq - n) / 2, Tq - n}) {
    const std::vector<int64_t> starts(static_cast<size_t>(B), Tk - Tq + begin);
    attention::Inputs in = in_;
    in.q = in_.q.Slice(1, begin, begin + n);
    attention::Options options = options_;
    options.query_starts = ConstTensorView(starts.data(), DType::kI64, {B});
    const Buffer expected(DType::kF64, {B, n, in_.q.size(2), in_.v.size(3)}, Placement::kAligned);
    attention::Reference(in, options, {expected.view(), {}});
    for (int64_t b = 0; b < B; ++b) {  // rows of one sequence are contiguous
      sum.Add(o_.view().Slice(0, b, b + 1).Slice(1, begin, begin + n), expected.view().Slice(0, b, b + 1));
    }
  }
  return sum.Result();
}

Json ToJson(const attention::Options& options) {
  Json json = Json::object();
  if (options.causal) json["causal"] = true;
  if (options.window.left >= 0 || options.window.right >= 0) {
    json["window"] = {options.window.left, options.window.right};
  }
  if (options.scale) json["scale"] = *options.scale;
  if (options.softcap > 0) json["softcap"] = options.softcap;
  if (options.pattern.present()) json["pattern"] = options.pattern.ToString();
  return json;
}

}  // namespace heed::cli
