// Attention backward on devices: gradients agree with the reference, have the same bits for any order of threads, and
// throw where they are not implemented.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "tests/cuda/attention_on_devices.h"
#include "tests/cuda/problems_on_devices.h"

namespace heed {
namespace {

using testing::HasSubstr;

class CudaBackwardTest : public CudaTest {};

class CudaBackwardTestOfF32 : public CudaBackwardTest {
 protected:
  void AgreesOnRandomProblems(DType dtype) {
    AgreesOnSeeds(std::string(Name(dtype)) + " gradients", dtype == DType::kF32 ? SeedsOf(15, 3) : SeedsOf(60, 5),
                  [&](uint64_t seed) {
                    Problem p = RandomProblem(dtype, seed);
                    const int64_t channels = std::max(p.in.q.sizes().back(), p.in.v.sizes().back());
                    if (dtype == DType::kF32 && channels > 128) return Comparison();
                    attention::DescribeGradients(p, seed);
                    return CompareGradients(p, Gradients(p));
                  });
  }
};

class CudaBackwardTestOf16Bits : public CudaBackwardTestOfF32 {};

TEST_P(CudaBackwardTestOf16Bits, GradientsOfRandomProblemsOfBF16AgreeWithTheReference) {
  AgreesOnRandomProblems(DType::kBF16);
}
TEST_P(CudaBackwardTestOf16Bits, GradientsOfRandomProblemsOfF16AgreeWithTheReference) {
  AgreesOnRandomProblems(DType::kF16);
}
TEST_P(CudaBackwardTestOfF32, GradientsOfRandomProblemsOfF32AgreeWithTheReference) {
  AgreesOnRandomProblems(DType::kF32);
}

TEST_P(CudaBackwardTest, GradientsAgreeWithTheReferenceAtAwkwardSizes) {
  constexpr Sizes kGradientSizes[] = {
      {1, 1, 1, 1, 1, 1, 1},    {2, 70, 90, 2, 1, 64, 64}, {1, 66, 65, 2, 1, 128, 128}, {1, 64, 128, 1, 1, 80, 40},
      {1, 3, 140, 4, 2, 33, 7}, {1, 20, 0, 1, 1, 16, 16},  {1, 70, 66, 1, 1, 192, 128}, {1, 0, 20, 1, 1, 16, 16},
      {0, 5, 5, 1, 1, 16, 16},  {35, 2, 9, 2, 2, 16, 16}};
  std::vector<Options> all = MasksAndCap();
  all.emplace_back().dropout = 0.3;
  for (const Sizes& sizes : kGradientSizes) {
    if (IsRepeated(DType::kBF16, sizes.D)) continue;
    int i = 0;
    for (const Options& options : sizes.D > 128 ? std::span(all).last(2) : std::span(all)) {
      if (LeavesOut(9)) continue;
      Problem p = Plain(DType::kBF16, sizes, 7);
      p.options = options;
      attention::DescribeGradients(p, 5);
      if (++i % 2 == 0) p.d_lse = p.memory.emplace_back(DType::kF32, p.LseSizes()).FillNormal(3).view();
      const Comparison result = CompareGradients(p, Gradients(p));
      ASSERT_TRUE(result.ok) << sizes << " options " << i << ": " << result.message;
    }
    if (sizes.D > 128 || IsRepeated(DType::kF32, sizes.D) || LeavesOut(3)) continue;
    Problem p = Plain(DType::kF32, sizes, 7);
    p.options = all[static_cast<size_t>(sizes.D + sizes.Tk) % all.size()];
    attention::DescribeGradients(p, 5);
    const Comparison result = CompareGradients(p, Gradients(p));
    ASSERT_TRUE(result.ok) << "f32 " << sizes << ": " << result.message;
  }
}

// Keys from 70 on, and their rows, are not finite. Other gradients are the same as without them.
TEST_P(CudaBackwardTest, GradientsOfPairsThatAreSeenAlone) {
  const auto gradients = [&](DType dtype, int64_t finite, double value) {
    Problem p = Plain(dtype, {1, 100, 100, 1, 1, 64, 64}, 9);
    p.options.window = {0, 0};  // each token sees itself
    attention::DescribeGradients(p, 3);
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
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::vector<Buffer> expected = gradients(dtype, 100, 0);
    for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      const std::vector<Buffer> results = gradients(dtype, 70, value);
      for (size_t g = 0; g < results.size(); ++g) {
        for (int64_t token = 0; token < 70; ++token) {
          for (int64_t e = 0; e < 64; ++e) {
            ASSERT_EQ(results[g].Get({0, token, 0, e}), expected[g].Get({0, token, 0, e}))
                << Name(dtype) << " " << g << " " << token << " " << e;
          }
        }
        EXPECT_FALSE(std::isfinite(results[g].Get({0, 70, 0, 0}))) << Name(dtype) << " " << g;
      }
    }
  }
}

// d_o is infinite in one element and all pairs are seen: exactly the gradients that depend on it are infinite.
TEST_P(CudaBackwardTest, InfiniteGradientsOfF32AreWhatTheReferenceSays) {
  for (const bool of_lse : {false, true}) {
    Problem p = Plain(DType::kF32, {1, 64, 128, 1, 1, 64, 40}, 9);
    attention::DescribeGradients(p, 3);
    const auto set = [](const ConstTensorView& view, const std::vector<int64_t>& index, double value) {
      SetElement(TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides()), index, value);
    };
    if (of_lse) {
      p.d_lse = p.memory.emplace_back(DType::kF32, p.LseSizes()).FillNormal(3).view();
      set(p.d_lse, {0, 0, 20}, std::numeric_limits<double>::infinity());
    } else {
      set(p.d_o, {0, 20, 0, 7}, 3.4e38);  // rounds to infinity as bf16
      for (int64_t key = 0; key < 128; ++key) set(p.in.v, {0, key, 0, 7}, 1e-38 * static_cast<double>(key % 5));
    }
    const Comparison result = CompareGradients(p, Gradients(p));
    EXPECT_TRUE(result.ok) << of_lse << ": " << result.message;
  }
}

