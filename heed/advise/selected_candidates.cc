// Attention with selected patterns, including the selection.
#include <algorithm>
#include <memory>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"
#include "heed/ops/sparse/select/select.h"

namespace heed::advise {
namespace {

constexpr int64_t kBlock = 64;            // keys per block, those of a tile: smaller blocks cost as much
constexpr int64_t kFewestToChoose = 512;  // tokens; with fewer, selection saves little

// Blocks of keys that rows select among, over all rows and key heads.
double BlockChoices(const Sizes& s, bool causal, int64_t block) {
  const double share = causal ? 0.5 : 1;
  return share * static_cast<double>(s.B * s.Hkv) * static_cast<double>(s.Tq) * static_cast<double>(s.Tk) /
         static_cast<double>(block);
}

class Selected : public Candidate {
 public:
  Selected(Purpose purpose, const attention::Options& exact) : purpose_(purpose), exact_(exact) {
    mechanism = "attention";
    is_causal = exact.causal;
  }

  std::vector<Part> Parts(const Context&, const Sizes& s, double kept) const override {
    const double pairs = kept * VisiblePairs(s, exact_.causal), channels = static_cast<double>(s.D + s.Dv);
    // With bf16 dot products, tiles are of two blocks, and a row's accumulators are loaded and stored even if it keeps
    // only one of them.
    const double tiles = (1 - (1 - kept) * (1 - kept)) * VisiblePairs(s, exact_.causal) / (2 * kBlock);
    return {{{ChoiceName(), dtype, threads}, ChoiceLoad(s)},
            {{PatternName() + " " + Name(purpose_), dtype, threads},
             {{"row", Rows(s)},
              {"byte", ArgumentBytes(s, dtype)},
              {"pair", pairs},
              {"flop", 2 * pairs * channels},
              {"tile", tiles},
              {"moved", tiles * channels}}}};
  }

  // Attention's other reservations depend on the pattern; dense attention reserves as much.
  Memory MemoryAt(const Context& ctx, const Sizes& s, double kept) const override {
    const bool trains = purpose_ == Purpose::kTraining;
    return {ArgumentBytes(s, dtype) + (trains ? TrainingBytes(s, dtype) : 0),
            PassesWorkspace(ctx, purpose_, InputsOf(s, dtype), exact_) + PatternBytes(s, kept),
            trains ? 0 : KeyValueBytes(s, dtype, s.Tk)};
  }

  Division DivisionAt(const Context&, const Sizes&) const override { throw Unsupported(kPatternsAreNotDivided); }

  Call On(Context&, const TensorMap& tensors) const override {
    Call call;
    const attention::Inputs in = InputsOf(tensors);
    const auto with = Keep(call, std::make_shared<attention::Options>(exact_));
    call.stages.emplace_back([this, in, with](Context& ctx) { with->pattern = Choose(ctx, in.q, in.k); });
    AddPasses(call, purpose_, in, [with] { return *with; });
    call.kept = [in, with] {
      const Context ctx(1);
      return attention::Explain(ctx, in, *with).visited_pairs / VisiblePairs(SizesOf(in), with->causal);
    };
    return call;
  }

 protected:
  virtual std::string ChoiceName() const = 0;
  virtual std::string PatternName() const { return "attention of blocks"; }
  virtual Load ChoiceLoad(const Sizes& s) const = 0;
  virtual Pattern Choose(Context& ctx, const ConstTensorView& q, const ConstTensorView& k) const = 0;
  virtual double PatternBytes(const Sizes& s, double kept) const = 0;

  Purpose purpose_;
  attention::Options exact_;
};

// The fraction of the visible pairs that is computed if each row keeps this many blocks of 64 keys, which are the
// computed tiles.
double TileShare(int64_t tokens, bool causal, int64_t count) {
  double kept = 0, visible = 0;
  for (int64_t first = 0; first < tokens; first += kBlock) {  // rows of one tile see equally many
    const auto rows = static_cast<double>(std::min(kBlock, tokens - first));
    const int64_t seen = causal ? std::min(first + kBlock, tokens) : tokens;
    kept += rows * static_cast<double>(std::min(seen, count * kBlock));
    visible += rows * (causal ? static_cast<double>(first) + (rows + 1) / 2 : static_cast<double>(seen));
  }
  return visible == 0 ? 0 : kept / visible;
}

class TopBlocks : public Selected {
 public:
  TopBlocks(const Question& question, int64_t count, select::Score score) : Selected(question.purpose, question.exact) {
    const std::string name = score == select::Score::kMean ? "mean" : "box";
    choice_.causal = exact_.causal;
    choice_.block = kBlock;
    choice_.count = count;
    choice_.score = score;
    options = (exact_.causal ? "causal " : "") + std::string("top_blocks(") + std::to_string(count) + ", " +
              std::to_string(kBlock) + ", " + name + ")";
    python = "heed.attention(q, k, v" + OptionsPython(exact_) +
             ", pattern=heed.select.top_blocks(q, k, count=" + std::to_string(count) +
             ", block=" + std::to_string(kBlock) + ", score=\"" + name +
             "\", causal=" + (exact_.causal ? "True" : "False") + "))";
  }

