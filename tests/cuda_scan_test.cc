// Scans on devices: GPU kernels agree with the references, keep a token's bits, and throw where something is not
// implemented.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/gated/rg_lru/rg_lru.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"
#include "heed/ops/ssm/selective_scan/selective_scan_case.h"
#include "tests/cuda/problems_on_devices.h"

namespace heed {
namespace {

using mechanism::Problem;
using mechanism::Views;
using selective_scan::Inputs;
using selective_scan::Options;
using testing::HasSubstr;

// The selective scan on a device.
scanning::Mechanism ScanOn(const TestDevice& device, bool softplus) {
  Options options;
  options.delta_softplus = softplus;
  scanning::Mechanism m = selective_scan::MechanismOf(options);
  m.of_problems = Moved(device, m.of_problems);
  return m;
}

struct Tensors;

class CudaScanTest : public AgreementTest {
 protected:
  std::vector<Buffer> RunBackward(const Tensors& x, const Buffer& d_o, int64_t begin, int64_t end);

  struct Results {
    Buffer o, state;
  };
  Results Run(const Inputs& in, Options options = {}) {
    const TestDevice& device = *GetParam();
    options.delta_softplus = true;
    const int64_t sequences = options.cu_seqlens.present() ? options.cu_seqlens.size(0) - 1 : in.u.size(0);
    const Results results = {Buffer(in.u.dtype(), {in.u.size(0), in.u.size(1), in.u.size(2)}),
                             Buffer(mechanism::StateDType(in.u.dtype()), {sequences, in.A.size(0), in.A.size(1)})};
    const DeviceTensor u(device, in.u), delta(device, in.delta), A(device, in.A), B(device, in.B), C(device, in.C),
        D(device, in.D), z(device, in.z), bias(device, in.delta_bias), initial(device, in.initial.S),
        o(device, results.o.view()), state(device, results.state.view());
    Inputs there;
    there.u = u.view();
    there.delta = delta.view();
    there.A = A.view();
    there.B = B.view();
    there.C = C.view();
    there.D = D.view();
    there.z = z.view();
    there.delta_bias = bias.view();
    there.initial.S = initial.view();
    selective_scan::Forward(ctx_, there, options, {o.view(), {state.view()}});
    o.Download(results.o.view());
    state.Download(results.state.view());
    return results;
  }
};

TEST_P(CudaScanTest, RandomProblemsAgreeWithTheReference) {
  const Seeds seeds = SeedsOf(20, 4);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool softplus : {false, true}) {
      Comparison closest;
      for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
        cuda::SetEmulatedSeed(seed);
        ASSERT_NO_FATAL_FAILURE(Agrees(scanning::RandomCase(ScanOn(*GetParam(), softplus), dtype, seed), &closest));
      }
      Print(std::string(Name(dtype)) + (softplus ? " softplus" : ""), closest);
    }
  }
}

// T tokens, D channels, and states per channel.
struct Size {
  int64_t T, D, states;
};

TEST_P(CudaScanTest, SizesAndVariantsAgreeWithTheReference) {
  constexpr Size kSizes[] = {{70, 70, 16}, {33, 9, 1},    {18, 33, 17}, {24, 18, 64},
                             {17, 9, 65},  {20, 10, 128}, {0, 8, 16},   {300, 1, 4}};
  for (const bool softplus : {false, true}) {
    const scanning::Mechanism m = ScanOn(*GetParam(), softplus);
    Comparison closest;
    for (const Size& size : kSizes) {
      for (const char* variant : {"", "state", "reverse", "lengths=62", "strong", "vanishing+state", "strided"}) {
        if (size.D != 70 && *variant != 0 && !(size.T == 0 && std::string(variant) == "state")) continue;
        for (const int form : {0, 1, 2}) {  // without groups; with them; constants
          if (form != 0 && (*variant != 0 || (size.D % 2 != 0 && form == 1))) continue;
          for (const char* pass : {"forward", "backward", "step"}) {
            if (std::string(pass) == "step" && *variant != 0) continue;
            if (LeavesOut(7)) continue;
            scanning::Choice choice;
            choice.groups = form == 1 ? 2 : 0;
            choice.states = size.states;
            if (form == 2) choice.constant = {"B", "C"};
            if (form == 1) choice.absent = {"z", "delta_bias", "D"};
            const CaseRequest request = {.sizes = {2, size.T, size.T, 1, 1, size.D, size.D},
                                         .dtype = DType::kF32,
                                         .seed = 3,
                                         .pass = pass,
                                         .variant = variant};
            ASSERT_NO_FATAL_FAILURE(Agrees(scanning::MakeCase(m, request, choice), &closest));
          }
        }
      }
    }
    Print(softplus ? "softplus" : "", closest);
  }
}

