// Problems from tables: titles, outputs, memory, and runs.
#include "heed/harness/mechanism/problem_case.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>

#include "heed/core/error.h"

namespace heed::mechanism {
namespace {

// The sizes that the shapes of a problem's inputs determine.
AxisSizes SizesOf(const Mechanism& m, const Problem& p) {
  AxisSizes sizes;
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    const ConstTensorView& t = p.inputs[i];
    if (!t.present()) continue;
    const std::string_view axes = AxesOfRank(m.tensors[i].axes, t.rank());
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      sizes[axes[axis]] = t.size(static_cast<int>(axis));
    }
  }
  if (m.derive) m.derive(sizes);
  return sizes;
}

std::string Title(const Mechanism& m, const Problem& p) {
  std::string text = m.name + " " + Name(p.inputs[0].dtype()) + m.options;
  const auto add = [&](const std::string& name, const ConstTensorView& view) {
    if (!view.present()) return;
    text += " " + name + view.ShapeString() + "/" + ShapeString(view.strides());
  };
  for (size_t i = 0; i < m.tensors.size(); ++i) add(m.tensors[i].name, p.inputs[i]);
  add("d_o", p.d_o);
  add("lengths", p.options.lengths);
  add("starts", p.options.starts);
  add("cu_seqlens", p.options.cu_seqlens);
  for (size_t i = 0; i < m.states.size(); ++i) {
    add("initial_" + m.states[i].name, p.initial[i]);
    add("d_" + m.states[i].name, p.d_final[i]);
  }
  if (p.options.scale) text += " scale=" + std::to_string(*p.options.scale);
  if (p.options.reverse) text += " reverse";
  if (p.step) text += " step";
  return text + " " + p.note;
}

// Describes the outputs of both passes where they exist, in order; outputs of o's shape have the strides of `like`.
void Describe(const Mechanism& m, int64_t sequences, bool forward, bool backward, const Shape& like, Problem& p) {
  AxisSizes sizes = SizesOf(m, p);
  const DType dtype = p.inputs[0].dtype();
  const Shape o = ShapeOf(m.o_axes, sizes);
  sizes.B = sequences;
  const auto add_states = [&](std::string StateRow::* name) {
    if (p.stateless) return;
    for (const StateRow& state : m.states) {
      if ((state.*name).empty()) continue;
      p.outputs.push_back({state.*name, StateDType(dtype), ShapeOf(state.axes, sizes), {}});
    }
  };
  if (forward) {
    p.outputs.push_back({"o", dtype, o, like});
    add_states(&StateRow::name);
  }
  p.num_forward = p.outputs.size();
  if (!backward) return;
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    const ConstTensorView& t = p.inputs[i];
    if (!t.present() || !IsFloat(t.dtype())) continue;
    const Shape shape(t.sizes().begin(), t.sizes().end());
    p.outputs.push_back({"d" + m.tensors[i].name, t.dtype(), shape, shape == o ? like : Shape()});
  }
  add_states(&StateRow::gradient);
}

// Copies the initial state to the state that a step updates in place.
void Begin(const Mechanism& m, const Problem& p, Views views) {
  for (size_t i = 0; i < p.num_forward; ++i) {
    for (size_t k = 0; k < m.states.size(); ++k) {
      if (p.outputs[i].name != m.states[k].name || views[i].num_elements() == 0) continue;
      Shape at(views[i].sizes().size());
      do {
        const ConstTensorView& from = p.initial[k];
        SetElement(views[i], at, from.present() ? GetElement(from, at) : m.states[k].absent);
      } while (NextIndex(views[i].sizes(), at));
    }
  }
}

double BytesOf(const Problem& p) {
  double bytes = 0;
  for (const ConstTensorView& t : p.inputs) bytes += Bytes(t);
  for (const OutputSpec& spec : p.outputs) {
    double of_output = static_cast<double>(SizeOf(spec.dtype));
    for (const int64_t size : spec.sizes) of_output *= static_cast<double>(size);
    bytes += p.step && spec.name != "o" ? 2 * of_output : of_output;  // states are read too
  }
  return bytes;
}

