// Problems of mechanisms from their tables: common parts of the cases of all mechanisms.
#ifndef HEED_HARNESS_MECHANISM_PROBLEM_CASE_H_
#define HEED_HARNESS_MECHANISM_PROBLEM_CASE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

using Shape = std::vector<int64_t>;

// A call with its memory.
struct Problem {
  std::vector<ConstTensorView> inputs, initial, d_final;  // in the order of the table, absent or not
  ConstTensorView d_o;
  recurrent::Options options;
  std::vector<OutputSpec> outputs;  // of the forward pass, then of the backward pass
  size_t num_forward = 0;
  bool step = false;       // one token, by Step instead of the forward pass
  bool stateless = false;  // states are neither given nor requested
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

// A tensor of a table.
struct Row {
  Row(const Tensor& t)  // NOLINT: what cases need of it
      : name(t.name), axes(t.axes), type(t.type), values(t.values), optional(t.optional),
        contiguous_rows(t.contiguous_rows()) {}

  std::string name, axes;
  Type type;
  Values values;
  bool optional, contiguous_rows;

  bool over_tokens() const { return axes[0] == 'B'; }
};

// A state as an output.
struct StateRow {
  StateRow(const StateTensor& state);  // NOLINT: what cases need of it

  std::string name;      // "state", or "state_z"
  std::string gradient;  // "dinitial_state"; empty: a constant
  std::string axes;
  bool positive = false;
  double absent;  // its value if absent
};

// Results, in the order of Problem::outputs.
using Views = std::span<const TensorView>;

// A mechanism with bound options, for cases.
struct Mechanism {
  std::string name;
  std::string options;  // for titles
  std::vector<Row> tensors;
  std::vector<StateRow> states;
  std::string o_axes;
  std::function<void(AxisSizes&)> derive;  // computes sizes that depend on others
  bool causal = true, has_scale = true, has_direction = true;

  std::function<void(Context&, const Problem&, Views)> forward, backward, step;  // null if there is no step
  std::function<void(const Problem&, Views expected, Views tolerance)> reference, backward_reference;
  std::function<TensorCall(const Context&, const Problem&)> explain;  // of a forward pass
  std::function<int64_t(const Context&, const Problem&)> backward_workspace;
};

// A view of one token without its axis of tokens. Where the result [B, N] could also be [D, N], because B equals the
// number of channels, it gets an axis of groups.
template <class View>
View WithoutTokens(std::string_view axes, const View& t) {
  const size_t at = axes.find('T');
  if (at == std::string_view::npos || !t.present()) return t;
  Shape sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  sizes.erase(sizes.begin() + static_cast<std::ptrdiff_t>(at));
  strides.erase(strides.begin() + static_cast<std::ptrdiff_t>(at));
  if (axes == "BNT") {
    sizes.insert(sizes.begin() + 1, 1);
    strides.insert(strides.begin() + 1, 0);
  }
  return View(t.data(), t.dtype(), sizes, strides, t.device());
}

// The functions of a mechanism with those of tolerances.
template <class Structs, class Own>
struct CaseFunctions : Functions<Structs, Own> {
  // The tolerance of each output.
  std::function<void(const typename Structs::Inputs&, const Own&, const typename Structs::Outputs& expected,
                     const typename Structs::Outputs& tolerance)>
      tolerance = {};
  std::function<void(const typename Structs::BackwardInputs&, const Own&, const typename Structs::Gradients& expected,
                     const typename Structs::Gradients& tolerance)>
      backward_tolerance = {};
};

// The views of a problem's call, and of its results.
Arguments ArgumentsOf(const Problem& p);
struct ResultViews {
  std::vector<TensorView> states, gradients;
  TensorView o;
  operator Results() const { return {o, states, gradients}; }  // NOLINT: views of these
};
ResultViews ForwardResults(const Mechanism& m, const Problem& p, Views views);
ResultViews BackwardResults(const Mechanism& m, const Problem& p, Views views);

// The arguments of a step of one token.
struct TokenArguments {
  TokenArguments(const Mechanism& m, const Problem& p);
  std::vector<ConstTensorView> tensors;
};

// The functions of a mechanism with bound options, over lists of views: one class per mechanism, so that what calls
// them is compiled once.
class Calls {
 public:
  virtual ~Calls() = default;
  virtual void Forward(Context& ctx, const Arguments& in, const recurrent::Options& options,
                       const Results& out) const = 0;
  virtual void Backward(Context& ctx, const Arguments& in, const recurrent::Options& options,
                        const Results& out) const = 0;
  virtual bool has_step() const = 0;
  virtual void Step(Context& ctx, const Arguments& in, const recurrent::Options& options, const Results& out) const = 0;
  virtual Explanation Explain(const Context& ctx, const Arguments& in, const recurrent::Options& options) const = 0;
  virtual int64_t BackwardWorkspace(const Context& ctx, const Arguments& in,
                                    const recurrent::Options& options) const = 0;
  // References also compute the tolerance of each result where `tolerance` is not null.
  virtual void Reference(const Arguments& in, const recurrent::Options& options, const Results& expected,
                         const Results* tolerance) const = 0;
  virtual void BackwardReference(const Arguments& in, const recurrent::Options& options, const Results& expected,
                                 const Results* tolerance) const = 0;
};

template <class Structs, class Own>
class BoundCalls final : public Calls {
  using Of = Lists<Structs>;
  using Options = recurrent::Options;

