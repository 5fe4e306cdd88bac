// Checks every argument of attention before anything is written and maps the call onto the softmax engine's problem.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/engines/softmax/decays.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;
using softmax::Sequence;

// Key indices and differences of positions must fit an i32 lane of an f32 kernel.
constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max() - 1024;
// Positions and windows may have any values whose sums do not overflow; a window of kMaxWindow reaches from any
// position to any key.
constexpr int64_t kMaxPosition = int64_t{1} << 61;
constexpr int64_t kMaxWindow = int64_t{1} << 62;

// No tile has more keys.
constexpr int64_t kMaxTileKeys = 1024;

struct Sizes {
  int64_t B, Tq, Tk, Hq, Hkv, D, Dv;
  bool packed;
};

// Checks the rank and the dtype of q, or of k or v beside it.
void CheckForm(const Check& check, const char* name, const ConstTensorView& t, const ConstTensorView& q, bool packed) {
  check.Present(name, t);
  const bool rank_fits = t.rank() == 4 || (packed && t.rank() == 3);
  if (!rank_fits || t.rank() != q.rank()) {
    check.Fail(name, "has shape " + t.ShapeString(),
               packed ? "[T, H, D] or [1, T, H, D], the same rank for q, k and v" : "rank 4: [B, T, H, D]");
  }
  if (packed && t.rank() == 4 && t.size(0) != 1) {
    check.Fail(name, "has shape " + t.ShapeString(), "a leading axis of 1 with cu_seqlens_q");
  }
  if (!IsFloat(t.dtype())) {
    check.Fail(name, std::string("has dtype ") + Name(t.dtype()), "a float dtype");
  }
  if (t.dtype() != q.dtype()) {
    check.Fail(name, std::string("has dtype ") + Name(t.dtype()), std::string(Name(q.dtype())) + " as q");
  }
}

Sizes SizesOf(const ConstTensorView& q, const KeySizes& keys, bool packed) {
  const int r = q.rank();
  return {r == 4 ? q.size(0) : 1, q.size(r - 3), keys.tokens, q.size(r - 2), keys.heads,
          q.size(r - 1),          keys.channels, packed};
}

// Checks that queries and keys of these sizes fit each other.
void CheckSizes(const Check& check, const ConstTensorView& q, const Sizes& n) {
  if (n.D < 1) check.Fail("q", "has shape " + q.ShapeString(), "D >= 1");
  if (n.Hkv < 1 ? n.Hq != 0 : n.Hq % n.Hkv != 0) {
    check.Fail("q", "has " + Text(n.Hq) + " heads", "a multiple of the " + Text(n.Hkv) + " heads of k");
  }
  if (n.Tk > kMaxKeys) {
    check.Fail("k", "has " + Text(n.Tk) + " tokens", "at most " + Text(kMaxKeys));
  }
}

Sizes CheckInputs(const Check& check, const Inputs& in, bool packed) {
  const struct {
    const char* name;
    const ConstTensorView& view;
  } tensors[] = {{"q", in.q}, {"k", in.k}, {"v", in.v}};
  for (const auto& [name, t] : tensors) CheckForm(check, name, t, in.q, packed);
  const int r = in.q.rank();
  const Sizes n = SizesOf(in.q, {in.k.size(r - 3), in.k.size(r - 2), in.v.size(r - 1)}, packed);
  const auto shape = [&](int64_t T, int64_t H, int64_t D) {
    return r == 4 ? std::vector<int64_t>{n.B, T, H, D} : std::vector<int64_t>{T, H, D};
  };
  check.Shape("k", in.k, shape(n.Tk, n.Hkv, n.D));
  check.Shape("v", in.v, shape(n.Tk, n.Hkv, n.Dv));
  if (n.D >= 1 && n.Dv < 1) check.Fail("v", "has shape " + in.v.ShapeString(), "Dv >= 1");
  CheckSizes(check, in.q, n);
  for (const auto& [name, t] : tensors) {
    check.Readable(name, t);
    check.ContiguousRows(name, t);
  }
  return n;
}

