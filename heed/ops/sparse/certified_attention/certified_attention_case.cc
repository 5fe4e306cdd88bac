// Certified attention in the harness. The dropped keys depend on the CPU, so the reference is dense attention: o may
// differ from it by attention's tolerance plus the effect of a dropped probability epsilon, and a bound is between 0
// and epsilon. certified_attend_test.cc checks that bounds hold.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_case.h"
#include "heed/ops/sparse/certified_attention/certified_options_case.h"
#include "heed/state/kv_cache.h"

namespace heed::certified_attention {
namespace {

using Shape = std::vector<int64_t>;

// A problem of dense attention, and the options of certified attention.
struct Problem {
  attention::Problem dense;
  double epsilon = 0.02;
  Level level = Level::kAuto;
  bool step = false;

  Options options() const { return {dense.options, epsilon, level}; }
};

// Replaces each element x by f(x).
template <class F>
void Change(const TensorView& t, const F& f) {
  if (t.num_elements() == 0) return;
  Shape index(t.sizes().size());
  do SetElement(t, index, f(GetElement(t, index)));
  while (NextIndex(t.sizes(), index));
}
void Add(const TensorView& t, double more) {
  Change(t, [&](double x) { return x + more; });
}
void Fill(const TensorView& t, double with) {
  Change(t, [&](double) { return with; });
}

double Largest(const ConstTensorView& t) {
  double most = 0;
  Shape index(t.sizes().size());
  if (t.num_elements() == 0) return 0;
  do most = std::max(most, std::abs(GetElement(t, index)));
  while (NextIndex(t.sizes(), index));
  return most;
}

std::string NameOf(Level level) {
  switch (level) {
    case Level::kAuto: return "auto";
    case Level::kSketch: return "sketch";
    case Level::kBox: return "box";
    case Level::kSkip: return "skip";
  }
  return "";
}

Case ToCase(Problem problem) {
  attention::DescribeOutputs(problem.dense);
  // With a large sink, almost all keys may be dropped, which the lse, without the sink, does not bound.
  const bool has_lse = !problem.dense.options.sinks.present();
  if (!has_lse) problem.dense.lse = {};
  const size_t of_bound = has_lse ? 2 : 1;
  const auto p = std::make_shared<const Problem>(problem);
  const ConstTensorView &q = p->dense.in.q, &k = p->dense.in.k, &v = p->dense.in.v;
  Case c = attention::MakeCase(p->dense);
  c.title = "certified_attention epsilon=" + std::to_string(p->epsilon) + " " + NameOf(p->level) + " " + c.title;
  const auto dense = c.reference;
  c.outputs.push_back({"bound", DType::kF32, p->dense.LseSizes(), {}});
  c.reference = [p, dense, v, of_bound](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    dense(expected.first(of_bound), tolerance.empty() ? tolerance : tolerance.first(of_bound));
    Fill(expected[of_bound], p->epsilon / 2);
    if (tolerance.empty()) return;
    Add(tolerance[0], 2 * p->epsilon * Largest(v));
    if (of_bound == 2) Add(tolerance[1], -std::log1p(-p->epsilon));
    Fill(tolerance[of_bound], p->epsilon / 2);
  };
  const auto outputs = [of_bound](std::span<const TensorView> views) {
    return Outputs{views[0], views[of_bound], of_bound == 2 ? views[1] : TensorView(), {}};
  };
  c.run = [p, outputs](Context& ctx, std::span<const TensorView> views) {
    Forward(ctx, {p->dense.in.q, p->dense.in.k, p->dense.in.v}, p->options(), outputs(views));
  };
  if (!p->step) return c;
  c.pass = "step";
  const int64_t Tk = k.size(1), added = std::min(q.size(1), Tk);
  const auto cache =
      std::make_shared<KVCache>(KVCache::Options{.batch = q.size(0),
                                                 .heads = k.size(2),
                                                 .dim = k.size(3),
                                                 .value_dim = v.size(3),
                                                 .dtype = q.dtype(),
                                                 .sketch = p->level == Level::kSkip ? Sketch::kNone : Sketch::kInt8});
  cache->Append(k.Slice(1, 0, Tk - added), v.Slice(1, 0, Tk - added));
  cache->Append(k.Slice(1, Tk - added, Tk), v.Slice(1, Tk - added, Tk));
  c.run = [p, cache, outputs](Context& ctx, std::span<const TensorView> views) {
    Attend(ctx, cache->view(), p->dense.in.q, p->options(), outputs(views));
  };
  return c;
}

Case MakeCase(const CaseRequest& request) {
  Problem p;
  p.step = request.pass == "step";
  if (!p.step && request.pass != "forward") {
    throw InvalidArgument("certified_attention: pass is " + request.pass + ", expected forward or step");
  }
  const Sizes& s = request.sizes;
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](int64_t tokens, int64_t heads, int64_t channels) {
    p.dense.memory.push_back(
        Buffer(request.dtype, {s.B, tokens, heads, channels}, Placement::kAligned).FillNormal(++seed));
    return ConstTensorView(p.dense.memory.back().view());
  };
  p.dense.in.q = tensor(p.step ? 1 : s.Tq, s.Hq, s.D);
  p.dense.in.k = tensor(s.Tk, s.Hkv, s.D);
  p.dense.in.v = tensor(s.Tk, s.Hkv, s.Dv);
  p.dense.options.causal = p.step;
  constexpr std::string_view kEpsilon = "epsilon=";
  for (size_t begin = 0; begin < request.variant.size();) {
    const size_t end = std::min(request.variant.find('+', begin), request.variant.size());
    const std::string word = request.variant.substr(begin, end - begin);
    begin = end + 1;
    if (word == "causal") {
      p.dense.options.causal = true;
    } else if (word == "sketch" || word == "skip") {
      p.level = word == "skip" ? Level::kSkip : Level::kSketch;
    } else if (word.starts_with(kEpsilon)) {
      p.epsilon = std::stod(word.substr(kEpsilon.size()));
    } else {
      throw InvalidArgument("certified_attention: variant is " + word + ", expected one of Entry().variants");
    }
  }
  Case c = ToCase(p);
  const auto keys = static_cast<double>(s.Tk), rows = static_cast<double>(p.dense.in.q.size(1));
  const bool causal = p.dense.options.causal && rows > 0;
  c.pairs = static_cast<double>(s.B * s.Hq) * rows * std::max(keys - (causal ? (rows - 1) / 2 : 0), 0.0);
  c.flops = 2 * c.pairs * static_cast<double>(s.D + s.Dv);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) {
  Random random(seed, 5);
  Problem p;
  const int64_t B = random.Integer(1, 2), Hkv = random.Integer(1, 2), Hq = Hkv * random.Pick<int64_t>({1, 1, 2, 5});
  const int64_t Tk = random.Chance(0.5) ? random.Integer(1, 200) : random.Integer(200, 700);
  const int64_t Tq = std::min(Tk, random.Chance(0.5) ? random.Integer(1, 4) : random.Integer(1, 80));
  const int64_t D = random.Integer(1, 40), Dv = random.Integer(1, 20);
  p.step = random.Chance(0.5);
  p.level = random.Pick({Level::kAuto, Level::kSketch, Level::kBox, Level::kSkip});
  p.epsilon = random.Pick({0.0, 0.02, 0.2, 0.9});
  const auto tensor = [&](int64_t tokens, int64_t heads, int64_t channels) {
    Shape strides = {tokens * heads * channels, heads * channels, channels, 1};
    if (random.Chance(0.3)) strides = {tokens * heads * channels, channels, tokens * channels, 1};
    const Placement placement = random.Pick({Placement::kAfterGuard, Placement::kBeforeGuard});
    p.dense.memory.push_back(
        Buffer(dtype, Shape{B, tokens, heads, channels}, strides, placement, random.Integer(0, 5)));
    return p.dense.memory.back();
  };
  const Buffer q = tensor(Tq, Hq, D), k = tensor(Tk, Hkv, D), v = tensor(Tk, Hkv, Dv);
  // Leaves out huge keys, for which a kernel's logits exceed the reference's tolerance, and non-finite ones.
  FillKeys(random.Pick({Keys::kNormal, Keys::kClustered, Keys::kLowRank, Keys::kInTime, Keys::kEqual, Keys::kTiny}),
           random, k);
  q.FillNormal(seed + 1, random.Pick({0.3, 1.0, 2.0}));
  v.FillNormal(seed + 2);
  p.dense.in = {q.view(), k.view(), v.view()};
  attention::Options& o = p.dense.options;
  o.causal = random.Chance(0.6);
  if (random.Chance(0.3)) o.scale = random.Pick({-0.2, 0.0, 0.5});
  OptionDraw draw(random, {B, Tq, Tk, Hq, Hkv}, &p.dense.memory);
  if (random.Chance(0.6)) draw.Draw(&o);
  if (!p.step) {
    draw.DrawPlaces(&o);
    if (p.level != Level::kSkip) draw.DrawLogDecay(&o);
  }
  p.dense.note = "seed=" + std::to_string(seed);
  return ToCase(p);
}

// The call of `heed run` on a file: every option at its default, the level too unless it is given.
TensorCall CallAt(Level level, const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  attention::Problem dense;
  dense.in = {tensors.at("q"), tensors.at("k"), tensors.at("v")};
  dense.options.scale = scale;
  const Inputs in = {dense.in.q, dense.in.k, dense.in.v};
  Options options;
  options.level = level;
  options.scale = scale;
  const Explanation plan = Explain(ctx, in, options);  // throws if the arguments are invalid
  attention::DescribeOutputs(dense);
  return {.outputs = {dense.o},
          .run = [in, options](
                     Context& run_ctx,
                     std::span<const TensorView> views) { Forward(run_ctx, in, options, {views[0], {}, {}, {}}); },
          .causal = false,
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace

OpEntry Entry() {
  return {.name = "certified_attention",
          .family = "sparse",
          .passes = {"forward", "step"},
          .dtypes = {DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"causal", "epsilon=0.02", "sketch", "skip"},
          .flops = "2 (D + Dv) per kept pair, and of all pairs 4 D of bytes",
          .bytes = "step: B Tk Hkv (D + 8), and of kept keys (D + Dv) size",
          .state = "a cache of keys and values with a sketch",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"q", "BTHK"}, {"k", "BTGK"}, {"v", "BTGV"}},
          .call = std::bind_front(&CallAt, Level::kAuto),
          .settings = {{"level=skip", std::bind_front(&CallAt, Level::kSkip)}}};
}

}  // namespace heed::certified_attention
