// Attention over a sequence that ranks hold in parts, against the call of one process. Ranks are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "tests/local_transport.h"

namespace heed {
namespace {

using attention::Options;
using distributed::AttentionOptions;
using distributed::ExpectNone;
using distributed::Group;
using distributed::LocalRanks;
using distributed::Method;
using distributed::Order;
using distributed::TokenRange;
using Ranges = std::vector<std::vector<TokenRange>>;
using Shape = std::vector<int64_t>;

constexpr int64_t B = 2, T = 150, Hq = 4, Hkv = 2, D = 16, Dv = 12;

double Difference(const ConstTensorView& a, const ConstTensorView& b) {
  const std::vector<double> x = Elements(a), y = Elements(b);
  double most = 1e-30, difference = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isfinite(y[i])) most = std::max(most, std::abs(y[i]));
    const double apart = x[i] == y[i] ? 0 : std::abs(x[i] - y[i]);
    difference = std::max(difference, std::isnan(apart) ? HUGE_VAL : apart);
  }
  return difference / most;
}

void CopyView(const ConstTensorView& from, const TensorView& to) {
  Shape index(from.sizes().size());
  if (from.num_elements() == 0) return;
  do {
    SetElement(to, index, GetElement(from, index));
  } while (NextIndex(from.sizes(), index));
}

// The parts of one rank, one after the other; constants with one element on the axis whole.
Buffer Take(const Buffer& whole, int axis, const std::vector<TokenRange>& ranges) {
  if (!whole.present()) return {};
  Shape shape(whole.view().sizes().begin(), whole.view().sizes().end());
  shape[static_cast<size_t>(axis)] = CountTokens(ranges);
  Buffer part(whole.view().dtype(), shape);
  int64_t first = 0;
  for (const TokenRange& range : ranges) {
    CopyView(whole.view().Slice(axis, range.begin, range.end), part.view().Slice(axis, first, first + range.size()));
    first += range.size();
  }
  return part;
}
void Put(const Buffer& part, int axis, const std::vector<TokenRange>& ranges, const Buffer& whole) {
  int64_t first = 0;
  for (const TokenRange& range : ranges) {
    CopyView(part.view().Slice(axis, first, first + range.size()), whole.view().Slice(axis, range.begin, range.end));
    first += range.size();
  }
}

// The tensors of a call.
struct Call {
  // Packed sequences have no axis B.
  explicit Call(DType type, bool packed = false)
      : dtype(type), wide(type == DType::kF64 ? DType::kF64 : DType::kF32), is_packed(packed) {
    q = Buffer(dtype, Sizes({B, T, Hq, D})).FillNormal(1);
    k = Buffer(dtype, Sizes({B, T, Hkv, D})).FillNormal(2);
    v = Buffer(dtype, Sizes({B, T, Hkv, Dv})).FillNormal(3);
    d_o = Buffer(dtype, Sizes({B, T, Hq, Dv})).FillNormal(4);
    d_lse = Buffer(wide, Sizes({B, Hq, T})).FillNormal(5);
  }
  Shape Sizes(Shape shape) const {
    if (is_packed) shape.erase(shape.begin());
    return shape;
  }
  DType dtype, wide;
  bool is_packed;
  Buffer q, k, v, d_o, d_lse;
  Buffer bias, mask, log_decay, sinks, alibi, segments;  // optional
  Options options;
};

struct Results {
  explicit Results(const Call& c)
      : o(c.dtype, c.Sizes({B, T, Hq, Dv})), lse(c.wide, c.Sizes({B, Hq, T})), dq(c.dtype, c.q.view().sizes()),
        dk(c.dtype, c.k.view().sizes()), dv(c.dtype, c.v.view().sizes()) {
    const auto like = [](const Buffer& t) {
      return t.present() ? Buffer(t.view().dtype(), t.view().sizes()) : Buffer();
    };
    dbias = like(c.bias);
    dlog_decay = like(c.log_decay);
    dsinks = like(c.sinks);
    dalibi = like(c.alibi);
  }
  Buffer o, lse, dq, dk, dv, dbias, dlog_decay, dsinks, dalibi;
};

