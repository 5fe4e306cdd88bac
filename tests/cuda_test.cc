// Attention forward on devices: GPU kernels agree with the reference, keep a row's bits, and throw where something is
// not implemented.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/cuda/calls.h"
#include "heed/cuda/library.h"
#include "tests/cuda/attention_on_devices.h"

namespace heed {
namespace {

using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class CudaTestOfF32 : public CudaTest {
 protected:
  void AgreesOnRandomProblems(DType dtype) {
    AgreesOnSeeds(Name(dtype), dtype == DType::kF32 ? SeedsOf(40, 10) : SeedsOf(80, 16), [&](uint64_t seed) {
      const Problem p = RandomProblem(dtype, seed);
      return CompareWithReference(p, Run(p));
    });
  }
};

class CudaTestOf16Bits : public CudaTestOfF32 {};

TEST_P(CudaTestOf16Bits, RandomProblemsOfBF16AgreeWithTheReference) { AgreesOnRandomProblems(DType::kBF16); }
TEST_P(CudaTestOf16Bits, RandomProblemsOfF16AgreeWithTheReference) { AgreesOnRandomProblems(DType::kF16); }
TEST_P(CudaTestOfF32, RandomProblemsOfF32AgreeWithTheReference) { AgreesOnRandomProblems(DType::kF32); }

constexpr Sizes kSizes[] =
    {
        // B, Tq, Tk, Hq, Hkv, D, Dv
        {1, 1, 1, 1, 1, 1, 1},       {2, 70, 130, 4, 2, 64, 64},  {1, 129, 129, 1, 1, 128, 128},
        {1, 65, 63, 2, 1, 80, 40},   {1, 40, 70, 1, 1, 192, 128}, {1, 70, 100, 1, 1, 256, 256},
        {1, 1, 300, 8, 1, 64, 64},  // one token, all heads in a block
        {1, 3, 140, 8, 2, 128, 128}, {1, 130, 200, 3, 1, 33, 7},  {1, 20, 0, 1, 1, 16, 16},
        {0, 5, 5, 1, 1, 16, 16},     {35, 2, 9, 2, 2, 16, 16},  // more sequences than a launch has
        {1, 40, 70, 1, 1, 130, 129},  // one value channel more than the kernel of 192 and 128 channels has
};

TEST_P(CudaTest, AgreesWithTheReferenceAtAwkwardSizes) {
  std::vector<Options> all = MasksAndCap();
  all.emplace_back().scale = -0.3;
  for (const Sizes& sizes : kSizes) {
    if (IsRepeated(DType::kBF16, sizes.D)) continue;
    int i = 0;
    for (const Options& options : all) {
      if (LeavesOut(4)) continue;
      Problem p = Plain(++i % 2 == 0 ? DType::kF16 : DType::kBF16, sizes, 7);
      p.options = options;
      const Comparison result = CompareWithReference(p, Run(p));
      ASSERT_TRUE(result.ok) << Name(p.in.q.dtype()) << " " << sizes << " options " << i << ": " << result.message;
    }
    if (IsRepeated(DType::kF32, sizes.D)) continue;
    Problem p = Plain(DType::kF32, sizes, 7);  // f32 is slow here
    p.options = all[static_cast<size_t>(sizes.D + sizes.Tk) % all.size()];
    const Comparison result = CompareWithReference(p, Run(p));
    ASSERT_TRUE(result.ok) << "f32 " << sizes << ": " << result.message;
  }
}

TEST_P(CudaTest, BitsDoNotDependOnTheOrderOfThreads) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Problem p = Plain(dtype, {1, 130, dtype == DType::kF32 ? 90 : 150, 2, 1, 128, 128}, 3);
    p.options.causal = true;
    ExpectSameBitsInAnyOrder(p);
  }
}

