// nsa in the harness: its entry, simple problems of any size, and the tolerance of kernels against the reference:
// attention's tolerance in each of three calls, times the gates. Where rounding may decide between two blocks, a row
// may have any value.
#include "heed/ops/sparse/nsa/nsa_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"
#include "heed/ops/sparse/nsa/nsa_reference_internal.h"

namespace heed::nsa {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const std::vector<std::string> kVariants = {"block=16", "stride=8", "length=32", "count=4", "window=64", "compressed"};

std::string Title(const Problem& p) {
  const Options& o = p.options;
  std::string text = std::string("nsa ") + Name(p.in.q.dtype());
  for (const auto& [name, value] : {std::pair{"block", o.block},
                                    {"stride", o.stride},
                                    {"count", o.count},
                                    {"window", o.window},
                                    {"length", o.length}}) {
    text += std::string(" ") + name + "=" + std::to_string(value);
  }
  for (const auto& [name, view] : {std::pair{"q", p.in.q},
                                   {"k", p.in.k},
                                   {"v", p.in.v},
                                   {"gates", p.in.gates},
                                   {"k_cmp", p.in.k_cmp},
                                   {"v_cmp", p.in.v_cmp}}) {
    text += sparse::Described(name, view);
  }
  if (o.scale) text += " scale=" + std::to_string(*o.scale);
  return text + " " + p.note;
}

// The error of rounding a sum to a dtype: a relative part, and a part for subnormal results.
struct Rounding {
  double share, subnormal, of_terms;  // and a part relative to the sum of the magnitudes of its terms
};
Rounding RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0x1p-53, 0, 0x1p-49};
    case DType::kBF16: return {1.01 * 0x1p-8, 0x1p-126, 0x1p-20};
    case DType::kF16: return {1.01 * 0x1p-11, 0x1p-25, 0x1p-20};
    default: return {0x1p-24, 0x1p-126, 0x1p-20};
  }
}

// One branch: its result in double, and attention's tolerance for it, by name.
struct BranchResult {
  std::map<std::string, TensorView> expected, allowed;
};

BranchResult ResultOf(Parts& parts, int c, bool backward) {
  attention::Problem p;
  p.in = {parts.in[c].q, parts.in[c].k, parts.in[c].v};
  p.options = parts.options[c];
  attention::DescribeOutputs(p);
  if (backward) {
    attention::DescribeGradients(p, 1);
    p.d_o = parts.in[c].d_o;
  }
  const Case of = backward ? attention::MakeBackwardCase(p, true) : attention::MakeCase(p);
  std::vector<TensorView> expected, allowed;
  BranchResult result;
  for (const OutputSpec& spec : of.outputs) {
    expected.push_back(result.expected[spec.name] = Zeros(parts, DType::kF64, spec.sizes));
    allowed.push_back(result.allowed[spec.name] = Zeros(parts, DType::kF64, spec.sizes));
  }
  of.reference(expected, allowed);
  return result;
}

class Tolerance {
 public:
  Tolerance(const Problem& p, std::span<const TensorView> views)
      : p_(p), views_(views), parts_(PartsOf(p.in, p.options)) {
    for (int c = 0; c < 3; ++c) branch_[c] = ResultOf(parts_, c, !p.gradients.empty());
    const std::vector<OutputSpec>& gradients = p.gradients;
    OfResults();
    for (size_t i = 0; i < gradients.size(); ++i) OfGradient(gradients[i].name, views[p.results.size() + i]);
    for (size_t row = 0; row < parts_.margins.size(); ++row) {
      const Margin& margin = parts_.margins[row];
      const auto [rounding, underflow] =
          p.in.q.dtype() == DType::kF64 ? std::pair{1e-12, 1e-290} : std::pair{1e-5, 1e-30};
      const bool is_close = margin.distance <= rounding * (1 + margin.magnitude) || margin.least < underflow;
      if (is_close) AllowAll(static_cast<int64_t>(row));
    }
  }

 private:
  double Gate(int64_t b, int64_t i, int64_t h, int64_t c) const { return ElementAt(p_.in.gates, {b, i, h, c}); }
  static double Sum(const Rounding& r, double value, double terms) {
    return r.share * std::abs(value) + r.of_terms * terms + r.subnormal;
  }

