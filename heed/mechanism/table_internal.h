// The table of a mechanism: its tensors, its states, and the sizes of their axes. Checks, outputs, cases, tests and
// bindings read it.
#ifndef HEED_MECHANISM_TABLE_INTERNAL_H_
#define HEED_MECHANISM_TABLE_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::mechanism {

// Sizes or strides on the stack, since a step allocates nothing.
class Axes {
 public:
  Axes() = default;
  Axes(std::initializer_list<int64_t> sizes) : Axes(std::span(sizes.begin(), sizes.end())) {}
  Axes(std::span<const int64_t> sizes) : rank_(sizes.size()) {  // NOLINT: the same numbers
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  int64_t& operator[](size_t axis) { return sizes_[axis]; }
  void Append(int64_t size) { sizes_[rank_++] = size; }
  operator std::span<const int64_t>() const {  // NOLINT: the same numbers
    return {sizes_.data(), rank_};
  }
  operator std::vector<int64_t>() const {  // NOLINT: the same numbers
    return {sizes_.data(), sizes_.data() + rank_};
  }

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  size_t rank_ = 0;
};

// The sizes of axes in a call by letter, as in the headers of mechanisms; -1: not yet known.
struct AxisSizes {
  int64_t B = -1, D = -1, T = -1, N = -1, G = -1, L = -1;
  int64_t H = -1, d = -1, W = -1;
  int64_t w = -1;   // W - 1
  int64_t two = 2;  // real and imaginary parts
  int64_t K = -1, V = -1, M = -1, P = -1;
  int64_t F = -1;  // features of K channels
  int64_t& operator[](char letter);
  int64_t operator[](char letter) const { return const_cast<AxisSizes&>(*this)[letter]; }
};

Axes ShapeOf(std::string_view axes, const AxisSizes& sizes);

// Axes may be alternatives, "BGNT|BNT|DN": returns those of this rank; empty if there are none.
std::string_view AxesOfRank(std::string_view axes, int rank);

// The dtypes that a tensor may have.
enum Type {
  kSame,      // that of the first tensor
  kWide,      // that, or the dtype of states
  kAnyFloat,  // any float, for constants
};

// Values of random problems, described in the .cc file of the family's cases.
enum Values {
  kNormal,
  kDecays,
  // Keys of delta rules are unit vectors, and read and write keys are nearly the same, so that states keep their
  // magnitude.
  kUnit,
  kNearlyKeys,
  kNegativeKeys,
  kFractions,
  kOpenGates,  // 3 or more before a sigmoid
  // Time steps and their biases are positive unless a softplus makes them so.
  kSteps,
  kStepBiases,
  kLogSteps,
  kRates,
  kMask,  // bool, without a gradient
};

// The part that a tensor has in the equations of an engine.
enum class Role {
  kNone,  // the mechanism's own kernels alone know it
  // Recurrences: o_t = S_t^T phi(q_t).
  kQuery,
  kKey,
  kValue,
  kLogDecay,
  kLogValueDecay,  // of the columns of S
  kProjection,     // random features
  kBonus,          // u, of the current token
  kBeta,           // the step size of a delta rule
  kReadKey,        // the key that reads what a delta rule removes
  kWriteKey,       // the key that this is written to
  kErase,          // factors of the key that removes
  kWrite,          // factors of values
  kInputGate,
  kForgetGate,
  kKeyMask,
  // Scans: h_t = a_t h_{t-1} + b_t. A key, a value, a decay and an input gate are the same as above.
  kInput,
  kStep,
  kRate,
  kInputWeights,   // B
  kOutputWeights,  // C
  kSkip,           // D
  kOutputGate,     // z
  kStepBias,
  kRecurrenceGate,
  kLambda,
  kLogStep,
  kLogRate,  // of the real part
  kFrequency,
  kTaps,
  kKeyTaps,
  kKeySkip,
  // Preconditioned delta rules. A is a decayed sum of squares of keys, whose size scales the keys that are written.
  kCurvatureDecay,
  kCurvatureRate,
  kCurvatureCenter,
  kAngleRate,  // of a rotation of queries and keys by a running angle
};

// A tensor of a mechanism, a row of its table.
struct Tensor {
  const char* name;
  const char* axes;  // a letter per axis, and alternatives, each shorter than the one before: "BGNT|BNT|DN"
  Role role = Role::kNone;
  Type type = kSame;
  Values values = kNormal;
  bool optional = false;
  bool keyword = false;  // given by name alone in Python

