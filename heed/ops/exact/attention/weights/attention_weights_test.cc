// Weights and Map against their references and each other, and their errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

// Random problems that are not packed.
template <class F>
void ForRandomProblems(DType dtype, int count, uint64_t first_seed, const F& f) {
  for (uint64_t seed = first_seed; count > 0; ++seed) {
    const Problem p = RandomProblem(dtype, seed);
    if (p.options.cu_seqlens_q) continue;
    SCOPED_TRACE(Title(p));
    f(p, seed);
    if (testing::Test::HasFailure()) return;
    --count;
  }
}

struct Shape {
  int64_t B, Tq, Tk, H;
};

Shape ShapeOf(const Problem& p) { return {p.in.q.size(0), p.in.q.size(1), p.in.k.size(1), p.in.q.size(2)}; }

DType OutType(const Problem& p) { return p.in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }

Buffer WeightsOf(Context& ctx, const Problem& p, const WeightsSelection& selection = {},
                 const ConstTensorView& lse = {}) {
  const Shape n = ShapeOf(p);
  const Buffer out(OutType(p), {n.B, selection.heads ? selection.heads.size(0) : n.H,
                                selection.rows ? selection.rows.size(0) : n.Tq, n.Tk});
  Weights(ctx, {p.in.q, p.in.k, lse}, p.options, selection, out.view());
  return out;
}

Buffer MapOf(Context& ctx, const Problem& p, int64_t rows, int64_t columns, Reduce reduce) {
  const Shape n = ShapeOf(p);
  const Buffer out(OutType(p), {n.B, n.H, rows, columns});
  Map(ctx, {p.in.q, p.in.k, {}}, p.options, reduce, out.view());
  return out;
}

// `got` agrees with `expected`: NaN with NaN, otherwise within `relative`; subnormal numbers may be 0.
void ExpectClose(const Buffer& got, const Buffer& expected, double relative) {
  if (expected.view().num_elements() == 0) return;
  std::vector<int64_t> index(4);
  do {
    const double x = GetElement(got.view(), index);
    const double y = GetElement(expected.view(), index);
    if (std::isnan(y)) {
      ASSERT_TRUE(std::isnan(x)) << ShapeString(index) << " is " << x;
    } else {
      ASSERT_LE(std::abs(x - y), relative * y + 1e-37) << ShapeString(index) << " is " << x << ", expected " << y;
    }
  } while (NextIndex(expected.view().sizes(), index));
}

// Relative error of P: those of a logit of up to 200 and of the lse. Larger logits are skipped, as are biases near the
// largest number.
bool HasOrdinaryLogits(const Problem& p) {
  Context ctx(1);
  Problem wide = p;
  DescribeOutputs(wide);
  const Result r = RunForward(ctx, wide);
  std::vector<int64_t> index(3);
  if (r.lse.view().num_elements() == 0) return true;
  do {
    const double lse = GetElement(r.lse.view(), index);
    if (std::isfinite(lse) && std::abs(lse) > 100) return false;
  } while (NextIndex(r.lse.view().sizes(), index));
  return true;
}

double Relative(DType dtype) { return dtype == DType::kF64 ? 1e-11 : 2e-4; }

TEST(AttentionWeights, AgreeWithTheReferenceOnEveryTarget) {
  for (const DType dtype : kDTypes) {
    for (const std::string& target : AvailableTargets()) {
      SCOPED_TRACE(target);
      Context ctx(2);
      ctx.set_isa(target);
      ForRandomProblems(dtype, 60, 11, [&](const Problem& p, uint64_t) {
        if (!HasOrdinaryLogits(p)) return;
        const Shape n = ShapeOf(p);
        const Buffer expected(DType::kF64, {n.B, n.H, n.Tq, n.Tk});
        WeightsReference({p.in.q, p.in.k, {}}, p.options, {}, expected.view());
        ExpectClose(WeightsOf(ctx, p), expected, Relative(dtype));
      });
    }
  }
}

TEST(AttentionWeights, RowsSumToOneOrAreZeroAndGiveTheOutput) {
  Context ctx(1);
  Problem p = MakeProblem(DType::kF64, {.B = 2, .Tq = 70, .Tk = 130, .Hq = 4, .Hkv = 2, .D = 12, .Dv = 6});
  p.options.causal = true;
  p.options.query_lengths = KeepInts(p, {70, 60});
  const Result r = RunForward(ctx, p);
  const Buffer weights = WeightsOf(ctx, p);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 70; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        double sum = 0, o = 0;
        for (int64_t j = 0; j < 130; ++j) {
          const double P = weights.Get({b, h, i, j});
          sum += P;
          o += P * p.memory[2].Get({b, j, h / 2, 5});
        }
        EXPECT_NEAR(sum, b == 1 && i >= 60 ? 0 : 1, 1e-13);
        EXPECT_NEAR(o, r.o.Get({b, i, h, 5}), 1e-13);
      }
    }
  }
}

