// Attention backward on devices: gradients agree with the reference, have the same bits whatever the order of threads, and are
// refused where there are none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "tests/cuda/attention_on_devices.h"

namespace heed {
namespace {

using testing::HasSubstr;

class CudaBackwardTest : public CudaTest {
 protected:
  std::vector<Buffer> Gradients(const Problem& p);
};

// Gradients of a problem, forward and backward on the device, in the order of its list of them.
std::vector<Buffer> CudaBackwardTest::Gradients(const Problem& p) {
  const TestDevice& device = *GetParam();
  std::vector<int64_t> o_sizes = p.o.sizes;
  const Buffer host_o(p.in.q.dtype(), o_sizes), host_lse(DType::kF32, p.LseSizes());
  const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), d_o(device, p.d_o), d_lse(device, p.d_lse);
  const DeviceTensor o(device, host_o.view()), lse(device, host_lse.view());
  const DeviceTensor bias(device, p.options.bias), mask(device, p.options.mask);
  Options options = p.options;
  options.bias = bias.view();
  options.mask = mask.view();
  attention::Forward(ctx_, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()});
  std::vector<Buffer> results;
  std::vector<DeviceTensor> on_device;
  std::vector<TensorView> views;
  for (const OutputSpec& spec : p.gradients) {
    results.emplace_back(spec.dtype, spec.sizes);
    on_device.emplace_back(device, results.back().view());
    views.push_back(on_device.back().view());
  }
  attention::Backward(ctx_, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), d_lse.view()}, options,
                      attention::ToGradients(p.gradients, views));
  for (size_t i = 0; i < results.size(); ++i) on_device[i].Download(results[i].view());
  return results;
}

// Asks for the gradients that the kernels have.
void AskForGradients(Problem& p, uint64_t seed) {
  attention::DescribeGradients(p, seed);
  std::erase_if(p.gradients, [](const OutputSpec& spec) { return spec.name.size() != 2; });  // but dq, dk, dv
}

Comparison CompareGradients(const Problem& p, const std::vector<Buffer>& results) {
  std::vector<ConstTensorView> views;
  for (const Buffer& buffer : results) views.push_back(buffer.view());
  return CompareResults(attention::MakeBackwardCase(p, /*with_forward=*/false), views);
}

TEST_P(CudaBackwardTest, GradientsOfRandomProblemsAgreeWithTheReference) {
  Comparison closest;
  const uint64_t first = FromEnvironment("HEED_TEST_FIRST_SEED", 1), count = FromEnvironment("HEED_TEST_SEEDS", 60);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Problem p = RandomProblem(DType::kBF16, seed);
    if (std::max(p.in.q.size(p.in.q.rank() - 1), p.in.v.size(p.in.v.rank() - 1)) > 128) continue;
    AskForGradients(p, seed);
    cuda::SetEmulatedSeed(seed);
    const Comparison result = CompareGradients(p, Gradients(p));
    ASSERT_TRUE(result.ok) << "seed " << seed << ": " << result.message;
    if (result.worst_ratio > closest.worst_ratio) closest = result;
  }
  std::printf("%s bf16 gradients: closest to its bound: %.3g of %.3g (%.0f %%)\n", GetParam()->name(), closest.error,
              closest.tolerance, 100 * closest.worst_ratio);
}

TEST_P(CudaBackwardTest, GradientsAgreeWithTheReferenceAtAwkwardSizes) {
  constexpr Sizes kGradientSizes[] = {{1, 1, 1, 1, 1, 1, 1},       {2, 70, 90, 2, 1, 64, 64}, {1, 66, 65, 2, 1, 128, 128},
                                      {1, 64, 128, 1, 1, 80, 40},  {1, 3, 140, 4, 2, 33, 7},  {1, 20, 0, 1, 1, 16, 16},
                                      {1, 0, 20, 1, 1, 16, 16},    {0, 5, 5, 1, 1, 16, 16},    {35, 2, 9, 2, 2, 16, 16}};
  std::vector<Options> all = MasksAndCap();
  all.emplace_back().dropout = 0.3;
  for (const Sizes& sizes : kGradientSizes) {
    int i = 0;
    for (const Options& options : all) {
      Problem p = Plain(DType::kBF16, sizes, 7);
      p.options = options;
      AskForGradients(p, 5);
      if (++i % 2 == 0) p.d_lse = p.memory.emplace_back(DType::kF32, p.LseSizes()).FillNormal(3).view();
      const Comparison result = CompareGradients(p, Gradients(p));
      ASSERT_TRUE(result.ok) << sizes << " options " << i << ": " << result.message;
    }
  }
}

