// The table of precond_kda for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_INTERNAL_H_
#define HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/preconditioned_rounding_internal.h"
#include "heed/ops/delta/precond_kda/precond_kda.h"

namespace heed::precond_kda {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .beta = {"beta", "BTG", Role::kBeta, mechanism::kWide, mechanism::kFractions},
    .log_decay_A = {"log_decay_A", "BTH", Role::kCurvatureDecay, mechanism::kWide, mechanism::kDecays},
    .beta_A = {"beta_A", "BTH", Role::kCurvatureRate, mechanism::kWide, mechanism::kFractions},
    .center = {.name = "center",
               .axes = "H",
               .role = Role::kCurvatureCenter,
               .type = mechanism::kAnyFloat,
               .optional = true,
               .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .S = {"S", "BGFV"},
    .A = {"A", "BHF", mechanism::StateTensor::kCurvature},
};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::PreconditionedMath Math(const Inputs& in, const Options& options);

}  // namespace heed::precond_kda

#endif  // HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_INTERNAL_H_
