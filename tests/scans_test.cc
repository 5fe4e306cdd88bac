// Properties of scans that comparison with their references cannot show: bits, edges, memory, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/unfair_executor.h"
#include "tests/scan_call.h"

namespace heed::scanning {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

using Parameter = std::tuple<size_t, DType>;
std::string NameOf(const testing::TestParamInfo<Parameter>& info) {
  return std::string(kMechanisms[std::get<0>(info.param)].name) + "_" + Name(std::get<1>(info.param));
}
class Scans : public testing::TestWithParam<Parameter> {
 protected:
  const ScanFunctions& m() const { return kMechanisms[std::get<0>(GetParam())]; }
  DType dtype() const { return std::get<1>(GetParam()); }
  ScanCall Make(const AxisSizes& sizes, Layout layout = Layout::kRows, int64_t sequences = -1, int rank = 4) const {
    return ScanCall(m(), dtype(), sizes, layout, sequences, rank);
  }
  Context ctx_{2};
};
INSTANTIATE_TEST_SUITE_P(AllOps, Scans,
                         testing::Combine(testing::Values(0, 1, 2, 3, 4),
                                          testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16)),
                         NameOf);

// All mechanisms but s4d and h3, whose parts agree to rounding only.
class SplitScans : public Scans {};
INSTANTIATE_TEST_SUITE_P(AllOps, SplitScans,
                         testing::Combine(testing::Values(0, 1, 2),
                                          testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16)),
                         NameOf);

TEST_P(Scans, BitsDoNotDependOnThreads) {
  for (const AxisSizes& sizes : {AxisSizes{2, 300, 150, 16, 2}, {9, 70, 33, 5, 1}}) {
    Context single(1);
    const ScanCall one = Make(sizes).Both(single);
    for (const int threads : {2, 3, 8}) {
      UnfairExecutor executor(threads, 5);
      Context unfair(executor.executor());
      ExpectSameBits(one, Make(sizes).Both(unfair));
    }
  }
}

TEST_P(Scans, BitsDoNotDependOnWhatIsContiguous) {
  for (const std::string& target : AvailableTargets()) {
    ctx_.set_isa(target);
    for (const AxisSizes& sizes :
         {AxisSizes{2, 1, 70, 3, 1}, {2, 66, 1, 16, 1}, {1, 38, 130, 17, 2}, {2, 21, 7, 4, 3}}) {
      for (const int rank : {2, 4}) {
        const ScanCall rows = Make(sizes, Layout::kRows, -1, rank).Both(ctx_);
        ExpectSameBits(rows, Make(sizes, Layout::kColumns, -1, rank).Both(ctx_));
        ScanCall mixed = Make(sizes, Layout::kNeither, -1, rank);
        mixed.o = rows.o;
        ExpectSameBits(rows, mixed.Both(ctx_));
      }
    }
  }
}

// Outputs, states and the gradients of both and of tokens have the same bits wherever a sequence is split. Gradients of
// constants are sums, and so are dB and dC over 128 tokens.
TEST_P(SplitScans, ASplitSequenceHasTheSameBits) {
  const AxisSizes sizes = {2, 34, 150, 16, 1};
  const ScanCall whole = Make(sizes).Both(ctx_);
  for (const int64_t split : {1, 16, 77, 128, 149}) {
    const ScanCall parts = Make(sizes);
    const StateBuffers& state = parts.states[0];
    const Shape shape(state.final.view().sizes().begin(), state.final.view().sizes().end());
    const DType wide = state.final.view().dtype();
    const auto run = [&](int64_t first, int64_t n, bool forward, const Buffer& before, const Buffer& after) {
      CallInputs in = {.table = m().definition.table};
      CallResults out;
      out.gradients.resize(parts.inputs.size());
      for (size_t i = 0; i < parts.inputs.size(); ++i) {
        in.tensors.push_back(parts.Part(parts.inputs[i], i, first, n));
        if (parts.axes[i].find('T') == std::string::npos) continue;
        out.gradients[i] = parts.Part(parts.results[i], i, first, n);
      }
      in.initial = {before.view()};
      if (forward) {
        const std::vector<TensorView> final = {after.view()};
        return m().forward(ctx_, in, {}, {parts.Part(parts.o, 0, first, n), final});
      }
      const Buffer d_before(wide, shape);
      in.d_o = parts.Part(parts.d_o, 0, first, n);
      in.d_final = {after.view()};
      out.states = {d_before.view()};
      m().backward(ctx_, in, {}, out);
      Copy(d_before.view(), state.dinitial.view());
    };
    const Buffer middle(wide, shape), kept(wide, shape);
    run(0, split, true, state.initial, middle);
    run(split, sizes.T - split, true, middle, state.final);
    run(split, sizes.T - split, false, middle, state.d_final);
    Copy(state.dinitial.view(), kept.view());
    run(0, split, false, state.initial, kept);
    EXPECT_TRUE(SameBits(whole.o.view(), parts.o.view())) << split;
    EXPECT_TRUE(SameBits(whole.states[0].final.view(), state.final.view())) << split;
    EXPECT_TRUE(SameBits(whole.states[0].dinitial.view(), state.dinitial.view())) << split;
    for (size_t i = 0; i < parts.results.size(); ++i) {
      if (parts.axes[i].size() != 3) continue;  // constants, B and C
      EXPECT_TRUE(SameBits(whole.results[i].view(), parts.results[i].view()))
          << split << m().definition.table.tensors[i].name;
    }
  }
}

