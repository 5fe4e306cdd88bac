// Properties of nsa that comparison with its reference cannot show. tests/conformance_test.cc compares with the
// reference for every SIMD target, dtype and size, tests/random_options_test.cc for random options.
#include "heed/ops/sparse/nsa/nsa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::nsa {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A call of B sequences, two query heads per key head, with its results and gradients.
struct Fixture {
  int64_t B, Tq, Tk;
  DType dtype;
  Options options;
  Buffer q, k, v, gates, k_cmp, v_cmp, d_o;
  Buffer o, branches, lse, blocks, dq, dk, dv, dgates, dk_cmp, dv_cmp;
  bool given = false;  // k_cmp and v_cmp are given

  Fixture(int64_t batch, int64_t rows, int64_t keys, DType type = DType::kF32)
      : B(batch), Tq(rows), Tk(keys), dtype(type) {
    options.block = 8;
    options.count = 5;
    options.window = 10;
    options.length = 8;
    options.stride = 4;
    const int64_t N = windows();
    uint64_t seed = 0;
    for (const auto& [buffer, sizes] :
         std::vector<std::pair<Buffer*, std::vector<int64_t>>>{{&q, {B, Tq, 4, 24}},
                                                               {&k, {B, Tk, 2, 24}},
                                                               {&v, {B, Tk, 2, 16}},
                                                               {&gates, {B, Tq, 4, 3}},
                                                               {&k_cmp, {B, N, 2, 24}},
                                                               {&v_cmp, {B, N, 2, 16}},
                                                               {&d_o, {B, Tq, 4, 16}},
                                                               {&o, {B, Tq, 4, 16}},
                                                               {&branches, {3, B, Tq, 4, 16}},
                                                               {&dq, {B, Tq, 4, 24}},
                                                               {&dk, {B, Tk, 2, 24}},
                                                               {&dv, {B, Tk, 2, 16}},
                                                               {&dgates, {B, Tq, 4, 3}},
                                                               {&dk_cmp, {B, N, 2, 24}},
                                                               {&dv_cmp, {B, N, 2, 16}}}) {
      *buffer = Buffer(dtype, sizes);
      buffer->FillNormal(++seed);
    }
    lse = Buffer(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {3, B, 4, Tq});
    Choices();
  }
  // Allocates the blocks for these options.
  void Choices() { blocks = Buffer(DType::kI32, {B, Tq, 2, Columns(options, Tk)}); }
  int64_t windows() const { return Tk < options.length ? 0 : (Tk - options.length) / options.stride + 1; }

  Inputs inputs() const {
    Inputs in = {q.view(), k.view(), v.view(), gates.view(), {}, {}};
    if (given) in.k_cmp = k_cmp.view(), in.v_cmp = v_cmp.view();
    return in;
  }
  Outputs outputs() const { return {o.view(), branches.view(), lse.view(), blocks.view()}; }
  BackwardInputs backward_inputs() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.branches = branches.view(), in.lse = lse.view(), in.blocks = blocks.view(), in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const {
    Gradients g = {dq.view(), dk.view(), dv.view(), dgates.view(), {}, {}};
    if (given) g.dk_cmp = dk_cmp.view(), g.dv_cmp = dv_cmp.view();
    return g;
  }
  void Run(int threads = 1) const {
    Context ctx(threads);
    Forward(ctx, inputs(), options, outputs());
    Backward(ctx, backward_inputs(), options, gradients());
  }
  std::vector<Buffer> results() const {
    std::vector<Buffer> all = {o, branches, lse, blocks, dq, dk, dv, dgates};
    if (given) all.insert(all.end(), {dk_cmp, dv_cmp});
    return all;
  }
  std::vector<int> BlocksOf(int64_t b, int64_t i, int64_t h) const {
    std::vector<int> row;
    for (int64_t n = 0; n < blocks.view().size(3); ++n) row.push_back(static_cast<int>(blocks.Get({b, i, h, n})));
    return row;
  }
};

