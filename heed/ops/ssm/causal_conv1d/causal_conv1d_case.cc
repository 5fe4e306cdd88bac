// The causal convolution in the harness.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_reference_internal.h"

namespace heed::causal_conv1d {
namespace {

using Shape = std::vector<int64_t>;

struct Problem {
  BackwardInputs in;
  Options options;
  std::vector<OutputSpec> outputs;  // of the forward pass, then of the backward pass
  size_t num_forward = 0;
  bool step = false;  // of one token: by Step instead of the forward pass
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

DType StateDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Views by name, as a pass takes them.
Outputs ToOutputs(const Problem& p, std::span<const TensorView> views) {
  Outputs out;
  for (size_t i = 0; i < p.num_forward; ++i) {
    (p.outputs[i].name == "o" ? out.o : out.final) = views[i];
  }
  return out;
}

Gradients ToGradients(const Problem& p, std::span<const TensorView> views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {{"dx", &out.dx},
                                                     {"dweight", &out.dweight},
                                                     {"dbias", &out.dbias},
                                                     {"dinitial_state", &out.dinitial}};
  for (size_t i = p.num_forward; i < p.outputs.size(); ++i) {
    *places.at(p.outputs[i].name) = views[i];
  }
  return out;
}

// The allowed error, with u the unit roundoff of what is computed in:
//
//   p      is a chain of W fused products on the bias: (W + 1) u M, M = |b| + sum |w x|
//   silu   |silu'| <= 1.1 of that, and 16 u |y|: an exponential of 3 ulp, a sum, a quotient of
//          1.5 ulp and a product, an ulp being 2 u at most
//   dp     d_o times the error of silu', which is 0.5 (|silu''| <= 0.5) of that of p and 16 u
//          of each of its two terms
//   dx     a chain over W products, and their errors: (W + 2) u sum |w dp| + sum |w| e_dp
//   dw     128 tokens in lanes of 2 f64 or 4 f32 at the least: 64 or 32 roundings, their halves,
//          2; what adds groups up is f64, for f64 tensors one rounding per group
//
// Inputs of 16 bits are widened exactly; results are rounded once more, to 2^-8 or 2^-11, an
// f16 to 2^-25 where it is subnormal. What is below the least normal number may be 0. In f64
// the reference rounds as much as the kernel: u counts twice. States are copies: no error.
struct Epsilon {
  double unit, least, output = 0, subnormal = 0;
};

Epsilon EpsilonOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0x1p-52, 1e-300};
    case DType::kF32: return {0x1p-24, 1e-36, 0x1p-24};
    case DType::kBF16: return {0x1p-24, 1e-36, 1.01 * 0x1p-8};
    default: return {0x1p-24, 1e-36, 1.01 * 0x1p-11, 0x1p-25};
  }
}

constexpr double kSiluUnits = 16;
constexpr double kFloor = 8;  // products that underflow, of inputs of a few units

struct TokenError {
  double p, error;  // the preactivation and its error
};

TokenError PreactivationOf(const ReferenceChannel& c, int64_t t, const Epsilon& e) {
  double sum = std::abs(c.bias);
  for (int64_t j = 0; j < c.W(); ++j) {
    sum += std::abs(c.weight[static_cast<size_t>(j)] * c.Input(t - (c.W() - 1) + j));
  }
  return {c.Preactivation(t), static_cast<double>(c.W() + 1) * (e.unit * sum + e.least)};
}

void Tolerance(const Problem& p, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(p.in.x.dtype());
  ClearElements(tolerance.o);
  if (tolerance.final.present()) ClearElements(tolerance.final);
  ForEachChannel(p.in, p.options, [&](const ReferenceChannel& c) {
    for (int64_t t = 0; t < c.T(); ++t) {
      const TokenError at = PreactivationOf(c, t, e);
      const double y = c.silu ? Silu(at.p) : at.p;
      const double error =
          c.silu ? 1.1 * at.error + kSiluUnits * e.unit * std::abs(y) + kFloor * e.least
                 : at.error;
      StoreElement(tolerance.o, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]},
                   error + e.output * (std::abs(y) + error) + e.subnormal);
    }
  });
}

