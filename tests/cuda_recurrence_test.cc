// Recurrences on devices: GPU kernels agree with the references, keep a token's bits, and throw where something is not
// implemented.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/gated/mlstm/mlstm.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "tests/cuda/problems_on_devices.h"

namespace heed {
namespace {

using mechanism::Problem;
using mechanism::Views;
using simple_gla::Inputs;
using simple_gla::Options;
using testing::HasSubstr;

recurrent::Mechanism LinearAttention(linear_attention::FeatureMap map, const std::string& name, bool normalize,
                                     bool causal = true) {
  using namespace linear_attention;  // NOLINT
  linear_attention::Options own;
  own.feature_map = map;
  own.normalize = normalize;
  own.causal = causal;
  own.eps = 0.3;  // large enough to show in the sum
  return recurrent::Bound<linear_attention::Structs, linear_attention::Options>(
      "linear_attention", DefinitionOf(own), own, HEED_FUNCTIONS, &linear_attention::Math,
      " " + name + (normalize ? " normalized" : "") + (causal ? "" : " not causal"));
}

// The mechanisms that the kernel takes.
const std::vector<recurrent::Mechanism>& Mechanisms() {
  static const std::vector<recurrent::Mechanism> mechanisms = [] {
    using enum linear_attention::FeatureMap;
    std::vector<recurrent::Mechanism> list = {LinearAttention(kIdentity, "identity", false),
                                              LinearAttention(kElu1, "elu1", false),
                                              LinearAttention(kElu1, "elu1", true),
                                              LinearAttention(kRelu, "relu", false),
                                              LinearAttention(kReluSquared, "relu_sq", false),
                                              LinearAttention(kExp, "exp", false),
                                              LinearAttention(kExp, "exp", true),
                                              LinearAttention(kIdentity, "identity", false, false),
                                              LinearAttention(kElu1, "elu1", true, false)};
    for (const char* name : {"simple_gla", "retention", "lightning", "delta_rule", "gated_delta_rule", "comba", "gla",
                             "hgrn2", "kda", "rwkv5", "rwkv6", "delta_product", "rwkv7", "mlstm", "gdn2"}) {
      list.push_back(*FindOp(name).recurrent);
    }
    return list;
  }();
  return mechanisms;
}

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

class CudaRecurrenceTest : public AgreementTest {
 protected:
  // Calls simple_gla on tokens [begin, end).
  struct Results {
    Buffer o, state;
  };
  Results Run(const Inputs& in, const Options& options = {}) {
    const TestDevice& device = *GetParam();
    const int64_t sequences = options.cu_seqlens.present() ? options.cu_seqlens.size(0) - 1 : in.q.size(0);
    Results results = {Buffer(in.q.dtype(), {in.q.size(0), in.q.size(1), in.v.size(2), in.v.size(3)}),
                       Buffer(in.log_decay.dtype(), {sequences, in.v.size(2), in.k.size(3), in.v.size(3)})};
    const DeviceTensor q(device, in.q), k(device, in.k), v(device, in.v), log_decay(device, in.log_decay),
        initial(device, in.initial.S), o(device, results.o.view()), state(device, results.state.view());
    const Inputs on_device = {{q.view(), k.view(), v.view(), log_decay.view()}, {initial.view()}};
    simple_gla::Forward(ctx_, on_device, options, {o.view(), {state.view()}});
    o.Download(results.o.view());
    state.Download(results.state.view());
    return results;
  }
};

TEST_P(CudaRecurrenceTest, RandomProblemsAgreeWithTheReference) {
  for (const recurrent::Mechanism& m : Mechanisms()) {
    const mechanism::Mechanism moved = Moved(*GetParam(), m.of_problems);
    for (const DType dtype : kDTypes) {
      Comparison closest;
      // f16 has no kernel of its own.
      const Seeds seeds = dtype == DType::kBF16 ? SeedsOf(6, 2) : dtype == DType::kF32 ? SeedsOf(2, 1) : SeedsOf(2, 0);
      for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
        cuda::SetEmulatedSeed(seed);
        const Case c = recurrent::RandomCase(moved, m.definition, dtype, seed);
        if (c.title.find(" log_decay_v[") != std::string::npos) {
          EXPECT_THAT(Refusal<Unsupported>([&] { Compare(c, ctx_); }),
                      HasSubstr("computes no decays of value channels"));
          continue;
        }
        ASSERT_NO_FATAL_FAILURE(Agrees(c, &closest));
      }
      Print(m.name + m.of_problems.options + " " + Name(dtype), closest);
    }
  }
}

// Problems with gradients of decays, with three and five writes per token, in sequences of several blocks.
TEST_P(CudaRecurrenceTest, BlocksMayEndBetweenTheWritesOfAToken) {
  const recurrent::Mechanism& m = *FindOp("delta_product").recurrent;
  const mechanism::Mechanism moved = Moved(*GetParam(), m.of_problems);
  Comparison closest;
  for (const uint64_t seed : {135, 229}) {
    ASSERT_NO_FATAL_FAILURE(Agrees(recurrent::RandomCase(moved, m.definition, DType::kF32, seed), &closest));
  }
  Print(m.name, closest);
}

TEST_P(CudaRecurrenceTest, SizesAndVariantsAgreeWithTheReference) {
  constexpr Sizes kSizes[] = {// B, Tq, Tk, Hq, Hkv, D, Dv
                              {1, 70, 70, 1, 1, 33, 24},  {1, 17, 17, 1, 1, 64, 64},  {1, 34, 34, 1, 1, 128, 70},
                              {1, 20, 20, 2, 1, 200, 24}, {1, 20, 20, 2, 1, 24, 140}, {1, 0, 0, 1, 1, 9, 10}};
  for (const recurrent::Mechanism& m : Mechanisms()) {
    const mechanism::Mechanism moved = Moved(*GetParam(), m.of_problems);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      Comparison closest;
      for (const Sizes& sizes : kSizes) {
        for (const char* variant : {"", "state", "reverse", "lengths=62", "strong", "vanishing", "faint+state"}) {
          if (sizes.D != 33 && *variant != 0 && !(sizes.Tq == 0 && std::string(variant) == "state")) continue;
          if (sizes.D > 128 && m.definition.delta() != recurrence::Delta::kNone) continue;
          if (dtype != DType::kBF16 && (*variant != 0 || sizes.D != 128)) continue;
          const bool has_state = std::string(variant).find("state") != std::string::npos;
          if (!m.definition.causal && has_state) continue;
          for (const std::string pass : {"forward", "backward", "step"}) {
            if (pass == "step" && (*variant != 0 || dtype != DType::kBF16 || !m.definition.causal)) continue;
            if (LeavesOut(11)) continue;
            const CaseRequest request = {.sizes = sizes, .dtype = dtype, .seed = 3, .pass = pass, .variant = variant};
            ASSERT_NO_FATAL_FAILURE(Agrees(recurrent::MakeCase(moved, m.definition, request), &closest));
          }
        }
      }
      Print(m.name + m.of_problems.options + " " + Name(dtype), closest);
    }
  }
}

