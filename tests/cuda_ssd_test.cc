// SSD on devices: it agrees with its reference, and throws where something is not implemented.
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
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    Comparison closest;
    const Seeds seeds = dtype == DType::kBF16 ? SeedsOf(100, 10) : SeedsOf(25, 3);
    for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
      cuda::SetEmulatedSeed(seed);
      ASSERT_NO_FATAL_FAILURE(Agrees(ssd::RandomCaseOf(&OnThis, dtype, seed), &closest));
    }
    Print(std::string("ssd ") + Name(dtype), closest);
  }
}

TEST_P(CudaSsdTest, SizesAndVariantsAgreeWithTheReference) {
  constexpr Sizes kSizes[] = {// B, Tq, Tk, Hq, Hkv, D, Dv
                              {1, 150, 150, 2, 1, 33, 24},
                              {1, 34, 34, 1, 1, 128, 64},
                              {1, 20, 20, 2, 1, 24, 130}};
  Comparison closest;
  for (const Sizes& sizes : kSizes) {
    for (const char* variant : {"", "state", "reverse", "lengths=62", "skip", "gate", "skip+gate"}) {
      if (sizes.D != 33 && std::string(variant) != "skip") continue;
      for (const std::string pass : {"forward", "backward", "step"}) {
        if (pass == "step" && *variant != 0) continue;
        const CaseRequest request = {
            .sizes = sizes, .dtype = DType::kBF16, .seed = 3, .pass = pass, .variant = variant};
        ASSERT_NO_FATAL_FAILURE(Agrees(ssd::MakeCaseOf(&OnThis, request), &closest));
      }
    }
  }
  Print("ssd", closest);
}

// Inputs of one sequence and their memory, on a device.
struct Tensors {
  Tensors(const TestDevice& device, DType dtype, int64_t N)
      : host_x(dtype, {1, 5, 2, 8}), host_dt(dtype == DType::kF64 ? dtype : DType::kF32, {1, 5, 2}),
        host_A(DType::kF32, {2}), host_B(dtype, {1, 5, 1, N}), host_o(dtype, {1, 5, 2, 8}),
        x(device, host_x.FillNormal(1).view()), dt(device, host_dt.FillConstant(0.5).view()),
        A(device, host_A.FillConstant(-1).view()), B(device, host_B.FillNormal(2).view()), o(device, host_o.view()) {}
  ssd::Inputs Views() const {
    ssd::Inputs in;
    in.x = x.view();
    in.dt = dt.view();
    in.A = A.view();
    in.B = in.C = B.view();
    return in;
  }
  Buffer host_x, host_dt, host_A, host_B, host_o;
  DeviceTensor x, dt, A, B, o;
};

TEST_P(CudaSsdTest, ExplainNamesTheKernel) {
  const Tensors t(*GetParam(), DType::kBF16, 16);
  const ssd::Explanation e = ssd::Explain(ctx_, t.Views(), {});
  EXPECT_EQ(e.kernel, "recurrence_cuda");
  EXPECT_EQ(e.target, "cuda");
}

TEST_P(CudaSsdTest, TensorsOfSeveralDevicesAreRefused) {
  const Tensors t(*GetParam(), DType::kBF16, 16);
  const auto refusal = [&](const ssd::Inputs& in, const TensorView& o) {
    const std::string what = Refusal<InvalidArgument>([&] { ssd::Forward(ctx_, in, {}, {o, {}}); });
    t.o.Download(t.host_o.view());
    for (const uint8_t byte : t.host_o.bytes()) EXPECT_EQ(byte, 0xFF);
    return what;
  };
  const auto with = [&](ConstTensorView ssd::Inputs::* member, const Buffer& host) {
    ssd::Inputs in = t.Views();
    in.*member = host.view();
    return in;
  };
  EXPECT_THAT(refusal(with(&ssd::Inputs::A, t.host_A), t.o.view()), HasSubstr("A is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&ssd::Inputs::dt, t.host_dt), t.o.view()), HasSubstr("dt is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&ssd::Inputs::B, t.host_B), t.o.view()), HasSubstr("B is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&ssd::Inputs::x, t.host_x), t.o.view()), HasSubstr("is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal(t.Views(), t.host_o.view()), HasSubstr("o is on the CPU, expected cuda:0"));
}

TEST_P(CudaSsdTest, UnsupportedInputsAreNamed) {
  const auto refusal = [&](DType dtype, int64_t N, bool skips) {
    const Tensors t(*GetParam(), dtype, N);
    ssd::Inputs in = t.Views();
    if (skips) in.D = t.A.view();
    return Refusal<Unsupported>([&] { ssd::Forward(ctx_, in, {}, {t.o.view(), {}}); });
  };
  EXPECT_THAT(refusal(DType::kF64, 16, false), HasSubstr("recurrence_cuda computes f32, bf16 and f16, not f64"));
  EXPECT_EQ(refusal(DType::kBF16, 129, false), "nothing is thrown");
  EXPECT_THAT(refusal(DType::kBF16, 129, true),
              HasSubstr("computes skips and gates around states of up to 128 key channels"));
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaSsdTest, testing::ValuesIn(Devices()), heed::NameOf);

}  // namespace
}  // namespace heed
