// Probes: loops that each use one resource, compiled for every SIMD target.
#include "heed/harness/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/targets.h"
#include "heed/harness/probe_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/harness/probe.cc"  // this file
#include "hwy/foreach_target.h"                     // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/math-inl.h"

#ifndef HEED_HARNESS_PROBE_ONCE
#define HEED_HARNESS_PROBE_ONCE
namespace heed::probe {
inline constexpr size_t kExp2Block = 2048;  // elements, 8 or 16 KiB: in L1
}  // namespace heed::probe
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::probe::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve chains: two ports times a latency of four, with room for a latency of six. Each is a variable of its own: g++
// 12 keeps an array of vectors in a loop in memory, and would spill a thirteenth chain under AVX2, where the chains and
// the two constants share sixteen registers.
template <class T>
double FmaChains(int64_t iterations, T x_value, T y_value) {
  const hn::ScalableTag<T> d;
  const auto x = hn::Set(d, x_value), y = hn::Set(d, y_value);
  auto a0 = hn::Zero(d), a1 = y, a2 = x;
  auto a3 = hn::Add(a2, y), a4 = hn::Add(a3, y), a5 = hn::Add(a4, y);
  auto a6 = hn::Add(a5, y), a7 = hn::Add(a6, y), a8 = hn::Add(a7, y);
  auto a9 = hn::Add(a8, y), a10 = hn::Add(a9, y), a11 = hn::Add(a10, y);
  for (int64_t i = 0; i < iterations; ++i) {
    a0 = hn::MulAdd(a0, x, y);
    a1 = hn::MulAdd(a1, x, y);
    a2 = hn::MulAdd(a2, x, y);
    a3 = hn::MulAdd(a3, x, y);
    a4 = hn::MulAdd(a4, x, y);
    a5 = hn::MulAdd(a5, x, y);
    a6 = hn::MulAdd(a6, x, y);
    a7 = hn::MulAdd(a7, x, y);
    a8 = hn::MulAdd(a8, x, y);
    a9 = hn::MulAdd(a9, x, y);
    a10 = hn::MulAdd(a10, x, y);
    a11 = hn::MulAdd(a11, x, y);
  }
  const auto b0 = hn::Add(hn::Add(a0, a1), hn::Add(a2, a3));
  const auto b1 = hn::Add(hn::Add(a4, a5), hn::Add(a6, a7));
  const auto b2 = hn::Add(hn::Add(a8, a9), hn::Add(a10, a11));
  return hn::ReduceSum(d, hn::Add(hn::Add(b0, b1), b2));
}

// Flops of one iteration.
template <class T>
double FmaFlops() {
  return 2.0 * 12.0 * static_cast<double>(hn::Lanes(hn::ScalableTag<T>()));
}

double FmaF32(int64_t iterations, double x, double y, double* flops) {
  *flops = FmaFlops<float>() * static_cast<double>(iterations);
  return FmaChains<float>(iterations, static_cast<float>(x), static_cast<float>(y));
}

double FmaF64(int64_t iterations, double x, double y, double* flops) {
#if HWY_HAVE_FLOAT64
  *flops = FmaFlops<double>() * static_cast<double>(iterations);
  return FmaChains<double>(iterations, x, y);
#else
  double a[12] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    for (double& chain : a) chain = chain * x + y;
  }
  *flops = 24.0 * static_cast<double>(iterations);
  double sum = 0;
  for (double chain : a) sum += chain;
  return sum;
#endif
}

// The operations of softmax on a row of logits: subtract, exp2, sum, store.
template <class T>
double Exp2Block(int64_t rounds, T scale, T max, T* HWY_RESTRICT block) {
  const hn::ScalableTag<T> d;
  const size_t N = hn::Lanes(d);
  const auto c = hn::Set(d, scale), m = hn::Set(d, max);
  auto sum0 = hn::Zero(d), sum1 = sum0;
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < kExp2Block; i += 2 * N) {
      const auto x0 = hn::Load(d, block + i), x1 = hn::Load(d, block + i + N);
      const auto y0 = heed::HWY_NAMESPACE::Exp2(d, hn::Mul(hn::Sub(x0, m), c));
      const auto y1 = heed::HWY_NAMESPACE::Exp2(d, hn::Mul(hn::Sub(x1, m), c));
      hn::Store(y0, d, block + i);
      hn::Store(y1, d, block + i + N);
      sum0 = hn::Add(sum0, y0);
      sum1 = hn::Add(sum1, y1);
    }
  }
  return hn::ReduceSum(d, hn::Add(sum0, sum1));
}

double Exp2F32(int64_t rounds, void* block) { return Exp2Block<float>(rounds, 0.5f, 1.0f, static_cast<float*>(block)); }

double Exp2F64(int64_t rounds, void* block) { return Exp2Block<double>(rounds, 0.5, 1.0, static_cast<double*>(block)); }

// Sums 64-bit words in address order. Four sums hide the latency of the adds.
uint64_t ReadWords(const uint64_t* HWY_RESTRICT words, size_t num_words) {
  const hn::ScalableTag<uint64_t> d;
  const size_t N = hn::Lanes(d);
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0;
  size_t i = 0;
  for (; i + 4 * N <= num_words; i += 4 * N) {
    a0 = hn::Add(a0, hn::LoadU(d, words + i));
    a1 = hn::Add(a1, hn::LoadU(d, words + i + N));
    a2 = hn::Add(a2, hn::LoadU(d, words + i + 2 * N));
    a3 = hn::Add(a3, hn::LoadU(d, words + i + 3 * N));
  }
  uint64_t sum = hn::ReduceSum(d, hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)));
  for (; i < num_words; ++i) sum += words[i];
  return sum;
}