// Inputs and their memory.
struct Problems {
  static DType Wide(DType dtype) { return dtype == DType::kF64 ? dtype : DType::kF32; }
  Problems(DType dtype, int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, uint64_t seed = 1)
      : q(dtype, {B, T, H, K}), k(dtype, {B, T, H, K}), v(dtype, {B, T, H, V}), log_decay(Wide(dtype), {B, T, H}),
        initial(Wide(dtype), {B, H, K, V}) {
    for (Buffer* buffer : {&q, &k, &v, &log_decay, &initial}) buffer->FillNormal(++seed);
    std::vector<int64_t> at(3, 0);
    do {
      SetElement(log_decay.view(), at, -0.1 * std::abs(GetElement(log_decay.view(), at)));
    } while (NextIndex(log_decay.view().sizes(), at));
  }
  Inputs Views() const { return {{q.view(), k.view(), v.view(), log_decay.view()}, {initial.view()}}; }
  // Computes tokens [begin, end) from a state on.
  Inputs Tokens(int64_t begin, int64_t end, const ConstTensorView& state) const {
    Inputs in = Views();
    for (ConstTensorView* t : {&in.q, &in.k, &in.v, &in.log_decay}) *t = t->Slice(1, begin, end);
    in.initial.S = state;
    return in;
  }
  Buffer q, k, v, log_decay, initial;
};

