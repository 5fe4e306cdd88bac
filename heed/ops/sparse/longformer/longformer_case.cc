// Longformer in the harness: its entry, simple problems of any size, and the tolerance of kernels against the
// reference, which is attention's tolerance in each of two calls.
#include "heed/ops/sparse/longformer/longformer_case.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/ops/sparse/longformer/longformer_reference_internal.h"

namespace heed::longformer {
namespace {

using Shape = std::vector<int64_t>;

const std::vector<std::string> kVariants = {"window=512", "tokens=16",   "shared",   "lengths=62",
                                            "softcap=30", "dropout=0.1", "invariant"};

std::string Title(const Problem& p) {
  const Options& o = p.options;
  std::string text =
      std::string("longformer ") + Name(p.in.q.dtype()) + " window=" + std::to_string(o.window) + " tokens=";
  Shape index(o.tokens.sizes().size());
  if (o.tokens.num_elements() > 0) {
    do text += std::to_string(static_cast<int64_t>(GetElement(o.tokens, index))) + ",";
    while (NextIndex(o.tokens.sizes(), index));
  }
  for (const auto& [name, view] : {std::pair{"q", p.in.q},
                                   {"k", p.in.k},
                                   {"v", p.in.v},
                                   {"qg", p.in.qg},
                                   {"kg", p.in.kg},
                                   {"vg", p.in.vg},
                                   {"tokens", o.tokens},
                                   {"key_lengths", o.key_lengths},
                                   {"key_starts", o.key_starts},
                                   {"query_lengths", o.query_lengths},
                                   {"cu_seqlens_q", o.cu_seqlens_q}}) {
    text += sparse::Described(name, view);
  }
  if (p.in.d_lse) text += " d_lse";
  if (o.scale) text += " scale=" + std::to_string(*o.scale);
  if (o.softcap > 0) text += " softcap=" + std::to_string(o.softcap);
  if (o.dropout > 0) text += " dropout=" + std::to_string(o.dropout);
  if (o.invariant) text += " invariant";
  return text + " " + p.note;
}

// Allocates f64 memory for the outputs of a call of attention.
std::vector<TensorView> Room(const std::vector<OutputSpec>& specs, std::vector<Buffer>& memory) {
  std::vector<TensorView> views;
  for (const OutputSpec& spec : specs) {
    memory.emplace_back(DType::kF64, spec.sizes).FillConstant(0);
    views.push_back(memory.back().view());
  }
  return views;
}

// The tolerances of one of the two calls, by the names of its outputs.
std::map<std::string, TensorView> ToleranceOf(const Half& half, const std::vector<std::string>& gradients,
                                              std::vector<Buffer>& memory) {
  attention::Problem p;
  p.in = {half.in.q, half.in.k, half.in.v};
  p.options = half.options;
  attention::DescribeOutputs(p);
  if (!gradients.empty()) {
    attention::DescribeGradients(p, 1);
    p.d_o = half.in.d_o;
    p.d_lse = half.in.d_lse;
    std::erase_if(p.gradients, [&](const OutputSpec& spec) { return !std::ranges::count(gradients, spec.name); });
  }
  const Case c = gradients.empty() ? attention::MakeCase(p) : attention::MakeBackwardCase(p, true);
  const std::vector<TensorView> expected = Room(c.outputs, memory), allowed = Room(c.outputs, memory);
  c.reference(expected, allowed);
  std::map<std::string, TensorView> tolerance;
  for (size_t i = 0; i < allowed.size(); ++i) tolerance[c.outputs[i].name] = allowed[i];
  return tolerance;
}

void Copy(const ConstTensorView& from, const TensorView& to) {
  if (from.num_elements() == 0) return;
  Shape index(from.sizes().size());
  do SetElement(to, index, GetElement(from, index));
  while (NextIndex(from.sizes(), index));
}

void StoreTolerance(const Problem& p, std::span<const TensorView> tolerance) {
  const Halves halves = HalvesOf(p.in, p.options);
  std::vector<std::string> of_all, of_tokens;
  for (const OutputSpec& spec : p.gradients) {
    const bool own = spec.name.size() == 3;
    (own ? of_tokens : of_all).push_back(spec.name.substr(0, 2));
  }
  std::vector<Buffer> memory;
  const bool backward = !p.gradients.empty();
  if (backward && of_all.empty()) of_all = {"dq"};
  const auto all = ToleranceOf(halves.all, of_all, memory);
  std::map<std::string, TensorView> tokens;
  if (p.in.qg) {
    if (backward && of_tokens.empty()) of_tokens = {"dq"};
    tokens = ToleranceOf(halves.tokens, of_tokens, memory);
  }
  const auto store = [&](const OutputSpec& spec, const TensorView& to) {
    const bool own = spec.name.size() == 3 && spec.name != "lse";
    if (!own) Copy(all.at(spec.name), to);
    if (own && spec.name != "dqg") Copy(tokens.at(spec.name.substr(0, 2)), to);
    if (own && spec.name == "dqg") PutRows(halves, tokens.at("dq"), to);
    if (p.in.qg && spec.name == "o") PutRows(halves, tokens.at("o"), to);
    if (p.in.qg && spec.name == "lse") PutLse(halves, tokens.at("lse"), to);
  };
  for (const TensorView& view : tolerance) {  // no error where nothing is computed
    Shape index(view.sizes().size());
    if (view.num_elements() == 0) continue;
    do SetElement(view, index, 0);
    while (NextIndex(view.sizes(), index));
  }
  for (size_t i = 0; i < tolerance.size(); ++i) {
    store(i < p.results.size() ? p.results[i] : p.gradients[i - p.results.size()], tolerance[i]);
  }
}

// A case of the forward pass, followed by the backward pass if there are gradients: all outputs are compared.
Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.pass = p->gradients.empty() ? "forward" : "backward";
  c.outputs = p->results;
  c.outputs.insert(c.outputs.end(), p->gradients.begin(), p->gradients.end());
  const auto backward = [p](Context& ctx, const ConstTensorView& o, const ConstTensorView& lse,
                            std::span<const TensorView> gradients) {
    BackwardInputs in = p->in;
    in.o = o;
    in.lse = lse;
    Backward(ctx, in, p->options, ToGradients(p->gradients, gradients));
  };
  c.run = [p, backward](Context& ctx, std::span<const TensorView> views) {
    Forward(ctx, p->in, p->options, {views[0], views[1]});
    if (!p->gradients.empty()) backward(ctx, views[0], views[1], views.subspan(2));
  };
  if (!p->gradients.empty()) {  // the timed backward pass follows a run of the forward pass
    c.timed = [backward](Context& ctx, std::span<const TensorView> views) {
      backward(ctx, views[0], views[1], views.subspan(2));
    };
  }
  c.reference = [p](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    Reference(p->in, p->options, {expected[0], expected[1]});
    if (!p->gradients.empty()) BackwardReference(p->in, p->options, ToGradients(p->gradients, expected.subspan(2)));
    if (!tolerance.empty()) StoreTolerance(*p, tolerance);
  };
  for (const ConstTensorView& view : {p->in.q, p->in.k, p->in.v, p->in.kg, p->in.vg, p->in.d_o}) {
    c.bytes += mechanism::Bytes(view);
  }
  c.bytes += sparse::BytesOf(c.outputs);
  return c;
}

// T = Tq tokens, two of them global and evenly spaced, with separate projections.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  sparse::CheckRequest("longformer", request, kVariants);
  Problem p;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](int64_t heads, int64_t channels) {
    return p.Keep(Buffer(request.dtype, {s.B, s.Tq, heads, channels}, Placement::kAligned).FillNormal(++seed));
  };
  p.in.q = tensor(s.Hq, s.D);
  p.in.k = tensor(s.Hkv, s.D);
  p.in.v = tensor(s.Hkv, s.Dv);
  Options& o = p.options;
  o.window = 64;
  const mechanism::Words words(request.variant);
  const auto number = [&](const char* word, double otherwise, const auto& set) {
    if (const auto value = words.Number(word, otherwise)) set(*value);
  };
  int64_t tokens = 2;
  number("window", 512, [&](double window) { o.window = static_cast<int64_t>(window); });
  number("tokens", 16, [&](double count) { tokens = static_cast<int64_t>(count); });
  number("softcap", 30, [&](double cap) { o.softcap = cap; });
  number("dropout", 0.1, [&](double share) { o.dropout = share, o.seed = request.seed; });
  number("lengths", 62, [&](double percent) {
    const double keys = std::floor(static_cast<double>(s.Tq) * percent / 100);
    o.key_lengths = p.Keep(Buffer(DType::kI64, {s.B}).FillConstant(keys));
  });
  o.invariant = words.Has("invariant");
  tokens = std::min(tokens, s.Tq);
  const Buffer global(DType::kI64, {tokens});
  for (int64_t i = 0; i < tokens; ++i) global.Set({i}, static_cast<double>(i * s.Tq / tokens));
  o.tokens = p.Keep(global);
  if (!words.Has("shared")) {
    p.in.qg = tensor(s.Hq, s.D);
    p.in.kg = tensor(s.Hkv, s.D);
    p.in.vg = tensor(s.Hkv, s.Dv);
  }
  if (request.pass == "backward") p.in.d_o = tensor(s.Hq, s.Dv);
  Describe(p);
  Case c = ToCase(p);
  // Counts pairs from shapes only, ignoring the overlap of the columns of global tokens with the window.
  const double keys = std::min(static_cast<double>(o.window / 2 * 2 + 1 + tokens), static_cast<double>(s.Tq));
  const auto T = static_cast<double>(s.Tq), n = static_cast<double>(tokens);
  c.pairs = static_cast<double>(s.B * s.Hq) * ((T - n) * keys + n * T);
  if (o.key_lengths && T > 0 && s.B > 0) c.pairs *= static_cast<double>(o.key_lengths.as<int64_t>()[0]) / T;
  c.flops = 2 * c.pairs * static_cast<double>(request.pass == "backward" ? 3 * s.D + 2 * s.Dv : s.D + s.Dv);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) { return ToCase(RandomProblem(dtype, seed)); }