void BackwardTolerance(const Problem& p, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(p.in.x.dtype());
  for (const TensorView* t :
       {&tolerance.dx, &tolerance.dweight, &tolerance.dbias, &tolerance.dinitial}) {
    ClearElements(*t);
  }
  const double lanes = p.in.x.dtype() == DType::kF64 ? 64 : 32;
  int64_t groups = 0;
  ForEachChannel(p.in, p.options, [&](const ReferenceChannel& c) {
    if (c.channel == 0) groups += c.T() / 128 + 1;
  });
  const double of_sum =
      (lanes + 3 + (p.in.x.dtype() == DType::kF64 ? static_cast<double>(groups) : 1)) * e.unit;
  ForEachChannel(p.in, p.options, [&](const ReferenceChannel& c) {
    const Doubles d_o = GradientsOfO(p.in, c), d_final = GradientsOfFinal(p.in, c);
    const int64_t W = c.W(), T = c.T();
    const double of_chain = static_cast<double>(W + 2) * e.unit;
    Doubles d_inputs(c.inputs.size(), kFloor * static_cast<double>(W) * e.least);
    for (int64_t i = 0; i < W - 1; ++i) {
      d_inputs[static_cast<size_t>(T + i)] += of_chain * std::abs(d_final[static_cast<size_t>(i)]);
    }
    for (int64_t t = 0; t < T; ++t) {
      double slope = 1, error = 0;
      if (c.silu) {
        const TokenError at = PreactivationOf(c, t, e);
        const double s = 1 / (1 + std::exp(-at.p));
        slope = std::abs(SiluSlope(at.p));
        error = 0.5 * at.error + kSiluUnits * e.unit * (s + std::abs(at.p) * s * (1 - s)) +
                kFloor * e.least;
      }
      const double size = std::abs(d_o[static_cast<size_t>(t)]);
      const double dp = size * slope;
      const double of_dp = size * error + e.unit * dp + e.least;
      for (int64_t j = 0; j < W; ++j) {
        const double w = std::abs(c.weight[static_cast<size_t>(j)]);
        d_inputs[static_cast<size_t>(t + j)] += w * (of_dp + of_chain * dp);
        if (tolerance.dweight.present()) {
          AddElement(tolerance.dweight, {c.channel, j},
                     std::abs(c.Input(t - (W - 1) + j)) * (of_dp + of_sum * dp) + e.least);
        }
      }
      if (tolerance.dbias.present()) {
        AddElement(tolerance.dbias, {c.channel}, of_dp + of_sum * dp);
      }
    }
    for (int64_t i = 0; tolerance.dinitial.present() && i < W - 1; ++i) {
      StoreElement(tolerance.dinitial, {c.sequence, c.channel, i},
                   d_inputs[static_cast<size_t>(i)]);
    }
    for (int64_t t = 0; tolerance.dx.present() && t < T; ++t) {
      StoreElement(tolerance.dx, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]},
                   d_inputs[static_cast<size_t>(W - 1 + t)]);
    }
  });
  const auto round = [](const TensorView& t, const TensorView& value, DType dtype) {
    const Epsilon of = EpsilonOf(dtype);
    for (int64_t i = 0; t.present() && i < t.num_elements(); ++i) {
      double* at = t.as<double>() + i;  // both as the harness makes them
      *at += of.output * (std::abs(value.as<double>()[i]) + *at) + of.subnormal;
    }
  };
  round(tolerance.dx, expected.dx, p.in.x.dtype());
  round(tolerance.dweight, expected.dweight, p.in.weight.dtype());
  round(tolerance.dbias, expected.dbias, p.in.bias.dtype());
}

std::string Title(const Problem& p) {
  std::string text = std::string("causal_conv1d ") + Name(p.in.x.dtype());
  for (const auto& [name, view] :
       {std::pair{"x", p.in.x}, {"weight", p.in.weight}, {"bias", p.in.bias},
        {"d_o", p.in.d_o}, {"lengths", p.options.lengths}, {"starts", p.options.starts},
        {"cu_seqlens", p.options.cu_seqlens}}) {
    if (!view.present()) continue;
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  }
  if (p.options.activation == Activation::kSilu) text += " silu";
  if (p.in.initial.present()) text += " initial";
  if (p.in.d_final.present()) text += " dstate";
  if (p.options.reverse) text += " reverse";
  if (p.step) text += " step";
  return text + " " + p.note;
}

// [B, D, 1] as [B, D].
template <class View>
View OneToken(const View& t) {
  const int64_t sizes[] = {t.size(0), t.size(1)}, strides[] = {t.stride(0), t.stride(1)};
  return View(t.data(), t.dtype(), sizes, strides);
}

