// Efficient attention in the harness, with and without masks.
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/linear/efficient_attention/efficient_attention.h"
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::efficient_attention {
namespace {

struct Problem {
  BackwardInputs in;
  Options options;
  std::vector<OutputSpec> outputs;  // o first, where it is there
  bool forward = true;
  std::vector<Buffer> memory;
  std::string note;
};

Gradients ToGradients(const Problem& p, std::span<const TensorView> views) {
  Gradients out;
  for (size_t i = p.forward ? 1 : 0; i < p.outputs.size(); ++i) {
    const std::string& name = p.outputs[i].name;
    (name == "dq" ? out.dq : name == "dk" ? out.dk : out.dv) = views[i];
  }
  return out;
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = std::string("efficient_attention ") + Name(p->in.q.dtype());
  for (const auto& [name, view] :
       {std::pair{"q", p->in.q}, {"k", p->in.k}, {"v", p->in.v},
        {"kv_mask", p->options.kv_mask}, {"lengths", p->options.lengths},
        {"starts", p->options.starts}, {"cu_seqlens", p->options.cu_seqlens}}) {
    if (!view.present()) continue;
    c.title += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  }
  c.title += " " + p->note;
  c.outputs = problem.outputs;
  const bool backward = p->outputs.size() > (p->forward ? 1 : 0);
  c.run = [p, backward](Context& ctx, std::span<const TensorView> views) {
    if (p->forward) Forward(ctx, p->in, p->options, {views[0], {}});
    if (backward) Backward(ctx, p->in, p->options, ToGradients(*p, views));
  };
  c.reference = [p, backward](std::span<const TensorView> expected,
                              std::span<const TensorView> tolerance) {
    if (p->forward) {
      Reference(p->in, p->options, {expected[0], {}});
      if (!tolerance.empty()) {
        Tolerance(p->in, p->options, {expected[0], {}}, {tolerance[0], {}});
      }
    }
    if (!backward) return;
    BackwardReference(p->in, p->options, ToGradients(*p, expected));
    if (!tolerance.empty()) {
      BackwardTolerance(p->in, p->options, ToGradients(*p, expected),
                        ToGradients(*p, tolerance));
    }
  };
  const auto bytes = [](const auto& sizes, DType dtype) {
    double count = static_cast<double>(SizeOf(dtype));
    for (const int64_t size : sizes) count *= static_cast<double>(size);
    return count;
  };
  for (const ConstTensorView& t : {p->in.q, p->in.k, p->in.v}) {
    c.bytes += bytes(t.sizes(), t.dtype());
  }
  for (const OutputSpec& spec : c.outputs) c.bytes += bytes(spec.sizes, spec.dtype);
  return c;
}

void Describe(Problem& p, bool forward, bool backward) {
  const auto like = [&](const char* name, const ConstTensorView& t) {
    p.outputs.push_back({name, t.dtype(), {t.sizes().begin(), t.sizes().end()}, {}});
  };
  p.forward = forward;
  if (forward) like("o", p.in.v);
  if (!backward) return;
  like("dq", p.in.q);
  like("dk", p.in.k);
  like("dv", p.in.v);
}

ConstTensorView RandomMask(int64_t B, int64_t T, double kept, uint64_t seed,
                           std::vector<Buffer>& memory) {
  Random random(seed);
  const Buffer mask(DType::kBool, {B, T});
  for (int64_t i = 0; i < B * T; ++i) mask.Set({i / T, i % T}, random.Chance(kept) ? 1 : 0);
  memory.push_back(mask);
  return mask.view();
}

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  const bool backward = request.pass == "backward";
  if (!backward && request.pass != "forward") {
    throw InvalidArgument("efficient_attention: pass is " + request.pass +
                          ", expected forward or backward");
  }
  Problem p;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](int64_t heads, int64_t channels) {
    p.memory.push_back(Buffer(request.dtype, {s.B, s.Tq, heads, channels}, Placement::kAligned)
                           .FillNormal(++seed));
    return p.memory.back().view();
  };
  p.in.q = tensor(s.Hkv, s.D);
  p.in.k = tensor(s.Hkv, s.D);
  p.in.v = tensor(s.Hq, s.Dv);
  if (backward) p.in.d_o = tensor(s.Hq, s.Dv);
  double tokens = static_cast<double>(s.B * s.Tq);
  if (request.variant.find("kv_mask") != std::string::npos) {
    p.options.kv_mask = RandomMask(s.B, s.Tq, 0.7, ++seed, p.memory);
  }
  if (const size_t at = request.variant.find("lengths"); at != std::string::npos) {
    const bool given = request.variant.size() > at + 7 && request.variant[at + 7] == '=';
    const double percent = given ? std::stod(request.variant.substr(at + 8)) : 62;
    const double length = std::floor(static_cast<double>(s.Tq) * percent / 100);
    p.memory.push_back(Buffer(DType::kI64, {s.B}).FillConstant(length));
    p.options.lengths = p.memory.back().view();
    tokens = static_cast<double>(s.B) * length;
  }
  Describe(p, !backward, backward);
  Case c = ToCase(p);
  c.pass = request.pass;
  c.flops = (backward ? 10 : 4) * tokens * static_cast<double>(s.Hq * s.D * s.Dv);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) {
  recurrent::RandomParts parts(dtype, seed);
  Random& random = parts.random();
  Problem p;
  p.note = "seed=" + std::to_string(seed);
  const bool packed = random.Chance(0.2);
  const int64_t B = packed ? 1 : random.Chance(0.03) ? 0 : parts.Integer(1, 3);
  const int64_t T = parts.Tokens(), H = parts.Integer(1, 2);
  const int64_t HV = H * random.Pick<int64_t>({1, 1, 2, 3});
  const int64_t K = parts.Channels(), V = parts.Channels();
  p.in.q = parts.Normal({B, T, H, K});
  p.in.k = parts.Normal({B, T, H, K});
  p.in.v = parts.Normal({B, T, HV, V});
  p.in.d_o = parts.Normal({B, T, HV, V});
  if (random.Chance(0.3)) p.options.scale = random.Uniform(0.1, 1.5);
  parts.Sequences(B, T, packed, p.options);
  p.options.reverse = false;
  Describe(p, true, random.Chance(0.6));
  p.memory = parts.memory();
  if (random.Chance(0.5)) {
    p.options.kv_mask =
        RandomMask(B, T, random.Chance(0.1) ? 0 : 0.7, parts.NextSeed(), p.memory);
  }
  return ToCase(p);
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  Problem p;
  const auto find = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  p.in.q = find("q");
  p.in.k = find("k");
  p.in.v = find("v");
  p.options.scale = scale;
  const Explanation plan = Explain(ctx, p.in, p.options);  // checks everything first
  Describe(p, true, false);
  return {.outputs = p.outputs,
          .run = [p](Context& run_ctx, std::span<const TensorView> views) {
            Forward(run_ctx, p.in, p.options, {views[0], {}});
          },
          .causal = false,
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace

OpEntry Entry() {
  return {.name = "efficient_attention",
          .family = "linear",
          .passes = {"forward", "backward"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"lengths=62", "kv_mask"},
          .flops = "4 D Dv per token and value head, backward 10 D Dv",
          .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
          .state = "none: not causal",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}},
          .call = &CallOn};
}

}  // namespace heed::efficient_attention
