// Properties of Linformer that comparison with its reference cannot show, and sizes with several rounds of tokens and
// several groups of sequences.
#include "heed/ops/linear/linformer/linformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::linformer {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// A call with its memory.
struct Call {
  Buffer q, k, v, e, f, d_o;
  Buffer o, dq, dk, dv, de, df;
  Options options;

  Call(DType dtype, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t R, int64_t columns,
       uint64_t seed = 1) {
    const auto fill = [&](std::initializer_list<int64_t> sizes, double deviation) {
      return Buffer(dtype, sizes).FillNormal(++seed, deviation);
    };
    q = fill({B, T, H, K}, 1);
    k = fill({B, T, H, K}, 1);
    v = fill({B, T, HV, V}, 1);
    e = fill({R, columns}, 0.2);
    f = fill({R, columns}, 0.2);
    d_o = fill({B, T, HV, V}, 1);
    o = Buffer(dtype, {B, T, HV, V});
    dq = Buffer(dtype, {B, T, H, K});
    dk = Buffer(dtype, {B, T, H, K});
    dv = Buffer(dtype, {B, T, HV, V});
    de = Buffer(dtype, {R, columns});
    df = Buffer(dtype, {R, columns});
  }
  BackwardInputs Inputs() const { return {{{q.view(), k.view(), v.view(), e.view(), f.view()}, {}}, d_o.view()}; }
  Gradients Results() const { return {{dq.view(), dk.view(), dv.view(), de.view(), df.view()}}; }
  std::vector<Buffer> Run(int threads = 2) const {
    Context ctx(threads);
    for (const Buffer& b : {o, dq, dk, dv, de, df}) b.Poison();
    Forward(ctx, Inputs(), options, {o.view()});
    Backward(ctx, Inputs(), options, Results());
    return {o, dq, dk, dv, de, df};
  }
};

Buffer Ints(const std::vector<int64_t>& values) {
  const Buffer buffer(DType::kI64, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    buffer.as<int64_t>()[i] = values[i];
  }
  return buffer;
}

TensorView Tokens(const Buffer& b, int64_t begin, int64_t end) { return b.view().Slice(1, begin, end); }

void ExpectZero(const ConstTensorView& t) {
  std::vector<int64_t> index(static_cast<size_t>(t.rank()));
  if (t.num_elements() == 0) return;
  do {
    ASSERT_EQ(GetElement(t, index), 0);
  } while (NextIndex(t.sizes(), index));
}

TEST(LinformerTest, RoundsAndGroupsAgreeWithTheReference) {
  const OpEntry op = FindOp("linformer");
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const std::string& pass : op.passes) {
      // Two rounds of one sequence, then 70 sequences in two groups.
      for (const Sizes& sizes : {Sizes{2, 4200, 3, 2, 1, 3, 4}, Sizes{70, 64, 5, 1, 1, 4, 3}}) {
        const Comparison result = Compare(op.make_case({sizes, dtype, 3, pass, ""}), ctx);
        EXPECT_TRUE(result.ok) << Name(dtype) << " " << sizes << ": " << result.message;
      }
    }
  }
}

TEST(LinformerTest, ThreadsDoNotShowInTheBits) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    const Call one(dtype, 3, 150, 2, 4, 24, 17, 70, 150);
    const Call other(dtype, 3, 150, 2, 4, 24, 17, 70, 150);
    const auto expected = one.Run(1), results = other.Run(4);
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(SameBits(results[i].view(), expected[i].view())) << Name(dtype) << i;
    }
  }
}