Case ToCase(const Mechanism& mechanism, const Problem& problem) {
  const auto m = std::make_shared<const Mechanism>(mechanism);
  const auto p = std::make_shared<const Problem>(problem);
  const bool forward = p->num_forward > 0, backward = p->num_forward < p->outputs.size();
  Case c;
  c.title = Title(*m, *p);
  c.outputs = p->outputs;
  c.bytes = BytesOf(*p);
  c.run = [=](Context& ctx, Views views) {
    if (p->step) {
      Begin(*m, *p, views);
      return m->step(ctx, *p, views);
    }
    if (forward) m->forward(ctx, *p, views);
    if (backward) m->backward(ctx, *p, views);
  };
  if (p->step) c.timed = [=](Context& ctx, Views views) { m->step(ctx, *p, views); };
  c.reference = [=](Views expected, Views tolerance) {
    if (forward) m->reference(*p, expected, tolerance);
    if (backward) m->backward_reference(*p, expected, tolerance);
  };
  return c;
}

std::vector<InputSpec> InputsOf(const Mechanism& m) {
  std::vector<InputSpec> inputs;
  for (const Row& row : m.tensors) {
    // Files have the form per token without groups, as checkpoints do.
    const bool several = row.axes.find('|') != std::string::npos;
    inputs.push_back(
        {row.name, several ? std::string(AxesOfRank(row.axes, 3)) : row.axes, row.optional, row.type != kSame});
  }
  return inputs;
}

// The pass that a call on given tensors computes.
enum class Use { kForward, kTrain, kStep };

TensorCall CallOn(const Mechanism& m, Use use, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale) {
  if (scale && !m.has_scale) {
    throw InvalidArgument(m.name + ": scale is given, expected none: it has no such option");
  }
  const auto find = [&](const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  const auto p = std::make_shared<Problem>();
  for (const Row& row : m.tensors) p->inputs.push_back(find(row.name));
  for (const StateRow& state : m.states) p->initial.push_back(find("initial_" + state.name));
  p->d_final.resize(m.states.size());
  p->d_o = find("d_o");
  p->options.scale = scale;
  TensorCall call = m.explain(ctx, *p);  // throws if the arguments are invalid
  if (use == Use::kStep && !m.causal) {
    throw InvalidArgument(m.name + ": causal is false, expected true: one token at a time");
  }
  Describe(m, p->inputs[0].size(0), true, use == Use::kTrain, {}, *p);
  call.outputs = p->outputs;
  call.causal = m.causal;
  call.run = [m, p, use](Context& run_ctx, Views views) {
    if (use == Use::kStep) return m.step(run_ctx, *p, views);
    m.forward(run_ctx, *p, views);
    if (use == Use::kTrain) m.backward(run_ctx, *p, views);
  };
  if (use == Use::kTrain) {
    call.workspace_bytes = std::max(call.workspace_bytes, m.backward_workspace(ctx, *p));
  }
  return call;
}

}  // namespace

