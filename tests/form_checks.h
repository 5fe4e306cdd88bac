// Checks that tests of operations without a table of tensors share (a Form in heed/harness/mechanism/state_case.h).
//
// They run a Fixture of the operation: Fixture(T, dtype) is a call with its memory, 2 sequences of T tokens.
//
//   inputs(), outputs()        all inputs, and all results, NaN until they are written
//   inputs(part)               the inputs of some tokens: `part` makes these views, as Tokens and OneToken do
//   outputs(part)              the results of some tokens
//   backward(), gradients()    what the backward pass reads and writes
#ifndef HEED_TESTS_FORM_CHECKS_H_
#define HEED_TESTS_FORM_CHECKS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/reserved_bytes.h"
#include "heed/mechanism/table_internal.h"

namespace heed::form {

// Tokens [begin, end) of the sequences from `first` on of a tensor [B, T, ...], or of one with another axis of tokens.
struct Tokens {
  int64_t begin, end, first = 0;
  TensorView operator()(const TensorView& t, int axis = 1) const {
    return t.Slice(0, first, t.size(0)).Slice(axis, begin, end);
  }
  TensorView operator()(const Buffer& x, int axis = 1) const { return (*this)(x.view(), axis); }
};

// The one token of a tensor [B, 1, ...], without the axis of tokens.
struct OneToken {
  TensorView operator()(const Buffer& x) const { return mechanism::WithoutTokens("BT", x.view()); }
};

inline Buffer Integers(std::initializer_list<int64_t> values, DType dtype = DType::kI64) {
  const Buffer buffer(dtype, {static_cast<int64_t>(values.size())});
  int64_t i = 0;
  for (const int64_t value : values) buffer.Set({i++}, static_cast<double>(value));
  return buffer;
}

// The members of outputs or gradients.
template <class Results>
std::span<const TensorView> Views(const Results& of) {
  return mechanism::MembersOf<const TensorView>(of);
}

// These inputs without data.
template <class Inputs>
Inputs ShapesOf(Inputs in) {
  for (ConstTensorView& t : mechanism::MembersOf<ConstTensorView>(in)) {
    if (t.present()) t = ConstTensorView(nullptr, t.dtype(), t.sizes());
  }
  return in;
}

// The largest distance of two tensors of one shape.
inline double Distance(const ConstTensorView& a, const ConstTensorView& b) {
  const std::vector<double> x = Elements(a), y = Elements(b);
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    most = std::isfinite(x[i]) && std::isfinite(y[i]) ? std::max(most, std::abs(x[i] - y[i]))
                                                      : std::numeric_limits<double>::infinity();
  }
  return most;
}

template <class Results>
void ExpectSameBits(const Results& a, const Results& b) {
  for (size_t i = 0; i < Views(a).size(); ++i) {
    ASSERT_EQ(Views(a)[i].present(), Views(b)[i].present());
    if (!Views(a)[i].present()) continue;
    EXPECT_TRUE(SameBits(Views(a)[i], Views(b)[i])) << "result " << i;
  }
}

template <class Fixture>
void RunBothPasses(Context& ctx, const Fixture& f) {
  Forward(ctx, f.inputs(), {}, f.outputs());
  Backward(ctx, f.backward(), {}, f.gradients());
}

template <class Fixture, class Options>
void ExpectBitsDoNotDependOnThreads(int64_t T, const Options& options) {
  Context one(1), three(3);
  const Fixture a(T);
  Forward(one, a.inputs(), options, a.outputs());
  Backward(one, a.backward(), options, a.gradients());
  for (int repeat = 0; repeat < 5; ++repeat) {
    const Fixture b(T);
    Forward(three, b.inputs(), options, b.outputs());
    ExpectSameBits(a.outputs(), b.outputs());
    Backward(three, b.backward(), options, b.gradients());
    ExpectSameBits(a.gradients(), b.gradients());
  }
}

