// Advise: samples tensors, then runs and predicts all candidates.
#include "heed/advise/advise.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "heed/advise/candidates_internal.h"
#include "heed/advise/timing_internal.h"
#include "heed/core/error.h"
#include "heed/harness/assumed_tensors.h"

namespace heed::advise {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 32;
constexpr int kLeastRuns = 2;
// Flops per second and thread that sample sizes assume: those of a slow CPU.
constexpr double kFlopsPerSecond = 2e10;

const std::vector<InputSpec> kQkv = {{"q", "BTHK"}, {"k", "BTGK"}, {"v", "BTGV"}};

// Converts all inputs to a dtype, with one rounding.
void Round(std::span<const InputSpec> inputs, DType dtype, NamedTensors& set) {
  for (const InputSpec& spec : inputs) {
    const auto found = set.tensors.find(spec.name);
    if (found == set.tensors.end()) continue;
    ConstTensorView& x = found->second;
    const DType to = spec.wide && SizeOf(dtype) == 2 ? DType::kF32 : dtype;
    if (x.dtype() == to) continue;
    const auto rounded = std::make_shared<Buffer>(to, x.sizes(), Placement::kAligned);
    std::vector<int64_t> index(x.sizes().size());
    for (int64_t i = 0; i < x.num_elements(); ++i, NextIndex(x.sizes(), index)) {
      StoreDouble(to, rounded->view().data(), i, GetElement(x, index));
    }
    set.owners.push_back(rounded);
    x = rounded->view();
  }
  set.dtype = dtype;
}

std::string Enumerate(const std::vector<std::string>& names) {
  std::string text = names[0];
  for (size_t i = 1; i < names.size(); ++i) text += (i + 1 < names.size() ? ", " : " and ") + names[i];
  return text;
}

// "no log_decay: give it with q, k and v" without the name of the mechanism or of the tensors.
std::string Reason(std::string what, const std::string& file, const std::string& mechanism) {
  for (const std::string& prefix : {file + ": ", mechanism + "::Explain: ", mechanism + ": "}) {
    if (what.starts_with(prefix)) what.erase(0, prefix.size());
  }
  return what;
}

void CheckCluster(const Cluster& cluster) {
  if (cluster.ranks < 1 || cluster.ranks > Cluster::kMostRanks) {
    throw InvalidArgument("ranks is " + std::to_string(cluster.ranks) + ", expected 1 to " +
                          std::to_string(Cluster::kMostRanks));
  }
  if (!(cluster.bandwidth > 0) || std::isinf(cluster.bandwidth)) {
    throw InvalidArgument("bandwidth is " + NumberText(cluster.bandwidth) + ", expected bytes per second above 0");
  }
  if (!(cluster.latency >= 0) || std::isinf(cluster.latency)) {
    throw InvalidArgument("latency is " + NumberText(cluster.latency) + ", expected seconds of 0 or more");
  }
}

class Adviser {
 public:
  explicit Adviser(const Request& request) : request_(request) {}

  Advice Run() {
    const Question question = MakeQuestion();
    advice_.length = length_;
    advice_.sample_tokens = request_.source ? sample_ : 0;
    advice_.sizes = At(length_);
    if (request_.source) ComputeExact();
    Candidates attention_candidates = AttentionCandidates(question);
    std::erase_if(attention_candidates, [&](const auto& candidate) { return !IsWanted(candidate->mechanism); });
    std::vector<OpEntry> ops = AllOps();
    std::erase_if(ops, [&](const OpEntry& op) {
      return op.call == nullptr || !TakesQkv(op) || op.name == "attention" || op.name == "certified_attention" ||
             !IsWanted(op.name);
    });
    count_ = attention_candidates.size() + ops.size() * request_.dtypes.size();
    for (const std::unique_ptr<Candidate>& candidate : attention_candidates) {
      Progress(candidate->mechanism + " " + candidate->options, candidate->dtype);
      const NamedTensors& tensors = request_.source ? Qkv(candidate->dtype) : nothing_;
      Try(candidate->mechanism, tensors.file, [&] { AddRow(*candidate, tensors); });
    }
    for (const OpEntry& op : ops) {
      for (const DType dtype : request_.dtypes) {
        Progress(op.name, dtype);
        Try(op.name, file_, [&] { AddMechanism(question, op, dtype); });
      }
    }
    if (advice_.rows.empty()) FailNothingToRank();
    Rank(request_.budget, question.exact.causal, advice_.rows);
    return std::move(advice_);
  }

 private:
  bool IsWanted(const std::string& mechanism) const {
    return request_.mechanisms.empty() || std::ranges::count(request_.mechanisms, mechanism) > 0;
  }