// Calls f(name, view) for every tensor that is read.
template <class F>
void ForEachInput(const Inputs& in, const Options& options, const F& f) {
  f("q", in.q);
  f("k", in.k);
  f("v", in.v);
  ForEachTensor(options, [&](const OptionRow& row, const ConstTensorView& view) { f(row.name, view); });
}

void CheckOutputs(const Check& check, const Inputs& in, const Options& options, const Outputs& out, const Sizes& n,
                  Use use) {
  check.Present("o", out.o);
  const bool wide = use == Use::kReference;
  const DType dtype = in.q.dtype();
  if (out.o.dtype() != dtype && !(wide && out.o.dtype() == DType::kF64)) {
    check.Fail("o", std::string("has dtype ") + Name(out.o.dtype()), std::string(Name(dtype)) + " as q");
  }
  check.Shape("o", out.o,
              in.q.rank() == 4 ? std::vector<int64_t>{n.B, n.Tq, n.Hq, n.Dv} : std::vector<int64_t>{n.Tq, n.Hq, n.Dv});
  check.ContiguousRows("o", out.o);
  check.Writable("o", out.o);
  if (out.lse.present()) {
    const DType expected = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    if (out.lse.dtype() != expected && !(wide && out.lse.dtype() == DType::kF64)) {
      check.Fail("lse", std::string("has dtype ") + Name(out.lse.dtype()), Name(expected));
    }
    check.Shape("lse", out.lse, n.packed ? std::vector<int64_t>{n.Hq, n.Tq} : std::vector<int64_t>{n.B, n.Hq, n.Tq});
    check.Writable("lse", out.lse);
    check.NoOverlap("lse", out.lse, "o", out.o);
  }
  ForEachInput(in, options, [&](const char* name, const ConstTensorView& view) {
    check.NoOverlap("o", out.o, name, view);
    check.NoOverlap("lse", out.lse, name, view);
  });
}

// One whole sequence per batch entry; lengths and starts shorten it later.
std::vector<Sequence> PaddedSequences(const Sizes& n) {
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < n.B; ++b) {
    Sequence s;
    s.batch = b;
    s.num_queries = s.query_end = n.Tq;
    s.num_keys = s.key_end = n.Tk;
    sequences.push_back(s);
  }
  return sequences;
}

std::vector<int64_t> Boundaries(const Check& check, const char* name, const ConstTensorView& t, int64_t total) {
  if (t.rank() != 1 || t.size(0) < 1) {
    check.Fail(name, "has shape " + t.ShapeString(), "[B + 1]");
  }
  std::vector<int64_t> cu = check.Integers(name, t, {t.size(0)});
  if (cu.empty()) {
    check.Fail(name, "has no data", "the boundaries of the packed sequences");
  }
  if (cu[0] != 0) check.Fail(name, "begins with " + Text(cu[0]), "0");
  for (size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      check.Fail(name, "descends from " + Text(cu[i - 1]) + " to " + Text(cu[i]), "ascending boundaries");
    }
  }
  if (cu.back() > total) {
    check.Fail(name, "ends with " + Text(cu.back()), "at most " + Text(total) + " tokens");
  }
  return cu;
}

std::vector<Sequence> PackedSequences(const Check& check, const Options& options, const Sizes& n) {
  for (const OptionRow& row : kOptionRows) {
    if (row.Is(kPadded) && IsGiven(row, options)) {
      check.Fail(row.name, "is given with cu_seqlens_q", "it only without");
    }
  }
  const std::vector<int64_t> q = Boundaries(check, "cu_seqlens_q", options.cu_seqlens_q, n.Tq);
  const bool own = options.cu_seqlens_k.present();
  const std::vector<int64_t> k =
      Boundaries(check, own ? "cu_seqlens_k" : "cu_seqlens_q", own ? options.cu_seqlens_k : options.cu_seqlens_q, n.Tk);
  if (q.size() != k.size()) {
    check.Fail("cu_seqlens_k", "has " + Text(k.size()) + " boundaries", Text(q.size()) + " as cu_seqlens_q");
  }
  std::vector<Sequence> sequences;
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    Sequence s;
    s.batch = static_cast<int64_t>(b);
    s.first_q = q[b];
    s.first_k = k[b];
    s.num_queries = s.query_end = q[b + 1] - q[b];
    s.num_keys = s.key_end = k[b + 1] - k[b];
    sequences.push_back(s);
  }
  return sequences;
}

