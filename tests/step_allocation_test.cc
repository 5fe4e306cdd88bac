// A step of one token allocates nothing after its thread's first step.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/linear/performer/performer.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "tests/sanitizers.h"
#include "tests/scan_call.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

#if !HEED_THREAD_SANITIZER  // which has its own, and they cannot be replaced
// Replaces the allocation functions of the whole program, the library included. They are not inlined, as a compiler
// that sees half of them reports free() of what operator new returned.
[[gnu::noinline]] void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](size_t size) { return operator new(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace heed {
namespace {

template <class F>
int64_t AllocationsOf(const F& f) {
  f();
  f();
  const int64_t before = allocations.load();
  f();
  return allocations.load() - before;
}

class StepAllocation : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (HEED_THREAD_SANITIZER) GTEST_SKIP() << "allocations are counted by operators that ThreadSanitizer keeps";
  }

  static constexpr int64_t B = 2, H = 2, HV = 4, K = 24, V = 40;
  TensorView Tensor(std::vector<int64_t> sizes, DType dtype) {
    memory_.push_back(Buffer(dtype, sizes).FillNormal(memory_.size() + 1));
    return memory_.back().view();
  }
  TensorView Decay(std::vector<int64_t> sizes) {
    memory_.push_back(Buffer(state_, sizes).FillConstant(-0.25));
    return memory_.back().view();
  }

  const DType dtype_ = GetParam();
  const DType state_ = dtype_ == DType::kF64 ? DType::kF64 : DType::kF32;
  std::vector<Buffer> memory_;
};

TEST_P(StepAllocation, OfMechanismsOnTheRecurrenceEngine) {
  int tested = 0;
  for (const OpEntry& op : AllOps()) {
    if (op.recurrent == nullptr || !op.recurrent->step) continue;
    const recurrent::Mechanism& m = *op.recurrent;
    const recurrent::Definition& d = m.definition;
    const recurrent::AxisSizes of_axes = {
        .B = B, .T = 1, .N = 2, .G = HV, .H = H, .K = K, .V = V, .M = 0, .F = recurrence::FeatureSize(d.feature, K)};
    std::vector<ConstTensorView> in;
    for (const mechanism::Tensor& t : d.table.tensors) {
      std::vector<int64_t> sizes = mechanism::ShapeOf(t.axes, of_axes);
      if (t.over_tokens()) sizes.erase(sizes.begin() + 1);
      const bool constant = t.type == mechanism::kAnyFloat;
      in.push_back(t.values == mechanism::kDecays ? Decay(sizes) : Tensor(sizes, constant ? state_ : dtype_));
    }
    std::vector<TensorView> state;
    for (const mechanism::StateTensor& s : recurrent::StatesOf(d)) {
      state.push_back(Tensor(mechanism::ShapeOf(s.axes, of_axes), state_));
    }
    std::vector<int64_t> of_o = mechanism::ShapeOf(d.o_axes(), of_axes);
    of_o.erase(of_o.begin() + 1);
    const TensorView o = Tensor(of_o, dtype_);
    for (const int threads : {1, 2}) {
      Context ctx(threads);
      EXPECT_EQ(AllocationsOf([&] { m.step(ctx, {in}, {}, {o, state}); }), 0)
          << op.name << ", " << threads << " threads";
    }
    ++tested;
  }
  EXPECT_GE(tested, 7);
}

TEST_P(StepAllocation, OfMechanismsOnTheScanEngine) {
  scanning::AxisSizes sizes = {.B = B, .D = K, .T = 1, .N = 5, .G = 2};
  sizes.H = 3, sizes.d = K / 3, sizes.W = 4, sizes.w = 3;
  const auto of_token = [&](std::string axes, DType dtype) {
    axes = axes.substr(0, axes.find('|'));
    std::erase(axes, 'T');
    return Tensor(mechanism::ShapeOf(axes, sizes), dtype);
  };
  for (const scanning::ScanFunctions& m : scanning::kMechanisms) {
    std::vector<ConstTensorView> in;
    for (const mechanism::Tensor& t : m.definition.table.tensors) in.push_back(of_token(t.axes, dtype_));
    std::vector<TensorView> state;
    for (const mechanism::StateTensor& t : m.definition.table.states) state.push_back(of_token(t.axes, state_));
    const TensorView o = of_token(m.definition.o_axes(), dtype_);
    for (const int threads : {1, 2}) {
      Context ctx(threads);
      EXPECT_EQ(AllocationsOf([&] { m.step(ctx, {in}, {o, state}); }), 0) << m.name << ", " << threads << " threads";
    }
  }
}

TEST_P(StepAllocation, OfSsd) {
  ssd::StepInputs in;
  in.x = Tensor({B, HV, V}, dtype_);
  in.dt = Tensor({B, HV}, dtype_);
  in.A = Decay({HV});
  in.B = Tensor({B, H, K}, dtype_);
  in.C = Tensor({B, H, K}, dtype_);
  in.D = Tensor({HV}, state_);
  in.z = Tensor({B, HV, V}, dtype_);
  ssd::Options options;
  options.dt_softplus = true;
  const ssd::State state = {Tensor({B, HV, V, K}, state_)};
  const TensorView o = Tensor({B, HV, V}, dtype_);
  Context ctx(2);
  EXPECT_EQ(AllocationsOf([&] { ssd::Step(ctx, in, options, state, o); }), 0);
}

TEST_P(StepAllocation, OfPerformer) {
  constexpr int64_t M = 50;
  performer::StepInputs in;
  in.q = Tensor({B, H, K}, dtype_);
  in.k = Tensor({B, H, K}, dtype_);
  in.v = Tensor({B, HV, V}, dtype_);
  in.projection = Tensor({M, K}, dtype_);
  performer::Options options;
  options.causal = true;
  const performer::State state = {Tensor({B, HV, M, V}, state_), Tensor({B, HV, M}, state_), Tensor({B, HV}, state_)};
  const TensorView o = Tensor({B, HV, V}, dtype_);
  Context ctx(2);
  EXPECT_EQ(AllocationsOf([&] { performer::Step(ctx, in, options, state, o); }), 0);
}

INSTANTIATE_TEST_SUITE_P(DTypes, StepAllocation, testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const testing::TestParamInfo<DType>& p) { return std::string(Name(p.param)); });

}  // namespace
}  // namespace heed
