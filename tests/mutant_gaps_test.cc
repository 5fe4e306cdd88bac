// Tests for surviving mutants of tools/mutants.py that belong to no other file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/rounding_modes.h"
#include "heed/io/safetensors.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed {
namespace {

using attention::Difference;
using attention::MakeProblem;
using attention::Problem;
using attention::Result;
using attention::RunForward;

TEST(MutantGaps, BitsDoNotDependOnTheCallersRoundingMode) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    Problem p = MakeProblem(dtype, {.B = 1, .Tq = 19, .Tk = 90, .Hq = 2, .Hkv = 1, .D = 16, .Dv = 16});
    p.options.causal = true;
    for (const std::string& target : AvailableTargets(dtype)) {
      Context ctx(1);
      ctx.set_isa(target);
      const Result nearest = RunForward(ctx, p);
      for (const int mode : kRoundingModes) {
        std::fesetround(mode);
        const Result result = RunForward(ctx, p);
        EXPECT_EQ(std::fegetround(), mode) << "the caller's mode comes back";
        std::fesetround(FE_TONEAREST);
        EXPECT_EQ(Difference(nearest, result), "") << Name(dtype) << " " << target;
      }
    }
  }
}

TEST(MutantGaps, SubnormalResultsAreZeroOnX86) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Problem p = MakeProblem(dtype, {.B = 1, .Tq = 1, .Tk = 1});
    p.memory[2].FillConstant(dtype == DType::kF32 ? double{std::numeric_limits<float>::denorm_min()}
                                                  : std::numeric_limits<double>::denorm_min());
    Context ctx(1);
    EXPECT_EQ(RunForward(ctx, p).o.Get({0, 0, 0, 0}) == 0, os::kFlushesSubnormalResults) << Name(dtype);
  }
}

// A product that underflows leaves -0, which a masked key of the same tile would change to +0: the sign must not depend
// on it.
TEST(MutantGaps, TheSignOfAnUnderflowDoesNotDependOnMaskedKeys) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Problem p = MakeProblem(dtype, {.B = 1, .Tq = 2, .Tk = 3});
    const double smallest =
        dtype == DType::kF32 ? double{std::numeric_limits<float>::min()} : std::numeric_limits<double>::min();
    p.memory[0].FillConstant(1);
    p.memory[1].FillConstant(0);
    p.memory[1].Set({0, 1, 0, 0}, -7);  // has weight 1 / 1000
    p.memory[2].FillConstant(0);
    p.memory[2].Set({0, 1, 0, 0}, -smallest);
    p.memory[2].Set({0, 2, 0, 0}, 1);
    p.options.causal = true;  // row 0 sees keys 0 and 1
    for (const std::string& target : AvailableTargets()) {
      Context ctx(1);
      ctx.set_isa(target);
      const Result both = RunForward(ctx, p);
      const Result alone = RunForward(ctx, attention::SomeQueries(p, 0, 1));
      EXPECT_EQ(Difference(both.o.view().Slice(1, 0, 1), alone.o.view()), "");
      const double o = alone.o.Get({0, 0, 0, 0});
      EXPECT_EQ(o == 0 && !std::signbit(o), os::kFlushesSubnormalResults) << Name(dtype) << " " << target;
    }
  }
}

// 2^59 + 1 elements of 32 bits are 4 bytes, modulo 2^64.
TEST(MutantGaps, AShapeWhoseBytesWrapToThoseOfTheFileIsRejected) {
  for (const char* shape : {"[576460752303423489]", "[1,576460752303423489,1]"}) {
    const std::string header =
        std::string("{\"x\":{\"dtype\":\"F32\",\"shape\":") + shape + ",\"data_offsets\":[0,4]}}";
    const uint64_t length = header.size();
    std::vector<uint8_t> file(sizeof(length) + header.size() + 4);
    std::memcpy(file.data(), &length, sizeof(length));
    std::memcpy(file.data() + sizeof(length), header.data(), header.size());
    EXPECT_THAT([&] { SafetensorsFile("f", file); },
                testing::ThrowsMessage<FileError>(testing::HasSubstr("expected fewer than 2^63 bits")));
  }
}

}  // namespace
}  // namespace heed
