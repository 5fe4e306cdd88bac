// Padding and packing of compressed attention: each sequence has the results that it has alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/reserved_bytes.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention_case.h"

namespace heed::compressed_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kRatio = 4, kCount = 5, kHeads = 4, kKeyHeads = 2, kD = 24, kDv = 16;

struct Range {
  int64_t begin = 0, end = 0;
  bool Has(int64_t t) const { return begin <= t && t < end; }
};

// A sequence of a call: its rows in q, its tokens in k and its compressed keys.
struct Sequence {
  int64_t b = 0;
  Range rows, keys, compressed;
};

enum class Choice { kAll, kChosen, kByHead };

// A call and its memory. What belongs to no sequence is NaN, and not a key in `chosen`.
struct Call {
  std::vector<Sequence> sequences;
  BackwardInputs in;
  Options options;
  std::vector<Buffer> memory;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
  ConstTensorView Ints(const std::vector<int64_t>& values) {
    const Buffer buffer(DType::kI32, {std::ssize(values)});
    for (size_t i = 0; i < values.size(); ++i) buffer.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
    return Keep(buffer);
  }

  // Draws the tensors of the sequences.
  void Draw(DType dtype, Choice choice, int64_t B, int64_t Tq, int64_t Tk, int64_t N) {
    options.ratio = kRatio;
    options.window = 10;
    uint64_t seed = 0;
    const auto tensor = [&](Range Sequence::* part, int64_t tokens, int64_t heads, int64_t channels) {
      const Buffer buffer(dtype, {B, tokens, heads, channels});
      buffer.FillNormal(++seed);
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < tokens; ++t) {
          const auto has = [&](const Sequence& s) { return s.b == b && (s.*part).Has(t); };
          if (std::ranges::any_of(sequences, has)) continue;
          for (int64_t at = 0; at < heads * channels; ++at) buffer.Set({b, t, at / channels, at % channels}, kNaN);
        }
      }
      return Keep(buffer);
    };
    in.q = tensor(&Sequence::rows, Tq, kHeads, kD);
    in.k = tensor(&Sequence::keys, Tk, kKeyHeads, kD);
    in.v = tensor(&Sequence::keys, Tk, kKeyHeads, kDv);
    in.k_cmp = tensor(&Sequence::compressed, N, kKeyHeads, kD);
    in.v_cmp = tensor(&Sequence::compressed, N, kKeyHeads, kDv);
    in.d_o = tensor(&Sequence::rows, Tq, kHeads, kDv);
    in.sinks = Keep(Buffer(dtype, {kHeads}).FillNormal(++seed));
    in.d_lse = Keep(Buffer(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {B, kHeads, Tq}).FillNormal(++seed));
    if (choice == Choice::kAll) return;
    const int64_t heads = choice == Choice::kByHead ? kKeyHeads : 1;
    const Buffer chosen(DType::kI64, {B, Tq, heads, kCount});
    std::fill_n(chosen.as<int64_t>(), chosen.view().num_elements(), 1000);
    Random random(7);
    for (const Sequence& s : sequences) {
      for (int64_t i = s.rows.begin; i < s.rows.end; ++i) {
        const int64_t tokens = s.keys.end - s.keys.begin - (s.rows.end - 1 - i);  // up to the row
        for (int64_t h = 0; h < heads; ++h) {
          ChooseKeys(random, tokens / kRatio,
                     {chosen.as<int64_t>() + ((s.b * Tq + i) * heads + h) * kCount, static_cast<size_t>(kCount)});
        }
      }
    }
    in.chosen = Keep(chosen);
    if (heads == 1) in.chosen = ConstTensorView(chosen.view().data(), DType::kI64, {B, Tq, kCount});
  }

  BackwardInputs Alone(const Sequence& s) const {
    const auto slice = [&](const ConstTensorView& t, const Range& range, int axis = 1) {
      return t.present() ? t.Slice(0, s.b, s.b + 1).Slice(axis, range.begin, range.end) : t;
    };
    BackwardInputs alone = in;
    alone.q = slice(in.q, s.rows);
    alone.k = slice(in.k, s.keys);
    alone.v = slice(in.v, s.keys);
    alone.k_cmp = slice(in.k_cmp, s.compressed);
    alone.v_cmp = slice(in.v_cmp, s.compressed);
    alone.chosen = slice(in.chosen, s.rows);
    alone.d_o = slice(in.d_o, s.rows);
    alone.d_lse = slice(in.d_lse, s.rows, 2);
    return alone;
  }
};