  void OfResults() const {
    const Rounding r = RoundingOf(p_.in.q.dtype());
    ForElements(views_[0], [&](int64_t b, int64_t i, int64_t h, int64_t e) {
      double value = 0, terms = 0, missed = 0;
      for (int c = 0; c < 3; ++c) {
        const double x = Gate(b, i, h, c) * ElementAt(branch_[c].expected.at("o"), {b, i, h, e});
        const double allowed = ElementAt(branch_[c].allowed.at("o"), {b, i, h, e});
        value += x;
        terms += std::abs(x);
        missed += std::abs(Gate(b, i, h, c)) * allowed;
        SetElementAt(Of(views_[1], c), {b, i, h, e}, allowed);
        SetElementAt(Of(views_[2], c), {b, h, i}, ElementAt(branch_[c].allowed.at("lse"), {b, h, i}));
      }
      SetElementAt(views_[0], {b, i, h, e}, missed + Sum(r, value, terms));
    });
    Fill(views_[3], 0);
  }

  // Adds one token's contribution to a gradient by branch c, or by its means.
  void Add(int c, const char* name, std::initializer_list<int64_t> at, double share, double& value, double& terms,
           double& missed) const {
    const double x = share * ElementAt(branch_[c].expected.at(name), at);
    value += x;
    terms += std::abs(x);
    missed += share * ElementAt(branch_[c].allowed.at(name), at);
  }

  void OfGradient(const std::string& name, const TensorView& view) const {
    const Rounding r = RoundingOf(p_.in.q.dtype());
    ForElements(view, [&](int64_t b, int64_t t, int64_t h, int64_t e) {
      double value = 0, terms = 0, missed = 0;
      if (name == "dgates") {
        for (int64_t d = 0; d < p_.in.d_o.size(3); ++d) {
          const double arriving = ElementAt(p_.in.d_o, {b, t, h, d}),
                       x = ElementAt(branch_[e].expected.at("o"), {b, t, h, d});
          value += arriving * x;
          terms += std::abs(arriving * x);
          missed += std::abs(arriving) * ElementAt(branch_[e].allowed.at("o"), {b, t, h, d});
        }
      } else if (name == "dq") {
        for (int c = 0; c < 3; ++c) Add(c, "dq", {b, t, h, e}, 1, value, terms, missed);
      } else if (name == "dk_cmp" || name == "dv_cmp") {
        Add(0, name == "dk_cmp" ? "dk" : "dv", {b, t, h, e}, 1, value, terms, missed);
      } else {
        for (int c = 1; c < 3; ++c) Add(c, name.c_str(), {b, t, h, e}, 1, value, terms, missed);
        const int64_t windows = parts_.means ? branch_[0].expected.at(name).size(1) : 0;
        for (int64_t w = 0; w < windows; ++w) {
          const bool is_inside = w * parts_.stride <= t && t < w * parts_.stride + parts_.length;
          if (is_inside)
            Add(0, name.c_str(), {b, w, h, e}, 1 / static_cast<double>(parts_.length), value, terms, missed);
        }
      }
      SetElementAt(view, {b, t, h, e}, missed + Sum(r, value, terms));
    });
  }

  // Allows any result for a row of a key head whose selection may differ.
  void AllowAll(int64_t row) const {
    const int64_t Hkv = p_.in.k.size(2), Tq = p_.in.q.size(1), group = p_.in.q.size(2) / Hkv;
    const int64_t key_head = row % Hkv, i = row / Hkv % Tq, b = row / Hkv / Tq;
    const auto fill = [&](const TensorView& view, int64_t token, int64_t head) {
      for (int64_t e = 0; e < view.size(3); ++e) SetElementAt(view, {b, token, head, e}, kInfinity);
    };
    fill(views_[3], i, key_head);
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      fill(views_[0], i, h);
      fill(Of(views_[1], kSelected), i, h);
      SetElementAt(Of(views_[2], kSelected), {b, h, i}, kInfinity);
    }
    for (size_t n = 0; n < p_.gradients.size(); ++n) {
      const std::string& name = p_.gradients[n].name;
      const TensorView& view = views_[p_.results.size() + n];
      if (name == "dk" || name == "dv") {
        for (int64_t t = 0; t < view.size(1); ++t) fill(view, t, key_head);
      } else if (name == "dq" || name == "dgates") {
        for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) fill(view, i, h);
      }
    }
  }

  static void Fill(const TensorView& view, double value) {
    ForElements(view, [&](int64_t a, int64_t b, int64_t c, int64_t d) { SetElementAt(view, {a, b, c, d}, value); });
  }

  const Problem& p_;
  std::span<const TensorView> views_;  // of results, then of gradients
  Parts parts_;
  BranchResult branch_[3];
};