// The problem of CLI verbs on a file: Longformer's own window, and the first token as global.
std::shared_ptr<Problem> ProblemOn(const TensorMap& tensors, std::optional<double> scale) {
  const auto p = std::make_shared<Problem>();
  const auto find = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  p->in.q = tensors.at("q");
  p->in.k = tensors.at("k");
  p->in.v = tensors.at("v");
  p->in.qg = find("qg");
  p->in.kg = find("kg");
  p->in.vg = find("vg");
  p->in.d_o = find("d_o");
  p->options.window = 512;
  p->options.tokens = p->Keep(Buffer(DType::kI64, {1}).FillConstant(0));
  p->options.scale = scale;
  return p;
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  const Explanation plan = Explain(ctx, p->in, p->options);  // throws if the arguments are invalid
  Describe(*p);
  return sparse::CallOf(plan, p->results[0], false, [p](Context& run_ctx, const TensorView& out) {
    Forward(run_ctx, p->in, p->options, {out, {}});
  });
}

TensorCall TrainOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  Explanation plan = Explain(ctx, p->in, p->options);
  Describe(*p);
  const Gradients planned = ToGradients(p->gradients, sparse::ViewsOf(p->gradients));
  plan.workspace_bytes = std::max(plan.workspace_bytes, BackwardWorkspace(ctx, p->in, p->options, planned));
  return sparse::TrainingOf(plan, ToCase(*p), false);
}

}  // namespace