// Adds 1 to 64-bit words in address order.
void UpdateWords(uint64_t* HWY_RESTRICT words, size_t num_words) {
  const hn::ScalableTag<uint64_t> d;
  const size_t N = hn::Lanes(d);
  const auto one = hn::Set(d, uint64_t{1});
  size_t i = 0;
  for (; i + 4 * N <= num_words; i += 4 * N) {
    hn::StoreU(hn::Add(hn::LoadU(d, words + i), one), d, words + i);
    hn::StoreU(hn::Add(hn::LoadU(d, words + i + N), one), d, words + i + N);
    hn::StoreU(hn::Add(hn::LoadU(d, words + i + 2 * N), one), d, words + i + 2 * N);
    hn::StoreU(hn::Add(hn::LoadU(d, words + i + 3 * N), one), d, words + i + 3 * N);
  }
  for (; i < num_words; ++i) ++words[i];
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::probe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::probe {
HWY_EXPORT(FmaF32);
HWY_EXPORT(FmaF64);
HWY_EXPORT(Exp2F32);
HWY_EXPORT(Exp2F64);
HWY_EXPORT(ReadWords);
HWY_EXPORT(UpdateWords);

namespace {

// Results are stored here, so that no compiler removes the loops.
volatile double g_sink;

void CheckDType(const char* probe, DType dtype) {
  if (dtype != DType::kF64 && dtype != DType::kF32) {
    throw Unsupported(std::string(probe) + ": dtype is " + Name(dtype) + ", expected f64 or f32");
  }
}

}  // namespace

double PeakFlopsPerSecond(DType dtype, int64_t targets, int repeats) {
  const size_t target = TargetIndex(targets);
  auto f = dtype == DType::kF64 ? HWY_DISPATCH_TABLE(FmaF64)[target] : HWY_DISPATCH_TABLE(FmaF32)[target];
  if (dtype == DType::kBF16 && PairChains() != nullptr && HasBF16Pairs(targets)) {
    f = PairChains();
  }
  constexpr int64_t kIterations = 1 << 20;
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    double flops = 0;
    const double start = os::ThreadCpuSeconds();
    g_sink = f(kIterations, 0.999, 0.001, &flops);  // tends to 1: no subnormals
    best = std::max(best, flops / (os::ThreadCpuSeconds() - start));
  }
  return best;
}

double Exp2PerSecond(DType dtype, int64_t targets, int repeats) {
  CheckDType("Exp2PerSecond", dtype);
  const size_t target = TargetIndex(targets);
  const auto f = dtype == DType::kF64 ? HWY_DISPATCH_TABLE(Exp2F64)[target] : HWY_DISPATCH_TABLE(Exp2F32)[target];
  constexpr int64_t kRounds = 1 << 12;
  const os::ScopedFloatControl control;
  alignas(64) double block[kExp2Block] = {};
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const double start = os::ThreadCpuSeconds();
    g_sink = f(kRounds, block);
    best = std::max(best, static_cast<double>(kExp2Block * kRounds) / (os::ThreadCpuSeconds() - start));
  }
  return best;
}

double ReadBytesPerSecond(Context& ctx, const void* data, size_t num_bytes, int repeats) {
  constexpr int64_t kChunkWords = 1 << 17;  // 1 MiB: longer than any prefetcher
  const uint64_t* words = static_cast<const uint64_t*>(data);
  const int64_t num_words = static_cast<int64_t>(num_bytes / 8);
  const auto read = HWY_DISPATCH_TABLE(ReadWords)[TargetIndex(ctx.allowed_targets())];
  std::atomic<uint64_t> sum{0};
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    ctx.ParallelFor((num_words + kChunkWords - 1) / kChunkWords, [&](int64_t task, int) {
      const int64_t begin = task * kChunkWords;
      const int64_t n = std::min(kChunkWords, num_words - begin);
      sum.fetch_add(read(words + begin, static_cast<size_t>(n)), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(num_bytes) / elapsed.count());
  }
  g_sink = static_cast<double>(sum.load());
  return best;
}

double UpdateSeconds(void* data, size_t num_bytes, int64_t targets, int repeats) {
  const auto update = HWY_DISPATCH_TABLE(UpdateWords)[TargetIndex(targets)];
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repeats; ++i) {
    const double start = os::ThreadCpuSeconds();
    update(static_cast<uint64_t*>(data), num_bytes / 8);
    best = std::min(best, os::ThreadCpuSeconds() - start);
  }
  return best;
}

double DramBytesPerSecond(int threads) {
  constexpr size_t kBytes = size_t{256} << 20;
  const std::unique_ptr<void, void (*)(void*)> memory(os::AllocateAligned(kBytes), &os::FreeAligned);
  std::memset(memory.get(), 1, kBytes);  // zero pages may share one frame
  Context ctx(threads);
  return ReadBytesPerSecond(ctx, memory.get(), kBytes);
}

}  // namespace heed::probe
#endif  // HWY_ONCE