TEST_P(CudaBackwardTest, GradientsOfManyChannelsOfF32AreRefused) {
  const TestDevice& device = *GetParam();
  Problem p = Plain(DType::kF32, {1, 4, 4, 1, 1, 129, 16}, 1);
  attention::DescribeGradients(p, 1);
  const Buffer lse(DType::kF32, {1, 1, 4}), host_dv(DType::kF32, {1, 4, 1, 16});
  const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), d_o(device, p.d_o),
      device_lse(device, lse.view()), dv(device, host_dv.view());
  attention::Gradients out;
  out.dv = dv.view();
  const std::string what = Refusal<Unsupported>([&] {
    attention::Backward(ctx_, {q.view(), k.view(), v.view(), d_o.view(), device_lse.view(), d_o.view(), {}}, {}, out);
  });
  EXPECT_THAT(what, HasSubstr("softmax_cuda has gradients of f32 of up to 128 channels, not 129"));
  dv.Download(host_dv.view());
  for (const uint8_t byte : host_dv.bytes()) EXPECT_EQ(byte, 0xFF);
}

TEST_P(CudaBackwardTest, GradientsOfNumbersOnTheCpuAreRefused) {
  const TestDevice& device = *GetParam();
  Problem p = Plain(DType::kBF16, {1, 4, 4, 1, 1, 16, 16}, 1);
  attention::DescribeGradients(p, 1);
  const Buffer lse(DType::kF32, {1, 1, 4}), numbers(DType::kF32, {1}), gradient(DType::kF32, {1}),
      host_dq(DType::kBF16, {1, 4, 1, 16});
  numbers.FillConstant(0.5);
  const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), d_o(device, p.d_o), o(device, p.d_o),
      device_lse(device, lse.view()), dq(device, host_dq.view());
  for (const auto& [option, asked] :
       {std::pair{&Options::sinks, &attention::Gradients::dsinks}, {&Options::alibi, &attention::Gradients::dalibi}}) {
    Options options;
    options.*option = numbers.view();
    attention::Gradients out;
    out.dq = dq.view();
    out.*asked = gradient.view();
    const std::string what = Refusal<Unsupported>([&] {
      attention::Backward(ctx_, {q.view(), k.view(), v.view(), o.view(), device_lse.view(), d_o.view(), {}}, options,
                          out);
    });
    EXPECT_THAT(what, HasSubstr("softmax_cuda has gradients of sinks and slopes that are on the device"));
    dq.Download(host_dq.view());
    for (const uint8_t byte : host_dq.bytes()) EXPECT_EQ(byte, 0xFF);
  }
}

