// The table of delta_product for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/ops/delta/delta_product/delta_product.h"

namespace heed::delta_product {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTNHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTNGV", Role::kValue},
    .log_decay = {.name = "log_decay",
                  .axes = "BTG",
                  .role = Role::kLogDecay,
                  .type = mechanism::kWide,
                  .values = mechanism::kDecays,
                  .optional = true},
    .beta = {"beta", "BTNG", Role::kBeta, mechanism::kWide, mechanism::kFractions},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::delta_product

#endif  // HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_
