// Cases of mechanisms on the scan engine from their tables.
#include "heed/ops/mechanism/scanning_case.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "heed/core/error.h"
#include "heed/ops/mechanism/recurrent_case.h"
#include "heed/ops/mechanism/scanning_reference_internal.h"

namespace heed::scanning {
namespace {

using Shape = std::vector<int64_t>;

struct Problem {
  BackwardInputs in;
  Options options;
  std::vector<OutputSpec> outputs;  // of the forward pass, then of the backward pass
  size_t num_forward = 0;
  bool step = false;  // of one token: by Step instead of the forward pass
  bool stateless = false;  // states are neither given nor asked for
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

bool TakesTaps(const Definition& d) { return d.method == scan::Method::kConvolution; }

bool Has(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Views by name, as a pass takes them.
Outputs ToOutputs(const Problem& p, std::span<const TensorView> views) {
  Outputs out;
  for (size_t i = 0; i < p.num_forward; ++i) {
    const std::string& name = p.outputs[i].name;
    (name == "o" ? out.o : name == "state_tail" ? out.final_tail : out.final) = views[i];
  }
  return out;
}

Gradients ToGradients(const Definition& d, const Problem& p, std::span<const TensorView> views) {
  Gradients out;
  for (size_t i = p.num_forward; i < p.outputs.size(); ++i) {
    const std::string name = p.outputs[i].name.substr(1);
    if (name == "initial_state") out.dinitial = views[i];
    if (name == "initial_state_tail") out.dinitial_tail = views[i];
    for (const Tensor& tensor : d.tensors) {
      if (name == tensor.name) out.*tensor.gradient = views[i];
    }
  }
  return out;
}

std::string Title(const Mechanism& m, const Problem& p) {
  std::string text = m.name + " " + Name((p.in.*m.definition.tensors[0].input).dtype()) + m.options;
  const auto add = [&](const char* name, const ConstTensorView& view) {
    if (!view.present()) return;
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  };
  for (const Tensor& tensor : m.definition.tensors) add(tensor.name, p.in.*tensor.input);
  add("d_o", p.in.d_o);
  add("lengths", p.options.lengths);
  add("starts", p.options.starts);
  add("cu_seqlens", p.options.cu_seqlens);
  add("initial_state", p.in.initial);
  add("initial_state_tail", p.in.initial_tail);
  if (p.in.d_final.present()) text += " dstate";
  if (p.options.reverse) text += " reverse";
  if (p.step) text += " step";
  return text + " " + p.note;
}

// A view of one token without its axis of tokens. Where that leaves [B, N], which of as many
// sequences as channels could be [D, N] as well, it gets its group's axis.
template <class View>
View OneToken(const std::string& axes, const View& t) {
  const size_t at = axes.find('T');
  if (at == std::string::npos || !t.present()) return t;
  Shape sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  sizes.erase(sizes.begin() + static_cast<std::ptrdiff_t>(at));
  strides.erase(strides.begin() + static_cast<std::ptrdiff_t>(at));
  if (axes == "BNT") {
    sizes.insert(sizes.begin() + 1, 1);
    strides.insert(strides.begin() + 1, 0);
  }
  return View(t.data(), t.dtype(), sizes, strides);
}

// Constants of a step say what they are by their shape alone.
bool MayBeConstant(bool step, const AxisSizes& sizes) { return !step || sizes.B != sizes.D; }

void RunStep(const Mechanism& m, const Problem& p, Context& ctx, const Outputs& out) {
  StepInputs in;
  for (const Tensor& tensor : m.definition.tensors) {
    const ConstTensorView& t = p.in.*tensor.input;
    in.*tensor.input = OneToken(AxesOf(tensor, t.rank()), t);
  }
  m.step(ctx, in, {out.final, out.final_tail}, OneToken(m.definition.tensors[0].axes, out.o));
}

Case ToCase(const Mechanism& m, const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(m, problem);
  c.outputs = problem.outputs;
  c.run = [m, p](Context& ctx, std::span<const TensorView> views) {
    const Outputs out = ToOutputs(*p, views);
    if (p->step) {
      recurrent::CopyElements(p->in.initial, out.final);
      if (out.final_tail.present()) recurrent::CopyElements(p->in.initial_tail, out.final_tail);
      return RunStep(m, *p, ctx, out);
    }
    if (p->num_forward > 0) m.forward(ctx, p->in, p->options, out);
    if (p->num_forward < p->outputs.size()) {
      m.backward(ctx, p->in, p->options, ToGradients(m.definition, *p, views));
    }
  };
  if (problem.step) {
    c.timed = [m, p](Context& ctx, std::span<const TensorView> views) {
      RunStep(m, *p, ctx, ToOutputs(*p, views));
    };
  }
  c.reference = [m, p](std::span<const TensorView> expected,
                       std::span<const TensorView> tolerance) {
    if (p->num_forward > 0) {
      m.reference(p->in, p->options, ToOutputs(*p, expected));
      if (!tolerance.empty()) m.tolerance(p->in, p->options, ToOutputs(*p, tolerance));
    }
    if (p->num_forward == p->outputs.size()) return;
    const Gradients values = ToGradients(m.definition, *p, expected);
    m.backward_reference(p->in, p->options, values);
    if (!tolerance.empty()) {
      m.backward_tolerance(p->in, p->options, values, ToGradients(m.definition, *p, tolerance));
    }
  };
  const auto bytes = [&](DType dtype, std::span<const int64_t> sizes) {
    double product = static_cast<double>(SizeOf(dtype));
    for (const int64_t size : sizes) product *= static_cast<double>(size);
    return product;
  };
  for (const Tensor& tensor : m.definition.tensors) {
    const ConstTensorView& t = problem.in.*tensor.input;
    if (t.present()) c.bytes += bytes(t.dtype(), t.sizes());
  }
  for (const OutputSpec& spec : c.outputs) c.bytes += bytes(spec.dtype, spec.sizes);
  return c;
}

// "state" and "state_tail".
std::string NameOf(const StateTensor& state) {
  return std::string("state") + (state.name == std::string_view("tail") ? "_tail" : "");
}

// The outputs of both passes that exist, in order; those of the inputs' shape with strides of `like`.
void Describe(const Definition& d, Problem& p, AxisSizes sizes, int64_t sequences, bool forward,
              bool backward, const Shape& like) {
  const Tensor& first = d.tensors[0];
  const ConstTensorView& scanned = p.in.*first.input;
  const Shape o = ShapeOf(first.axes, sizes);
  const DType wide = StateDType(scanned.dtype());
  sizes.B = sequences;
  const auto add_states = [&](const std::string& before) {
    if (p.stateless) return;
    for (const StateTensor& state : d.states()) {
      p.outputs.push_back({before + NameOf(state), wide, ShapeOf(state.axes, sizes), {}});
    }
  };
  if (forward) {
    p.outputs.push_back({"o", scanned.dtype(), o, like});
    add_states("");
  }
  p.num_forward = p.outputs.size();
  if (!backward) return;
  for (const Tensor& tensor : d.tensors) {
    const ConstTensorView& t = p.in.*tensor.input;
    if (!t.present()) continue;
    const Shape shape(t.sizes().begin(), t.sizes().end());
    p.outputs.push_back({std::string("d") + tensor.name, t.dtype(), shape,
                         shape == o ? like : Shape()});
  }
  add_states("dinitial_");
}

// Steps from 0.001 to 0.2 (through a softplus, or without one), rates from -0.1 to -16, decays from 1
// to 0.5; strong ones 40 times as much here and there, vanishing ones a millionth.
void Fill(const Tensor& tensor, const Buffer& buffer, uint64_t seed, bool softplus, bool strong,
          bool vanishing) {
  if (tensor.values == Tensor::kNormal || (tensor.values == Tensor::kStepBiases && softplus)) {
    buffer.FillNormal(seed);
    return;
  }
  Random random(seed);
  const TensorView& t = buffer.view();
  Shape at(t.sizes().size());
  if (t.num_elements() == 0) return;
  do {
    double value;
    if (tensor.values == Tensor::kRates) {
      value = -0.1 * std::exp(random.Uniform() * std::log(160.0));
    } else {
      value = 0.001 * std::exp(random.Uniform() * std::log(200.0));
      if (strong && random.Chance(0.05)) value *= 40;
      if (vanishing) value *= 1e-6;
      if (tensor.values == Tensor::kDecays) value *= -3;
      if (tensor.values == Tensor::kSteps && softplus) value = std::log(std::expm1(value));
      if (tensor.values == Tensor::kLogSteps) value = std::log(value);
    }
    SetElement(t, at, value);
  } while (NextIndex(t.sizes(), at));
}

// Row-major but for the axes of channels and tokens, which may change places; heads stay before channels.
Shape StridesOf(const std::string& axes, const Shape& sizes, bool swapped) {
  std::vector<size_t> order(axes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (swapped && axes == "BTHd") {
    std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  } else if (swapped && axes.size() > 2) {
    std::swap(order[axes.size() - 2], order[axes.size() - 1]);
  }
  Shape strides(axes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

class Generator {
 public:
  Generator(const Mechanism& m, DType dtype, uint64_t seed)
      : m_(m), dtype_(dtype), parts_(dtype, seed), seed_(seed * 64) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Problem Make() {
    const Definition& d = m_.definition;
    p_.step = Chance(0.1) && d.has_state();
    const bool packed = !p_.step && Chance(0.2);
    AxisSizes sizes;
    sizes.B = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 3);
    sizes.T = p_.step ? 1 : parts_.Tokens();
    sizes.G = Chance(0.6) ? 1 : Integer(2, 3);
    sizes.D = sizes.G * parts_.Channels();
    if (d.rule == scan::Rule::kHeads) ChooseHeads(sizes);
    sizes.N = Chance(0.4) ? 16 : Chance(0.8) ? Integer(1, 9) : Integer(17, 37);
    if (d.rule == scan::Rule::kTaps || (!p_.step && TakesTaps(d))) ChooseTaps(sizes);
    const bool strong = Chance(0.2), vanishing = Chance(0.15);
    for (const Tensor& tensor : d.tensors) {
      if (tensor.optional && Chance(0.4)) continue;
      std::string axes = tensor.axes;
      if (axes.find('|') != std::string::npos) {
        axes = Chance(0.2) && MayBeConstant(p_.step, sizes)
                   ? axes.substr(axes.rfind('|') + 1)
                   : AxesOf(tensor, sizes.G == 1 && Chance(0.5) ? 3 : 4);
      }
      const bool over_tokens = axes.find('T') != std::string::npos;
      const bool is_first = tensor.input == d.tensors[0].input;
      // Gradients of constants are sums over tokens, of which float16 holds no more than a few.
      const bool fits = over_tokens || dtype_ != DType::kF16 || sizes.B * sizes.T <= 64;
      const DType dtype = is_first || (fits && Chance(0.6)) ? dtype_
                          : over_tokens                     ? StateDType(dtype_)
                                      : random().Pick({DType::kF64, DType::kF32, DType::kBF16});
      const Buffer buffer = Layout(axes, ShapeOf(axes, sizes), dtype);
      Fill(tensor, buffer, ++seed_, d.softplus, strong, vanishing);
      p_.in.*tensor.input = p_.Keep(buffer);
    }
    const Tensor& first = d.tensors[0];
    const Shape o = ShapeOf(first.axes, sizes);
    p_.in.d_o = p_.Keep(Layout(first.axes, o, dtype_).FillNormal(++seed_));
    int64_t sequences = sizes.B;
    recurrent::Options tokens;
    if (!p_.step) {
      sequences = parts_.Sequences(sizes.B, sizes.T, packed, tokens);
      p_.options.reverse = Chance(0.3);
    }
    p_.options.lengths = tokens.lengths;
    p_.options.starts = tokens.starts;
    p_.options.cu_seqlens = tokens.cu_seqlens;
    AxisSizes of_states = sizes;
    of_states.B = sequences;
    p_.stateless = !d.has_state() || (!p_.step && TakesTaps(d) && Chance(0.7));
    for (const StateTensor& state : d.states()) {
      const Shape shape = ShapeOf(state.axes, of_states);
      if (p_.step || (!p_.stateless && Chance(0.6))) p_.in.*state.initial = State(shape);
      if (!p_.stateless && Chance(0.5)) p_.in.*state.d_final = State(shape);
    }
    Describe(d, p_, sizes, sequences, true, !p_.step && Chance(0.6),
             StridesOf(first.axes, o, Chance(0.5)));
    for (const Buffer& buffer : parts_.memory()) p_.memory.push_back(buffer);
    if (p_.step) return p_;
    // Some of them are not asked for; o always is.
    for (size_t i = p_.outputs.size(); i-- > 1;) {
      if (!Chance(0.15)) continue;
      p_.outputs.erase(p_.outputs.begin() + static_cast<int64_t>(i));
      if (i < p_.num_forward) --p_.num_forward;
    }
    return p_;
  }

 private:
  Random& random() { return parts_.random(); }
  int64_t Integer(int64_t low, int64_t high) { return parts_.Integer(low, high); }
  bool Chance(double probability) { return random().Chance(probability); }
  Placement AnyGuard() { return Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard; }

  // Few channels: of all pairs of a head's there are rows.
  void ChooseHeads(AxisSizes& sizes) {
    sizes.H = Chance(0.2) ? Integer(1, 40) : Integer(1, 3);
    sizes.d = sizes.H > 3 ? 1 : Chance(0.3) ? 1 : Integer(1, 5);
    sizes.D = sizes.H * sizes.d;
    sizes.W = Chance(0.3) ? 1 : Integer(1, 20);
    sizes.w = sizes.W - 1;
  }

  // Sequences that are long enough for blocks are of few channels.
  void ChooseTaps(AxisSizes& sizes) {
    if (Chance(0.4)) {
      sizes.T = Integer(100, 900);
      if (sizes.H < 0) sizes.D = Integer(1, 20);
    }
    sizes.L = Chance(0.3) ? sizes.T : Chance(0.5) ? Integer(0, sizes.T) : Integer(0, sizes.T / 4);
  }

  // Tokens or channels contiguous, either backwards, or neither; sometimes the same for all.
  Buffer Layout(const std::string& axes, const Shape& sizes, DType dtype) {
    Shape strides = StridesOf(axes, sizes, Chance(0.5));
    const int64_t step = Chance(0.8) ? 1 : 2;
    for (int64_t& stride : strides) stride *= step;
    if (Chance(0.15)) strides[axes.size() - 1] *= -1;
    if (Chance(0.15) && axes.size() > 2) strides[axes.size() - 2] *= -1;
    if (Chance(0.04)) strides[axes.size() - 1] = 0;
    return Buffer(dtype, sizes, strides, AnyGuard(), Integer(0, 9));
  }
  ConstTensorView State(const Shape& sizes) {
    Shape strides(sizes.size());
    const bool swapped = Chance(0.3);
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = step;
      step *= sizes[i];
    }
    if (swapped && sizes.size() == 3) {
      strides[1] = 1;
      strides[2] = sizes[1];
    }
    return p_.Keep(Buffer(StateDType(dtype_), sizes, strides, AnyGuard()).FillNormal(++seed_));
  }

  const Mechanism& m_;
  DType dtype_;
  recurrent::RandomParts parts_;
  uint64_t seed_;
  Problem p_;
};

}  // namespace

void RoundSums(const ConstTensorView& input, const ConstTensorView& expected,
               const TensorView& tolerance) {
  if (!tolerance.present() || tolerance.num_elements() == 0) return;
  const Epsilon e = EpsilonOf(input.dtype());
  Shape at(tolerance.sizes().size());
  do {
    SetElement(tolerance, at, Stored(GetElement(expected, at), GetElement(tolerance, at), e));
  } while (NextIndex(tolerance.sizes(), at));
}

Case MakeCase(const Mechanism& m, const CaseRequest& request, const Choice& choice) {
  const Definition& d = m.definition;
  const Sizes& s = request.sizes;
  const bool backward = request.pass == "backward";
  Problem p;
  p.step = request.pass == "step";
  p.stateless = TakesTaps(d) && !p.step;
  if (!backward && !p.step && request.pass != "forward") {
    throw InvalidArgument(m.name + ": pass is " + request.pass +
                          ", expected forward, backward or step");
  }
  bool swapped = false, strong = false, vanishing = false, state = false;
  double percent = 100;
  p.note = request.variant;
  for (size_t begin = 0; begin < request.variant.size();) {
    const size_t end = std::min(request.variant.find('+', begin), request.variant.size());
    const std::string word = request.variant.substr(begin, end - begin);
    begin = end + 1;
    if (word == "strided") swapped = true;
    if (word == "strong") strong = true;
    if (word == "vanishing") vanishing = true;
    if (word == "state") state = true;
    if (word == "reverse") p.options.reverse = !p.step;
    if (word.rfind("lengths=", 0) == 0 && !p.step) percent = std::stod(word.substr(8));
  }
  AxisSizes sizes;
  sizes.B = s.B;
  sizes.T = p.step ? 1 : s.Tq;
  // As many channels as are asked for, where heads are as small as those of scans.
  sizes.d = std::clamp<int64_t>(s.D, 1, choice.head_channels);
  sizes.H = s.Hq * (s.D / sizes.d);
  sizes.D = std::string_view(d.tensors[0].axes).find('H') == std::string_view::npos
                ? s.Hq * s.D
                : sizes.H * sizes.d;
  sizes.N = choice.states;
  sizes.L = std::min(choice.taps, sizes.T);
  sizes.W = choice.shifts;
  sizes.w = sizes.W - 1;
  sizes.G = std::max<int64_t>(choice.groups, 1);
  if (sizes.D % sizes.G != 0) sizes.G = 1;
  uint64_t seed = request.seed * 32;
  for (const Tensor& tensor : d.tensors) {
    if (Has(choice.absent, tensor.name)) continue;
    std::string axes = tensor.axes;
    if (axes.find('|') != std::string::npos) {
      axes = Has(choice.constant, tensor.name) && MayBeConstant(p.step, sizes)
                 ? axes.substr(axes.rfind('|') + 1)
                 : AxesOf(tensor, choice.groups == 0 ? 3 : 4);
    }
    const Shape shape = ShapeOf(axes, sizes);
    const bool over_tokens = axes.find('T') != std::string::npos;
    const DType dtype = over_tokens || request.dtype != DType::kF16 ? request.dtype : DType::kF32;
    const Buffer buffer(dtype, shape, StridesOf(axes, shape, swapped && over_tokens),
                        Placement::kAligned);
    Fill(tensor, buffer, ++seed, d.softplus, strong, vanishing);
    p.in.*tensor.input = p.Keep(buffer);
  }
  const Tensor& first = d.tensors[0];
  const Shape o = ShapeOf(first.axes, sizes), like = StridesOf(first.axes, o, swapped);
  if (backward) {
    p.in.d_o = p.Keep(
        Buffer(request.dtype, o, like, Placement::kAligned).FillNormal(++seed));
  }
  if ((state && !p.stateless) || p.step) {
    for (const StateTensor& of : d.states()) {
      p.in.*of.initial = p.Keep(
          Buffer(StateDType(request.dtype), ShapeOf(of.axes, sizes)).FillNormal(++seed));
    }
  }
  const double length = std::floor(static_cast<double>(sizes.T) * percent / 100);
  if (percent != 100) {
    p.options.lengths = p.Keep(Buffer(DType::kI64, {s.B}).FillConstant(length));
  }
  Describe(d, p, sizes, s.B, !backward, backward, like);
  Case c = ToCase(m, p);
  c.pass = request.pass;
  c.flops = static_cast<double>(s.B) *
            FlopsOf(d, sizes, p.step ? 1 : static_cast<int64_t>(length), backward);
  return c;
}

Case RandomCase(const Mechanism& m, DType dtype, uint64_t seed) {
  return ToCase(m, Generator(m, dtype, seed).Make());
}

std::vector<InputSpec> InputsOf(const Definition& d) {
  std::vector<InputSpec> inputs;
  for (const Tensor& tensor : d.tensors) {
    const std::string axes = tensor.axes;
    // Of several forms the one per token without groups, which every checkpoint has.
    inputs.push_back({tensor.name, axes.find('|') == std::string::npos ? axes : AxesOf(tensor, 3),
                      tensor.optional, tensor.input != d.tensors[0].input});
  }
  for (const StateTensor& state : d.states()) {
    inputs.push_back({"initial_" + NameOf(state), state.axes, true, true});
  }
  return inputs;
}

TensorCall CallOn(const Mechanism& m, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale) {
  if (scale) {
    throw InvalidArgument(m.name + ": scale is given, expected none: it has no such option");
  }
  const auto find = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  const auto p = std::make_shared<Problem>();
  for (const Tensor& tensor : m.definition.tensors) p->in.*tensor.input = find(tensor.name);
  for (const StateTensor& state : m.definition.states()) {
    p->in.*state.initial = find(("initial_" + NameOf(state)).c_str());
  }
  const Explanation plan =  // checks everything first
      Explain(m.name.c_str(), ctx, m.definition, p->in, p->options);
  AxisSizes sizes;
  for (const Tensor& tensor : m.definition.tensors) {
    const ConstTensorView& t = p->in.*tensor.input;
    const std::string axes = t.present() ? AxesOf(tensor, t.rank()) : "";
    for (size_t i = 0; i < axes.size(); ++i) sizes[axes[i]] = t.size(static_cast<int>(i));
  }
  sizes.w = sizes.W - 1;
  Describe(m.definition, *p, sizes, sizes.B, true, false, {});
  return {.outputs = p->outputs,
          .run = [m, p](Context& run_ctx, std::span<const TensorView> views) {
            m.forward(run_ctx, p->in, p->options, ToOutputs(*p, views));
          },
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace heed::scanning
