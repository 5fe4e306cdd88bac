// Wrong calls of attention: the message of each, and that nothing has been written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A valid call: q [2,3,4,8], k [2,5,2,8], v [2,5,2,6], or packed with 6 and 10 rows. Each test invalidates one
// argument.
struct Call {
  Problem p;
  Outputs out;
};

Call RightCall() {
  Call c;
  c.p = MakeProblem(DType::kF32, {2, 3, 5, 4, 2, 8, 6});
  const Buffer o(c.p.o.dtype, c.p.o.sizes), lse(c.p.lse.dtype, c.p.lse.sizes);
  c.p.memory.push_back(o);
  c.p.memory.push_back(lse);
  c.out = {o.view(), lse.view()};
  return c;
}

Call PackedCall() {
  Call c;
  c.p.in = {Keep(c.p, Buffer(DType::kF32, {6, 4, 8})), Keep(c.p, Buffer(DType::kF32, {10, 2, 8})),
            Keep(c.p, Buffer(DType::kF32, {10, 2, 6}))};
  c.p.options.cu_seqlens_q = KeepInts(c.p, {0, 2, 6});
  c.p.options.cu_seqlens_k = KeepInts(c.p, {0, 7, 10});
  DescribeOutputs(c.p);
  const Buffer o(c.p.o.dtype, c.p.o.sizes), lse(c.p.lse.dtype, c.p.lse.sizes);
  c.p.memory.push_back(o);
  c.p.memory.push_back(lse);
  c.out = {o.view(), lse.view()};
  return c;
}

struct Mistake {
  std::string name;
  std::function<void(Call&)> make;
  std::string message;  // after "attention::Forward: "
  bool packed = false;
};

void PrintTo(const Mistake& mistake, std::ostream* os) { *os << mistake.name; }

ConstTensorView New(Call& c, DType dtype, std::vector<int64_t> sizes) { return Keep(c.p, Buffer(dtype, sizes)); }

TensorView NewOutput(Call& c, DType dtype, std::vector<int64_t> sizes) {
  c.p.memory.emplace_back(dtype, sizes);
  return c.p.memory.back().view();
}

// `view` with other strides, in memory that is large enough for them.
ConstTensorView Strided(Call& c, const ConstTensorView& view, std::vector<int64_t> strides) {
  return Keep(c.p, Buffer(view.dtype(), view.sizes(), strides, Placement::kBeforeGuard));
}

