// The selective scan in Mamba's configuration, for its cases.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_CASE_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_CASE_H_

#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"

namespace heed::selective_scan {

scanning::Mechanism MechanismOf(const Options& options);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_CASE_H_