struct Results {
  Buffer o, lse, dq, dk, dv, dk_cmp, dv_cmp, dsinks;

  Results(Context& ctx, BackwardInputs in, Options options) {
    const auto like = [](const ConstTensorView& t) { return Buffer(t.dtype(), t.sizes()); };  // NaN
    o = like(in.d_o), lse = like(in.d_lse), dq = like(in.q), dk = like(in.k), dv = like(in.v);
    dk_cmp = like(in.k_cmp), dv_cmp = like(in.v_cmp), dsinks = like(in.sinks);
    Forward(ctx, in, options, {o.view(), lse.view()});
    in.o = o.view(), in.lse = lse.view();
    Backward(ctx, in, options, {dq.view(), dk.view(), dv.view(), dk_cmp.view(), dv_cmp.view(), dsinks.view()});
  }
};

// Expects the bits that each sequence has alone, and zeros elsewhere.
void ExpectThoseOfEachSequence(const Call& call, Context& ctx) {
  const Results whole(ctx, call.in, call.options);
  Options options = call.options;
  options.lengths = options.starts = options.cu_seqlens = {};
  std::vector<double> dsinks(kHeads);
  struct Part {
    const char* name;
    Buffer Results::* of;
    Range Sequence::* range;
    int axis = 1;
    double elsewhere = 0;
  };
  const Part parts[] = {{"o", &Results::o, &Sequence::rows},
                        {"lse", &Results::lse, &Sequence::rows, 2, -HUGE_VAL},
                        {"dq", &Results::dq, &Sequence::rows},
                        {"dk", &Results::dk, &Sequence::keys},
                        {"dv", &Results::dv, &Sequence::keys},
                        {"dk_cmp", &Results::dk_cmp, &Sequence::compressed},
                        {"dv_cmp", &Results::dv_cmp, &Sequence::compressed}};
  for (const Sequence& s : call.sequences) {
    const Results alone(ctx, call.Alone(s), options);
    for (const Part& part : parts) {
      const auto& [begin, end] = s.*part.range;
      const TensorView own = (whole.*part.of).view().Slice(0, s.b, s.b + 1).Slice(part.axis, begin, end);
      EXPECT_TRUE(SameBits(own, (alone.*part.of).view())) << part.name << " of " << s.b << " from " << begin;
    }
    for (int64_t h = 0; h < kHeads; ++h) dsinks[static_cast<size_t>(h)] += alone.dsinks.Get({h});
  }
  const double share = call.in.q.dtype() == DType::kF64    ? 1e-13
                       : call.in.q.dtype() == DType::kF32  ? 1e-6
                       : call.in.q.dtype() == DType::kBF16 ? 4 * 0x1p-8
                                                           : 4 * 0x1p-11;  // each sequence's is rounded
  for (int64_t h = 0; h < kHeads; ++h) {
    const double sum = dsinks[static_cast<size_t>(h)];
    EXPECT_NEAR(whole.dsinks.Get({h}), sum, share * (1 + std::abs(sum))) << h;
  }
  for (const Part& part : parts) {
    const TensorView view = (whole.*part.of).view();
    for (int64_t b = 0; b < view.size(0); ++b) {
      for (int64_t t = 0; t < view.size(part.axis); ++t) {
        const auto has = [&](const Sequence& s) { return s.b == b && (s.*part.range).Has(t); };
        if (std::ranges::any_of(call.sequences, has)) continue;
        for (const double x : Elements(view.Slice(0, b, b + 1).Slice(part.axis, t, t + 1))) {
          ASSERT_EQ(x, part.elsewhere) << part.name << " at " << b << ", " << t;
        }
      }
    }
  }
}

