// Cases and verbs of operations that no table of mechanisms describes: each says once, as a Form, what its tensors are.
#ifndef HEED_HARNESS_MECHANISM_STATE_CASE_H_
#define HEED_HARNESS_MECHANISM_STATE_CASE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/structs.h"

namespace heed::mechanism {

// An input and its gradient. Axes, `optional` and `wide` are those of InputSpec; files do not have an input without
// axes.
template <class BackwardInputs, class Gradients>
struct DifferentiableInput {
  const char *name, *axes;
  ConstTensorView BackwardInputs::* from;
  TensorView Gradients::* to;
  bool optional = false, wide = false;
};

// Arguments of one call with their memory, which copies share. The gradient of o is absent in a forward pass; in a
// step, the initial state is the state.
template <class BackwardInputs, class Options>
struct StateProblem {
  BackwardInputs in;
  Options options;
  std::string pass = "forward";
  std::vector<OutputSpec> outputs;
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

// A result of the forward pass. The first one is o, and that of a recurrence is called "state".
template <class BackwardInputs, class Options, class Outputs>
struct Result {
  const char* name;
  TensorView Outputs::* to;
  Shape (*shape)(const StateProblem<BackwardInputs, Options>&);
  ConstTensorView BackwardInputs::* read = nullptr;  // the input of the backward pass that it is
  bool wide = false;                                 // in the dtype of states
  bool spare = false;                                // may be absent, and verbs request it only to train
};

// An operation. `step` is null if it has none.
template <class InputsOf, class BackwardInputsOf, class OptionsOf, class OutputsOf, class GradientsOf>
struct Form {
  using Inputs = InputsOf;
  using BackwardInputs = BackwardInputsOf;
  using Options = OptionsOf;
  using Outputs = OutputsOf;
  using Gradients = GradientsOf;
  using Problem = StateProblem<BackwardInputs, Options>;

  const char* name;
  std::span<const DifferentiableInput<BackwardInputs, Gradients>> inputs;
  std::span<const Result<BackwardInputs, Options, Outputs>> results;
  void (*forward)(Context&, const Inputs&, const Options&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Options&, const Gradients&);
  Explanation (*explain)(const Context&, const Inputs&, const Options&);
  int64_t (*backward_workspace)(const Context&, const Inputs&, const Options&);
  void (*step)(Context&, const Inputs&, const Options&, const TensorView& state, const TensorView& o) = nullptr;

  DType DTypeOf(const Problem& p) const { return (p.in.*inputs[0].from).dtype(); }
};

inline Shape SizesOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// The number of sequences, each of which has a state.
template <class Problem>
int64_t NumSequences(const Problem& p) {
  return p.options.cu_seqlens.present() ? p.options.cu_seqlens.size(0) - 1 : p.in.q.size(0);
}

// [B, T, H, V] with the heads of q, and [B, H, T].
template <class Problem>
Shape ShapeOfRows(const Problem& p) {
  return {p.in.q.size(0), p.in.q.size(1), p.in.q.size(2), p.in.v.size(3)};
}
template <class Problem>
Shape ShapeOfSums(const Problem& p) {
  return {p.in.q.size(0), p.in.q.size(2), p.in.q.size(1)};
}

// Describes the outputs of a pass: the gradients of all inputs that are present; o without its tokens and the state;
// or all results, without spare ones on request.
template <class Form>
void DescribeOutputs(const Form& form, typename Form::Problem& p, bool spare = true) {
  p.outputs.clear();
  if (p.pass == "backward") {
    for (const auto& input : form.inputs) {
      const ConstTensorView& of = p.in.*input.from;
      if (of.present()) p.outputs.push_back({std::string("d") + input.name, of.dtype(), SizesOf(of), {}});
    }
    return;
  }
  const DType dtype = form.DTypeOf(p);
  const bool step = p.pass == "step";
  for (const auto& result : form.results) {
    if (result.spare && (step || !spare)) continue;
    p.outputs.push_back({result.name, result.wide ? StateDType(dtype) : dtype, result.shape(p), {}});
  }
  if (step) p.outputs[0].sizes.erase(p.outputs[0].sizes.begin() + 1);
}

// o of one token as a tensor with an axis of tokens.
inline TensorView WithToken(const TensorView& o) {
  return {o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)}, {o.stride(0), 0, o.stride(1), o.stride(2)}};
}