void AddTensorMistakes(std::vector<Mistake>& all) {
  all.push_back({"QIsAbsent", [](Call& c) { c.p.in.q = {}; }, "q is absent, expected a tensor"});
  all.push_back({"KIsAbsent", [](Call& c) { c.p.in.k = {}; }, "k is absent, expected a tensor"});
  all.push_back({"VIsAbsent", [](Call& c) { c.p.in.v = {}; }, "v is absent, expected a tensor"});
  all.push_back({"QHasRank3", [](Call& c) { c.p.in.q = New(c, DType::kF32, {3, 4, 8}); },
                 "q has shape [3,4,8], expected rank 4: [B, T, H, D]"});
  all.push_back({"VHasRank5", [](Call& c) { c.p.in.v = New(c, DType::kF32, {1, 2, 5, 2, 6}); },
                 "v has shape [1,2,5,2,6], expected rank 4: [B, T, H, D]"});
  all.push_back({"QIsOfIntegers", [](Call& c) { c.p.in.q = New(c, DType::kI64, {2, 3, 4, 8}); },
                 "q has dtype i64, expected a float dtype"});
  all.push_back({"KHasAnotherDType", [](Call& c) { c.p.in.k = New(c, DType::kF64, {2, 5, 2, 8}); },
                 "k has dtype f64, expected f32 as q"});
  all.push_back({"VHasAnotherDType", [](Call& c) { c.p.in.v = New(c, DType::kF16, {2, 5, 2, 6}); },
                 "v has dtype f16, expected f32 as q"});
  all.push_back({"KHasAnotherBatch", [](Call& c) { c.p.in.k = New(c, DType::kF32, {3, 5, 2, 8}); },
                 "k has shape [3,5,2,8], expected [2,5,2,8]"});
  all.push_back({"KHasAnotherD", [](Call& c) { c.p.in.k = New(c, DType::kF32, {2, 5, 2, 7}); },
                 "k has shape [2,5,2,7], expected [2,5,2,8]"});
  all.push_back({"VHasOtherTokens", [](Call& c) { c.p.in.v = New(c, DType::kF32, {2, 4, 2, 6}); },
                 "v has shape [2,4,2,6], expected [2,5,2,6]"});
  all.push_back({"VHasOtherHeads", [](Call& c) { c.p.in.v = New(c, DType::kF32, {2, 5, 1, 6}); },
                 "v has shape [2,5,1,6], expected [2,5,2,6]"});
  all.push_back({"DIsZero",
                 [](Call& c) {
                   c.p.in.q = New(c, DType::kF32, {2, 3, 4, 0});
                   c.p.in.k = New(c, DType::kF32, {2, 5, 2, 0});
                 },
                 "q has shape [2,3,4,0], expected D >= 1"});
  all.push_back({"DvIsZero", [](Call& c) { c.p.in.v = New(c, DType::kF32, {2, 5, 2, 0}); },
                 "v has shape [2,5,2,0], expected Dv >= 1"});
  all.push_back({"HeadsAreNoMultiple",
                 [](Call& c) {
                   c.p.in.k = New(c, DType::kF32, {2, 5, 3, 8});
                   c.p.in.v = New(c, DType::kF32, {2, 5, 3, 6});
                 },
                 "q has 4 heads, expected a multiple of the 3 heads of k"});
  all.push_back({"KeyHeadsAreNone",
                 [](Call& c) {
                   c.p.in.k = New(c, DType::kF32, {2, 5, 0, 8});
                   c.p.in.v = New(c, DType::kF32, {2, 5, 0, 6});
                 },
                 "q has 4 heads, expected a multiple of the 0 heads of k"});
  all.push_back({"TooManyKeys",
                 [](Call& c) {
                   const int64_t n = int64_t{1} << 31;
                   c.p.in.k = {c.p.in.k.data(), DType::kF32, {2, n, 2, 8}, {0, 0, 0, 1}};
                   c.p.in.v = {c.p.in.v.data(), DType::kF32, {2, n, 2, 6}, {0, 0, 0, 1}};
                 },
                 "k has 2147483648 tokens, expected at most "});
  all.push_back({"QIsOnAnotherDevice",
                 [](Call& c) { c.p.in.q = {c.p.in.q.data(), DType::kF32, {2, 3, 4, 8}, Device{DeviceType::kCuda, 1}}; },
                 "k is on the CPU, expected cuda:1 as q"});
  all.push_back({"OIsOnAnotherDevice",
                 [](Call& c) { c.out.o = {c.out.o.data(), DType::kF32, {2, 3, 4, 6}, Device{DeviceType::kCuda, 0}}; },
                 "o is on cuda:0, expected the CPU"});
  all.push_back({"KHasNoData", [](Call& c) { c.p.in.k = {nullptr, DType::kF32, {2, 5, 2, 8}}; },
                 "k has no data, expected a pointer to [2,5,2,8] elements"});
  all.push_back({"OHasNoData", [](Call& c) { c.out.o = {nullptr, DType::kF32, {2, 3, 4, 6}}; },
                 "o has no data, expected a pointer to [2,3,4,6] elements"});
  all.push_back({"VIsMisaligned",
                 [](Call& c) {
                   const Buffer bytes(DType::kF32, {121});
                   c.p.memory.push_back(bytes);
                   c.p.in.v = {bytes.as<char>() + 2, DType::kF32, {2, 5, 2, 6}};
                 },
                 "v has a misaligned address, expected a multiple of 4 bytes"});
  for (const char* name : {"q", "k", "v"}) {
    all.push_back({std::string(name) + "HasStridedRows",
                   [name](Call& c) {
                     ConstTensorView& view = *name == 'q' ? c.p.in.q : *name == 'k' ? c.p.in.k : c.p.in.v;
                     view = Strided(c, view, {1000, 200, 50, 2});
                   },
                   std::string(name) + " has stride 2 on its last axis, expected 1 (contiguous rows)"});
  }
  all.push_back({"OIsAbsent", [](Call& c) { c.out.o = {}; }, "o is absent, expected a tensor"});
  all.push_back({"OHasAnotherDType", [](Call& c) { c.out.o = NewOutput(c, DType::kF64, {2, 3, 4, 6}); },
                 "o has dtype f64, expected f32 as q"});
  all.push_back({"OHasAnotherShape", [](Call& c) { c.out.o = NewOutput(c, DType::kF32, {2, 3, 4, 8}); },
                 "o has shape [2,3,4,8], expected [2,3,4,6]"});
  all.push_back({"OHasStridedRows",
                 [](Call& c) {
                   const int64_t strides[] = {1000, 200, 50, 2};
                   c.out.o = {c.out.o.data(), DType::kF32, c.out.o.sizes(), strides};
                 },
                 "o has stride 2 on its last axis, expected 1"});
  all.push_back({"OOverlapsItself",
                 [](Call& c) {
                   const int64_t strides[] = {72, 0, 6, 1};
                   c.out.o = {c.out.o.data(), DType::kF32, c.out.o.sizes(), strides};
                 },
                 "o has strides [72,0,6,1] for shape [2,3,4,6], expected strides "
                 "that reach every element once"});
  all.push_back({"LseHasAnotherDType", [](Call& c) { c.out.lse = NewOutput(c, DType::kF64, {2, 4, 3}); },
                 "lse has dtype f64, expected f32"});
  all.push_back({"LseHasAnotherShape", [](Call& c) { c.out.lse = NewOutput(c, DType::kF32, {2, 3, 4}); },
                 "lse has shape [2,3,4], expected [2,4,3]"});
  all.push_back({"LseOverlapsItself",
                 [](Call& c) {
                   const int64_t strides[] = {12, 1, 1};
                   c.out.lse = {c.out.lse.data(), DType::kF32, c.out.lse.sizes(), strides};
                 },
                 "lse has strides [12,1,1] for shape [2,4,3], expected strides "
                 "that reach every element once"});
  all.push_back({"LseOverlapsO", [](Call& c) { c.out.lse = {c.out.o.data(), DType::kF32, {2, 4, 3}}; },
                 "lse overlaps o, expected memory of its own"});
  all.push_back({"OOverlapsV",
                 [](Call& c) {
                   c.p.in.v = New(c, DType::kF32, {2, 5, 4, 6});
                   c.p.in.k = New(c, DType::kF32, {2, 5, 4, 8});
                   const int64_t strides[] = {120, 24, 6, 1};
                   c.out.o = {const_cast<void*>(c.p.in.v.data()), DType::kF32, c.out.o.sizes(), strides};
                 },
                 "o overlaps v, expected memory of its own"});
  all.push_back({"LseOverlapsQ",
                 [](Call& c) { c.out.lse = {const_cast<void*>(c.p.in.q.data()), DType::kF32, c.out.lse.sizes()}; },
                 "lse overlaps q, expected memory of its own"});
  all.push_back({"OOverlapsTheBias", [](Call& c) { c.p.options.bias = {c.out.o.data(), DType::kF32, {3, 5}}; },
                 "o overlaps bias, expected memory of its own"});
}

