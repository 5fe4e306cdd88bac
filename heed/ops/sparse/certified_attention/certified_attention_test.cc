// Certified attention over tensors of keys: bounds, results over the kept blocks, and errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_case.h"

namespace heed::certified_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Call {
  Buffer q, k, v;
  Options options;
  std::vector<int64_t> starts, key_lengths, query_lengths;

  Call(Keys kind, Random& random, DType dtype, int64_t batch, int64_t Tq, int64_t Tk, int64_t heads, int64_t group,
       int64_t dim)
      : q(dtype, {batch, Tq, heads * group, dim}), k(dtype, {batch, Tk, heads, dim}), v(dtype, {batch, Tk, heads, 3}) {
    FillKeys(kind, random, k);
    FillQueries(random, k.view(), q);
    v.FillNormal(random.Word());
  }
  Inputs inputs() const { return {q.view(), k.view(), v.view()}; }
  static ConstTensorView List(const std::vector<int64_t>& x) { return {x.data(), DType::kI64, {std::ssize(x)}}; }
};

struct Result {
  Buffer o, bound, lse, kept;

  explicit Result(const Inputs& in, bool wide = false, Level level = Level::kSketch)
      : o(wide ? DType::kF64 : in.q.dtype(), {in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}),
        bound(wide ? DType::kF64 : DType::kF32, {in.q.size(0), in.q.size(2), in.q.size(1)}),
        lse(wide ? DType::kF64 : DType::kF32, {in.q.size(0), in.q.size(2), in.q.size(1)}),
        kept(DType::kBool,
             {in.q.size(0), (level == Level::kSkip ? in.q : in.k).size(2), in.q.size(1), (in.k.size(1) + 63) / 64}) {}
  Outputs outputs() const { return {o.view(), bound.view(), lse.view(), kept.view()}; }
};

Result Certified(Context& ctx, const Call& call) {
  const Result r(call.inputs(), /*wide=*/false, call.options.level);
  Forward(ctx, call.inputs(), call.options, r.outputs());
  return r;
}

TEST(CertifiedAttention, BoundsHoldAndResultsAreThoseOfTheReference) {
  int64_t dropping = 0;  // number of calls that drop keys
  for (uint64_t seed = 1; seed <= 250; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const DType dtype = random.Pick({DType::kF32, DType::kBF16, DType::kF16});
    const int64_t batch = random.Integer(1, 2), Tk = random.Integer(1, 900);
    const int64_t Tq = random.Chance(0.6) ? random.Integer(1, 6) : random.Integer(1, 150);
    Call call(kAllKeys[seed % std::size(kAllKeys)], random, dtype, batch, Tq, Tk, random.Integer(1, 2),
              random.Integer(1, 2), random.Pick<int64_t>({4, 16, 33}));
    if (random.Chance(0.7)) call.q.FillNormal(seed, 3);  // a single row of zeros makes all rows keep every block
    Options& o = call.options;
    o.epsilon = random.Pick({0.01, 0.1, 0.6});
    o.level = random.Pick({Level::kSketch, Level::kSkip, Level::kSkip, Level::kAuto, Level::kBox});
    o.causal = random.Chance(0.6);
    if (random.Chance(0.3)) o.align = attention::Align::kTopLeft;
    for (int64_t b = 0; b < batch; ++b) {
      call.starts.push_back(random.Integer(-50, Tk));
      call.key_lengths.push_back(random.Integer(0, Tk));
      call.query_lengths.push_back(random.Integer(0, Tq));
    }
    if (random.Chance(0.3)) o.query_starts = Call::List(call.starts);
    if (random.Chance(0.3)) o.key_lengths = Call::List(call.key_lengths);
    if (random.Chance(0.3)) o.query_lengths = Call::List(call.query_lengths);
    if (random.Chance(0.2)) o.scale = random.Pick({-0.5, 0.0, 1.0});
    Context ctx(1 + static_cast<int>(seed % 3));
    ctx.set_isa(TargetOf(dtype, seed));
    const Result r = Certified(ctx, call), truth(call.inputs(), /*wide=*/true, o.level);
    Reference(call.inputs(), o, r.kept.view(), truth.outputs());
    bool drops = false;
    const double rounding = dtype == DType::kF32 ? 1e-5 : dtype == DType::kBF16 ? 3e-2 : 4e-3;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < call.q.view().size(2); ++h) {
        for (int64_t i = 0; i < Tq; ++i) {
          const double bound = r.bound.Get({b, h, i}), mass = truth.bound.Get({b, h, i}),
                       lse = truth.lse.Get({b, h, i});
          drops = drops || bound != 0;
          if (std::isnan(mass)) {
            ASSERT_TRUE(bound == 0 || std::isnan(bound));
            continue;
          }
          ASSERT_GE(bound, mass);
          ASSERT_LE(bound, o.epsilon);
          // Logits of thousands have an error of their f32 rounding, and probabilities the same relative error.
          const double size = std::isinf(lse) ? 0 : std::abs(lse);
          if (std::isinf(lse)) {
            ASSERT_EQ(r.lse.Get({b, h, i}), lse);
          } else {
            ASSERT_NEAR(r.lse.Get({b, h, i}), lse, 2e-5 * (1 + size) + rounding);
          }
          if (size > 300) continue;
          for (int64_t e = 0; e < 3; ++e) {
            ASSERT_NEAR(r.o.Get({b, i, h, e}), truth.o.Get({b, i, h, e}), 6 * (rounding + 2e-6 * size * 64));
          }
        }
      }
    }
    dropping += drops ? 1 : 0;
  }
  EXPECT_GT(dropping, 30);
}