  bool over_tokens() const { return axes[0] == 'B'; }
  bool differentiable() const { return values != kMask; }
  // True if the recurrence engine reads rows in place as a whole, not element by element.
  bool contiguous_rows() const {
    const char last = std::string_view(axes).back();
    return (last == 'K' || last == 'V' || (last == 'C' && over_tokens())) && (over_tokens() || values != kDecays);
  }
};

// A state of a mechanism.
struct StateTensor {
  enum Role {
    kState,       // S, or h
    kNormaliser,  // z: a sum of features, which are positive
    kMaximum,     // m, which the others are relative to: a constant, without a gradient
    kTail,        // the last inputs of a filter
    kCurvature,   // A: a sum of squares of keys, per key head
    kAngle,       // of the rotation of queries and keys
    kLastKey,     // of the last token, rotated
    kLastValue,   // of the last token
  };
  const char* name;
  const char* axes;
  Role role = kState;
  double absent = 0;  // the value of an absent one

  bool differentiable() const { return role != kMaximum; }
};

// The members of a struct whose members all have the type T, in order: of a table, or of the views of a call.
template <class T, class Struct>
std::span<T> MembersOf(Struct& of) {
  if constexpr (std::is_empty_v<Struct>) {
    return {};
  } else {
    static_assert(std::is_standard_layout_v<Struct> && sizeof(Struct) % sizeof(T) == 0);
    return {reinterpret_cast<T*>(&of), sizeof(Struct) / sizeof(T)};
  }
}
template <template <class> class Struct, class T>
std::span<const T> Members(const Struct<T>& of) {
  return MembersOf<const T>(of);
}

// The table of a mechanism.
struct Table {
  std::span<const Tensor> tensors;  // the first one determines the dtype and the sequences
  std::span<const StateTensor> states = {};

  // The tensor with this role; null if no tensor has it.
  const Tensor* Find(Role role) const;
  bool Has(Role role) const { return Find(role) != nullptr; }
  size_t IndexOf(const Tensor& tensor) const { return static_cast<size_t>(&tensor - tensors.data()); }
};
template <class Tensors, class States>
Table TableOf(const Tensors& tensors, const States& states) {
  return {Members(tensors), Members(states)};
}

inline constexpr size_t kMaxTensors = 12;

// The views of a call, in the order of the mechanism's table. A shorter list leaves out the rest.
struct Arguments {
  std::span<const ConstTensorView> tensors, initial = {};
  ConstTensorView d_o = {};
  std::span<const ConstTensorView> d_final = {};
};
struct Results {
  TensorView o;
  std::span<const TensorView> states = {};  // final ones, those that a step updates, or gradients of initial ones
  std::span<const TensorView> gradients = {};
};

// The views of a segment's summary, in the order of the table's states.
struct Segment {
  std::span<const TensorView> state, transition;
};
using StateViews = std::span<const TensorView>;

template <class View>
const View& At(std::span<const View> views, size_t i) {
  static const View absent;
  return i < views.size() ? views[i] : absent;
}

// The conversions between the structs of a mechanism and lists of views.
template <class Structs>
struct Lists {
  template <class View>
  using Tensors = typename Structs::template Tensors<View>;
  using Inputs = typename Structs::Inputs;
  using BackwardInputs = typename Structs::BackwardInputs;
  using Outputs = typename Structs::Outputs;
  using Gradients = typename Structs::Gradients;
  using Summary = typename Structs::Summary;