void SetRow(const Buffer& buffer, int64_t b, int64_t t, double value) {
  for (int64_t h = 0; h < buffer.view().size(2); ++h) {
    for (int64_t e = 0; e < buffer.view().size(3); ++e) buffer.Set({b, t, h, e}, value);
  }
}

TEST(NsaTest, AllBlocksAreDenseCausalAttention) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    Fixture f(2, 90, 90, dtype);
    f.options.count = 12;
    f.Choices();
    f.Run();
    attention::Options causal;
    causal.causal = true;
    causal.invariant = true;  // lists of blocks are not computed with AMX
    const Buffer o(dtype, {2, 90, 4, 16}), lse(f.lse.view().dtype(), {2, 4, 90});
    Context ctx(1);
    attention::Forward(ctx, {f.q.view(), f.k.view(), f.v.view()}, causal, {o.view(), lse.view()});
    EXPECT_EQ(Elements(f.branches.view().Slice(0, 1, 2)), Elements(o.view())) << Name(dtype);
    EXPECT_EQ(Elements(f.lse.view().Slice(0, 1, 2)), Elements(lse.view())) << Name(dtype);
  }
}

TEST(NsaTest, TheSumHasTheGates) {
  Fixture f(2, 70, 70);
  f.Run();
  double worst = 0;
  for (int64_t i = 0; i < 70; ++i) {
    double sum = 0;
    for (int64_t c = 0; c < 3; ++c) sum += f.gates.Get({1, i, 2, c}) * f.branches.Get({c, 1, i, 2, 5});
    worst = std::max(worst, std::abs(sum - f.o.Get({1, i, 2, 5})));
  }
  EXPECT_LT(worst, 1e-6);
}

TEST(NsaTest, GivenWindowsBehindTheLastCompleteOneAreNotRead) {
  const Fixture f(1, 30, 30), longer(1, 30, 50);
  Context ctx(1);
  Inputs in = f.inputs();
  in.k_cmp = longer.k_cmp.view().Slice(1, 0, f.windows()), in.v_cmp = longer.v_cmp.view().Slice(1, 0, f.windows());
  Forward(ctx, in, f.options, f.outputs());
  const auto expected = Elements(f.o.view());
  in.k_cmp = longer.k_cmp.view(), in.v_cmp = longer.v_cmp.view();
  Forward(ctx, in, f.options, f.outputs());
  EXPECT_EQ(Elements(f.o.view()), expected);
}

TEST(NsaTest, GivenMeansAreTheMeansOfNothingGiven) {
  Fixture f(2, 70, 70, DType::kF64), given(2, 70, 70, DType::kF64);
  given.given = true;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t w = 0; w < given.windows(); ++w) {
      for (const auto& [from, to] : {std::pair{f.k, given.k_cmp}, {f.v, given.v_cmp}}) {
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t e = 0; e < to.view().size(3); ++e) {
            double sum = 0;
            for (int64_t t = 4 * w; t < 4 * w + 8; ++t) sum += from.Get({b, t, h, e});
            to.Set({b, w, h, e}, sum / 8);
          }
        }
      }
    }
  }
  f.Run();
  given.Run();
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(SameBits(f.results()[i].view(), given.results()[i].view())) << i;
  // The gradient of a mean is divided among its tokens.
  for (int64_t t = 0; t < 70; ++t) {
    double arriving = 0;
    for (int64_t w = 0; w < given.windows(); ++w) {
      if (4 * w <= t && t < 4 * w + 8) arriving += given.dk_cmp.Get({1, w, 1, 3}) / 8;
    }
    EXPECT_NEAR(f.dk.Get({1, t, 1, 3}), given.dk.Get({1, t, 1, 3}) + arriving, 1e-13) << t;
  }
}

