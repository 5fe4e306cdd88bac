// The contract of every recurrent mechanism about bits: threads, batches, padding, packing, splits, directions, tokens
// one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/unfair_executor.h"
#include "tests/recurrent_call.h"

namespace heed::recurrent {
namespace {

INSTANTIATE_TEST_SUITE_P(AllOps, Recurrent, testing::ValuesIn(Parameters([](const Parameter&) { return true; })),
                         ParameterName);

TEST_P(Recurrent, BitsDoNotDependOnThreads) {
  struct Heads {
    int64_t T, H, group;
  };
  for (const auto& [T, H, group] : {Heads{150, 1, 1}, Heads{150, 2, 3}, Heads{700, 1, 2}}) {
    const Call one = Make(1, T, H, group, 70, 100);
    Context single(1);
    one.Both(single);
    for (const int threads : {2, 3, 8}) {
      const Call other = one.Again();
      Context ctx(threads);
      other.Both(ctx);
      ExpectSameBits(one, other);
      const Call late = one.Again();
      UnfairExecutor executor(threads, 5);
      Context unfair(executor.executor());
      late.Both(unfair);
      ExpectSameBits(one, late);
    }
  }
}

TEST_P(Recurrent, BitsAreThoseOfASequenceAlone) {
  // Lengths, starts and packing only determine the places of a sequence's tokens.
  const Call alone = Make(1, 77, 2, 1, Large(20), Large(12));
  alone.Both(ctx_);
  const auto embed = [&](Call& into, int64_t b, int64_t first, int64_t sequence) {
    for (size_t i = 0; i < alone.inputs.size(); ++i) {
      const auto& [name, from] = alone.inputs[i];
      const TensorView to = into.inputs[i].second.view();
      if (OverTokens(name, from)) {
        Copy(from.view(), to.Slice(0, b, b + 1).Slice(1, first, first + 77));
      } else if (IsState(name)) {
        Copy(from.view(), to.Slice(0, sequence, sequence + 1));
      } else {
        Copy(from.view(), to);
      }
    }
    Copy(alone.d_o.view(), into.d_o.view().Slice(0, b, b + 1).Slice(1, first, first + 77));
    const auto put = [&](const Buffer& from, const Buffer& to) {
      Copy(from.view(), to.view().Slice(0, sequence, sequence + 1));
    };
    put(alone.d_state, into.d_state);
    if (alone.has_z()) put(alone.d_z, into.d_z);
    if (alone.has_m()) put(alone.initial_m, into.initial_m);
  };
  const auto expect = [&](const Call& into, int64_t b, int64_t first, int64_t sequence) {
    const auto rows = [&](const Buffer& buffer) {
      return ConstTensorView(buffer.view()).Slice(0, b, b + 1).Slice(1, first, first + 77);
    };
    EXPECT_TRUE(SameBits(alone.o.view(), rows(into.o)));
    ExpectSameRows(alone.final, 0, 0, 1, into.final, sequence, "state");
    if (alone.has_z()) ExpectSameRows(alone.final_z, 0, 0, 1, into.final_z, sequence, "z");
    if (alone.has_m()) ExpectSameRows(alone.final_m, 0, 0, 1, into.final_m, sequence, "m");
    for (size_t i = 0; i < alone.inputs.size(); ++i) {
      const auto& [name, input] = alone.inputs[i];
      if (OverTokens(name, input)) {
        EXPECT_TRUE(SameBits(alone.gradients[i].view(), rows(into.gradients[i]))) << name;
      } else if (IsState(name)) {
        EXPECT_TRUE(SameBits(alone.gradients[i].view(),
                             ConstTensorView(into.gradients[i].view()).Slice(0, sequence, sequence + 1)));
      }
    }
  };
  Call padded = Make(3, 100, 2, 1, Large(20), Large(12));
  embed(padded, 1, 9, 1);
  const int64_t lengths[] = {50, 86, 100}, starts[] = {0, 9, 100};
  padded.options.lengths = {lengths, DType::kI64, {3}};
  padded.options.starts = {starts, DType::kI64, {3}};
  padded.Both(ctx_);
  expect(padded, 1, 9, 1);

  Call packed = Make(1, 150, 2, 1, Large(20), Large(12), 3);
  embed(packed, 0, 30, 1);
  const int32_t bounds[] = {0, 30, 107, 150};
  packed.options.cu_seqlens = {bounds, DType::kI32, {4}};
  packed.Both(ctx_);
  expect(packed, 0, 30, 1);
}

TEST_P(Recurrent, InputsThatAreBroadcastHaveTheBitsOfCopies) {
  Call copied = Make(2, 70, 1, 1, 8, 8);
  const Call broadcast = copied.Again();
  CallInputs in = broadcast.Views();
  const auto repeat = [&](const std::string& name) {
    if (!broadcast.Has(name)) return;
    ConstTensorView& view = in[name];
    if (view.rank() < 3) return;
    const ConstTensorView one = view.Slice(0, 0, 1).Slice(1, 0, 1);
    std::vector<int64_t> strides(view.strides().begin(), view.strides().end());
    strides[0] = strides[1] = 0;
    view = {one.data(), one.dtype(), view.sizes(), strides};
    Call::ForEach(copied.Input(name), [&](const Shape& at) {
      Shape first = at;
      first[0] = first[1] = 0;
      SetElement(copied.Input(name).view(), at, GetElement(one, first));
    });
  };
  for (const char* name : {"log_decay", "log_decay_v", copied.value_name()}) repeat(name);
  const CallResults out = broadcast.GradientViews();
  broadcast.m->backward(ctx_, in, broadcast.options, out);
  broadcast.m->forward(ctx_, in, broadcast.options, broadcast.ResultViews());
  copied.Both(ctx_);
  ExpectSameBits(copied, broadcast);
}

TEST_P(Recurrent, TokensThatDoNotCountAreZeroAndNeverRead) {
  Call call = Make(2, 40, 1, 2, 8, 8);
  const int64_t lengths[] = {33, 0}, starts[] = {5, 0};
  call.options.lengths = {lengths, DType::kI64, {2}};
  call.options.starts = {starts, DType::kI64, {2}};
  const auto counts = [&](const Shape& at) { return at[1] >= starts[at[0]] && at[1] < lengths[at[0]]; };
  for (const auto& [name, input] : call.inputs) {
    if (!OverTokens(name, input)) continue;
    const TensorView view = input.view();
    Call::ForEach(input, [&](const Shape& at) {
      if (!counts(at)) SetElement(view, at, std::numeric_limits<double>::quiet_NaN());
    });
  }
  call.Both(ctx_);
  const auto expect = [&](const Buffer& buffer, const std::string& name) {
    Call::ForEach(buffer, [&](const Shape& at) {
      const double value = GetElement(buffer.view(), at);
      EXPECT_FALSE(std::isnan(value)) << name << ShapeString(at);
      if (!counts(at)) {
        EXPECT_EQ(value, 0) << name << ShapeString(at);
      }
    });
  };
  expect(call.o, "o");
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    if (OverTokens(call.inputs[i].first, call.inputs[i].second)) {
      expect(call.gradients[i], "d" + call.inputs[i].first);
    }
  }
  // The empty sequence passes its state through, and its gradient back.
  const Buffer& initial = call.Input("initial_state");
  ExpectSameRows(call.final, 0, 1, 2, initial, 1, "state");
  ExpectSameRows(call.gradients.back(), 0, 1, 2, call.d_state, 1, "dinitial_state");
  if (call.has_z()) ExpectSameRows(call.final_z, 0, 1, 2, call.Input("initial_z"), 1, "z");
  if (call.has_m()) ExpectSameRows(call.final_m, 0, 1, 2, call.initial_m, 1, "m");
}

TEST_P(Recurrent, SplittingAtBlocksKeepsTheBitsAndElsewhereTheValues) {
  for (const int64_t split : {64, 128, 1, 50, 131}) {
    const Call whole = Make(1, 150, 2, 2, Large(33), Large(20));
    whole.Both(ctx_);
    // Two calls: the state is passed forward, its gradient back.
    Call parts[2] = {Make(1, split, 2, 2, Large(33), Large(20)), Make(1, 150 - split, 2, 2, Large(33), Large(20))};
    for (int part = 0; part < 2; ++part) {
      const int64_t begin = part == 0 ? 0 : split, end = part == 0 ? split : 150;
      Call& call = parts[part];
      for (size_t i = 0; i < whole.inputs.size(); ++i) {
        const auto& [name, from] = whole.inputs[i];
        const ConstTensorView view = from.view();
        Copy(OverTokens(name, from) ? view.Slice(1, begin, end) : view, call.inputs[i].second.view());
      }
      Copy(ConstTensorView(whole.d_o.view()).Slice(1, begin, end), call.d_o.view());
      if (part == 0 && call.has_m()) Copy(whole.initial_m.view(), call.initial_m.view());
      if (part == 1) GoOn(parts[0], call);
      call.Forward(ctx_);
    }
    Copy(whole.d_state.view(), parts[1].d_state.view());
    if (whole.has_z()) Copy(whole.d_z.view(), parts[1].d_z.view());
    parts[1].Backward(ctx_);
    GoBack(parts[1], parts[0]);
    parts[0].Backward(ctx_);

    const auto same_bits = [&](const std::string& what) {
      return split % 64 == 0 || !gated() || (sequential() && (what == "o" || what == "state"));
    };
    const double unit = GetParam().dtype == DType::kF64    ? 1e-13
                        : GetParam().dtype == DType::kF32  ? 2e-6
                        : GetParam().dtype == DType::kBF16 ? 0.02
                                                           : 0.002;
    const auto expect = [&](const Buffer& expected, const Buffer& first, const Buffer& second,
                            const std::string& what) {
      const ConstTensorView view = expected.view();
      const ConstTensorView halves[] = {view.Slice(1, 0, split), view.Slice(1, split, 150)};
      const Buffer* got[] = {&first, &second};
      for (int part = 0; part < 2; ++part) {
        if (same_bits(what)) {
          EXPECT_TRUE(SameBits(halves[part], got[part]->view())) << what << " split at " << split;
          continue;
        }
        double error = 0, norm = 0;
        Call::ForEach(*got[part], [&](const Shape& at) {
          const double x = GetElement(halves[part], at);
          error += std::pow(GetElement(got[part]->view(), at) - x, 2);
          norm += x * x;
        });
        // The gradient of a decay is a sum with cancellation.
        const double factor = what == "dlog_decay" || what == "df" ? 100 : 5;
        EXPECT_LE(std::sqrt(error), factor * unit * std::sqrt(norm) + 1e-30) << what << " split at " << split;
      }
    };
    expect(whole.o, parts[0].o, parts[1].o, "o");
    for (size_t i = 0; i < whole.inputs.size(); ++i) {
      const auto& [name, input] = whole.inputs[i];
      if (!OverTokens(name, input)) continue;
      expect(whole.gradients[i], parts[0].gradients[i], parts[1].gradients[i], "d" + name);
    }
    if (same_bits("state")) {
      EXPECT_TRUE(SameBits(whole.final.view(), parts[1].final.view()));
      if (whole.has_z()) {
        EXPECT_TRUE(SameBits(whole.final_z.view(), parts[1].final_z.view()));
      }
      if (whole.has_m()) {
        EXPECT_TRUE(SameBits(whole.final_m.view(), parts[1].final_m.view()));
      }
    }
    if (same_bits("dinitial_state")) {
      EXPECT_TRUE(SameBits(whole.gradients.back().view(), parts[0].gradients.back().view()));
    }
  }
}

TEST_P(Recurrent, ReverseIsTheSameFromTheOtherEnd) {
  const Call forward = Make(1, 70, 1, 2, 9, 11);
  forward.Both(ctx_);
  Call reverse = Make(1, 70, 1, 2, 9, 11);
  const auto flip = [](const ConstTensorView& from, const TensorView& to) {
    Shape index(from.sizes().size());
    do {
      Shape other = index;
      other[1] = from.size(1) - 1 - index[1];
      SetElement(to, other, GetElement(from, index));
    } while (NextIndex(from.sizes(), index));
  };
  for (size_t i = 0; i < forward.inputs.size(); ++i) {
    const auto& [name, input] = forward.inputs[i];
    if (OverTokens(name, input)) flip(input.view(), reverse.inputs[i].second.view());
  }
  flip(forward.d_o.view(), reverse.d_o.view());
  reverse.options.reverse = true;
  reverse.Both(ctx_);
  Buffer flipped(reverse.o.view().dtype(), reverse.o.view().sizes());
  flip(reverse.o.view(), flipped.view());
  EXPECT_TRUE(SameBits(forward.o.view(), flipped.view()));
  EXPECT_TRUE(SameBits(forward.final.view(), reverse.final.view()));
  for (size_t i = 0; i < forward.inputs.size(); ++i) {
    const auto& [name, input] = forward.inputs[i];
    if (!OverTokens(name, input)) continue;
    Buffer gradient(input.view().dtype(), input.view().sizes());
    flip(reverse.gradients[i].view(), gradient.view());
    EXPECT_TRUE(SameBits(forward.gradients[i].view(), gradient.view())) << name;
  }
}

TEST_P(Recurrent, ATokenReachesNoEarlierOne) {
  Call call = Make(1, 100, 2, 1, Large(8), Large(8));
  call.Forward(ctx_);
  Call other = call.Again();
  for (auto& [name, input] : other.inputs) {
    if (!OverTokens(name, input)) continue;
    const Buffer copy(input.view().dtype(), input.view().sizes());
    Copy(input.view(), copy.view());
    const std::string_view axes = std::ranges::find(other.m->definition.table.tensors, name, &Tensor::name)->axes;
    const size_t heads = axes.find_first_of("HGC");
    Call::ForEach(copy, [&](const Shape& at) {
      if (at[1] == 66 && at[heads] == 1) {
        SetElement(copy.view(), at, std::numeric_limits<double>::quiet_NaN());
      }
    });
    input = copy;
  }
  other.Forward(ctx_);
  ExpectSameRows(call.o, 1, 0, 66, other.o, 0, "earlier tokens");
  const ConstTensorView a = call.o.view(), b = other.o.view();
  EXPECT_TRUE(SameBits(a.Slice(2, 0, 1), b.Slice(2, 0, 1))) << "the other head";
  const Shape seen = {0, 66, 1, 0};
  EXPECT_TRUE(std::isnan(GetElement(b, Shape(seen.begin(), seen.begin() + b.rank()))));
}

TEST_P(Recurrent, StepsAreTheForwardPassTokenByToken) {
  const Call call = Make(2, 70, 1, 2, Large(21), Large(37));
  call.Forward(ctx_);
  Call steps = call.Again();
  Copy(call.Input("initial_state").view(), steps.final.view());
  if (call.has_z()) Copy(call.Input("initial_z").view(), steps.final_z.view());
  if (call.has_m()) Copy(call.initial_m.view(), steps.final_m.view());
  const CallInputs in = call.Views();
  const auto token = [](const ConstTensorView& t, int64_t i) {
    if (!t.present() || t.rank() < 3) return t;
    const ConstTensorView one = t.Slice(1, i, i + 1);
    Shape sizes(one.sizes().begin(), one.sizes().end());
    Shape strides(one.strides().begin(), one.strides().end());
    sizes.erase(sizes.begin() + 1);
    strides.erase(strides.begin() + 1);
    return ConstTensorView(one.data(), one.dtype(), sizes, strides);
  };
  for (int64_t t = 0; t < 70; ++t) {
    const ConstTensorView o = token(steps.o.view(), t);
    std::vector<ConstTensorView> step;
    for (const ConstTensorView& tensor : in.tensors) step.push_back(token(tensor, t));
    const std::vector<TensorView> states = steps.FinalViews();
    call.m->step(ctx_, {step}, {},
                 {TensorView(const_cast<void*>(o.data()), o.dtype(), o.sizes(), o.strides()), states});
  }
  if (sequential()) {
    EXPECT_TRUE(SameBits(call.o.view(), steps.o.view()));
    EXPECT_TRUE(SameBits(call.final.view(), steps.final.view()));
  }
  const auto expect = [](const Buffer& a, const Buffer& b, double tolerance) {
    double error = 0, norm = 0;
    Call::ForEach(a, [&](const Shape& at) {
      const double x = GetElement(a.view(), at);
      error += std::pow(GetElement(b.view(), at) - x, 2);
      norm += x * x;
    });
    EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm));
  };
  const DType dtype = GetParam().dtype;
  const double rounding = dtype == DType::kF64 ? 1e-14 : 2e-6;
  expect(call.final, steps.final, rounding);
  expect(call.o, steps.o, rounding + (dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0));
}

}  // namespace
}  // namespace heed::recurrent