 public:
  BoundCalls(const Own& own, const CaseFunctions<Structs, Own>& f) : own_(own), f_(f) {}

  void Forward(Context& ctx, const Arguments& in, const Options& options, const Results& out) const override {
    f_.Forward(ctx, in, With(own_, options), out);
  }
  void Backward(Context& ctx, const Arguments& in, const Options& options, const Results& out) const override {
    f_.Backward(ctx, in, With(own_, options), out);
  }
  bool has_step() const override { return f_.step != nullptr; }
  void Step(Context& ctx, const Arguments& in, const Options& options, const Results& out) const override {
    f_.Step(ctx, in, With(own_, options), out);
  }
  Explanation Explain(const Context& ctx, const Arguments& in, const Options& options) const override {
    return f_.explain(ctx, Of::InputsOf(in), With(own_, options));
  }
  int64_t BackwardWorkspace(const Context& ctx, const Arguments& in, const Options& options) const override {
    return f_.backward_workspace(ctx, Of::InputsOf(in), With(own_, options));
  }
  void Reference(const Arguments& in, const Options& options, const Results& expected,
                 const Results* tolerance) const override {
    const auto inputs = Of::InputsOf(in);
    const auto values = Of::OutputsOf(expected);
    f_.reference(inputs, With(own_, options), values);
    if (tolerance != nullptr) f_.tolerance(inputs, With(own_, options), values, Of::OutputsOf(*tolerance));
  }
  void BackwardReference(const Arguments& in, const Options& options, const Results& expected,
                         const Results* tolerance) const override {
    const auto inputs = Of::InputsOf(in);
    const auto values = Of::GradientsOf(expected);
    f_.backward_reference(inputs, With(own_, options), values);
    if (tolerance != nullptr) f_.backward_tolerance(inputs, With(own_, options), values, Of::GradientsOf(*tolerance));
  }

 private:
  Own own_;
  CaseFunctions<Structs, Own> f_;
};

// Gives `m` its table and functions. All copies of `m` share the functions: programs with these mechanisms build and
// copy the entries of all of them at startup.
void Bind(std::span<const Tensor> tensors, std::span<const StateTensor> states, const char* o_axes,
          const std::shared_ptr<const Calls>& calls, Mechanism& m);
template <class Structs, class Own>
void Bind(std::span<const Tensor> tensors, std::span<const StateTensor> states, const char* o_axes, const Own& own,
          const CaseFunctions<Structs, Own>& functions, Mechanism& m) {
  Bind(tensors, states, o_axes, std::make_shared<const BoundCalls<Structs, Own>>(own, functions), m);
}

// The words of a variant, "skip+taps=7".
class Words {
 public:
  explicit Words(const std::string& variant) : text_("+" + variant + "+") {}
  bool Has(std::string_view word) const { return text_.find("+" + std::string(word) + "+") != std::string::npos; }
  // 7 for "taps", or `otherwise` if the word has no number; nothing if it is missing.
  std::optional<double> Number(const std::string& name, double otherwise = 0) const;

