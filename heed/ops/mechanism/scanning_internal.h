// What a mechanism on the scan engine says of itself, and its passes from that.
#ifndef HEED_OPS_MECHANISM_SCANNING_INTERNAL_H_
#define HEED_OPS_MECHANISM_SCANNING_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/scan/problem.h"
#include "heed/ops/mechanism/recurrent_internal.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::scanning {

// A mechanism's own options with those of a call that every mechanism has.
template <class Own>
Own With(Own own, const Options& common) {
  static_cast<Options&>(own) = common;
  return own;
}

// A tensor that a mechanism takes: what checks, outputs, cases, tests and bindings know of it.
struct Tensor {
  // Of random problems. Steps, and what is added to them, are positive unless a softplus makes them
  // so.
  enum Values { kNormal, kSteps, kStepBiases, kLogSteps, kRates, kDecays };

  const char* name = nullptr;
  // Its axes in the letters of scanning.h, and what else they may be, each shorter than the one
  // before: "BGNT|BNT|DN".
  const char* axes = "";
  ConstTensorView StepInputs::*input = nullptr;
  TensorView Gradients::*gradient = nullptr;
  Values values = kNormal;
  bool optional = false;
};

// A state that a mechanism has, and where calls have it.
struct StateTensor {
  const char* name;  // behind what it is of; of several also its own
  const char* axes;
  ConstTensorView Inputs::*initial;
  TensorView Outputs::*final;
  ConstTensorView BackwardInputs::*d_final;
  TensorView Gradients::*dinitial;
  TensorView StepState::*step;
};

// Those of a mechanism, without memory of their own.
class States {
 public:
  void Append(const StateTensor& state) { states_[size_++] = state; }
  const StateTensor* begin() const { return states_.data(); }
  const StateTensor* end() const { return states_.data() + size_; }
  size_t size() const { return size_; }
  const StateTensor& operator[](size_t i) const { return states_[i]; }

 private:
  std::array<StateTensor, 2> states_{};
  size_t size_ = 0;
};

// A mechanism. What it is called with is placed in the engine's Problem by functions of its own.
class Call;
struct Definition {
  std::span<const Tensor> tensors;  // the first is what is scanned
  const char* state_axes = "BD";  // empty: it has no state
  const char* tail_axes = "";     // empty: it has none
  scan::Rule rule = scan::Rule::kDecay;
  double flops = 0;  // per token, channel and state; of taps nothing
  void (*place)(const Call& call, const StepInputs& in, scan::Problem& problem) = nullptr;
  void (*place_gradients)(const Call& call, const Gradients& out,
                          scan::Gradients& gradients) = nullptr;
  // Options of one mechanism alone.
  bool softplus = false;
  double c = 0;
  bool bilinear = false;
  scan::Method method = scan::Method::kAuto;

  bool has_state() const { return state_axes[0] != '\0'; }
  States states() const;
};

// What letters of axes stand for in a call; -1: nothing has said so yet.
struct AxisSizes {
  int64_t B = -1, D = -1, T = -1, N = -1, G = -1, L = -1;
  int64_t H = -1, d = -1, W = -1;
  int64_t w = -1;   // W - 1
  int64_t two = 2;  // real and imaginary parts
  int64_t& operator[](char letter);
  int64_t operator[](char letter) const { return const_cast<AxisSizes&>(*this)[letter]; }
};

// The axes that a tensor of this rank has; empty: it has none of that rank.
std::string AxesOf(const Tensor& tensor, int rank);
recurrent::Axes ShapeOf(const std::string& axes, const AxisSizes& sizes);

// Everything about a call that has been checked.
class Call {
 public:
  Call() = default;
  Call(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
       const Options& options, bool data) {
    Check(op, checks, definition, in, options, data);
  }

  // Becomes another call, in the memory of its lists.
  void Check(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
             const Options& options, bool data);

  // How the engine sees a tensor, by its axes.
  scan::Tokens TokensOf(const ConstTensorView& t) const;
  scan::Numbers NumbersOf(const ConstTensorView& t) const;
  scan::Weights WeightsOf(const ConstTensorView& t) const;
  // [B, D, N, 2]; axes that are missing have a stride of 0. Or [B, H, d, d, N, 2].
  static scan::Numbers StatesOf(const ConstTensorView& t);
  static scan::Tokens TailOf(const ConstTensorView& t);

  scan::Problem problem;
  AxisSizes sizes;
  std::vector<recurrent::TokenRange> ranges;
  recurrent::Axes shape;                        // of o
  std::array<recurrent::Axes, 2> state_shapes;  // as the definition's states

 private:
  void Reset();

  bool channels_first_ = false;  // [B, D, T]
  bool reverse_ = false;
};

DType StateDType(DType dtype);  // f64, or f32

// Each checks all arguments before anything is written and throws InvalidArgument with
// `op`, the argument, what it got and what it expected.
void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in,
             const Options& options, const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition,
              const BackwardInputs& in, const Options& options, const Gradients& out);

// One token: `state` is updated in place.
void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in,
          const StepState& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition,
                  const Inputs& in, const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition,
                          const Inputs& in, const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition,
                    const Inputs& in, const Options& options);

// Operations on one sequence of so many tokens.
double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward);

// The sequences of a call, in tokens of [B, T], in the memory of `ranges`.
void Ranges(const char* op, int64_t B, int64_t T, const Options& options, bool data,
            std::vector<recurrent::TokenRange>& ranges);

// Zeros for tokens that no sequence has, and for those of no channels, which no task takes.
void ClearOthers(const Call& call, const TensorView& t, const std::string& axes);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_INTERNAL_H_