TEST_P(Scans, PaddedAndPackedSequencesHaveTheBitsOfOneAlone) {
  constexpr int64_t n = 140, D = 37;
  const ScanCall alone = Make({1, D, n, 6, 1}).Both(ctx_);
  const auto check = [&](ScanCall& into, int64_t b, int64_t first, int64_t sequence) {
    const auto part = [&](const Buffer& buffer, size_t i) { return into.Part(buffer, i, first, n).Slice(0, b, b + 1); };
    const auto of_state = [&](const Buffer& buffer) { return buffer.view().Slice(0, sequence, sequence + 1); };
    for (size_t i = 0; i < into.inputs.size(); ++i) {
      const bool constant = into.axes[i].find('T') == std::string::npos;
      Copy(alone.inputs[i].view(), constant ? into.inputs[i].view() : part(into.inputs[i], i));
    }
    Copy(alone.d_o.view(), part(into.d_o, 0));
    for (size_t i = 0; i < into.states.size(); ++i) {
      Copy(alone.states[i].initial.view(), of_state(into.states[i].initial));
      Copy(alone.states[i].d_final.view(), of_state(into.states[i].d_final));
    }
    into.Both(ctx_);
    EXPECT_TRUE(SameBits(alone.o.view(), part(into.o, 0)));
    for (size_t i = 0; i < into.states.size(); ++i) {
      const StateBuffers &one = alone.states[i], &other = into.states[i];
      EXPECT_TRUE(SameBits(one.final.view(), of_state(other.final))) << one.tensor.name;
      EXPECT_TRUE(SameBits(one.dinitial.view(), of_state(other.dinitial))) << one.tensor.name;
    }
    for (size_t i = 0; i < into.results.size(); ++i) {
      if (into.axes[i].find('T') == std::string::npos) continue;
      EXPECT_TRUE(SameBits(alone.results[i].view(), part(into.results[i], i))) << m().definition.table.tensors[i].name;
    }
  };
  ScanCall padded = Make({3, D, 160, 6, 1});
  const int64_t lengths[] = {50, 149, 160}, starts[] = {0, 9, 160};
  padded.options.lengths = {lengths, DType::kI64, {3}};
  padded.options.starts = {starts, DType::kI64, {3}};
  check(padded, 1, 9, 1);
  ScanCall packed = Make({1, D, 190, 6, 1}, Layout::kColumns, 4);
  const int32_t bounds[] = {0, 30, 170, 170, 190};
  packed.options.cu_seqlens = {bounds, DType::kI32, {5}};
  check(packed, 0, 30, 1);
  // The empty sequence passes its state through, and its gradient back.
  for (const StateBuffers& state : packed.states) {
    const auto empty = [](const Buffer& buffer) { return buffer.view().Slice(0, 2, 3); };
    EXPECT_TRUE(SameBits(empty(state.final), empty(state.initial)));
    EXPECT_TRUE(SameBits(empty(state.dinitial), empty(state.d_final)));
  }
}