 private:
  std::string text_;
};

// Fills each element from a random stream of its own.
const Buffer& FillEach(const Buffer& buffer, uint64_t seed, const std::function<double(Random&)>& value);

// Fills a state with N(0, 1), or other values that it requires.
const Buffer& FillState(const StateRow& state, const Buffer& buffer, uint64_t seed);

// Makes one problem of a mechanism. Derived classes choose sizes, layouts and values for a family of mechanisms.
class Maker {
 public:
  Maker(const Mechanism& m, DType dtype, uint64_t seed)
      : m_(m), dtype_(dtype), random_(seed), case_seed_(seed), seed_(seed * 64) {}
  virtual ~Maker() = default;

  // Random sizes, layouts and options; forward and backward, or a step.
  Case RandomCase();
  // The requested problem, in aligned memory.
  Case MakeCase(const CaseRequest& request);

 protected:
  // Random problems are drawn in this order. B and T are already set; an input may be absent.
  virtual void DrawSizes() = 0;
  virtual ConstTensorView DrawInput(const Row& row) = 0;
  virtual ConstTensorView DrawOutputGradient(const Shape& sizes) { return Normal(sizes); }
  virtual void DrawOptions() {}
  virtual void DrawStates(const std::vector<Shape>& shapes);
  virtual Shape DrawStrides() { return {}; }  // of outputs; empty: row-major

  // Requested problems are made in this order.
  virtual void SetSizes(const Sizes& sizes) = 0;
  virtual ConstTensorView MakeInput(const Row& row) = 0;
  virtual Shape Strides() { return {}; }
  virtual double Flops(int64_t tokens, bool backward) = 0;  // for sequences of that many tokens

  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Tokens();    // 0 to 131, around the boundaries of chunks
  int64_t Channels();  // 1 to 65, around the sizes of vectors
  Placement AnyGuard() { return Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard; }
  // Any order of axes except that of sequences, with gaps between them, against either guard page; the last axis is
  // contiguous with `rows`, or for four axes or more.
  Buffer AnyLayout(DType dtype, const Shape& sizes, bool rows = false);
  TensorView Normal(const Shape& sizes);       // N(0, 1)
  TensorView NormalState(const Shape& sizes);  // row-major, in the state's dtype

  Shape ShapeOf(std::string_view axes) const { return mechanism::ShapeOf(axes, sizes_); }
  Shape OutputShape() const { return ShapeOf(m_.o_axes); }
  DType wide() const { return StateDType(dtype_); }
  TensorView Keep(const Buffer& buffer) { return p_.Keep(buffer); }
  uint64_t NextSeed() { return ++seed_; }

  const Mechanism& m_;
  DType dtype_;
  Random random_;
  Problem p_;
  AxisSizes sizes_;
  Words words_ = Words("");

 private:
  std::vector<Shape> StateShapes(int64_t sequences) const;
  ConstTensorView Ints(const Shape& values);
  // Lengths and starts, or with `packed` cu_seqlens, and the direction; returns the number of
  // sequences.
  int64_t DrawSequences(bool packed);

  uint64_t case_seed_, seed_;
};

// An entry of the harness; `said` has the mechanism's own members: family, variants, formulas. `plain` is called on
// given tensors.
OpEntry EntryOf(OpEntry said, const Mechanism& plain);

}  // namespace heed::mechanism

#endif  // HEED_HARNESS_MECHANISM_PROBLEM_CASE_H_