TEST(AttentionWeights, SinksTakeTheirShare) {
  Context ctx(1);
  Problem p = MakeProblem(DType::kF32, {.B = 1, .Tq = 3, .Tk = 20, .Hq = 3});
  const double infinity = std::numeric_limits<double>::infinity();
  p.options.sinks = KeepFloats(p, {1.0, -infinity, infinity});
  p.options.invariant = true;  // the kernels that Weights uses, for the bits of its lse
  const Result r = RunForward(ctx, p);
  const Buffer computed = WeightsOf(ctx, p);
  const Buffer given = WeightsOf(ctx, p, {}, r.lse.view());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t h = 0; h < 3; ++h) {
      double sum = 0;
      for (int64_t j = 0; j < 20; ++j) {
        sum += computed.Get({0, h, i, j});
        EXPECT_EQ(computed.Get({0, h, i, j}), given.Get({0, h, i, j}));
      }
      const double lse = r.lse.Get({0, h, i});
      EXPECT_NEAR(sum, h == 0 ? 1 / (1 + std::exp(1 - lse)) : h == 1 ? 1 : 0, 1e-5);
    }
  }
}

TEST(AttentionWeights, ARowDependsOnNothingButItself) {
  for (const DType dtype : kDTypes) {
    Context one(1), three(3);
    ForRandomProblems(dtype, 40, 500, [&](Problem p, uint64_t seed) {
      const Shape n = ShapeOf(p);
      if (n.B * n.Tq * n.H * n.Tk == 0) return;
      const Buffer all = WeightsOf(one, p);
      EXPECT_EQ(Difference(all.view(), WeightsOf(three, p).view()), "");
      Random random(seed, 1);
      std::vector<int64_t> rows, heads;
      for (int i = 0; i < 5; ++i) {  // unordered, some twice
        rows.push_back(random.Integer(0, n.Tq - 1));
        heads.push_back(random.Integer(0, n.H - 1));
      }
      const WeightsSelection some = {KeepInts(p, rows), KeepInts(p, heads)};
      const Buffer chosen = WeightsOf(three, p, some);
      for (int64_t b = 0; b < n.B; ++b) {
        for (int64_t h = 0; h < 5; ++h) {
          for (int64_t r = 0; r < 5; ++r) {
            for (int64_t j = 0; j < n.Tk; ++j) {
              const double x = chosen.Get({b, h, r, j});
              const double y = all.Get({b, heads[static_cast<size_t>(h)], rows[static_cast<size_t>(r)], j});
              ASSERT_TRUE(x == y || (std::isnan(x) && std::isnan(y)));
            }
          }
        }
      }
    });
  }
}

// Tiles of any problem, packed ones too, with and without the lse of the forward pass.
TEST(AttentionWeights, TilesAgreeWithTheReferenceOnEveryTarget) {
  for (const DType dtype : kDTypes) {
    for (const std::string& target : AvailableTargets()) {
      SCOPED_TRACE(target);
      Context ctx(2);
      ctx.set_isa(target);
      int packed = 0, dropped = 0;
      for (uint64_t seed = 3000; seed < 3120; ++seed) {
        Problem p = RandomProblem(dtype, seed);
        SCOPED_TRACE(Title(p));
        if (!HasOrdinaryLogits(p)) continue;
        const bool is_packed = p.options.cu_seqlens_q.present();
        const int rank = p.in.q.rank();
        Random random(seed, 3);
        Tile tile = {.sequence = 0, .dropout = random.Integer(0, 1) == 1};
        int64_t rows = p.in.q.size(rank - 3), keys = p.in.k.size(rank - 3);
        if (is_packed) {
          const ConstTensorView& cu_q = p.options.cu_seqlens_q;
          const ConstTensorView& cu_k = p.options.cu_seqlens_k ? p.options.cu_seqlens_k : cu_q;
          if (cu_q.size(0) < 2) continue;
          tile.sequence = random.Integer(0, cu_q.size(0) - 2);
          const auto length = [&](const ConstTensorView& cu) {
            return LoadAsInt64(cu.dtype(), cu.data(), (tile.sequence + 1) * cu.stride(0)) -
                   LoadAsInt64(cu.dtype(), cu.data(), tile.sequence * cu.stride(0));
          };
          rows = length(cu_q);
          keys = length(cu_k);
        } else if (p.in.q.size(0) > 0) {
          tile.sequence = random.Integer(0, p.in.q.size(0) - 1);
        } else {
          continue;
        }
        const int64_t heads = p.in.q.size(rank - 2);
        tile.first_head = random.Integer(0, heads);
        tile.first_row = random.Integer(0, rows);
        tile.first_key = random.Integer(0, keys);
        const std::vector<int64_t> sizes = {random.Integer(0, heads - tile.first_head),
                                            random.Integer(0, rows - tile.first_row),
                                            random.Integer(0, keys - tile.first_key)};
        DescribeOutputs(p);
        const Result forward = RunForward(ctx, p);
        const ConstTensorView lse = random.Integer(0, 1) == 1 ? ConstTensorView(forward.lse.view()) : ConstTensorView();
        const WeightsInputs in = {p.in.q, p.in.k, lse};
        const Buffer got(OutType(p), sizes), expected(DType::kF64, sizes);
        TileOfWeights(ctx, in, p.options, tile, got.view());
        TileOfWeightsReference(in, p.options, tile, expected.view());
        packed += is_packed;
        dropped += tile.dropout && p.options.dropout > 0;
        if (got.view().num_elements() == 0) continue;
        std::vector<int64_t> at(3);
        do {
          const double x = GetElement(got.view(), at), y = GetElement(expected.view(), at);
          if (std::isnan(y)) {  // a dropped pair may be 0
            ASSERT_TRUE(std::isnan(x) || (tile.dropout && x == 0)) << ShapeString(at) << " is " << x;
          } else {
            ASSERT_LE(std::abs(x - y), Relative(dtype) * y + 1e-37) << ShapeString(at) << ": " << x << ", not " << y;
          }
        } while (NextIndex(sizes, at));
      }
      EXPECT_GT(packed, 5);
      EXPECT_GT(dropped, 5);
    }
  }
}

