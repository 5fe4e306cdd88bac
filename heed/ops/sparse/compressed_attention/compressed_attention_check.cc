// Checks every argument of compressed attention before anything is written, and lists the chosen keys of each row.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/ops/sparse/compressed_attention/compressed_attention_internal.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::compressed_attention {
namespace {

using attention::Use;
using mechanism::Fail;

constexpr int64_t kMostPosition = int64_t{1} << 60;

std::string Text(int64_t value) { return std::to_string(value); }

void CheckInt(const char* op, const char* name, int64_t value, int64_t least) {
  if (value < least) Fail(op, name, std::string("is ") + Text(value), Text(least) + " or more");
}

ConstTensorView Ints(const std::vector<int64_t>& values) { return {values.data(), DType::kI64, {std::ssize(values)}}; }

// Finds the sequences of a call, and points the options of both parts to them.
void FindSequences(const char* op, const Inputs& in, const Options& options, bool data, Call& c) {
  const bool padded = options.lengths.present() || options.starts.present();
  const int64_t tokens = c.start + c.Tq, first = tokens - c.Tk;  // first: of k
  if (c.packed || padded) {
    const ConstTensorView counted(nullptr, DType::kBool, {c.B, tokens});
    c.sequences = mechanism::RangesOf(op, "k", c.packed ? in.k : counted, options, 1, data);
  } else {
    for (int64_t b = 0; b < c.B; ++b) c.sequences.push_back({b, 0, tokens});
  }
  attention::Options &window = c.options[kWindow], &compressed = c.options[kCompressed];
  c.first_keys = c.boundaries = {0};
  for (const auto& [b, begin, end] : c.sequences) {
    c.positions.push_back(c.packed ? 0 : c.start - begin);
    c.first_keys.push_back(c.packed ? c.first_keys.back() + (end - begin) / c.ratio : 0);
    c.boundaries.push_back(end);
    c.key_begins.push_back(std::max<int64_t>(begin - first, 0));
    c.key_ends.push_back(std::max<int64_t>(end - first, 0));
    c.row_ends.push_back(std::max<int64_t>(end - c.start, 0));
  }
  if (c.packed) {
    window.cu_seqlens_q = compressed.cu_seqlens_q = Ints(c.boundaries);
    compressed.cu_seqlens_k = Ints(c.first_keys);
  } else if (padded) {
    window.key_starts = Ints(c.key_begins);
    window.key_lengths = Ints(c.key_ends);
    window.query_lengths = compressed.query_lengths = Ints(c.row_ends);
  }
}

// The compressed keys that some row may see.
int64_t FewestKeys(const Call& c) {
  if (c.packed) return c.first_keys.back();
  int64_t most = 0;
  for (const auto& [b, begin, end] : c.sequences) {
    if (end > c.start) most = std::max(most, (end - begin) / c.ratio);
  }
  return c.Tq == 0 ? 0 : most;
}

void CheckCompressed(const char* op, const Inputs& in, const Call& c, bool data) {
  const int64_t least = FewestKeys(c);
  const int64_t N = in.k_cmp.present() && in.k_cmp.rank() == 4 ? in.k_cmp.size(1) : 0;
  for (const auto& [name, t, channels] : {std::tuple{"k_cmp", in.k_cmp, c.D}, {"v_cmp", in.v_cmp, c.Dv}}) {
    const bool fits = t.present() && t.rank() == 4 && t.size(0) == c.B && t.size(2) == c.Hkv && t.size(3) == channels;
    if (!fits) {
      Fail(op, name, t.present() ? "has shape " + t.ShapeString() : "is absent",
           std::string("[") + Text(c.B) + ",N," + Text(c.Hkv) + "," + Text(channels) + "]");
    }
    if (t.size(1) < least) {
      Fail(op, name, std::string("has ") + Text(t.size(1)) + " compressed keys",
           Text(least) + " or more, those " + (c.packed ? "of all sequences" : "that are complete at the last row"));
    }
    if (t.size(1) != N) {
      Fail(op, name, std::string("has ") + Text(t.size(1)) + " compressed values", Text(N) + " as k_cmp");
    }
    mechanism::CheckTensor(op, name, t, t.sizes(), in.q.dtype(), data);
    mechanism::CheckContiguousRows(op, name, t);
  }
}

void CheckChosen(const char* op, const ConstTensorView& t, const Call& c, bool data) {
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
    Fail(op, "chosen", std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  }
  const bool fits = (t.rank() == 3 || (t.rank() == 4 && t.size(2) == c.Hkv)) && t.size(0) == c.B && t.size(1) == c.Tq;
  if (!fits) {
    const std::string rows = std::string("[") + Text(c.B) + "," + Text(c.Tq) + ",";
    Fail(op, "chosen", "has shape " + t.ShapeString(), rows + "n] or " + rows + Text(c.Hkv) + ",n]");
  }
  if (data) mechanism::CheckReadable(op, "chosen", t);
}

// A key that a row may not choose; `head` is -1 where all keys are right.
struct Fault {
  int64_t key = 0, head = -1;
  bool is_twice = false;
};

// Writes the chosen keys of row i of batch entry b in ascending order, after -1 for absent ones. Those of packed
// sequences count over all of k_cmp, so that the rows form one sequence.
class Lists {
 public:
  Lists(const Call& c, const ConstTensorView& chosen)
      : c_(c), chosen_(chosen), heads_(chosen.rank() == 4 ? c.Hkv : 1), count_(chosen.size(chosen.rank() - 1)) {
    table_.shape = {c.B, c.rows(), count_};
    if (chosen.rank() == 4) table_.shape.insert(table_.shape.begin() + 2, c.Hkv);
    table_.values.resize(static_cast<size_t>(c.B * c.rows() * heads_ * count_));
  }