// A case of the forward pass, followed by the backward pass if there are gradients: all outputs are compared.
Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.pass = p->gradients.empty() ? "forward" : "backward";
  c.outputs = p->results;
  c.outputs.insert(c.outputs.end(), p->gradients.begin(), p->gradients.end());
  const auto backward = [p](Context& ctx, std::span<const TensorView> views) {
    BackwardInputs in = p->in;
    in.branches = views[1];
    in.lse = views[2];
    in.blocks = views[3];
    Backward(ctx, in, p->options, ToGradients(p->gradients, views.subspan(4)));
  };
  c.run = [p, backward](Context& ctx, std::span<const TensorView> views) {
    Forward(ctx, p->in, p->options, ToOutputs(views));
    if (!p->gradients.empty()) backward(ctx, views);
  };
  if (p->gradients.empty()) {
    c.timed = [p](Context& ctx, std::span<const TensorView> views) {
      Forward(ctx, p->in, p->options, {views[0], {}, {}, {}});
    };
  } else {
    c.timed = backward;
  }
  c.reference = [p](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    const Buffer blocks(DType::kI32, expected[3].sizes());
    Reference(p->in, p->options, {expected[0], expected[1], expected[2], blocks.view()});
    ForElements(expected[3], [&](int64_t a, int64_t b, int64_t d, int64_t e) {
      SetElementAt(expected[3], {a, b, d, e}, blocks.Get({a, b, d, e}));
    });
    if (!p->gradients.empty()) BackwardReference(p->in, p->options, ToGradients(p->gradients, expected.subspan(4)));
    if (!tolerance.empty()) Tolerance(*p, tolerance);
  };
  for (const ConstTensorView& view : {p->in.q, p->in.k, p->in.v, p->in.gates, p->in.k_cmp, p->in.v_cmp, p->in.d_o}) {
    c.bytes += mechanism::Bytes(view);
  }
  c.bytes += sparse::BytesOf(c.outputs);
  return c;
}

// Tk tokens, of which the last ones, at most Tq, are rows.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  sparse::CheckRequest("nsa", request, kVariants);
  Problem p;
  p.note = request.variant;
  Options& o = p.options;
  const mechanism::Words words(request.variant);
  for (const auto& [name, field] : {std::pair{"block", &Options::block},
                                    {"stride", &Options::stride},
                                    {"count", &Options::count},
                                    {"window", &Options::window},
                                    {"length", &Options::length}}) {
    if (const auto value = words.Number(name)) o.*field = static_cast<int64_t>(*value);
  }
  uint64_t seed = request.seed * 16;
  const int64_t Tq = std::min(s.Tq, s.Tk);
  const auto tensor = [&](int64_t tokens, int64_t heads, int64_t channels) {
    return p.Keep(Buffer(request.dtype, {s.B, tokens, heads, channels}, Placement::kAligned).FillNormal(++seed));
  };
  p.in.q = tensor(Tq, s.Hq, s.D);
  p.in.k = tensor(s.Tk, s.Hkv, s.D);
  p.in.v = tensor(s.Tk, s.Hkv, s.Dv);
  p.in.gates = tensor(Tq, s.Hq, 3);
  const int64_t length = o.length == 0 ? o.block : o.length, stride = o.stride == 0 ? o.block : o.stride;
  const auto windows = [&](int64_t tokens) { return tokens < length ? 0 : (tokens - length) / stride + 1; };
  if (words.Has("compressed")) {
    p.in.k_cmp = tensor(windows(s.Tk), s.Hkv, s.D);
    p.in.v_cmp = tensor(windows(s.Tk), s.Hkv, s.Dv);
  }
  if (request.pass == "backward") p.in.d_o = tensor(Tq, s.Hq, s.Dv);
  Describe(p);
  Case c = ToCase(p);
  double compressed = 0, others = 0;
  const int64_t columns = Columns(o, s.Tk);
  for (int64_t position = s.Tk - Tq; position < s.Tk; ++position) {
    const int64_t before = std::min(columns - 1, position / o.block) * o.block;
    compressed += static_cast<double>(windows(position + 1));
    others += static_cast<double>(before + position % o.block + 1 + std::min(position + 1, o.window));
  }
  const auto rows = static_cast<double>(s.B * s.Hq), D = static_cast<double>(s.D), Dv = static_cast<double>(s.Dv);
  c.pairs = rows * (compressed + others);
  c.flops =
      request.pass == "backward" ? 2 * c.pairs * (3 * D + 2 * Dv) : 2 * (c.pairs * (D + Dv) + rows * compressed * D);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) { return ToCase(RandomProblem(dtype, seed)); }