Options WithTensors(const Call& c) {
  Options options = c.options;
  options.bias = c.bias.view();
  options.mask = c.mask.view();
  options.log_decay = c.log_decay.view();
  options.sinks = c.sinks.view();
  options.alibi = c.alibi.view();
  options.segments_q = options.segments_k = c.segments.view();
  return options;
}

Results Single(const Call& c) {
  Results r(c);
  Context ctx(1);
  const Options options = WithTensors(c);
  attention::Forward(ctx, {c.q.view(), c.k.view(), c.v.view()}, options, {r.o.view(), r.lse.view()});
  attention::Backward(ctx, {c.q.view(), c.k.view(), c.v.view(), r.o.view(), r.lse.view(), c.d_o.view(), c.d_lse.view()},
                      options,
                      {r.dq.view(),
                       r.dk.view(),
                       r.dv.view(),
                       r.dbias.view(),
                       r.dsinks.view(),
                       r.dalibi.view(),
                       {},
                       r.dlog_decay.view()});
  return r;
}

void AddTo(const Buffer& sum, const std::vector<Buffer>& terms) {
  if (!sum.present()) return;
  Shape index(sum.view().sizes().size());
  do {
    double total = 0;
    for (const Buffer& term : terms) total += GetElement(term.view(), index);
    SetElement(sum.view(), index, total);
  } while (NextIndex(sum.view().sizes(), index));
}

Ranges Contiguous(const Shape& counts) {
  Ranges ranges;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    ranges.push_back({{begin, begin + count}});
    begin += count;
  }
  return ranges;
}

// Forward and Backward on each rank. Backward reads what Forward received, or with `again` receives it itself.
Results Divided(const Call& c, const Ranges& ranges, AttentionOptions given, bool again = false) {
  Results whole(c);
  std::vector<Buffer> dsinks, dalibi;
  for (size_t r = 0; r < ranges.size(); ++r) {
    const Results own(c);
    dsinks.push_back(own.dsinks);
    dalibi.push_back(own.dalibi);
  }
  LocalRanks ranks(static_cast<int>(ranges.size()));
  ExpectNone(ranks.Run([&](const Group& group) {
    const std::vector<TokenRange>& own = ranges[static_cast<size_t>(group.rank())];
    Context ctx(1);
    const int tokens = c.is_packed ? 0 : 1;
    distributed::AttentionReceived received;
    AttentionOptions how = given;
    if (!again) how.received = &received;
    Call here(c.dtype, c.is_packed);
    here.options = c.options;
    here.q = Take(c.q, tokens, own);
    here.k = Take(c.k, tokens, own);
    here.v = Take(c.v, tokens, own);
    here.d_o = Take(c.d_o, tokens, own);
    here.d_lse = Take(c.d_lse, tokens + 1, own);
    here.log_decay = Take(c.log_decay, tokens, own);
    here.bias = Take(c.bias, 2, own);
    here.mask = Take(c.mask, 2, own);
    here.segments = Take(c.segments, 1, own);
    here.sinks = c.sinks;
    here.alibi = c.alibi;
    Results r(here);
    r.o = Take(whole.o, tokens, own);
    r.lse = Take(whole.lse, tokens + 1, own);
    const Options options = WithTensors(here);
    Forward(ctx, group, {here.q.view(), here.k.view(), here.v.view()}, options, {r.o.view(), r.lse.view()}, how);
    Backward(
        ctx, group,
        {here.q.view(), here.k.view(), here.v.view(), r.o.view(), r.lse.view(), here.d_o.view(), here.d_lse.view()},
        options,
        {r.dq.view(),
         r.dk.view(),
         r.dv.view(),
         r.dbias.view(),
         dsinks[static_cast<size_t>(group.rank())].view(),
         dalibi[static_cast<size_t>(group.rank())].view(),
         {},
         r.dlog_decay.view()},
        how);
    Put(r.o, tokens, own, whole.o);
    Put(r.lse, tokens + 1, own, whole.lse);
    Put(r.dq, tokens, own, whole.dq);
    Put(r.dk, tokens, own, whole.dk);
    Put(r.dv, tokens, own, whole.dv);
    if (whole.dbias.present()) Put(r.dbias, 2, own, whole.dbias);
    if (whole.dlog_decay.present()) Put(r.dlog_decay, tokens, own, whole.dlog_decay);
  }));
  AddTo(whole.dsinks, dsinks);
  AddTo(whole.dalibi, dalibi);
  return whole;
}