  Fault Write(int64_t b, int64_t i) {
    const auto [position, first_key] = c_.PlaceOf(b, i);
    const int64_t complete = (position + 1) / c_.ratio;
    for (int64_t h = 0; h < heads_; ++h) {
      int64_t* const row = table_.values.data() + ((b * c_.rows() + i) * heads_ + h) * count_;
      if (position < 0) {
        std::fill_n(row, count_, -1);
      } else if (chosen_.data() == nullptr) {
        const int64_t absent = std::max<int64_t>(count_ - complete, 0);
        for (int64_t n = 0; n < count_; ++n) row[n] = std::max<int64_t>(n - absent, -1);
      } else if (const Fault fault = Read(b, i, h, complete, row); fault.head >= 0) {
        return fault;
      }
      for (int64_t n = 0; first_key > 0 && n < count_; ++n) row[n] += row[n] < 0 ? 0 : first_key;
    }
    return {};
  }

  Pattern Build() && { return patterns::Build("keys", {std::move(table_)}); }

 private:
  // Reads and checks a row, which may choose the first `complete` keys.
  Fault Read(int64_t b, int64_t i, int64_t h, int64_t complete, int64_t* row) const {
    const int64_t at =
        b * chosen_.stride(0) + i * chosen_.stride(1) + (chosen_.rank() == 4 ? h * chosen_.stride(2) : 0);
    bool ascends = true;
    for (int64_t n = 0; n < count_; ++n) {
      row[n] = LoadAsInt64(chosen_.dtype(), chosen_.data(), at + n * chosen_.stride(chosen_.rank() - 1));
      if (row[n] < -1 || row[n] >= complete) return {row[n], h};
      ascends = ascends && (n == 0 || row[n] >= row[n - 1]);
    }
    if (!ascends) std::sort(row, row + count_);
    const int64_t* const twice =
        std::adjacent_find(row, row + count_, [](int64_t x, int64_t y) { return x == y && x >= 0; });
    return twice == row + count_ ? Fault() : Fault{*twice, h, true};
  }