TEST_P(CudaRecurrenceTest, BitsDoNotDependOnSegments) {
  const Problems p(DType::kBF16, 1, 700, 1, 24, 70);
  cuda::SetEmulatedSms(1);
  const Results whole = Run(p.Views());
  for (const int num_sms : {2, 100}) {
    cuda::SetEmulatedSms(num_sms);
    const Results cut = Run(p.Views());
    EXPECT_TRUE(SameBits(whole.o.view(), cut.o.view())) << num_sms;
    EXPECT_TRUE(SameBits(whole.state.view(), cut.state.view())) << num_sms;
  }
}

TEST_P(CudaRecurrenceTest, BitsOfGradientsDoNotDependOnSegments) {
  const std::pair<const char*, int> problems[] = {
      {"simple_gla", 590}, {"gla", 590},           {"simple_gla", 512}, {"gated_delta_rule", 590},
      {"rwkv6", 590},      {"delta_product", 230}, {"rwkv7", 230},      {"mlstm", 300}};
  for (const auto& [name, T] : problems) {
    if (LeavesOut(3)) continue;
    const recurrent::Mechanism& m = *FindOp(name).recurrent;
    const mechanism::Mechanism moved = Moved(*GetParam(), m.of_problems);
    const Case c = recurrent::MakeCase(
        moved, m.definition,
        {.sizes = {1, T, T, 1, 1, 9, 10}, .dtype = DType::kBF16, .pass = "backward", .variant = "state"});
    const std::vector<Buffer> whole = RunOn(1, c), cut = RunOn(100, c);
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(SameBits(whole[i].view(), cut[i].view())) << name << " " << c.outputs[i].name;
    }
    const Comparison result = CompareResults(c, ViewsOf(cut));
    EXPECT_TRUE(result.ok) << result.message;
  }
}

TEST_P(CudaRecurrenceTest, ASequenceSplitAtMultiplesOf64HasItsBits) {
  const Problems p(DType::kBF16, 1, 150, 1, 24, 20);
  const Results whole = Run(p.Views());
  const Results first = Run(p.Tokens(0, 64, p.initial.view())), second = Run(p.Tokens(64, 150, first.state.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(1, 0, 64), first.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(1, 64, 150), second.o.view()));
  EXPECT_TRUE(SameBits(whole.state.view(), second.state.view()));
}

TEST_P(CudaRecurrenceTest, PackedSequencesHaveTheirBitsAndOtherTokensAreZero) {
  const Problems p(DType::kBF16, 1, 400, 2, 24, 20);
  const int32_t bounds[] = {0, 30, 30, 370};
  Options options;
  options.cu_seqlens = ConstTensorView(bounds, DType::kI32, {4});
  Inputs in = p.Views();
  in.initial.S = {};
  const Results packed = Run(in, options);
  const Results alone = Run(p.Tokens(30, 370, {}));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.o.view()).Slice(1, 30, 370), alone.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.state.view()).Slice(0, 2, 3), alone.state.view()));
  for (int64_t t = 370; t < 400; ++t) {
    for (int64_t e = 0; e < 20; ++e) ASSERT_EQ(packed.o.Get({0, t, 1, e}), 0) << t;
  }
}

TEST_P(CudaRecurrenceTest, ManySequencesAreSeveralLaunches) {
  const Problems p(DType::kBF16, 1, 150, 1, 8, 8);
  std::vector<int32_t> bounds;
  for (int32_t i = 0; i <= 75; ++i) bounds.push_back(2 * i);
  Options options;
  options.cu_seqlens = ConstTensorView(bounds.data(), DType::kI32, {76});
  Inputs in = p.Views();
  in.initial.S = {};
  const Results packed = Run(in, options);
  const Results alone = Run(p.Tokens(146, 148, {}));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.o.view()).Slice(1, 146, 148), alone.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(packed.state.view()).Slice(0, 73, 74), alone.state.view()));
}