// The forward pass of one token from the initial state, by Step.
void RunStep(const Problem& p, Context& ctx, const Outputs& out) {
  Shape index(out.final.sizes().size());
  if (out.final.num_elements() > 0) {
    do {
      SetElement(out.final, index,
                 p.in.initial.present() ? GetElement(p.in.initial, index) : 0);
    } while (NextIndex(out.final.sizes(), index));
  }
  Step(ctx, {OneToken(p.in.x), p.in.weight, p.in.bias}, p.options, out.final,
       OneToken(out.o));
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.outputs = problem.outputs;
  c.run = [p](Context& ctx, std::span<const TensorView> views) {
    if (p->step) return RunStep(*p, ctx, ToOutputs(*p, views));
    if (p->num_forward > 0) Forward(ctx, p->in, p->options, ToOutputs(*p, views));
    if (p->num_forward < p->outputs.size()) {
      Backward(ctx, p->in, p->options, ToGradients(*p, views));
    }
  };
  c.reference = [p](std::span<const TensorView> expected,
                    std::span<const TensorView> tolerance) {
    if (p->num_forward > 0) {
      Reference(p->in, p->options, ToOutputs(*p, expected));
      if (!tolerance.empty()) Tolerance(*p, ToOutputs(*p, tolerance));
    }
    if (p->num_forward == p->outputs.size()) return;
    BackwardReference(p->in, p->options, ToGradients(*p, expected));
    if (!tolerance.empty()) {
      BackwardTolerance(*p, ToGradients(*p, expected), ToGradients(*p, tolerance));
    }
  };
  const bool backward = problem.num_forward < problem.outputs.size();
  for (const ConstTensorView& view :
       {p->in.x, p->in.weight, p->in.bias, p->in.initial,
        backward ? ConstTensorView(p->in.d_o) : ConstTensorView()}) {
    if (view.present()) {
      c.bytes += static_cast<double>(view.num_elements()) *
                 static_cast<double>(SizeOf(view.dtype()));
    }
  }
  for (const OutputSpec& spec : c.outputs) {
    double bytes = static_cast<double>(SizeOf(spec.dtype));
    for (const int64_t size : spec.sizes) bytes *= static_cast<double>(size);
    c.bytes += bytes;
  }
  return c;
}

// The outputs of both passes that exist, in order; those over tokens with these strides.
void Describe(Problem& p, int64_t sequences, bool forward, bool backward, const Shape& o,
              const Shape& dx) {
  const DType dtype = p.in.x.dtype(), state = StateDType(dtype);
  const Shape x(p.in.x.sizes().begin(), p.in.x.sizes().end());
  const Shape S = {sequences, x[1], p.in.weight.size(1) - 1};
  if (forward) {
    p.outputs.push_back({"o", dtype, x, o});
    p.outputs.push_back({"state", state, S, {}});
  }
  p.num_forward = p.outputs.size();
  if (!backward) return;
  p.outputs.push_back({"dx", dtype, x, dx});
  p.outputs.push_back({"dweight", p.in.weight.dtype(), {x[1], S[2] + 1}, {}});
  if (p.in.bias.present()) p.outputs.push_back({"dbias", p.in.bias.dtype(), {x[1]}, {}});
  p.outputs.push_back({"dinitial_state", state, S, {}});
}

// Strides of [B, D, T] whose innermost axis is `inner`, 1 or 2, with gaps between rows.
Shape StridesOf(const Shape& sizes, int inner, int64_t step, int64_t gap) {
  Shape strides(3);
  const int outer = 3 - inner;
  const auto extent = [&](int axis) { return std::max<int64_t>(sizes[static_cast<size_t>(axis)], 1); };
  strides[static_cast<size_t>(inner)] = step;
  strides[static_cast<size_t>(outer)] = step * extent(inner) + gap;
  strides[0] = strides[static_cast<size_t>(outer)] * extent(outer) + gap;
  return strides;
}

