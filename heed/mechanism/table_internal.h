// The table of a mechanism: its tensors, its states, and the sizes of their axes. Checks, outputs, cases, tests and
// bindings read it.
#ifndef HEED_MECHANISM_TABLE_INTERNAL_H_
#define HEED_MECHANISM_TABLE_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "heed/core/tensor.h"

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
  kMask,  // bool
};

// A tensor of a mechanism, and its members in the structs of calls.
template <class Inputs, class StepInputs, class Gradients>
struct Tensor {
  using enum mechanism::Type;
  using enum mechanism::Values;
  using Type = mechanism::Type;
  using Values = mechanism::Values;

  const char* name = nullptr;
  // A letter per axis, and alternatives, each shorter than the one before.
  const char* axes = "";
  ConstTensorView Inputs::* input = nullptr;
  ConstTensorView StepInputs::* step = nullptr;  // unless it is `input`
  TensorView Gradients::* gradient = nullptr;
  Type type = kSame;
  Values values = kNormal;
  bool optional = false;

  bool over_tokens() const { return axes[0] == 'B'; }
  // True if rows are read in place as a whole, not element by element.
  bool contiguous_rows() const {
    const char last = axes[std::string_view(axes).size() - 1];
    return (last == 'K' || last == 'V' || (last == 'C' && over_tokens())) && (over_tokens() || values != kDecays);
  }
  ConstTensorView StepInputs::* of_step() const {
    if constexpr (std::is_same_v<Inputs, StepInputs>)
      return input;
    else
      return step;
  }
};

// The structs of a mechanism's calls, and the rows of its table.
template <class OfTable, class In, class BackwardIn, class StepIn, class State, class Out, class Gradient,
          class Explained>
struct ApiOf {
  using Tensor = OfTable;
  using Inputs = In;
  using BackwardInputs = BackwardIn;
  using StepInputs = StepIn;
  using StepState = State;
  using Outputs = Out;
  using Gradients = Gradient;
  using Explanation = Explained;
};

// Combines a mechanism's own options with the options that every mechanism has.
template <class Own, class Common>
Own With(Own own, const Common& common) {
  own.lengths = common.lengths;
  own.starts = common.starts;
  own.cu_seqlens = common.cu_seqlens;
  if constexpr (requires { own.reverse = common.reverse; }) own.reverse = common.reverse;
  if constexpr (requires { own.scale = common.scale; }) own.scale = common.scale;
  return own;
}

}  // namespace heed::mechanism

// Defines the public functions of a mechanism, in its namespace, from DefinitionOf() its options, as calls of
// `framework`, recurrent or scanning.
#define HEED_DEFINE_PASSES(framework, mechanism)                                                                    \
  void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {                        \
    framework::Forward(#mechanism "::Forward", ctx, DefinitionOf(options), in, options, out);                       \
  }                                                                                                                 \
  void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {             \
    framework::Backward(#mechanism "::Backward", ctx, DefinitionOf(options), in, options, out);                     \
  }                                                                                                                 \
  int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {                                 \
    return framework::Workspace(#mechanism "::Workspace", ctx, DefinitionOf(options), in, options);                 \
  }                                                                                                                 \
  int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {                         \
    return framework::BackwardWorkspace(#mechanism "::BackwardWorkspace", ctx, DefinitionOf(options), in, options); \
  }                                                                                                                 \
  Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {                               \
    return framework::Explain(#mechanism "::Explain", ctx, DefinitionOf(options), in, options);                     \
  }

// Defines Step too, for a mechanism with states.
#define HEED_DEFINE_RECURRENT(framework, mechanism)                                                        \
  HEED_DEFINE_PASSES(framework, mechanism)                                                                 \
  void Step(Context& ctx, const StepInputs& in, const Options& options, const framework::StepState& state, \
            const TensorView& o) {                                                                         \
    framework::Step(#mechanism "::Step", ctx, DefinitionOf(options), in, options, state, o);               \
  }

#endif  // HEED_MECHANISM_TABLE_INTERNAL_H_