  [[noreturn]] void FailNothingToRank() const {
    std::map<std::string, std::string> mechanisms;  // by the missing tensors
    for (const auto& [mechanism, reason] : advice_.left_out) {
      mechanisms[reason] += (mechanisms[reason].empty() ? "" : ", ") + mechanism;
    }
    std::string text;
    for (const auto& [reason, names] : mechanisms) text += (text.empty() ? "" : "; ") + names + " " + reason;
    if (text.empty()) text = "none of these mechanisms is there for " + std::string(Name(request_.purpose));
    throw InvalidArgument("nothing to rank: " + text);
  }

  void Progress(const std::string& what, DType dtype) {
    const double share = static_cast<double>(begun_++) / static_cast<double>(count_);
    if (request_.progress) request_.progress(share, what + " " + heed::Name(dtype));
  }

  Context& ContextOf(int threads) {
    std::unique_ptr<Context>& ctx = contexts_[threads];
    if (!ctx) {
      ctx = std::make_unique<Context>(threads);
      if (!request_.isa.empty()) ctx->set_isa(request_.isa);
    }
    return *ctx;
  }

  // The sizes of the problem with another number of tokens.
  Sizes At(int64_t tokens) const {
    Sizes sizes = sizes_;
    sizes.Tq = sizes.Tk = tokens;
    return sizes;
  }

  NamedTensors Load(std::span<const InputSpec> inputs, DType dtype) const {
    NamedTensors set = request_.source(inputs, sample_);
    Round(inputs, dtype, set);
    return set;
  }

  // q, k and v, which many candidates share.
  const NamedTensors& Qkv(DType dtype) {
    const auto found = qkv_.find(dtype);
    return found != qkv_.end() ? found->second : qkv_.emplace(dtype, Load(kQkv, dtype)).first->second;
  }

  // The question to candidates: sizes, length and sample, for which they restrict attention.
  Question MakeQuestion() {
    sizes_ = request_.sizes;
    if (request_.source) {
      const NamedTensors set = request_.source(kQkv, {});
      file_ = set.file;
      sizes_ = SizesOf(InputsOf(set.tensors));
      if (sizes_.Tq != sizes_.Tk) {
        throw InvalidArgument(set.file + ": q has " + std::to_string(sizes_.Tq) + " tokens and k " +
                              std::to_string(sizes_.Tk) + ", expected as many: heed compare takes such tensors");
      }
    }
    if (request_.cluster) CheckCluster(*request_.cluster);
    for (const int64_t size : {sizes_.B, sizes_.Tk, sizes_.Hq, sizes_.Hkv, sizes_.D, sizes_.Dv}) {
      if (size < 1) throw InvalidArgument("a size of q, k and v is " + std::to_string(size) + ", expected 1 or more");
    }
    length_ = request_.length.value_or(sizes_.Tk);
    if (length_ < 1 || length_ > kMostTokens) {
      throw InvalidArgument("length is " + std::to_string(length_) + ", expected 1 to " + std::to_string(kMostTokens));
    }
    sample_ = request_.source ? Sample() : length_;
    if (request_.model == nullptr && (!request_.source || sample_ != length_)) {
      throw InvalidArgument(
          "there is no cost model, which times at " + std::to_string(length_) +
          " tokens have to be predicted from: run heed advise --calibrate once, in less than two minutes" +
          (length_ == sizes_.Tk && request_.source ? ", or give candidates more seconds to run on all tokens" : ""));
    }
    Question question;
    question.purpose = request_.purpose;
    question.exact = request_.exact;
    if (request_.purpose == Purpose::kDecode) question.exact.causal = true;
    question.sizes = At(sample_);
    question.dtypes = request_.dtypes;
    question.threads = request_.threads;
    question.epsilon = request_.budget.relative_error.value_or(question.epsilon);
    if (!(question.epsilon >= 0 && question.epsilon < 1)) question.epsilon = 0.5;
    question.has_tensors = request_.source != nullptr;
    exact_ = question.exact;
    return question;
  }

  // Tokens to run candidates on: all, or as many as about forty calls with the cost of exact attention allow in the
  // time limit.
  int64_t Sample() const {
    const double pairs = VisiblePairs(At(sizes_.Tk), request_.exact.causal), calls = 40.0 * (kLeastRuns + 1);
    const double passes = request_.purpose == Purpose::kTraining ? 3.5 : 1;
    const double flops = 2 * pairs * static_cast<double>(sizes_.D + sizes_.Dv) * passes;
    if (request_.purpose == Purpose::kDecode) return sizes_.Tk;
    return SampleTokens(sizes_.Tk, calls * flops / (kFlopsPerSecond * request_.threads), request_.seconds);
  }

  // Calls `add`, or records why it threw.
  template <class Add>
  void Try(const std::string& mechanism, const std::string& file, const Add& add) {
    const auto leave_out = [&](const std::string& why) {
      const std::pair<std::string, std::string> line = {mechanism, Reason(why, file, mechanism)};
      if (std::ranges::find(advice_.left_out, line) == advice_.left_out.end()) advice_.left_out.push_back(line);
    };
    try {
      add();
    } catch (const FileError& e) {
      leave_out(e.what());
    } catch (const InvalidArgument& e) {
      leave_out(e.what());
    } catch (const Unsupported& e) {
      leave_out(e.what());
    }
  }