TEST_P(CudaTest, ARowsBitsAreItsOwn) {
  Problem all = Plain(DType::kBF16, {3, 150, 200, 4, 2, 64, 64}, 5);
  all.options.causal = true;
  all.options.window = {90, 0};
  const Results expected = Run(all);
  for (const auto& [b, begin, end, head] :
       {std::tuple{0, 0, 1, 0}, {1, 7, 70, 2}, {2, 100, 150, 0}, {1, 149, 150, 2}}) {
    // Computes rows of one sequence, and the query heads of one key head.
    const int64_t starts[] = {50 + begin};
    Problem some = all;
    const auto part = [&](const ConstTensorView& t, int64_t from, int64_t to, int64_t first_head, int64_t heads) {
      return t.Slice(0, b, b + 1).Slice(1, from, to).Slice(2, first_head, first_head + heads);
    };
    some.in = {part(all.in.q, begin, end, head, 2), part(all.in.k, 0, 200, head / 2, 1),
               part(all.in.v, 0, 200, head / 2, 1)};
    some.options.query_starts = ConstTensorView(starts, DType::kI64, {1});
    DescribeOutputs(some);
    const Results results = Run(some);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t h = 0; h < 2; ++h) {
        EXPECT_EQ(results.lse.Get({0, h, i - begin}), expected.lse.Get({b, head + h, i})) << b << " " << i << " " << h;
        for (int64_t e = 0; e < 64; ++e) {
          ASSERT_EQ(results.o.Get({0, i - begin, h, e}), expected.o.Get({b, i, head + h, e}))
              << b << " " << i << " " << h;
        }
      }
    }
  }
}

TEST_P(CudaTest, KeysThatARowDoesNotSeeDoNotMatterToIt) {
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    Problem p = Plain(dtype, {1, 100, 100, 1, 1, 64, 64}, 9);
    p.options.causal = true;
    const Results expected = Run(p);
    for (uint64_t seed = 1; seed < 7; ++seed) {  // each thread takes some of them out of the product
      const double value = seed % 2 == 0 ? kInfinity : std::numeric_limits<double>::quiet_NaN();
      cuda::SetEmulatedSeed(seed);
      Problem other = Plain(dtype, {1, 100, 100, 1, 1, 64, 64}, 9);
      other.options.causal = true;
      for (const int64_t key : {70, 71, 99}) {
        for (int64_t e = 0; e < 64; e += 3) {
          SetElement(other.memory[1].view(), std::vector<int64_t>{0, key, 0, e}, value);
          SetElement(other.memory[2].view(), std::vector<int64_t>{0, key, 0, e}, value);
        }
      }
      const Results results = Run(other);
      for (int64_t i = 0; i < 100; ++i) {
        for (int64_t e = 0; e < 64; ++e) {
          const double got = results.o.Get({0, i, 0, e});
          if (i < 70) {
            ASSERT_EQ(got, expected.o.Get({0, i, 0, e})) << Name(dtype) << " " << i;
          } else {
            EXPECT_FALSE(std::isfinite(got) && e % 3 == 0) << Name(dtype) << " " << i << " " << e;
          }
        }
      }
    }
  }
}

TEST_P(CudaTest, AValueThatIsNotFiniteReachesThoseWhoSeeItAlone) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const bool causal : {true, false}) {
      Problem p = Plain(dtype, {1, 128, 128, 1, 1, 64, 64}, 9);
      p.options.causal = causal;
      const Results expected = Run(p);
      for (int64_t e = 0; e < 64; e += 3) SetElement(p.memory[2].view(), std::vector<int64_t>{0, 70, 0, e}, kInfinity);
      const Results results = Run(p);
      for (int64_t i = 0; i < 128; ++i) {
        EXPECT_EQ(results.lse.Get({0, 0, i}), expected.lse.Get({0, 0, i}));
        for (int64_t e = 0; e < 64; ++e) {
          const double got = results.o.Get({0, i, 0, e});
          if (causal && i < 70) {
            ASSERT_EQ(got, expected.o.Get({0, i, 0, e})) << Name(dtype) << " " << i << " " << e;
          } else if (e % 3 == 0) {
            EXPECT_EQ(got, kInfinity) << Name(dtype) << " " << i << " " << e;
          } else {
            EXPECT_NEAR(got, expected.o.Get({0, i, 0, e}), dtype == DType::kF32 ? 2e-6 : 0.05)
                << Name(dtype) << " " << i << " " << e;
          }
        }
      }
    }
  }
}