// The passes reserve the memory that Workspace, Explain and BackwardWorkspace tell.
template <class BackwardInputs, class Options, class Outputs, class Gradients>
void ExpectWorkspaceIsReserved(const BackwardInputs& in, const Options& options, const Outputs& out,
                               const Gradients& gradients) {
  for (const int threads : {1, 3}) {
    Context forward(threads), backward(threads);
    Forward(forward, in, options, out);
    EXPECT_EQ(ReservedBytes(forward), Workspace(forward, in, options));
    EXPECT_EQ(ReservedBytes(forward), Explain(forward, in, options).workspace_bytes);
    Backward(backward, in, options, gradients);
    EXPECT_EQ(ReservedBytes(backward), BackwardWorkspace(backward, in, options));
  }
}

// Results of both passes are finite.
template <class Fixture>
void ExpectFinite(const Fixture& f) {
  Context ctx(1);
  RunBothPasses(ctx, f);
  const auto outputs = f.outputs();
  const auto gradients = f.gradients();
  for (const std::span<const TensorView> views : {Views(outputs), Views(gradients)}) {
    for (const TensorView& t : views) {
      if (!t.present()) continue;
      for (const double x : Elements(t)) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

// Runs all tokens in two parts, the second one with the state after the first and, where options have it, its position.
template <class Fixture, class Options>
void RunInParts(const Fixture& f, int64_t at, Options options) {
  Context ctx(1);
  auto first = f.outputs(Tokens{0, at});
  const Buffer middle(first.final_state.dtype(), first.final_state.sizes()), positions = Integers({at, at});
  first.final_state = middle.view();
  Forward(ctx, f.inputs(Tokens{0, at}), options, first);
  auto rest = f.inputs(Tokens{at, f.T});
  rest.initial_state = middle.view();
  if constexpr (requires { options.positions; }) options.positions = positions.view();
  Forward(ctx, rest, options, f.outputs(Tokens{at, f.T}));
}

template <class Fixture, class Options>
void ExpectPartsHaveTheBitsOfTheWhole(int64_t T, int64_t at, const Options& options) {
  Context ctx(1);
  const Fixture whole(T), split(T);
  Forward(ctx, whole.inputs(), options, whole.outputs());
  RunInParts(split, at, options);
  ExpectSameBits(whole.outputs(), split.outputs());
}

// A step from this state is a call of one token.
template <class Fixture, class Options>
void ExpectStepHasTheBitsOfACall(const Buffer& initial, const Options& options) {
  Context ctx(1);
  const Fixture f(1);
  auto in = f.inputs();
  in.initial_state = initial.view();
  Forward(ctx, in, options, f.outputs());
  auto token = f.inputs(OneToken());
  token.initial_state = {};
  const TensorView o = f.outputs().o;
  const Buffer of_token(o.dtype(), {o.size(0), o.size(2), o.size(3)});
  Step(ctx, token, options, initial.view(), of_token.view());
  EXPECT_TRUE(SameBits(initial.view(), f.outputs().final_state));
  EXPECT_EQ(Elements(of_token.view()), Elements(o));
}

// Matches a function that throws InvalidArgument with a message that contains this text.
inline auto Refuses(const std::string& text) {
  return testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr(text));
}

// Return functions that expect a pass to refuse the call `f`, after a change of it, with this text, and to write
// nothing.
template <class Options, class Fixture>
auto ForwardRefuses(const Fixture& f) {
  return [&f](const auto& change, const std::string& text) {
    Context ctx(1);
    auto in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, Refuses(text));
    EXPECT_TRUE(std::isnan(Elements(f.outputs().o)[0]));
  };
}
template <class Fixture>
auto BackwardRefuses(const Fixture& f) {
  return [&f](const auto& change, const std::string& text) {
    Context ctx(1);
    auto in = f.backward();
    auto gradients = f.gradients();
    change(in, gradients);
    EXPECT_THAT([&] { Backward(ctx, in, {}, gradients); }, Refuses(text));
    EXPECT_TRUE(std::isnan(Elements(f.gradients().dk)[0]));
  };
}

}  // namespace heed::form

#endif  // HEED_TESTS_FORM_CHECKS_H_
