// Cases of recurrent mechanisms from their definitions.
#include "heed/ops/mechanism/recurrent_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/mechanism/delta_reference_internal.h"

namespace heed::recurrent {
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

Shape SizesOf(const Tensor& tensor, const AxisSizes& sizes) {
  const Axes shape = ShapeOf(tensor.axes, sizes);
  const std::span<const int64_t> numbers = shape;
  return {numbers.begin(), numbers.end()};
}

// The gradient of a constant is a sum over everything, which f16 need not hold.
bool HoldsSums(const Tensor& tensor, DType dtype) {
  return tensor.type != Tensor::kAnyFloat || dtype != DType::kF16;
}

// Views by name, as a pass takes them.
Outputs ToOutputs(const Problem& p, std::span<const TensorView> views) {
  Outputs out;
  for (size_t i = 0; i < p.num_forward; ++i) {
    const std::string& name = p.outputs[i].name;
    (name == "o"         ? out.o
     : name == "state"   ? out.final.S
     : name == "state_z" ? out.final.z
                         : out.final.m) = views[i];
  }
  return out;
}

Gradients ToGradients(const Definition& d, const Problem& p,
                      std::span<const TensorView> views) {
  Gradients out;
  for (size_t i = p.num_forward; i < p.outputs.size(); ++i) {
    const std::string& name = p.outputs[i].name;
    if (name == "dinitial_state") {
      out.dinitial.S = views[i];
    } else if (name == "dinitial_z") {
      out.dinitial.z = views[i];
    } else {
      out.*Tensors(d).Find(name.substr(1))->gradient = views[i];
    }
  }
  return out;
}

std::string Title(const Mechanism& m, const Problem& p) {
  std::string text = m.name + " " + Name(p.in.q.dtype()) + m.options;
  const auto add = [&](const char* name, const ConstTensorView& view) {
    if (!view.present()) return;
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  };
  for (const Tensor& tensor : Tensors(m.definition)) add(tensor.name, p.in.*tensor.input);
  add("lengths", p.options.lengths);
  add("starts", p.options.starts);
  add("cu_seqlens", p.options.cu_seqlens);
  if (p.in.initial.S.present()) text += " initial";
  if (p.in.d_final.S.present()) text += " dstate";
  if (p.options.scale) text += " scale=" + std::to_string(*p.options.scale);
  if (p.options.reverse) text += " reverse";
  return text + " " + p.note;
}

// One token, from the state that `out` has.
void RunStep(const Mechanism& m, const Problem& p, Context& ctx, const Outputs& out) {
  StepInputs in;
  for (const Tensor& tensor : Tensors(m.definition)) {
    in.*tensor.step = WithoutTokens(p.in.*tensor.input);
  }
  m.step(ctx, in, p.options, out.final, WithoutTokens(out.o));
}

// Of a state that is as before the first token.
void CopyMaxima(const Definition& d, const ConstTensorView& from, const TensorView& to) {
  if (from.present()) return CopyElements(from, to);
  const double none = d.exp_gates  ? 0
                      : d.channels ? -1e38f
                                   : -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < to.size(0); ++b) {
    for (int64_t h = 0; h < to.size(1); ++h) SetElement(to, Shape{b, h}, none);
  }
}

void OwnReferenceOf(const Mechanism& m, const Problem& p, std::span<const TensorView> expected,
                    std::span<const TensorView> tolerance) {
  const Definition& d = m.definition;
  if (p.num_forward > 0) {
    const Outputs values = ToOutputs(p, expected);
    m.reference(p.in, p.options, values);
    if (m.tolerance && !tolerance.empty()) {
      m.tolerance(p.in, p.options, values, ToOutputs(p, tolerance));
    } else if (!tolerance.empty()) {
      DeltaTolerance(d, p.in, p.options, values, ToOutputs(p, tolerance));
    }
  }
  if (p.num_forward == p.outputs.size()) return;
  const Gradients values = ToGradients(d, p, expected);
  m.backward_reference(p.in, p.options, values);
  if (m.backward_tolerance && !tolerance.empty()) {
    m.backward_tolerance(p.in, p.options, values, ToGradients(d, p, tolerance));
  } else if (!tolerance.empty()) {
    DeltaBackwardTolerance(d, p.in, p.options, values, ToGradients(d, p, tolerance));
  }
}