// f32 numbers that round to infinity in bf16, and infinities, in products of splits.
TEST_P(CudaTest, F32NumbersThatOverflowTheirBF16SplitsAreMultipliedExactly) {
  for (const double large : {static_cast<double>(std::numeric_limits<float>::max()), -kInfinity}) {
    for (const int64_t queries : {5, 70}) {
      Problem p = Plain(DType::kF32, {1, queries, 130, 1, 1, 64, 40}, 9);
      for (int64_t i = 0; i < queries; ++i) SetElement(p.memory[0].view(), std::vector<int64_t>{0, i, 0, 21}, 1.3e-38);
      for (const int64_t key : {3, 77, 129}) {
        SetElement(p.memory[1].view(), std::vector<int64_t>{0, key, 0, 21}, large);
        SetElement(p.memory[2].view(), std::vector<int64_t>{0, key - 1, 0, key % 40}, large);
      }
      const Comparison result = CompareWithReference(p, Run(p));
      EXPECT_TRUE(result.ok) << large << " " << queries << ": " << result.message;
    }
  }
}

TEST_P(CudaTest, RowsBeyondTheLengthsSeeNothing) {
  Problem p = Plain(DType::kBF16, {2, 40, 130, 2, 1, 64, 64}, 9);
  const int64_t lengths[] = {17, 0};
  p.options.query_lengths = ConstTensorView(lengths, DType::kI64, {2});
  const Results results = Run(p);
  EXPECT_TRUE(CompareWithReference(p, results).ok);
  EXPECT_NE(results.o.Get({0, 16, 0, 0}), 0);
  EXPECT_EQ(results.o.Get({0, 17, 0, 0}), 0);
}

TEST_P(CudaTest, EachTensorMayBeginAnywhere) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int unaligned : {0, 1, 2}) {
      Problem p = Plain(dtype, {1, 20, 70, 2, 1, 64, 64}, 9);
      ConstTensorView* const views[] = {&p.in.q, &p.in.k, &p.in.v};
      ConstTensorView& view = *views[unaligned];
      const Buffer moved(dtype, view.sizes(), view.strides(), Placement::kAligned, /*gap=*/1);
      moved.FillNormal(77);
      p.memory.push_back(moved);
      view = moved.view();
      EXPECT_TRUE(CompareWithReference(p, Run(p)).ok) << Name(dtype) << " " << unaligned;
    }
  }
}

TEST_P(CudaTest, HeadsAndEntriesMayShareRows) {
  Problem p = Plain(DType::kBF16, {2, 70, 100, 2, 2, 64, 64}, 9);
  const auto repeats = [](ConstTensorView& t, size_t axis) {
    std::vector<int64_t> strides(t.strides().begin(), t.strides().end());
    strides[axis] = 0;
    t = ConstTensorView(t.data(), t.dtype(), t.sizes(), strides);
  };
  repeats(p.in.k, 2);
  repeats(p.in.v, 0);
  const Comparison result = CompareWithReference(p, Run(p));
  EXPECT_TRUE(result.ok) << result.message;
}

TEST_P(CudaTest, RowsOfF32MayFollowEachOtherAtFourElements) {
  const Problem whole = Plain(DType::kF32, {1, 20, 70, 2, 1, 68, 68}, 9);
  Problem p = whole;  // rows of 64 elements, 16-byte aligned but not at multiples of 8 elements
  p.in = {whole.in.q.Slice(3, 4, 68), whole.in.k.Slice(3, 4, 68), whole.in.v.Slice(3, 4, 68)};
  DescribeOutputs(p);
  EXPECT_TRUE(CompareWithReference(p, Run(p)).ok);
}

TEST_P(CudaTest, EachSequenceAndHeadHasItsBiasAndMask) {
  Problem p = Plain(DType::kBF16, {3, 20, 70, 2, 1, 64, 64}, 9);
  const Buffer bias(DType::kF16, {3, 2, 20, 70}), mask(DType::kBool, {3, 2, 20, 70});
  bias.FillNormal(5);
  std::vector<int64_t> index(4, 0);
  do {
    SetElement(mask.view(), index, (index[0] + 2 * index[1] + index[2] + 3 * index[3]) % 5 != 0);
  } while (NextIndex(mask.view().sizes(), index));
  p.options.bias = bias.view();
  p.options.mask = mask.view();
  EXPECT_TRUE(CompareWithReference(p, Run(p)).ok);
}

