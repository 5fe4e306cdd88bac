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
#include "heed/ops/mechanism/check_internal.h"
#include "heed/ops/mechanism/scanning.h"
#include "heed/ops/mechanism/table_internal.h"
#include "heed/ops/mechanism/tokens_internal.h"

namespace heed::scanning {

using mechanism::Axes;
using mechanism::AxisSizes;
using mechanism::ShapeOf;
using mechanism::StateDType;
using mechanism::With;

// Its axes in the letters of scanning.h. Over tokens it has the dtype of the first or that of
// states, else any, unless it says otherwise.
using Tensor = mechanism::Tensor<StepInputs, StepInputs, Gradients>;
using Api = mechanism::ApiOf<Tensor, Inputs, BackwardInputs, StepInputs, StepState, Outputs, Gradients, Explanation>;

// A state that a mechanism has, and where calls have it.
struct StateTensor {
  const char* name;  // behind what it is of; of several also its own
  const char* axes;
  ConstTensorView Inputs::* initial;
  TensorView Outputs::* final;
  ConstTensorView BackwardInputs::* d_final;
  TensorView Gradients::* dinitial;
  TensorView StepState::* step;
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

// What computes a mechanism that the scan engine does not.
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

// A mechanism.
struct Definition {
  std::span<const Tensor> tensors;  // the first is what is scanned
  const char* state_axes = "BD";    // empty: it has no state
  const char* tail_axes = "";       // empty: it has none
  scan::Rule rule = scan::Rule::kDecay;
  double flops = 0;                  // per token, channel and state, or tap of a kernel's own; of rows of taps nothing
  const Kernels* kernels = nullptr;  // null: the engine's
  // Options of one mechanism alone.
  bool softplus = false, silu = false;
  double c = 0;
  bool bilinear = false;
  scan::Method method = scan::Method::kAuto;

  bool has_state() const { return state_axes[0] != '\0'; }
  States states() const;
};

// The axes that a tensor of this rank has; empty: it has none of that rank.
inline std::string AxesOf(const Tensor& tensor, int rank) {
  return std::string(mechanism::AxesOfRank(tensor.axes, rank));
}

// Everything about a call that has been checked.
class Call {
 public:
  Call() = default;
  Call(const char* op, const Context* checks, const Definition& definition, const Inputs& in, const Options& options,
       bool data) {
    Check(op, checks, definition, in, options, data);
  }

  // Becomes another call, in the memory of its lists.
  void Check(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
             const Options& options, bool data);

  // How the engine sees a tensor, by its axes.
  scan::Tokens TokensOf(const ConstTensorView& t) const;
  scan::Numbers NumbersOf(const ConstTensorView& t) const;
  // [B, D, N, 2]; axes that are missing have a stride of 0. Or [B, H, d, d, N, 2].
  static scan::Numbers StatesOf(const ConstTensorView& t);
  static scan::Tokens TailOf(const ConstTensorView& t);

  bool reverse() const { return reverse_; }

  scan::Problem problem;
  AxisSizes sizes;
  std::vector<mechanism::TokenRange> ranges;
  Axes shape;                        // of o
  std::array<Axes, 2> state_shapes;  // as the definition's states

 private:
  void Reset();

  bool channels_first_ = false;  // [B, D, T]
  bool reverse_ = false;
};

// Each checks all arguments before anything is written and throws InvalidArgument with
// `op`, the argument, what it got and what it expected.
void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in, const Options& options,
             const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition, const BackwardInputs& in,
              const Options& options, const Gradients& out);

// One token: `state` is updated in place. No option is about it.
void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in, const Options& options,
          const StepState& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                  const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                          const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                    const Options& options);

// Operations on one sequence of so many tokens.
double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_INTERNAL_H_