// Keys from 70 on, and rows of them, are not finite: others have the gradients that they have without these.
TEST_P(CudaBackwardTest, GradientsOfPairsThatAreSeenAlone) {
  const auto gradients = [&](int64_t finite, double value) {
    Problem p = Plain(DType::kBF16, {1, 100, 100, 1, 1, 64, 64}, 9);
    p.options.window = {0, 0};  // each token sees itself
    AskForGradients(p, 3);
    for (const ConstTensorView& view : {p.in.q, p.in.k, p.in.v, p.d_o}) {
      for (int64_t token = finite; token < 100; ++token) {
        for (int64_t e = 0; e < 64; e += 5) {
          const TensorView writable(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides());
          SetElement(writable, std::vector<int64_t>{0, token, 0, e}, value);
        }
      }
    }
    return Gradients(p);
  };
  const std::vector<Buffer> expected = gradients(100, 0);
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const std::vector<Buffer> results = gradients(70, value);
    for (size_t g = 0; g < results.size(); ++g) {
      for (int64_t token = 0; token < 70; ++token) {
        for (int64_t e = 0; e < 64; ++e) {
          ASSERT_EQ(results[g].Get({0, token, 0, e}), expected[g].Get({0, token, 0, e})) << g << " " << token << " " << e;
        }
      }
      EXPECT_FALSE(std::isfinite(results[g].Get({0, 70, 0, 0}))) << g;
    }
  }
}

TEST_P(CudaBackwardTest, GradientsThatItDoesNotHaveAreSaid) {
  const TestDevice& device = *GetParam();
  const auto refusal = [&](DType dtype, int64_t channels, bool of_bias) {
    Problem p = Plain(dtype, {1, 4, 4, 1, 1, channels, 16}, 1);
    AskForGradients(p, 1);
    const Buffer bias(DType::kF32, {4, 4}), lse(DType::kF32, {1, 1, 4});
    bias.FillConstant(0);
    const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), d_o(device, p.d_o), o(device, p.d_o),
        device_lse(device, lse.view()), device_bias(device, bias.view()), dbias(device, bias.view());
    const DeviceTensor dq(device, p.in.q);
    Options options;
    if (of_bias) options.bias = device_bias.view();
    attention::Gradients out;
    out.dq = dq.view();
    if (of_bias) out.dbias = dbias.view();
    std::string what;
    try {
      attention::Backward(ctx_, {q.view(), k.view(), v.view(), o.view(), device_lse.view(), d_o.view(), {}}, options, out);
    } catch (const Unsupported& error) {
      what = error.what();
    }
    return what;
  };
  EXPECT_EQ(refusal(DType::kBF16, 16, false), "");
  EXPECT_THAT(refusal(DType::kF16, 16, false), HasSubstr("has gradients of bf16, not f16"));
  EXPECT_THAT(refusal(DType::kBF16, 129, false), HasSubstr("has gradients of up to 128 channels, not 129"));
  EXPECT_THAT(refusal(DType::kBF16, 16, true), HasSubstr("has gradients of q, k and v alone"));
}

TEST_P(CudaBackwardTest, BitsDoNotDependOnTheOrderOfThreads) {
  Problem p = Plain(DType::kBF16, {1, 130, 150, 2, 1, 128, 128}, 3);
  p.options.causal = true;
  AskForGradients(p, 4);
  const std::vector<Buffer> first = Gradients(p);
  for (uint64_t seed = 2; seed < 5; ++seed) {
    cuda::SetEmulatedSeed(seed);
    const std::vector<Buffer> again = Gradients(p);
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(SameBits(first[i].view(), again[i].view())) << p.gradients[i].name;
    }
  }
}