TEST(CertifiedAttention, AnEpsilonOfZeroIsDenseBitForBit) {
  Random random(2);
  Context ctx(2);
  Call call(Keys::kLowRank, random, DType::kF32, 2, 100, 500, 2, 2, 16);
  call.options = OptionsWith(0, Level::kAuto, /*causal=*/true);
  const Result r = Certified(ctx, call), dense(call.inputs());
  call.options.level = Level::kSkip;
  const Result skip = Certified(ctx, call);
  attention::Options exact;
  exact.causal = true;
  attention::Forward(ctx, {call.q.view(), call.k.view(), call.v.view()}, exact, {dense.o.view(), dense.lse.view()});
  EXPECT_TRUE(SameBits(r.o.view(), dense.o.view()) && SameBits(r.lse.view(), dense.lse.view()));
  EXPECT_TRUE(SameBits(skip.o.view(), dense.o.view()) && SameBits(skip.lse.view(), dense.lse.view()));
  EXPECT_EQ(skip.kept.Get({1, 3, 99, 7}), 1);
  EXPECT_EQ(skip.kept.Get({1, 3, 0, 7}), 0);
  for (int64_t row = 0; row < 800; ++row) EXPECT_EQ(r.bound.Get({row / 400, row / 100 % 4, row % 100}), 0);
}

TEST(CertifiedAttention, BitsDoNotDependOnThreadsNeighboursOrStrides) {
  Random random(3);
  Context one(1), three(3);
  Call call(Keys::kLowRank, random, DType::kF32, 2, 130, 700, 2, 2, 16);
  call.options = OptionsWith(0.2, Level::kSketch, /*causal=*/true);
  const Result r = Certified(one, call), same = Certified(three, call);
  EXPECT_TRUE(SameBits(r.o.view(), same.o.view()) && SameBits(r.bound.view(), same.bound.view()) &&
              SameBits(r.kept.view(), same.kept.view()));
  const auto second = [](const Buffer& x) { return ConstTensorView(x.view()).Slice(0, 1, 2); };
  const Inputs alone = {second(call.q), second(call.k), second(call.v)};
  const Result of_one(alone);
  Forward(one, alone, call.options, of_one.outputs());
  EXPECT_TRUE(SameBits(of_one.o.view(), second(r.o)) && SameBits(of_one.bound.view(), second(r.bound)));
  // Tensors with the axis of heads before tokens.
  const Buffer strided(DType::kF32, std::vector<int64_t>{2, 700, 2, 16},
                       std::vector<int64_t>{2 * 700 * 16, 16, 700 * 16, 1}, Placement::kBeforeGuard);
  for (int64_t at = 0; at < 2 * 700 * 2 * 16; ++at) {
    const int64_t b = at / 22400, j = at / 32 % 700, h = at / 16 % 2, e = at % 16;
    strided.Set({b, j, h, e}, call.k.Get({b, j, h, e}));
  }
  const Result moved(call.inputs());
  Forward(three, {call.q.view(), strided.view(), call.v.view()}, call.options, moved.outputs());
  EXPECT_TRUE(SameBits(r.o.view(), moved.o.view()) && SameBits(r.bound.view(), moved.bound.view()));
}

