// The memory of the backward pass of attention, by its formula and measured.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "tests/sanitizers.h"

namespace heed::attention {
namespace {

// Counts the bytes of the sums of log decays, and of their gradients.
int64_t DecayBytes(const Problem& p, int64_t E, int64_t rows) {
  const Options& o = p.options;
  if (!o.log_decay) return 0;
  const int rank = p.in.k.rank();
  const auto up = [](int64_t keys) { return (keys + 63) / 64 * 64; };
  int64_t keys = up(p.in.k.size(rank - 3)) * (rank == 4 ? p.in.k.size(0) : 1);
  if (const ConstTensorView cu = o.cu_seqlens_k ? o.cu_seqlens_k : o.cu_seqlens_q) {
    keys = 0;
    const auto at = [&](int64_t b) { return LoadAsInt64(cu.dtype(), cu.data(), b * cu.stride(0)); };
    for (int64_t b = 0; b + 1 < cu.size(0); ++b) keys += up(at(b + 1) - at(b));
  }
  const int64_t K = keys * p.in.q.size(p.in.q.rank() - 2);
  return K * (9 + E) + 32 * rows;
}

int64_t RelativeBytes(const Problem& p, int64_t E, int threads) {
  if (!p.options.relative_bias) return 0;
  const int rank = p.in.q.rank();
  const int64_t heads = p.in.q.size(rank - 2), group = heads / std::max<int64_t>(p.in.k.size(rank - 2), 1);
  const int64_t span = p.options.relative_bias.size(1);
  return threads * E * group * (span + 48) + 128 * heads * span;
}

// The formula of the header, whose few KiB are 2 per thread and 4 shared.
int64_t Formula(const Problem& p, int threads, bool tiles) {
  const int64_t E = p.in.q.dtype() == DType::kF64 ? 8 : 4;
  const int64_t size = static_cast<int64_t>(SizeOf(p.in.q.dtype()));
  const int rank = p.in.q.rank();
  const int64_t vector = tiles ? 32 : 16;
  const auto padded = [&](int64_t depth) { return (depth + vector - 1) / vector * vector; };
  const int64_t D = padded(p.in.q.size(rank - 1)), Dv = padded(p.in.v.size(rank - 1));
  const int64_t rows = p.in.q.num_elements() / std::max<int64_t>(p.in.q.size(rank - 1), 1);
  const ConstTensorView& bias = p.options.bias;
  const bool by_rows = bias && bias.rank() > 0 && bias.size(bias.rank() - 1) == 1 && p.in.k.size(rank - 3) > 1;
  const bool own_bias = bias && !by_rows && static_cast<int64_t>(SizeOf(bias.dtype())) != E;
  const int64_t in_vectors = E * (512 * (D + Dv) + 64 * (3 * D + 2 * Dv + 64 * (3 + (p.options.softcap > 0))));
  const int64_t in_tiles = 5312 * D + 3520 * Dv + 8192 * (56 + (p.options.softcap > 0));
  return threads * (2048 + (tiles ? in_tiles : in_vectors)) +
         E * rows * (3 + (size == 2 ? D : 0) + by_rows + p.options.alibi.present()) +
         rows * (4 + 8 * p.options.sinks.present()) + DecayBytes(p, E, rows) +
         (own_bias ? E * bias.num_elements() : 0) + RelativeBytes(p, E, threads) + 4096;
}

TEST(BackwardMemory, IsWhatTheHeaderSaysAtMost) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      const Problem p = WithGradients(RandomProblem(dtype, seed), seed);
      SCOPED_TRACE(Title(p));
      std::vector<TensorView> views;
      for (const OutputSpec& spec : p.gradients) views.push_back({nullptr, spec.dtype, spec.sizes});
      for (const int threads : {1, 3}) {
        const Context ctx(threads);
        const int64_t bytes = BackwardWorkspace(ctx, {p.in.q, p.in.k, p.in.v, {}, {}, {}, {}}, p.options,
                                                ToGradients(p.gradients, views));
        EXPECT_GT(bytes, 0);
        const bool tiles = dtype != DType::kF64 && AmxOf(ctx.allowed_targets()) != AmxUnit::kNone;
        ASSERT_LE(bytes, Formula(p, threads, tiles));
      }
    }
  }
}

TEST(BackwardMemory, DoesNotGrowWithTheSquareOfTheLength) {
  const Context ctx(2);
  const auto bytes = [&](DType dtype, int64_t T) {
    const ConstTensorView x(nullptr, dtype, {1, T, 2, 64});
    const TensorView d(nullptr, dtype, {1, T, 2, 64});
    return BackwardWorkspace(ctx, {x, x, x, {}, {}, {}, {}}, {}, {d, d, d, {}, {}, {}, {}});
  };
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const int64_t small = bytes(dtype, 4096), large = bytes(dtype, 8192), larger = bytes(dtype, 16384);
    EXPECT_LE(std::abs((larger - large) - 2 * (large - small)), 1024);  // linear
    EXPECT_LE(larger, int64_t{1} << 25);                                // 16384^2 logits of two heads are 2 GiB
  }
}

// Runs in its own process, since other tests have already raised the peak of this one.
void MeasureMemory(DType dtype) {
  Problem p = MakeProblem(dtype, {1, 6000, 6000, 2, 2, 64, 64});
  p.options.window = {100, 100};
  DescribeGradients(p, 1);
  const Buffer o(p.o.dtype, p.o.sizes), lse(p.lse.dtype, p.lse.sizes);
  std::vector<Buffer> gradients;
  std::vector<TensorView> views;
  for (const OutputSpec& spec : p.gradients) {
    gradients.emplace_back(spec.dtype, spec.sizes);
    views.push_back(gradients.back().FillConstant(0).view());
  }
  const Gradients out = ToGradients(p.gradients, views);
  const BackwardInputs in = {p.in.q, p.in.k, p.in.v, o.view(), lse.view(), p.d_o, {}};
  {
    Context first(2);  // starts the threads
    Forward(first, p.in, p.options, {o.view(), lse.view()});
    // The first run maps code pages, which count as memory too.
    Problem small = MakeProblem(dtype, {1, 200, 200, 2, 2, 64, 64});
    small.options.window = p.options.window;
    DescribeGradients(small, 1);
    RunBackward(first, small);
  }
  const int64_t before = os::PeakResidentBytes();
  Context ctx(2);
  Backward(ctx, in, p.options, out);
  const int64_t grown = os::PeakResidentBytes() - before;
  const int64_t allowed = BackwardWorkspace(ctx, in, p.options, out) + (int64_t{1} << 20);
  std::fprintf(stderr, "grown by %.2f MiB, allowed %.2f MiB\n", static_cast<double>(grown) * 0x1p-20,
               static_cast<double>(allowed) * 0x1p-20);
  std::exit(grown <= allowed ? 0 : 1);
}

TEST(BackwardMemory, MeasuredStaysWithinTheWorkspace) {
#if HEED_ADDRESS_SANITIZER || HEED_THREAD_SANITIZER
  GTEST_SKIP() << "sanitizers keep memory of their own";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(MeasureMemory(DType::kF32), testing::ExitedWithCode(0), "grown by");
  EXPECT_EXIT(MeasureMemory(DType::kBF16), testing::ExitedWithCode(0), "grown by");
}

}  // namespace
}  // namespace heed::attention