TEST(LinformerTest, ASequenceHasTheSameBitsAloneInABatchPackedAndPadded) {
  constexpr int64_t kT = 70;
  Call batch(DType::kF32, 3, 100, 2, 2, 20, 12, 9, 100);
  const Buffer lengths = Ints({100, kT, 0});
  batch.options.lengths = lengths.view();
  const auto in_batch = batch.Run();

  Call alone = batch;
  const auto second = [](const Buffer& b) { return b.As(Tokens(b, 0, kT).Slice(0, 1, 2)); };
  for (Buffer* b : {&alone.q, &alone.k, &alone.v, &alone.d_o}) *b = second(*b);
  alone.o = Buffer(DType::kF32, {1, kT, 2, 12});
  alone.dq = Buffer(DType::kF32, {1, kT, 2, 20});
  alone.dk = Buffer(DType::kF32, {1, kT, 2, 20});
  alone.dv = Buffer(DType::kF32, {1, kT, 2, 12});
  alone.de = Buffer(DType::kF32, {9, 100});
  alone.df = Buffer(DType::kF32, {9, 100});
  alone.options = {};
  const auto results = alone.Run();
  for (size_t i = 0; i < 4; ++i) {  // gradients of e and f are sums over the batch
    EXPECT_TRUE(SameBits(results[i].view(), second(in_batch[i]).view())) << i;
    ExpectZero(Tokens(in_batch[i], kT, 100).Slice(0, 1, 2));
    ExpectZero(in_batch[i].view().Slice(0, 2, 3));
  }
  ExpectZero(results[4].view().Slice(1, kT, 100));  // unused columns
  ExpectZero(results[5].view().Slice(1, kT, 100));

  // Tokens 30 .. 99 of a packed call, which follow another sequence and precede unused tokens.
  Call packed(DType::kF32, 1, 110, 2, 2, 20, 12, 9, 100);
  packed.e = batch.e;
  packed.f = batch.f;
  for (const auto& [to, from] :
       {std::pair{&packed.q, &alone.q}, {&packed.k, &alone.k}, {&packed.v, &alone.v}, {&packed.d_o, &alone.d_o}}) {
    std::vector<int64_t> index(4);
    const TensorView place = Tokens(*to, 30, 30 + kT);
    do {
      SetElement(place, index, GetElement(from->view(), index));
    } while (NextIndex(place.sizes(), index));
  }
  const Buffer bounds = Ints({0, 30, 30, 30 + kT});
  packed.options.cu_seqlens = bounds.view();
  const auto in_pack = packed.Run();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(SameBits(results[i].view(), Tokens(in_pack[i], 30, 30 + kT))) << i;
    ExpectZero(Tokens(in_pack[i], 30 + kT, 110));
  }
}

TEST(LinformerTest, TokensThatDoNotCountAreNotReadAndKeepTheirColumns) {
  Call call(DType::kF64, 2, 40, 1, 2, 6, 5, 4, 43);
  const Buffer starts = Ints({7, 0}), lengths = Ints({33, 40});
  call.options.starts = starts.view();
  call.options.lengths = lengths.view();
  const auto results = call.Run();
  std::vector<Buffer> kept;
  for (const Buffer& b : results) {
    kept.push_back(Buffer(DType::kF64, b.view().sizes()));
    std::vector<int64_t> index(b.view().sizes().size());
    do {
      SetElement(kept.back().view(), index, GetElement(b.view(), index));
    } while (NextIndex(b.view().sizes(), index));
  }
  // Zeros at excluded tokens give the same sums.
  Call zeros = call;
  zeros.options = {};
  for (Buffer* b : {&zeros.q, &zeros.k, &zeros.v, &zeros.d_o}) {
    const Buffer copy(DType::kF64, b->view().sizes());
    std::vector<int64_t> index(4);
    do {
      const bool counts = index[0] == 1 || (index[1] >= 7 && index[1] < 33);
      SetElement(copy.view(), index, counts ? GetElement(b->view(), index) : 0);
    } while (NextIndex(copy.view().sizes(), index));
    *b = copy;
  }
  Context ctx(1);
  const Buffer o(DType::kF64, {2, 40, 2, 5}), dk(DType::kF64, {2, 40, 1, 6});
  const Buffer de(DType::kF64, {4, 43});
  Gradients g;
  g.k = dk.view();
  g.e = de.view();
  Forward(ctx, zeros.Inputs(), {}, {o.view()});
  Backward(ctx, zeros.Inputs(), {}, g);
  for (int64_t t = 7; t < 33; ++t) {
    EXPECT_NEAR(o.Get({0, t, 1, 2}), kept[0].Get({0, t, 1, 2}), 1e-13);
    EXPECT_NEAR(dk.Get({0, t, 0, 3}), kept[2].Get({0, t, 0, 3}), 1e-13);
  }
  for (int64_t c = 0; c < 43; ++c) EXPECT_NEAR(de.Get({2, c}), kept[4].Get({2, c}), 1e-12);

  // Excluded tokens may hold anything.
  for (const Buffer* b : {&call.q, &call.k, &call.v, &call.d_o}) {
    std::vector<int64_t> index(4);
    do {
      if (index[0] == 0 && (index[1] < 7 || index[1] >= 33)) {
        SetElement(b->view(), index, std::numeric_limits<double>::quiet_NaN());
      }
    } while (NextIndex(b->view().sizes(), index));
  }
  for (const Buffer* m : {&call.e, &call.f}) {
    for (int64_t r = 0; r < 4; ++r) {
      m->Set({r, 41}, std::numeric_limits<double>::infinity());  // an unused column
    }
  }
  const auto again = call.Run();
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_TRUE(SameBits(again[i].view(), kept[i].view())) << i;
  }
}