  const Call& c_;
  const ConstTensorView& chosen_;
  int64_t heads_, count_;
  patterns::Table table_;
};

Pattern ChosenKeys(const char* op, Context* ctx, const Call& c, const ConstTensorView& chosen) {
  Lists lists(c, chosen);
  const int64_t rows = c.rows(), all = c.B * rows;
  std::atomic<int64_t> first = all;  // the first wrong row
  const auto write = [&](int64_t row, int) {
    if (lists.Write(row / rows, row % rows).head < 0) return;
    int64_t before = first;
    while (row < before && !first.compare_exchange_weak(before, row)) continue;
  };
  if (ctx != nullptr) {
    ctx->ParallelFor(all, write);
  } else {
    for (int64_t row = 0; row < all; ++row) write(row, 0);
  }
  if (first < all) {
    const int64_t b = first / rows, i = first % rows;
    const Fault fault = lists.Write(b, i);
    const std::string got = std::string("has key ") + Text(fault.key);
    const std::string where = " in row " + Text(i) + (c.packed ? "" : " of sequence " + Text(b));
    if (fault.is_twice) Fail(op, "chosen", got + " twice" + where, "it once");
    Fail(op, "chosen", got + where,
         std::string("-1, or one of the ") + Text(c.NumComplete(b, i)) + " keys that are complete there");
  }
  return std::move(lists).Build();
}

// Checks an lse that attention takes without its first axis.
void CheckBatch(const char* op, const char* name, const ConstTensorView& t, const Call& c) {
  if (!c.packed || !t.present() || (t.rank() == 3 && t.size(0) == 1)) return;
  Fail(op, name, "has shape " + t.ShapeString(), "[1," + Text(c.Hq) + "," + Text(c.Tq) + "]");
}

mechanism::Apart Reads(const BackwardInputs& in, const Options& options) {
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"k_cmp", in.k_cmp},
                                   {"v_cmp", in.v_cmp},
                                   {"chosen", in.chosen},
                                   {"sinks", in.sinks},
                                   {"o", in.o},
                                   {"lse", in.lse},
                                   {"d_o", in.d_o},
                                   {"d_lse", in.d_lse},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return apart;
}

}  // namespace

Call::Place Call::PlaceOf(int64_t b, int64_t i) const {
  size_t s = static_cast<size_t>(b);
  if (packed) {  // the last sequence that begins at or before the row
    const auto next = std::ranges::upper_bound(sequences, i, {}, &mechanism::TokenRange::begin);
    if (next == sequences.begin()) return {};
    s = static_cast<size_t>(next - sequences.begin()) - 1;
  }
  const int64_t token = start + i;
  if (token < sequences[s].begin || token >= sequences[s].end) return {};
  return {token - sequences[s].begin, first_keys[s]};
}

attention::Inputs PartInputs(const Inputs& in, int64_t part) {
  if (part == kCompressed) return {in.q, in.k_cmp, in.v_cmp};
  return {in.q, in.k, in.v};
}