TEST_P(CudaRecurrenceTest, WhatIsNotFiniteReachesNoTokenBefore) {
  const Problems p(DType::kBF16, 1, 50, 1, 24, 20);
  const Results before = Run(p.Views());
  p.v.Set({0, 37, 0, 3}, std::numeric_limits<double>::infinity());
  const Results after = Run(p.Views());
  for (int64_t t = 0; t < 50; ++t) {
    for (int64_t e = 0; e < 20; ++e) {
      const double x = after.o.Get({0, t, 0, e});
      if (t < 37 || e != 3) {
        ASSERT_NEAR(x, before.o.Get({0, t, 0, e}), 1e-6 + 0.01 * std::abs(x)) << t << " " << e;
      } else {
        ASSERT_FALSE(std::isfinite(x)) << t << " " << e;
      }
    }
  }
  // A NaN decay reaches every later output.
  p.v.Set({0, 37, 0, 3}, 0);
  p.log_decay.Set({0, 20, 0}, std::numeric_limits<double>::quiet_NaN());
  const Results nan = Run(p.Views());
  for (int64_t t = 0; t < 50; ++t) EXPECT_EQ(std::isnan(nan.o.Get({0, t, 0, 1})), t >= 20) << t;
}

TEST_P(CudaRecurrenceTest, DecaysThatForgetAndThatGrow) {
  // A log decay of -infinity clears the state; one above 0 counts as 0.
  const Problems p(DType::kBF16, 1, 90, 1, 24, 20);
  p.log_decay.Set({0, 70, 0}, -std::numeric_limits<double>::infinity());
  p.log_decay.Set({0, 75, 0}, 3);
  const Results results = Run(p.Views());
  const Problems growing(DType::kBF16, 1, 90, 1, 24, 20);
  growing.log_decay.Set({0, 70, 0}, -1e30);
  growing.log_decay.Set({0, 75, 0}, 0);
  const Results expected = Run(growing.Views());
  EXPECT_TRUE(SameBits(results.o.view(), expected.o.view()));
  const Results fresh = Run(p.Tokens(70, 90, {}));
  for (int64_t t = 70; t < 90; ++t) {
    for (int64_t e = 0; e < 20; ++e) {
      const double x = fresh.o.Get({0, t - 70, 0, e});
      ASSERT_NEAR(results.o.Get({0, t, 0, e}), x, 1e-3 + 0.01 * std::abs(x)) << t << " " << e;
    }
  }
}

// An mLSTM of one head in f32, with its memory.
struct GatedProblem {
  static constexpr int64_t kSize = 3;

  explicit GatedProblem(int64_t T)
      : q(DType::kF32, {1, T, 1, kSize}), k(DType::kF32, {1, T, 1, kSize}), v(DType::kF32, {1, T, 1, kSize}),
        i(DType::kF32, {1, T, 1}), f(DType::kF32, {1, T, 1}) {
    uint64_t seed = 1;
    for (const Buffer* buffer : {&q, &k, &v, &i, &f}) buffer->FillNormal(++seed);
  }
  struct Results {
    explicit Results(int64_t T)
        : o(DType::kF32, {1, T, 1, kSize}), S(DType::kF32, {1, 1, kSize, kSize}), z(DType::kF32, {1, 1, kSize}),
          m(DType::kF32, {1, 1}) {}
    Buffer o, S, z, m;
  };
  // Computes tokens [begin, end), from a state or from zeros.
  Results Run(Context& ctx, const TestDevice& device, int64_t begin, int64_t end,
              const Results* before = nullptr) const {
    Results results(end - begin);
    const auto tokens = [&](const Buffer& buffer) {
      return DeviceTensor(device, ConstTensorView(buffer.view()).Slice(1, begin, end));
    };
    const auto state = [&](const Buffer& buffer) { return DeviceTensor(device, buffer.view()); };
    const Results& initial = before == nullptr ? results : *before;
    const DeviceTensor dq = tokens(q), dk = tokens(k), dv = tokens(v), di = tokens(i), df = tokens(f),
                       S = state(initial.S), z = state(initial.z), m = state(initial.m), o = state(results.o),
                       last_S = state(results.S), last_z = state(results.z), last_m = state(results.m);
    mlstm::Inputs in = {{dq.view(), dk.view(), dv.view(), di.view(), df.view()}, {}};
    if (before != nullptr) in.initial = {S.view(), z.view(), m.view()};
    mlstm::Forward(ctx, in, {}, {o.view(), {last_S.view(), last_z.view(), last_m.view()}});
    o.Download(results.o.view());
    last_S.Download(results.S.view());
    last_z.Download(results.z.view());
    last_m.Download(results.m.view());
    return results;
  }
  Buffer q, k, v, i, f;
};