TEST_P(CudaBackwardTest, PackedSequencesHaveTheirGradientsAndSurplusRowsZeros) {
  Problem packed = Plain(DType::kBF16, {1, 100, 130, 2, 1, 64, 64}, 11);
  const int32_t q[] = {0, 30, 30, 90}, k[] = {0, 50, 60, 120};
  packed.options.causal = true;
  packed.options.cu_seqlens_q = ConstTensorView(q, DType::kI32, {4});
  packed.options.cu_seqlens_k = ConstTensorView(k, DType::kI32, {4});
  packed.lse.sizes = {2, 100};
  AskForGradients(packed, 2);
  const std::vector<Buffer> gradients = Gradients(packed);
  EXPECT_TRUE(CompareGradients(packed, gradients).ok);
  EXPECT_EQ(gradients[0].Get({0, 95, 1, 3}), 0);
  EXPECT_EQ(gradients[1].Get({0, 125, 0, 3}), 0);
}

TEST_P(CudaBackwardTest, RowsBeyondTheLengthsReachNothing) {
  Problem p = Plain(DType::kBF16, {2, 70, 130, 2, 1, 64, 64}, 9);
  const int64_t lengths[] = {17, 66};
  p.options.query_lengths = ConstTensorView(lengths, DType::kI64, {2});
  AskForGradients(p, 2);
  EXPECT_TRUE(CompareGradients(p, Gradients(p)).ok);
}

TEST_P(CudaBackwardTest, WhatArrivesMayBeginAnywhere) {
  Problem p = Plain(DType::kBF16, {1, 20, 70, 2, 1, 64, 64}, 9);
  AskForGradients(p, 2);
  const Buffer moved(DType::kBF16, p.d_o.sizes(), p.d_o.strides(), Placement::kAligned, /*gap=*/1);
  moved.FillNormal(77);
  p.memory.push_back(moved);
  p.d_o = moved.view();
  EXPECT_TRUE(CompareGradients(p, Gradients(p)).ok);
}

// A row sees one key, which is infinite, at a logit where the cap has no slope: dq is 0 times infinity.
TEST_P(CudaBackwardTest, NoSlopeIsNoMask) {
  Problem p = RandomProblem(DType::kBF16, 1122);
  AskForGradients(p, 1122);
  const std::vector<Buffer> results = Gradients(p);
  EXPECT_TRUE(std::isnan(results[0].Get({0, 4, 0, 1})));
  EXPECT_TRUE(CompareGradients(p, results).ok);
}

TEST_P(CudaBackwardTest, TensorsOfSeveralDevicesAreRefused) {
  const TestDevice& device = *GetParam();
  const Problem p = Plain(DType::kBF16, {1, 4, 4, 1, 1, 16, 16}, 1);
  const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), o(device, p.in.q);
  const Buffer lse(DType::kF32, {1, 1, 4});
  const DeviceTensor device_lse(device, lse.view());
  const auto backward = [&](const ConstTensorView& of_lse, const TensorView& dq) {
    std::string what;
    attention::Gradients out;
    out.dq = dq;
    try {
      attention::Backward(ctx_, {q.view(), k.view(), v.view(), o.view(), of_lse, o.view(), {}}, {}, out);
    } catch (const InvalidArgument& error) {
      what = error.what();
    }
    return what;
  };
  EXPECT_THAT(backward(lse.view(), {}), HasSubstr("lse is on the CPU, expected cuda:0 as q"));
  const Buffer dq(DType::kBF16, {1, 4, 1, 16});
  EXPECT_THAT(backward(device_lse.view(), dq.view()), HasSubstr("dq is on the CPU, expected cuda:0 as q"));
}

TEST(CudaLibraryTest, MemoryThatThereIsNotIsSaid) {
  cuda::Library library = *cuda::EmulatedDevice().library();
  library.allocate = [](int32_t, void*, size_t, void**) -> const char* { return "out of memory"; };
  cuda::Replace(&library);
  const Buffer rows(DType::kBF16, {1, 4, 1, 16}), lse(DType::kF32, {1, 1, 4});
  const DeviceTensor x(cuda::EmulatedDevice(), rows.view()), of_lse(cuda::EmulatedDevice(), lse.view()),
      dq(cuda::EmulatedDevice(), rows.view());
  attention::Gradients out;
  out.dq = dq.view();
  Context ctx(1);
  try {
    attention::Backward(ctx, {x.view(), x.view(), x.view(), x.view(), of_lse.view(), x.view(), {}}, {}, out);
    ADD_FAILURE() << "nothing is thrown";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot have 32 bytes of the device: out of memory"));
  }
  cuda::Replace(nullptr);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaBackwardTest, testing::ValuesIn(Devices()), NameOf);

}  // namespace
}  // namespace heed
