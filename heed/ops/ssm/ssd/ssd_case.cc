// SSD in the harness: groups, skips, gates, biases, softplus and limits.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/mechanism/recurrent_case.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

using recurrent::StateDType;
using Shape = std::vector<int64_t>;

struct Problem {
  BackwardInputs in;
  Options options;
  std::vector<OutputSpec> outputs;  // of the forward pass, then of the backward pass
  size_t num_forward = 0;
  bool step = false;
  std::vector<Buffer> memory;
  std::string note;
};

Outputs ToOutputs(const Problem& p, std::span<const TensorView> views) {
  Outputs out;
  for (size_t i = 0; i < p.num_forward; ++i) {
    (p.outputs[i].name == "o" ? out.o : out.final) = views[i];
  }
  return out;
}

Gradients ToGradients(const Problem& p, std::span<const TensorView> views) {
  Gradients out;
  const std::pair<const char*, TensorView*> places[] = {
      {"dx", &out.dx}, {"ddt", &out.ddt}, {"dA", &out.dA},
      {"dB", &out.dB}, {"dC", &out.dC},   {"dD", &out.dD},
      {"dz", &out.dz}, {"ddt_bias", &out.ddt_bias}, {"dinitial_state", &out.dinitial}};
  for (size_t i = p.num_forward; i < p.outputs.size(); ++i) {
    for (const auto& [name, view] : places) {
      if (p.outputs[i].name == name) *view = views[i];
    }
  }
  return out;
}

std::string Title(const Problem& p) {
  std::string text = std::string("ssd ") + Name(p.in.x.dtype());
  for (const auto& [name, view] :
       {std::pair{"x", p.in.x}, {"dt", p.in.dt}, {"B", p.in.B}, {"C", p.in.C},
        {"D", p.in.D}, {"z", p.in.z}, {"dt_bias", p.in.dt_bias},
        {"lengths", p.options.lengths}, {"starts", p.options.starts},
        {"cu_seqlens", p.options.cu_seqlens}}) {
    if (!view.present()) continue;
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  }
  if (p.in.initial.present()) text += " initial";
  if (p.in.d_final.present()) text += " dstate";
  if (p.options.dt_softplus) text += " softplus";
  if (p.options.reverse) text += " reverse";
  return text + " " + p.note;
}

// One token, from the state that `out` has.
void RunStep(const Problem& p, Context& ctx, const Outputs& out) {
  Inputs in = p.in;
  for (ConstTensorView* t : {&in.x, &in.dt, &in.B, &in.C, &in.z}) {
    *t = recurrent::WithoutTokens(*t);
  }
  in.initial = {};
  Step(ctx, in, p.options, out.final, recurrent::WithoutTokens(out.o));
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.outputs = problem.outputs;
  c.run = [p](Context& ctx, std::span<const TensorView> views) {
    const Outputs out = ToOutputs(*p, views);
    if (p->step) {
      recurrent::CopyElements(p->in.initial, out.final);
      return RunStep(*p, ctx, out);
    }
    if (p->num_forward > 0) Forward(ctx, p->in, p->options, out);
    if (p->num_forward < p->outputs.size()) {
      Backward(ctx, p->in, p->options, ToGradients(*p, views));
    }
  };
  c.reference = [p](std::span<const TensorView> expected,
                    std::span<const TensorView> tolerance) {
    if (p->num_forward > 0) {
      Reference(p->in, p->options, ToOutputs(*p, expected));
      if (!tolerance.empty()) {
        Tolerance(p->in, p->options, ToOutputs(*p, expected), ToOutputs(*p, tolerance));
      }
    }
    if (p->num_forward == p->outputs.size()) return;
    BackwardReference(p->in, p->options, ToGradients(*p, expected));
    if (!tolerance.empty()) {
      BackwardTolerance(p->in, p->options, ToGradients(*p, expected),
                        ToGradients(*p, tolerance));
    }
  };
  if (p->step) {
    c.timed = [p](Context& ctx, std::span<const TensorView> views) {
      RunStep(*p, ctx, ToOutputs(*p, views));
    };
  }
  const auto bytes = [](const auto& sizes, DType dtype) {
    double count = static_cast<double>(SizeOf(dtype));
    for (const int64_t size : sizes) count *= static_cast<double>(size);
    return count;
  };
  for (const ConstTensorView& t : {p->in.x, p->in.dt, p->in.B, p->in.C, p->in.z}) {
    if (t.present()) c.bytes += bytes(t.sizes(), t.dtype());
  }
  for (const OutputSpec& spec : c.outputs) {  // states of a step are read too
    c.bytes += (p->step && spec.name != "o" ? 2 : 1) * bytes(spec.sizes, spec.dtype);
  }
  return c;
}