// Four sequences of a batch, padded on both sides, one of them without tokens; q has the last Tq tokens.
Call Padded(DType dtype, Choice choice, int64_t Tq, int64_t Tk = 150) {
  const std::vector<int64_t> starts = {5, 0, 90, 37}, lengths = {Tk, 131, 90, 118};
  Call call;
  int64_t N = 0;
  for (int64_t b = 0; b < 4; ++b) {
    const int64_t begin = starts[static_cast<size_t>(b)], end = lengths[static_cast<size_t>(b)], first = Tk - Tq;
    const int64_t row_end = std::max<int64_t>(end - first, 0), count = (end - begin) / kRatio;
    call.sequences.push_back({b, {std::clamp<int64_t>(begin - first, 0, row_end), row_end}, {begin, end}, {0, count}});
    N = std::max(N, count);
  }
  call.Draw(dtype, choice, 4, Tq, Tk, N);
  call.options.starts = call.Ints(starts);
  call.options.lengths = call.Ints(lengths);
  return call;
}

// Four packed sequences, one of them empty, before tokens and compressed keys of no sequence.
Call Packed(DType dtype, Choice choice, int64_t T = 150) {
  const std::vector<int64_t> bounds = {0, 63, 63, 98, 139};
  Call call;
  int64_t N = 0;
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    const Range tokens = {bounds[s], bounds[s + 1]};
    const int64_t count = (tokens.end - tokens.begin) / kRatio;
    call.sequences.push_back({0, tokens, tokens, {N, N + count}});
    N += count;
  }
  call.Draw(dtype, choice, 1, T, T, N + 3);
  call.options.cu_seqlens = call.Ints(bounds);
  return call;
}

constexpr DType kTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
constexpr Choice kChoices[] = {Choice::kAll, Choice::kChosen, Choice::kByHead};

TEST(CompressedAttentionSequencesTest, APaddedSequenceHasItsOwnBits) {
  for (const DType dtype : kTypes) {
    for (const Choice choice : kChoices) {
      for (const int64_t rows : {150, 45}) {
        for (const int threads : {1, 2}) {
          SCOPED_TRACE(std::string(Name(dtype)) + " choice " + std::to_string(static_cast<int>(choice)) + " rows " +
                       std::to_string(rows) + " threads " + std::to_string(threads));
          Context ctx(threads);
          ExpectThoseOfEachSequence(Padded(dtype, choice, rows), ctx);
        }
      }
    }
  }
}

TEST(CompressedAttentionSequencesTest, APackedSequenceHasItsOwnBits) {
  for (const DType dtype : kTypes) {
    for (const Choice choice : kChoices) {
      for (const int threads : {1, 2}) {
        SCOPED_TRACE(std::string(Name(dtype)) + " choice " + std::to_string(static_cast<int>(choice)) + " threads " +
                     std::to_string(threads));
        Context ctx(threads);
        ExpectThoseOfEachSequence(Packed(dtype, choice), ctx);
      }
    }
  }
}

// Products of AMX take pairs of rows, which begin at a sequence's first row.
TEST(CompressedAttentionSequencesTest, ASequenceHasItsOwnBitsWithAmx) {
  const EmulateAmx emulate;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Context ctx(2);
    ctx.set_isa("tiles");  // overrides HEED_ISA
    SCOPED_TRACE(Name(dtype));
    ExpectThoseOfEachSequence(Padded(dtype, Choice::kAll, 150), ctx);
    ExpectThoseOfEachSequence(Packed(dtype, Choice::kAll), ctx);
  }
}

TEST(CompressedAttentionSequencesTest, WithoutAWindowASequenceHasItsOwnBits) {
  for (const Choice choice : kChoices) {
    for (Call call : {Padded(DType::kF32, choice, 150), Packed(DType::kF32, choice)}) {
      call.options.window = 0;
      Context ctx(1);
      ExpectThoseOfEachSequence(call, ctx);
    }
  }
}

TEST(CompressedAttentionSequencesTest, TokensCountFromPositionZeroWhereKHasTheLastOnes) {
  for (const Choice choice : kChoices) {
    const Call call = Padded(DType::kF64, choice, 45);
    Context ctx(1);
    const Results whole(ctx, call.in, call.options);
    BackwardInputs last = call.in;
    last.k = last.k.Slice(1, 96, 150), last.v = last.v.Slice(1, 96, 150);  // the windows of 45 rows
    Options options = call.options;
    options.start = 105;
    const Results found(ctx, last, options);
    for (const auto& [a, b] : {std::pair{found.o.view(), whole.o.view()},
                               {found.dq.view(), whole.dq.view()},
                               {found.dv.view(), whole.dv.view().Slice(1, 96, 150)},
                               {found.dk_cmp.view(), whole.dk_cmp.view()}}) {
      const std::vector<double> x = Elements(a), y = Elements(b);
      ASSERT_EQ(x.size(), y.size());
      for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-13) << i;
    }
  }
}