TEST(NsaTest, ARowSeesItsFirstOwnAndPreviousBlockAndTheBestOfOthers) {
  Fixture f(1, 90, 90, DType::kF64);
  f.given = true;
  f.q.FillConstant(1);
  f.k_cmp.FillConstant(0);
  // Windows are [4 w, 4 w + 8): window 9 is half in block 4 and half in block 5, window 12 is block 6.
  for (int64_t e = 0; e < 24; ++e) {
    f.k_cmp.Set({0, 9, 0, e}, 0.1);
    f.k_cmp.Set({0, 12, 0, e}, 0.05);
  }
  f.Run();
  EXPECT_THAT(f.BlocksOf(0, 0, 0), ElementsAre(0, -1, -1, -1, -1));
  EXPECT_THAT(f.BlocksOf(0, 39, 0), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(f.BlocksOf(0, 89, 0), ElementsAre(0, 4, 5, 10, 11));
  f.options.count = 6;
  f.Choices();
  f.Run();
  EXPECT_THAT(f.BlocksOf(0, 89, 0), ElementsAre(0, 4, 5, 6, 10, 11));
  EXPECT_THAT(f.BlocksOf(0, 89, 1), ElementsAre(0, 1, 2, 3, 10, 11)) << "of equal ones the lower";
  f.options.count = 1;
  f.Choices();
  f.Run();
  EXPECT_THAT(f.BlocksOf(0, 89, 0), ElementsAre(0, 10, 11));
}

TEST(NsaTest, ImportancesAreSummedOverTheHeadsOfAKeyHead) {
  Fixture f(1, 90, 90, DType::kF64);
  f.given = true;
  f.options.count = 4;
  f.Choices();
  f.q.FillConstant(0);
  f.k_cmp.FillConstant(0);
  const auto point = [&](int64_t window, int64_t head, double logit) {  // with a channel for each head
    f.k_cmp.Set({0, window, 0, head}, 1);
    for (int64_t i = 0; i < 90; ++i) f.q.Set({0, i, head, head}, logit);
  };
  point(6, 0, 30);   // block 3
  point(12, 1, 50);  // block 6: a larger logit has no more weight
  f.Run();
  EXPECT_THAT(f.BlocksOf(0, 89, 0), ElementsAre(0, 6, 10, 11));
  f.q.Set({0, 89, 0, 0}, 60);
  f.Run();
  EXPECT_THAT(f.BlocksOf(0, 89, 0), ElementsAre(0, 3, 10, 11));
}

TEST(NsaTest, BitsDoNotDependOnThreads) {
  for (const bool given : {false, true}) {
    Fixture one(2, 150, 150), three(2, 150, 150);
    one.given = three.given = given;
    one.Run(1);
    three.Run(3);
    for (size_t i = 0; i < one.results().size(); ++i) {
      EXPECT_TRUE(SameBits(one.results()[i].view(), three.results()[i].view())) << i;
    }
  }
}

TEST(NsaTest, BitsDoNotDependOnBatchNeighboursOrStrides) {
  Fixture both(2, 100, 100);
  both.Run();
  for (int64_t b = 0; b < 2; ++b) {
    const Fixture one(1, 100, 100);
    const auto row = [&](const Buffer& buffer) { return buffer.view().Slice(0, b, b + 1); };
    // Tensors with the axis of heads before tokens.
    const auto strided = [&](const Buffer& buffer) {
      const TensorView from = row(buffer);
      const int64_t T = from.size(1), H = from.size(2), D = from.size(3);
      const int64_t sizes[] = {1, T, H, D}, strides[] = {T * H * D, D, T * D, 1};
      const Buffer to(from.dtype(), sizes, strides, Placement::kBeforeGuard);
      std::vector<int64_t> index(4);
      do SetElement(to.view(), index, GetElement(from, index));
      while (NextIndex(from.sizes(), index));
      return to;
    };
    const Buffer q = strided(both.q), k = strided(both.k), v = strided(both.v), gates = strided(both.gates),
                 d_o = strided(both.d_o);
    Context ctx(1);
    BackwardInputs in = one.backward_inputs();
    in.q = q.view(), in.k = k.view(), in.v = v.view(), in.gates = gates.view(), in.d_o = d_o.view();
    Forward(ctx, in, one.options, one.outputs());
    Backward(ctx, in, one.options, one.gradients());
    EXPECT_EQ(Elements(one.o.view()), Elements(row(both.o)));
    EXPECT_EQ(Elements(one.blocks.view()), Elements(row(both.blocks)));
    for (const auto& [a, of] :
         {std::pair{one.dq, both.dq}, {one.dk, both.dk}, {one.dv, both.dv}, {one.dgates, both.dgates}}) {
      EXPECT_EQ(Elements(a.view()), Elements(row(of)));
    }
  }
}

TEST(NsaTest, LastRowsAloneHaveTheBitsOfAllOnVectors) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Fixture whole(1, 150, 150, dtype);
    Context ctx(1);
    ctx.set_isa(AvailableTargets(DType::kF64).front());
    Forward(ctx, whole.inputs(), whole.options, whole.outputs());
    for (const int64_t rows : {1, 7, 70}) {
      const Fixture last(1, rows, 150, dtype);
      Inputs in = whole.inputs();
      in.q = in.q.Slice(1, 150 - rows, 150);
      in.gates = in.gates.Slice(1, 150 - rows, 150);
      Forward(ctx, in, last.options, last.outputs());
      EXPECT_EQ(Elements(last.blocks.view()), Elements(whole.blocks.view().Slice(1, 150 - rows, 150)))
          << Name(dtype) << rows;
      EXPECT_EQ(Elements(last.o.view()), Elements(whole.o.view().Slice(1, 150 - rows, 150))) << Name(dtype) << rows;
    }
  }
}

