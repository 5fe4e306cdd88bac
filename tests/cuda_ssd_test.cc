// SSD on devices: it agrees with its reference, and refuses what it cannot do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "heed/ops/ssm/ssd/ssd_case.h"
#include "tests/cuda/problems_on_devices.h"

namespace heed {
namespace {

using testing::HasSubstr;

class CudaSsdTest : public AgreementTest {
 protected:
  static mechanism::Mechanism OnThis(const mechanism::Mechanism& m) { return Moved(*GetParam(), m); }
};

TEST_P(CudaSsdTest, RandomProblemsAgreeWithTheReference) {
  const uint64_t first = FromEnvironment("HEED_TEST_FIRST_SEED", 1), count = FromEnvironment("HEED_TEST_SEEDS", 100);
  Comparison closest;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    cuda::SetEmulatedSeed(seed);
    ASSERT_NO_FATAL_FAILURE(Agrees(ssd::RandomCaseOf(&OnThis, DType::kBF16, seed), &closest));
  }
  Print("ssd", closest);
}

TEST_P(CudaSsdTest, SizesAndVariantsAgreeWithTheReference) {
  constexpr Sizes kSizes[] = {// B, Tq, Tk, Hq, Hkv, D, Dv
                              {1, 150, 150, 2, 1, 33, 24}, {1, 34, 34, 1, 1, 128, 64}, {1, 20, 20, 2, 1, 24, 130}};
  Comparison closest;
  for (const Sizes& sizes : kSizes) {
    for (const char* variant : {"", "state", "reverse", "lengths=62", "skip", "gate", "skip+gate"}) {
      if (sizes.D != 33 && std::string(variant) != "skip") continue;
      for (const std::string pass : {"forward", "backward", "step"}) {
        if (pass == "step" && *variant != 0) continue;
        const CaseRequest request = {.sizes = sizes, .dtype = DType::kBF16, .seed = 3, .pass = pass, .variant = variant};
        ASSERT_NO_FATAL_FAILURE(Agrees(ssd::MakeCaseOf(&OnThis, request), &closest));
      }
    }
  }
  Print("ssd", closest);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaSsdTest, testing::ValuesIn(Devices()), heed::NameOf);

}  // namespace
}  // namespace heed
