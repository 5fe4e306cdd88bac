// Exact attention over a sequence that ranks hold in parts: the bits of one process, from the keys that they exchange.
#include "heed/distributed/attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "heed/distributed/attention_internal.h"
#include "heed/distributed/group_internal.h"
#include "heed/distributed/shards_internal.h"

namespace heed::distributed {
namespace {

using attention::Gradients;
using attention::Inputs;
using attention::Options;
using attention::Outputs;

std::string Number(double x) {
  std::ostringstream text;
  text.precision(17);
  text << x;
  return std::move(text).str();
}

int64_t NumTokens(const ConstTensorView& t) { return t.present() && t.rank() >= 3 ? t.size(TokenAxis(t)) : 0; }

bool HasRows(const ConstTensorView& t) { return t.present() && t.rank() >= 2 && t.size(t.rank() - 2) > 1; }

// Packed tensors [1, T, H, D] as [T, H, D].
template <class View>
View WithoutBatch(const View& t) {
  if (!t.present() || t.rank() != 4 || t.size(0) != 1) return t;
  return View(t.data(), t.dtype(), t.sizes().subspan(1), t.strides().subspan(1), t.device());
}

template <class View>
View Slice(const View& t, int axis, int64_t begin, int64_t end) {
  return t.present() ? t.Slice(axis, begin, end) : t;
}

template <class View>
View Tokens(const View& t, int64_t begin, int64_t end) {
  return Slice(t, TokenAxis(t), begin, end);
}
template <class View>
View LseOf(const View& lse, int64_t begin, int64_t end) {
  return Slice(lse, LseTokenAxis(lse), begin, end);
}

std::string OptionsText(const Options& options, const AttentionOptions& distributed) {
  std::string text;
  if (options.scale) text += ", scale=" + Number(*options.scale);
  for (const auto& [name, value] : {std::pair<const char*, int64_t>("causal", options.causal),
                                    {"align", static_cast<int64_t>(options.align)},
                                    {"left", options.window.left},
                                    {"right", options.window.right},
                                    {"sink_tokens", options.sink_tokens},
                                    {"chunk", options.chunk},
                                    {"precision", static_cast<int64_t>(options.precision)},
                                    {"invariant", options.invariant},
                                    {"method", static_cast<int64_t>(distributed.method)},
                                    {"order", static_cast<int64_t>(distributed.order)},
                                    {"seed_of_first", distributed.seed_of_first},
                                    {"received", distributed.received != nullptr}}) {
    text += std::string(", ") + name + "=" + std::to_string(value);
  }
  text += ", softcap=" + Number(options.softcap);
  const auto add = [&](const char* name, const ConstTensorView& t, std::optional<int> tokens) {
    if (t.present()) text += ", " + Described(name, t, tokens);
  };
  add("query_starts", options.query_starts, {});
  add("prefix", options.prefix, {});
  add("segments_q", options.segments_q, 1);
  add("segments_k", options.segments_k, 1);
  add("query_lengths", options.query_lengths, {});
  add("cu_seqlens_q", options.cu_seqlens_q, {});
  add("cu_seqlens_k", options.cu_seqlens_k, {});
  add("key_lengths", options.key_lengths, {});
  add("key_starts", options.key_starts, {});
  add("alibi", options.alibi, {});
  add("sinks", options.sinks, {});
  add("log_decay", options.log_decay, options.log_decay.rank() - 2);
  if (options.pattern.present()) text += ", pattern=" + options.pattern.ToString();
  if (options.dropout != 0) {
    text += ", dropout=" + Number(options.dropout) + ", dropout_offset=" + std::to_string(options.dropout_offset);
    if (!distributed.seed_of_first) text += ", seed=" + std::to_string(options.seed);
  }
  if (!distributed.note.empty()) text += ", " + distributed.note;
  for (const auto& [name, t] : {std::pair("mask", options.mask), std::pair("bias", options.bias)}) {
    // Rows and keys are numbers that ranks announce.
    if (t.present()) text += std::string(", ") + name + ": " + Name(t.dtype()) + " of rank " + std::to_string(t.rank());
  }
  return text;
}

// Throws for options that are not divided.
void CheckOptions(const std::string& op, const Options& options, bool on_a_ring) {
  if (options.pattern.present()) {
    const std::string text = options.pattern.ToString();
    for (const char* name : {"row_blocks", "keys"}) {
      if (text.find(std::string(name) + "(") == std::string::npos) continue;
      throw Unsupported(op + ": pattern has " + name +
                        ", which lists keys by row of a call, expected patterns of positions with a group");
    }
  }
  if (options.relative_bias.present()) {
    throw Unsupported(op + ": relative_bias is given with a group, which does not divide it, expected none");
  }
  if (!on_a_ring) return;
  const bool moved_sinks = options.sink_tokens != 0 && options.key_starts.present();
  for (const auto& [name, is_given] : {std::pair<const char*, bool>("pattern", options.pattern.present()),
                                       {"dropout", options.dropout != 0},
                                       {"chunk", options.chunk != 0},
                                       {"sink_tokens with key_starts", moved_sinks},
                                       {"log_decay", options.log_decay.present()}}) {
    if (!is_given) continue;
    throw Unsupported(op + ": " + name + " is given on a ring, which does not divide it among ranks");
  }
}

// A call of both passes.
class Plan {
 public:
  Plan(const Group& group, const char* pass, const Inputs& in, const Options& options,
       const AttentionOptions& distributed)
      : group_(group), op_(std::string("attention::") + pass), in_(in), options_(options), distributed_(distributed) {}