// The results and the gradients to write: views of the problem's outputs.
template <class Form>
typename Form::Outputs OutputsOf(const Form& form, const typename Form::Problem& p, Views views) {
  typename Form::Outputs out;
  size_t next = 0;
  for (const auto& result : form.results) {
    if (next < views.size() && p.outputs[next].name == result.name) out.*result.to = views[next++];
  }
  if (p.pass == "step") out.o = WithToken(out.o);
  return out;
}
template <class Form>
typename Form::Gradients GradientsOf(const Form& form, const typename Form::Problem& p, Views views) {
  typename Form::Gradients out;
  size_t next = 0;
  for (const auto& input : form.inputs) {
    if ((p.in.*input.from).present()) out.*input.to = views[next++];
  }
  return out;
}

// The arguments of a step on the one token of these: tensors without the axis of tokens, and no initial state.
template <class Form>
typename Form::Inputs TokenOf(const Form& form, const typename Form::BackwardInputs& in) {
  typename Form::BackwardInputs token;
  for (const auto& input : form.inputs) token.*input.from = WithoutTokens(input.axes, in.*input.from);
  if constexpr (requires { token.initial_state; }) token.initial_state = {};
  return token;
}

void CopyElements(const ConstTensorView& from, const TensorView& to);
void AddToken(const TensorView& positions);

// Runs the pass of a problem.
template <class Form>
void Run(const Form& form, const typename Form::Problem& p, Context& ctx, Views views) {
  if (p.pass == "backward") return form.backward(ctx, p.in, p.options, GradientsOf(form, p, views));
  if (p.pass == "forward") return form.forward(ctx, p.in, p.options, OutputsOf(form, p, views));
  if constexpr (requires { p.in.initial_state; }) CopyElements(p.in.initial_state, views[1]);
  form.step(ctx, TokenOf(form, p.in), p.options, views[1], views[0]);
}

// Keeps the results of the forward pass that the backward pass reads, as `forward` computes them.
template <class Form, class Forward>
void KeepResults(const Form& form, const Forward& forward, typename Form::Problem& p) {
  typename Form::Outputs out;
  const DType dtype = form.DTypeOf(p);
  for (const auto& result : form.results) {
    if (result.spare && result.read == nullptr) continue;
    out.*result.to = p.Keep(Buffer(result.wide ? StateDType(dtype) : dtype, result.shape(p)));
  }
  forward(p.in, p.options, out);
  for (const auto& result : form.results) {
    if (result.read != nullptr) p.in.*result.read = out.*result.to;
  }
}

// Turns a problem into one of the backward pass: keeps the gradients that it starts from, and the results of the
// reference. An absent d_lse is zeros.
template <class Form, class Reference>
void StartBackward(const Form& form, const Reference& reference, const Buffer& d_o, const Buffer& d_lse,
                   typename Form::Problem& p) {
  p.pass = "backward";
  p.in.d_o = p.Keep(d_o);
  if (d_lse.present()) p.in.d_lse = p.Keep(d_lse);
  KeepResults(form, reference, p);
}

// A case with its title and bytes.
using NamedViews = std::vector<std::pair<const char*, ConstTensorView>>;
Case DescribedCase(const std::string& op, const std::string& pass, const NamedViews& arguments,
                   const std::vector<OutputSpec>& outputs);