void ExpectAlike(const Results& got, const Results& expected, DType dtype, bool gradient_bits,
                 const std::string& what) {
  EXPECT_TRUE(SameBits(got.o.view(), expected.o.view())) << what << " o";
  EXPECT_TRUE(SameBits(got.lse.view(), expected.lse.view())) << what << " lse";
  EXPECT_TRUE(SameBits(got.dq.view(), expected.dq.view())) << what << " dq";
  const double tolerance = dtype == DType::kF64 ? 1e-12 : 1e-4;
  for (const auto& [name, a, b] : {std::tuple<const char*, Buffer, Buffer>("dk", got.dk, expected.dk),
                                   {"dv", got.dv, expected.dv},
                                   {"dbias", got.dbias, expected.dbias},
                                   {"dlog_decay", got.dlog_decay, expected.dlog_decay},
                                   {"dsinks", got.dsinks, expected.dsinks},
                                   {"dalibi", got.dalibi, expected.dalibi}}) {
    if (!a.present()) continue;
    if (gradient_bits) {
      EXPECT_TRUE(SameBits(a.view(), b.view())) << what << " " << name;
    } else {
      EXPECT_LE(Difference(a.view(), b.view()), tolerance) << what << " " << name;
    }
  }
}

// Four packed sequences, one of them empty, the first 140 tokens.
Call Packed(DType dtype) {
  static const int32_t offsets[] = {0, 20, 20, 110, 140};
  Call packed(dtype, true);
  packed.options.causal = true;
  packed.options.cu_seqlens_q = ConstTensorView(offsets, DType::kI32, {5});
  return packed;
}

// Calls with options that say where a token stands, which every method divides.
std::vector<std::pair<std::string, Call>> CallsOfPlaces(DType dtype) {
  std::vector<std::pair<std::string, Call>> calls;
  const auto add = [&](const char* name) -> Call& { return calls.emplace_back(name, Call(dtype)).second; };
  Call& segments = add("segments");
  segments.segments = Buffer(DType::kI32, {B, T});
  for (int64_t i = 0; i < B * T; ++i) segments.segments.as<int32_t>()[i] = static_cast<int32_t>(i % T / 37 - i / T);
  Call& lengths = add("lengths");
  static const int32_t queries[] = {150, 60}, ends[] = {130, 60}, begins[] = {7, 55};
  static const int64_t prefix[] = {80, 3};
  lengths.options.causal = true;
  lengths.options.query_lengths = ConstTensorView(queries, DType::kI32, {B});
  lengths.options.key_lengths = ConstTensorView(ends, DType::kI32, {B});
  lengths.options.key_starts = ConstTensorView(begins, DType::kI32, {B});
  lengths.options.prefix = ConstTensorView(prefix, DType::kI64, {B});
  Call& moved = add("positions");
  static const int64_t positions[] = {-20, 35};
  moved.options.causal = true;
  moved.options.window = {.left = 50, .right = 0};
  moved.options.query_starts = ConstTensorView(positions, DType::kI64, {B});
  calls.emplace_back("packed", Packed(dtype));
  calls.emplace_back("packed, window", Packed(dtype));
  calls.back().second.options.window = {.left = 30, .right = 4};
  calls.back().second.options.align = attention::Align::kTopLeft;
  calls.emplace_back("packed, other keys", Packed(dtype));
  static const int64_t keys[] = {0, 50, 60, 100, 150};
  calls.back().second.options.cu_seqlens_k = ConstTensorView(keys, DType::kI64, {5});
  return calls;
}