void Bind(std::span<const Tensor> tensors, std::span<const StateTensor> states, const char* o_axes,
          const std::shared_ptr<const Calls>& calls, Mechanism& m) {
  m.tensors.assign(tensors.begin(), tensors.end());
  m.states.assign(states.begin(), states.end());
  m.o_axes = o_axes;
  const auto table = std::make_shared<const Mechanism>(m);  // without functions
  m.forward = [=](Context& ctx, const Problem& p, Views views) {
    calls->Forward(ctx, ArgumentsOf(p), p.options, ForwardResults(*table, p, views));
  };
  m.backward = [=](Context& ctx, const Problem& p, Views views) {
    calls->Backward(ctx, ArgumentsOf(p), p.options, BackwardResults(*table, p, views));
  };
  m.reference = [=](const Problem& p, Views expected, Views tolerance) {
    const ResultViews of_expected = ForwardResults(*table, p, expected);
    if (tolerance.empty()) return calls->Reference(ArgumentsOf(p), p.options, of_expected, nullptr);
    const ResultViews of_tolerance = ForwardResults(*table, p, tolerance);
    const Results tolerances = of_tolerance;
    calls->Reference(ArgumentsOf(p), p.options, of_expected, &tolerances);
  };
  m.backward_reference = [=](const Problem& p, Views expected, Views tolerance) {
    const ResultViews of_expected = BackwardResults(*table, p, expected);
    if (tolerance.empty()) return calls->BackwardReference(ArgumentsOf(p), p.options, of_expected, nullptr);
    const ResultViews of_tolerance = BackwardResults(*table, p, tolerance);
    const Results tolerances = of_tolerance;
    calls->BackwardReference(ArgumentsOf(p), p.options, of_expected, &tolerances);
  };
  m.explain = [=](const Context& ctx, const Problem& p) {
    const Explanation plan = calls->Explain(ctx, ArgumentsOf(p), p.options);
    return TensorCall{.kernel = plan.kernel,
                      .target = plan.target,
                      .why = plan.why,
                      .flops = plan.flops,
                      .workspace_bytes = plan.workspace_bytes};
  };
  m.backward_workspace = [=](const Context& ctx, const Problem& p) {
    return calls->BackwardWorkspace(ctx, ArgumentsOf(p), p.options);
  };
  if (!calls->has_step()) return;
  m.step = [=](Context& ctx, const Problem& p, Views views) {
    ResultViews out = ForwardResults(*table, p, views);
    out.o = WithoutTokens(table->o_axes, out.o);
    const TokenArguments token(*table, p);
    calls->Step(ctx, {.tensors = token.tensors}, p.options, out);
  };
}

StateRow::StateRow(const StateTensor& state) : axes(state.axes), absent(state.absent) {
  switch (state.role) {
    case StateTensor::kState: name = "state", gradient = "dinitial_state"; break;
    case StateTensor::kNormaliser: name = "state_z", gradient = "dinitial_z", positive = true; break;
    case StateTensor::kMaximum: name = "state_m"; break;
    case StateTensor::kTail: name = "state_tail", gradient = "dinitial_state_tail"; break;
    case StateTensor::kCurvature: name = "state_A", gradient = "dinitial_A", positive = true; break;
    case StateTensor::kAngle: name = "state_angle", gradient = "dinitial_angle"; break;
    case StateTensor::kLastKey: name = "state_k", gradient = "dinitial_k"; break;
    case StateTensor::kLastValue: name = "state_v", gradient = "dinitial_v"; break;
  }
}

Arguments ArgumentsOf(const Problem& p) { return {p.inputs, p.initial, p.d_o, p.d_final}; }

ResultViews ForwardResults(const Mechanism& m, const Problem& p, Views views) {
  ResultViews results;
  results.states.resize(m.states.size());
  for (size_t i = 0; i < p.num_forward; ++i) {
    if (p.outputs[i].name == "o") results.o = views[i];
    for (size_t k = 0; k < m.states.size(); ++k) {
      if (p.outputs[i].name == m.states[k].name) results.states[k] = views[i];
    }
  }
  return results;
}

ResultViews BackwardResults(const Mechanism& m, const Problem& p, Views views) {
  ResultViews results;
  results.states.resize(m.states.size());
  results.gradients.resize(m.tensors.size());
  for (size_t i = p.num_forward; i < p.outputs.size(); ++i) {
    for (size_t k = 0; k < m.tensors.size(); ++k) {
      if (p.outputs[i].name == "d" + m.tensors[k].name) results.gradients[k] = views[i];
    }
    for (size_t k = 0; k < m.states.size(); ++k) {
      if (p.outputs[i].name == m.states[k].gradient) results.states[k] = views[i];
    }
  }
  return results;
}

TokenArguments::TokenArguments(const Mechanism& m, const Problem& p) {
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    tensors.push_back(WithoutTokens(AxesOfRank(m.tensors[i].axes, p.inputs[i].rank()), p.inputs[i]));
  }
}