 private:
  std::string ChoiceName() const override {
    return choice_.score == select::Score::kMean ? "choice by mean" : "choice by box";
  }
  Load ChoiceLoad(const Sizes& s) const override {
    const double choices = BlockChoices(s, exact_.causal, choice_.block);
    return {{"row", Rows(s)},
            {"byte", KeyValueBytes(s, dtype, s.Tk)},
            {"choice", choices},
            {"flop", 2 * choices * static_cast<double>(s.Hq / std::max<int64_t>(s.Hkv, 1) * s.D)}};
  }
  Pattern Choose(Context& ctx, const ConstTensorView& q, const ConstTensorView& k) const override {
    return select::TopBlocks(ctx, q, k, choice_);
  }
  double PatternBytes(const Sizes& s, double) const override {
    return 4 * static_cast<double>(s.B * s.Hkv * s.Tq) * static_cast<double>(choice_.count);
  }

 public:
  double KeptOf(int64_t tokens) const override { return TileShare(tokens, exact_.causal, choice_.count); }
  // Scales the fraction for random selections by the observed ratio to it.
  double KeptAt(double kept, int64_t sample_tokens, int64_t tokens) const override {
    return kept * KeptOf(tokens) / KeptOf(sample_tokens);
  }

 private:
  select::TopBlocksOptions choice_;
};

class Cumulative : public Selected {
 public:
  explicit Cumulative(const Question& question) : Selected(question.purpose, question.exact) {
    choice_.causal = exact_.causal;
    choice_.block = kBlock;
    choice_.mass = 0.9;
    chooses = true;
    options = (exact_.causal ? "causal " : "") + std::string("cumulative(0.9, ") + std::to_string(kBlock) + ")";
    python = "heed.attention(q, k, v" + OptionsPython(exact_) +
             ", pattern=heed.select.cumulative(q, k, mass=0.9, block=" + std::to_string(kBlock) +
             ", causal=" + (exact_.causal ? "True" : "False") + "))";
  }

 private:
  std::string ChoiceName() const override { return "choice by mass"; }
  Load ChoiceLoad(const Sizes& s) const override {
    const double choices = BlockChoices(s, exact_.causal, choice_.block);
    const auto group = static_cast<double>(s.Hq / std::max<int64_t>(s.Hkv, 1));
    return {{"row", Rows(s)},
            {"byte", KeyValueBytes(s, dtype, s.Tk)},
            {"choice", choices * group},
            {"flop", 2 * choices * group * static_cast<double>(s.D)}};
  }
  Pattern Choose(Context& ctx, const ConstTensorView& q, const ConstTensorView& k) const override {
    return select::Cumulative(ctx, q, k, choice_);
  }
  double PatternBytes(const Sizes& s, double kept) const override {
    return 4 * kept * 2 * BlockChoices(s, exact_.causal, choice_.block);
  }

  select::CumulativeOptions choice_;
};

class VerticalSlash : public Selected {
 public:
  explicit VerticalSlash(const Question& question) : Selected(question.purpose, question.exact) {
    choice_.verticals = choice_.sinks = question.sizes.Tk / 32;
    choice_.slashes = choice_.local = question.sizes.Tk / 16;
    chooses = true;
    const std::string verticals = std::to_string(choice_.verticals), slashes = std::to_string(choice_.slashes);
    options = "causal vertical_slash(" + verticals + ", " + slashes + ")";
    python = "heed.attention(q, k, v" + OptionsPython(exact_) +
             ", pattern=heed.select.vertical_slash(q, k, verticals=" + verticals + ", slashes=" + slashes +
             ", sinks=" + verticals + ", local=" + slashes + "))";
  }

  // A row keeps equally many keys at any length.
  double KeptAt(double kept, int64_t sample_tokens, int64_t tokens) const override {
    return std::min(1.0, kept * static_cast<double>(sample_tokens) / static_cast<double>(std::max<int64_t>(tokens, 1)));
  }

 private:
  std::string ChoiceName() const override { return "choice of lines"; }
  std::string PatternName() const override { return "attention of lines"; }
  Load ChoiceLoad(const Sizes& s) const override {
    const double pairs = static_cast<double>(s.B * s.Hq * std::min(s.Tq, choice_.last)) * static_cast<double>(s.Tk);
    return {{"byte", KeyValueBytes(s, dtype, s.Tk)}, {"pair", pairs}, {"flop", 4 * pairs * static_cast<double>(s.D)}};
  }
  Pattern Choose(Context& ctx, const ConstTensorView& q, const ConstTensorView& k) const override {
    return select::VerticalSlash(ctx, q, k, choice_);
  }
  double PatternBytes(const Sizes& s, double) const override {
    return 4 * static_cast<double>(s.B * s.Hq * (choice_.verticals + choice_.slashes));
  }

  select::VerticalSlashOptions choice_;
};

}  // namespace

void AddSelected(const Question& question, Candidates& candidates) {
  const int64_t Tk = question.sizes.Tk;
  // Queries that are not tokens of the keys have no block of their own.
  if (!IsUnrestricted(question.exact) || Tk < kFewestToChoose || question.sizes.Tq != Tk) return;
  const auto add = [&](const auto& make) {
    for (const DType dtype : question.dtypes) {
      std::unique_ptr<Candidate> candidate = make();
      candidate->dtype = dtype;
      candidate->threads = question.threads;
      if (candidate->chooses && !question.has_tensors) return;
      candidates.push_back(std::move(candidate));
    }
  };
  for (const int64_t part : {2, 4, 8}) {
    const int64_t count = Tk / kBlock / part;
    if (count < 2) break;  // a row's own block alone is a window
    add([&] { return std::make_unique<TopBlocks>(question, count, select::Score::kMean); });
    if (part == 4) add([&] { return std::make_unique<TopBlocks>(question, count, select::Score::kBox); });
  }
  add([&] { return std::make_unique<Cumulative>(question); });
  if (question.exact.causal) add([&] { return std::make_unique<VerticalSlash>(question); });
}

}  // namespace heed::advise
