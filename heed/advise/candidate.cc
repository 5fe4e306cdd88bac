// Common parts of candidates.
#include "heed/advise/candidate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

// Memory of a call of both passes.
struct Training {
  Buffer o, lse, d_o, dq, dk, dv;

  explicit Training(const attention::Inputs& in)
      : o(in.q.dtype(), {in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}, Placement::kAligned),
        lse(in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {in.q.size(0), in.q.size(2), in.q.size(1)},
            Placement::kAligned),
        d_o(OrdinaryNumbers(in.q.dtype(), o.view().sizes())), dq(in.q.dtype(), in.q.sizes(), Placement::kAligned),
        dk(in.k.dtype(), in.k.sizes(), Placement::kAligned), dv(in.v.dtype(), in.v.sizes(), Placement::kAligned) {}

  void Run(Context& ctx, const attention::Inputs& in, const attention::Options& options) const {
    attention::Forward(ctx, in, options, {o.view(), lse.view()});
    attention::Backward(ctx, {in.q, in.k, in.v, o.view(), lse.view(), d_o.view(), {}}, options,
                        {dq.view(), dk.view(), dv.view(), {}, {}, {}, {}, {}});
  }
};

}  // namespace

const char* Name(Purpose purpose) {
  switch (purpose) {
    case Purpose::kPrefill: return "prefill";
    case Purpose::kTraining: return "training";
    case Purpose::kDecode: return "decode";
  }
  return "";
}

Division Candidate::DivisionAt(const Context&, const Sizes&) const { throw Unsupported(kTakesNoGroup); }

double Candidate::KeptOf(int64_t) const { return 1; }

double Candidate::KeptAt(double kept, int64_t, int64_t) const { return kept; }

attention::Inputs InputsOf(const Sizes& s, DType dtype) {
  return {ConstTensorView(nullptr, dtype, {s.B, s.Tq, s.Hq, s.D}),
          ConstTensorView(nullptr, dtype, {s.B, s.Tk, s.Hkv, s.D}),
          ConstTensorView(nullptr, dtype, {s.B, s.Tk, s.Hkv, s.Dv})};
}

attention::Inputs InputsOf(const TensorMap& tensors) {
  return {tensors.at(tensors.contains("q") ? "q" : "r"), tensors.at("k"), tensors.at("v")};
}

Sizes SizesOf(const attention::Inputs& in) {
  return {in.q.size(0), in.q.size(1), in.k.size(1), in.q.size(2), in.k.size(2), in.q.size(3), in.v.size(3)};
}

double SizeIn(DType dtype) { return static_cast<double>(SizeOf(dtype)); }

double Rows(const Sizes& s) { return static_cast<double>(s.B * s.Hq) * static_cast<double>(s.Tq); }

double VisiblePairs(const Sizes& s, bool causal) {
  const auto T = static_cast<double>(s.Tk);
  return static_cast<double>(s.B * s.Hq) * (causal ? T * (T + 1) / 2 : T * T);
}

double ArgumentBytes(const Sizes& s, DType dtype) {
  const auto queries = static_cast<double>(s.B * s.Tq * s.Hq);
  return queries * static_cast<double>(s.D + s.Dv) * SizeIn(dtype) + KeyValueBytes(s, dtype, s.Tk);
}

double KeyValueBytes(const Sizes& s, DType dtype, int64_t tokens) {
  return static_cast<double>(s.B * s.Hkv * (s.D + s.Dv)) * static_cast<double>(tokens) * SizeIn(dtype);
}

double TrainingBytes(const Sizes& s, DType dtype) {
  return ArgumentBytes(s, dtype) + Rows(s) * (dtype == DType::kF64 ? 8 : 4);
}