Call CheckedCall(const char* op, Context* ctx, const Inputs& in, const Options& options, const Outputs& out, Use use) {
  CheckInt(op, "ratio", options.ratio, 1);
  CheckInt(op, "window", options.window, 0);
  Call c;
  const bool data = use != Use::kExplain;
  attention::Options &window = c.options[kWindow], &compressed = c.options[kCompressed];
  window.scale = compressed.scale = options.scale;
  window.sinks = compressed.sinks = in.sinks;
  window.causal = true;
  window.window.left = std::max<int64_t>(options.window, 1) - 1;
  attention::CheckedProblem(op, {in.q, in.k, in.v}, window, {}, data ? Use::kInputs : Use::kExplain);

  c.B = in.q.size(0);
  c.Tq = in.q.size(1);
  c.Hq = in.q.size(2);
  c.D = in.q.size(3);
  c.Tk = in.k.size(1);
  c.Hkv = in.k.size(2);
  c.Dv = in.v.size(3);
  c.ratio = options.ratio;
  c.has_window = options.window > 0;
  c.packed = options.cu_seqlens.present();
  if (c.Tq > c.Tk || (c.packed && c.Tq < c.Tk)) {
    Fail(op, "q", std::string("has ") + Text(c.Tq) + " tokens",
         c.packed ? "the " + Text(c.Tk) + " of k, as sequences are packed"
                  : "at most the " + Text(c.Tk) + " of k, whose last ones they are");
  }
  if (c.packed && options.start.has_value()) Fail(op, "start", "is given", "none beside cu_seqlens");
  c.start = options.start.value_or(c.Tk - c.Tq);
  if (c.start < c.Tk - c.Tq || c.start > kMostPosition) {
    Fail(op, "start", std::string("is ") + Text(c.start),
         Text(c.Tk - c.Tq) + " or more, as k has " + Text(c.Tk) + " tokens, and below 2^60");
  }
  FindSequences(op, in, options, data, c);
  CheckCompressed(op, in, c, data);
  c.N = in.k_cmp.size(1);
  if (in.chosen.present()) {
    CheckChosen(op, in.chosen, c, data);
    if (c.rows() > 0) compressed.pattern = ChosenKeys(op, ctx, c, in.chosen);
    if (c.packed) {
      c.all_rows = {0, c.rows()};
      c.all_keys = {0, c.N};
      compressed.cu_seqlens_q = Ints(c.all_rows);
      compressed.cu_seqlens_k = Ints(c.all_keys);
    }
  } else {
    compressed.query_starts = Ints(c.positions);
    compressed.pattern = patterns::CompleteWindows(c.ratio, c.ratio);
  }
  if (use != Use::kForward && use != Use::kReference) return c;
  CheckBatch(op, "lse", out.lse, c);
  attention::CheckedProblem(op, {in.q, in.k, in.v}, window, {out.o, LseOf(c, out.lse)}, use);
  BackwardInputs reads;
  static_cast<Inputs&>(reads) = in;
  mechanism::Apart apart = Reads(reads, options);
  apart.Writes(op, "o", out.o);
  if (out.lse.present()) apart.Writes(op, "lse", out.lse);
  return c;
}

Call CheckedBackward(const char* op, Context* ctx, const BackwardInputs& in, const Options& options,
                     const Gradients& out, Use use) {
  const bool data = use != Use::kExplain;
  Call c = CheckedCall(op, ctx, in, options, {}, data ? Use::kInputs : Use::kExplain);
  attention::Gradients of_window;
  of_window.dq = out.dq;
  of_window.dk = out.dk;
  of_window.dv = out.dv;
  of_window.dsinks = out.dsinks;
  CheckBatch(op, "lse", in.lse, c);
  CheckBatch(op, "d_lse", in.d_lse, c);
  attention::CheckedBackward(op, {in.q, in.k, in.v, in.o, LseOf(c, in.lse), in.d_o, LseOf(c, in.d_lse)},
                             c.options[kWindow], of_window, use);
  mechanism::Apart apart = Reads(in, options);
  for (const auto& [name, view, input] : {std::tuple{"dq", out.dq, in.q},
                                          {"dk", out.dk, in.k},
                                          {"dv", out.dv, in.v},
                                          {"dk_cmp", out.dk_cmp, in.k_cmp},
                                          {"dv_cmp", out.dv_cmp, in.v_cmp},
                                          {"dsinks", out.dsinks, in.sinks}}) {
    if (!view.present()) continue;
    const bool wide = use == Use::kReference && view.dtype() == DType::kF64;
    mechanism::CheckTensor(op, name, view, input.sizes(), wide ? DType::kF64 : input.dtype(), data);
    if (view.rank() == 4) mechanism::CheckContiguousRows(op, name, view);
    if (data) apart.Writes(op, name, view);
  }
  return c;
}

}  // namespace heed::compressed_attention