  static Arguments Of(const Inputs& in) {
    return {Members(static_cast<const Tensors<ConstTensorView>&>(in)), Members(in.initial)};
  }
  static Arguments Of(const BackwardInputs& in) {
    return {Members(static_cast<const Tensors<ConstTensorView>&>(in)), Members(in.initial), in.d_o,
            Members(in.d_final)};
  }
  static Results Of(const Outputs& out) { return {out.o, Members(out.final)}; }
  static Results Of(const Gradients& out) {
    return {{}, Members(out.initial), Members(static_cast<const Tensors<TensorView>&>(out))};
  }

  static Segment Of(const Summary& of) { return {Members(of.state), Members(of.transition)}; }

  static BackwardInputs InputsOf(const Arguments& of) {
    BackwardInputs in;
    Copy(of.tensors, MembersOf<ConstTensorView>(static_cast<Tensors<ConstTensorView>&>(in)));
    Copy(of.initial, MembersOf<ConstTensorView>(in.initial));
    in.d_o = of.d_o;
    Copy(of.d_final, MembersOf<ConstTensorView>(in.d_final));
    return in;
  }
  static Outputs OutputsOf(const Results& of) {
    Outputs out;
    out.o = of.o;
    Copy(of.states, MembersOf<TensorView>(out.final));
    return out;
  }
  static Summary SummaryOf(const Segment& of) {
    Summary summary;
    Copy(of.state, MembersOf<TensorView>(summary.state));
    Copy(of.transition, MembersOf<TensorView>(summary.transition));
    return summary;
  }
  static Gradients GradientsOf(const Results& of) {
    Gradients out;
    Copy(of.gradients, MembersOf<TensorView>(static_cast<Tensors<TensorView>&>(out)));
    Copy(of.states, MembersOf<TensorView>(out.initial));
    return out;
  }

 private:
  template <class View>
  static void Copy(std::span<const View> from, std::span<View> to) {
    if (!to.empty()) std::copy(from.begin(), from.end(), to.begin());
  }
};

// The functions of a mechanism, which take its own type of options; bindings do without the references.
template <class Structs, class Options>
struct Functions {
  using Of = Lists<Structs>;
  using Inputs = typename Structs::Inputs;
  using BackwardInputs = typename Structs::BackwardInputs;
  using Outputs = typename Structs::Outputs;
  using Gradients = typename Structs::Gradients;
  using StepInputs = typename Structs::StepInputs;
  using Summary = typename Structs::Summary;
  using State = typename Structs::State;

  void (*forward)(Context&, const Inputs&, const Options&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Options&, const Gradients&);
  Explanation (*explain)(const Context&, const Inputs&, const Options&);
  int64_t (*backward_workspace)(const Context&, const Inputs&, const Options&) = nullptr;
  void (*reference)(const Inputs&, const Options&, const Outputs&) = nullptr;
  void (*backward_reference)(const BackwardInputs&, const Options&, const Gradients&) = nullptr;
  // Null without a state, like those below.
  void (*step)(Context&, const StepInputs&, const Options&, const State&, const TensorView&) = nullptr;
  void (*summarize)(Context&, const Inputs&, const Options&, const Summary&) = nullptr;
  void (*compose)(const Summary&, const Summary&, const Summary&) = nullptr;
  void (*apply)(const Summary&, const State&, const State&) = nullptr;
  void (*apply_backward)(const Summary&, const State&, const State&, const State&) = nullptr;