void AddBytes(double bytes, Load& load) {
  constexpr std::pair<const char*, double> kSizes[] = {
      {"byte_256K", 0x1p18}, {"byte_1M", 0x1p20}, {"byte_4M", 0x1p22}, {"byte_16M", 0x1p24}, {"byte_64M", 0x1p26}};
  const double last = static_cast<double>(std::size(kSizes) - 1);
  const double place = bytes > 0 ? std::clamp(std::log2(bytes / kSizes[0].second) / 2, 0.0, last) : 0;
  const double below = std::min(std::floor(place), last - 1), share = place - below;
  load[kSizes[static_cast<size_t>(below)].first] += (1 - share) * bytes;
  load[kSizes[static_cast<size_t>(below) + 1].first] += share * bytes;
}

Buffer OrdinaryNumbers(DType dtype, std::span<const int64_t> sizes, uint64_t seed) {
  const Buffer buffer(dtype, sizes, Placement::kAligned);
  uint64_t x = seed * 0x9E3779B97F4A7C15 + 1;
  for (int64_t i = 0, n = buffer.view().num_elements(); i < n; ++i) {  // xorshift: Marsaglia, "Xorshift RNGs", 2003
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    StoreDouble(dtype, buffer.view().data(), i, static_cast<double>(static_cast<int64_t>(x)) * 0x1p-63);
  }
  return buffer;
}

void AddPasses(Call& call, Purpose purpose, const attention::Inputs& in, std::function<attention::Options()> options) {
  if (purpose == Purpose::kTraining) {
    const auto training = Keep(call, std::make_shared<Training>(in));
    call.o = training->o.view();
    call.stages.emplace_back([training, in, options](Context& ctx) { training->Run(ctx, in, options()); });
    return;
  }
  const Buffer o(in.q.dtype(), {in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}, Placement::kAligned);
  call.o = o.view();
  call.stages.emplace_back([o, in, options](Context& ctx) { attention::Forward(ctx, in, options(), {o.view(), {}}); });
}

double PassesWorkspace(const Context& ctx, Purpose purpose, const attention::Inputs& in,
                       const attention::Options& options) {
  int64_t bytes = attention::Workspace(ctx, in, options);
  if (purpose == Purpose::kTraining) {
    const auto like = [](const ConstTensorView& x) { return TensorView(nullptr, x.dtype(), x.sizes()); };
    const attention::Gradients gradients = {like(in.q), like(in.k), like(in.v), {}, {}, {}, {}, {}};
    bytes = std::max(bytes, attention::BackwardWorkspace(ctx, {in.q, in.k, in.v, {}, {}, {}, {}}, options, gradients));
  }
  return static_cast<double>(bytes);
}

bool IsUnrestricted(const attention::Options& options) {
  return options.window.left < 0 && options.window.right < 0 && !options.pattern.present();
}

std::vector<int64_t> Widths(int64_t tokens) {
  std::set<int64_t> widths;
  for (const int64_t part : {2, 4, 8}) {
    const int64_t width = tokens / part / kWidthStep * kWidthStep;
    if (width >= kWidthStep) widths.insert(width);
  }
  return {widths.rbegin(), widths.rend()};
}

std::string NumberText(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return {text, end};
}

std::string OptionsPython(const attention::Options& options) {
  std::string text;
  if (options.causal) text += ", causal=True";
  const auto& [left, right] = options.window;
  if (left >= 0 || right >= 0) text += ", window=(" + std::to_string(left) + ", " + std::to_string(right) + ")";
  if (options.scale) text += ", scale=" + NumberText(*options.scale);
  if (options.softcap > 0) text += ", softcap=" + NumberText(options.softcap);
  if (options.pattern.present()) text += ", pattern=pattern";
  return text;
}

void SetKind(const Question& question, DType dtype, int threads, Candidate& candidate) {
  candidate.dtype = dtype;
  candidate.threads = threads;
  if (threads == question.threads) return;
  candidate.options += ", one thread";
  candidate.python.insert(candidate.python.size() - 1, ", threads=1");
}

Candidates AttentionCandidates(const Question& question) {
  Candidates candidates;
  if (question.purpose == Purpose::kDecode) {
    AddCached(question, candidates);
  } else {
    AddWhole(question, candidates);
    AddSelected(question, candidates);
    AddCertified(question, candidates);
  }
  return candidates;
}

}  // namespace heed::advise