class Generator {
 public:
  Generator(DType dtype, uint64_t seed) : dtype_(dtype), random_(seed), seed_(seed * 64) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Problem Make() {
    p_.step = random_.Chance(0.1);
    const bool packed = !p_.step && random_.Chance(0.2);
    const int64_t B = packed ? 1 : random_.Chance(0.03) ? 0 : Integer(1, 3);
    const int64_t T = p_.step ? 1 : Tokens(), D = Channels();
    const int64_t W = random_.Chance(0.03)  ? 140
                      : random_.Chance(0.5) ? 4
                                            : random_.Pick<int64_t>({1, 2, 3, 5, 7, 8, 9, 20});
    const Shape x = {B, D, T};
    p_.in.x = Tensor(x);
    p_.in.d_o = Tensor(x);
    p_.in.weight = Parameter({D, W});
    if (random_.Chance(0.7)) p_.in.bias = Parameter({D});
    int64_t sequences = B;
    if (packed) {
      sequences = Integer(0, 4);
      Shape bounds = {0};
      for (int64_t i = 0; i < sequences; ++i) bounds.push_back(Integer(0, T));
      std::sort(bounds.begin(), bounds.end());
      p_.options.cu_seqlens = Ints(bounds);
    } else if (!p_.step) {
      if (random_.Chance(0.3)) p_.options.lengths = Ints(Bounds(B, T));
      if (random_.Chance(0.2)) p_.options.starts = Ints(Bounds(B, T));
    }
    p_.options.reverse = !p_.step && random_.Chance(0.3);
    if (random_.Chance(0.6)) p_.options.activation = Activation::kSilu;
    const Shape state = {sequences, D, W - 1};
    if (random_.Chance(0.6)) p_.in.initial = State(state);
    if (random_.Chance(0.5)) p_.in.d_final = State(state);
    Describe(p_, sequences, true, !p_.step && random_.Chance(0.6), OutputStrides(x),
             OutputStrides(x));
    if (p_.step) return p_;
    // Some of them are not asked for; o always is.
    for (size_t i = p_.outputs.size(); i-- > 1;) {
      if (!random_.Chance(0.15)) continue;
      p_.outputs.erase(p_.outputs.begin() + static_cast<int64_t>(i));
      if (i < p_.num_forward) --p_.num_forward;
    }
    return p_;
  }