// Inputs and their memory.
struct Tensors {
  Tensors(DType dtype, int64_t sequences, int64_t channels, int64_t N, int64_t T, uint64_t seed = 1)
      : u(dtype, {sequences, channels, T}), delta(dtype, {sequences, channels, T}), z(dtype, {sequences, channels, T}),
        B(dtype, {sequences, N, T}), C(dtype, {sequences, N, T}), A(DType::kF32, {channels, N}),
        D(DType::kF32, {channels}), bias(DType::kF32, {channels}),
        initial(mechanism::StateDType(dtype), {sequences, channels, N}) {
    for (const Buffer* buffer : {&u, &delta, &z, &B, &C, &A, &D, &bias, &initial}) buffer->FillNormal(++seed);
    for (int64_t d = 0; d < channels; ++d) {
      for (int64_t n = 0; n < N; ++n) A.Set({d, n}, -0.1 - std::abs(A.Get({d, n})));
    }
  }
  Inputs Views() const {
    Inputs in;
    in.u = u.view();
    in.delta = delta.view();
    in.z = z.view();
    in.A = A.view();
    in.B = B.view();
    in.C = C.view();
    in.D = D.view();
    in.delta_bias = bias.view();
    in.initial.S = initial.view();
    return in;
  }
  // Computes tokens [begin, end) from a state on.
  Inputs Tokens(int64_t begin, int64_t end, const ConstTensorView& state) const {
    Inputs in = Views();
    for (ConstTensorView* t : {&in.u, &in.delta, &in.z, &in.B, &in.C}) *t = t->Slice(2, begin, end);
    in.initial.S = state;
    return in;
  }
  Buffer u, delta, z, B, C, A, D, bias, initial;
};

// Returns du, ddelta, dz, dB, dC and dinitial of sequences [begin, end).
std::vector<Buffer> CudaScanTest::RunBackward(const Tensors& x, const Buffer& d_o, int64_t begin, int64_t end) {
  const auto of = [&](const Buffer& buffer) {
    return DeviceTensor(*GetParam(), ConstTensorView(buffer.view()).Slice(0, begin, end));
  };
  const DeviceTensor u = of(x.u), delta = of(x.delta), z = of(x.z), B = of(x.B), C = of(x.C), initial = of(x.initial),
                     arrives = of(d_o), A(*GetParam(), x.A.view()), bias(*GetParam(), x.bias.view());
  selective_scan::BackwardInputs in;
  in.u = u.view();
  in.delta = delta.view();
  in.z = z.view();
  in.B = B.view();
  in.C = C.view();
  in.A = A.view();
  in.delta_bias = bias.view();
  in.initial.S = in.d_final.S = initial.view();
  in.d_o = arrives.view();
  std::vector<Buffer> results;
  std::vector<DeviceTensor> there;
  for (const ConstTensorView& like : {in.u, in.delta, in.z, in.B, in.C, in.initial.S}) {
    results.emplace_back(like.dtype(), std::vector<int64_t>(like.sizes().begin(), like.sizes().end()));
    there.emplace_back(*GetParam(), results.back().view());
  }
  selective_scan::Gradients out;
  TensorView* const views[] = {&out.u, &out.delta, &out.z, &out.B, &out.C, &out.initial.S};
  for (size_t k = 0; k < there.size(); ++k) *views[k] = there[k].view();
  Options options;
  options.delta_softplus = true;
  selective_scan::Backward(ctx_, in, options, out);
  for (size_t k = 0; k < there.size(); ++k) there[k].Download(results[k].view());
  return results;
}