TEST(AttentionWeights, TilesAreInsideTheirSequence) {
  const Problem p = MakeProblem(DType::kF32, {.B = 2, .Tq = 5, .Tk = 6, .Hq = 4, .Hkv = 2, .D = 4});
  Context ctx(1);
  const Buffer out(DType::kF32, {4, 2, 3}), flat(DType::kF32, {4, 6});
  const auto message = [&](const Tile& tile, const Buffer& to) -> std::string {
    try {
      TileOfWeights(ctx, {p.in.q, p.in.k, {}}, p.options, tile, to.view());
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({.sequence = 1, .first_row = 3, .first_key = 3}, out), "no error");
  EXPECT_EQ(message({.sequence = 2}, out), "attention::TileOfWeights: sequence is 2, expected an index below 2");
  EXPECT_EQ(message({.sequence = -1}, out), "attention::TileOfWeights: sequence is -1, expected an index below 2");
  EXPECT_EQ(message({.first_head = 1}, out),
            "attention::TileOfWeights: first_head is 1 of 4, expected a place for them among 4");
  EXPECT_EQ(message({.first_row = 4}, out),
            "attention::TileOfWeights: first_row is 4 of 2, expected a place for them among 5");
  EXPECT_EQ(message({.first_key = -1}, out),
            "attention::TileOfWeights: first_key is -1 of 3, expected a place for them among 6");
  EXPECT_EQ(message({}, flat), "attention::TileOfWeights: out has shape [4,6], expected [heads, rows, keys]");
}

TEST(AttentionMap, PoolsTheWeights) {
  for (const DType dtype : kDTypes) {
    Context one(1), three(3);
    ForRandomProblems(dtype, 60, 900, [&](const Problem& p, uint64_t seed) {
      const Shape n = ShapeOf(p);
      if (n.B * n.Tq * n.H * n.Tk == 0) return;
      Random random(seed, 2);
      const int64_t r = random.Integer(1, n.Tq), c = random.Integer(1, n.Tk);
      const Buffer weights = WeightsOf(one, p);
      Buffer mean(DType::kF64, {n.B, n.H, r, c}), max(DType::kF64, {n.B, n.H, r, c});
      Buffer pairs(DType::kF64, {n.B, n.H, r, c});
      for (const Buffer* b : {&mean, &max, &pairs}) b->FillConstant(0);
      std::vector<int64_t> at(4);
      do {
        const double P = GetElement(weights.view(), at);
        const int64_t bin[] = {at[0], at[1], at[2] * r / n.Tq, at[3] * c / n.Tk};
        SetElement(mean.view(), bin, GetElement(mean.view(), bin) + P);
        SetElement(pairs.view(), bin, GetElement(pairs.view(), bin) + 1);
        const double old = GetElement(max.view(), bin);
        SetElement(max.view(), bin, P > old || std::isnan(P) ? P : old);
      } while (NextIndex(weights.view().sizes(), at));
      at.assign(4, 0);
      do {
        SetElement(mean.view(), at, GetElement(mean.view(), at) / GetElement(pairs.view(), at));
      } while (NextIndex(mean.view().sizes(), at));
      const Buffer got = MapOf(one, p, r, c, Reduce::kMean);
      ExpectClose(got, mean, dtype == DType::kF64 ? 1e-13 : 1e-5);
      ExpectClose(MapOf(one, p, r, c, Reduce::kMax), max, 0);
      EXPECT_EQ(Difference(got.view(), MapOf(three, p, r, c, Reduce::kMean).view()), "");
    });
  }
}

TEST(AttentionMap, AgreesWithTheReference) {
  for (const DType dtype : kDTypes) {
    Context ctx(2);
    ForRandomProblems(dtype, 40, 2000, [&](const Problem& p, uint64_t) {
      if (!HasOrdinaryLogits(p)) return;
      const Shape n = ShapeOf(p);
      const int64_t r = std::min<int64_t>(n.Tq, 7), c = std::min<int64_t>(n.Tk, 9);
      for (const Reduce reduce : {Reduce::kMean, Reduce::kMax}) {
        const Buffer expected(DType::kF64, {n.B, n.H, r, c});
        MapReference({p.in.q, p.in.k, {}}, p.options, reduce, expected.view());
        ExpectClose(MapOf(ctx, p, r, c, reduce), expected, Relative(dtype));
      }
    });
  }
}

TEST(AttentionWeights, ErrorsNameTheArgument) {
  const Problem plain = MakeProblem(DType::kF32, {.B = 2, .Tq = 5, .Tk = 6, .Hq = 4, .Hkv = 2, .D = 4});
  Context ctx(1);
  const Buffer out(DType::kF32, {2, 4, 5, 6});
  const auto message =
      [&](const std::function<void(Problem&, WeightsInputs&, WeightsSelection&, TensorView&)>& change) -> std::string {
    Problem p = plain;
    WeightsInputs in = {p.in.q, p.in.k, {}};
    WeightsSelection selection;
    TensorView to = out.FillConstant(7).view();
    change(p, in, selection, to);
    try {
      Weights(ctx, in, p.options, selection, to);
    } catch (const InvalidArgument& e) {
      EXPECT_EQ(out.Get({1, 3, 4, 5}), 7) << "written";
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([](Problem& p, auto&, WeightsSelection& s, auto&) { s.rows = KeepInts(p, {0, 5}); }),
            "attention::Weights: rows contains 5, expected 0 to 4");
  EXPECT_EQ(message([](Problem& p, auto&, WeightsSelection& s, auto&) { s.heads = KeepInts(p, {-1}); }),
            "attention::Weights: heads contains -1, expected 0 to 3");
  EXPECT_EQ(message([](Problem& p, auto&, WeightsSelection& s, auto&) { s.heads = KeepFloats(p, {1}); }),
            "attention::Weights: heads has dtype f32, expected i32 or i64");
  EXPECT_EQ(message([&](Problem&, WeightsInputs& in, auto&, auto&) { in.lse = plain.in.q; }),
            "attention::Weights: lse has shape " + plain.in.q.ShapeString() + ", expected [2,4,5]");
  EXPECT_EQ(message([](Problem& p, auto&, auto&, auto&) { p.options.cu_seqlens_q = KeepInts(p, {0, 5}); }),
            "attention::Weights: cu_seqlens_q is given, expected padded sequences");
  EXPECT_EQ(message([](auto&, auto&, auto&, TensorView& to) { to = to.Slice(3, 0, 5); }),
            "attention::Weights: out has shape [2,4,5,5], expected [2,4,5,6]");
  EXPECT_THAT(message([](Problem& p, WeightsInputs& in, auto&, auto&) { in.k = p.in.k.Slice(3, 0, 1); }),
              HasSubstr("attention::Weights: k has shape"));
  EXPECT_THAT(message([](Problem& p, auto&, auto&, auto&) { p.options.chunk = -2; }),
              HasSubstr("attention::Weights: chunk is -2"));
  const Buffer wide(DType::kF64, {2, 4, 5, 6});
  EXPECT_EQ(message([&](auto&, auto&, auto&, TensorView& to) { to = wide.view(); }),
            "attention::Weights: out has dtype f64, expected f32");

  const WeightsInputs in = {plain.in.q, plain.in.k, {}};
  for (const auto& [r, c, what] : {std::tuple<int64_t, int64_t, std::string>{6, 6, "6 rows, expected 1 to 5"},
                                   {0, 6, "0 rows, expected 1 to 5"},
                                   {5, 7, "7 columns, expected 1 to 6"}}) {
    const Buffer map(DType::kF32, {2, 4, r, c});
    try {
      Map(ctx, in, {}, Reduce::kMean, map.view());
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& e) {
      EXPECT_EQ(e.what(), "attention::Map: out has " + what);
    }
  }
}

}  // namespace
}  // namespace heed::attention
