// Attention of all tokens: exact, and with windows narrower than the keys.
#include <algorithm>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

class Whole : public Candidate {
 public:
  Whole(Purpose purpose, const attention::Options& with) : purpose_(purpose), with_(with) {
    mechanism = "attention";
    options = ToString(with);
    python = "heed.attention(q, k, v" + OptionsPython(with) + ")";
    is_causal = with.causal;
  }

  std::vector<Part> Parts(const Context& ctx, const Sizes& s, double) const override {
    const double pairs = attention::Explain(ctx, InputsOf(s, dtype), with_).visited_pairs;
    const auto channels = static_cast<double>(s.D + s.Dv);
    // Tiles at the boundary of what a row sees are computed partly.
    const int edges = (with_.causal || with_.window.right >= 0 ? 1 : 0) + (with_.window.left >= 0 ? 1 : 0);
    return {{{std::string("attention ") + Name(purpose_), dtype, threads},
             {{"row", Rows(s)},
              {"byte", ArgumentBytes(s, dtype)},
              {"pair", pairs},
              {"flop", 2 * pairs * channels},
              {"edge", Rows(s) * edges * channels}}}};
  }

  Memory MemoryAt(const Context& ctx, const Sizes& s, double) const override {
    const bool trains = purpose_ == Purpose::kTraining;
    const bool drops = with_.causal && with_.window.left >= 0;
    return {ArgumentBytes(s, dtype) + (trains ? TrainingBytes(s, dtype) : 0),
            PassesWorkspace(ctx, purpose_, InputsOf(s, dtype), with_),
            trains ? 0 : KeyValueBytes(s, dtype, drops ? std::min(s.Tk, with_.window.left + 1) : s.Tk)};
  }

  Division DivisionAt(const Context&, const Sizes&) const override {
    if (with_.pattern.present()) throw Unsupported(kPatternsAreNotDivided);
    return {.is_attention = true, .causal = with_.causal, .window = with_.window};
  }

  Call On(Context&, const TensorMap& tensors) const override {
    Call call;
    AddPasses(call, purpose_, InputsOf(tensors), [with = with_] { return with; });
    return call;
  }

 private:
  Purpose purpose_;
  attention::Options with_;
};

}  // namespace

void AddWhole(const Question& question, Candidates& candidates) {
  const auto add = [&](const attention::Options& with, DType dtype, int threads) {
    auto candidate = std::make_unique<Whole>(question.purpose, with);
    SetKind(question, dtype, threads, *candidate);
    candidates.push_back(std::move(candidate));
  };
  const attention::Options& exact = question.exact;
  for (const DType dtype : question.dtypes) add(exact, dtype, question.threads);
  for (const DType dtype : question.dtypes) {
    if (question.threads > 1) add(exact, dtype, 1);
  }
  if (!IsUnrestricted(exact)) return;
  for (const int64_t width : Widths(question.sizes.Tk)) {
    attention::Options narrow = exact;
    narrow.window = exact.causal ? attention::Window{width - 1, 0} : attention::Window{width / 2, width / 2};
    for (const DType dtype : question.dtypes) add(narrow, dtype, question.threads);
  }
}

}  // namespace heed::advise
