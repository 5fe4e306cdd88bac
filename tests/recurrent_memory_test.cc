// Memory that recurrent mechanisms reserve: within their headers' formulas, and equal to the growth of the process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "heed/core/os.h"
#include "tests/recurrent_call.h"
#include "tests/sanitizers.h"

namespace heed::recurrent {
namespace {

INSTANTIATE_TEST_SUITE_P(AllOps, Recurrent,
                         testing::ValuesIn(Parameters([](const Parameter& p) { return p.dtype != DType::kF16; })),
                         ParameterName);

int64_t Whole(int64_t channels) { return (channels + 15) / 16 * 16; }

int64_t HeadsOf(const Call& call) {
  const auto& v = call.Input(call.value_name()).view();
  return v.size(0) * v.size(v.rank() - 2);
}

// The formulas of the headers. E is the bytes per element; the number of rows of 64 tokens depends on the gate.
struct Formula {
  int64_t forward, backward;
};
Formula FormulaOf(const Call& call, int64_t threads) {
  const Definition& d = call.m->definition;
  const int64_t per_head = d.delta() != recurrence::Delta::kNone ? 16 : 8;
  if (!d.channels() && HeadsOf(call) < threads) threads = std::max(threads, per_head * HeadsOf(call));
  const auto& q = call.Input(call.query_name()).view();
  const auto& v = call.Input(call.value_name()).view();
  const int64_t E = q.dtype() == DType::kF64 ? 8 : 4;
  const int64_t blocks = (q.size(1) + 63) / 64;
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), HV = v.size(v.rank() - 2);
  const int64_t value_size = v.size(v.rank() - 1);
  if (d.channels()) {
    return {threads * (4 << 10), threads * ((64 + blocks) * 768 + (4 << 10)) + 16 * B * value_size};
  }
  if (d.delta() != recurrence::Delta::kNone) {
    const int64_t K = Whole(q.size(3)), V = Whole(value_size), few = 12 << 10;
    const int64_t n = d.several_writes() ? v.size(2) : 1, W = d.several_writes() ? 64 / n * n : 64;
    const int64_t W_blocks = (n * T + W - 1) / W;
    const int64_t keys = d.preconditions() ? E * B * H * (T + 1) * K : 0;
    return {threads * (E * (K * V + W * (7 * K + 5 * V)) + few) + keys,
            threads * (E * (W_blocks * (K * V + W * V) + 3 * K * V + W * (11 * K + 8 * V)) + few) +
                (HV > H ? 4 * E * B * n * T * H * K : 0) + 4 * keys + few};
  }
  const int64_t K = Whole(recurrence::FeatureSize(d.feature, q.size(3)));
  const int64_t V = Whole(value_size + 1);
  const Tensor* const decay = d.table.Find(mechanism::Role::kLogDecay);
  const bool by_key = decay != nullptr && std::string_view(decay->axes).back() == 'K';
  const bool ungated = decay == nullptr && !d.exp_gates();
  const int64_t gate = ungated ? 0 : by_key ? 2 : 1;
  const int64_t constants = (d.table.Has(mechanism::Role::kBonus) ? 1 : 0) + (by_key && !decay->over_tokens() ? 1 : 0);
  const bool value_decay = d.table.Has(mechanism::Role::kLogValueDecay);
  const int64_t columns = value_decay ? E * 64 * (2 * V + V / 4) : 0;
  const int64_t backward_columns = value_decay ? E * (blocks * 64 * V + K * V + 64 * (3 * V + V / 4)) : 0;
  const int64_t backward_rows = (ungated ? 5 : 7) + (d.normalize ? 1 : 0);
  const int64_t few = 12 << 10;
  const bool scalar = gate == 1;
  const Explanation explained = Passes::Explain("test", Context(1), d, call.Views(), call.options);
  const int64_t K32 = (q.size(3) + 31) / 32 * 32, V32 = (value_size + 31) / 32 * 32;
  const int64_t in_tiles = 4 * K32 * V32 + 576 * K32 + 128 * V32 + (62 << 10);
  const bool tiles = explained.kernel == "recurrence_tiles";
  // Per block: states and products of pairs of tokens if there is a gate, dq per channel, the normaliser.
  const int64_t of_block = (ungated ? 0 : K * V + 256) + (by_key ? 64 * K : 0) + (d.normalize ? K + 129 : 0);
  const int64_t states = ungated ? 3 : 2;
  Formula f = {
      threads * (E * (K * V + 64 * ((2 + gate) * K + 2 * V)) + columns + few),
      threads * (E * (blocks * of_block + states * K * V + 64 * (backward_rows * K + 3 * V)) + backward_columns + few) +
          (HV > H ? 2 * E * B * T * H * K : 0) + (scalar ? 8 * B * T * HV * ((K + 31) / 32) : 0) +
          8 * constants * B * HV * K + few};
  if (!tiles) return f;
  const int64_t borders = ungated ? 4 * blocks * K * V : 0;
  return {threads * (in_tiles + few), f.backward + threads * (in_tiles + borders)};
}

int64_t BackwardBytes(const Context& ctx, const Call& call) {
  return Passes::BackwardWorkspace("test", ctx, call.m->definition, call.Views(), call.options);
}

TEST_P(Recurrent, MemoryIsWithinItsFormula) {
  for (const int threads : {1, 4, 16}) {  // 4 or 12 heads
    for (const int64_t T : {64, 1000}) {
      for (const int64_t group : {1, 3}) {
        const Call call = Make(2, T, 2, group, 24, 40);
        const Context ctx(threads);
        const Formula most = FormulaOf(call, threads);
        const int64_t forward = Passes::Workspace("test", ctx, call.m->definition, call.Views(), call.options);
        EXPECT_LE(forward, most.forward);
        if (HeadsOf(call) >= threads) EXPECT_GT(forward, most.forward / 2 - threads * (12 << 10));
        EXPECT_LE(BackwardBytes(ctx, call), most.backward);
      }
    }
  }
}

// The measurement runs in a process of its own, because other tests may already have raised the peak of this one.
void Measure(const Call& call) {
  {
    Context warm(1);
    Call small(*call.m, call.Input(call.query_name()).view().dtype(), 1, 70, 1, 1, 8, 8, 1);
    small.Both(warm);
  }
  const int64_t before = os::PeakResidentBytes();
  Context ctx(1);
  call.Backward(ctx);
  const int64_t grown = os::PeakResidentBytes() - before;
  // With pages of 2 MiB, two areas may end inside a page.
  const int64_t allowed = BackwardBytes(ctx, call) + (int64_t{4} << 20);
  std::fprintf(stderr, "grown by %.2f MiB, allowed %.2f MiB\n", static_cast<double>(grown) * 0x1p-20,
               static_cast<double>(allowed) * 0x1p-20);
  std::exit(grown <= allowed ? 0 : 1);
}

class RecurrentMemory : public Recurrent {};

INSTANTIATE_TEST_SUITE_P(AllOps, RecurrentMemory,
                         testing::ValuesIn(Parameters([](const Parameter& p) { return p.dtype == DType::kF32; })),
                         ParameterName);

TEST_P(RecurrentMemory, MeasuredStaysWithinTheWorkspace) {
#if HEED_ADDRESS_SANITIZER || HEED_THREAD_SANITIZER
  GTEST_SKIP() << "sanitizers keep memory of their own";
#endif
  const bool wide = GetParam().mechanism->definition.feature == recurrence::Feature::kTaylor;
  const Call call = Make(1, 16384, 1, 1, wide ? 14 : 128, 128);
  for (const Buffer& gradient : call.gradients) gradient.FillConstant(0);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(Measure(call), testing::ExitedWithCode(0), "grown by");
}

}  // namespace
}  // namespace heed::recurrent