TEST_P(CudaTest, AnInfiniteBiasMasksAnInfiniteLogit) {
  Problem p = Plain(DType::kBF16, {1, 5, 6, 1, 1, 16, 16}, 9);
  p.options.bias = p.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{1, 6}).FillConstant(0).view();
  p.memory.back().Set({0, 2}, -std::numeric_limits<double>::infinity());
  for (const double value : {1.0, std::numeric_limits<double>::infinity()}) {
    for (int64_t e = 0; e < 16; ++e) p.memory[1].Set({0, 2, 0, e}, value);
    const Results results = Run(p);
    EXPECT_TRUE(CompareWithReference(p, results).ok) << value;
  }
}

TEST_P(CudaTest, PackedSequencesHaveTheirBitsAndSurplusRowsAreEmpty) {
  Problem packed = Plain(DType::kBF16, {1, 100, 120, 2, 1, 64, 64}, 11);
  const int32_t q[] = {0, 30, 30, 90}, k[] = {0, 50, 60, 120};
  packed.options.causal = true;
  packed.options.cu_seqlens_q = ConstTensorView(q, DType::kI32, {4});
  packed.options.cu_seqlens_k = ConstTensorView(k, DType::kI32, {4});
  packed.lse.sizes = {2, 100};
  const Results results = Run(packed);
  EXPECT_TRUE(CompareWithReference(packed, results).ok);
  for (int64_t i = 90; i < 100; ++i) {
    EXPECT_EQ(results.o.Get({0, i, 1, 3}), 0);
    EXPECT_EQ(results.lse.Get({1, i}), -std::numeric_limits<double>::infinity());
  }
}

TEST_P(CudaTest, ABlockMayHaveAllSharedMemoryOfTheDevice) {
  std::string why_not;
  cuda::DeviceFacts facts;
  ASSERT_EQ(cuda::Find(&why_not)->examine(0, &facts), nullptr);
  const Device device = {DeviceType::kCuda, 0};
  EXPECT_EQ(cuda::Declines(device, facts.shared_bytes), "");
  EXPECT_THAT(cuda::Declines(device, facts.shared_bytes + 1), testing::HasSubstr("bytes of shared memory"));
}

TEST_P(CudaTest, ExplainNamesTheKernel) {
  const std::tuple<DType, int64_t, int64_t, std::string> kernels[] = {{DType::kBF16, 64, 64, KernelOfManyRows()},
                                                                      {DType::kF16, 33, 128, KernelOfManyRows()},
                                                                      {DType::kBF16, 32, 64, "softmax_cuda"},
                                                                      {DType::kF16, 64, 129, "softmax_cuda"},
                                                                      {DType::kF32, 64, 64, "softmax_cuda"}};
  for (const auto& [dtype, rows, channels, kernel] : kernels) {
    const Problem p = Plain(dtype, {1, rows, 64, 1, 1, channels, 64}, 1);
    const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), p.in.k), v(*GetParam(), p.in.v);
    const attention::Explanation e = attention::Explain(ctx_, {q.view(), k.view(), v.view()}, {});
    EXPECT_EQ(e.kernel, kernel) << Name(dtype) << " " << rows << " " << channels;
    EXPECT_EQ(e.target, "cuda");
    EXPECT_EQ(e.workspace_bytes, 0);
    EXPECT_TRUE(e.invariant);
    EXPECT_EQ(attention::Workspace(ctx_, {q.view(), k.view(), v.view()}, {}), 0);
  }
}

// Returns what a call throws, and checks that it writes nothing.
template <class Error>
std::string Refusal(Context& ctx, const Inputs& in, const Options& options, const DeviceTensor& o, const Buffer& host) {
  std::string what;
  try {
    attention::Forward(ctx, in, options, {o.view(), {}});
    ADD_FAILURE() << "nothing is thrown";
  } catch (const Error& error) {
    what = error.what();
  }
  o.Download(host.view());
  for (const uint8_t byte : host.bytes()) EXPECT_EQ(byte, 0xFF);
  return what;
}