void Describe(Problem& p) {
  attention::Problem like;
  like.in = {p.in.q, p.in.k, p.in.v};
  like.options.cu_seqlens_q = p.options.cu_seqlens_q;
  attention::DescribeOutputs(like);
  p.results = {like.o, like.lse};
  p.gradients.clear();
  if (!p.in.d_o) return;
  for (const auto& [name, of] : {std::pair{"dq", p.in.q},
                                 {"dk", p.in.k},
                                 {"dv", p.in.v},
                                 {"dqg", p.in.qg},
                                 {"dkg", p.in.kg},
                                 {"dvg", p.in.vg}}) {
    if (of) p.gradients.push_back(sparse::LikeTensor(name, of));
  }
}

Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {{"dq", &out.dq},   {"dk", &out.dk},   {"dv", &out.dv},
                                                     {"dqg", &out.dqg}, {"dkg", &out.dkg}, {"dvg", &out.dvg}};
  for (size_t i = 0; i < views.size(); ++i) *places.at(specs[i].name) = views[i];
  return out;
}

OpEntry Entry() {
  return {
      .name = "longformer",
      .family = "sparse",
      .passes = {"forward", "backward"},
      .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
      .variants = kVariants,
      .flops = "2 (D + Dv) per kept pair, backward 2 (3 D + 2 Dv); B Hq (T (window + 1) + 2 n T) pairs for n tokens",
      .bytes = "(B T Hq (D + Dv) + 2 B T Hkv (D + Dv)) size + lse",
      .state = "none: tokens see all keys",
      .make_case = &MakeCase,
      .random_case = &RandomCase,
      .inputs = {{"q", "BTHK"},
                 {"k", "BTHK"},
                 {"v", "BTHV"},
                 {"qg", "BTHK", true},
                 {"kg", "BTHK", true},
                 {"vg", "BTHV", true}},
      .call = &CallOn,
      .keywords = ", window=512, tokens=[0]",
      .train = &TrainOn};
}

}  // namespace heed::longformer
