// The definition of a mechanism for the recurrence engine, and its passes.
#ifndef HEED_MECHANISM_RECURRENT_INTERNAL_H_
#define HEED_MECHANISM_RECURRENT_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/mechanism/call_internal.h"
#include "heed/mechanism/passes_internal.h"
#include "heed/mechanism/recurrent.h"

namespace heed::recurrent {

using mechanism::Arguments;
using mechanism::AxisSizes;
using mechanism::Results;
using mechanism::Role;
using mechanism::StateTensor;
using mechanism::Tensor;
using mechanism::With;

// Flops per token of a weighted mean per channel: sums, products and two exponentials of 20.
inline constexpr double kFlopsOfChannels = 60;

// The computations of a mechanism around its recurrence.
struct Surroundings {
  // Members of the engine's Problem, in the accumulation dtype: [B, T, HV], [HV, V], and in q's dtype [B, T, HV, V].
  ConstTensorView value_factors, skip, output_gate;
  // Computes the contents of these tensors and log_decay: called after all checks, before anything else.
  std::function<void()> prepare;
  bool wide_o = false, wide_dv = false;  // o and d_o, or dv, are in the accumulation dtype
};

struct EngineCall;  // a checked call, in recurrent.cc

// A mechanism: its table, from whose roles and axes the form of the recurrence follows, and its options.
//
// Axes have one letter each: B, T, N writes, H key heads, G value heads, K, V, M, and C channels that are heads; for
// states F features. Decays are constants G or GK, or BTG or BTGK per token.
struct Definition {
  using Call = recurrent::EngineCall;
  using Options = recurrent::Options;

  mechanism::Table table;
  bool root_scale = false;  // the default scale is K^-1/2, else 1
  recurrence::Feature feature = recurrence::Feature::kIdentity;
  std::optional<recurrence::Feature> key_feature = {};  // that of queries by default
  double feature_eps = 0;                               // added to random exponentials in the form without causality
  bool causal = true;                                   // without it there are no states
  bool has_direction = true;                            // otherwise `reverse` stays false
  bool normalize = false;
  double eps = 0;  // of the normaliser, or of preconditioned keys
  const Surroundings* surroundings = nullptr;
  double bound = 0;  // preconditioned keys are multiplied by factors between 1 / bound and bound

  // The parts of the recurrence that the table has.
  bool channels() const;         // a head is a channel, without queries
  bool several_writes() const;   // k, v and beta have an axis of writes
  bool complement_keys() const;  // k is 1 - exp(log_decay) instead of an input
  bool exp_gates() const { return table.Has(Role::kInputGate); }
  bool preconditions() const { return table.Has(Role::kCurvatureRate); }
  bool value_first() const;  // states are [B, HV, V, K]
  recurrence::Delta delta() const;
  const Tensor& query() const { return *table.Find(channels() ? Role::kKey : Role::kQuery); }
  const Tensor& value() const { return *table.Find(Role::kValue); }
  const char* o_axes() const { return channels() ? "BTC" : "BTGV"; }
  // True for a state that calls with these options have.
  bool Has(const StateTensor& state) const { return causal && (state.role != StateTensor::kNormaliser || normalize); }
};

// Rows of the state: channels of phi(q); for random features the M rows of W.
inline int64_t FeaturesOf(const Definition& definition, const AxisSizes& sizes) {
  return recurrence::IsRandom(definition.feature) ? sizes.M : recurrence::FeatureSize(definition.feature, sizes.K);
}

using Passes = mechanism::Passes<Definition>;

}  // namespace heed::recurrent

extern template struct heed::mechanism::Passes<heed::recurrent::Definition>;  // in recurrent.cc

#endif  // HEED_MECHANISM_RECURRENT_INTERNAL_H_