void AddOptionMistakes(std::vector<Mistake>& all) {
  const auto scalar = [&](const char* name, std::function<void(Options&)> set, const char* message) {
    all.push_back({name, [set](Call& c) { set(c.p.options); }, message});
  };
  scalar("ScaleIsInfinite", [](Options& o) { o.scale = kInfinity; }, "scale is inf, expected a finite number");
  scalar("ScaleIsMinusInfinite", [](Options& o) { o.scale = -kInfinity; }, "scale is -inf, expected a finite number");
  scalar("ScaleIsNan", [](Options& o) { o.scale = kNaN; }, "scale is nan, expected a finite number");
  scalar(
      "ScaleIsTooLargeForTheDType", [](Options& o) { o.scale = 1e300; }, "scale is 1e+300, expected a finite number");
  scalar("SoftcapIsNegative", [](Options& o) { o.softcap = -1; }, "softcap is -1, expected a finite number above 0");
  scalar("SoftcapIsNan", [](Options& o) { o.softcap = kNaN; }, "softcap is nan, expected a finite number above 0");
  scalar(
      "SoftcapIsInfinite", [](Options& o) { o.softcap = kInfinity; },
      "softcap is inf, expected a finite number above 0");
  scalar(
      "WindowLeftIsBelowMinusOne", [](Options& o) { o.window.left = -2; },
      "window.left is -2, expected -1 (unlimited) or more");
  scalar(
      "WindowRightIsBelowMinusOne", [](Options& o) { o.window.right = -3; },
      "window.right is -3, expected -1 (unlimited) or more");
  scalar("SinkTokensAreNegative", [](Options& o) { o.sink_tokens = -1; }, "sink_tokens is -1, expected 0 or more");
  scalar("ChunkIsNegative", [](Options& o) { o.chunk = -4; }, "chunk is -4, expected 1 or more, or 0 for none");
  scalar("DropoutIsOne", [](Options& o) { o.dropout = 1; }, "dropout is 1, expected 0 <= dropout < 1");
  scalar("DropoutIsNegative", [](Options& o) { o.dropout = -0.5; }, "dropout is -0.5, expected 0 <= dropout < 1");
  scalar("DropoutIsNan", [](Options& o) { o.dropout = kNaN; }, "dropout is nan, expected 0 <= dropout < 1");

  struct Field {
    const char* name;
    ConstTensorView Options::* member;
    int64_t limit;
  };
  for (const auto& [name, member, limit] : {Field{"key_lengths", &Options::key_lengths, 5},
                                            {"key_starts", &Options::key_starts, 5},
                                            {"query_lengths", &Options::query_lengths, 3},
                                            {"prefix", &Options::prefix, -1}}) {
    const auto ints = [member = member](std::vector<int64_t> values) {
      return [member, values](Call& c) { c.p.options.*member = KeepInts(c.p, values); };
    };
    const std::string prefix = name;
    all.push_back({prefix + "_is_negative", ints({1, -1}), prefix + " contains -1, expected 0 to "});
    if (limit >= 0) {
      all.push_back({prefix + "_is_too_long", ints({limit + 1, 0}),
                     prefix + " contains " + std::to_string(limit + 1) + ", expected 0 to " + std::to_string(limit)});
    }
    all.push_back({prefix + "_has_another_shape", ints({1, 1, 1}), prefix + " has shape [3], expected [2]"});
    all.push_back({prefix + "_is_of_floats",
                   [member = member](Call& c) { c.p.options.*member = KeepFloats(c.p, {1, 1}); },
                   prefix + " has dtype f32, expected i32 or i64"});
    all.push_back({prefix + "_has_no_data",
                   [member = member](Call& c) { c.p.options.*member = {nullptr, DType::kI64, {2}}; },
                   prefix + " has no data, expected a pointer to [2] elements"});
  }
  all.push_back({"QueryStartsAreOfI32", [](Call& c) { c.p.options.query_starts = KeepInts(c.p, {0, 0}, DType::kI32); },
                 "query_starts has dtype i32, expected i64"});
  all.push_back({"QueryStartsAreTooFar",
                 [](Call& c) { c.p.options.query_starts = KeepInts(c.p, {0, std::numeric_limits<int64_t>::min()}); },
                 "query_starts contains -9223372036854775808, expected a "
                 "position of at most 2^61 either way"});
  for (const int64_t start : {(int64_t{1} << 61) + 1, -(int64_t{1} << 61) - 1}) {
    all.push_back({start > 0 ? "QueryStartsAreOneTooFar" : "QueryStartsAreOneTooFarBack",
                   [start](Call& c) { c.p.options.query_starts = KeepInts(c.p, {start, 0}); },
                   "query_starts contains " + std::to_string(start) + ", expected a position of at most 2^61"});
  }
  all.push_back({"OnlySegmentsOfQueries",
                 [](Call& c) { c.p.options.segments_q = Keep(c.p, Buffer(DType::kI32, {2, 3}).FillConstant(0)); },
                 "segments_k is absent, expected both segments or neither"});
  all.push_back({"OnlySegmentsOfKeys",
                 [](Call& c) { c.p.options.segments_k = Keep(c.p, Buffer(DType::kI32, {2, 5}).FillConstant(0)); },
                 "segments_q is absent, expected both segments or neither"});
  all.push_back({"SegmentsHaveAnotherShape",
                 [](Call& c) {
                   c.p.options.segments_q = Keep(c.p, Buffer(DType::kI32, {2, 3}).FillConstant(0));
                   c.p.options.segments_k = c.p.options.segments_q;
                 },
                 "segments_k has shape [2,3], expected [2,5]"});
  all.push_back({"SegmentsAreOfBooleans",
                 [](Call& c) {
                   c.p.options.segments_q = New(c, DType::kBool, {2, 3});
                   c.p.options.segments_k = New(c, DType::kBool, {2, 5});
                 },
                 "segments_q has dtype bool, expected i32 or i64"});
  all.push_back({"SegmentsAreBeyond31Bits",
                 [](Call& c) {
                   const Buffer q(DType::kI64, {2, 3}), k(DType::kI64, {2, 5});
                   q.FillConstant(4294967297.0);
                   k.FillConstant(1);
                   c.p.options.segments_q = Keep(c.p, q);
                   c.p.options.segments_k = Keep(c.p, k);
                 },
                 "segments_q contains 4294967297, expected ids below 2^31"});
  all.push_back({"ASegmentIsTheFirstBeyond31Bits",
                 [](Call& c) {
                   const Buffer q(DType::kI64, {2, 3}), k(DType::kI64, {2, 5});
                   q.FillConstant(1);
                   q.Set({1, 2}, 0x1p31);
                   k.FillConstant(1);
                   c.p.options.segments_q = Keep(c.p, q);
                   c.p.options.segments_k = Keep(c.p, k);
                 },
                 "segments_q contains 2147483648, expected ids below 2^31"});
  all.push_back({"MaskIsOfFloats", [](Call& c) { c.p.options.mask = New(c, DType::kF32, {3, 5}); },
                 "mask has dtype f32, expected bool (a float mask is a bias)"});
  all.push_back({"MaskDoesNotBroadcast", [](Call& c) { c.p.options.mask = New(c, DType::kBool, {2, 5}); },
                 "mask has shape [2,5], expected one that broadcasts to "
                 "[2,4,3,5]"});
  all.push_back({"BiasHasRank5", [](Call& c) { c.p.options.bias = New(c, DType::kF32, {1, 2, 4, 3, 5}); },
                 "bias has shape [1,2,4,3,5], expected one that broadcasts to "
                 "[2,4,3,5]"});
  all.push_back({"BiasHasKeyHeads", [](Call& c) { c.p.options.bias = New(c, DType::kF32, {2, 2, 3, 5}); },
                 "bias has shape [2,2,3,5], expected one that broadcasts to "
                 "[2,4,3,5]"});
  all.push_back({"BiasIsOfBooleans", [](Call& c) { c.p.options.bias = New(c, DType::kBool, {3, 5}); },
                 "bias has dtype bool, expected a float dtype"});
  all.push_back({"BiasHasNoData", [](Call& c) { c.p.options.bias = {nullptr, DType::kF32, {3, 5}}; },
                 "bias has no data, expected a pointer to [3,5] elements"});
  all.push_back({"AlibiHasKeyHeads", [](Call& c) { c.p.options.alibi = New(c, DType::kF32, {2}); },
                 "alibi has shape [2], expected [4]"});
  all.push_back({"AlibiHasAnotherBatch", [](Call& c) { c.p.options.alibi = New(c, DType::kF32, {3, 4}); },
                 "alibi has shape [3,4], expected [2,4]"});
  all.push_back({"AlibiIsOfIntegers", [](Call& c) { c.p.options.alibi = New(c, DType::kI32, {4}); },
                 "alibi has dtype i32, expected a float dtype"});
  all.push_back({"RelativeBiasHasKeyHeads", [](Call& c) { c.p.options.relative_bias = New(c, DType::kF32, {2, 7}); },
                 "relative_bias has shape [2,7], expected [4,span], span >= 1"});
  all.push_back({"RelativeBiasHasABatch", [](Call& c) { c.p.options.relative_bias = New(c, DType::kF32, {2, 4, 7}); },
                 "relative_bias has shape [2,4,7], expected [4,span], span >= 1"});
  all.push_back({"RelativeBiasHasNoSpan", [](Call& c) { c.p.options.relative_bias = New(c, DType::kF32, {4, 0}); },
                 "relative_bias has shape [4,0], expected [4,span], span >= 1"});
  all.push_back({"RelativeBiasIsOfIntegers", [](Call& c) { c.p.options.relative_bias = New(c, DType::kI32, {4, 7}); },
                 "relative_bias has dtype i32, expected a float dtype"});
  all.push_back({"RelativeBiasHasNoData", [](Call& c) { c.p.options.relative_bias = {nullptr, DType::kF32, {4, 7}}; },
                 "relative_bias has no data, expected a pointer to [4,7] elements"});
  all.push_back({"LogDecayHasKeyHeads",
                 [](Call& c) {
                   c.p.options.causal = true;
                   c.p.options.log_decay = New(c, DType::kF32, {2, 5, 2});
                 },
                 "log_decay has shape [2,5,2], expected [2,5,4]"});
  all.push_back({"LogDecayHasQueries",
                 [](Call& c) {
                   c.p.options.causal = true;
                   c.p.options.log_decay = New(c, DType::kF32, {2, 3, 4});
                 },
                 "log_decay has shape [2,3,4], expected [2,5,4]"});
  all.push_back({"LogDecayHasNoBatch",
                 [](Call& c) {
                   c.p.options.causal = true;
                   c.p.options.log_decay = New(c, DType::kF32, {5, 4});
                 },
                 "log_decay has shape [5,4], expected [2,5,4]"});
  all.push_back({"LogDecayIsOfIntegers", [](Call& c) { c.p.options.log_decay = New(c, DType::kI32, {2, 5, 4}); },
                 "log_decay has dtype i32, expected a float dtype"});
  all.push_back({"LogDecayIsNotCausal", [](Call& c) { c.p.options.log_decay = New(c, DType::kF32, {2, 5, 4}); },
                 "log_decay is given without causal, expected causal with it"});
  all.push_back({"LogDecayIsNotPacked",
                 [](Call& c) {
                   c.p.options.causal = true;
                   c.p.options.log_decay = New(c, DType::kF32, {2, 5, 4});
                 },
                 "log_decay has shape [2,5,4], expected [1,10,4]", true});
  all.push_back({"LogDecayHasNoData",
                 [](Call& c) {
                   c.p.options.causal = true;
                   c.p.options.log_decay = {nullptr, DType::kF32, {2, 5, 4}};
                 },
                 "log_decay has no data, expected a pointer to [2,5,4] elements"});
  all.push_back({"SinksHaveAnotherShape", [](Call& c) { c.p.options.sinks = New(c, DType::kF32, {2, 4}); },
                 "sinks has shape [2,4], expected [4]"});
  all.push_back({"SinksAreOfIntegers", [](Call& c) { c.p.options.sinks = New(c, DType::kI64, {4}); },
                 "sinks has dtype i64, expected a float dtype"});
  all.push_back({"OnlyBoundariesOfKeys", [](Call& c) { c.p.options.cu_seqlens_k = KeepInts(c.p, {0, 5}); },
                 "cu_seqlens_q is absent, expected it together with "
                 "cu_seqlens_k"});
}