void CheckLengths(const Check& check, const char* name, const std::vector<int64_t>& values, int64_t limit) {
  for (const int64_t value : values) {
    if (value < 0 || value > limit) {
      check.Fail(name, "contains " + Text(value), "0 to " + Text(limit));
    }
  }
}

// Reads lengths, starts, positions and prefixes per sequence.
void CheckSequences(const Check& check, const Options& options, const Sizes& n, std::vector<Sequence>* sequences) {
  const auto B = static_cast<int64_t>(sequences->size());
  const auto per_sequence = [&](const char* name, const ConstTensorView& t) { return check.Integers(name, t, {B}); };
  if (options.query_starts.present() && options.query_starts.dtype() != DType::kI64) {
    check.Fail("query_starts", std::string("has dtype ") + Name(options.query_starts.dtype()), "i64");
  }
  const auto starts = per_sequence("query_starts", options.query_starts);
  const auto prefix = per_sequence("prefix", options.prefix);
  const auto key_lengths = per_sequence("key_lengths", options.key_lengths);
  const auto key_starts = per_sequence("key_starts", options.key_starts);
  const auto query_lengths = per_sequence("query_lengths", options.query_lengths);
  CheckLengths(check, "key_lengths", key_lengths, n.Tk);
  CheckLengths(check, "key_starts", key_starts, n.Tk);
  CheckLengths(check, "query_lengths", query_lengths, n.Tq);
  CheckLengths(check, "prefix", prefix, kMaxPosition);
  for (const int64_t start : starts) {
    if (start < -kMaxPosition || start > kMaxPosition) {
      check.Fail("query_starts", "contains " + Text(start), "a position of at most 2^61 either way");
    }
  }
  for (size_t b = 0; b < sequences->size(); ++b) {
    Sequence& s = (*sequences)[b];
    s.start = !starts.empty() ? starts[b] : options.align == Align::kTopLeft ? 0 : s.num_keys - s.num_queries;
    if (!key_lengths.empty()) s.key_end = key_lengths[b];
    if (!key_starts.empty()) s.key_begin = key_starts[b];
    if (!query_lengths.empty()) s.query_end = query_lengths[b];
    s.prefix_end = s.key_begin + (prefix.empty() ? 0 : prefix[b]);
    s.sink_end = s.key_begin + std::min(options.sink_tokens, kMaxPosition);
    s.key_end = std::max(s.key_end, s.key_begin);
  }
}

void CheckScalars(const Check& check, const Options& options, DType dtype, Problem* p) {
  const bool wide = dtype == DType::kF64;
  const double limit = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  // The smallest normal number, so that the check does not depend on whether the caller flushes subnormal numbers. Its
  // inverse is finite.
  const double smallest = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  if (options.scale.has_value()) {
    p->scale = *options.scale;
    if (!(std::abs(p->scale) <= limit)) {
      check.Fail("scale", "is " + Text(p->scale), "a finite number");
    }
  } else {
    p->scale = 1 / std::sqrt(static_cast<double>(p->depth));
  }
  if (options.softcap != 0 && !(options.softcap >= smallest && options.softcap <= limit)) {
    check.Fail("softcap", "is " + Text(options.softcap), "a finite number above 0");
  }
  p->softcap = options.softcap;
  p->causal = options.causal;
  const auto side = [&](const char* name, int64_t tokens) {
    if (tokens < -1) {
      check.Fail(name, "is " + Text(tokens), "-1 (unlimited) or more");
    }
    return tokens == -1 ? softmax::kUnlimited : std::min(tokens, kMaxWindow);
  };
  p->window_left = side("window.left", options.window.left);
  p->window_right = side("window.right", options.window.right);
  if (options.sink_tokens < 0) {
    check.Fail("sink_tokens", "is " + Text(options.sink_tokens), "0 or more");
  }
  if (options.chunk < 0) {
    check.Fail("chunk", "is " + Text(options.chunk), "1 or more, or 0 for none");
  }
  p->chunk = options.chunk;
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    check.Fail("dropout", "is " + Text(options.dropout), "0 <= dropout < 1");
  }
  p->dropout = options.dropout;
  p->keep_below = static_cast<uint64_t>(std::llround((1 - options.dropout) * 4294967296.0));
  p->key_low = static_cast<uint32_t>(options.seed);
  p->key_high = static_cast<uint32_t>(options.seed >> 32);
  p->dropout_offset = options.dropout_offset;
}