TEST_P(CudaScanTest, ASequenceSplitAnywhereHasItsBits) {
  const Tensors x(DType::kBF16, 1, 40, 16, 90);
  const Results whole = Run(x.Views());
  for (const int64_t split : {1, 37, 48}) {
    const Results first = Run(x.Tokens(0, split, x.initial.view())),
                  second = Run(x.Tokens(split, 90, first.state.view()));
    EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(2, 0, split), first.o.view())) << split;
    EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(2, split, 90), second.o.view())) << split;
    EXPECT_TRUE(SameBits(whole.state.view(), second.state.view())) << split;
  }
}

TEST_P(CudaScanTest, ASequenceHasItsBitsWhateverSharesTheCall) {
  const Tensors x(DType::kBF16, 3, 40, 16, 50);
  const Results all = Run(x.Views());
  Inputs last = x.Views();
  for (ConstTensorView* t : {&last.u, &last.delta, &last.z, &last.B, &last.C, &last.initial.S}) *t = t->Slice(0, 2, 3);
  const Results alone = Run(last);
  EXPECT_TRUE(SameBits(ConstTensorView(all.o.view()).Slice(0, 2, 3), alone.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(all.state.view()).Slice(0, 2, 3), alone.state.view()));
}

TEST_P(CudaScanTest, GradientsOfASequenceHaveTheirBitsWhateverSharesTheCall) {
  const Tensors x(DType::kBF16, 3, 40, 16, 150);
  const Buffer d_o(DType::kBF16, {3, 40, 150});
  d_o.FillNormal(11);
  const std::vector<Buffer> all = RunBackward(x, d_o, 0, 3), alone = RunBackward(x, d_o, 2, 3);
  for (size_t k = 0; k < all.size(); ++k) {
    EXPECT_TRUE(SameBits(ConstTensorView(all[k].view()).Slice(0, 2, 3), alone[k].view())) << k;
  }
}

TEST_P(CudaScanTest, GradientsOfManySequencesAreSeveralLaunchesWhoseNumberDoesNotShow) {
  const scanning::Mechanism m = ScanOn(*GetParam(), true);
  scanning::Choice choice;
  choice.groups = 2;
  const Case c = scanning::MakeCase(
      m, {.sizes = {67, 19, 19, 1, 1, 4, 4}, .dtype = DType::kF32, .pass = "backward", .variant = "state"}, choice);
  const std::vector<Buffer> few = RunOn(1, c), many = RunOn(100, c);
  for (size_t i = 0; i < few.size(); ++i) EXPECT_TRUE(SameBits(few[i].view(), many[i].view())) << c.outputs[i].name;
  const Comparison result = CompareResults(c, ViewsOf(few));
  EXPECT_TRUE(result.ok) << result.message;
}

TEST_P(CudaScanTest, AnInfinityOfCStaysInTheGradientOfItsState) {
  // Blocks do not compute channels beyond the tensor.
  const Tensors x(DType::kF32, 1, 33, 5, 20);
  const Buffer d_o(DType::kF32, {1, 33, 20});
  x.u.FillConstant(1);
  x.z.FillConstant(1);
  d_o.FillConstant(1);
  x.C.Set({0, 2, 9}, std::numeric_limits<double>::infinity());
  const Buffer dB = RunBackward(x, d_o, 0, 1)[3];
  for (int64_t t = 0; t < 20; ++t) {
    for (int64_t n = 0; n < 5; ++n) {
      EXPECT_EQ(std::isfinite(dB.Get({0, n, t})), n != 2 || t > 9) << t << " " << n;
    }
  }
  EXPECT_EQ(dB.Get({0, 2, 9}), std::numeric_limits<double>::infinity());
}

TEST_P(CudaScanTest, PackedSequencesHaveTheirBitsAndOtherTokensAreZero) {
  const Tensors x(DType::kBF16, 1, 40, 16, 190);
  const int32_t bounds[] = {0, 30, 30, 160};
  Options options;
  options.cu_seqlens = ConstTensorView(bounds, DType::kI32, {4});
  Inputs in = x.Views();
  in.initial = {};
  const Results packed = Run(in, options);
  const Results alone = Run(x.Tokens(30, 160, {}));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.o.view()).Slice(2, 30, 160), alone.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.state.view()).Slice(0, 2, 3), alone.state.view()));
  for (int64_t t = 160; t < 190; ++t) {
    for (int64_t d = 0; d < 40; ++d) ASSERT_EQ(packed.o.Get({0, d, t}), 0) << t;
  }
}