  // Agrees with the other ranks. `check` calls the pass without rows and keys, and returns the rest of its description.
  template <class Check>
  void Start(bool wants_lse, const Check& check);
  // True if ranks exchange tokens for heads.
  bool exchanges_heads() const { return exchanges_heads_; }
  bool on_a_ring() const { return distributed_.method == Method::kRing; }
  const std::vector<std::vector<TokenRange>>& ranges() const { return ranges_; }
  // [B, H, T], packed [H, T], of q.
  static Shape LseShape(const ConstTensorView& q) {
    Shape shape = {q.size(HeadAxis(q)), q.size(TokenAxis(q))};
    if (q.rank() == 4) shape.insert(shape.begin(), q.size(0));
    return shape;
  }
  bool any_lse() const { return any_lse_; }
  int64_t total() const { return total_; }

  // Gathers the segments and log decays of all tokens, unless they are in `received`.
  void GatherOptions(AttentionReceived::Content& received);
  // The options of the whole, with all tokens of what GatherOptions has gathered, and this rank's rows.
  const Options& options() const { return options_; }
  const WholeOptions& whole() const { return *whole_; }

  // Calls f(first row here, range, options of these rows and all keys).
  template <class F>
  void ForRanges(const F& f) const {
    int64_t first = 0;
    for (const TokenRange& range : own()) {
      const PartOptions part = whole_->Of(range, first, {0, total_});
      f(first, range, part.options);
      first += range.size();
    }
  }

  // Receives what the pass needs and `received` lacks.
  void GatherKeys(const Inputs& in, AttentionReceived::Content& received) const;
  void ExchangeHeads(const attention::BackwardInputs& in, AttentionReceived::Content& received) const;
  Owned GatheredTokens(const ConstTensorView& t, int axis) const { return Gathered(group_, t, axis, ranges_); }
  // The sum over ranks of the gradients of a whole tensor, of the tokens here.
  void ScatterSum(const ConstTensorView& whole, int axis, const TensorView& part) const;
  // All tokens of this rank's heads, from all heads of its tokens; and the reverse.
  Owned HeadsOfRank(const ConstTensorView& t) const { return HeadsOfAxes(t, TokenAxis(t), HeadAxis(t)); }
  Owned HeadsOfLse(const ConstTensorView& t) const { return HeadsOfAxes(t, LseTokenAxis(t), LseHeadAxis(t)); }
  void TokensBack(const ConstTensorView& t, int tokens, int heads, const TensorView& part) const;

