// Recurrent mechanisms at their edges: extreme decays, gradients by differences and in parts, errors that name the
// wrong argument.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/error.h"
#include "tests/recurrent_call.h"

namespace heed::recurrent {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

INSTANTIATE_TEST_SUITE_P(AllOps, Recurrent, testing::ValuesIn(Parameters([](const Parameter&) { return true; })),
                         ParameterName);

class GatedRecurrent : public Recurrent {};
INSTANTIATE_TEST_SUITE_P(AllOps, GatedRecurrent, testing::ValuesIn(Parameters(&IsGated)), ParameterName);

class DoubleRecurrent : public Recurrent {};
INSTANTIATE_TEST_SUITE_P(AllOps, DoubleRecurrent,
                         testing::ValuesIn(Parameters([](const Parameter& p) { return p.dtype == DType::kF64; })),
                         ParameterName);

TEST_P(GatedRecurrent, ExtremeDecaysStayFinite) {
  for (const double decay : {0.0, -1e-6, -1e4, -std::numeric_limits<double>::infinity(), 5.0}) {
    Call call = Make(1, 130, 1, 1, 8, 8);
    const Buffer& decays = call.Input(call.Has("f") ? "f" : "log_decay");
    Call::ForEach(decays, [&](const Shape& at) {
      const bool here = at.size() <= 2 || at[1] % 5 == 0;
      if (here) SetElement(decays.view(), at, decay);
    });
    call.Both(ctx_);
    std::vector<const Buffer*> results = {&call.o, &call.final};
    for (const Buffer& gradient : call.gradients) results.push_back(&gradient);
    for (const Buffer* result : results) {
      Call::ForEach(*result,
                    [&](const Shape& at) { ASSERT_TRUE(std::isfinite(GetElement(result->view(), at))) << decay; });
    }
  }
}

TEST_P(GatedRecurrent, ChecksRefusePositiveAndNaNDecays) {
  Context checking(1);
  checking.set_checks(true);
  for (const double decay : {0.5, std::numeric_limits<double>::quiet_NaN()}) {
    const Call call = Make(1, 3, 1, 1, 4, 4);
    call.Forward(checking);                // all are negative
    if (!call.Has("log_decay")) continue;  // any gate is one
    const Buffer& decays = call.Input("log_decay");
    Shape last(decays.view().sizes().begin(), decays.view().sizes().end());
    for (int64_t& i : last) --i;
    SetElement(decays.view(), last, decay);
    EXPECT_THAT([&] { call.Forward(checking); }, ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has an element")));
    EXPECT_THROW(call.Backward(checking), InvalidArgument);
    call.Forward(ctx_);
  }
}

// Gradients by central differences of <d_o, o> + <d_state, state>, in f64. States are relative to m, which counts as a
// constant, except for eps in o.
TEST_P(DoubleRecurrent, GradientsAreDifferences) {
  for (const bool reverse : {false, true}) {
    Call call = Make(2, 70, 1, 2, 5, 6);
    const int64_t lengths[] = {70, 41}, starts[] = {3, 0};
    call.options.lengths = {lengths, DType::kI64, {2}};
    call.options.starts = {starts, DType::kI64, {2}};
    if (!call.m->definition.channels()) call.options.scale = 0.7;
    call.options.reverse = reverse;
    call.Both(ctx_);
    const Buffer m = call.has_m() ? Buffer(DType::kF64, call.final_m.view().sizes()) : Buffer();
    if (call.has_m()) Copy(call.final_m.view(), m.view());
    const auto loss = [&] {
      call.Forward(ctx_);
      double sum = 0;
      const auto dot = [&](const Buffer& a, const Buffer& b, bool is_state) {
        Call::ForEach(a, [&](const Shape& at) {
          double factor = 1;
          if (is_state && call.has_m()) {
            const Shape head = {at[0], at[1]};
            factor = std::exp(GetElement(call.final_m.view(), head) - GetElement(m.view(), head));
          }
          sum += factor * GetElement(a.view(), at) * GetElement(b.view(), at);
        });
      };
      dot(call.o, call.d_o, false);
      dot(call.final, call.d_state, true);
      if (call.has_z()) dot(call.final_z, call.d_z, true);
      return sum;
    };
    const double tolerance = call.has_m() ? 2e-5 : 1e-6;
    Random random(7);
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const auto& [name, input] = call.inputs[i];
      for (int sample = 0; sample < 25; ++sample) {
        Shape at;
        for (const int64_t size : input.view().sizes()) {
          at.push_back(random.Integer(0, size - 1));
        }
        const double x = GetElement(input.view(), at), h = 1e-5;
        SetElement(input.view(), at, x + h);
        const double above = loss();
        SetElement(input.view(), at, x - h);
        const double below = loss();
        SetElement(input.view(), at, x);
        const double expected = (above - below) / (2 * h);
        EXPECT_NEAR(GetElement(call.gradients[i].view(), at), expected, tolerance * std::max(1.0, std::abs(expected)))
            << "d" << name << ShapeString(at);
      }
    }
  }
}

TEST_P(Recurrent, GradientsThatAreNotAskedForChangeNoOthers) {
  const Call all = Make(1, 90, 1, 2, 16, 24);
  all.Backward(ctx_);
  for (size_t i = 0; i < all.inputs.size(); ++i) {
    const Call one = all.Again();
    const CallResults whole = one.GradientViews();
    CallResults out;
    const std::string& name = all.inputs[i].first;
    const size_t count = one.m->definition.table.tensors.size();
    if (i < count) {
      out.gradients.resize(count);
      out.gradients[i] = whole.gradients[i];
    } else {
      out.states = whole.states;
    }
    one.m->backward(ctx_, one.Views(), one.options, out);
    EXPECT_TRUE(SameBits(all.gradients[i].view(), one.gradients[i].view())) << name;
  }
}

TEST_P(Recurrent, BadArgumentsAreNamedAndNothingIsWritten) {
  const Call good = Make(2, 9, 2, 2, 4, 5);
  const auto expect = [&](const std::function<void(CallInputs&, Options&, CallResults&)>& spoil,
                          const std::string& message) {
    const Call call = good.Again();
    CallInputs in = call.Views();
    Options options;
    CallResults out = call.ResultViews();
    spoil(in, options, out);
    const std::vector<uint8_t> before(call.o.bytes().begin(), call.o.bytes().end());
    EXPECT_THAT([&] { call.m->forward(ctx_, in, options, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), call.o.bytes().begin()));
    const Call back = good.Again();
    const CallResults gradients = back.GradientViews();
    const bool output = message.rfind("o ", 0) == 0 || message.rfind("final", 0) == 0;
    if (!output) {
      EXPECT_THROW(back.m->backward(ctx_, in, options, gradients), InvalidArgument) << message;
    }
  };
  const std::string value = good.value_name();
  const std::string query = good.query_name();
  const std::span<const int64_t> of_queries = good.Input(query).view().sizes();
  Shape shape(of_queries.begin(), of_queries.end());
  const Buffer ints(DType::kI64, shape);
  shape.back() += 2;
  const Buffer wide(GetParam().dtype, shape);
  const std::span<const int64_t> sizes = good.Input(value).view().sizes();
  const auto values = [&](DType dtype, int64_t heads, int64_t size) {
    Shape other(sizes.begin(), sizes.end());
    other[other.size() - 2] = heads;
    other.back() = size;
    return Buffer(dtype, other);
  };
  const bool channels = good.m->definition.channels();  // [B, T, C]: no heads
  const int64_t tokens_or_heads = channels ? 9 : 4, width = sizes.back();
  const Buffer wide_values = values(GetParam().dtype, tokens_or_heads, width + 1);
  const Buffer other = values(GetParam().dtype == DType::kF64 ? DType::kF32 : DType::kF64, tokens_or_heads, width);
  expect([&](auto& in, auto&, auto&) { in[query] = {}; }, query + " is absent");
  expect([&](auto& in, auto&, auto&) { in[query] = in[query].Slice(0, 0, 1); }, "expected [1,9,");
  expect([&](auto& in, auto&, auto&) { in[query] = ints.view(); }, query + " has dtype i64");
  expect([&](auto& in, auto&, auto&) { in[value] = other.view(); }, value + " has dtype");
  expect([&](auto& in, auto&, auto&) { in[value] = wide_values.view(); }, "has shape");
  if (channels) {
    expect([&](auto& in, auto&, auto&) { in[query] = wide.view(); }, "k has shape [2,9,6]");
  } else {
    if (good.Has("k")) {
      expect([&](auto& in, auto&, auto&) { in["k"] = wide.view(); }, "k has shape [2,9,2,6]");
    }
    const Buffer three = values(GetParam().dtype, 3, 5);
    expect([&](auto& in, auto&, auto&) { in[value] = three.view(); }, value + " has 3 heads");
  }
  if (good.Has("log_decay")) {
    const std::span<const int64_t> of_decays = good.Input("log_decay").view().sizes();
    const Buffer decays(DType::kI64, Shape(of_decays.begin(), of_decays.end()));
    expect([&](auto& in, auto&, auto&) { in["log_decay"] = decays.view(); }, "log_decay has dtype i64");
  }
  if (good.Has("u")) {
    const std::span<const int64_t> of_bonuses = good.Input("u").view().sizes();
    const Buffer bonuses(DType::kI64, Shape(of_bonuses.begin(), of_bonuses.end()));
    expect([&](auto& in, auto&, auto&) { in["u"] = {}; }, "u is absent");
    expect([&](auto& in, auto&, auto&) { in["u"] = in["u"].Slice(0, 0, 2); }, "u has shape [2");
    expect([&](auto& in, auto&, auto&) { in["u"] = bonuses.view(); }, "u has dtype i64");
  }
  const Buffer state(DType::kF16, {2, 4, 4, 5});
  const std::span<const StateTensor> states = StatesOf(good.m->definition);
  const std::string name = std::string("state") + (states.size() > 1 ? "." + std::string(states[0].name) : "");
  expect([&](auto& in, auto&, auto&) { in.initial[0] = state.view(); }, "initial_" + name + " has dtype f16");
  expect([&](auto& in, auto&, auto&) { in.initial[0] = in.initial[0].Slice(0, 0, 1); },
         "initial_" + name + " has shape");
  expect([&](auto&, auto& options, auto&) { options.scale = INFINITY; }, channels ? "scale is given" : "scale is inf");
  const int64_t beyond[] = {9, 10}, negative[] = {-1, 9}, down[] = {0, 6, 5};
  expect([&](auto&, auto& options, auto&) { options.lengths = {beyond, DType::kI64, {2}}; },
         "lengths[1] is 10, expected 0 to T = 9");
  expect([&](auto&, auto& options, auto&) { options.starts = {negative, DType::kI64, {2}}; }, "starts[0] is -1");
  expect([&](auto&, auto& options, auto&) { options.lengths = {beyond, DType::kI64, {1}}; }, "lengths has shape [1]");
  expect([&](auto&, auto& options, auto&) { options.cu_seqlens = {down, DType::kI64, {3}}; }, "a leading axis of 1");
  expect([&](auto&, auto&, auto& out) { out.o = {}; }, "o is absent");
  expect([&](auto&, auto&, auto& out) { out.states[0] = out.states[0].Slice(0, 0, 1); },
         "final_" + name + " has shape");
  const Call packed = Make(1, 9, 2, 2, 4, 5, 2);
  Options options;
  options.cu_seqlens = {down, DType::kI64, {3}};
  EXPECT_THAT([&] { packed.m->forward(ctx_, packed.Views(), options, {packed.o.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("cu_seqlens[2] is 5, expected 6 to")));
  // An output overlaps an input.
  const Call call = good.Again();
  CallInputs in = call.Views();
  const TensorView over_values(const_cast<void*>(in[value].data()), in[value].dtype(), call.o.view().sizes());
  EXPECT_THAT([&] { call.m->forward(ctx_, in, {}, {over_values}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("o overlaps " + value)));
}

}  // namespace
}  // namespace heed::recurrent