// The problem of CLI verbs on a file that has gates.
std::shared_ptr<Problem> ProblemOn(const TensorMap& tensors, std::optional<double> scale) {
  const auto p = std::make_shared<Problem>();
  for (const auto& [name, view] : {std::pair{"q", &p->in.q},
                                   {"k", &p->in.k},
                                   {"v", &p->in.v},
                                   {"gates", &p->in.gates},
                                   {"k_cmp", &p->in.k_cmp},
                                   {"v_cmp", &p->in.v_cmp},
                                   {"d_o", &p->in.d_o}}) {
    if (const auto found = tensors.find(name); found != tensors.end()) *view = found->second;
  }
  p->options.scale = scale;
  return p;
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  const Explanation plan = Explain(ctx, p->in, p->options);  // throws if the arguments are invalid
  Describe(*p);
  return sparse::CallOf(plan, p->results[0], true, [p](Context& run_ctx, const TensorView& out) {
    Forward(run_ctx, p->in, p->options, {out, {}, {}, {}});
  });
}

TensorCall TrainOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  Explanation plan = Explain(ctx, p->in, p->options);
  Describe(*p);
  const Gradients planned = ToGradients(p->gradients, sparse::ViewsOf(p->gradients));
  plan.workspace_bytes = std::max(plan.workspace_bytes, BackwardWorkspace(ctx, p->in, p->options, planned));
  return sparse::TrainingOf(plan, ToCase(*p), true);
}

}  // namespace

void Describe(Problem& p) {
  const DType dtype = p.in.q.dtype();
  const int64_t B = p.in.q.size(0), Tq = p.in.q.size(1), Hq = p.in.q.size(2), Hkv = p.in.k.size(2), Dv = p.in.v.size(3);
  p.results = {{"o", dtype, {B, Tq, Hq, Dv}, {}},
               {"branches", dtype, {3, B, Tq, Hq, Dv}, {}},
               {"lse", mechanism::StateDType(dtype), {3, B, Hq, Tq}, {}},
               {"blocks", DType::kI32, {B, Tq, Hkv, Columns(p.options, p.in.k.size(1))}, {}}};
  p.gradients.clear();
  if (!p.in.d_o) return;
  for (const auto& [name, of] : {std::pair{"dq", p.in.q},
                                 {"dk", p.in.k},
                                 {"dv", p.in.v},
                                 {"dgates", p.in.gates},
                                 {"dk_cmp", p.in.k_cmp},
                                 {"dv_cmp", p.in.v_cmp}}) {
    if (of) p.gradients.push_back(sparse::LikeTensor(name, of));
  }
}

Outputs ToOutputs(std::span<const TensorView> views) { return {views[0], views[1], views[2], views[3]}; }

Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {{"dq", &out.dq},         {"dk", &out.dk},
                                                     {"dv", &out.dv},         {"dgates", &out.dgates},
                                                     {"dk_cmp", &out.dk_cmp}, {"dv_cmp", &out.dv_cmp}};
  for (size_t i = 0; i < views.size(); ++i) *places.at(specs[i].name) = views[i];
  return out;
}

OpEntry Entry() {
  return {.name = "nsa",
          .family = "sparse",
          .passes = {"forward", "backward"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = kVariants,
          .flops =
              "2 (D + Dv) per kept pair and 2 D per compressed one, backward 2 (3 D + 2 Dv) per kept pair; "
              "B Hq T (T / (2 stride) + count block + window) pairs",
          .bytes = "(B T Hq (D + Dv + 3) + B T Hkv (D + Dv)) size",
          .state = "B Hkv (T + T / stride) (D + Dv) size",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"q", "BTHK"},
                     {"k", "BTGK"},
                     {"v", "BTGV"},
                     {"gates", "BTHE"},
                     {"k_cmp", "BNGK", true},
                     {"v_cmp", "BNGV", true}},
          .call = &CallOn,
          .train = &TrainOn};
}

}  // namespace heed::nsa
