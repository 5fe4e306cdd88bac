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
  explicit Call(DType type) : dtype(type), wide(type == DType::kF64 ? DType::kF64 : DType::kF32) {
    q = Buffer(dtype, {B, T, Hq, D}).FillNormal(1);
    k = Buffer(dtype, {B, T, Hkv, D}).FillNormal(2);
    v = Buffer(dtype, {B, T, Hkv, Dv}).FillNormal(3);
    d_o = Buffer(dtype, {B, T, Hq, Dv}).FillNormal(4);
    d_lse = Buffer(wide, {B, Hq, T}).FillNormal(5);
  }
  DType dtype, wide;
  Buffer q, k, v, d_o, d_lse;
  Buffer bias, mask, log_decay, sinks, alibi;  // optional
  Options options;
};

struct Results {
  explicit Results(const Call& c)
      : o(c.dtype, {B, T, Hq, Dv}), lse(c.wide, {B, Hq, T}), dq(c.dtype, c.q.view().sizes()),
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
  return options;
}

Results Single(const Call& c) {
  Results r(c);
  Context ctx(1);
  const Options options = WithTensors(c);
  attention::Forward(ctx, {c.q.view(), c.k.view(), c.v.view()}, options, {r.o.view(), r.lse.view()});
  attention::Backward(
      ctx, {c.q.view(), c.k.view(), c.v.view(), r.o.view(), r.lse.view(), c.d_o.view(), c.d_lse.view()}, options,
      {r.dq.view(), r.dk.view(), r.dv.view(), r.dbias.view(), r.dsinks.view(), r.dalibi.view(), r.dlog_decay.view()});
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

Results Divided(const Call& c, const Ranges& ranges, const AttentionOptions& how) {
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
    Call here(c.dtype);
    here.options = c.options;
    here.q = Take(c.q, 1, own);
    here.k = Take(c.k, 1, own);
    here.v = Take(c.v, 1, own);
    here.d_o = Take(c.d_o, 1, own);
    here.d_lse = Take(c.d_lse, 2, own);
    here.log_decay = Take(c.log_decay, 1, own);
    here.bias = Take(c.bias, 2, own);
    here.mask = Take(c.mask, 2, own);
    here.sinks = c.sinks;
    here.alibi = c.alibi;
    Results r(here);
    r.o = Take(whole.o, 1, own);
    r.lse = Take(whole.lse, 2, own);
    const Options options = WithTensors(here);
    Forward(ctx, group, {here.q.view(), here.k.view(), here.v.view()}, options, {r.o.view(), r.lse.view()}, how);
    Backward(
        ctx, group,
        {here.q.view(), here.k.view(), here.v.view(), r.o.view(), r.lse.view(), here.d_o.view(), here.d_lse.view()},
        options,
        {r.dq.view(), r.dk.view(), r.dv.view(), r.dbias.view(), dsinks[static_cast<size_t>(group.rank())].view(),
         dalibi[static_cast<size_t>(group.rank())].view(), r.dlog_decay.view()},
        how);
    Put(r.o, 1, own, whole.o);
    Put(r.lse, 2, own, whole.lse);
    Put(r.dq, 1, own, whole.dq);
    Put(r.dk, 1, own, whole.dk);
    Put(r.dv, 1, own, whole.dv);
    if (whole.dbias.present()) Put(r.dbias, 2, own, whole.dbias);
    if (whole.dlog_decay.present()) Put(r.dlog_decay, 1, own, whole.dlog_decay);
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
  return calls;
}

TEST(DistributedAttention, HasTheBitsOfOneProcess) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const auto& [name, call] : Calls(dtype)) {
      const Results expected = Single(call);
      for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}, Shape{64, 0, 86}, Shape{150}}) {
        ExpectAlike(Divided(call, Contiguous(counts), {.method = Method::kAllGather}), expected, dtype, false,
                    std::string(Name(dtype)) + " " + name + " " + ShapeString(counts));
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
      if (name == "sinks" || name == "rows" || name == "log_decay") continue;
      const Results expected = Single(call);
      for (const Method method : {Method::kUlysses, Method::kAuto}) {
        for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}}) {
          ExpectAlike(Divided(call, Contiguous(counts), {.method = method}), expected, dtype, true,
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
      call.options.sink_tokens = 0;
      if (name != "sinks" && name != "rows" && name != "log_decay") calls.emplace_back(name, call);
    }
    Call& both_sides = calls.emplace_back("both sides", Call(dtype)).second;
    both_sides.options.window = {.left = 40, .right = 10};
    Call& no_keys = calls.emplace_back("no keys", Call(dtype)).second;
    no_keys.options.causal = true;
    static const int32_t lengths[] = {0, 70};
    no_keys.options.key_lengths = ConstTensorView(lengths, DType::kI32, {B});
    const double tolerance = dtype == DType::kF64 ? 1e-12 : dtype == DType::kF32 ? 1e-5 : 2e-2;
    for (const auto& [name, call] : calls) {
      const Results expected = Single(call);
      for (const Shape& counts : {Shape{100, 50}, Shape{0, 150}, Shape{64, 0, 86}, Shape{30, 20, 40, 60}, Shape{150}}) {
        const Results got = Divided(call, Contiguous(counts), {.method = Method::kRing});
        for (const auto& [what, a, b] : {std::tuple<const char*, Buffer, Buffer>("o", got.o, expected.o),
                                         {"lse", got.lse, expected.lse},
                                         {"dq", got.dq, expected.dq},
                                         {"dk", got.dk, expected.dk},
                                         {"dv", got.dv, expected.dv}}) {
          EXPECT_LE(Difference(a.view(), b.view()), tolerance)
              << Name(dtype) << " " << name << " " << ShapeString(counts) << " " << what;
        }
      }
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
    const Buffer o(DType::kF32, {B, T, Hq, Dv});
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
  ExpectRefused<Unsupported>(
      2, [](int, Call& call, AttentionOptions&) { call.options.dropout = 0.5; }, "dropout is given with a group");
  ExpectRefused<Unsupported>(
      2,
      [](int, Call& call, AttentionOptions& how) {
        call.options.sink_tokens = 1;
        how.method = Method::kRing;
      },
      "sink_tokens is given on a ring");
  ExpectRefused<Unsupported>(
      2,
      [](int, Call& call, AttentionOptions& how) {
        call.sinks = Buffer(DType::kF64, {Hq}).FillNormal(6);
        how.method = Method::kRing;
      },
      "sinks is given on a ring");
  ExpectRefused<Unsupported>(
      2, [](int, Call&, AttentionOptions& how) { how = {.method = Method::kRing, .order = Order::kZigzag}; },
      "expected contiguous order");
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
