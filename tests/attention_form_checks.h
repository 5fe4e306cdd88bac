// Checks that tests of causal attention without a table of tensors share: PaTH, Wall and Parallax attention,
// DeltaFormer.
//
// A Fixture is as in form_checks.h, with 4 query heads of 2 key heads of 12 channels, values of 10 channels, and the
// buffers q, k, v, o and lse.
#ifndef HEED_TESTS_ATTENTION_FORM_CHECKS_H_
#define HEED_TESTS_ATTENTION_FORM_CHECKS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/mechanism/table_internal.h"
#include "tests/form_checks.h"

namespace heed::form {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Fixture, class Options>
void ExpectASequenceHasTheSameBitsAloneAndPacked() {
  Context ctx(2);
  const Fixture whole(210), alone(210);
  const Buffer bounds = Integers({0, 75, 210}, DType::kI32);
  Options packed;
  packed.cu_seqlens = bounds.view();
  Forward(ctx, whole.inputs(Tokens{0, 210, 1}), packed, whole.outputs(Tokens{0, 210, 1}));
  Forward(ctx, alone.inputs(Tokens{75, 210}), {}, alone.outputs(Tokens{75, 210}));
  ExpectSameBits(whole.outputs(Tokens{75, 210, 1}), alone.outputs(Tokens{75, 210, 1}));
}

template <class Fixture>
void ExpectLaterTokensDoNotMatter() {
  Context ctx(2);
  const Fixture f(150), whole(150);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  auto later = f.inputs(Tokens{100, 150});
  for (const ConstTensorView& t : mechanism::MembersOf<const ConstTensorView>(later)) {
    const TensorView writable(const_cast<void*>(t.data()), t.dtype(), t.sizes(), t.strides());
    std::vector<int64_t> index(static_cast<size_t>(t.rank()));
    do SetElement(writable, index, std::nan(""));
    while (NextIndex(t.sizes(), index));
  }
  Forward(ctx, f.inputs(), {}, f.outputs());
  ExpectSameBits(f.outputs(Tokens{0, 100}), whole.outputs(Tokens{0, 100}));
  const auto spoilt = f.outputs(Tokens{100, 150});
  for (const TensorView& t : Views(spoilt)) {
    for (const double x : Elements(t)) EXPECT_TRUE(std::isnan(x));
  }
}

// Runs `whole`, and `f` with a NaN.
template <class Fixture>
void ExpectANanInAQueryStaysInItsRow(const Fixture& f, const Fixture& whole) {
  Context ctx(1);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  f.q.Set({0, 70, 1, 3}, std::nan(""));
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isnan(f.o.Get({0, 70, 1, 0})));
  for (int64_t c = 0; c < 10; ++c) f.o.Set({0, 70, 1, c}, whole.o.Get({0, 70, 1, c}));
  EXPECT_TRUE(SameBits(f.o.view(), whole.o.view()));
}

// Results and gradients of tokens outside sequences are 0, and -infinity is their lse.
template <class Fixture, class Options>
void ExpectExcludedTokensHaveNoResults() {
  Context ctx(1);
  const Fixture f(80);
  const Buffer lengths = Integers({70, 0}), starts = Integers({3, 0});
  Options options;
  options.lengths = lengths.view();
  options.starts = starts.view();
  Forward(ctx, f.inputs(), options, f.outputs());
  Backward(ctx, f.backward(), options, f.gradients());
  auto outputs = f.outputs();
  const auto gradients = f.gradients();
  outputs.lse = {};
  for (const Tokens& excluded : {Tokens{0, 3}, Tokens{70, 80}, Tokens{0, 80, 1}}) {
    for (const std::span<const TensorView> views : {Views(outputs), Views(gradients)}) {
      for (const TensorView& t : views) {
        if (!t.present()) continue;
        const TensorView rows = excluded(t).Slice(0, 0, 1);
        for (const double x : Elements(rows)) ASSERT_EQ(x, 0);
      }
    }
    for (const double x : Elements(excluded(f.lse, 2).Slice(0, 0, 1))) ASSERT_EQ(x, -kInfinity);
  }
  EXPECT_NE(f.o.Get({0, 3, 1, 1}), 0);
  EXPECT_NE(f.dk.Get({0, 3, 1, 1}), 0);
}