TEST_P(CudaTest, UnsupportedInputsAreNamed) {
  const TestDevice& device = *GetParam();
  const auto refusal = [&](DType dtype, const Sizes& sizes, const Options& options) {
    const Problem p = Plain(dtype, sizes, 1);
    const Buffer host(dtype, p.o.sizes);
    const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), o(device, host.view());
    return Refusal<Unsupported>(ctx_, {q.view(), k.view(), v.view()}, options, o, host);
  };
  constexpr Sizes kSize = {1, 4, 4, 2, 2, 16, 16};
  EXPECT_THAT(refusal(DType::kF64, kSize, {}), HasSubstr("softmax_cuda computes f32, bf16 and f16, not f64"));
  EXPECT_THAT(refusal(DType::kBF16, {1, 4, 4, 1, 1, 257, 16}, {}), HasSubstr("takes up to 256 channels, not 257"));
  EXPECT_THAT(refusal(DType::kBF16, {1, 4, 4, 1, 1, 16, 300}, {}), HasSubstr("takes up to 256 channels, not 300"));
}

TEST_P(CudaTest, TensorsOfSeveralDevicesAreRefused) {
  const TestDevice& device = *GetParam();
  const Problem p = Plain(DType::kBF16, {1, 4, 4, 1, 1, 16, 16}, 1);
  const Buffer host(DType::kBF16, p.o.sizes);
  const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), o(device, host.view());
  const Inputs in = {q.view(), k.view(), v.view()};
  const auto refusal = [&](const Inputs& inputs, const Options& options = {}) {
    return Refusal<InvalidArgument>(ctx_, inputs, options, o, host);
  };
  EXPECT_THAT(refusal({q.view(), p.in.k, v.view()}), HasSubstr("k is on the CPU, expected cuda:0 as q"));
  EXPECT_THAT(refusal({p.in.q, p.in.k, v.view()}), HasSubstr("v is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal({p.in.q, p.in.k, p.in.v}), HasSubstr("o is on cuda:0, expected the CPU"));
  const ConstTensorView& t = v.view();
  const ConstTensorView elsewhere(t.data(), t.dtype(), t.sizes(), t.strides(), {DeviceType::kCuda, 1});
  EXPECT_THAT(refusal({q.view(), k.view(), elsewhere}), HasSubstr("v is on cuda:1, expected cuda:0 as q"));
  const ConstTensorView unknown(t.data(), t.dtype(), t.sizes(), t.strides(), {static_cast<DeviceType>(7), 2});
  EXPECT_THAT(refusal({unknown, k.view(), v.view()}), HasSubstr("q is on device 7:2, expected the CPU"));
  // Data that argument checks read is on the CPU.
  const Buffer lengths(DType::kI64, {1}), slopes(DType::kF32, {1});
  const DeviceTensor device_lengths(device, lengths.view()), device_slopes(device, slopes.view());
  const ConstTensorView s = device_slopes.view();
  Options with_lengths, with_slopes, with_mask;
  with_lengths.key_lengths = device_lengths.view();
  with_slopes.alibi = ConstTensorView(s.data(), s.dtype(), s.sizes(), s.strides(), {DeviceType::kCuda, 1});
  EXPECT_THAT(refusal(in, with_lengths), HasSubstr("key_lengths is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal(in, with_slopes), HasSubstr("alibi is on cuda:1, expected cuda:0 as q"));
  const Buffer mask(DType::kBool, {4, 4});
  with_mask.mask = mask.view();
  EXPECT_THAT(refusal(in, with_mask), HasSubstr("mask is on the CPU, expected cuda:0 as q"));
}

TEST_P(CudaTest, AStreamOfAnotherDeviceIsRefused) {
  if (GetParam() != &cuda::EmulatedDevice()) return;  // which accepts any stream
  const Problem p = Plain(DType::kBF16, {1, 4, 4, 1, 1, 16, 16}, 1);
  const Buffer host(DType::kBF16, p.o.sizes);
  const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), p.in.k), v(*GetParam(), p.in.v),
      o(*GetParam(), host.view());
  int stream = 0;
  ctx_.set_stream(&stream);
  EXPECT_THAT(Refusal<InvalidArgument>(ctx_, {q.view(), k.view(), v.view()}, {}, o, host),
              HasSubstr("the Context's stream is of another device, expected one of cuda:0"));
}

TEST_P(CudaTest, AMissingDeviceIsReported) {
  const Problem p = Plain(DType::kBF16, {1, 4, 4, 1, 1, 16, 16}, 1);
  const auto moved = [&](const ConstTensorView& t) {
    return ConstTensorView(t.data(), t.dtype(), t.sizes(), t.strides(), {DeviceType::kCuda, 99});
  };
  const Inputs in = {moved(p.in.q), moved(p.in.k), moved(p.in.v)};
  try {
    attention::Explain(ctx_, in, {});
    ADD_FAILURE() << "nothing is thrown";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("softmax_cuda cannot run: there is no device of this index"));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaTest, testing::ValuesIn(DevicesOfAttention()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaTestOf16Bits, testing::ValuesIn(DevicesOfAttention()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaTestOfF32, testing::ValuesIn(Devices()), NameOf);

// A library with chosen device properties.
const char* OldDevice(int32_t, cuda::DeviceFacts* facts) {
  *facts = {7, 5, 65536};
  return nullptr;
}
const char* SmallDevice(int32_t, cuda::DeviceFacts* facts) {
  *facts = {8, 6, 101376};
  return nullptr;
}
const char* NoDriver(int32_t, cuda::DeviceFacts*) { return "no driver is installed"; }

TEST(CudaLibraryTest, MissingInputsAreNamed) {
  const auto refusal = [](const char* (*examine)(int32_t, cuda::DeviceFacts*), int64_t channels,
                          DType dtype = DType::kBF16) {
    const cuda::Library library = {.version = "0",
                                   .examine = examine,
                                   .check_stream = nullptr,
                                   .allocate = nullptr,
                                   .free = nullptr,
                                   .upload = nullptr,
                                   .encode_tensor_map = nullptr,
                                   .softmax = cuda::EmulatedDevice().library()->softmax,
                                   .recurrence = nullptr,
                                   .ssd = nullptr,
                                   .scan = nullptr};
    cuda::Replace(&library);
    const ConstTensorView t(nullptr, dtype, {1, 4, 1, channels}, {DeviceType::kCuda, 0});
    std::string what;
    try {
      attention::Explain(Context(1), {t, t, t}, {});
    } catch (const Unsupported& error) {
      what = error.what();
    }
    cuda::Replace(nullptr);
    return what;
  };
  EXPECT_THAT(refusal(&OldDevice, 64), HasSubstr("softmax_cuda needs compute capability 8.0, not 7.5"));
  EXPECT_THAT(refusal(&SmallDevice, 256), HasSubstr("bytes of shared memory for these channels, not 101376"));
  EXPECT_EQ(refusal(&SmallDevice, 64), "");
  EXPECT_EQ(refusal(&SmallDevice, 64, DType::kF32), "");
  EXPECT_THAT(refusal(&SmallDevice, 65, DType::kF32),
              HasSubstr("bytes of shared memory for these channels, not 101376"));
  EXPECT_THAT(refusal(&NoDriver, 64), HasSubstr("softmax_cuda cannot run: no driver is installed"));
}

// The installed library, if there is one: without a driver it is loaded too, and reports that.
TEST(CudaLibraryTest, IsFoundOrWhyNot) {
  std::string why_not;
  const cuda::Library* library = cuda::Find(&why_not);
#if defined(HEED_WITH_CUDA)
  ASSERT_NE(library, nullptr) << why_not;
  cuda::DeviceFacts facts;
  const char* reason = library->examine(0, &facts);
  if (!cuda::Gpu().WhyNot().empty()) {
    EXPECT_EQ(std::string(reason == nullptr ? "" : reason), cuda::Gpu().WhyNot());
  } else {
    EXPECT_EQ(reason, nullptr);
    EXPECT_GE(facts.major, 3);
    EXPECT_NE(library->examine(-1, &facts), nullptr);
  }
#else
  EXPECT_EQ(library, nullptr);
  EXPECT_THAT(why_not, HasSubstr("libheed_cuda.so"));
#endif
}

}  // namespace
}  // namespace heed
