// Kernels on matrix tiles where there are none: emulated, they agree with the reference. That
// the emulation has the bits of the hardware is heed/simd/tiles_test.cc; between products the
// two are compiled for different targets, whose logarithms differ in the last bit.
#include <gtest/gtest.h>

#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/harness/case.h"

namespace heed {
namespace {

TEST(EmulatedTiles, AgreeWithTheReference) {
  const EmulateTiles tiles;
  const OpEntry op = FindOp("attention");
  Context ctx(2);
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const DType dtypes[] = {DType::kBF16, DType::kF32, DType::kF16};
    const Comparison result = Compare(op.random_case(dtypes[seed % 3], seed), ctx);
    ASSERT_TRUE(result.ok) << "seed " << seed << ": " << result.message;
  }
}

}  // namespace
}  // namespace heed