// [B, Tk, Hq]; packed without B, or with B = 1 as q may be.
void CheckLogDecay(const Check& check, const Options& options, const Sizes& n, Problem* p) {
  const ConstTensorView& t = options.log_decay;
  if (!t.present()) return;
  check.Float("log_decay", t);
  check.OnCpu("log_decay", t);
  if (!options.causal) check.Fail("log_decay", "is given without causal", "causal with it");
  if (n.packed && t.rank() == 2) {
    check.Shape("log_decay", t, {n.Tk, n.Hq});
  } else {
    check.Shape("log_decay", t, {n.B, n.Tk, n.Hq});
  }
  const int last = t.rank() - 1;
  p->forgets = true;
  p->log_decay = {t.data(), n.packed ? 0 : t.stride(0), t.stride(last - 1), t.stride(last)};
  p->log_decay_dtype = t.dtype();
}

// Checks tensors with an element per pair.
void CheckPairs(const Check& check, const Options& options, const Sizes& n, Problem* p) {
  const std::vector<int64_t> pairs = {n.B, n.Hq, n.Tq, n.Tk};
  if (options.mask.present()) {
    if (options.mask.dtype() != DType::kBool) {
      check.Fail("mask", std::string("has dtype ") + Name(options.mask.dtype()), "bool (a float mask is a bias)");
    }
    p->mask = check.Broadcast("mask", options.mask, pairs);
  }
  if (options.bias.present()) {
    check.Float("bias", options.bias);
    p->bias = check.Broadcast("bias", options.bias, pairs);
  }
}