Case ToCase(const Mechanism& m, const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(m, problem);
  c.outputs = problem.outputs;
  c.run = [m, p](Context& ctx, std::span<const TensorView> views) {
    if (p->step) {  // from the initial state
      const Outputs out = ToOutputs(*p, views);
      CopyElements(p->in.initial.S, out.final.S);
      if (out.final.z.present()) CopyElements(p->in.initial.z, out.final.z);
      if (out.final.m.present()) CopyMaxima(m.definition, p->in.initial.m, out.final.m);
      return RunStep(m, *p, ctx, out);
    }
    if (p->num_forward > 0) m.forward(ctx, p->in, p->options, ToOutputs(*p, views));
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
    if (m.tolerance || m.definition.delta != recurrence::Delta::kNone) {
      return OwnReferenceOf(m, *p, expected, tolerance);
    }
    const ReferenceMath math = m.math(p->in, p->options);
    if (p->num_forward > 0) {
      m.reference(p->in, p->options, ToOutputs(*p, expected));
      if (!tolerance.empty()) {
        Tolerance(p->in, p->options, math, ToOutputs(*p, expected),
                  ToOutputs(*p, tolerance));
      }
    }
    if (p->num_forward == p->outputs.size()) return;
    m.backward_reference(p->in, p->options, ToGradients(m.definition, *p, expected));
    if (!tolerance.empty()) {
      BackwardTolerance(p->in, p->options, math, ToGradients(m.definition, *p, expected),
                        ToGradients(m.definition, *p, tolerance));
    }
  };
  for (const Tensor& tensor : Tensors(m.definition)) {
    const ConstTensorView& view = p->in.*tensor.input;
    if (view.present()) {
      c.bytes += static_cast<double>(view.num_elements()) *
                 static_cast<double>(SizeOf(view.dtype()));
    }
  }
  for (const OutputSpec& spec : c.outputs) {
    double bytes = static_cast<double>(SizeOf(spec.dtype));
    for (const int64_t size : spec.sizes) bytes *= static_cast<double>(size);
    c.bytes += problem.step && spec.name != "o" ? 2 * bytes : bytes;  // states are read too
  }
  return c;
}

// The outputs of both passes that exist, in order.
void Describe(const Definition& d, Problem& p, int64_t sequences, bool forward,
              bool backward) {
  const DType dtype = p.in.q.dtype(), state = StateDType(dtype);
  AxisSizes sizes = {p.in.v.size(0), p.in.v.size(1)};
  sizes.G = ValueHeads(p.in);
  sizes.V = ValueSize(p.in);
  const Shape o = OutputShape(d, sizes);
  const StateShapes states(d, sizes, FeaturesOf(d, p.in), sequences);
  const Shape &S = states.S, &z = states.z, &m = states.m;
  if (forward) {
    p.outputs.push_back({"o", dtype, o, {}});
    if (d.causal) p.outputs.push_back({"state", state, S, {}});
    if (d.causal && d.normalize) p.outputs.push_back({"state_z", state, z, {}});
    if (HasMaximum(d)) p.outputs.push_back({"state_m", state, m, {}});
  }
  p.num_forward = p.outputs.size();
  if (!backward) return;
  for (const Tensor& tensor : Tensors(d)) {
    const ConstTensorView& t = p.in.*tensor.input;
    if (!t.present()) continue;
    p.outputs.push_back({std::string("d") + tensor.name, t.dtype(),
                         {t.sizes().begin(), t.sizes().end()}, {}});
  }
  if (d.causal) p.outputs.push_back({"dinitial_state", state, S, {}});
  if (d.causal && d.normalize) p.outputs.push_back({"dinitial_z", state, z, {}});
}

