// The definition of a mechanism for the recurrence engine, and its passes.
#ifndef HEED_MECHANISM_RECURRENT_INTERNAL_H_
#define HEED_MECHANISM_RECURRENT_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/table_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::recurrent {

using mechanism::Axes;
using mechanism::AxisSizes;
using mechanism::ShapeOf;
using mechanism::StateDType;
using mechanism::TokenRange;
using mechanism::With;
using StepState = State;

enum class DecayShape {
  kNone,
  kHead,     // [HV]
  kHeadKey,  // [HV, K]
  kToken,    // [B, T, HV]
  kKey,      // [B, T, HV, K]
};

// True if decays are constants, without axes of sequences and tokens.
inline bool IsConstant(DecayShape shape) { return shape == DecayShape::kHead || shape == DecayShape::kHeadKey; }

// Flops per token of a weighted mean per channel: sums, products and two exponentials of 20.
inline constexpr double kFlopsOfChannels = 60;

// The computations of a mechanism around its recurrence.
struct Surroundings {
  // Members of the engine's Problem, in the accumulation dtype: [B, T, HV], [HV, V], and in q's dtype [B, T, HV, V].
  ConstTensorView value_factors, skip, output_gate;
  ConstTensorView key_mask;  // [B, T] bool
  // Computes the contents of these tensors and log_decay: called after all checks, before anything else.
  std::function<void()> prepare;
  bool wide_o = false, wide_dv = false;  // o and d_o, or dv, are in the accumulation dtype
};

struct Definition {
  DecayShape decay = DecayShape::kNone;
  bool root_scale = false;  // the default scale is K^-1/2, else 1
  recurrence::Feature feature = recurrence::Feature::kIdentity;
  std::optional<recurrence::Feature> key_feature = {};  // that of queries by default
  double feature_eps = 0;                               // added to random exponentials in the form without causality
  bool causal = true;                                   // without it there are no states
  bool normalize = false;
  double eps = 0;
  bool complement_keys = false;                        // k is 1 - exp(log_decay) instead of an input
  bool value_decay = false;                            // columns of the state may have decays
  bool bonus = false;                                  // queries read the state before their token, plus the u term
  recurrence::Delta delta = recurrence::Delta::kNone;  // kBeforeDecay takes a and b
  bool beta = false, read_key = false;                 // delta rules: beta; p
  bool erase_and_write = false;                        // factors per channel
  bool several_writes = false;                         // k, v and beta have an axis of writes: [B, T, n, ...]
  bool exp_gates = false;                              // i and f, with a normaliser
  bool channels = false;  // a head is a channel: tensors are [B, T, C], states [B, C], without keys

  // Names of the tensors in messages.
  const char *query_name = "q", *key_name = "k", *value_name = "v";
  const char* state_names[3] = {"", ".z", ".m"};  // appended to "state"
  bool value_first = false;                       // states are [B, HV, V, K]
  const Surroundings* surroundings = nullptr;
};

// One letter per axis: B, T, N writes, H key heads, G value heads, K, V, M, and C channels that are heads; for states F
// features.
using Tensor = mechanism::Tensor<Inputs, StepInputs, Gradients>;
using Api = mechanism::ApiOf<Tensor, Inputs, BackwardInputs, StepInputs, State, Outputs, Gradients, Explanation>;

// The tensors of a mechanism, q first, in static memory.
class Tensors {
 public:
  explicit Tensors(const Definition& definition);
  static Tensors NotOf(const Definition& definition);  // the tensors that other mechanisms take
  static const Tensor* Any(std::string_view name);     // of any mechanism; or null
  const Tensor* begin() const { return tensors_.data(); }
  const Tensor* end() const { return tensors_.data() + count_; }
  const Tensor* Find(std::string_view name) const;  // null if the mechanism does not take it

 private:
  Tensors() = default;

  std::array<Tensor, 20> tensors_;
  size_t count_ = 0;
};

// Values are [B, T, ..., HV, V], or channels.
inline int64_t ValueHeads(const Inputs& in) { return in.v.size(in.v.rank() - (in.v.rank() > 3 ? 2 : 1)); }
inline int64_t ValueSize(const Inputs& in) { return in.v.rank() > 3 ? in.v.size(in.v.rank() - 1) : 1; }
inline int64_t KeySize(const Inputs& in) { return in.q.rank() > 3 ? in.q.size(3) : 1; }

// True if the state has a running maximum m.
inline bool HasMaximum(const Definition& d) {
  return d.causal && (recurrence::IsRandom(d.feature) || d.exp_gates || d.channels);
}

// Rows of the state: channels of phi(q); for random features the M rows of W.
inline int64_t FeaturesOf(const Definition& definition, const AxisSizes& sizes) {
  return recurrence::IsRandom(definition.feature) ? sizes.M : recurrence::FeatureSize(definition.feature, sizes.K);
}

// A state that mechanisms may have: S, z and m.
struct StateTensor {
  const char* suffix;  // suffix of its name among outputs, "state_z"
  const char* axes;
  ConstTensorView ConstState::* read;
  TensorView State::* written;
  bool exists;
};
std::array<StateTensor, 3> StateTensors(const Definition& definition);

// Axes of o.
inline const char* OutputAxes(const Definition& definition) { return definition.channels ? "BTC" : "BTGV"; }

// Each function checks all arguments before anything is written and throws InvalidArgument with `op`, the argument, its
// value and what was expected.
void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in, const Options& options,
             const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition, const BackwardInputs& in,
              const Options& options, const Gradients& out);

// One token: `state` is updated in place.
void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                  const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                          const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                    const Options& options);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_RECURRENT_INTERNAL_H_