std::optional<double> Words::Number(const std::string& name, double otherwise) const {
  if (Has(name)) return otherwise;
  const size_t at = text_.find("+" + name + "=");
  if (at == std::string::npos) return std::nullopt;
  return std::stod(text_.substr(at + name.size() + 2));
}

const Buffer& FillEach(const Buffer& buffer, uint64_t seed, const std::function<double(Random&)>& value) {
  Random random(seed);
  Shape at(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return buffer;
  do {
    SetElement(buffer.view(), at, value(random));
  } while (NextIndex(buffer.view().sizes(), at));
  return buffer;
}

std::vector<Shape> Maker::StateShapes(int64_t sequences) const {
  AxisSizes sizes = sizes_;
  sizes.B = sequences;
  std::vector<Shape> shapes;
  for (const StateRow& state : m_.states) shapes.push_back(mechanism::ShapeOf(state.axes, sizes));
  return shapes;
}

Case Maker::RandomCase() {
  p_.note = "seed=" + std::to_string(case_seed_);
  p_.initial.resize(m_.states.size());
  p_.d_final.resize(m_.states.size());
  p_.step = m_.step && !m_.states.empty() && Chance(0.1);
  const bool packed = !p_.step && Chance(0.2);
  sizes_.B = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 3);
  sizes_.T = p_.step ? 1 : Tokens();
  DrawSizes();
  for (const Row& row : m_.tensors) p_.inputs.push_back(DrawInput(row));
  p_.d_o = DrawOutputGradient(OutputShape());
  const int64_t sequences = p_.step ? sizes_.B : DrawSequences(packed);
  DrawOptions();
  DrawStates(StateShapes(sequences));
  const Shape like = DrawStrides();
  Describe(m_, sequences, true, !p_.step && Chance(0.6), like, p_);
  // Some outputs are not requested; o always is.
  for (size_t i = p_.outputs.size(); !p_.step && i-- > 1;) {
    if (!Chance(0.15)) continue;
    p_.outputs.erase(p_.outputs.begin() + static_cast<int64_t>(i));
    if (i < p_.num_forward) --p_.num_forward;
  }
  return ToCase(m_, p_);
}

// A normaliser is a sum of features, which are positive.
const Buffer& FillState(const StateRow& state, const Buffer& buffer, uint64_t seed) {
  if (!state.positive) return buffer.FillNormal(seed);
  return FillEach(buffer, seed, [](Random& random) { return random.Uniform(0.5, 2); });
}

void Maker::DrawStates(const std::vector<Shape>& shapes) {
  if (m_.states.empty()) return;
  if (Chance(0.5)) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      p_.initial[i] = Keep(FillState(m_.states[i], Buffer(wide(), shapes[i]), NextSeed()));
    }
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (m_.states[i].gradient.empty() || !Chance(0.5)) continue;
    p_.d_final[i] = NormalState(shapes[i]);
  }
}

Case Maker::MakeCase(const CaseRequest& request) {
  const bool backward = request.pass == "backward";
  p_.step = request.pass == "step" && m_.step;
  if (!backward && !p_.step && request.pass != "forward") {
    throw InvalidArgument(m_.name + ": pass is " + request.pass + ", expected forward" +
                          (m_.step ? ", backward or step" : " or backward"));
  }
  p_.note = request.variant;
  p_.initial.resize(m_.states.size());
  p_.d_final.resize(m_.states.size());
  words_ = Words(request.variant);
  sizes_.B = request.sizes.B;
  sizes_.T = p_.step ? 1 : request.sizes.Tq;
  SetSizes(request.sizes);
  for (const Row& row : m_.tensors) p_.inputs.push_back(MakeInput(row));
  const Shape like = Strides();
  if (backward) {
    const Shape o = OutputShape();
    const Buffer d_o =
        like.empty() ? Buffer(dtype_, o, Placement::kAligned) : Buffer(dtype_, o, like, Placement::kAligned);
    p_.d_o = Keep(d_o.FillNormal(NextSeed()));
  }
  if (p_.step || (words_.Has("state") && !p_.stateless)) {
    const std::vector<Shape> shapes = StateShapes(sizes_.B);
    for (size_t i = 0; i < shapes.size(); ++i) {
      p_.initial[i] = Keep(FillState(m_.states[i], Buffer(wide(), shapes[i]), NextSeed()));
    }
  }
  p_.options.reverse = words_.Has("reverse") && !p_.step && m_.has_direction;
  int64_t tokens = sizes_.T;
  if (const auto percent = words_.Number("lengths", 62); percent && !p_.step) {
    tokens = static_cast<int64_t>(std::floor(static_cast<double>(tokens) * *percent / 100));
    p_.options.lengths = Keep(Buffer(DType::kI64, {sizes_.B}).FillConstant(static_cast<double>(tokens)));
  }
  Describe(m_, sizes_.B, !backward, backward, like, p_);
  Case c = ToCase(m_, p_);
  c.pass = request.pass;
  c.flops = Flops(tokens, backward);
  return c;
}