// The lse is so far below the sink that their difference times log2(e) overflows.
TEST_P(CudaBackwardTest, ARowOfTheMostNegativeBiasHasFiniteGradients) {
  Problem p = Plain(DType::kBF16, {1, 40, 70, 2, 2, 32, 32}, 7);
  const Buffer& bias = p.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{40, 1}).FillNormal(3);
  SetElement(bias.view(), std::vector<int64_t>{3, 0}, std::numeric_limits<float>::lowest());
  p.options.bias = bias.view();
  p.options.sinks = p.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{2}).FillNormal(5).view();
  attention::DescribeGradients(p, 5);
  const Comparison result = CompareGradients(p, Gradients(p));
  EXPECT_TRUE(result.ok) << result.message;
}

// Gradients of a bias have kernels of their own, the same on every device.
class CudaBiasGradientTest : public CudaBackwardTest {};

// Every broadcast of a bias, with more tiles than one, more sequences than a launch takes, and packed.
TEST_P(CudaBiasGradientTest, AGradientOfABiasIsTheSumOverItsBroadcastAxes) {
  constexpr Sizes kSize = {2, 66, 70, 2, 1, 16, 16};
  for (int repeats = 0; repeats < 16; ++repeats) {
    if (LeavesOut(7)) continue;
    constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
    Problem p = Plain(kDTypes[repeats % 3], kSize, 7);
    std::vector<int64_t> sizes = {kSize.B, kSize.Hq, kSize.Tq, kSize.Tk};
    for (size_t axis = 0; axis < 4; ++axis) sizes[axis] = repeats >> axis & 1 ? 1 : sizes[axis];
    p.options.bias = p.memory.emplace_back(DType::kF32, sizes).FillNormal(3).view();
    p.options.causal = repeats % 4 == 0;
    attention::DescribeGradients(p, 5);
    const Comparison result = CompareGradients(p, Gradients(p));
    ASSERT_TRUE(result.ok) << repeats << ": " << result.message;
  }
  Problem many = Plain(DType::kBF16, {35, 2, 9, 2, 2, 16, 16}, 7);
  many.options.bias =
      many.memory.emplace_back(DType::kF64, std::initializer_list<int64_t>{2, 2, 9}).FillNormal(3).view();
  attention::DescribeGradients(many, 5);
  const Comparison result = CompareGradients(many, Gradients(many));
  ASSERT_TRUE(result.ok) << result.message;
}

// There are more rows than a block of head sums has threads.
TEST_P(CudaBackwardTest, GradientsOfNumbersAreSumsOfAllRows) {
  Problem p = Plain(DType::kBF16, {4, 90, 20, 2, 1, 16, 16}, 7);
  p.options.sinks = p.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{2}).FillNormal(3).view();
  p.options.alibi = p.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{2}).FillNormal(4).view();
  attention::DescribeGradients(p, 5);
  const Comparison result = CompareGradients(p, Gradients(p));
  EXPECT_TRUE(result.ok) << result.message;
}

// Problems whose gradients exceed f16's range, or differ by more than it.
TEST_P(CudaBackwardTest, GradientsOfF16HaveTheRangeOfTheirSums) {
  for (const double size : {1e-6, 3e4}) {
    Problem p = Plain(DType::kF16, {1, 70, 130, 1, 1, 64, 64}, 7);
    attention::DescribeGradients(p, 5);
    const TensorView d_o(const_cast<void*>(p.d_o.data()), p.d_o.dtype(), p.d_o.sizes(), p.d_o.strides());
    std::vector<int64_t> index(4, 0);
    do {
      // Rows of different magnitude, so that sums of keys mix both.
      SetElement(d_o, index, GetElement(d_o, index) * size * (index[1] % 7 == 0 ? 1 : 1e-2));
    } while (NextIndex(d_o.sizes(), index));
    const TensorView v(const_cast<void*>(p.in.v.data()), p.in.v.dtype(), p.in.v.sizes(), p.in.v.strides());
    std::ranges::fill(index, 0);
    do {
      SetElement(v, index, GetElement(v, index) * (size > 1 ? 1e3 : 1));
    } while (NextIndex(v.sizes(), index));
    const TensorView q(const_cast<void*>(p.in.q.data()), p.in.q.dtype(), p.in.q.sizes(), p.in.q.strides());
    const TensorView k(const_cast<void*>(p.in.k.data()), p.in.k.dtype(), p.in.k.sizes(), p.in.k.strides());
    for (const TensorView& t : {q, k}) {  // so that the gradients themselves fit f16
      std::ranges::fill(index, 0);
      do {
        SetElement(t, index, GetElement(t, index) * (size > 1 ? 1e-4 : 1));
      } while (NextIndex(t.sizes(), index));
    }
    const Comparison result = CompareGradients(p, Gradients(p));
    EXPECT_TRUE(result.ok) << size << ": " << result.message;
  }
}