TEST_P(CudaScanTest, ManySequencesAreSeveralLaunches) {
  const Tensors x(DType::kBF16, 1, 5, 16, 150);
  std::vector<int32_t> bounds;
  for (int32_t i = 0; i <= 75; ++i) bounds.push_back(2 * i);
  Options options;
  options.cu_seqlens = ConstTensorView(bounds.data(), DType::kI32, {76});
  Inputs in = x.Views();
  in.initial = {};
  const Results packed = Run(in, options);
  const Results alone = Run(x.Tokens(146, 148, {}));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.o.view()).Slice(2, 146, 148), alone.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.state.view()).Slice(0, 73, 74), alone.state.view()));
}

TEST_P(CudaScanTest, WhatIsNotFiniteStaysInItsChannelAndReachesNoTokenBefore) {
  const Tensors x(DType::kF32, 1, 40, 5, 40);
  for (const Buffer* weights : {&x.B, &x.C}) {  // a sum with an infinity of one sign is infinite, not NaN
    for (int64_t n = 0; n < 5; ++n) weights->Set({0, n, 20}, 1 + std::abs(weights->Get({0, n, 20})));
  }
  x.D.Set({34}, 1);
  x.z.Set({0, 34, 20}, 1);
  const Results before = Run(x.Views());
  x.u.Set({0, 33, 20}, std::numeric_limits<double>::quiet_NaN());
  x.u.Set({0, 34, 20}, std::numeric_limits<double>::infinity());
  const Results after = Run(x.Views());
  for (int64_t d = 0; d < 40; ++d) {
    for (int64_t t = 0; t < 40; ++t) {
      const double y = after.o.Get({0, d, t});
      if (t < 20 || d < 33 || d > 34) {
        ASSERT_EQ(y, before.o.Get({0, d, t})) << d << " " << t;
      } else if (d == 33) {
        ASSERT_TRUE(std::isnan(y)) << t;
      } else {
        ASSERT_FALSE(std::isfinite(y)) << t;
      }
    }
  }
  EXPECT_EQ(after.o.Get({0, 34, 20}), std::numeric_limits<double>::infinity());
}

TEST_P(CudaScanTest, StatesWhoseDecaysAreNearOneDoNotDrift) {
  constexpr int64_t kTokens = 4000;
  const Tensors x(DType::kF32, 1, 1, 4, kTokens);
  x.u.FillConstant(0);
  x.delta.FillConstant(-7.25);  // its softplus is 7e-4
  x.bias.FillConstant(0);
  x.initial.FillConstant(1);
  const Results results = Run(x.Views());
  const double step = std::log1p(std::exp(-7.25));
  for (int64_t n = 0; n < 4; ++n) {
    const double expected = std::exp(step * x.A.Get({0, n}) * kTokens);
    EXPECT_NEAR(results.state.Get({0, 0, n}), expected, 5e-6 * expected) << n;  // rounded factors would give 1e-4
  }
}

TEST_P(CudaScanTest, RatesOfMinusInfinityForgetEverything) {
  const Tensors x(DType::kF32, 1, 3, 4, 20);
  for (int64_t n = 0; n < 4; ++n) x.A.Set({1, n}, -std::numeric_limits<double>::infinity());
  x.delta.Set({0, 1, 10}, -1000);  // a step of 0 does not decay
  const Results results = Run(x.Views());
  const Results last = Run(x.Tokens(19, 20, {}));
  EXPECT_EQ(results.o.Get({0, 1, 19}), last.o.Get({0, 1, 0}));
  for (int64_t n = 0; n < 4; ++n) EXPECT_EQ(results.state.Get({0, 1, n}), last.state.Get({0, 1, n}));
  EXPECT_TRUE(std::isfinite(results.o.Get({0, 1, 19})));
}

TEST_P(CudaScanTest, ExplainNamesTheKernel) {
  const Tensors x(DType::kBF16, 1, 8, 16, 4);
  const TestDevice& device = *GetParam();
  const DeviceTensor u(device, x.u.view()), delta(device, x.delta.view()), A(device, x.A.view()), B(device, x.B.view()),
      C(device, x.C.view());
  Inputs in;
  in.u = u.view();
  in.delta = delta.view();
  in.A = A.view();
  in.B = B.view();
  in.C = C.view();
  const scanning::Explanation e = selective_scan::Explain(ctx_, in, {});
  EXPECT_EQ(e.kernel, "scan_cuda");
  EXPECT_EQ(e.target, "cuda");
  EXPECT_EQ(e.workspace_bytes, 0);
}