// A normaliser is a sum of features: positive.
const Buffer& FillPositive(const Buffer& buffer, uint64_t seed) {
  Random random(seed);
  Shape index(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return buffer;
  do {
    SetElement(buffer.view(), index, random.Uniform(0.5, 2));
  } while (NextIndex(buffer.view().sizes(), index));
  return buffer;
}

// 3 + 2 N(0, 1), which are mostly open after a sigmoid, and -1e4 here and there.
const Buffer& FillGates(const Buffer& buffer, uint64_t seed, double extreme) {
  Random random(seed);
  Shape index(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return buffer;
  do {
    SetElement(buffer.view(), index, random.Chance(extreme) ? -1e4 : 3 + 2 * random.Normal());
  } while (NextIndex(buffer.view().sizes(), index));
  return buffer;
}

// -strength times an exponential deviate, so that weak and strong ones meet.
const Buffer& FillDecays(const Buffer& buffer, uint64_t seed, double strength,
                         double extreme) {
  Random random(seed);
  Shape index(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return buffer;
  do {
    const double g = random.Chance(extreme) ? -1e4
                                            : strength * std::log(1 - random.Uniform());
    SetElement(buffer.view(), index, g);
  } while (NextIndex(buffer.view().sizes(), index));
  return buffer;
}

class Generator {
 public:
  Generator(const Mechanism& m, DType dtype, uint64_t seed)
      : m_(m), d_(m.definition), dtype_(dtype), parts_(dtype, seed) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Problem Make() {
    Random& random = parts_.random();
    p_.step = d_.causal && random.Chance(0.1);
    const bool packed = !p_.step && random.Chance(0.2);
    const int64_t B = packed ? 1 : random.Chance(0.03) ? 0 : parts_.Integer(1, 3);
    const int64_t T = p_.step ? 1 : parts_.Tokens(), H = parts_.Integer(1, 2);
    const int64_t HV = d_.channels ? parts_.Channels() + parts_.Integer(0, 70)
                                   : H * random.Pick<int64_t>({1, 1, 1, 2, 3});
    const bool wide = d_.feature == recurrence::Feature::kTaylor;
    const int64_t K = wide ? parts_.Integer(1, 9) : parts_.Channels();
    const int64_t V = parts_.Channels();
    const bool projected = recurrence::IsRandom(d_.feature);
    const AxisSizes sizes = {B, T, H, HV, K, V, projected ? parts_.Integer(1, 24) : 0,
                             d_.several_writes ? parts_.Integer(1, 5) : 1};
    for (const Tensor& tensor : Tensors(d_)) {
      if (tensor.optional && !random.Chance(0.4)) continue;
      p_.in.*tensor.input = Filled(tensor, SizesOf(tensor, sizes));
    }
    p_.in.d_o = parts_.Normal(OutputShape(d_, sizes));
    const int64_t sequences =
        p_.step ? B : parts_.Sequences(B, T, packed, p_.options);
    if (!d_.channels && random.Chance(0.3)) {
      // Random features are exponentials of what the scale multiplies.
      p_.options.scale = random.Uniform(0.1, 1.5) /
                         (projected ? std::sqrt(static_cast<double>(K)) : 1);
    }
    const int64_t F = FeaturesOf(d_, p_.in);
    const StateShapes states(d_, sizes, F, sequences);
    const Shape &S = states.S, &z = states.z;
    if (d_.causal && random.Chance(0.5)) {
      p_.in.initial.S = parts_.NormalState(S);
      if (d_.normalize) {
        p_.in.initial.z = parts_.Keep(
            FillPositive(Buffer(StateDType(dtype_), z), parts_.NextSeed()));
      }
      if (HasMaximum(d_)) p_.in.initial.m = parts_.NormalState(states.m);
    }
    if (d_.causal && random.Chance(0.5)) p_.in.d_final.S = parts_.NormalState(S);
    if (d_.causal && d_.normalize && random.Chance(0.5)) {
      p_.in.d_final.z = parts_.NormalState(z);
    }
    Describe(d_, p_, sequences, true, !p_.step && random.Chance(0.6));
    p_.memory = parts_.memory();
    if (p_.step) return p_;
    // Some of them are not asked for; o always is.
    for (size_t i = p_.outputs.size(); i-- > 1;) {
      if (!random.Chance(0.15)) continue;
      p_.outputs.erase(p_.outputs.begin() + static_cast<int64_t>(i));
      if (i < p_.num_forward) --p_.num_forward;
    }
    return p_;
  }

 private:
  TensorView Filled(const Tensor& tensor, const Shape& sizes) {
    Random& random = parts_.random();
    const bool own = tensor.type != Tensor::kSame &&
                     (!HoldsSums(tensor, dtype_) || random.Chance(0.5));
    const Buffer buffer =
        parts_.Make(own ? StateDType(dtype_) : dtype_, sizes, tensor.contiguous_rows());
    if (tensor.values == Tensor::kOpenGates) {
      return parts_.Keep(FillGates(buffer, parts_.NextSeed(), random.Chance(0.2) ? 0.02 : 0));
    }
    if (tensor.values != Tensor::kDecays) {
      return parts_.Keep(FillValues(tensor, buffer, parts_.NextSeed(), p_.in.k));
    }
    const double strength = std::exp(random.Uniform(-7, 2));
    FillDecays(buffer, parts_.NextSeed(), random.Chance(0.1) ? 0 : strength,
               random.Chance(0.2) ? 0.02 : 0);
    return parts_.Keep(buffer);
  }

  const Mechanism& m_;
  const Definition& d_;
  DType dtype_;
  RandomParts parts_;
  Problem p_;
};

}  // namespace

std::vector<int64_t> OutputShape(const Definition& d, const AxisSizes& sizes) {
  if (d.channels) return {sizes.B, sizes.T, sizes.G};
  return {sizes.B, sizes.T, sizes.G, sizes.V};
}

StateShapes::StateShapes(const Definition& d, const AxisSizes& sizes, int64_t features,
                         int64_t sequences)
    : S{sequences, sizes.G, features, sizes.V}, z{sequences, sizes.G, features},
      m{sequences, sizes.G} {
  if (d.channels) S = z = m;
}

const Buffer& FillValues(const Tensor& tensor, const Buffer& buffer, uint64_t seed,
                         const ConstTensorView& keys) {
  if (tensor.values == Tensor::kOpenGates) return FillGates(buffer, seed, 0);
  buffer.FillNormal(seed, 1);
  if (tensor.values == Tensor::kNormal || buffer.view().num_elements() == 0) return buffer;
  Random random(seed);
  const TensorView view = buffer.view();
  const int64_t size = view.size(view.rank() - 1);
  Shape at(view.sizes().size());
  do {
    if (tensor.values == Tensor::kFractions) {
      SetElement(view, at, random.Uniform(0.05, 1));
      continue;
    }
    if (at.back() != 0) continue;  // rows
    const bool like_keys = tensor.values != Tensor::kUnit;
    std::vector<double> row;
    double sum = 0;
    for (at.back() = 0; at.back() < size; ++at.back()) {
      const double noise = GetElement(view, at) / std::sqrt(static_cast<double>(size));
      row.push_back(like_keys ? GetElement(keys, at) + 0.1 * noise : noise);
      sum += row.back() * row.back();
    }
    const double sign = tensor.values == Tensor::kNegativeKeys ? -1 : 1;
    const double factor = sign * (like_keys ? 0.9 : 1) / std::sqrt(std::max(sum, 1e-12));
    for (at.back() = 0; at.back() < size; ++at.back()) {
      SetElement(view, at, factor * row[static_cast<size_t>(at.back())]);
    }
    at.back() = size - 1;
  } while (NextIndex(view.sizes(), at));
  return buffer;
}

void CopyElements(const ConstTensorView& from, const TensorView& to) {
  Shape index(to.sizes().size());
  if (to.num_elements() == 0) return;
  do {
    SetElement(to, index, from.present() ? GetElement(from, index) : 0);
  } while (NextIndex(to.sizes(), index));
}

int64_t RandomParts::Tokens() {
  if (random_.Chance(0.04)) return 0;
  if (random_.Chance(0.5)) return Integer(1, 20);
  return random_.Pick<int64_t>({60, 63, 64, 65, 66, 67, 100, 128, 131});
}

int64_t RandomParts::Channels() {
  if (random_.Chance(0.5)) return Integer(1, 20);
  return random_.Pick<int64_t>({1, 3, 8, 15, 16, 17, 31, 32, 33, 40, 48, 64, 65});
}

Buffer RandomParts::Make(DType dtype, const Shape& sizes, bool rows) {
  const Placement placement =
      random_.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
  if (sizes.size() < 3 || random_.Chance(0.4)) {
    Shape row_major(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) {
      row_major[i - 1] = row_major[i] * std::max<int64_t>(sizes[i], 1);
    }
    return Buffer(dtype, sizes, row_major, placement, Integer(0, 9));
  }
  // Sequences outside, the axes between them and the rows in any order.
  rows = rows || sizes.size() > 3;
  Shape strides(sizes.size(), 1);
  int64_t next = rows ? std::max<int64_t>(sizes.back(), 1) + Integer(0, 3) : 1;
  std::vector<size_t> order;
  for (size_t axis = 1; axis < sizes.size() - (rows ? 1 : 0); ++axis) order.push_back(axis);
  for (size_t i = order.size(); i-- > 1;) {
    std::swap(order[i], order[static_cast<size_t>(Integer(0, static_cast<int64_t>(i)))]);
  }
  order.push_back(0);
  for (const size_t axis : order) {
    strides[axis] = next;
    next = next * std::max<int64_t>(sizes[axis], 1) + Integer(0, 5);
  }
  return Buffer(dtype, sizes, strides, placement, Integer(0, 9));
}

TensorView RandomParts::Normal(const Shape& sizes) {
  return Keep(Make(dtype_, sizes, true).FillNormal(NextSeed(), 1));
}

TensorView RandomParts::NormalState(const Shape& sizes) {
  return Keep(Buffer(StateDType(dtype_), sizes).FillNormal(NextSeed()));
}

ConstTensorView RandomParts::Ints(const Shape& values) {
  const Buffer buffer(random_.Chance(0.5) ? DType::kI32 : DType::kI64,
                      {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    buffer.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
  }
  return Keep(buffer);
}

int64_t RandomParts::Sequences(int64_t B, int64_t T, bool packed, Options& options) {
  options.reverse = random_.Chance(0.3);
  const auto bounds = [&](int64_t count) {
    Shape values;
    for (int64_t i = 0; i < count; ++i) values.push_back(Integer(0, T));
    return values;
  };
  if (!packed) {
    if (random_.Chance(0.3)) options.lengths = Ints(bounds(B));
    if (random_.Chance(0.2)) options.starts = Ints(bounds(B));
    return B;
  }
  const int64_t sequences = Integer(0, 4);
  Shape values = bounds(sequences);
  values.push_back(0);
  std::sort(values.begin(), values.end());
  options.cu_seqlens = Ints(values);
  return sequences;
}

Case MakeCase(const Mechanism& m, const CaseRequest& request) {
  const Definition& d = m.definition;
  const Sizes& s = request.sizes;
  const bool backward = request.pass == "backward";
  Problem p;
  // Features of pairs of channels: 300 at 24 channels, 30,000 at 256, which no one has.
  const int64_t K = d.feature == recurrence::Feature::kTaylor ? std::min<int64_t>(s.D, 24)
                                                              : s.D;
  p.step = request.pass == "step";
  if (!backward && !p.step && request.pass != "forward") {
    throw InvalidArgument(m.name + ": pass is " + request.pass +
                          ", expected forward, backward or step");
  }
  uint64_t seed = request.seed * 16;
  const int64_t T = p.step ? 1 : s.Tq;
  const bool projected = recurrence::IsRandom(d.feature);
  // Channels are those of all heads of values.
  const int64_t heads = d.channels ? s.Hq * s.Dv : s.Hq;
  const AxisSizes axes = {s.B,  T, s.Hkv, heads, K,
                          s.Dv, projected ? std::min<int64_t>(4 * K, 256) : 0,
                          d.several_writes ? 2 : 1};
  if (backward) {
    p.in.d_o = p.Keep(Buffer(request.dtype, OutputShape(d, axes), Placement::kAligned)
                          .FillNormal(++seed));
  }
  const std::string words = "+" + request.variant + "+";
  const auto has = [&](const char* word) { return words.find(word) != std::string::npos; };
  for (const Tensor& t : Tensors(d)) {
    // Decays of columns are an addition, those of tokens left out where they may be.
    const bool adds = t.input == &Inputs::log_decay_v;
    if (t.optional && (adds ? !has("+columns+") : has("+ungated+"))) continue;
    const DType dtype = HoldsSums(t, request.dtype) ? request.dtype : StateDType(request.dtype);
    const Buffer buffer(dtype, SizesOf(t, axes), Placement::kAligned);
    if (t.values == Tensor::kOpenGates) {
      // The same decays before a sigmoid.
      if (has("+vanishing+") || has("+faint+")) {
        buffer.FillConstant(std::log(has("+faint+") ? 1e8 : 1e6));
      } else {
        FillGates(buffer, ++seed, has("+strong+") ? 0.02 : 0);
      }
    } else if (t.values != Tensor::kDecays) {
      FillValues(t, buffer, ++seed, p.in.k);
    } else if (has("+vanishing+")) {
      buffer.FillConstant(std::log1p(-1e-6));
    } else if (has("+faint+")) {  // less than half a rounding of 1
      buffer.FillConstant(-1e-8);
    } else {
      FillDecays(buffer, ++seed, 0.05, has("+strong+") ? 0.02 : 0);
    }
    p.in.*t.input = p.Keep(buffer);
  }
  const int64_t F = FeaturesOf(d, p.in);
  const StateShapes states(d, axes, F, s.B);
  p.note = request.variant;
  for (size_t begin = 0; begin < request.variant.size();) {
    const size_t end = std::min(request.variant.find('+', begin), request.variant.size());
    const std::string word = request.variant.substr(begin, end - begin);
    begin = end + 1;
    if (word == "reverse" && !p.step) {
      p.options.reverse = true;
    } else if (word == "state" && d.causal) {
      const DType wide = StateDType(request.dtype);
      p.in.initial.S = p.Keep(Buffer(wide, states.S).FillNormal(++seed));
      if (d.normalize) p.in.initial.z = p.Keep(FillPositive(Buffer(wide, states.z), ++seed));
      if (HasMaximum(d)) p.in.initial.m = p.Keep(Buffer(wide, states.m).FillNormal(++seed));
    } else if (word.rfind("lengths", 0) == 0 && !p.step) {
      const double percent = word.size() > 8 ? std::stod(word.substr(8)) : 62;
      p.options.lengths = p.Keep(Buffer(DType::kI64, {s.B}).FillConstant(
          std::floor(static_cast<double>(T) * percent / 100)));
    }
  }
  Describe(d, p, s.B, !backward, backward);
  Case c = ToCase(m, p);
  c.pass = request.pass;
  double tokens = static_cast<double>(s.B * T);
  if (p.options.lengths.present() && s.B > 0) {
    tokens = static_cast<double>(s.B * p.options.lengths.as<int64_t>()[0]);
  }
  const double products = d.channels ? kFlopsOfChannels * (backward ? 2 : 1)
                          : d.delta == recurrence::Delta::kNone ? (backward ? 12 : 4)
                          : d.delta == recurrence::Delta::kAfterDecay ? (backward ? 18 : 6)
                                                                      : (backward ? 22 : 8);
  c.flops = products * tokens *
            static_cast<double>(d.channels ? heads : s.Hq * F * s.Dv * axes.N);
  if (projected) {
    c.flops += (backward ? 12 : 4) * tokens * static_cast<double>(s.Hkv * F * K);
  }
  return c;
}

Case RandomCase(const Mechanism& m, DType dtype, uint64_t seed) {
  return ToCase(m, Generator(m, dtype, seed).Make());
}

std::vector<InputSpec> InputsOf(const Definition& d) {
  std::vector<InputSpec> inputs;
  for (const Tensor& tensor : Tensors(d)) {
    std::string axes = tensor.axes;
    std::replace(axes.begin(), axes.end(), 'G', 'H');
    inputs.push_back({tensor.name, axes, tensor.optional, tensor.type != Tensor::kSame});
  }
  return inputs;
}

TensorCall CallOn(const Mechanism& m, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale) {
  const auto p = std::make_shared<Problem>();
  for (const Tensor& tensor : Tensors(m.definition)) {
    const auto found = tensors.find(tensor.name);
    if (found != tensors.end()) p->in.*tensor.input = found->second;
  }
  p->options.scale = scale;
  const Explanation plan =  // checks everything first
      m.explain ? m.explain(ctx, p->in, p->options)
                : Explain(m.name.c_str(), ctx, m.definition, p->in, p->options);
  Describe(m.definition, *p, p->in.q.size(0), true, false);
  return {.outputs = p->outputs,
          .run = [m, p](Context& run_ctx, std::span<const TensorView> views) {
            m.forward(run_ctx, p->in, p->options, ToOutputs(*p, views));
          },
          .causal = m.definition.causal,
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace heed::recurrent