TEST(CertifiedAttention, AutoIsDenseWhereLittleCanGoAndElseTheSketch) {
  Random random(4);
  Context ctx(2);
  Call call(Keys::kNormal, random, DType::kF32, 1, 300, 2000, 2, 1, 16);
  call.q.FillNormal(1);
  call.k.FillNormal(2, 0.1);  // head 0: every block has the same mass
  for (int64_t i = 0; i < 300; ++i) call.q.Set({0, i, 1, 0}, 3);
  for (int64_t j = 320; j < 384; ++j) call.k.Set({0, j, 1, 0}, 20);  // head 1: one block has nearly all of the mass
  call.options = OptionsWith(0.1, Level::kAuto, /*causal=*/true);
  const Result automatic = Certified(ctx, call);
  call.options.level = Level::kSketch;
  const Result sketch = Certified(ctx, call);
  int64_t of_sketch = 0;
  for (int64_t i = 0; i < 300; ++i) {
    EXPECT_EQ(automatic.bound.Get({0, 0, i}), 0);
    EXPECT_EQ(automatic.bound.Get({0, 1, i}), sketch.bound.Get({0, 1, i}));
    of_sketch += sketch.bound.Get({0, 0, i}) > 0 ? 1 : 0;
  }
  EXPECT_GT(of_sketch, 200);
}

TEST(CertifiedAttention, RowsDropKeysUpTo65536PositionsBehindTheLast) {
  Random random(5);
  Context ctx(2);
  const auto bound = [&](int64_t keys, int64_t start) {
    Call call(Keys::kNormal, random, DType::kF32, 1, 1, keys, 1, 1, 8);
    call.k.FillNormal(2, 0.1);
    call.q.Set({0, 0, 0, 0}, 3);
    for (int64_t j = 320; j < 384; ++j) call.k.Set({0, j, 0, 0}, 20);  // has nearly all of the mass
    call.options = OptionsWith(0.1, Level::kSketch, /*causal=*/true);
    call.options.query_starts = ConstTensorView(&start, DType::kI64, {1});
    return Certified(ctx, call).bound.Get({0, 0, 0});
  };
  const int64_t far = 66'000;  // more than 2^16
  EXPECT_GT(bound(far, far - 1), 0);
  EXPECT_GT(bound(640, 640), 0);
  EXPECT_EQ(bound(640, 640 + far), 0);
}

TEST(CertifiedAttention, SizesOfZeroAreAllowed) {
  Random random(5);
  Context ctx(2);
  for (const auto& [B, Tq, Tk] : {std::tuple{0, 3, 5}, {1, 0, 5}, {1, 3, 0}}) {
    for (const bool causal : {false, true}) {
      Call call(Keys::kNormal, random, DType::kF32, B, Tq, Tk, 1, 1, 4);
      call.options.causal = causal;
      const Result r = Certified(ctx, call);
      if (B == 0 || Tq == 0) continue;
      EXPECT_EQ(r.bound.Get({0, 0, 2}), 0);
    }
  }
}

TEST(CertifiedAttention, BadInputNamesTheArgumentAndWritesNothing) {
  Random random(6);
  Context ctx(1);
  Call call(Keys::kNormal, random, DType::kF32, 1, 20, 300, 2, 2, 8);
  const Result r(call.inputs());
  const auto expect = [&](const Inputs& in, const Options& options, const Outputs& out, const std::string& message) {
    EXPECT_THAT([&] { Forward(ctx, in, options, out); },
                ThrowsMessage<InvalidArgument>(HasSubstr("certified_attention::Forward: " + message)));
    for (const Buffer* buffer : {&r.o, &r.bound, &r.lse, &r.kept}) {
      EXPECT_TRUE(std::ranges::all_of(buffer->bytes(), [](uint8_t x) { return x == 0xFF; }));
    }
  };
  const Inputs in = call.inputs();
  for (const double epsilon : {-1e-9, 1.0, 7.0, std::nan("")})
    expect(in, OptionsWith(epsilon), r.outputs(), "epsilon is ");
  expect(in, OptionsWith(0.02, Level::kAuto, false, std::nan("")), r.outputs(), "scale is nan");
  expect({in.q, in.k.Slice(3, 0, 4), in.v}, {}, r.outputs(), "k has shape [1,300,2,4]");
  Options lengths;
  lengths.key_lengths = call.q.view();
  expect(in, lengths, r.outputs(), "key_lengths has dtype f32");
  expect(in, {}, {r.o.view(), r.bound.view().Slice(1, 0, 2), {}, {}}, "bound has shape [1,2,20], expected [1,4,20]");
  expect(in, {}, {r.o.view(), r.bound.view(), {}, r.kept.view().Slice(3, 0, 2)},
         "kept has shape [1,2,20,2], expected [1,2,20,5]");
  const Buffer q(DType::kF64, {1, 1, 1, 8}), kv(DType::kF64, {1, 9, 1, 8}), o(DType::kF64, {1, 1, 1, 8});
  expect({q.view(), kv.view(), kv.view()}, {}, {o.view(), {}, {}, {}}, "q has dtype f64, expected f32, bf16 or f16");
}

}  // namespace
}  // namespace heed::certified_attention