void AddPackedMistakes(std::vector<Mistake>& all) {
  const auto add = [&](const char* name, std::function<void(Call&)> make, const char* message) {
    all.push_back({name, make, message, /*packed=*/true});
  };
  const auto cu_q = [&](const char* name, std::vector<int64_t> cu, const char* message) {
    add(name, [cu](Call& c) { c.p.options.cu_seqlens_q = KeepInts(c.p, cu); }, message);
  };
  cu_q("BoundariesBeginAboveZero", {1, 2, 6}, "cu_seqlens_q begins with 1, expected 0");
  cu_q("BoundariesDescend", {0, 4, 3}, "cu_seqlens_q descends from 4 to 3, expected ascending boundaries");
  cu_q("BoundariesEndBeyondTheTokens", {0, 2, 7}, "cu_seqlens_q ends with 7, expected at most 6 tokens");
  cu_q("BoundariesOfQueriesAndKeysDiffer", {0, 6}, "cu_seqlens_k has 3 boundaries, expected 2 as cu_seqlens_q");
  cu_q("BoundariesAreNone", {}, "cu_seqlens_q has shape [0], expected [B + 1]");
  add(
      "BoundariesOfKeysEndBeyondTheTokens", [](Call& c) { c.p.options.cu_seqlens_k = KeepInts(c.p, {0, 3, 11}); },
      "cu_seqlens_k ends with 11, expected at most 10 tokens");
  add(
      "BoundariesHaveRank2", [](Call& c) { c.p.options.cu_seqlens_q = New(c, DType::kI32, {1, 3}); },
      "cu_seqlens_q has shape [1,3], expected [B + 1]");
  add(
      "BoundariesAreOfFloats", [](Call& c) { c.p.options.cu_seqlens_q = KeepFloats(c.p, {0, 2, 6}); },
      "cu_seqlens_q has dtype f32, expected i32 or i64");
  add(
      "BoundariesHaveNoData", [](Call& c) { c.p.options.cu_seqlens_q = {nullptr, DType::kI32, {3}}; },
      "cu_seqlens_q has no data, expected ");
  add(
      "PackedBatch",
      [](Call& c) {
        c.p.in.q = New(c, DType::kF32, {2, 3, 4, 8});
        c.p.in.k = New(c, DType::kF32, {2, 5, 2, 8});
        c.p.in.v = New(c, DType::kF32, {2, 5, 2, 6});
      },
      "q has shape [2,3,4,8], expected a leading axis of 1 with cu_seqlens_q");
  add(
      "PackedRanksDiffer", [](Call& c) { c.p.in.k = New(c, DType::kF32, {1, 10, 2, 8}); },
      "k has shape [1,10,2,8], expected [T, H, D] or [1, T, H, D], the same rank "
      "for q, k and v");
  add(
      "PackedLseHasABatch", [](Call& c) { c.out.lse = NewOutput(c, DType::kF32, {1, 4, 6}); },
      "lse has shape [1,4,6], expected [4,6]");
  add(
      "PackedAlibiHasAnotherBatch", [](Call& c) { c.p.options.alibi = New(c, DType::kF32, {1, 4}); },
      "alibi has shape [1,4], expected [2,4]");
  for (const auto& [name, member] : {std::pair{"mask", &Options::mask},
                                     {"bias", &Options::bias},
                                     {"segments_q", &Options::segments_q},
                                     {"segments_k", &Options::segments_k},
                                     {"prefix", &Options::prefix},
                                     {"key_lengths", &Options::key_lengths},
                                     {"key_starts", &Options::key_starts},
                                     {"query_lengths", &Options::query_lengths}}) {
    all.push_back({std::string("packed_with_") + name,
                   [member = member](Call& c) { c.p.options.*member = New(c, DType::kI64, {2}); },
                   std::string(name) + " is given with cu_seqlens_q, expected it only without",
                   /*packed=*/true});
  }
}