  void AddMechanism(const Question& question, const OpEntry& op, DType dtype) {
    NamedTensors tensors;
    std::vector<std::string> assumed;
    if (request_.source) {
      tensors = Load(SpecsBesideQkv(op), dtype);
      const std::vector<std::string> missing = Complete(ContextOf(request_.threads), op, tensors, assumed);
      if (!missing.empty()) throw FileError("needs " + Enumerate(missing) + " too: give them by these names");
    }
    const std::unique_ptr<Candidate> candidate = MechanismCandidate(question, op, tensors.tensors, dtype);
    if (candidate == nullptr) return;
    candidate->assumed = assumed;
    AddRow(*candidate, tensors);
  }

  // Computes the exact outputs: for all tokens of the sample, or for the last ones.
  void ComputeExact() {
    const NamedTensors wide = Load(kQkv, DType::kF64);
    const attention::Inputs in = InputsOf(wide.tensors);
    const int64_t rows = request_.purpose == Purpose::kDecode ? std::min(sample_, kDecodedRows) : sample_;
    expected_ = Buffer(DType::kF64, {sizes_.B, rows, sizes_.Hq, sizes_.Dv}, Placement::kAligned);
    attention::Forward(ContextOf(request_.threads), {in.q.Slice(1, sample_ - rows, sample_), in.k, in.v}, exact_,
                       {expected_.view(), {}});
  }

  std::optional<double> Predict(const Candidate& candidate, Context& ctx, int64_t tokens, double kept) const {
    if (request_.model == nullptr) return std::nullopt;
    double seconds = 0;
    for (const Part& part : candidate.Parts(ctx, At(tokens), kept)) {
      const std::optional<double> part_seconds = request_.model->Predict(part.work, part.load);
      if (!part_seconds) return std::nullopt;
      seconds += *part_seconds;
    }
    return seconds;
  }

  void AddRow(const Candidate& candidate, const NamedTensors& tensors) {
    Context& ctx = ContextOf(candidate.threads);
    Row row;
    row.mechanism = candidate.mechanism;
    row.options = candidate.options;
    row.python = candidate.python;
    row.dtype = candidate.dtype;
    row.threads = candidate.threads;
    row.assumed = candidate.assumed;
    row.is_softmax = candidate.is_softmax;
    row.is_causal = candidate.is_causal;
    if (request_.source) {
      const Call call = candidate.On(ctx, tensors.tensors);
      if (call.compute) call.compute(ctx);
      for (const auto& stage : call.stages) stage(ctx);  // warms up memory and caches
      row.error = MeasureError(call.o, expected_.view());
      StageTimes times;
      times.Run(ctx, call, kLeastRuns, request_.seconds / 2 / static_cast<double>(count_));
      row.measured_seconds = times.total();
      row.kept = call.kept();
      row.predicted_sample_seconds = Predict(candidate, ctx, sample_, row.kept).value_or(kUnknown);
    }
    const double kept = request_.source ? candidate.KeptAt(row.kept, sample_, length_) : candidate.KeptOf(length_);
    row.predicted_seconds = Predict(candidate, ctx, length_, kept).value_or(kUnknown);
    row.memory = candidate.MemoryAt(ctx, At(length_), kept);
    const bool same_length = request_.source && sample_ == length_;
    row.seconds = same_length ? row.measured_seconds : row.predicted_seconds;
    if (std::isnan(row.seconds)) {
      throw InvalidArgument("the cost model has no prediction for " + std::string(heed::Name(row.dtype)) + " on " +
                            std::to_string(row.threads) + " threads");
    }
    if (request_.cluster) {
      try {
        row.divided = Divide(ctx, candidate, request_.purpose, At(length_), kept, row.seconds, *request_.cluster);
      } catch (const Unsupported& e) {
        row.not_divided = e.what();
      }
    }
    advice_.rows.push_back(row);
  }

  const Request& request_;
  Advice advice_;
  Sizes sizes_;
  int64_t length_ = 0, sample_ = 0;
  std::string file_;
  attention::Options exact_;
  std::map<int, std::unique_ptr<Context>> contexts_;
  std::map<DType, NamedTensors> qkv_;
  size_t count_ = 1, begun_ = 0;
  NamedTensors nothing_;
  Buffer expected_;
};

}  // namespace

int64_t SampleTokens(int64_t tokens, double seconds, double most) {
  if (seconds <= most) return tokens;
  constexpr int64_t kStep = 64;
  const auto sample = static_cast<int64_t>(static_cast<double>(tokens) * std::sqrt(most / seconds));
  return std::min(tokens, std::max(sample / kStep * kStep, kStep));
}

Advice Advise(const Request& request) { return Adviser(request).Run(); }

}  // namespace heed::advise
