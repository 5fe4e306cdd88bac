// The table of SSD.
#ifndef HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
#define HEED_OPS_SSM_SSD_SSD_INTERNAL_H_

#include "heed/mechanism/table_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::ssd {

// The table of calls, in the letters of ssd.h. That of the recurrence is in ssd.cc.
inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .x = {"x", "BTHP"},
    .dt = {.name = "dt", .axes = "BTH", .type = mechanism::kWide, .values = mechanism::kSteps},
    .A = {.name = "A", .axes = "H", .type = mechanism::kAnyFloat, .values = mechanism::kRates},
    .B = {"B", "BTGN"},
    .C = {"C", "BTGN"},
    .D = {.name = "D", .axes = "HP|H", .type = mechanism::kAnyFloat, .optional = true, .keyword = true},
    .z = {.name = "z", .axes = "BTHP", .optional = true, .keyword = true},
    .dt_bias = {.name = "dt_bias",
                .axes = "H",
                .type = mechanism::kAnyFloat,
                .values = mechanism::kStepBiases,
                .optional = true,
                .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BHPN"}};

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