std::vector<Mistake> Mistakes() {
  std::vector<Mistake> all;
  AddTensorMistakes(all);
  AddOptionMistakes(all);
  AddPackedMistakes(all);
  return all;
}

std::vector<std::vector<uint8_t>> Snapshot(const Problem& p) {
  std::vector<std::vector<uint8_t>> bytes;
  for (const Buffer& b : p.memory) {
    bytes.emplace_back(b.bytes().begin(), b.bytes().end());
  }
  return bytes;
}

class AttentionMistake : public testing::TestWithParam<Mistake> {};

INSTANTIATE_TEST_SUITE_P(Arguments, AttentionMistake, testing::ValuesIn(Mistakes()),
                         [](const auto& value) { return value.param.name; });

TEST_P(AttentionMistake, IsNamedAndNothingIsWritten) {
  Call c = GetParam().packed ? PackedCall() : RightCall();
  GetParam().make(c);
  const auto before = Snapshot(c.p);
  Context ctx(1);
  const auto check = [&](const std::string& op, const auto& call) {
    try {
      call();
      ADD_FAILURE() << op << " did not throw";
    } catch (const InvalidArgument& e) {
      EXPECT_THAT(e.what(), HasSubstr(op + ": " + GetParam().message));
    }
  };
  check("attention::Forward", [&] { Forward(ctx, c.p.in, c.p.options, c.out); });
  EXPECT_EQ(Snapshot(c.p), before);
}