// Calls with every option that a group divides.
std::vector<std::pair<std::string, Call>> Calls(DType dtype) {
  std::vector<std::pair<std::string, Call>> calls;
  const auto add = [&](const char* name) -> Call& { return calls.emplace_back(name, Call(dtype)).second; };
  add("plain");
  add("causal").options.causal = true;
  Call& windowed = add("window");
  windowed.options.causal = true;
  windowed.options.window.left = 40;
  windowed.options.sink_tokens = 3;
  Call& soft = add("softcap");
  soft.options.softcap = 5;
  soft.options.scale = 0.3;
  static const int64_t lengths[] = {100, 150};
  soft.options.key_lengths = ConstTensorView(lengths, DType::kI64, {B});
  Call& sinks = add("sinks");
  sinks.options.causal = true;
  sinks.sinks = Buffer(DType::kF64, {Hq}).FillNormal(6);
  sinks.alibi = Buffer(DType::kF64, {Hq}).FillConstant(0.1);
  Call& rows = add("rows");
  rows.bias = Buffer(dtype, {B, Hq, T, T}).FillNormal(7);
  rows.mask = Buffer(DType::kBool, {B, 1, T, T});
  for (int64_t i = 0; i < B * T * T; ++i) rows.mask.as<bool>()[i] = i % 7 != 0;
  Call& decays = add("log_decay");
  decays.options.causal = true;
  decays.log_decay = Buffer(dtype, {B, T, Hq}).FillConstant(-0.05);
  Call& dropped = add("dropout");
  dropped.options.causal = true;
  dropped.options.dropout = 0.3;
  dropped.options.seed = 11;
  Call& pattern = add("pattern");
  pattern.options.pattern = patterns::BigBird(16, 1) | patterns::Atrous(7);
  for (auto& [name, call] : CallsOfPlaces(dtype)) calls.emplace_back(name, std::move(call));
  calls.emplace_back("packed and decays", Packed(dtype));
  calls.back().second.log_decay = Buffer(dtype, {T, Hq}).FillConstant(-0.05);
  calls.emplace_back("packed, pattern and dropout", Packed(dtype));
  calls.back().second.options.pattern = patterns::Dilated(5, 3);
  calls.back().second.options.dropout = 0.2;
  return calls;
}

TEST(DistributedAttention, HasTheBitsOfOneProcess) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const auto& [name, call] : Calls(dtype)) {
      const Results expected = Single(call);
      for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}, Shape{64, 0, 86}, Shape{150}}) {
        ExpectAlike(Divided(call, Contiguous(counts), {.method = Method::kAllGather}, counts[0] == 100), expected,
                    dtype, false, std::string(Name(dtype)) + " " + name + " " + ShapeString(counts));
      }
      const Ranges zigzag = distributed::ShardRanges(T, 2, Order::kZigzag);
      ExpectAlike(Divided(call, zigzag, {.order = Order::kZigzag}), expected, dtype, false,
                  std::string(Name(dtype)) + " " + name + " zigzag");
    }
  }
}

TEST(DistributedAttention, ExchangesHeads) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const auto& [name, call] : Calls(dtype)) {
      const Options& o = call.options;
      const bool has_heads = call.sinks.present() || call.bias.present() || call.log_decay.present();
      if (has_heads || o.dropout != 0 || o.pattern.present()) continue;
      const Results expected = Single(call);
      for (const Method method : {Method::kUlysses, Method::kAuto}) {
        for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}}) {
          ExpectAlike(Divided(call, Contiguous(counts), {.method = method}, counts[0] == 100), expected, dtype, true,
                      std::string(Name(dtype)) + " " + name + " " + ShapeString(counts));
        }
      }
    }
  }
}