TEST_P(Scans, TokensThatDoNotCountAreZeroAndNeverRead) {
  for (const Layout layout : {Layout::kRows, Layout::kColumns, Layout::kNeither}) {
    for (const bool reverse : {false, true}) {
      ScanCall call = Make({2, 19, 60, 5, 1}, layout);
      const int64_t lengths[] = {53, 0}, starts[] = {5, 0};
      call.options.lengths = {lengths, DType::kI64, {2}};
      call.options.starts = {starts, DType::kI64, {2}};
      call.options.reverse = reverse;
      const auto counts = [&](const std::string& axes, const Shape& at) {
        const int64_t t = at[axes.find('T')];
        return t >= starts[at[0]] && t < lengths[at[0]];
      };
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        if (call.axes[i].find('T') == std::string::npos) continue;
        ForEach(call.inputs[i], [&](const Shape& at) {
          if (!counts(call.axes[i], at)) SetElement(call.inputs[i].view(), at, kNaN);
        });
      }
      ForEach(call.d_o, [&](const Shape& at) {
        if (!counts(call.axes[0], at)) SetElement(call.d_o.view(), at, kNaN);
      });
      call.Both(ctx_);
      const auto expect = [&](const Buffer& buffer, const std::string& axes, const char* name) {
        ForEach(buffer, [&](const Shape& at) {
          const double value = GetElement(buffer.view(), at);
          ASSERT_FALSE(std::isnan(value)) << name;
          const bool counted = axes.find('T') == std::string::npos || counts(axes, at);
          ASSERT_TRUE(counted || value == 0) << name;
        });
      };
      expect(call.o, call.axes[0], "o");
      for (const StateBuffers& state : call.states) {
        expect(state.final, state.tensor.axes, "state");
        expect(state.dinitial, state.tensor.axes, "dinitial_state");
      }
      for (size_t i = 0; i < call.results.size(); ++i) {
        expect(call.results[i], call.axes[i], m().definition.table.tensors[i].name);
      }
    }
  }
}

TEST_P(Scans, NoTokensPassStatesThroughAndGiveNoGradients) {
  const ScanCall call = Make({2, 5, 0, 4, 1}).Both(ctx_);
  for (const StateBuffers& state : call.states) {
    EXPECT_TRUE(SameBits(state.final.view(), state.initial.view()));
    EXPECT_TRUE(SameBits(state.dinitial.view(), state.d_final.view()));
  }
  for (const Buffer& result : call.results) {
    ForEach(result, [&](const Shape& at) { EXPECT_EQ(GetElement(result.view(), at), 0); });
  }
  Make({0, 5, 7, 4, 1}).Both(ctx_);
  const ScanCall empty = Make({2, 0, 7, 4, 1}).Both(ctx_);
  for (const Buffer& result : empty.results) {
    ForEach(result, [&](const Shape& at) { EXPECT_EQ(GetElement(result.view(), at), 0); });
  }
}

// A size of 0 is known: no later tensor may have another one.
TEST_P(Scans, NoTokensInOneTensorAreNoneInAll) {
  const ScanCall call = Make({2, 5, 0, 4, 1}), other = Make({2, 5, 3, 4, 1});
  CallInputs in = call.Views();
  const auto second = std::ranges::find_if(call.axes.begin() + 1, call.axes.end(),
                                           [](const std::string& axes) { return axes.find('T') != std::string::npos; });
  if (second == call.axes.end()) return;  // s4d has one tensor over tokens
  const auto i = static_cast<size_t>(second - call.axes.begin());
  in.tensors[i] = other.Views().tensors[i];
  EXPECT_THAT(
      [&] { m().forward(ctx_, in, {}, call.WhatIsWritten()); },
      ThrowsMessage<InvalidArgument>(HasSubstr(std::string(m().definition.table.tensors[i].name) + " has shape")));
}

// A NaN stays in its channel or, for mechanisms with heads, in its head, some of whose channels it may never reach.
TEST_P(Scans, ANaNStaysInItsChannel) {
  for (const std::string& target : AvailableTargets()) {
    ctx_.set_isa(target);
    for (size_t i = 0; i < m().definition.table.tensors.size(); ++i) {
      ScanCall call = Make({1, 40, 50, 16, 1});
      if (call.axes[i] == "BGNT") continue;  // of all channels
      Shape index;
      const bool heads = m().definition.rule == scan::Rule::kHeads;
      for (const char axis : call.axes[i]) {
        const int64_t channel = heads ? 3 * 7 + 1 : 7;
        index.push_back(axis == 'D' ? channel : axis == 'H' ? 7 : axis == 'd' ? 1 : axis == 'T' ? 30 : 0);
      }
      SetElement(call.inputs[i].view(), index, kNaN);
      call.Forward(ctx_);
      const bool over_tokens = call.axes[i].find('T') != std::string::npos;
      const std::string_view name = m().definition.table.tensors[i].name;
      const bool is_gate = name == "z" || name == "q";
      const size_t channel = call.axes[0].find(heads ? 'H' : 'D'), token = call.axes[0].find('T');
      ForEach(call.o, [&](const Shape& at) {
        const bool later = !over_tokens || (is_gate ? at[token] == 30 : at[token] >= 30);
        const bool met = name != "v" || at.back() == 1;
        ASSERT_EQ(std::isnan(GetElement(call.o.view(), at)), at[channel] == 7 && later && met)
            << m().definition.table.tensors[i].name << ShapeString(at);
      });
    }
  }
}