// Key heads without a query have gradients of zero.
TEST_P(CudaBackwardTest, KeysWithoutQueriesHaveZeros) {
  Problem p = Plain(DType::kBF16, {1, 5, 70, 0, 2, 16, 16}, 7);
  attention::DescribeGradients(p, 5);
  const Comparison result = CompareGradients(p, Gradients(p));
  EXPECT_TRUE(result.ok) << result.message;
}

TEST_P(CudaBackwardTest, BitsDoNotDependOnTheOrderOfThreads) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    if (IsRepeated(dtype, 128)) continue;
    const int64_t heads = dtype == DType::kF32 ? 1 : 2;
    Problem p = Plain(dtype, {1, 70, 80, heads, 1, 128, 128}, 3);
    p.options.causal = true;
    attention::DescribeGradients(p, 4);
    cuda::SetEmulatedSeed(1);
    const std::vector<Buffer> first = Gradients(p);
    for (uint64_t seed = 2; seed < (TakesAll() ? 5 : 3); ++seed) {
      cuda::SetEmulatedSeed(seed);
      const std::vector<Buffer> again = Gradients(p);
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(SameBits(first[i].view(), again[i].view())) << Name(dtype) << " " << p.gradients[i].name;
      }
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
  attention::DescribeGradients(packed, 2);
  const std::vector<Buffer> gradients = Gradients(packed);
  EXPECT_TRUE(CompareGradients(packed, gradients).ok);
  EXPECT_EQ(gradients[0].Get({0, 95, 1, 3}), 0);
  EXPECT_EQ(gradients[1].Get({0, 125, 0, 3}), 0);
}

TEST_P(CudaBackwardTest, RowsBeyondTheLengthsReachNothing) {
  Problem p = Plain(DType::kBF16, {2, 70, 130, 2, 1, 64, 64}, 9);
  const int64_t lengths[] = {17, 66};
  p.options.query_lengths = ConstTensorView(lengths, DType::kI64, {2});
  attention::DescribeGradients(p, 2);
  EXPECT_TRUE(CompareGradients(p, Gradients(p)).ok);
}

TEST_P(CudaBackwardTest, WhatArrivesMayBeginAnywhere) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Problem p = Plain(dtype, {1, 20, 70, 2, 1, 64, 64}, 9);
    attention::DescribeGradients(p, 2);
    const Buffer moved(dtype, p.d_o.sizes(), p.d_o.strides(), Placement::kAligned, /*gap=*/1);
    moved.FillNormal(77);
    p.memory.push_back(moved);
    p.d_o = moved.view();
    EXPECT_TRUE(CompareGradients(p, Gradients(p)).ok) << Name(dtype);
  }
}

// A row sees one infinite key, at a logit where the soft cap has no slope: dq is 0 times infinity.
TEST_P(CudaBackwardTest, NoSlopeIsNoMask) {
  Problem p = RandomProblem(DType::kBF16, 1122);
  attention::DescribeGradients(p, 1122);
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

TEST(CudaLibraryTest, MissingMemoryIsReported) {
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
    EXPECT_THAT(error.what(), HasSubstr("cannot have 64 bytes of the device: out of memory"));
  }
  cuda::Replace(nullptr);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaBackwardTest, testing::ValuesIn(DevicesOfAttention()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaBiasGradientTest, testing::ValuesIn(Devices()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaBackwardTestOf16Bits, testing::ValuesIn(DevicesOfAttention()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaBackwardTestOfF32, testing::ValuesIn(Devices()), NameOf);

}  // namespace
}  // namespace heed