TEST_P(CudaRecurrenceTest, MaximaOfGatesHaveTheirBitsWhereSequencesAreSplit) {
  const GatedProblem p(150);
  p.f.FillConstant(5);
  const GatedProblem::Results whole = p.Run(ctx_, *GetParam(), 0, 150), first = p.Run(ctx_, *GetParam(), 0, 64),
                              second = p.Run(ctx_, *GetParam(), 64, 150, &first);
  EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(1, 0, 64), first.o.view()));
  EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(1, 64, 150), second.o.view()));
  EXPECT_TRUE(SameBits(whole.S.view(), second.S.view()));
  EXPECT_TRUE(SameBits(whole.z.view(), second.z.view()));
  EXPECT_TRUE(SameBits(whole.m.view(), second.m.view()));
}

TEST_P(CudaRecurrenceTest, NearlyOpenGatesForgetBesideALargeMaximum) {
  constexpr int64_t kTokens = 130;
  const double forgets = 1e-5;
  const GatedProblem p(kTokens);
  p.i.FillConstant(-1e4);
  p.i.Set({0, 0, 0}, 1000);  // one token dominates
  p.f.FillConstant(std::log(1 / forgets));
  const GatedProblem::Results results = p.Run(ctx_, *GetParam(), 0, kTokens);
  const double left = std::exp(-forgets * (kTokens - 1)), relative = std::exp(results.m.Get({0, 0}) - 1000);
  for (int64_t e = 0; e < GatedProblem::kSize; ++e) {
    const double expected = p.k.Get({0, 0, 0, e}) * p.v.Get({0, 0, 0, 1}) * left;
    EXPECT_NEAR(results.S.Get({0, 0, e, 1}) * relative, expected, 1e-5 * std::abs(expected)) << e;
  }
}

TEST_P(CudaRecurrenceTest, EachTensorMayBeginAnywhere) {
  for (const int unaligned : {0, 1, 2, 3, 4, 5}) {
    const DType dtype = unaligned < 3 ? DType::kBF16 : DType::kF32;
    Problems p(dtype, 1, 40, 1, 64, 64);
    const Results expected = Run(p.Views());
    Inputs in = p.Views();
    ConstTensorView* const views[] = {&in.q, &in.k, &in.v};
    ConstTensorView& view = *views[unaligned % 3];
    const Buffer moved(dtype, view.sizes(), view.strides(), Placement::kAligned, /*gap=*/1);
    std::vector<int64_t> at(4, 0);
    do {
      SetElement(moved.view(), at, GetElement(view, at));
    } while (NextIndex(view.sizes(), at));
    view = moved.view();
    EXPECT_TRUE(SameBits(Run(in).o.view(), expected.o.view())) << unaligned;
  }
}

