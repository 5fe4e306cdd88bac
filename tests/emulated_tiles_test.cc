// Kernels on matrix tiles where there are none: emulated, they agree with the reference. That
// the emulation has the bits of the hardware is heed/simd/tiles_test.cc; between products the
// two are compiled for different targets, whose logarithms differ in the last bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>

#include "heed/core/dispatch.h"
#include "heed/harness/case.h"

namespace heed {
namespace {

void ExpectTheReference(const char* name, std::initializer_list<DType> dtypes) {
  const EmulateTiles tiles;
  const OpEntry op = FindOp(name);
  Context ctx(2);
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const DType dtype = dtypes.begin()[seed % dtypes.size()];
    const Comparison result = Compare(op.random_case(dtype, seed), ctx);
    ASSERT_TRUE(result.ok) << name << ", seed " << seed << ": " << result.message;
  }
}

TEST(EmulatedTiles, AgreeWithTheReference) {
  ExpectTheReference("attention", {DType::kBF16, DType::kF32, DType::kF16});
}

TEST(EmulatedTiles, ChunksAgreeWithTheReference) {
  for (const char* name : {"linear_attention", "retention", "simple_gla", "ssd"}) {
    ExpectTheReference(name, {DType::kBF16});
  }
}

}  // namespace
}  // namespace heed