int64_t Maker::Tokens() {
  if (Chance(0.04)) return 0;
  if (Chance(0.5)) return Integer(1, 20);
  return random_.Pick<int64_t>({60, 63, 64, 65, 66, 67, 100, 128, 131});
}

int64_t Maker::Channels() {
  if (Chance(0.5)) return Integer(1, 20);
  return random_.Pick<int64_t>({1, 3, 8, 15, 16, 17, 31, 32, 33, 40, 48, 64, 65});
}

Buffer Maker::AnyLayout(DType dtype, const Shape& sizes, bool rows) {
  const Placement placement = AnyGuard();
  if (sizes.size() < 3 || Chance(0.4)) {
    Shape row_major(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) {
      row_major[i - 1] = row_major[i] * std::max<int64_t>(sizes[i], 1);
    }
    return Buffer(dtype, sizes, row_major, placement, Integer(0, 9));
  }
  // Sequences are the outermost axis; the axes between them and the rows are in any order.
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

TensorView Maker::Normal(const Shape& sizes) { return Keep(AnyLayout(dtype_, sizes, true).FillNormal(NextSeed(), 1)); }

TensorView Maker::NormalState(const Shape& sizes) {
  return Keep(Buffer(StateDType(dtype_), sizes).FillNormal(NextSeed()));
}

ConstTensorView Maker::Ints(const Shape& values) {
  const Buffer buffer(Chance(0.5) ? DType::kI32 : DType::kI64, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    buffer.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
  }
  return Keep(buffer);
}

int64_t Maker::DrawSequences(bool packed) {
  const int64_t B = sizes_.B, T = sizes_.T;
  p_.options.reverse = Chance(0.3) && m_.has_direction;
  const auto bounds = [&](int64_t count) {
    Shape values;
    for (int64_t i = 0; i < count; ++i) values.push_back(Integer(0, T));
    return values;
  };
  if (!packed) {
    if (Chance(0.3)) p_.options.lengths = Ints(bounds(B));
    if (Chance(0.2)) p_.options.starts = Ints(bounds(B));
    return B;
  }
  const int64_t sequences = Integer(0, 4);
  Shape values = bounds(sequences);
  values.push_back(0);
  std::sort(values.begin(), values.end());
  p_.options.cu_seqlens = Ints(values);
  return sequences;
}

OpEntry EntryOf(OpEntry entry, const Mechanism& plain) {
  entry.name = plain.name;
  entry.passes = {"forward", "backward"};
  if (plain.step) entry.passes.emplace_back("step");
  entry.dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  entry.inputs = InputsOf(plain);
  const auto as = [m = std::make_shared<const Mechanism>(plain)](Use use) {
    return [m, use](const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
      return CallOn(*m, use, ctx, tensors, scale);
    };
  };
  entry.call = as(Use::kForward);
  entry.train = as(Use::kTrain);
  if (plain.step) entry.step = as(Use::kStep);
  return entry;
}

}  // namespace heed::mechanism