TEST(DistributedAttention, MergesPartsOfARing) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    std::vector<std::pair<std::string, Call>> calls;
    for (auto& [name, call] : Calls(dtype)) {
      const Options& o = call.options;
      if (!call.log_decay.present() && o.dropout == 0 && !o.pattern.present()) calls.emplace_back(name, call);
    }
    Call& both_sides = calls.emplace_back("both sides", Call(dtype)).second;
    both_sides.options.window = {.left = 40, .right = 10};
    Call& one_for_all = calls.emplace_back("one bias for all keys", Call(dtype)).second;
    one_for_all.bias = Buffer(dtype, {B, Hq, T, 1}).FillNormal(8);
    Call& no_keys = calls.emplace_back("no keys", Call(dtype)).second;
    no_keys.options.causal = true;
    static const int32_t lengths[] = {0, 70};
    no_keys.options.key_lengths = ConstTensorView(lengths, DType::kI32, {B});
    const double tolerance = dtype == DType::kF64 ? 1e-12 : dtype == DType::kF32 ? 1e-5 : 2e-2;
    for (const auto& [name, call] : calls) {
      const Results expected = Single(call);
      const auto expect = [&](const Ranges& ranges, Order order, const std::string& how) {
        const Results got = Divided(call, ranges, {.method = Method::kRing, .order = order});
        for (const auto& [what, a, b] : {std::tuple<const char*, Buffer, Buffer>("o", got.o, expected.o),
                                         {"lse", got.lse, expected.lse},
                                         {"dq", got.dq, expected.dq},
                                         {"dk", got.dk, expected.dk},
                                         {"dv", got.dv, expected.dv},
                                         {"dbias", got.dbias, expected.dbias},
                                         {"dsinks", got.dsinks, expected.dsinks},
                                         {"dalibi", got.dalibi, expected.dalibi}}) {
          if (!a.present()) continue;
          EXPECT_LE(Difference(a.view(), b.view()), tolerance)
              << Name(dtype) << " " << name << " " << how << " " << what;
        }
      };
      for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}, Shape{30, 20, 40, 60}, Shape{150}}) {
        expect(Contiguous(counts), Order::kContiguous, ShapeString(counts));
      }
      expect(distributed::ShardRanges(T, 3, Order::kZigzag), Order::kZigzag, "zigzag");
    }
  }
}

// Calls Forward on each of the ranks, which all throw E.
template <class E>
void ExpectRefused(int num_ranks, const std::function<void(int, Call&, AttentionOptions&)>& change,
                   const std::string& what) {
  LocalRanks ranks(num_ranks);
  const auto errors = ranks.Run([&](const Group& group) {
    Call call(DType::kF32);
    AttentionOptions how;
    change(group.rank(), call, how);
    const Buffer o(DType::kF32, call.Sizes({B, T, Hq, Dv}));
    Context ctx(1);
    Forward(ctx, group, {call.q.view(), call.k.view(), call.v.view()}, WithTensors(call), {o.view(), {}}, how);
  });
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error) << what;
    try {
      std::rethrow_exception(error);
    } catch (const E& thrown) {
      EXPECT_NE(std::string(thrown.what()).find(what), std::string::npos) << thrown.what();
    } catch (const std::exception& thrown) {
      ADD_FAILURE() << thrown.what();
    }
  }
}