float Widened(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
float Widened(F16 x) { return ToFloat(x); }
float Widened(float x) { return x; }
double Widened(double x) { return x; }

// Copies the rows of a relative bias up to this distance, with zeros around them.
template <class T>
std::shared_ptr<const std::vector<T>> PaddedRows(const ConstTensorView& t, int64_t heads, int64_t span) {
  constexpr int64_t kPad = softmax::RelativeBias::kPad;
  const int64_t stride = span + 2 * kPad;
  auto rows = std::make_shared<std::vector<T>>(static_cast<size_t>(heads * stride));
  if (t.data() == nullptr) return rows;
  const auto copy = [&](auto of_type) {
    const auto* const data = static_cast<const decltype(of_type)*>(t.data());
    for (int64_t h = 0; h < heads; ++h) {
      T* const to = rows->data() + h * stride + kPad;
      for (int64_t d = 0; d < span; ++d) to[d] = static_cast<T>(Widened(data[h * t.stride(0) + d * t.stride(1)]));
    }
  };
  switch (t.dtype()) {
    case DType::kF64: copy(double()); break;
    case DType::kBF16: copy(BF16()); break;
    case DType::kF16: copy(F16()); break;
    default: copy(float()); break;
  }
  return rows;
}

// Distances that no pair of the call has are left out.
softmax::RelativeBias CheckRelativeBias(const Check& check, const ConstTensorView& t, const Sizes& n,
                                        const Problem& p) {
  if (t.rank() != 2 || t.size(0) != n.Hq || t.size(1) < 1) {
    check.Fail("relative_bias", "has shape " + t.ShapeString(), "[" + Text(n.Hq) + ",span], span >= 1");
  }
  softmax::RelativeBias bias;
  for (const Sequence& s : p.sequences) bias.span = std::max(bias.span, s.start + s.num_queries - s.key_begin);
  bias.span = std::min(bias.span, t.size(1));
  if (!bias.present()) return bias;
  // Kernels index it by an i32 lane.
  const int64_t most = std::numeric_limits<int32_t>::max() / std::max<int64_t>(n.Hq, 1);
  if (bias.head_stride() + kMaxTileKeys > most) {
    check.Fail("relative_bias", "has shape " + t.ShapeString(),
               "a span of at most " + Text(most - 2 * softmax::RelativeBias::kPad - kMaxTileKeys));
  }
  if (p.dtype == DType::kF64) {
    bias.f64 = PaddedRows<double>(t, n.Hq, bias.span);
  } else {
    bias.f32 = PaddedRows<float>(t, n.Hq, bias.span);
  }
  return bias;
}

// Checks tensors with an element per head.
void CheckHeads(const Check& check, const Options& options, const Sizes& n, Problem* p) {
  if (options.alibi.present()) {
    check.Float("alibi", options.alibi);
    if (options.alibi.rank() == 2) {
      check.Shape("alibi", options.alibi, {std::ssize(p->sequences), n.Hq});
      p->slopes_stride = n.Hq;
    } else {
      check.Shape("alibi", options.alibi, {n.Hq});
    }
    check.HeadNumbers("alibi", options.alibi, &p->slopes, &p->device_slopes);
  }
  if (options.relative_bias.present()) {
    check.Float("relative_bias", options.relative_bias);
    check.OnCpu("relative_bias", options.relative_bias);
    p->relative_bias = CheckRelativeBias(check, options.relative_bias, n, *p);
  }
  if (options.sinks.present()) {
    check.Float("sinks", options.sinks);
    check.Shape("sinks", options.sinks, {n.Hq});
    check.HeadNumbers("sinks", options.sinks, &p->sinks, &p->device_sinks);
  }
}

void CheckSegments(const Check& check, const Options& options, const Sizes& n, Problem* p) {
  if (options.segments_q.present() != options.segments_k.present()) {
    check.Fail(options.segments_q.present() ? "segments_k" : "segments_q", "is absent", "both segments or neither");
  }
  const auto ids = [&](const char* name, const ConstTensorView& t, int64_t T) {
    std::vector<int32_t> narrow;
    for (const int64_t id : check.Integers(name, t, {n.B, T})) {
      if (id > std::numeric_limits<int32_t>::max()) {
        check.Fail(name, "contains " + Text(id), "ids below 2^31");
      }
      narrow.push_back(id < 0 ? -1 : static_cast<int32_t>(id));
    }
    return narrow;
  };
  p->segments_q = ids("segments_q", options.segments_q, n.Tq);
  p->segments_k = ids("segments_k", options.segments_k, n.Tk);
  if (p->segments_q.empty() || p->segments_k.empty()) {
    p->segments_q.clear();  // nothing to compare, or no data
    p->segments_k.clear();
  }
  p->segments_q_stride = n.Tq;
  p->segments_k_stride = n.Tk;
}

bool IsPacked(const Check& check, const Options& options) {
  if (options.cu_seqlens_k.present() && !options.cu_seqlens_q.present()) {
    check.Fail("cu_seqlens_q", "is absent", "it together with cu_seqlens_k");
  }
  return options.cu_seqlens_q.present();
}

// Checks options and outputs of inputs that have been checked. The problem has no keys and values yet, and `in` need
// not have any.
Problem CheckedOptions(const char* op, const Check& check, const Inputs& in, const Sizes& n, const Options& options,
                       const Outputs& out, Use use, Device device) {
  const bool packed = n.packed;
  Problem p;
  p.dtype = in.q.dtype();
  p.device = device;
  p.query_heads = n.Hq;
  p.key_heads = n.Hkv;
  p.depth = n.D;
  p.value_depth = n.Dv;
  p.q = RowsOf(in.q);
  p.invariant = options.invariant;
  p.high_precision = options.precision == Precision::kHigh;
  CheckScalars(check, options, p.dtype, &p);
  p.sequences = packed ? PackedSequences(check, options, n) : PaddedSequences(n);
  CheckSequences(check, options, n, &p.sequences);

  CheckPairs(check, options, n, &p);
  if (!packed) CheckSegments(check, options, n, &p);
  CheckHeads(check, options, n, &p);
  CheckLogDecay(check, options, n, &p);
  if (use == Use::kForward || use == Use::kReference) {
    CheckOutputs(check, in, options, out, n, use);
    p.o = RowsOf(out.o);
    if (out.lse.present()) p.lse = LseRowsOf(out.lse);
  }
  // In a packed call the batch index counts sequences, which share one axis.
  p.packed = packed;
  if (packed) p.q.batch_stride = p.o.batch_stride = p.lse.batch_stride = 0;
  if (n.Hkv == 0) p.sequences.clear();
  CheckPattern(op, options.pattern, &p);
  softmax::LayOutDecays(&p);
  return p;
}

}  // namespace

