// Checks that tests of memories which are trained while they read share (TTT-Linear, Titans), with a Fixture as in
// form_checks.h that has `initial` states.
#ifndef HEED_TESTS_TEST_TIME_TRAINING_CHECKS_H_
#define HEED_TESTS_TEST_TIME_TRAINING_CHECKS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/mechanism/state_case.h"
#include "tests/form_checks.h"

namespace heed::test_time_training {

using form::Integers;
using form::Tokens;

template <class Fixture, class Options>
void ExpectSplitsAtChunksHaveTheSameBits() {
  for (const auto& [mini_batch, at] : {std::pair<int64_t, int64_t>{16, 48}, {5, 35}, {40, 40}, {40, 56}, {200, 64}}) {
    SCOPED_TRACE(std::to_string(mini_batch) + " " + std::to_string(at));
    Options options;
    options.mini_batch = mini_batch;
    form::ExpectPartsHaveTheBitsOfTheWhole<Fixture>(100, at, options);
  }
}

template <class Fixture, class Options>
void ExpectAnySplitIsTheWhole() {
  Context ctx(1);
  const Fixture whole(45, DType::kF64), split(45, DType::kF64);
  for (const int64_t mini_batch : {1, 4, 16, 30, 100}) {
    Options options;
    options.mini_batch = mini_batch;
    Forward(ctx, whole.inputs(), options, whole.outputs());
    for (const int64_t at : {1, 7, 17, 31, 44}) {
      form::RunInParts(split, at, options);
      EXPECT_LT(form::Distance(whole.o.view(), split.o.view()), 1e-9) << mini_batch << " " << at;
      EXPECT_LT(form::Distance(whole.state.view(), split.state.view()), 1e-8) << mini_batch << " " << at;
    }
  }
}

// The last part of a state is unread where a mini-batch begins.
template <class Fixture>
void ExpectLastPartIsUnread() {
  Context ctx(1);
  const Fixture f(32), other(32);
  const Buffer poisoned(DType::kF32, f.initial.view().sizes());
  mechanism::CopyElements(f.initial.view(), poisoned.view());
  const int64_t last = poisoned.view().size(2) - 1;
  for (int64_t i = 0; i < 12; ++i) poisoned.Set({1, 0, last, i, i}, std::nan(""));
  Forward(ctx, f.inputs(), {}, f.outputs());
  auto in = other.inputs();
  in.initial_state = poisoned.view();
  Forward(ctx, in, {}, other.outputs());
  EXPECT_TRUE(SameBits(f.o.view(), other.o.view()));
}

template <class Fixture, class Options>
void ExpectStepsHaveTheBitsOfCalls() {
  for (const int64_t position : {0, 7, 15, 31}) {
    const Buffer positions = Integers({position, position});
    Options options;
    options.positions = positions.view();
    form::ExpectStepHasTheBitsOfACall<Fixture>(Fixture(1).initial, options);
  }
}

template <class Fixture>
void ExpectNansReachTheirOwnAndLaterTokens() {
  Context ctx(1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Fixture good(40), bad(40);
  Forward(ctx, good.inputs(), {}, good.outputs());
  bad.q.Set({0, 20, 1, 3}, nan);
  bad.k.Set({1, 25, 0, 2}, nan);
  Forward(ctx, bad.inputs(), {}, bad.outputs());
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 40; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        const bool spoilt = (b == 0 && t == 20 && h == 1) || (b == 1 && t >= 25 && h == 0);
        EXPECT_EQ(std::isnan(bad.o.Get({b, t, h, 0})), spoilt) << b << " " << t << " " << h;
        if (spoilt) continue;
        EXPECT_EQ(bad.o.Get({b, t, h, 5}), good.o.Get({b, t, h, 5}));
      }
    }
  }
}

template <class Fixture, class Options>
void ExpectNoTokensLeaveTheState() {
  Context ctx(1);
  const Fixture f(0);
  const Buffer positions = Integers({3, 3});
  Options options;
  options.positions = positions.view();
  Forward(ctx, f.inputs(), options, f.outputs());
  EXPECT_TRUE(SameBits(f.initial.view(), f.state.view()));
}

template <class Fixture>
void ExpectEqualTokensAndZerosAreFinite() {
  for (const double value : {0.0, 1.0}) {
    const Fixture f(40);
    for (const Buffer* x : {&f.q, &f.k, &f.v, &f.initial}) x->FillConstant(value);
    form::ExpectFinite(f);
  }
}

template <class Fixture, class Options>
void ExpectWorkspaceIsReserved() {
  const Buffer positions = Integers({5, 5});  // inside a mini-batch
  Options inside;
  inside.positions = positions.view();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    for (const Options& options : {Options(), inside}) {
      form::ExpectWorkspaceIsReserved(f.backward(), options, f.outputs(), f.gradients());
    }
  }
}

// The errors of what such operations have in common; `op` is the name of the operation.
template <class Options, class Fixture>
void ExpectErrorsOfCommonArguments(const std::string& op, const Fixture& f) {
  const auto forward = form::ForwardRefuses<Options>(f);
  const Buffer negative = Integers({-1, -1}), one = Integers({1, 1});
  forward([](auto& in, auto&) { in.q = {}; }, op + "::Forward: q is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.v = in.v.Slice(3, 0, 10); }, "v has shape [2,9,2,10], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.q = in.q.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.weight = {}; }, "weight is absent");
  forward([](auto& in, auto&) { in.bias = in.bias.Slice(1, 0, 4); }, "bias has shape [2,4], expected [2,12]");
  forward([](auto& in, auto&) { in.eta = in.eta.Slice(2, 0, 1); }, "eta has shape [2,9,1]");
  forward([](auto&, auto& options) { options.mini_batch = 0; }, "mini_batch is 0, expected at least 1");
  forward([](auto&, auto& options) { options.eps = -1; }, "eps is -1, expected a finite number >= 0");
  forward([](auto&, auto& options) { options.scale = std::nan(""); }, "scale is nan, expected a finite number");
  forward([](auto& in, auto&) { in.initial_state = in.initial_state.Slice(3, 0, 11); }, "initial_state has shape");
  forward([&](auto& in, auto&) { in.initial_state = f.state.view(); }, "final_state overlaps initial_state");
  forward([&](auto&, auto& options) { options.positions = negative.view(); }, "positions[0] is -1, expected 0 or more");
  forward(
      [&](auto& in, auto& options) {
        in.initial_state = {};
        options.positions = one.view();
      },
      "positions[0] is 1, expected 0 without initial_state");
  forward([&](auto&, auto& options) { options.positions = f.eta.view(); }, "positions has dtype f32, expected i32");
  form::BackwardRefuses(f)([&](auto&, auto& gradients) { gradients.dv = f.v.view(); }, "dv overlaps v");
  Context ctx(1);
  EXPECT_THAT([&] { Step(ctx, f.inputs(), {}, f.state.view(), f.o.view()); },
              form::Refuses("initial_state is given, expected none"));
}

}  // namespace heed::test_time_training

#endif  // HEED_TESTS_TEST_TIME_TRAINING_CHECKS_H_
