// SSD's cases, for SSD itself or the same computation elsewhere.
#ifndef HEED_OPS_SSM_SSD_SSD_CASE_H_
#define HEED_OPS_SSM_SSD_SSD_CASE_H_

#include <cstdint>
#include <functional>

#include "heed/core/dtype.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"

namespace heed::ssd {

// Maps the mechanism to the same computation elsewhere.
using Moving = std::function<mechanism::Mechanism(const mechanism::Mechanism&)>;

Case MakeCaseOf(const Moving& moved, const CaseRequest& request);
Case RandomCaseOf(const Moving& moved, DType dtype, uint64_t seed);

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_CASE_H_
