// The kernels of recurrences and scans: which is chosen, and why the others decline.
#include "heed/engines/kernel_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "heed/core/error.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/scan/kernels.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

recurrence::Problem Recurrence(DType dtype) {
  recurrence::Problem p;
  p.dtype = dtype;
  p.key_heads = p.value_heads = p.key_size = p.value_size = 1;
  return p;
}

scan::Problem Scan(DType dtype, scan::Rule rule) {
  scan::Problem p;
  p.dtype = dtype;
  p.rule = rule;
  return p;
}

template <class Kernel, class Problem>
std::string Why(const Kernel& kernel, const Context& ctx, const Problem& p) {
  return kernel.declines(ctx, p);
}

TEST(KernelListTest, EveryKernelSaysWhyItDeclinesADType) {
  const Context ctx(1);
  EXPECT_THAT(
      [&] { recurrence::Choose("the::Op", ctx, Recurrence(DType::kI32)); },
      ThrowsMessage<Unsupported>(AllOf(
          HasSubstr("the::Op: no kernel"), HasSubstr("recurrence_tiles computes bf16, not i32"),
          HasSubstr("recurrence_f32 computes f32, bf16 and f16, not i32"), HasSubstr("delta_f64 computes f64, not i32"),
          HasSubstr("recurrence_channels computes f64, f32, bf16 and f16, not i32"))));
  EXPECT_THAT([&] { scan::Choose("the::Op", ctx, Scan(DType::kI32, scan::Rule::kModes)); },
              ThrowsMessage<Unsupported>(AllOf(HasSubstr("selective_f32 computes f32, bf16 and f16, not i32"),
                                               HasSubstr("modes computes f64, f32, bf16 and f16, not i32"))));
}

TEST(KernelListTest, ARecurrenceGetsTheKernelOfItsForm) {
  Context ctx(1);
  ctx.set_isa(AvailableTargets(DType::kF64).front());  // no AMX
  const auto chosen = [&](const recurrence::Problem& p) { return std::string(recurrence::Choose("op", ctx, p).name); };
  recurrence::Problem p = Recurrence(DType::kBF16);
  EXPECT_EQ(chosen(p), "recurrence_f32");
  EXPECT_EQ(Why(recurrence::kDeltaF32, ctx, p), "computes delta rules");
  EXPECT_EQ(Why(recurrence::kChannels, ctx, p), "computes weighted means per channel");
  EXPECT_EQ(Why(recurrence::kAmx, ctx, p), "needs AMX");
  p.normalize = true;
  EXPECT_EQ(Why(recurrence::kAmx, ctx, p), "computes no feature maps and no normalisers");
  p = Recurrence(DType::kF64);
  EXPECT_EQ(chosen(p), "recurrence_f64");
  p.delta = recurrence::Delta::kAfterDecay;
  EXPECT_EQ(chosen(p), "delta_f64");
  EXPECT_EQ(Why(recurrence::kRecurrenceF64, ctx, p), "computes no delta rules");
  p.delta = recurrence::Delta::kNone;
  p.channels = true;
  EXPECT_EQ(chosen(p), "recurrence_channels");
  EXPECT_EQ(Why(recurrence::kRecurrenceF64, ctx, p), "computes no weighted means per channel");
}

TEST(KernelListTest, AScanGetsTheKernelOfItsRule) {
  const Context ctx(1);
  const auto chosen = [&](const scan::Problem& p) { return std::string(scan::Choose("op", ctx, p).name); };
  EXPECT_EQ(chosen(Scan(DType::kF16, scan::Rule::kSelective)), "selective_f32");
  EXPECT_EQ(chosen(Scan(DType::kF64, scan::Rule::kSelective)), "selective_f64");
  EXPECT_EQ(chosen(Scan(DType::kF32, scan::Rule::kTaps)), "convolution_direct");
  EXPECT_EQ(chosen(Scan(DType::kF32, scan::Rule::kDecay)), "elementwise");
  EXPECT_EQ(chosen(Scan(DType::kF32, scan::Rule::kGates)), "elementwise");
  for (const scan::Rule rule : {scan::Rule::kModes, scan::Rule::kHeads}) {
    scan::Problem p = Scan(DType::kF32, rule);
    EXPECT_EQ(chosen(p), rule == scan::Rule::kModes ? "modes" : "heads");
    p.has_taps = true;
    EXPECT_EQ(chosen(p), rule == scan::Rule::kModes ? "convolution_direct" : "heads_convolution");
  }
  EXPECT_EQ(Why(scan::kSelectiveF32, ctx, Scan(DType::kF32, scan::Rule::kTaps)), "computes selective scans");
  EXPECT_EQ(Why(scan::kConvolutionFourier, ctx, Scan(DType::kF32, scan::Rule::kTaps)),
            "is faster only for longer sequences and more taps");
}

}  // namespace
}  // namespace heed
