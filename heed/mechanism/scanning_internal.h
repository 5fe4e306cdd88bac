// The definition of a mechanism for the scan engine, and its passes.
#ifndef HEED_MECHANISM_SCANNING_INTERNAL_H_
#define HEED_MECHANISM_SCANNING_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/scan/problem.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/scanning.h"
#include "heed/mechanism/table_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::scanning {

using mechanism::Axes;
using mechanism::AxisSizes;
using mechanism::ShapeOf;
using mechanism::StateDType;
using mechanism::With;

// Axes are in the letters of scanning.h. A tensor over tokens has the dtype of the first tensor or that of states,
// others any, unless it says otherwise.
using Tensor = mechanism::Tensor<StepInputs, StepInputs, Gradients>;
using Api = mechanism::ApiOf<Tensor, Inputs, BackwardInputs, StepInputs, StepState, Outputs, Gradients, Explanation>;

// A state of a mechanism, and its members in the structs of calls.
struct StateTensor {
  const char* name;  // appended to the argument in messages if there are several states
  const char* axes;
  ConstTensorView Inputs::* initial;
  TensorView Outputs::* final;
  ConstTensorView BackwardInputs::* d_final;
  TensorView Gradients::* dinitial;
  TensorView StepState::* step;
};

// The states of a mechanism, in static memory.
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

// Kernels of a mechanism that the scan engine does not compute.
class Call;
struct Definition;
struct Kernels {
  void (*forward)(const char* op, Context& ctx, const Definition& definition, const Call& call, const Inputs& in,
                  const Outputs& out);
  void (*backward)(const char* op, Context& ctx, const Definition& definition, const Call& call,
                   const BackwardInputs& in, const Gradients& out);
  void (*step)(Context& ctx, const Definition& definition, const Call& call, const Inputs& in, const TensorView& state,
               const ConstTensorView& o);
  int64_t (*workspace)(const Context& ctx, const Definition& definition, const Call& call, const Inputs& in,
                       bool backward);
  void (*explain)(const Inputs& in, Explanation& e);  // sets kernel and why
};

// The definition of a mechanism.
struct Definition {
  std::span<const Tensor> tensors;  // the first one is scanned
  const char* state_axes = "BD";    // empty: no state
  const char* tail_axes = "";       // empty: no tail
  scan::Rule rule = scan::Rule::kDecay;
  double flops = 0;                  // per token, channel and state, or per tap of a separate kernel; 0 for rows of
                                     // taps
  const Kernels* kernels = nullptr;  // null: those of the engine
  // Options of single mechanisms.
  bool softplus = false, silu = false;
  double c = 0;
  bool bilinear = false;
  scan::Method method = scan::Method::kAuto;

  bool has_state() const { return state_axes[0] != '\0'; }
  States states() const;
};

// The axes of a tensor of this rank; empty if it cannot have that rank.
inline std::string AxesOf(const Tensor& tensor, int rank) {
  return std::string(mechanism::AxesOfRank(tensor.axes, rank));
}

// A checked call.
class Call {
 public:
  Call() = default;
  Call(const char* op, const Context* checks, const Definition& definition, const Inputs& in, const Options& options,
       bool data) {
    Check(op, checks, definition, in, options, data);
  }

  // Replaces the call by another one, reusing the memory of its lists.
  void Check(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
             const Options& options, bool data);

  // The engine's view of a tensor, by its axes.
  scan::Tokens TokensOf(const ConstTensorView& t) const;
  scan::Numbers NumbersOf(const ConstTensorView& t) const;
  // [B, D, N, 2]; missing axes have a stride of 0. Or [B, H, d, d, N, 2].
  static scan::Numbers StatesOf(const ConstTensorView& t);
  static scan::Tokens TailOf(const ConstTensorView& t);

  bool reverse() const { return reverse_; }

  scan::Problem problem;
  AxisSizes sizes;
  std::vector<mechanism::TokenRange> ranges;
  Axes shape;                        // of o
  std::array<Axes, 2> state_shapes;  // as for the definition's states

 private:
  void Reset();

  bool channels_first_ = false;  // [B, D, T]
  bool reverse_ = false;
};

// Each function checks all arguments before anything is written and throws InvalidArgument with `op`, the argument, its
// value and what was expected.
void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in, const Options& options,
             const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition, const BackwardInputs& in,
              const Options& options, const Gradients& out);

// One token: `state` is updated in place. No option has an effect.
void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in, const Options& options,
          const StepState& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                  const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                          const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                    const Options& options);

// Flops of one sequence of `tokens` tokens.
double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward);

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_SCANNING_INTERNAL_H_