Problem CheckedProblem(const char* op, const Inputs& in, const Options& options, const Outputs& out, Use use,
                       Device device) {
  const Check check(op, use, device);
  const Sizes n = CheckInputs(check, in, IsPacked(check, options));
  Problem p = CheckedOptions(op, check, in, n, options, out, use, device);
  p.k = RowsOf(in.k);
  p.v = RowsOf(in.v);
  if (p.packed) p.k.batch_stride = p.v.batch_stride = 0;
  return p;
}

Problem CheckedQueries(const char* op, const ConstTensorView& q, const KeySizes& keys, const Options& options,
                       const Outputs& out, Use use, Device device) {
  const Check check(op, use, device);
  const bool packed = IsPacked(check, options);
  CheckForm(check, "q", q, q, packed);
  const Sizes n = SizesOf(q, keys, packed);
  CheckSizes(check, q, n);
  check.Readable("q", q);
  check.ContiguousRows("q", q);
  return CheckedOptions(op, check, {q, {}, {}}, n, options, out, use, device);
}

namespace {

// The reason why kernels read a mask or bias one element at a time, after its name and ": "; empty if there is none.
std::string WhySlow(const Problem& p) {
  const bool has_runs = std::ranges::any_of(p.sequences, [](const Sequence& s) { return s.num_keys > 1; });
  if (!has_runs) return "";
  if (p.mask.data != nullptr && p.mask.key_stride != 1) return "mask: its keys are not contiguous";
  if (p.bias.data == nullptr) return "";
  if (p.bias.key_stride != 1) return "bias: its keys are not contiguous";
  if ((p.bias.dtype == DType::kF64) == (p.dtype == DType::kF64)) return "";
  return std::string("bias: it is ") + Name(p.bias.dtype) + " beside " + Name(p.dtype);
}

constexpr char kOneByOne[] = ", so that pairs are read one by one";

}  // namespace

std::string Why(const softmax::Kernel& kernel, const Problem& p) {
  std::string why = kernel.why;
  if (const std::string slow = WhySlow(p); !slow.empty()) why += "; " + slow + kOneByOne;
  const bool is_faster = p.dtype == DType::kF32 && std::string_view(kernel.name) == "softmax_tiles";
  if (p.high_precision && !is_faster) why += "; precision: 'high' has no faster kernel here";
  return why;
}

void RefuseSlowPairs(const char* op, const Context& ctx, const Problem& p) {
  if (!ctx.strict()) return;
  const std::string slow = WhySlow(p);
  if (!slow.empty()) throw Unsupported(std::string(op) + ": " + slow + kOneByOne + ", which a strict Context forbids");
}

void SumLogDecays(const char* op, Context& ctx, Problem* p) {
  for (const Sequence& s : p->sequences) {
    if (!p->forgets || !ctx.checks()) break;
    for (int64_t key = s.key_begin + 1; key < s.key_end; ++key) {
      for (int64_t h = 0; h < p->query_heads; ++h) {
        const double value = softmax::LogDecay(*p, s, h, key);
        if (value <= 0) continue;
        Check(op, Use::kForward).Fail("log_decay", "contains " + Text(value), "values of at most 0");
      }
    }
  }
  softmax::SumDecays(ctx, p);
}

void CheckOutput(const char* op, const char* name, const TensorView& out, std::span<const int64_t> shape, DType dtype,
                 const Inputs& in, const Options& options, Device device) {
  const Check check(op, Use::kInputs, device);
  check.Present(name, out);
  if (out.dtype() != dtype) {
    check.Fail(name, std::string("has dtype ") + Name(out.dtype()), Name(dtype));
  }
  check.Shape(name, out, {shape.begin(), shape.end()});
  check.ContiguousRows(name, out);
  check.Writable(name, out);
  ForEachInput(in, options,
               [&](const char* input, const ConstTensorView& view) { check.NoOverlap(name, out, input, view); });
}

}  // namespace heed::attention