TEST(LinformerTest, OneProjectedTokenHasAllTheWeight) {
  const Call call(DType::kF64, 1, 9, 1, 1, 3, 4, 1, 9);
  const auto results = call.Run();
  for (int64_t c = 0; c < 4; ++c) {
    double sum = 0;
    for (int64_t t = 0; t < 9; ++t) sum += call.f.Get({0, t}) * call.v.Get({0, t, 0, c});
    for (int64_t t = 0; t < 9; ++t) EXPECT_NEAR(results[0].Get({0, t, 0, c}), sum, 1e-14);
  }
  for (const size_t i : {1, 2, 4}) {  // dq, dk, de: with one key the probability is constant
    std::vector<int64_t> index(results[i].view().sizes().size());
    do {
      EXPECT_NEAR(GetElement(results[i].view(), index), 0, 1e-14);
    } while (NextIndex(results[i].view().sizes(), index));
  }
}

TEST(LinformerTest, ProjectionsOntoTokensAreAttention) {
  // E = F = the identity: every token is projected onto itself.
  const int64_t T = 12;
  const Call call(DType::kF64, 1, T, 1, 1, 5, 3, T, T);
  for (int64_t r = 0; r < T; ++r) {
    for (int64_t t = 0; t < T; ++t) {
      call.e.Set({r, t}, r == t);
      call.f.Set({r, t}, r == t);
    }
  }
  call.Run();
  for (int64_t i = 0; i < T; ++i) {
    double sum = 0, o = 0;
    for (int64_t j = 0; j < T; ++j) {
      double s = 0;
      for (int64_t c = 0; c < 5; ++c) s += call.q.Get({0, i, 0, c}) * call.k.Get({0, j, 0, c});
      const double w = std::exp(s / std::sqrt(5.0));
      sum += w;
      o += w * call.v.Get({0, j, 0, 1});
    }
    EXPECT_NEAR(call.o.Get({0, i, 0, 1}), o / sum, 1e-13);
  }
}

TEST(LinformerTest, NoTokensAreLegalAndTheirGradientsZero) {
  for (const int64_t B : {0, 2}) {
    const Call call(DType::kF32, B, B == 0 ? 5 : 0, 1, 2, 3, 4, 6, 7);
    const auto results = call.Run();
    ExpectZero(results[4].view());
    ExpectZero(results[5].view());
  }
  Call none(DType::kF32, 2, 5, 1, 2, 3, 4, 6, 5);
  const Buffer lengths = Ints({0, 0});
  none.options.lengths = lengths.view();
  for (const Buffer& b : none.Run()) ExpectZero(b.view());
}