 private:
  Owned HeadsOfAxes(const ConstTensorView& t, int tokens, int heads) const;
  const std::vector<TokenRange>& own() const { return ranges_[static_cast<size_t>(group_.rank())]; }
  std::string Describe() const;
  bool divides() const {
    return in_.q.size(HeadAxis(in_.q)) % group_.size() == 0 && in_.k.size(HeadAxis(in_.k)) % group_.size() == 0;
  }
  // True if the call on some heads and all tokens needs no part of another tensor.
  bool whole_heads() const {
    return distributed_.order == Order::kContiguous && !options_.alibi.present() && !options_.sinks.present() &&
           !options_.log_decay.present() && !options_.mask.present() && !options_.bias.present() &&
           !options_.pattern.present() && options_.dropout == 0;
  }
  void CheckRows(const char* name, const Numbers& numbers, size_t at, int rank) const;

  const Group& group_;
  std::string op_;
  const Inputs& in_;
  Options options_;
  const AttentionOptions& distributed_;
  std::vector<std::vector<TokenRange>> ranges_;
  int64_t total_ = 0;
  bool exchanges_heads_ = false, any_lse_ = false;
  std::optional<WholeOptions> whole_;
};

std::string Plan::Describe() const {
  std::string text = op_ + "(";
  for (const auto& [name, t] : {std::pair("q", in_.q), std::pair("k", in_.k), std::pair("v", in_.v)}) {
    const bool is_packed = options_.cu_seqlens_q.present();
    if (!t.present() || t.rank() != (is_packed ? 3 : 4)) {
      Refuse(op_, name, "has shape " + t.ShapeString(),
             is_packed ? "[T, H, D] or [1, T, H, D] with a group" : "[B, T, H, D] with a group");
    }
    CheckOnCpu(op_, name, t);
    if (NumTokens(t) != NumTokens(in_.q)) {
      Refuse(op_, name, "has " + std::to_string(NumTokens(t)) + " tokens",
             "the " + std::to_string(NumTokens(in_.q)) + " of q with a group");
    }
    text += Described(name, t, TokenAxis(t)) + ", ";
  }
  const bool on_a_ring = distributed_.method == Method::kRing;
  CheckOptions(op_, options_, on_a_ring);
  const ConstTensorView& decay = options_.log_decay;
  if (decay.present() && (decay.rank() < 2 || decay.size(decay.rank() - 2) != NumTokens(in_.q))) {
    Refuse(op_, "log_decay", "has shape " + decay.ShapeString(), "[B, T, Hq] with the tokens of q");
  }
  const bool has_segments = options_.segments_q.present() || options_.segments_k.present();
  for (const auto& [name, t] : {std::pair("segments_q", options_.segments_q), {"segments_k", options_.segments_k}}) {
    if (!has_segments || (t.rank() == 2 && t.size(1) == NumTokens(in_.q))) continue;
    Refuse(op_, name, "has shape " + t.ShapeString(), "[B, T] with the tokens of q");
  }
  if (distributed_.method == Method::kUlysses) {
    if (!divides()) {
      Refuse(op_, "method",
             "is ulysses with " + std::to_string(in_.q.size(HeadAxis(in_.q))) + " and " +
                 std::to_string(in_.k.size(HeadAxis(in_.k))) + " heads",
             "multiples of " + std::to_string(group_.size()) + " ranks");
    }
    if (!whole_heads()) {
      throw Unsupported(op_ +
                        ": method is ulysses in zigzag order or with an option of heads or rows, expected "
                        "all_gather");
    }
  }
  return text + OptionsText(options_, distributed_);
}

void Plan::CheckRows(const char* name, const Numbers& numbers, size_t at, int rank) const {
  const int64_t rows = numbers[at], keys = numbers[at + 1];
  if (rows < 0) return;
  if ((rows == 1 || rows == numbers[0]) && (keys == 1 || keys == total_)) return;
  Refuse(op_, name,
         "has " + std::to_string(rows) + " rows and " + std::to_string(keys) + " keys on rank " + std::to_string(rank),
         "1 or " + std::to_string(numbers[0]) + ", and 1 or " + std::to_string(total_));
}

template <class Check>
void Plan::Start(bool wants_lse, const Check& check) {
  const auto rows = [](const ConstTensorView& t) { return t.present() ? t.rank() < 2 ? 1 : t.size(t.rank() - 2) : -1; };
  const auto keys = [](const ConstTensorView& t) { return t.present() && t.rank() > 0 ? t.size(t.rank() - 1) : 1; };
  const Numbers own = {NumTokens(in_.q),
                       wants_lse,
                       rows(options_.mask),
                       keys(options_.mask),
                       rows(options_.bias),
                       keys(options_.bias),
                       static_cast<int64_t>(options_.seed)};
  const std::vector<Numbers> agreed = Agree(group_, op_, own, [&] {
    const std::string text = Describe();
    // A call without rows and keys checks all else. What refers to keys is checked in the call on them, on all ranks.
    Options options = options_;
    options.mask = options.bias = options.key_lengths = options.key_starts = options.prefix = {};
    options.segments_q = options.segments_k = options.query_lengths = {};
    options.pattern = {};
    options.log_decay = Slice(options_.log_decay, options_.log_decay.rank() - 2, 0, 0);
    const Shape offsets(options_.cu_seqlens_q.rank() == 1 ? static_cast<size_t>(options_.cu_seqlens_q.size(0)) : 0);
    if (!offsets.empty()) {
      options.cu_seqlens_q = ConstTensorView(offsets.data(), DType::kI64, options_.cu_seqlens_q.sizes());
      options.cu_seqlens_k = {};
    }
    return text + check(options) + ") heed " + HEED_VERSION;
  });
  if (distributed_.seed_of_first) options_.seed = static_cast<uint64_t>(agreed[0][6]);
  std::vector<int64_t> counts;
  for (const Numbers& numbers : agreed) {
    counts.push_back(numbers[0]);
    total_ += numbers[0];
    any_lse_ |= numbers[1] != 0;
  }
  for (size_t r = 0; r < agreed.size(); ++r) {
    CheckRows("mask", agreed[r], 2, static_cast<int>(r));
    CheckRows("bias", agreed[r], 4, static_cast<int>(r));
  }
  ranges_ = AgreedRanges(op_, counts, distributed_.order);
  const bool may_exchange = distributed_.method == Method::kAuto || distributed_.method == Method::kUlysses;
  exchanges_heads_ = may_exchange && divides() && whole_heads() && group_.size() > 1;
  whole_.emplace(op_, options_, in_.q.rank() == 4 ? in_.q.size(0) : 1, total_);
}

void Plan::GatherOptions(AttentionReceived::Content& received) {
  const auto gather = [&](ConstTensorView& t, int axis, Owned& memory) {
    if (!t.present()) return;
    if (!memory.view().present()) memory = GatheredTokens(t, axis);
    t = memory.view();
  };
  gather(options_.log_decay, options_.log_decay.rank() - 2, received.log_decay);
  gather(options_.segments_k, 1, received.segments_k);
  if (exchanges_heads_) gather(options_.segments_q, 1, received.segments_q);
}

void Plan::GatherKeys(const Inputs& in, AttentionReceived::Content& received) const {
  if (received.k.view().present()) return;
  received.k = GatheredTokens(in.k, TokenAxis(in.k));
  received.v = GatheredTokens(in.v, TokenAxis(in.v));
}

void Plan::ExchangeHeads(const attention::BackwardInputs& in, AttentionReceived::Content& received) const {
  if (received.q.view().present()) return;
  received.q = HeadsOfRank(in.q);
  received.k = HeadsOfRank(in.k);
  received.v = HeadsOfRank(in.v);
  received.o = HeadsOfRank(in.o);
  received.lse = HeadsOfLse(in.lse);
}

void Plan::ScatterSum(const ConstTensorView& whole, int axis, const TensorView& part) const {
  std::vector<Bytes> sent;
  for (const std::vector<TokenRange>& ranges : ranges_) {
    Bytes& bytes = sent.emplace_back();
    Owned of_rank(whole.dtype(), Resized(whole, axis, CountTokens(ranges)));
    int64_t first = 0;
    for (const TokenRange& range : ranges) {
      Copy(whole.Slice(axis, range.begin, range.end), of_rank.view().Slice(axis, first, first + range.size()));
      first += range.size();
    }
    bytes.assign(of_rank.bytes().begin(), of_rank.bytes().end());
  }
  const auto num_bytes = static_cast<int64_t>(sent[static_cast<size_t>(group_.rank())].size());
  const Messages received =
      Exchange(group_, std::move(sent), std::vector<int64_t>(static_cast<size_t>(group_.size()), num_bytes));
  for (size_t r = 0; r < ranges_.size(); ++r) {
    const ConstTensorView term(received[r], part.dtype(), part.sizes());
    r == 0 ? Copy(term, part) : Add(term, part);
  }
}

Owned Plan::HeadsOfAxes(const ConstTensorView& t, int tokens, int heads) const {
  const int64_t each = t.size(heads) / group_.size();
  Shape shape = Resized(t, heads, each);
  const auto tokens_axis = static_cast<size_t>(tokens);
  std::vector<Bytes> sent;
  std::vector<int64_t> num_received;
  for (int r = 0; r < group_.size(); ++r) {
    sent.push_back(Packed(t.Slice(heads, r * each, (r + 1) * each)));
    shape[tokens_axis] = CountTokens(ranges_[static_cast<size_t>(r)]);
    num_received.push_back(ConstTensorView(nullptr, t.dtype(), shape).num_elements() *
                           static_cast<int64_t>(SizeOf(t.dtype())));
  }
  const Messages received = Exchange(group_, std::move(sent), num_received);
  shape[tokens_axis] = total_;
  Owned whole(t.dtype(), shape);
  for (size_t r = 0; r < ranges_.size(); ++r) {
    const TokenRange& range = ranges_[r][0];
    shape[tokens_axis] = range.size();
    Copy(ConstTensorView(received[r], t.dtype(), shape), whole.view().Slice(tokens, range.begin, range.end));
  }
  return whole;
}

void Plan::TokensBack(const ConstTensorView& t, int tokens, int heads, const TensorView& part) const {
  const int64_t each = t.size(heads);
  std::vector<Bytes> sent;
  for (const std::vector<TokenRange>& ranges : ranges_) {
    sent.push_back(Packed(t.Slice(tokens, ranges[0].begin, ranges[0].end)));
  }
  // Without a view here the others still exchange theirs.
  const Shape shape = Resized(t, tokens, own()[0].size());
  const int64_t num_bytes =
      ConstTensorView(nullptr, t.dtype(), shape).num_elements() * static_cast<int64_t>(SizeOf(t.dtype()));
  const Messages received =
      Exchange(group_, std::move(sent), std::vector<int64_t>(static_cast<size_t>(group_.size()), num_bytes));
  if (!part.present()) return;
  for (int r = 0; r < group_.size(); ++r) {
    Copy(ConstTensorView(received[static_cast<size_t>(r)], t.dtype(), shape),
         part.Slice(heads, r * each, (r + 1) * each));
  }
}

void CheckTokens(const std::string& op, const char* name, const ConstTensorView& t, int axis, int64_t tokens) {
  if (!t.present() || (axis >= 0 && axis < t.rank() && t.size(axis) == tokens)) return;
  Refuse(op, name, "has shape " + t.ShapeString(), std::to_string(tokens) + " tokens");
}

// Rows [0, 0); a view of another rank unchanged, which the call refuses.
template <class View>
View NoRows(const View& t, int axis) {
  return t.present() && axis >= 0 && axis < t.rank() ? t.Slice(axis, 0, 0) : t;
}
template <class View>
View NoTokens(const View& t) {
  return NoRows(t, TokenAxis(t));
}
template <class View>
View NoLse(const View& t) {
  return NoRows(t, LseTokenAxis(t));
}

std::vector<ConstTensorView> AllInputs(const Inputs& in, const Options& options) {
  return {in.q,
          in.k,
          in.v,
          options.mask,
          options.bias,
          options.alibi,
          options.sinks,
          options.log_decay,
          options.prefix,
          options.key_lengths,
          options.key_starts,
          options.query_lengths,
          options.query_starts,
          options.segments_q,
          options.segments_k,
          options.cu_seqlens_q,
          options.cu_seqlens_k};
}

}  // namespace

AttentionReceived::AttentionReceived() : content_(std::make_unique<Content>()) {}
AttentionReceived::~AttentionReceived() = default;
AttentionReceived::Content& AttentionReceived::Clear() { return *(content_ = std::make_unique<Content>()); }

void Forward(Context& ctx, const Group& group, const Inputs& given, const Options& options, const Outputs& results,
             const AttentionOptions& distributed) {
  const bool is_packed = options.cu_seqlens_q.present();
  const auto tokens_of = [&](const auto& t) { return is_packed ? WithoutBatch(t) : t; };
  const Inputs in = {tokens_of(given.q), tokens_of(given.k), tokens_of(given.v)};
  const Outputs out = {tokens_of(results.o), results.lse};
  Plan plan(group, "Forward", in, options, distributed);
  plan.Start(out.lse.present(), [&](const Options& without_keys) {
    const std::string op = "attention::Forward";
    CheckTokens(op, "o", out.o, TokenAxis(out.o), NumTokens(in.q));
    CheckTokens(op, "lse", out.lse, LseTokenAxis(out.lse), NumTokens(in.q));
    const std::vector<TensorView> outputs = {out.o, out.lse};
    CheckApart(op, AllInputs(in, options), outputs);
    Context one(1);
    attention::Forward(one, {NoTokens(in.q), NoTokens(in.k), NoTokens(in.v)}, without_keys,
                       {NoTokens(out.o), NoLse(out.lse)});
    return std::string();
  });
  if (group.size() == 1) return attention::Forward(ctx, in, plan.options(), out);
  AttentionReceived of_call;
  AttentionReceived::Content& received = (distributed.received == nullptr ? of_call : *distributed.received).Clear();
  plan.GatherOptions(received);
  if (plan.on_a_ring()) return RingForward(ctx, group, plan.ranges(), plan.whole(), in, plan.options(), out);
  if (plan.exchanges_heads()) {
    Owned &q = received.q, &k = received.k, &v = received.v, &o = received.o, &lse = received.lse;
    q = plan.HeadsOfRank(in.q);
    k = plan.HeadsOfRank(in.k);
    v = plan.HeadsOfRank(in.v);
    o = Owned(in.q.dtype(), Resized(q.view(), q.view().rank() - 1, v.view().size(v.view().rank() - 1)));
    if (plan.any_lse() || distributed.received != nullptr) {
      lse = Owned(in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, plan.LseShape(q.view()));
    }
    attention::Forward(ctx, {q.view(), k.view(), v.view()}, plan.options(), {o.view(), lse.view()});
    plan.TokensBack(o.view(), TokenAxis(o.view()), HeadAxis(o.view()), out.o);
    if (plan.any_lse()) plan.TokensBack(lse.view(), LseTokenAxis(lse.view()), LseHeadAxis(lse.view()), out.lse);
    return;
  }
  plan.GatherKeys(in, received);
  plan.ForRanges([&](int64_t first, const TokenRange& range, const Options& of_rows) {
    const int64_t end = first + range.size();
    attention::Forward(ctx, {Tokens(in.q, first, end), received.k.view(), received.v.view()}, of_rows,
                       {Tokens(out.o, first, end), LseOf(out.lse, first, end)});
  });
}

void Backward(Context& ctx, const Group& group, const attention::BackwardInputs& given, const Options& options,
              const Gradients& results, const AttentionOptions& distributed) {
  const bool is_packed = options.cu_seqlens_q.present();
  const auto tokens_of = [&](const auto& t) { return is_packed ? WithoutBatch(t) : t; };
  attention::BackwardInputs in = given;
  for (ConstTensorView* t : {&in.q, &in.k, &in.v, &in.o, &in.d_o}) *t = tokens_of(*t);
  Gradients out = results;
  for (TensorView* t : {&out.dq, &out.dk, &out.dv}) *t = tokens_of(*t);
  const Inputs inputs = {in.q, in.k, in.v};
  Plan plan(group, "Backward", inputs, options, distributed);
  const bool dk = out.dk.present(), dv = out.dv.present(), dlog_decay = out.dlog_decay.present();
  plan.Start(in.d_lse.present(), [&](const Options& without_keys) {
    const std::string op = "attention::Backward";
    for (const auto& [name, t] : {std::pair<const char*, ConstTensorView>("o", in.o),
                                  {"d_o", in.d_o},
                                  {"dq", out.dq},
                                  {"dk", out.dk},
                                  {"dv", out.dv}}) {
      CheckTokens(op, name, t, TokenAxis(t), NumTokens(in.q));
    }
    CheckTokens(op, "dlog_decay", out.dlog_decay, out.dlog_decay.rank() - 2, NumTokens(in.q));
    CheckTokens(op, "lse", in.lse, LseTokenAxis(in.lse), NumTokens(in.q));
    CheckTokens(op, "d_lse", in.d_lse, LseTokenAxis(in.d_lse), NumTokens(in.q));
    for (const auto& [name, d, of] :
         {std::tuple<const char*, ConstTensorView, ConstTensorView>("dbias", out.dbias, options.bias),
          {"dsinks", out.dsinks, options.sinks},
          {"dalibi", out.dalibi, options.alibi}}) {
      if (!d.present()) continue;
      if (of.present() && d.dtype() == of.dtype() && std::ranges::equal(d.sizes(), of.sizes())) continue;
      Refuse(op, name, "has shape " + d.ShapeString(), "the shape and dtype of its input");
    }
    std::vector<ConstTensorView> read = AllInputs(inputs, options);
    for (const ConstTensorView& t : {in.o, in.lse, in.d_o, in.d_lse}) read.push_back(t);
    const std::vector<TensorView> outputs = {out.dq, out.dk, out.dv, out.dbias, out.dsinks, out.dalibi, out.dlog_decay};
    CheckApart(op, read, outputs);
    Context one(1);
    attention::Backward(one,
                        {NoTokens(in.q), NoTokens(in.k), NoTokens(in.v), NoTokens(in.o), NoLse(in.lse),
                         NoTokens(in.d_o), NoLse(in.d_lse)},
                        without_keys,
                        {.dq = NoTokens(out.dq),
                         .dk = NoTokens(out.dk),
                         .dv = NoTokens(out.dv),
                         .dlog_decay = NoRows(out.dlog_decay, out.dlog_decay.rank() - 2)});
    std::string text;
    for (const auto& [name, t] : {std::pair<const char*, ConstTensorView>("d_lse", in.d_lse),
                                  {"dq", out.dq},
                                  {"dk", out.dk},
                                  {"dv", out.dv},
                                  {"dlog_decay", out.dlog_decay}}) {
      if (t.present()) text += std::string(", ") + name;
    }
    return text;
  });
  if (group.size() == 1) return attention::Backward(ctx, in, plan.options(), out);
  AttentionReceived of_call;
  AttentionReceived::Content& received = (distributed.received == nullptr ? of_call : *distributed.received).content();
  plan.GatherOptions(received);
  if (plan.on_a_ring()) return RingBackward(ctx, group, plan.ranges(), plan.whole(), in, out);
  if (plan.exchanges_heads()) {
    plan.ExchangeHeads(in, received);
    const Owned &q = received.q, &k = received.k, &v = received.v, &o = received.o, &lse = received.lse;
    const Owned d_o = plan.HeadsOfRank(in.d_o);
    Owned d_lse;
    if (plan.any_lse()) d_lse = plan.HeadsOfLse(in.d_lse);
    const Owned d_q(q.view().dtype(), q.view().sizes()), d_k(k.view().dtype(), k.view().sizes()),
        d_v(v.view().dtype(), v.view().sizes());
    Gradients of_heads;
    if (out.dq.present()) of_heads.dq = d_q.view();
    if (dk) of_heads.dk = d_k.view();
    if (dv) of_heads.dv = d_v.view();
    attention::Backward(ctx, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), d_lse.view()},
                        plan.options(), of_heads);
    if (out.dq.present()) plan.TokensBack(d_q.view(), TokenAxis(out.dq), HeadAxis(out.dq), out.dq);
    if (dk) plan.TokensBack(d_k.view(), TokenAxis(out.dk), HeadAxis(out.dk), out.dk);
    if (dv) plan.TokensBack(d_v.view(), TokenAxis(out.dv), HeadAxis(out.dv), out.dv);
    return;
  }
  plan.GatherKeys(inputs, received);
  const Owned &k = received.k, &v = received.v;
  const auto whole = [](bool wanted, const ConstTensorView& like) {
    return wanted ? Owned(like.dtype(), like.sizes()) : Owned();
  };
  const Owned d_k = whole(dk, k.view()), d_v = whole(dv, v.view()),
              d_decay = whole(dlog_decay, plan.options().log_decay);
  bool begun = false;
  plan.ForRanges([&](int64_t first, const TokenRange& range, const Options& of_rows) {
    const int64_t end = first + range.size();
    // Sums over rows: those of the first range are written in place, others are added.
    const auto term = [&](const TensorView& sum) { return begun && sum.present() ? whole(true, sum) : Owned(); };
    const bool bias_of_rows = HasRows(out.dbias);
    const std::vector<TensorView> sums = {
        d_k.view(), d_v.view(), d_decay.view(), bias_of_rows ? TensorView() : out.dbias, out.dsinks, out.dalibi};
    std::vector<Owned> terms;
    for (const TensorView& sum : sums) terms.push_back(term(sum));
    const auto to = [&](size_t i) { return begun ? terms[i].view() : sums[i]; };
    attention::Backward(ctx,
                        {Tokens(in.q, first, end), k.view(), v.view(), Tokens(in.o, first, end),
                         LseOf(in.lse, first, end), Tokens(in.d_o, first, end), LseOf(in.d_lse, first, end)},
                        of_rows,
                        {.dq = Tokens(out.dq, first, end),
                         .dk = to(0),
                         .dv = to(1),
                         .dbias = bias_of_rows ? SliceUnlessOne(out.dbias, 2, first, range.size()) : to(3),
                         .dsinks = to(4),
                         .dalibi = to(5),
                         .dlog_decay = to(2)});
    for (size_t i = 0; begun && i < sums.size(); ++i) {
      if (sums[i].present()) Add(terms[i].view(), sums[i]);
    }
    begun = true;
  });
  if (dk) plan.ScatterSum(d_k.view(), TokenAxis(out.dk), out.dk);
  if (dv) plan.ScatterSum(d_v.view(), TokenAxis(out.dv), out.dv);
  if (dlog_decay) plan.ScatterSum(d_decay.view(), out.dlog_decay.rank() - 2, out.dlog_decay);
}

}  // namespace heed::distributed