 private:
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Tokens() {
    if (random_.Chance(0.04)) return 0;
    if (random_.Chance(0.6)) return Integer(1, 20);
    return random_.Pick<int64_t>({31, 63, 64, 65, 127, 128, 129, 130, 131, 260, 1030});
  }
  int64_t Channels() {
    if (random_.Chance(0.7)) return Integer(1, 20);
    return random_.Pick<int64_t>({1, 15, 16, 17, 31, 33, 64, 257});
  }
  Shape Bounds(int64_t B, int64_t T) {
    Shape bounds;
    for (int64_t b = 0; b < B; ++b) bounds.push_back(Integer(0, T));
    return bounds;
  }
  Placement AnyGuard() {
    return random_.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
  }
  ConstTensorView Ints(const Shape& values) {
    const Buffer buffer(random_.Chance(0.5) ? DType::kI32 : DType::kI64,
                        {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) {
      buffer.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
    }
    return p_.Keep(buffer);
  }
  Shape OutputStrides(const Shape& sizes) {
    return StridesOf(sizes, random_.Pick({1, 2}), random_.Chance(0.8) ? 1 : 2, Integer(0, 3));
  }
  // Tokens or channels contiguous, neither, backwards, or one channel for all.
  ConstTensorView Tensor(const Shape& sizes) {
    Shape strides = StridesOf(sizes, random_.Pick({1, 2}),
                              random_.Pick<int64_t>({1, 1, 1, 1, -1, 2}), Integer(0, 3));
    if (strides[1] < 0 || strides[2] < 0) {
      for (int64_t& stride : strides) stride = -stride;  // gaps lie between rows again
      strides[random_.Pick({1, 2})] *= -1;
    }
    if (random_.Chance(0.05)) strides[1] = 0;
    return p_.Keep(Buffer(dtype_, sizes, strides, AnyGuard(), Integer(0, 9)).FillNormal(++seed_));
  }
  ConstTensorView Parameter(const Shape& sizes) {
    const DType dtype = random_.Chance(0.5) ? dtype_ : StateDType(dtype_);
    Shape strides = {1};
    if (sizes.size() == 2) {
      strides = random_.Chance(0.7) ? Shape{sizes[1] + random_.Pick<int64_t>({0, 0, 0, 2}), 1}
                                    : Shape{1, sizes[0]};
    }
    return p_.Keep(Buffer(dtype, sizes, strides, AnyGuard(), Integer(0, 9)).FillNormal(++seed_));
  }
  ConstTensorView State(const Shape& sizes) {
    const Shape strides = random_.Chance(0.7)
                              ? Shape{sizes[1] * sizes[2], sizes[2], 1}
                              : Shape{sizes[1] * sizes[2], 1, sizes[1]};
    return p_.Keep(
        Buffer(StateDType(dtype_), sizes, strides, AnyGuard()).FillNormal(++seed_));
  }

  DType dtype_;
  Random random_;
  uint64_t seed_;
  Problem p_;
};

// D = Hq D channels, T = Tq tokens.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  const bool backward = request.pass == "backward";
  Problem p;
  p.step = request.pass == "step";
  if (!backward && !p.step && request.pass != "forward") {
    throw InvalidArgument("causal_conv1d: pass is " + request.pass +
                          ", expected forward, backward or step");
  }
  bool channels_last = false, bias = true, state = false;
  int64_t W = 4;
  const int64_t T = p.step ? 1 : s.Tq;
  double percent = 100;
  p.note = request.variant;
  for (size_t begin = 0; begin < request.variant.size();) {
    const size_t end = std::min(request.variant.find('+', begin), request.variant.size());
    const std::string word = request.variant.substr(begin, end - begin);
    begin = end + 1;
    const auto number = [&](size_t from) { return std::stod(word.substr(from)); };
    if (word == "silu") p.options.activation = Activation::kSilu;
    if (word == "no_bias") bias = false;
    if (word == "channels_last") channels_last = true;
    if (word == "state") state = true;
    if (word == "reverse") p.options.reverse = !p.step;
    if (word.rfind("width=", 0) == 0) W = static_cast<int64_t>(number(6));
    if (word.rfind("lengths=", 0) == 0 && !p.step) percent = number(8);
  }
  uint64_t seed = request.seed * 16;
  const Shape x = {s.B, s.Hq * s.D, T}, strides = StridesOf(x, channels_last ? 1 : 2, 1, 0);
  const auto tensor = [&] {
    return p.Keep(
        Buffer(request.dtype, x, strides, Placement::kAligned).FillNormal(++seed));
  };
  const auto parameter = [&](const Shape& sizes, DType dtype) {
    return p.Keep(Buffer(dtype, sizes, Placement::kAligned).FillNormal(++seed));
  };
  p.in.x = tensor();
  if (backward) p.in.d_o = tensor();
  p.in.weight = parameter({x[1], W}, request.dtype);
  if (bias) p.in.bias = parameter({x[1]}, request.dtype);
  if (state) p.in.initial = parameter({s.B, x[1], W - 1}, StateDType(request.dtype));
  const double length = std::floor(static_cast<double>(T) * percent / 100);
  if (percent != 100) {
    p.options.lengths = p.Keep(Buffer(DType::kI64, {s.B}).FillConstant(length));
  }
  Describe(p, s.B, !backward, backward, strides, strides);
  Case c = ToCase(p);
  c.pass = request.pass;
  c.flops = (backward ? 6.0 : 2.0) * static_cast<double>(W) * static_cast<double>(s.B) *
            static_cast<double>(x[1]) * length;
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) { return ToCase(Generator(dtype, seed).Make()); }

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  if (scale) {
    throw InvalidArgument("causal_conv1d: scale is given, expected none: it has no such option");
  }
  const auto find = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  const auto p = std::make_shared<Problem>();
  p->in.x = find("x");
  p->in.weight = find("weight");
  p->in.bias = find("bias");
  p->in.initial = find("initial_state");
  const Explanation plan = Explain(ctx, p->in, p->options);  // checks everything first
  Describe(*p, p->in.x.size(0), true, false, {}, {});
  return {.outputs = p->outputs,
          .run = [p](Context& run_ctx, std::span<const TensorView> views) {
            Forward(run_ctx, p->in, p->options, ToOutputs(*p, views));
          },
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace

OpEntry Entry() {
  return {.name = "causal_conv1d",
          .family = "ssm",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"silu", "no_bias", "state", "lengths=62", "reverse", "channels_last",
                       "width=3"},
          .flops = "2 W per token and channel, backward 6 W; Hq D channels, W = 4",
          .bytes = "2 B Tq Hq D size",
          .state = "B Hq D (W - 1) 4",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"x", "BDT"},
                     {"weight", "DW"},
                     {"bias", "D", /*optional=*/true},
                     {"initial_state", "BDS", /*optional=*/true, /*wide=*/true}},
          .call = &CallOn};
}

}  // namespace heed::causal_conv1d