TEST_P(Scans, ExtremesStayFinite) {
  const bool half = dtype() == DType::kF16;
  for (const std::string& target : AvailableTargets()) {
    ctx_.set_isa(target);
    for (const double extreme : {0.0, -1e-7, -1e4, half ? -6e4 : -1e30, -kInfinity}) {
      ScanCall call = Make({1, 20, 40, 5, 1});
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        const std::string_view name = m().definition.table.tensors[i].name;
        const bool decays = name == "A" || name == "log_decay";
        const bool gates = name == "z" || name == "input_gate" || name == "recurrence_gate";
        if (!decays && (!gates || std::isinf(extreme))) continue;
        ForEach(call.inputs[i], [&](const Shape& at) {
          if (at.back() % 3 == 0) SetElement(call.inputs[i].view(), at, extreme);
          if (gates && at.back() % 3 == 1) SetElement(call.inputs[i].view(), at, -extreme);
        });
      }
      // The silu gate would multiply the result by a very large factor.
      if (m().definition.rule == scan::Rule::kSelective && extreme < (half ? -100 : -1e4)) {
        ForEach(call.inputs[6], [&](const Shape& at) { SetElement(call.inputs[6].view(), at, 1); });
      }
      call.Both(ctx_);
      for (const auto& [name, buffer] : call.Written()) {
        if (half && name == "dA") continue;  // sums that float16 cannot hold
        ForEach(buffer, [&](const Shape& at) {
          ASSERT_TRUE(std::isfinite(GetElement(buffer.view(), at))) << name << ShapeString(at) << extreme;
        });
      }
    }
  }
}

TEST_P(Scans, GradientsThatAreNotAskedForChangeNoOthers) {
  const AxisSizes sizes = {2, 70, 150, 5, 2};
  const ScanCall all = Make(sizes).Both(ctx_);
  for (size_t only = 0; only <= all.results.size(); ++only) {
    const ScanCall one = Make(sizes);
    CallResults out;
    if (only < all.results.size()) {
      const Tensor& tensor = m().definition.table.tensors[only];
      out.gradients.resize(all.results.size());
      out.gradients[only] = one.results[only].view();
      m().backward(ctx_, one.Views(), {}, out);
      EXPECT_TRUE(SameBits(all.results[only].view(), one.results[only].view())) << tensor.name;
    } else {
      const StateBuffers& state = one.states.back();
      out.states.resize(one.states.size());
      out.states.back() = state.dinitial.view();
      m().backward(ctx_, one.Views(), {}, out);
      EXPECT_TRUE(SameBits(all.states.back().dinitial.view(), state.dinitial.view()));
    }
  }
}

// The width of a column block, which has four vectors of channels.
int64_t BlockWidth(std::string_view target, int64_t element_bytes) {
  int64_t vector_bytes = 16;
  if (target == "AVX2") {
    vector_bytes = 32;
  } else if (target.starts_with("AVX") || target == "tiles") {
    vector_bytes = 64;
  }
  return 4 * vector_bytes / element_bytes;
}

