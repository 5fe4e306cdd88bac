// Certified attention of all tokens: drops keys with a provably small probability.
#include <memory>

#include "heed/advise/candidates_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"

namespace heed::advise {
namespace {

using certified_attention::Level;

class Certified : public Candidate {
 public:
  Certified(const Question& question, Level level) {
    with_.epsilon = question.epsilon;
    with_.level = level;
    with_.causal = question.exact.causal;
    with_.scale = question.exact.scale;
    const std::string name = level == Level::kSkip ? "skip" : "auto", epsilon = NumberText(with_.epsilon);
    mechanism = "certified_attention";
    options = (with_.causal ? "causal " : "") + std::string("epsilon ") + epsilon + " " + name;
    python = "heed.certified_attention(q, k, v, epsilon=" + epsilon + ", level=\"" + name + "\"" +
             OptionsPython(question.exact) + ")[0]";
    is_causal = with_.causal;
    chooses = true;
  }

  std::vector<Part> Parts(const Context&, const Sizes& s, double kept) const override {
    const double pairs = VisiblePairs(s, with_.causal), D = static_cast<double>(s.D), Dv = static_cast<double>(s.Dv);
    const bool skips = with_.level == Level::kSkip;
    return {{{std::string("certified_attention ") + (skips ? "skip" : "auto") + " prefill", dtype, threads},
             {{"row", Rows(s)},
              {"byte", ArgumentBytes(s, dtype)},
              {"pair", pairs},
              {"flop", 2 * pairs * D},
              {"kept_flop", 2 * kept * pairs * (skips ? Dv : D + Dv)}}}};
  }

  // The workspace is Explain's plus a sketch of the keys.
  Memory MemoryAt(const Context& ctx, const Sizes& s, double) const override {
    const attention::Inputs in = InputsOf(s, dtype);
    const certified_attention::Explanation plan = certified_attention::Explain(ctx, {in.q, in.k, in.v}, with_);
    return {ArgumentBytes(s, dtype), static_cast<double>(plan.workspace_bytes), KeyValueBytes(s, dtype, s.Tk)};
  }

  Call On(Context&, const TensorMap& tensors) const override {
    Call call;
    const attention::Inputs dense = InputsOf(tensors);
    const certified_attention::Inputs in = {dense.q, dense.k, dense.v};
    const int64_t B = in.q.size(0), T = in.q.size(1), H = in.q.size(2), blocks = (in.k.size(1) + 63) / 64;
    const Buffer o(in.q.dtype(), {B, T, H, in.v.size(3)}, Placement::kAligned);
    call.o = o.view();
    call.stages.emplace_back(
        [o, in, with = with_](Context& ctx) { certified_attention::Forward(ctx, in, with, {o.view(), {}, {}, {}}); });
    // Writing the kept blocks takes extra time, so this is a separate call.
    call.kept = [o, in, with = with_, B, T, H, blocks] {
      const Buffer kept(DType::kBool, {B, with.level == Level::kSkip ? H : in.k.size(2), T, blocks});
      const Buffer again(in.q.dtype(), o.view().sizes());
      Context ctx;
      certified_attention::Forward(ctx, in, with, {again.view(), {}, {}, kept.view()});
      int64_t count = 0, visible = 0;
      const bool* marks = kept.as<bool>();
      for (int64_t i = 0; i < kept.view().num_elements(); ++i) {
        const int64_t block = i % blocks, row = i / blocks % T;
        if (with.causal && block * 64 > row + in.k.size(1) - T) continue;
        ++visible;
        count += marks[i];
      }
      return visible == 0 ? 1.0 : static_cast<double>(count) / static_cast<double>(visible);
    };
    return call;
  }

 private:
  certified_attention::Options with_;
};

}  // namespace

void AddCertified(const Question& question, Candidates& candidates) {
  const bool takes = IsUnrestricted(question.exact) && question.exact.softcap == 0;
  if (!takes || !question.has_tensors || question.purpose != Purpose::kPrefill) return;
  for (const Level level : {Level::kAuto, Level::kSkip}) {
    for (const DType dtype : question.dtypes) {
      if (dtype == DType::kF64) continue;
      auto candidate = std::make_unique<Certified>(question, level);
      candidate->dtype = dtype;
      candidate->threads = question.threads;
      candidates.push_back(std::move(candidate));
    }
  }
}

}  // namespace heed::advise