// Forget gates `g`, with gradients `dg`, of minus infinity: later tokens have the results of a sequence that begins
// there.
template <class Fixture>
void ExpectAGateOfMinusInfinityBeginsASequence() {
  Context ctx(1);
  const Fixture cut(150), alone(150);
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t b = 0; b < 2; ++b) cut.g.Set({b, 70, h}, -kInfinity);
  }
  ExpectFinite(cut);
  Forward(ctx, alone.inputs(Tokens{70, 150}), {}, alone.outputs(Tokens{70, 150}));
  EXPECT_LT(Distance(cut.o.view().Slice(1, 70, 150), alone.o.view().Slice(1, 70, 150)), 1e-5);
  for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(cut.dg.Get({1, 70, h}), 0);
}

template <class Fixture>
void ExpectAPositiveGateIsRefusedOnlyWhereValuesAreChecked() {
  Context ctx(1), checks(1);
  checks.set_checks(true);
  const Fixture f(9);
  f.g.Set({1, 3, 2}, 0.5);
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isfinite(f.lse.Get({1, 2, 8})));
  EXPECT_THAT([&] { Forward(checks, f.inputs(), {}, f.outputs()); },
              Refuses("log_forget has an element 0.5, expected <= 0 everywhere"));
}

// The errors of what such operations have in common, for 9 tokens; `op` is the name of the operation.
template <class Options, class Fixture>
void ExpectErrorsOfAttention(const std::string& op, const Fixture& f) {
  const auto forward = ForwardRefuses<Options>(f);
  const Fixture other(9, DType::kF64);
  forward([](auto& in, auto&) { in.q = {}; }, op + "::Forward: q is absent");
  forward([](auto& in, auto&) { in.v = in.v.Slice(2, 0, 1); }, "v has shape [2,9,1,10], expected [2,9,2,10]");
  forward([](auto& in, auto&) { in.q = in.q.Slice(2, 0, 3); }, "q has 3 heads, expected a multiple of the 2 of k");
  forward([](auto& in, auto&) { in.k = in.k.Slice(2, 0, 0); }, "expected at least one head");
  forward([](auto& in, auto&) { in.v = in.v.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto&, auto& options) { options.scale = kInfinity; }, "scale is inf, expected a finite number");
  forward([&](auto& in, auto&) { in.k = other.k.view(); }, "k has dtype f64, expected f32");
  BackwardRefuses(f)([&](auto&, auto& gradients) { gradients.dv = f.v.view(); }, "dv overlaps v");
}

// The errors of gated attention beside those.
template <class Options, class Fixture>
void ExpectErrorsOfGatedAttention(const std::string& op, const Fixture& f) {
  ExpectErrorsOfAttention<Options>(op, f);
  const auto forward = ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([&](auto& in, auto&) { in.q = f.o.view(); }, "k has shape");
  forward([](auto& in, auto&) { in.log_forget = in.log_forget.Slice(2, 0, 2); },
          "log_forget has shape [2,9,2], expected [2,9,4]");
  Context ctx(1);
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, {f.d_o.view(), f.d_o.view()}); }, Refuses("lse has shape"));
  const auto backward = BackwardRefuses(f);
  backward([](auto& in, auto&) { in.lse = {}; }, "lse is absent");
  backward([&](auto& in, auto&) { in.o = f.q.view(); }, "o has shape [2,9,4,12], expected [2,9,4,10]");
  backward([](auto& in, auto&) { in.log_forget = {}; }, "dlog_forget is asked for, expected none");
}

}  // namespace heed::form

#endif  // HEED_TESTS_ATTENTION_FORM_CHECKS_H_