void Describe(Problem& p, int64_t sequences, bool forward, bool backward) {
  const auto like = [&](const char* name, const ConstTensorView& t) {
    if (!t.present()) return;
    p.outputs.push_back({name, t.dtype(), {t.sizes().begin(), t.sizes().end()}, {}});
  };
  const Shape state = {sequences, p.in.x.size(2), p.in.x.size(3), p.in.B.size(3)};
  const DType wide = StateDType(p.in.x.dtype());
  if (forward) {
    like("o", p.in.x);
    p.outputs.push_back({"state", wide, state, {}});
  }
  p.num_forward = p.outputs.size();
  if (!backward) return;
  like("dx", p.in.x);
  like("ddt", p.in.dt);
  like("dA", p.in.A);
  like("dB", p.in.B);
  like("dC", p.in.C);
  like("dD", p.in.D);
  like("dz", p.in.z);
  like("ddt_bias", p.in.dt_bias);
  p.outputs.push_back({"dinitial_state", wide, state, {}});
}

// f(deviate) for each element.
template <class F>
Buffer Filled(const Buffer& buffer, uint64_t seed, const F& f) {
  Random random(seed);
  Shape index(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return buffer;
  do {
    SetElement(buffer.view(), index, f(random));
  } while (NextIndex(buffer.view().sizes(), index));
  return buffer;
}

// A of trained models: -1 to -16.
double Rate(Random& random) { return -std::exp(random.Uniform(0, 2.77)); }

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  const bool backward = request.pass == "backward";
  Problem p;
  p.step = request.pass == "step";
  if (!backward && !p.step && request.pass != "forward") {
    throw InvalidArgument("ssd: pass is " + request.pass +
                          ", expected forward, backward or step");
  }
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const auto keep = [&](const Buffer& buffer) {
    p.memory.push_back(buffer);
    return buffer.view();
  };
  const auto tensor = [&](const Shape& sizes) {
    return keep(Buffer(request.dtype, sizes, Placement::kAligned).FillNormal(++seed));
  };
  const int64_t T = p.step ? 1 : s.Tq;
  const DType wide = StateDType(request.dtype);
  p.in.x = tensor({s.B, T, s.Hq, s.Dv});
  p.in.B = tensor({s.B, T, s.Hkv, s.D});
  p.in.C = tensor({s.B, T, s.Hkv, s.D});
  p.in.dt = tensor({s.B, T, s.Hq});
  p.in.A = keep(Filled(Buffer(wide, {s.Hq}), ++seed, &Rate));
  p.in.dt_bias = keep(Buffer(wide, {s.Hq}).FillConstant(-4));
  p.options.dt_softplus = true;
  if (backward) p.in.d_o = tensor({s.B, T, s.Hq, s.Dv});
  const std::string words = "+" + request.variant + "+";
  const auto has = [&](const char* word) {
    return words.find("+" + std::string(word) + "+") != std::string::npos;
  };
  if (has("skip")) p.in.D = keep(Buffer(wide, {s.Hq}).FillNormal(++seed));
  if (has("gate")) p.in.z = tensor({s.B, T, s.Hq, s.Dv});
  if (has("state") || p.step) {
    p.in.initial = keep(Buffer(wide, {s.B, s.Hq, s.Dv, s.D}).FillNormal(++seed));
  }
  p.options.reverse = has("reverse") && !p.step;
  double tokens = static_cast<double>(s.B * T);
  if (const size_t at = words.find("+lengths"); at != std::string::npos && !p.step) {
    const double percent = words[at + 8] == '=' ? std::stod(words.substr(at + 9)) : 62;
    const double length = std::floor(static_cast<double>(T) * percent / 100);
    p.options.lengths = keep(Buffer(DType::kI64, {s.B}).FillConstant(length));
    tokens = static_cast<double>(s.B) * length;
  }
  Describe(p, s.B, !backward, backward);
  Case c = ToCase(p);
  c.pass = request.pass;
  c.flops = (backward ? 12 : 4) * tokens * static_cast<double>(s.Hq * s.D * s.Dv);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) {
  recurrent::RandomParts parts(dtype, seed);
  Random& random = parts.random();
  Problem p;
  p.note = "seed=" + std::to_string(seed);
  p.step = random.Chance(0.1);
  const bool packed = !p.step && random.Chance(0.2);
  const int64_t B = packed ? 1 : random.Chance(0.03) ? 0 : parts.Integer(1, 3);
  const int64_t T = p.step ? 1 : parts.Tokens(), G = parts.Integer(1, 2);
  const int64_t H = G * random.Pick<int64_t>({1, 1, 2, 3});
  const int64_t N = parts.Channels(), P = parts.Channels();
  const DType wide = StateDType(dtype);
  const auto either = [&] { return random.Chance(0.5) ? dtype : wide; };
  // The gradients of constants are sums over everything, which f16 need not hold.
  const DType constants = dtype == DType::kF16 ? wide : either();
  p.in.x = parts.Normal({B, T, H, P});
  p.in.B = parts.Normal({B, T, G, N});
  p.in.C = parts.Normal({B, T, G, N});
  p.in.d_o = parts.Normal({B, T, H, P});
  p.options.dt_softplus = random.Chance(0.7);
  const double center = random.Uniform(-6, 1);
  p.in.dt = parts.Keep(Filled(parts.Make(either(), {B, T, H}), parts.NextSeed(),
                              [&](Random& r) {
                                return p.options.dt_softplus ? center + r.Normal()
                                                             : std::exp(center + r.Normal());
                              }));
  if (random.Chance(0.5)) {
    p.in.dt_bias = parts.Keep(Filled(Buffer(constants, {H}), parts.NextSeed(),
                                     [&](Random& r) {
                                       return p.options.dt_softplus ? r.Normal()
                                                                    : r.Uniform(0, 0.2);
                                     }));
  }
  const bool extreme = random.Chance(0.1);
  p.in.A = parts.Keep(Filled(Buffer(constants, {H}), parts.NextSeed(), [&](Random& r) {
    return extreme && r.Chance(0.3) ? -1e4 : Rate(r) * 0.3;
  }));
  if (random.Chance(0.5)) {
    const Shape shape = random.Chance(0.5) ? Shape{H} : Shape{H, P};
    p.in.D = parts.Keep(Buffer(constants, shape).FillNormal(parts.NextSeed()));
  }
  if (random.Chance(0.5)) p.in.z = parts.Normal({B, T, H, P});
  if (random.Chance(0.3)) p.options.dt_min = random.Uniform(0, 0.05);
  if (random.Chance(0.3)) p.options.dt_max = random.Uniform(0.06, 0.5);
  if (random.Chance(0.2)) p.options.scale = random.Uniform(0.1, 1.5);
  const int64_t sequences = p.step ? B : parts.Sequences(B, T, packed, p.options);
  const Shape state = {sequences, H, P, N};
  if (random.Chance(0.5)) p.in.initial = parts.NormalState(state);
  if (random.Chance(0.5)) p.in.d_final = parts.NormalState(state);
  Describe(p, sequences, true, !p.step && random.Chance(0.6));
  p.memory = parts.memory();
  if (!p.step) {
    for (size_t i = p.outputs.size(); i-- > 1;) {  // some are not asked for; o always is
      if (!random.Chance(0.15)) continue;
      p.outputs.erase(p.outputs.begin() + static_cast<int64_t>(i));
      if (i < p.num_forward) --p.num_forward;
    }
  }
  return ToCase(p);
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  Problem p;
  const std::pair<const char*, ConstTensorView*> places[] = {
      {"x", &p.in.x}, {"dt", &p.in.dt}, {"A", &p.in.A}, {"B", &p.in.B},
      {"C", &p.in.C}, {"D", &p.in.D},   {"z", &p.in.z}, {"dt_bias", &p.in.dt_bias}};
  for (const auto& [name, view] : places) {
    if (const auto found = tensors.find(name); found != tensors.end()) *view = found->second;
  }
  p.options.scale = scale;
  const Explanation plan = Explain(ctx, p.in, p.options);  // checks everything first
  Describe(p, p.in.x.size(0), true, false);
  return {.outputs = p.outputs,
          .run = [p](Context& run_ctx, std::span<const TensorView> views) {
            Forward(run_ctx, p.in, p.options, ToOutputs(p, views));
          },
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.insert(variants.end(), {"skip", "gate"});
  return {.name = "ssd",
          .family = "ssm",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = variants,
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
          .state = "B Hq D Dv 4",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"x", "BTHP"},
                     {"dt", "BTH", false, true},
                     {"A", "H", false, true},
                     {"B", "BTGN"},
                     {"C", "BTGN"},
                     {"D", "H", true, true},
                     {"z", "BTHP", true},
                     {"dt_bias", "H", true, true}},
          .call = &CallOn};
}

}  // namespace heed::ssd