// Upper bounds of the workspace in bytes, for elements of E bytes in column blocks of W channels. The selective scan
// stores dB and dC of all tokens between blocks, unless B and C are constants, which have two axes.
struct Formula {
  int64_t forward, backward;
};
Formula FormulaOf(scan::Rule rule, const ScanCall& call, const AxisSizes& sizes, int rank, int64_t threads, int64_t E,
                  int64_t W) {
  const int64_t N = (sizes.N + 15) / 16 * 16, T = sizes.T, tiles = (T + 15) / 16;
  const int64_t S = sizes.B * T, few = 8 << 10, D = sizes.D;
  const int64_t modes_forward = E * (T + 76 * N + 96) + 64 * N + 1024;
  const int64_t modes_backward = E * (2 * T + 160 * N + 192) + 192 * N + 2048;
  switch (rule) {
    case scan::Rule::kSelective:
      return {threads * (E * W * (35 * N + 80) + few),
              threads * (E * W * (tiles + 20) * N + 8 * W * (4 * N + 2) + (16 << 10) + E * N * (288 + 1056) + few) +
                  8 * D * (4 * N + 2) + (rank == 2 ? 0 : S * sizes.G * 2 * E * N + S * sizes.G / 32) + few};
    case scan::Rule::kModes:
      return {threads * (modes_forward + 40 * E * N + few), threads * (modes_backward + E * N * (T / 4 + 96) + few)};
    case scan::Rule::kHeads: {
      const int64_t d = call.sizes.d, w = call.sizes.W, P = T + 2 * w + 192, R = 16 + d, heads = R / d;
      return {threads * (E * (4 * R * P + R * (w + 16)) + 40 * E * N + few + heads * modes_forward),
              threads * (E * (8 * R * P + R * (w + 16) + P) + 8 * R * (w + 1) + heads * modes_backward +
                         E * N * (T / 4 + 96) + few)};
    }
    default: return {threads * (96 * E * W + few), threads * (E * W * (4 * tiles + 128) + few) + 8 * D + few};
  }
}

// The formula is an upper bound, and at most eight times too large, on any target's vectors.
TEST_P(Scans, MemoryIsWithinItsFormula) {
  const int64_t E = dtype() == DType::kF64 ? 8 : 4;
  for (const AxisSizes& sizes : {AxisSizes{2, 300, 1000, 16, 1}, {3, 64, 77, 5, 1}, {1, 96, 5000, 40, 3}}) {
    for (const int rank : {2, 4}) {
      const ScanCall call = Make(sizes, Layout::kRows, -1, rank);
      for (const std::string& target : AvailableTargets()) {
        for (const int threads : {1, 4}) {
          Context ctx(threads);
          ctx.set_isa(target);
          const Formula most = FormulaOf(m().definition.rule, call, sizes, rank, threads, E, BlockWidth(target, E));
          EXPECT_LE(m().workspace(ctx, call.Views()), most.forward) << target;
          EXPECT_LE(m().backward_workspace(ctx, call.Views()), most.backward) << target;
          EXPECT_GT(8 * m().backward_workspace(ctx, call.Views()), most.backward) << target;
        }
      }
    }
  }
}