  void Forward(Context& ctx, const Arguments& in, const Options& options, const Results& out) const {
    forward(ctx, Of::InputsOf(in), options, Of::OutputsOf(out));
  }
  void Backward(Context& ctx, const Arguments& in, const Options& options, const Results& out) const {
    backward(ctx, Of::InputsOf(in), options, Of::GradientsOf(out));
  }
  void Step(Context& ctx, const Arguments& in, const Options& options, const Results& out) const {
    const BackwardInputs whole = Of::InputsOf(in);
    step(ctx, whole, options, Of::OutputsOf(out).final, out.o);
  }
};

// Segments of tokens (segments.cc), whose views are those of segments in structs.h.
// A forward pass with bound options.
using ForwardPass = std::function<void(const Arguments&, const Results&)>;

// The state is that of a pass from zeros, the transition that of a pass without input from ones or, for delta rules,
// from the identity: a segment's decays are those of the kernel, to the bit.
void Summarize(const char* op, const Table& table, const Arguments& in, const ForwardPass& forward, const Segment& out);
void Compose(const char* op, const Table& table, const Segment& left, const Segment& right, const Segment& out);
void Apply(const char* op, const Table& table, const Segment& segment, StateViews before, StateViews after);
void ApplyBackward(const char* op, const Table& table, const Segment& segment, StateViews before, StateViews d_after,
                   StateViews d_before);

// A call that is computed in segments (in_segments.cc): its passes with bound options, on sequences that heed cuts.
struct CallInSegments {
  using Pass = std::function<void(const CutSequences&, const Arguments&, const Results&)>;
  const char* op;
  Table table;
  ConstTensorView lengths, starts, cu_seqlens;
  int64_t segment;
  bool reverse, causal;
  Pass forward, backward;

  void Forward(Context& ctx, const Arguments& in, const Results& out) const;
  void Backward(Context& ctx, const Arguments& in, const Results& out) const;
};

// Throws unless `segment` is 0 or a multiple of 64 that this mechanism may have.
void CheckSegment(const char* op, const Table& table, int64_t segment, bool causal);

template <class Structs, class Options>
CallInSegments InSegments(const char* op, const Table& table, Context& ctx, const Options& options,
                          void (*forward)(Context&, const typename Structs::Inputs&, const Options&,
                                          const typename Structs::Outputs&),
                          void (*backward)(Context&, const typename Structs::BackwardInputs&, const Options&,
                                           const typename Structs::Gradients&)) {
  using Of = Lists<Structs>;
  bool causal = true;
  if constexpr (requires { options.causal; }) causal = options.causal;
  const auto cut_options = [&options](const CutSequences& cut) {
    Options of = options;
    of.lengths = of.starts = of.cu_seqlens = {};
    of.segment = 0;
    of.cut = &cut;
    return of;
  };
  return {op,
          table,
          options.lengths,
          options.starts,
          options.cu_seqlens,
          options.segment,
          options.reverse,
          causal,
          [=, &ctx](const CutSequences& cut, const Arguments& in, const Results& out) {
            forward(ctx, Of::InputsOf(in), cut_options(cut), Of::OutputsOf(out));
          },
          [=, &ctx](const CutSequences& cut, const Arguments& in, const Results& out) {
            backward(ctx, Of::InputsOf(in), cut_options(cut), Of::GradientsOf(out));
          }};
}

// Combines a mechanism's own options with the options that every mechanism has.
template <class Own, class Common>
Own With(Own own, const Common& common) {
  own.lengths = common.lengths;
  own.starts = common.starts;
  own.cu_seqlens = common.cu_seqlens;
  if constexpr (requires { own.reverse = common.reverse; }) own.reverse = common.reverse;
  if constexpr (requires { own.scale = common.scale; }) own.scale = common.scale;
  if constexpr (requires { own.segment = common.segment; }) own.segment = common.segment;
  if constexpr (requires { own.cut = common.cut; }) own.cut = common.cut;
  return own;
}

}  // namespace heed::mechanism

// The functions of a mechanism, in its namespace, as mechanism::Functions.
#define HEED_FUNCTIONS_WITHOUT_STEP {&Forward, &Backward, &Explain, &BackwardWorkspace, &Reference, &BackwardReference}
#define HEED_FUNCTIONS                                                                         \
  {&Forward,   &Backward, &Explain, &BackwardWorkspace, &Reference, &BackwardReference, &Step, \
   &Summarize, &Compose,  &Apply,   &ApplyBackward}

#endif  // HEED_MECHANISM_TABLE_INTERNAL_H_