TEST_P(CudaRecurrenceTest, ExplainNamesTheKernel) {
  const Problems p(DType::kBF16, 1, 4, 1, 24, 20);
  const DeviceTensor q(*GetParam(), p.q.view()), k(*GetParam(), p.k.view()), v(*GetParam(), p.v.view()),
      log_decay(*GetParam(), p.log_decay.view());
  const Inputs in = {{q.view(), k.view(), v.view(), log_decay.view()}, {}};
  const recurrent::Explanation e = simple_gla::Explain(ctx_, in, {});
  EXPECT_EQ(e.kernel, "recurrence_cuda");
  EXPECT_EQ(e.target, "cuda");
  EXPECT_EQ(e.workspace_bytes, 0);
}

TEST_P(CudaRecurrenceTest, WhatItDoesNotTakeIsSaid) {
  for (const char* name : {"based"}) {
    const recurrent::Mechanism& m = *FindOp(name).recurrent;
    const Case c = recurrent::MakeCase(Moved(*GetParam(), m.of_problems), m.definition,
                                       {.sizes = {1, 4, 4, 1, 1, 8, 8}, .dtype = DType::kBF16, .variant = ""});
    EXPECT_THAT(Refusal<Unsupported>([&] { Compare(c, ctx_); }), HasSubstr("recurrence_cuda computes")) << name;
  }
  const auto refusal = [&](DType dtype, int64_t K) {
    const Problems p(dtype, 1, 4, 1, K, 8);
    return Refusal<Unsupported>([&] { Run(p.Views()); });
  };
  EXPECT_THAT(refusal(DType::kF64, 8), HasSubstr("recurrence_cuda computes f32, bf16 and f16, not f64"));
  EXPECT_EQ(refusal(DType::kBF16, 257), "nothing is thrown");
  const recurrent::Mechanism& delta = *FindOp("delta_rule").recurrent;
  const Case wide = recurrent::MakeCase(Moved(*GetParam(), delta.of_problems), delta.definition,
                                        {.sizes = {1, 4, 4, 1, 1, 129, 8}, .dtype = DType::kBF16, .variant = ""});
  EXPECT_THAT(Refusal<Unsupported>([&] { Compare(wide, ctx_); }),
              HasSubstr("computes delta rules of up to 128 key channels"));
}

TEST_P(CudaRecurrenceTest, TensorsOfSeveralDevicesAreRefused) {
  const TestDevice& device = *GetParam();
  const Problems p(DType::kBF16, 1, 4, 1, 8, 8);
  const Buffer o(DType::kBF16, {1, 4, 1, 8});
  const DeviceTensor q(device, p.q.view()), k(device, p.k.view()), v(device, p.v.view()),
      log_decay(device, p.log_decay.view()), initial(device, p.initial.view()), device_o(device, o.view());
  const Inputs good = {{q.view(), k.view(), v.view(), log_decay.view()}, {initial.view()}};
  const auto refusal = [&](const Inputs& in, const TensorView& to) {
    const std::string what = Refusal<InvalidArgument>([&] { simple_gla::Forward(ctx_, in, {}, {to, {}}); });
    device_o.Download(o.view());
    for (const uint8_t byte : o.bytes()) EXPECT_EQ(byte, 0xFF);
    return what;
  };
  EXPECT_THAT(refusal(good, o.view()), HasSubstr("o is on the CPU, expected cuda:0"));
  const auto with = [&](ConstTensorView Inputs::* member, const Buffer& host) {
    Inputs in = good;
    in.*member = host.view();
    return in;
  };
  EXPECT_THAT(refusal(with(&Inputs::q, p.q), device_o.view()), HasSubstr("k is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal(with(&Inputs::k, p.k), device_o.view()), HasSubstr("k is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal(with(&Inputs::log_decay, p.log_decay), device_o.view()),
              HasSubstr("log_decay is on the CPU, expected cuda:0"));
  Inputs of_host_state = good;
  of_host_state.initial.S = p.initial.view();
  EXPECT_THAT(refusal(of_host_state, device_o.view()), HasSubstr("initial_state is on the CPU, expected cuda:0"));
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaRecurrenceTest, testing::ValuesIn(Devices()), NameOf);

}  // namespace
}  // namespace heed