TEST(AttentionErrors, TheCallsThatAreSpoiledAreRight) {
  for (const bool packed : {false, true}) {
    const Call c = packed ? PackedCall() : RightCall();
    Context ctx(1);
    EXPECT_NO_THROW(Forward(ctx, c.p.in, c.p.options, c.out));
    EXPECT_NO_THROW(Reference(c.p.in, c.p.options, c.out));
    EXPECT_NO_THROW(Explain(ctx, c.p.in, c.p.options));
    EXPECT_NO_THROW(Workspace(ctx, c.p.in, c.p.options));
  }
}

TEST(AttentionErrors, EveryEntryPointNamesItself) {
  Call c = RightCall();
  c.p.options.dropout = 2;
  Context ctx(1);
  const auto message = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string what = ": dropout is 2, expected 0 <= dropout < 1";
  EXPECT_EQ(message([&] { Forward(ctx, c.p.in, c.p.options, c.out); }), "attention::Forward" + what);
  EXPECT_EQ(message([&] { Reference(c.p.in, c.p.options, c.out); }), "attention::Reference" + what);
  EXPECT_EQ(message([&] { Explain(ctx, c.p.in, c.p.options); }), "attention::Explain" + what);
  EXPECT_EQ(message([&] { Workspace(ctx, c.p.in, c.p.options); }), "attention::Workspace" + what);
}

// Regression found by fuzzing: Forward checks its arguments while subnormal results are flushed, the other entry points
// do not, and all must accept the same values.
TEST(AttentionErrors, ASubnormalSoftcapIsRefusedByEveryEntryPoint) {
  Call c;
  c.p = MakeProblem(DType::kF64, {2, 3, 5, 4, 2, 8, 6});
  c.p.options.softcap = 3e-310;
  const Buffer o(DType::kF64, c.p.o.sizes);
  Context ctx(1);
  EXPECT_THROW(Forward(ctx, c.p.in, c.p.options, {o.view(), {}}), InvalidArgument);
  EXPECT_THROW(Reference(c.p.in, c.p.options, {o.view(), {}}), InvalidArgument);
  EXPECT_THROW(Explain(ctx, c.p.in, c.p.options), InvalidArgument);
  c.p.options.softcap = std::numeric_limits<double>::min();
  EXPECT_NO_THROW(Forward(ctx, c.p.in, c.p.options, {o.view(), {}}));
}

}  // namespace
}  // namespace heed::attention
