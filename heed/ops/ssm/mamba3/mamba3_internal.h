// The table of mamba3, and its calls.
#ifndef HEED_OPS_SSM_MAMBA3_MAMBA3_INTERNAL_H_
#define HEED_OPS_SSM_MAMBA3_MAMBA3_INTERNAL_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "heed/mechanism/call_internal.h"
#include "heed/mechanism/passes_internal.h"
#include "heed/mechanism/segments_internal.h"
#include "heed/ops/ssm/mamba3/mamba3.h"

namespace heed::mamba3 {

using mechanism::Role;

// N is R, the number of writes and reads per token.
inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTNHK", Role::kQuery},
    .k = {"k", "BTNHK", Role::kKey},
    .v = {"v", "BTNGV", Role::kValue},
    .log_decay = {"log_decay", "BTG", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .dt = {"dt", "BTG", Role::kStep, mechanism::kWide, mechanism::kFractions},
    .trap = {"trap", "BTG", Role::kInputGate, mechanism::kWide},
    .theta = {"theta", "BTGP", Role::kAngleRate, mechanism::kWide},
    .q_bias = {.name = "q_bias", .axes = "GNK", .type = mechanism::kAnyFloat, .optional = true, .keyword = true},
    .k_bias = {.name = "k_bias", .axes = "GNK", .type = mechanism::kAnyFloat, .optional = true, .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .S = {"S", "BGKV"},
    .angle = {"angle", "BGP", mechanism::StateTensor::kAngle},
    .k = {"k", "BNGK", mechanism::StateTensor::kLastKey},
    .v = {"v", "BNGV", mechanism::StateTensor::kLastValue},
};

struct Call;

struct Definition {
  using Call = mamba3::Call;
  using Options = recurrent::Options;

  mechanism::Table table;
};

inline Definition DefinitionOf(const Options& /*options*/) { return {mechanism::TableOf(kTensors, kStates)}; }

// A checked call.
struct Call : mechanism::Call {
  static std::string AxisName(char letter) {
    return letter == 'G' ? "HV" : letter == 'N' ? "R" : std::string(1, letter);
  }
  static Options OptionsOfStep(const Options& options) {
    Options scale;  // the only option of a step
    scale.scale = options.scale;
    return scale;
  }
  static void CheckStep(const char* /*op*/, const Definition& /*definition*/) {}

  void Check(const char* op, const Context* checks, const Definition& definition, const mechanism::Arguments& in,
             const Options& options, bool data);
  void CheckLayout(const char* op, const Context* /*checks*/, const char* name, const ConstTensorView& t,
                   std::string_view axes) const {
    if (axes.back() != 'G') mechanism::CheckContiguousRows(op, name, t);
  }
  void CheckStateLayout(const char* op, const char* name, const ConstTensorView& t) const {
    mechanism::CheckContiguousRows(op, name, t);
  }
  DType GradientDType(const mechanism::Tensor& /*tensor*/, const ConstTensorView& input) const { return input.dtype(); }

  void Forward(const char* op, Context& ctx, const Definition& definition, const mechanism::Arguments& in,
               const mechanism::Results& out);
  void Backward(const char* op, Context& ctx, const Definition& definition, const mechanism::Arguments& in,
                const mechanism::Results& out);
  void Step(const char* op, Context& ctx, const Definition& definition, const mechanism::Arguments& in,
            const mechanism::Results& out);
  int64_t ForwardBytes(const char* op, const Context& ctx, const Definition& definition,
                       const mechanism::Arguments& in) const;
  int64_t BackwardBytes(const char* op, const Context& ctx, const Definition& definition,
                        const mechanism::Arguments& in) const;
  void Explain(const char* op, const Context& ctx, const Definition& definition, const mechanism::Arguments& in,
               Explanation& e) const;
  mechanism::Division DivisionOf(const Definition& /*definition*/, const mechanism::Arguments& /*in*/) const {
    return {};  // there are no segments
  }

  double scale = 1;
};

}  // namespace heed::mamba3

#endif  // HEED_OPS_SSM_MAMBA3_MAMBA3_INTERNAL_H_