// A case of this problem without a reference. A forward pass is timed without the results that may be absent.
template <class Form>
Case CaseOf(const Form& form, const std::shared_ptr<const typename Form::Problem>& p) {
  NamedViews arguments;
  for (const auto& input : form.inputs) arguments.emplace_back(input.name, p->in.*input.from);
  for (const auto& result : form.results) {
    if (result.read != nullptr) arguments.emplace_back(result.name, p->in.*result.read);
  }
  arguments.emplace_back("d_o", p->in.d_o);
  if constexpr (requires { p->in.d_final_state; }) arguments.emplace_back("d_state", p->in.d_final_state);
  if constexpr (requires { p->in.d_u; }) arguments.emplace_back("d_u", p->in.d_u);
  if constexpr (requires { p->in.d_lse; }) arguments.emplace_back("d_lse", p->in.d_lse);
  if constexpr (requires { p->options.cu_seqlens; }) {
    arguments.insert(
        arguments.end(),
        {{"lengths", p->options.lengths}, {"starts", p->options.starts}, {"cu_seqlens", p->options.cu_seqlens}});
  }
  if constexpr (requires { p->options.positions; }) arguments.emplace_back("positions", p->options.positions);
  Case c = DescribedCase(std::string(form.name) + " " + Name(form.DTypeOf(*p)), p->pass, arguments, p->outputs);
  c.run = [form, p](Context& ctx, Views views) { Run(form, *p, ctx, views); };
  if (p->pass != "forward") return c;
  c.timed = [form, p](Context& ctx, Views views) {
    typename Form::Outputs out = OutputsOf(form, *p, views);
    for (const auto& result : form.results.subspan(1)) {
      if (result.read == nullptr || result.spare) out.*result.to = {};
    }
    form.forward(ctx, p->in, p->options, out);
  };
  return c;
}

// Throws InvalidArgument unless the form has the pass of the request.
template <class Form>
void CheckPass(const Form& form, const CaseRequest& request) {
  const std::string& pass = request.pass;
  if (pass == "forward" || pass == "backward" || (pass == "step" && form.step != nullptr)) return;
  throw InvalidArgument(std::string(form.name) + ": pass is " + pass + ", expected forward" +
                        (form.step != nullptr ? ", backward or step" : " or backward"));
}

// The pass that a verb calls.
enum class Use { kForward, kTrain, kStep };

// Calls a form on given tensors. Where an option has the tokens before the first one, their number is a state of its
// own, "state_positions".
template <class Form>
TensorCall CallOn(const Form& form, Use use, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale) {
  const auto find = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView() : found->second;
  };
  typename Form::Problem problem;
  for (const auto& input : form.inputs) problem.in.*input.from = find(input.name);
  problem.in.d_o = find("d_o");
  if constexpr (requires { problem.options.scale = *scale; }) {
    if (scale) problem.options.scale = *scale;
  } else if (scale) {
    throw InvalidArgument(std::string(form.name) + ": scale is given, expected none: it has no such option");
  }
  const Explanation plan = form.explain(ctx, problem.in, problem.options);  // throws if the arguments are invalid
  TensorCall call = {.kernel = plan.kernel,
                     .target = plan.target,
                     .why = plan.why,
                     .flops = plan.flops,
                     .workspace_bytes = plan.workspace_bytes};
  constexpr bool has_positions = requires { problem.options.positions; };
  DescribeOutputs(form, problem, use == Use::kTrain);
  const auto p = std::make_shared<const typename Form::Problem>(problem);
  const size_t forward = p->outputs.size(), results = forward + (has_positions ? 1 : 0);
  call.outputs = p->outputs;
  if (has_positions) call.outputs.push_back({"state_positions", DType::kI64, {p->outputs[1].sizes[0]}, {}});
  if (use == Use::kStep) {
    call.run = [form, p](Context& run_ctx, Views views) {
      typename Form::Options options = p->options;
      if constexpr (has_positions) options.positions = views[2];
      form.step(run_ctx, TokenOf(form, p->in), options, views[1], WithoutTokens("BT", views[0]));
      if constexpr (has_positions) AddToken(views[2]);
    };
    return call;
  }
  if (use == Use::kTrain) {
    problem.pass = "backward";
    DescribeOutputs(form, problem);
    call.outputs.insert(call.outputs.end(), problem.outputs.begin(), problem.outputs.end());
    call.workspace_bytes = std::max(call.workspace_bytes, form.backward_workspace(ctx, problem.in, problem.options));
  }
  call.run = [form, p, use, forward, results](Context& run_ctx, Views views) {
    const typename Form::Outputs out = OutputsOf(form, *p, views.first(forward));
    form.forward(run_ctx, p->in, p->options, out);
    if constexpr (has_positions) {
      std::fill_n(views[forward].template as<int64_t>(), views[forward].num_elements(), p->in.q.size(1));
    }
    if (use != Use::kTrain) return;
    typename Form::BackwardInputs in = p->in;
    for (const auto& result : form.results) {
      if (result.read != nullptr) in.*result.read = out.*result.to;
    }
    form.backward(run_ctx, in, p->options, GradientsOf(form, *p, views.subspan(results)));
  };
  return call;
}