TEST(NsaTest, ATokenInfluencesNoRowBeforeIt) {
  Fixture clean(1, 100, 100), dirty(1, 100, 100);
  for (const Buffer& buffer : {dirty.q, dirty.k, dirty.v}) SetRow(buffer, 0, 60, kNaN);
  clean.Run();
  dirty.Run();
  EXPECT_EQ(Elements(clean.o.view().Slice(1, 0, 60)), Elements(dirty.o.view().Slice(1, 0, 60)));
  EXPECT_TRUE(std::isnan(dirty.o.Get({0, 60, 0, 0})));
  EXPECT_EQ(Elements(clean.dgates.view().Slice(1, 0, 60)), Elements(dirty.dgates.view().Slice(1, 0, 60)));
}

TEST(NsaTest, BeforeTheFirstWindowTheCompressedBranchIsZero) {
  Fixture f(1, 20, 20);
  f.Run();
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(f.branches.Get({0, 0, i, 1, 2}) == 0, i < 7) << i;
    EXPECT_EQ(f.lse.Get({0, 0, 1, i}) == -HUGE_VAL, i < 7) << i;
  }
}

TEST(NsaTest, AGateOfZeroKeepsItsBranchFromTheGradients) {
  Fixture f(1, 60, 60, DType::kF64);
  f.given = true;
  for (int64_t i = 0; i < 60; ++i) {
    for (int64_t h = 0; h < 4; ++h) f.gates.Set({0, i, h, 0}, 0);
  }
  f.Run();
  for (const Buffer& gradient : {f.dk_cmp, f.dv_cmp}) {
    EXPECT_TRUE(std::ranges::all_of(Elements(gradient.view()), [](double x) { return x == 0; }));
  }
  EXPECT_NE(f.dgates.Get({0, 30, 1, 0}), 0);
}

TEST(NsaTest, EmptySizesAreAllowed) {
  for (const auto& [B, Tq, Tk] : {std::tuple{0, 5, 5}, {2, 0, 9}, {2, 0, 0}, {1, 3, 3}}) {
    const Fixture f(B, Tq, Tk);
    f.Run();
    for (const Buffer& result : f.results()) {
      for (const double x : Elements(result.view())) ASSERT_FALSE(std::isnan(x));
    }
  }
}