TEST(DistributedAttention, EveryRankRefusesCallsThatDiffer) {
  ExpectRefused<InvalidArgument>(
      2, [](int rank, Call& call, AttentionOptions&) { call.options.causal = rank == 1; },
      "rank 1 calls attention::Forward");
  ExpectRefused<InvalidArgument>(
      2, [](int rank, Call&, AttentionOptions& how) { how.method = rank == 0 ? Method::kUlysses : Method::kAllGather; },
      "rank 1 calls attention::Forward");
  ExpectRefused<InvalidArgument>(
      2,
      [](int rank, Call& call, AttentionOptions&) {
        if (rank == 1) call.k = Buffer(DType::kF32, {B, T - 1, Hkv, D}).FillNormal(1);
      },
      "k has 149 tokens");
  ExpectRefused<InvalidArgument>(
      2,
      [](int rank, Call& call, AttentionOptions&) {
        call.bias = Buffer(DType::kF32, {B, Hq, T, rank == 1 ? T : 2 * T}).FillNormal(1);
      },
      "bias has 150 rows and 150 keys on rank 1");
  ExpectRefused<InvalidArgument>(
      3, [](int, Call&, AttentionOptions& how) { how.method = Method::kUlysses; }, "multiples of 3 ranks");
  ExpectRefused<InvalidArgument>(
      3, [](int, Call&, AttentionOptions& how) { how.order = Order::kZigzag; }, "in zigzag order");
  ExpectRefused<InvalidArgument>(
      2,
      [](int rank, Call& call, AttentionOptions&) {
        call.options.dropout = 0.5;
        call.options.seed = static_cast<uint64_t>(rank);
      },
      "dropout_offset=0, seed=1");
  ExpectRefused<InvalidArgument>(
      2, [](int rank, Call& call, AttentionOptions&) { call.segments = Buffer(DType::kI32, {B, T - rank}); },
      "segments_q has shape [2,149], expected [B, T] with the tokens of q");
  static const int64_t lists[] = {0, 1};
  for (const Pattern& pattern :
       {patterns::RowBlocks(ConstTensorView(lists, DType::kI64, {1, 1, 2})),
        patterns::Atrous(2) & patterns::Keys(ConstTensorView(lists, DType::kI64, {1, 1, 2}))}) {
    ExpectRefused<Unsupported>(
        2, [&](int, Call& call, AttentionOptions&) { call.options.pattern = pattern; }, "lists keys by row of a call");
  }
  static const int64_t starts[] = {1, 2};
  for (const auto& [change, what] :
       {std::pair<void (*)(Call&), const char*>([](Call& call) { call.options.chunk = 8; }, "chunk is"),
        {[](Call& call) { call.options.dropout = 0.5; }, "dropout is"},
        {[](Call& call) { call.options.pattern = patterns::Atrous(2); }, "pattern is"},
        {[](Call& call) { call.log_decay = Buffer(DType::kF32, {B, T, Hq}); }, "log_decay is"},
        {[](Call& call) {
           call.options.sink_tokens = 1;
           call.options.key_starts = ConstTensorView(starts, DType::kI64, {B});
         },
         "sink_tokens with key_starts is"}}) {
    ExpectRefused<Unsupported>(
        2,
        [change = change](int, Call& call, AttentionOptions& how) {
          change(call);
          how.method = Method::kRing;
        },
        std::string(what) + " given on a ring");
  }
  static const int64_t offsets[] = {0, 20, 10, 2 * T + 1};
  ExpectRefused<InvalidArgument>(
      2,
      [](int, Call& call, AttentionOptions&) {
        call.options.cu_seqlens_q = ConstTensorView(offsets, DType::kI64, {3});
      },
      "q has shape [2,150,4,16], expected [T, H, D] or [1, T, H, D]");
  for (const auto& [size, what] : {std::pair(3, "cu_seqlens_q is [0,20,10], expected ascending offsets"),
                                   {4, "cu_seqlens_q contains 301, expected 0 to 300"}}) {
    ExpectRefused<InvalidArgument>(
        2,
        [size = size](int, Call& call, AttentionOptions&) {
          call = Call(DType::kF32, true);
          call.options.cu_seqlens_q = ConstTensorView(offsets, DType::kI64, {size});
        },
        what);
  }
  static const int64_t lengths[] = {2 * T + 1, 0, 3};
  for (const int64_t size : {B, B + 1}) {
    ExpectRefused<InvalidArgument>(
        2,
        [=](int, Call& call, AttentionOptions& how) {
          call.options.key_lengths = ConstTensorView(lengths, DType::kI64, {size});
          how.method = Method::kRing;
        },
        size == B ? "key_lengths contains 301, expected 0 to 300" : "key_lengths is i64 [3], expected i32 or i64 [2]");
  }
}

TEST(DistributedShards, AreThoseOfBothOrders) {
  EXPECT_EQ(distributed::ShardRanges(1000, 3, Order::kContiguous), (Ranges{{{0, 320}}, {{320, 640}}, {{640, 1000}}}));
  EXPECT_EQ(distributed::ShardRanges(10, 3, Order::kContiguous), (Ranges{{{0, 3}}, {{3, 6}}, {{6, 10}}}));
  EXPECT_EQ(distributed::ShardRanges(512, 2, Order::kZigzag),
            (Ranges{{{0, 128}, {384, 512}}, {{128, 256}, {256, 384}}}));
  EXPECT_THROW(distributed::ShardRanges(-1, 2, Order::kZigzag), InvalidArgument);
  for (const Order order : {Order::kContiguous, Order::kZigzag}) {
    const Call call(DType::kF32);
    LocalRanks ranks(3);
    ExpectNone(ranks.Run([&](const Group& group) {
      const auto own = distributed::ShardRanges(T, 3, order)[static_cast<size_t>(group.rank())];
      const Buffer part(DType::kF32, {B, CountTokens(own), Hq, D}), whole(DType::kF32, {B, T, Hq, D});
      distributed::Shard(group, call.q.view(), 1, order, part.view());
      distributed::Unshard(group, part.view(), 1, order, whole.view());
      EXPECT_TRUE(SameBits(whole.view(), call.q.view()));
    }));
  }
}

}  // namespace
}  // namespace heed