// The entry with what verbs call.
template <class Form>
OpEntry WithVerbs(OpEntry entry, const Form& form) {
  entry.name = form.name;
  entry.passes = {"forward", "backward"};
  if (form.step != nullptr) entry.passes.emplace_back("step");
  entry.dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  for (const auto& input : form.inputs) {
    if (*input.axes != 0) entry.inputs.push_back({input.name, input.axes, input.optional, input.wide});
  }
  const auto as = [&form](Use use) {
    return [form, use](const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
      return CallOn(form, use, ctx, tensors, scale);
    };
  };
  entry.call = as(Use::kForward);
  entry.train = as(Use::kTrain);
  if (form.step != nullptr) entry.step = as(Use::kStep);
  return entry;
}

// Turns sums of magnitudes into tolerances: `share` of each, and the rounding of a result to its dtype. `dtype` is that
// of the call.
void AllowErrors(DType dtype, double share, const std::vector<OutputSpec>& outputs, Views expected, Views allowed);

// Fills log decays with exponentials of this mean, negated, and with -infinity with the probability `cuts`.
void FillDecays(const Buffer& buffer, uint64_t seed, double mean, double cuts = 0);

// Fill tensors with uniform numbers, with N(0, scale^2), and with rows of a length of about 1.
void FillUniform(const Buffer& buffer, uint64_t seed, double low, double high);
void FillScaled(const Buffer& buffer, uint64_t seed, double scale);
void FillRows(const Buffer& buffer, uint64_t seed);

// Random sizes, layouts and sequences.
class RandomArguments {
 public:
  explicit RandomArguments(uint64_t seed) : random_(seed, 12), seed_(seed * 64) {}

 protected:
  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }

  // Two axes in either order, gaps between rows, and columns too without `rows`; against either guard page.
  Buffer Layout(DType dtype, const Shape& sizes, bool rows);
  Buffer Normal(DType dtype, const Shape& sizes, bool rows) { return Layout(dtype, sizes, rows).FillNormal(++seed_); }

  // `packed`: cu_seqlens of that many sequences; else at times lengths and starts of B sequences.
  template <class Problem>
  void DrawSequences(bool packed, int64_t sequences, int64_t T, Problem& p) {
    if (packed) {
      p.options.cu_seqlens = p.Keep(Bounds(sequences, T));
    } else if (Chance(0.3) && sequences > 0) {
      const Buffer lengths(DType::kI32, Shape{sequences}), starts(DType::kI32, Shape{sequences});
      for (int64_t b = 0; b < sequences; ++b) {
        lengths.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T));
        starts.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T / 2));
      }
      p.options.lengths = p.Keep(lengths);
      p.options.starts = p.Keep(starts);
    }
  }

  Random random_;
  uint64_t seed_;

 private:
  Buffer Bounds(int64_t sequences, int64_t T);
};

}  // namespace heed::mechanism

#endif  // HEED_HARNESS_MECHANISM_STATE_CASE_H_