TEST(NsaTest, WorkspaceCountsWhatIsNotAskedFor) {
  const Fixture f(1, 128, 128);
  const Context ctx(1);
  const int64_t bytes = Workspace(ctx, f.inputs(), f.options), rows = 128 * 4;
  EXPECT_GT(bytes, 3 * rows * 16 * 4);
  EXPECT_LT(bytes, 3 * rows * 16 * 4 + (1 << 21));
  attention::Options window;
  window.causal = true;
  window.window.left = f.options.window - 1;
  const int64_t of_window =
      attention::BackwardWorkspace(ctx, {f.q.view(), f.k.view(), f.v.view(), {}, {}, {}, {}}, window,
                                   {f.dq.view(), f.dk.view(), f.dv.view(), {}, {}, {}, {}, {}});
  EXPECT_GE(BackwardWorkspace(ctx, f.backward_inputs(), f.options, f.gradients()),
            rows * (2 * 24 + 16) * 4 + of_window);
}

TEST(NsaTest, ErrorsNameTheArgumentAndWriteNothing) {
  Fixture f(1, 30, 30);
  f.o.Poison();
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&, Outputs&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options = f.options;
    Outputs out = f.outputs();
    change(in, options, out);
    EXPECT_THAT([&] { Forward(ctx, in, options, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
  forward([](auto&, Options& o, auto&) { o.block = 0; }, "nsa::Forward: block is 0, expected 1 or more");
  forward([](auto&, Options& o, auto&) { o.count = 0; }, "nsa::Forward: count is 0, expected 1 or more");
  forward([](auto&, Options& o, auto&) { o.window = 0; }, "nsa::Forward: window is 0, expected 1 or more");
  forward([](auto&, Options& o, auto&) { o.length = -1; }, "nsa::Forward: length is -1, expected 0 or more");
  forward([](auto&, Options& o, auto&) { o.stride = -1; }, "nsa::Forward: stride is -1, expected 0 or more");
  forward([](auto&, Options& o, auto&) { o.scale = kNaN; }, "nsa::Forward: scale is nan");
  forward([](Inputs& in, auto&, auto&) { in.gates = {}; }, "nsa::Forward: gates is absent");
  forward([](Inputs& in, auto&, auto&) { in.gates = in.gates.Slice(3, 0, 2); },
          "gates has shape [1,30,4,2], expected [1,30,4,3]");
  forward([](Inputs& in, auto&, auto&) { in.k = in.k.Slice(1, 0, 29), in.v = in.v.Slice(1, 0, 29); },
          "nsa::Forward: q has 30 tokens, expected at most the 29 of k");
  forward([&](Inputs& in, auto&, auto&) { in.k_cmp = f.k_cmp.view(); },
          "v_cmp is absent, expected k_cmp and v_cmp, or none of them");
  forward([&](Inputs& in, auto&, auto&) { in.k_cmp = f.k_cmp.view().Slice(1, 0, 5), in.v_cmp = f.v_cmp.view(); },
          "k_cmp has shape [1,5,2,24], expected [1,N,2,24] with N = 6 or more windows");
  forward([&](Inputs& in, auto&, Outputs& out) { out.branches = {}, (void)in; }, "nsa::Forward: branches is absent");
  forward([&](auto&, auto&, Outputs& out) { out.blocks = out.blocks.Slice(3, 0, 2); },
          "nsa::Forward: blocks has shape");

  f.Run();
  const auto backward = [&](const std::function<void(BackwardInputs&, Gradients&)>& change,
                            const std::string& message) {
    BackwardInputs in = f.backward_inputs();
    Gradients g = f.gradients();
    change(in, g);
    EXPECT_THAT([&] { Backward(ctx, in, f.options, g); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
  };
  backward([](BackwardInputs& in, auto&) { in.d_o = {}; }, "nsa::Backward: d_o is absent");
  backward([](BackwardInputs& in, auto&) { in.blocks = {}; }, "nsa::Backward: blocks is absent");
  backward([&](auto&, Gradients& g) { g.dk_cmp = f.dk_cmp.view(); }, "dk_cmp is asked for, expected k_cmp with it");
  backward([](auto&, Gradients& g) { g.dq = g.dq.Slice(1, 0, 3); }, "dq has shape [1,3,4,24], expected [1,30,4,24]");
  backward([&](auto&, Gradients& g) { g.dgates = f.gates.view(); }, "dgates overlaps gates");
}

}  // namespace
}  // namespace heed::nsa