TEST(LinformerTest, WorkspaceIsWithinItsBound) {
  for (const int threads : {1, 3}) {
    Context ctx(threads);
    for (const int64_t T : {100, 100'000}) {
      const int64_t H = 4, K = 64, V = 32, R = 128;
      const auto view = [](std::initializer_list<int64_t> sizes) {
        return ConstTensorView(nullptr, DType::kF32, sizes);
      };
      const Inputs in = {view({2, T, H, K}), view({2, T, H, K}), view({2, T, H, V}), view({R, T}), view({R, T})};
      const double M = std::max(4.0 * 1024 * 1024, 4.0 * H * (K + V) * R);
      // Attention's formula: a block of 64 rows, or 256 keys, per thread.
      const double attention = threads * 4.0 * (64 * (K + 64 + 2 * V) + R * (K + V));
      EXPECT_LE(Workspace(ctx, in, {}), 2 * M + attention + 65536 * threads);
      const double own = threads * 4.0 * (16384 + 384 * (K + 15));
      const double backward = threads * 4.0 * (512 * (K + V) + 64 * (3 * K + 2 * V + 64 * 3)) + 4.0 * 4096 * H * 8;
      EXPECT_LE(BackwardWorkspace(ctx, in, {}), 6 * M + 8.0 * R * static_cast<double>(T + 63) + backward + own + 65536);
    }
  }
}

TEST(LinformerTest, BackwardWorkspaceHasThatOfAttention) {
  Context ctx(1);
  const int64_t T = 128, H = 64, C = 4, R = 1;  // few channels, so that a round's sums per row are a large part
  const Call call(DType::kF32, 1, T, H, H, C, C, R, T);
  const auto heads = [&](const Buffer& b) { return b.view().Slice(1, 0, R); };
  const int64_t attention =
      attention::BackwardWorkspace(ctx, {call.q.view(), heads(call.k), heads(call.v), {}, {}, {}, {}}, {},
                                   {call.dq.view(), heads(call.dk), heads(call.dv), {}, {}, {}, {}});
  const int64_t own = 4 * (2 * 2 * T * H * C + T * H + 6 * R * H * C + 2 * R * T);
  EXPECT_GE(BackwardWorkspace(ctx, call.Inputs(), {}), own + attention);
}

TEST(LinformerTest, ExplainCountsProjectionsAndPairs) {
  Context ctx(1);
  const Call call(DType::kF32, 2, 30, 2, 4, 8, 6, 5, 30);
  const Explanation x = Explain(ctx, call.Inputs(), {});
  EXPECT_EQ(x.flops, 4.0 * 60 * 5 * (2 * 8 + 4 * 6));
  EXPECT_EQ(x.visited_pairs, 60.0 * 5 * 2);
  EXPECT_EQ(x.bytes, 4.0 * (60 * (2 * 2 * 8 + 2 * 4 * 6) + 2 * 5 * 30));
  EXPECT_EQ(x.workspace_bytes, Workspace(ctx, call.Inputs(), {}));
  EXPECT_THAT(x.kernel, HasSubstr("linformer on softmax_"));
}

// Expects the message from both passes, and that no output was written.
void ExpectMistake(Call& call, const std::string& what) {
  Context ctx(1);
  for (const Buffer& b : {call.o, call.dq, call.dk, call.dv, call.de, call.df}) b.FillConstant(7);
  EXPECT_THAT([&] { Forward(ctx, call.Inputs(), call.options, {call.o.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("linformer::Forward: " + what)));
  EXPECT_THAT([&] { Backward(ctx, call.Inputs(), call.options, call.Results()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("linformer::Backward: " + what)));
  for (const Buffer& b : {call.o, call.dq, call.dk, call.dv, call.de, call.df}) {
    std::vector<int64_t> index(b.view().sizes().size());
    do {
      ASSERT_EQ(GetElement(b.view(), index), 7);
    } while (NextIndex(b.view().sizes(), index));
  }
}

TEST(LinformerTest, MistakesAreNamedAndNothingIsWritten) {
  const Call good(DType::kF32, 2, 10, 2, 4, 3, 4, 5, 10);
  const auto with = [&](const auto& change, const std::string& what) {
    Call call = good;
    change(call);
    ExpectMistake(call, what);
  };
  const Buffer wrong(DType::kF32, {2, 10, 2, 5}), narrow(DType::kF32, {5, 9});
  const Buffer few(DType::kF32, {4, 10}), f64(DType::kF64, {5, 10}), empty(DType::kF32, {0, 10});
  const Buffer three(DType::kF32, {2, 10, 3, 4});
  with([&](Call& c) { c.q = Buffer(); }, "q is absent");
  with([&](Call& c) { c.k = wrong; }, "k has shape [2,10,2,5], expected [2,10,2,3]");
  with([&](Call& c) { c.v = three; }, "v has 3 heads, expected a multiple of the 2 heads of q");
  with([&](Call& c) { c.v = narrow; }, "v has shape [5,9], expected rank 4: [B, T, H, D]");
  with([&](Call& c) { c.e = Buffer(); }, "e is absent");
  with([&](Call& c) { c.e = narrow; }, "e has shape [5,9], expected [R >= 1, at least 10 columns]");
  with([&](Call& c) { c.e = empty; }, "e has shape [0,10], expected [R >= 1, at least 10 columns]");
  with([&](Call& c) { c.f = few; }, "f has shape [4,10], expected [5, at least 10 columns]");
  with([&](Call& c) { c.f = f64; }, "f has dtype f64, expected f32");
  with([&](Call& c) { c.options.scale = INFINITY; }, "scale is inf, expected a finite number");
  with([&](Call& c) { c.options.scale = 1e39; }, "scale is 1e+39, expected a finite number");
  const Buffer long_lengths = Ints({11, 3}), one = Ints({1}), descending = Ints({0, 5, 4});
  with([&](Call& c) { c.options.lengths = long_lengths.view(); }, "lengths[0] is 11, expected 0 to T = 10");
  with([&](Call& c) { c.options.starts = one.view(); }, "starts has shape [1], expected [2]");
  with([&](Call& c) { c.options.cu_seqlens = descending.view(); },
       "q has shape [2,10,2,3], expected a leading axis of 1 with cu_seqlens");

  Context ctx(1);
  Call call = good;
  EXPECT_THAT([&] { Forward(ctx, call.Inputs(), {}, {call.v.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("o overlaps v")));
  Gradients g = call.Results();
  g.f = call.de.view();
  EXPECT_THAT([&] { Backward(ctx, call.Inputs(), {}, g); },
              ThrowsMessage<InvalidArgument>(HasSubstr("df overlaps de")));
  g = call.Results();
  g.q = wrong.view();
  EXPECT_THAT([&] { Backward(ctx, call.Inputs(), {}, g); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dq has shape [2,10,2,5]")));
  call.d_o = wrong;
  EXPECT_THAT([&] { Backward(ctx, call.Inputs(), {}, call.Results()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("d_o has shape [2,10,2,5]")));
}

}  // namespace
}  // namespace heed::linformer