TEST_P(Scans, ErrorsNameTheArgumentAndNothingIsWritten) {
  if (dtype() != DType::kF32) return;
  const AxisSizes sizes = {2, 4, 9, 3, 2};
  const Tensor& first = m().definition.table.tensors[0];
  const auto expect = [&](const std::function<void(CallInputs&, Options&, CallResults&, CallResults&)>& spoil,
                          const std::string& message, bool backward = false) {
    const ScanCall call = Make(sizes);
    CallInputs in = call.Views();
    Options options;
    CallResults out = call.WhatIsWritten(), gradients = call.Gradients();
    spoil(in, options, out, gradients);
    Context ctx(1);
    EXPECT_THAT(
        [&] {
          if (backward) m().backward(ctx, in, options, gradients);
          if (!backward) m().forward(ctx, in, options, out);
        },
        ThrowsMessage<InvalidArgument>(
            AllOf(HasSubstr(std::string(m().name) + (backward ? "::Backward: " : "::Forward: ")), HasSubstr(message))));
    for (const auto& [name, buffer] : call.Written()) {
      for (const uint8_t byte : buffer.bytes()) ASSERT_EQ(byte, 0xFF) << name << message;
    }
  };
  const Buffer other(DType::kF32, {2, 4, 8}), wide(DType::kF64, {2, 4, 3});
  const int64_t long_lengths[] = {9, 10}, negative[] = {-1, 0}, bounds[] = {0, 5, 9};
  const std::string x = first.name;
  const auto of_state = [&](const char* name) {
    return name + std::string(m().definition.table.states.size() > 1 ? ".S" : "");
  };
  expect([&](auto& in, auto&, auto&, auto&) { in.tensors[0] = {}; }, x + " is absent, expected a tensor");
  expect([&](auto& in, auto&, auto&, auto&) { in.tensors[0] = in.tensors[0].Slice(0, 0, 1).Slice(1, 0, 0); },
         "has shape");
  expect([&](auto& in, auto&, auto&, auto&) { in.tensors[0] = {negative, DType::kI64, {2, 1, 1}}; },
         x + " has dtype i64, expected f64, f32, bf16 or f16");
  expect([&](auto& in, auto&, auto&, auto&) { in.initial.back() = other.view(); },
         of_state("initial_state") + " has shape [2,4,8], expected [2,");
  expect([&](auto& in, auto&, auto&,
             auto&) { in.initial.back() = {wide.view().data(), DType::kF64, in.initial.back().sizes()}; },
         of_state("initial_state") + " has dtype f64, expected f32");
  expect([&](auto&, auto& options, auto&, auto&) { options.lengths = {long_lengths, DType::kI64, {2}}; },
         "lengths[1] is 10, expected 0 to T = 9");
  expect([&](auto&, auto& options, auto&, auto&) { options.starts = {negative, DType::kI64, {2}}; },
         "starts[0] is -1, expected 0 to T = 9");
  expect([&](auto&, auto& options, auto&, auto&) { options.cu_seqlens = {bounds, DType::kI64, {3}}; },
         x + " has shape");
  expect([&](auto&, auto&, auto& out, auto&) { out.o = {}; }, "o is absent, expected a tensor");
  expect([&](auto&, auto&, auto& out, auto&) { out.o = other.view(); }, "o has shape [2,4,8], expected");
  expect([&](auto& in, auto&, auto& out,
             auto&) { out.o = {const_cast<void*>(in.tensors[0].data()), DType::kF32, in.tensors[0].sizes()}; },
         "o overlaps " + x + ", expected memory of its own");
  expect(
      [&](auto& in, auto&, auto& out, auto&) {
        out.states.back() = {const_cast<void*>(in.initial.back().data()), DType::kF32, in.initial.back().sizes()};
      },
      of_state("final_state") + " overlaps " + of_state("initial_state") + ", expected memory of its own");
  expect([&](auto& in, auto&, auto&, auto&) { in.d_o = {}; }, "d_o is absent", true);
  expect([&](auto& in, auto&, auto&, auto&) { in.d_final.back() = other.view(); },
         of_state("d_state") + " has shape [2,4,8]", true);
  expect([&](auto& in, auto&, auto&,
             auto& out) { out.gradients[0] = {const_cast<void*>(in.d_o.data()), DType::kF32, in.d_o.sizes()}; },
         "d" + x + " overlaps d_o, expected memory of its own", true);
  for (const Tensor& tensor : m().definition.table.tensors) {
    if (!tensor.optional) continue;
    expect([&](auto& in, auto&, auto&, auto&) { in[tensor.name] = {}; },
           std::string("d") + tensor.name + " is asked for, expected none: there is no such input", true);
  }
}

TEST(SelectiveScanErrors, NameGroupsRatesAndSteps) {
  Context ctx(1), checking(1);
  checking.set_checks(true);
  const ScanCall call(kMechanisms[0], DType::kF32, {2, 4, 9, 3, 2});
  const auto message = [&](Context& context, const std::function<void(CallInputs&)>& spoil) -> std::string {
    CallInputs in = call.Views();
    spoil(in);
    try {
      kMechanisms[0].forward(context, in, {}, {call.o.view()});
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const Buffer three(DType::kF32, {2, 3, 3, 9});
  EXPECT_THAT(message(ctx, [&](CallInputs& in) { in["B"] = in["C"] = three.view(); }),
              HasSubstr("B has shape [2,3,3,9], expected [B, G, N, T], [B, N, T] or [D, N], N >= 1, "
                        "G >= 1 dividing D = 4, G = 3"));
  EXPECT_THAT(message(ctx, [&](CallInputs& in) { in["C"] = three.view(); }),
              HasSubstr("C has shape [2,3,3,9], expected [2,2,3,9]"));
  EXPECT_THAT(message(ctx, [&](CallInputs& in) { in["A"] = in["A"].Slice(1, 0, 0); }), HasSubstr("A has shape [4,0]"));
  for (const double value : {0.5, kNaN}) {
    const Buffer A(DType::kF32, {4, 3});
    A.FillConstant(-1);
    A.Set({2, 1}, value);
    EXPECT_EQ(message(ctx, [&](CallInputs& in) { in["A"] = A.view(); }), "");
    EXPECT_THAT(message(checking, [&](CallInputs& in) { in["A"] = A.view(); }),
                HasSubstr("A has an element " + std::string(std::isnan(value) ? "nan" : "0.5")));
  }
}

}  // namespace
}  // namespace heed::scanning