TEST(CompressedAttentionSequencesTest, SequencesWithoutTokensAreAllowed) {
  for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0}, {0, 0, 0}, {0, 3}}) {
    for (const Choice choice : kChoices) {
      for (const int64_t T : {0, 9}) {
        if (bounds.back() > T) continue;
        Call call;
        call.Draw(DType::kF32, choice, 1, T, T, 0);
        for (size_t s = 0; s + 1 < bounds.size(); ++s) {
          call.sequences.push_back({0, {bounds[s], bounds[s + 1]}, {bounds[s], bounds[s + 1]}, {}});
        }
        call.Draw(DType::kF32, choice, 1, T, T, 0);
        call.options.cu_seqlens = call.Ints(bounds);
        Context ctx(1);
        ExpectThoseOfEachSequence(call, ctx);
      }
    }
  }
}

TEST(CompressedAttentionSequencesTest, CompressedKeysAreThoseOfTheLongestSequence) {
  Call call = Padded(DType::kF32, Choice::kAll, 150);
  Context ctx(1);
  const auto refuses = [&](const std::string& message) {
    EXPECT_THAT([&] { Results(ctx, call.in, call.options); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
  };
  const int64_t N = call.in.k_cmp.size(1);
  EXPECT_EQ(N, 36);
  call.in.k_cmp = call.in.k_cmp.Slice(1, 0, N - 1);
  refuses("k_cmp has 35 compressed keys, expected 36 or more, those that are complete at the last row");
  call = Packed(DType::kF32, Choice::kAll);
  call.in.k_cmp = call.in.k_cmp.Slice(1, 0, 32);
  refuses("k_cmp has 32 compressed keys, expected 33 or more, those of all sequences");
}

TEST(CompressedAttentionSequencesTest, WorkspaceIsEnoughForWhatPassesReserve) {
  for (const Choice choice : kChoices) {
    for (const Call& call : {Padded(DType::kF32, choice, 150), Packed(DType::kF32, choice)}) {
      for (const int threads : {1, 2}) {
        Context forward(threads), backward(threads);
        const Results r(forward, call.in, call.options);
        Context again(threads);
        Forward(again, call.in, call.options, {r.o.view(), r.lse.view()});
        EXPECT_LE(ReservedBytes(again), Workspace(again, call.in, call.options));
        EXPECT_EQ(Explain(again, call.in, call.options).workspace_bytes, Workspace(again, call.in, call.options));
        BackwardInputs in = call.in;
        in.o = r.o.view(), in.lse = r.lse.view();
        const Gradients g = {r.dq.view(), r.dk.view(), r.dv.view(), r.dk_cmp.view(), r.dv_cmp.view(), r.dsinks.view()};
        Backward(backward, in, call.options, g);
        EXPECT_LE(ReservedBytes(backward), BackwardWorkspace(backward, in, call.options, g));
      }
    }
  }
}

TEST(CompressedAttentionSequencesTest, ExplainCountsThePairsOfSequences) {
  const Context ctx(1);
  for (const Choice choice : kChoices) {
    for (const Call& call : {Padded(DType::kF32, choice, 45), Packed(DType::kF32, choice)}) {
      Options options = call.options;
      options.lengths = options.starts = options.cu_seqlens = {};
      double flops = 0;
      for (const Sequence& s : call.sequences) flops += Explain(ctx, call.Alone(s), options).flops;
      EXPECT_EQ(Explain(ctx, call.in, call.options).flops, flops);
    }
  }
}

TEST(CompressedAttentionSequencesTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  const Inputs in = {shape({1, 80, 4, 8}),
                     shape({1, 80, 2, 8}),
                     shape({1, 80, 2, 8}),
                     shape({1, 20, 2, 8}),
                     shape({1, 20, 2, 8}),
                     {},
                     {}};
  Options padded, packed;
  padded.lengths = shape({1}, DType::kI64);     // counts as all tokens
  packed.cu_seqlens = shape({5}, DType::kI64);  // counts as four sequences of one length
  const double whole = Explain(ctx, in, {}).flops;
  EXPECT_EQ(Explain(ctx, in, padded).flops, whole);
  EXPECT_LT(Explain(ctx, in, packed).flops, whole);
}

TEST(CompressedAttentionSequencesTest, ErrorsNameTheArgumentAndWriteNothing) {
  Context ctx(1);
  const auto refuses = [&](Call call, const std::function<void(Call&)>& change, const std::string& message) {
    const Buffer o(call.in.d_o.dtype(), call.in.d_o.sizes()), lse(DType::kF32, call.in.d_lse.sizes());
    change(call);
    EXPECT_THAT([&] { Forward(ctx, call.in, call.options, {o.view(), lse.view()}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("compressed_attention::Forward: " + message)));
    EXPECT_TRUE(std::isnan(o.Get({0, 0, 0, 0})));
  };
  const Call padded = Padded(DType::kF32, Choice::kChosen, 150), packed = Packed(DType::kF32, Choice::kChosen);
  refuses(padded, [](Call& c) { c.options.lengths = c.Ints({1, 2, 3}); }, "lengths has shape [3], expected [4]");
  refuses(
      padded, [](Call& c) { c.options.lengths = c.Ints({1, 2, 3, 151}); }, "lengths[3] is 151, expected 0 to T = 150");
  refuses(padded, [](Call& c) { c.options.starts = c.Ints({1, -2, 3, 4}); }, "starts[1] is -2, expected 0 to T = 150");
  refuses(
      padded, [](Call& c) { c.options.start = 9, c.options.lengths = c.Ints({160, 2, 3, 4}); },
      "lengths[0] is 160, expected 0 to T = 159");
  refuses(padded, [](Call& c) { c.options.starts = c.in.sinks; }, "starts has dtype f32, expected i32 or i64");
  refuses(
      padded, [](Call& c) { c.options.cu_seqlens = c.Ints({0, 150}); },
      "lengths is given, expected none beside cu_seqlens");
  refuses(
      padded,
      [](Call& c) {
        c.options = {};
        c.options.cu_seqlens = c.Ints({0, 150});
      },
      "k has shape [4,150,2,24], expected a leading axis of 1 with cu_seqlens");
  refuses(packed, [](Call& c) { c.options.start = 0; }, "start is given, expected none beside cu_seqlens");
  refuses(
      packed, [](Call& c) { c.options.cu_seqlens = c.Ints({0, 100, 99}); },
      "cu_seqlens[2] is 99, expected 100 to T = 150");
  refuses(packed, [](Call& c) { c.options.cu_seqlens = c.Ints({1, 100}); }, "cu_seqlens begins with 1, expected 0");
  refuses(
      packed, [](Call& c) { c.in.q = c.in.q.Slice(1, 0, 149); },
      "q has 149 tokens, expected the 150 of k, as sequences are packed");
  const auto choose = [](Call& c, int64_t row, int64_t key) {
    TensorView chosen(const_cast<void*>(c.in.chosen.data()), DType::kI64, c.in.chosen.sizes());
    SetElement(chosen, std::vector<int64_t>{0, row, 0}, static_cast<double>(key));
  };
  refuses(
      Padded(DType::kF32, Choice::kChosen, 150), [&](Call& c) { choose(c, 8, 1); },
      "chosen has key 1 in row 8 of sequence 0, expected -1, or one of the 1 keys that are complete there");
  refuses(
      Packed(DType::kF32, Choice::kChosen), [&](Call& c) { choose(c, 67, 1); },
      "chosen has key 1 in row 67, expected -1, or one of the 1 keys that are complete there");
  const Buffer o(DType::kF32, {1, 150, 4, 16}), lse(DType::kF32, {4, 150});
  EXPECT_THAT([&] { Forward(ctx, packed.in, packed.options, {o.view(), lse.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("lse has shape [4,150], expected [1,4,150]")));
}

}  // namespace
}  // namespace heed::compressed_attention