TEST_P(CudaScanTest, WhatItDoesNotTakeIsSaid) {
  const auto refusal = [&](DType dtype, int64_t N) {
    const Tensors x(dtype, 1, 4, N, 4);
    return Refusal<Unsupported>([&] { Run(x.Views()); });
  };
  EXPECT_THAT(refusal(DType::kF32, 129), HasSubstr("scan_cuda computes up to 128 states of a channel"));
  EXPECT_EQ(refusal(DType::kF32, 128), "nothing is thrown");
  EXPECT_THAT(refusal(DType::kF64, 8), HasSubstr("scan_cuda computes f32, bf16 and f16, not f64"));

  const TestDevice& device = *GetParam();
  const Buffer rows(DType::kF32, {1, 4, 8}), channels(DType::kF32, {8}), taps(DType::kF32, {8, 2}),
      written(DType::kF32, {1, 4, 8});
  const DeviceTensor x(device, rows.view()), a(device, channels.view()), o(device, written.view());
  rg_lru::Inputs in;
  in.x = in.input_gate = in.recurrence_gate = x.view();
  in.a = a.view();
  EXPECT_THAT(Refusal<Unsupported>([&] { rg_lru::Forward(ctx_, in, {}, {o.view(), {}}); }),
              HasSubstr("no kernel for this problem: scan_cuda computes selective scans"));
  const Buffer other(DType::kF32, {1, 8, 4});
  const DeviceTensor x_of_conv(device, other.view()), weight(device, taps.view()), o_of_conv(device, other.view());
  causal_conv1d::Inputs of_conv;
  of_conv.x = x_of_conv.view();
  of_conv.weight = weight.view();
  causal_conv1d::Outputs to;
  to.o = o_of_conv.view();
  EXPECT_THAT(Refusal<Unsupported>([&] { causal_conv1d::Forward(ctx_, of_conv, {}, to); }),
              HasSubstr("computes on the CPU alone, not on cuda:0"));
  o.Download(written.view());
  for (const uint8_t byte : written.bytes()) EXPECT_EQ(byte, 0xFF);
}

TEST_P(CudaScanTest, TensorsOfSeveralDevicesAreRefused) {
  const TestDevice& device = *GetParam();
  const Tensors x(DType::kBF16, 1, 8, 16, 4);
  const Buffer o(DType::kBF16, {1, 8, 4});
  const DeviceTensor u(device, x.u.view()), delta(device, x.delta.view()), A(device, x.A.view()), B(device, x.B.view()),
      C(device, x.C.view()), initial(device, x.initial.view()), device_o(device, o.view());
  Inputs good;
  good.u = u.view();
  good.delta = delta.view();
  good.A = A.view();
  good.B = B.view();
  good.C = C.view();
  good.initial.S = initial.view();
  const auto refusal = [&](const Inputs& in, const TensorView& to) {
    const std::string what = Refusal<InvalidArgument>([&] { selective_scan::Forward(ctx_, in, {}, {to, {}}); });
    device_o.Download(o.view());
    for (const uint8_t byte : o.bytes()) EXPECT_EQ(byte, 0xFF);
    return what;
  };
  const auto with = [&](ConstTensorView Inputs::* member, const Buffer& host) {
    Inputs in = good;
    in.*member = host.view();
    return in;
  };
  EXPECT_THAT(refusal(good, o.view()), HasSubstr("o is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&Inputs::u, x.u), device_o.view()), HasSubstr("delta is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal(with(&Inputs::A, x.A), device_o.view()), HasSubstr("A is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&Inputs::C, x.C), device_o.view()), HasSubstr("C is on the CPU, expected cuda:0"));
  Inputs of_host_state = good;
  of_host_state.initial.S = x.initial.view();
  EXPECT_THAT(refusal(of_host_state, device_o.view()), HasSubstr("initial_state is on the CPU, expected cuda:0"));
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaScanTest, testing::ValuesIn(Devices()), NameOf);

}  // namespace
}  // namespace heed
