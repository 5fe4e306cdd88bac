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

constexpr int kTokens = 1, kHeads = 2;        // axes of q, k, v and o
constexpr int kLseHeads = 1, kLseTokens = 2;  // axes of lse

std::string Number(double x) {
  std::ostringstream text;
  text.precision(17);
  text << x;
  return std::move(text).str();
}

int64_t TokensOf(const ConstTensorView& t) { return t.present() && t.rank() == 4 ? t.size(kTokens) : 0; }

// Rows [first, first + count) of a mask or a bias, unless one row is for all.
template <class View>
View RowsOf(const View& t, int64_t first, int64_t count) {
  if (!t.present() || t.rank() < 2 || t.size(t.rank() - 2) <= 1) return t;
  return t.Slice(t.rank() - 2, first, first + count);
}
bool HasRows(const ConstTensorView& t) { return t.present() && t.rank() >= 2 && t.size(t.rank() - 2) > 1; }

template <class View>
View Slice(const View& t, int axis, int64_t begin, int64_t end) {
  return t.present() ? t.Slice(axis, begin, end) : t;
}

std::string OptionsText(const Options& options, const AttentionOptions& distributed) {
  std::string text;
  if (options.scale) text += ", scale=" + Number(*options.scale);
  for (const auto& [name, value] : {std::pair<const char*, int64_t>("causal", options.causal),
                                    {"left", options.window.left},
                                    {"right", options.window.right},
                                    {"sink_tokens", options.sink_tokens},
                                    {"chunk", options.chunk},
                                    {"precision", static_cast<int64_t>(options.precision)},
                                    {"invariant", options.invariant},
                                    {"method", static_cast<int64_t>(distributed.method)},
                                    {"order", static_cast<int64_t>(distributed.order)}}) {
    text += std::string(", ") + name + "=" + std::to_string(value);
  }
  text += ", softcap=" + Number(options.softcap);
  const auto add = [&](const char* name, const ConstTensorView& t, std::optional<int> tokens) {
    if (t.present()) text += ", " + Described(name, t, tokens);
  };
  add("prefix", options.prefix, {});
  add("key_lengths", options.key_lengths, {});
  add("key_starts", options.key_starts, {});
  add("alibi", options.alibi, {});
  add("sinks", options.sinks, {});
  add("log_decay", options.log_decay, kTokens);
  for (const auto& [name, t] : {std::pair("mask", options.mask), std::pair("bias", options.bias)}) {
    // Rows and keys are numbers that ranks announce.
    if (t.present()) text += std::string(", ") + name + ": " + Name(t.dtype()) + " of rank " + std::to_string(t.rank());
  }
  return text;
}

// Throws for options that concern the whole sequence in a way that is not divided.
void CheckOptions(const std::string& op, const Options& options, bool on_a_ring) {
  const auto refuse = [&](const char* name) {
    throw Unsupported(op + ": " + name + " is given " + (on_a_ring ? "on a ring" : "with a group") +
                      ", which does not divide it among ranks");
  };
  if (options.align != attention::Align::kBottomRight) refuse("align");
  if (options.query_starts.present()) refuse("query_starts");
  if (options.segments_q.present() || options.segments_k.present()) refuse("segments");
  if (options.query_lengths.present()) refuse("query_lengths");
  if (options.pattern.present()) refuse("pattern");
  if (options.dropout != 0) refuse("dropout");
  if (options.cu_seqlens_q.present() || options.cu_seqlens_k.present()) refuse("cu_seqlens_q");
  if (!on_a_ring) return;
  if (options.sink_tokens != 0) refuse("sink_tokens");
  if (options.chunk != 0) refuse("chunk");
  for (const auto& [name, t] : {std::pair<const char*, ConstTensorView>("prefix", options.prefix),
                                {"key_starts", options.key_starts},
                                {"mask", options.mask},
                                {"bias", options.bias},
                                {"alibi", options.alibi},
                                {"log_decay", options.log_decay},
                                {"sinks", options.sinks}}) {
    if (t.present()) refuse(name);
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
  // The tokens of each rank in contiguous order.
  std::vector<TokenRange> parts() const {
    std::vector<TokenRange> parts;
    for (const std::vector<TokenRange>& ranges : ranges_) parts.push_back(ranges[0]);
    return parts;
  }
  bool any_lse() const { return any_lse_; }
  int64_t total() const { return total_; }

  // Calls f(first row here, range, options of these rows).
  template <class F>
  void ForRanges(const Options& gathered, const F& f) const {
    int64_t first = 0;
    for (const TokenRange& range : own()) {
      Options options = gathered;
      const std::vector<int64_t> starts(static_cast<size_t>(std::max<int64_t>(in_.q.size(0), 1)), range.begin);
      const Shape batch = {in_.q.size(0)};
      options.query_starts = ConstTensorView(starts.data(), DType::kI64, batch);
      options.mask = RowsOf(options.mask, first, range.size());
      options.bias = RowsOf(options.bias, first, range.size());
      f(first, range, options);
      first += range.size();
    }
  }

  Owned GatheredTokens(const ConstTensorView& t) const { return Gathered(group_, t, kTokens, ranges_); }
  // The options of a call on all keys, whose log decays, if there are any, lie in `log_decay`.
  Options GatheredOptions(const Options& options, Owned& log_decay) const {
    Options gathered = options;
    if (options.log_decay.present()) {
      log_decay = GatheredTokens(options.log_decay);
      gathered.log_decay = log_decay.view();
    }
    return gathered;
  }
  // The sum over ranks of the gradients of a whole tensor, of the tokens here.
  void ScatterSum(const ConstTensorView& whole, const TensorView& part) const;
  // All tokens of this rank's heads, from all heads of its tokens; and the reverse.
  Owned HeadsOf(const ConstTensorView& t, int tokens, int heads) const;
  void TokensBack(const ConstTensorView& t, int tokens, int heads, const TensorView& part) const;

 private:
  const std::vector<TokenRange>& own() const { return ranges_[static_cast<size_t>(group_.rank())]; }
  std::string Describe() const;
  bool divides() const { return in_.q.size(kHeads) % group_.size() == 0 && in_.k.size(kHeads) % group_.size() == 0; }
  // True if the call on some heads and all tokens needs no part of another tensor.
  bool whole_heads() const {
    return distributed_.order == Order::kContiguous && !options_.alibi.present() && !options_.sinks.present() &&
           !options_.log_decay.present() && !options_.mask.present() && !options_.bias.present();
  }
  void CheckRows(const char* name, const Numbers& numbers, size_t at, int rank) const;

  const Group& group_;
  std::string op_;
  const Inputs& in_;
  const Options& options_;
  const AttentionOptions& distributed_;
  std::vector<std::vector<TokenRange>> ranges_;
  int64_t total_ = 0;
  bool exchanges_heads_ = false, any_lse_ = false;
};

std::string Plan::Describe() const {
  std::string text = op_ + "(";
  for (const auto& [name, t] : {std::pair("q", in_.q), std::pair("k", in_.k), std::pair("v", in_.v)}) {
    if (!t.present() || t.rank() != 4) {
      throw Unsupported(op_ + ": " + name + " has shape " + t.ShapeString() +
                        ", expected [B, T, H, D] with a group: packed sequences are not divided among ranks");
    }
    CheckOnCpu(op_, name, t);
    if (t.size(kTokens) != in_.q.size(kTokens)) {
      Refuse(op_, name, "has " + std::to_string(t.size(kTokens)) + " tokens",
             "the " + std::to_string(in_.q.size(kTokens)) + " of q with a group");
    }
    text += Described(name, t, kTokens) + ", ";
  }
  const bool on_a_ring = distributed_.method == Method::kRing;
  CheckOptions(op_, options_, on_a_ring);
  if (on_a_ring && distributed_.order != Order::kContiguous) {
    throw Unsupported(op_ + ": method is ring in zigzag order, expected contiguous order");
  }
  const ConstTensorView& decay = options_.log_decay;
  if (decay.present() && (decay.rank() != 3 || decay.size(kTokens) != TokensOf(in_.q))) {
    Refuse(op_, "log_decay", "has shape " + decay.ShapeString(), "[B, T, Hq] with the tokens of q");
  }
  if (distributed_.method == Method::kUlysses) {
    if (!divides()) {
      Refuse(op_, "method",
             "is ulysses with " + std::to_string(in_.q.size(kHeads)) + " and " + std::to_string(in_.k.size(kHeads)) +
                 " heads",
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
  const Numbers own = {TokensOf(in_.q),     wants_lse,           rows(options_.mask),
                       keys(options_.mask), rows(options_.bias), keys(options_.bias)};
  const std::vector<Numbers> agreed = Agree(group_, op_, own, [&] {
    const std::string text = Describe();
    // A call without rows and keys checks all else. What refers to keys is checked in the call on them, on all ranks.
    Options options = options_;
    options.mask = options.bias = options.key_lengths = options.key_starts = options.prefix = {};
    options.log_decay = Slice(options_.log_decay, kTokens, 0, 0);
    return text + check(options) + ") heed " + HEED_VERSION;
  });
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
}

void Plan::ScatterSum(const ConstTensorView& whole, const TensorView& part) const {
  std::vector<Bytes> sent;
  for (const std::vector<TokenRange>& ranges : ranges_) {
    Bytes& bytes = sent.emplace_back();
    Owned of_rank(whole.dtype(), Resized(whole, kTokens, CountTokens(ranges)));
    int64_t first = 0;
    for (const TokenRange& range : ranges) {
      Copy(whole.Slice(kTokens, range.begin, range.end), of_rank.view().Slice(kTokens, first, first + range.size()));
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

Owned Plan::HeadsOf(const ConstTensorView& t, int tokens, int heads) const {
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
  if (!t.present() || (axis < t.rank() && t.size(axis) == tokens)) return;
  Refuse(op, name, "has shape " + t.ShapeString(), std::to_string(tokens) + " tokens");
}

// Rows [0, 0); a view of another rank unchanged, which the call refuses.
template <class View>
View NoRows(const View& t, int axis) {
  return t.present() && axis < t.rank() ? t.Slice(axis, 0, 0) : t;
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
          options.key_starts};
}

}  // namespace

void Forward(Context& ctx, const Group& group, const Inputs& in, const Options& options, const Outputs& out,
             const AttentionOptions& distributed) {
  Plan plan(group, "Forward", in, options, distributed);
  plan.Start(out.lse.present(), [&](const Options& without_keys) {
    const std::string op = "attention::Forward";
    CheckTokens(op, "o", out.o, kTokens, TokensOf(in.q));
    CheckTokens(op, "lse", out.lse, kLseTokens, TokensOf(in.q));
    const std::vector<TensorView> outputs = {out.o, out.lse};
    CheckApart(op, AllInputs(in, options), outputs);
    Context one(1);
    attention::Forward(one, {NoRows(in.q, kTokens), NoRows(in.k, kTokens), NoRows(in.v, kTokens)}, without_keys,
                       {NoRows(out.o, kTokens), NoRows(out.lse, kLseTokens)});
    return std::string();
  });
  if (group.size() == 1) return attention::Forward(ctx, in, options, out);
  if (plan.on_a_ring()) return RingForward(ctx, group, plan.parts(), in, options, out);
  if (plan.exchanges_heads()) {
    const Owned q = plan.HeadsOf(in.q, kTokens, kHeads), k = plan.HeadsOf(in.k, kTokens, kHeads),
                v = plan.HeadsOf(in.v, kTokens, kHeads);
    const Shape o_shape = {q.view().size(0), plan.total(), q.view().size(kHeads), v.view().size(3)};
    const Shape lse_shape = {q.view().size(0), q.view().size(kHeads), plan.total()};
    const Owned o(in.q.dtype(), o_shape);
    Owned lse;
    if (plan.any_lse()) lse = Owned(in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, lse_shape);
    attention::Forward(ctx, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()});
    plan.TokensBack(o.view(), kTokens, kHeads, out.o);
    if (plan.any_lse()) plan.TokensBack(lse.view(), kLseTokens, kLseHeads, out.lse);
    return;
  }
  const Owned k = plan.GatheredTokens(in.k), v = plan.GatheredTokens(in.v);
  Owned log_decay;
  const Options gathered = plan.GatheredOptions(options, log_decay);
  plan.ForRanges(gathered, [&](int64_t first, const TokenRange& range, const Options& of_rows) {
    const int64_t end = first + range.size();
    attention::Forward(ctx, {in.q.Slice(kTokens, first, end), k.view(), v.view()}, of_rows,
                       {out.o.Slice(kTokens, first, end), Slice(out.lse, kLseTokens, first, end)});
  });
}

void Backward(Context& ctx, const Group& group, const attention::BackwardInputs& in, const Options& options,
              const Gradients& out, const AttentionOptions& distributed) {
  const Inputs inputs = {in.q, in.k, in.v};
  Plan plan(group, "Backward", inputs, options, distributed);
  const bool dk = out.dk.present(), dv = out.dv.present(), dlog_decay = out.dlog_decay.present();
  plan.Start(in.d_lse.present(), [&](const Options& without_keys) {
    const std::string op = "attention::Backward";
    for (const auto& [name, t] : {std::pair<const char*, ConstTensorView>("o", in.o),
                                  {"d_o", in.d_o},
                                  {"dq", out.dq},
                                  {"dk", out.dk},
                                  {"dv", out.dv},
                                  {"dlog_decay", out.dlog_decay}}) {
      CheckTokens(op, name, t, kTokens, TokensOf(in.q));
    }
    CheckTokens(op, "lse", in.lse, kLseTokens, TokensOf(in.q));
    CheckTokens(op, "d_lse", in.d_lse, kLseTokens, TokensOf(in.q));
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
                        {NoRows(in.q, kTokens), NoRows(in.k, kTokens), NoRows(in.v, kTokens), NoRows(in.o, kTokens),
                         NoRows(in.lse, kLseTokens), NoRows(in.d_o, kTokens), NoRows(in.d_lse, kLseTokens)},
                        without_keys,
                        {NoRows(out.dq, kTokens),
                         NoRows(out.dk, kTokens),
                         NoRows(out.dv, kTokens),
                         {},
                         {},
                         {},
                         NoRows(out.dlog_decay, kTokens)});
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
  if (group.size() == 1) return attention::Backward(ctx, in, options, out);
  if (plan.on_a_ring()) return RingBackward(ctx, group, plan.parts(), in, options, out);
  if (plan.exchanges_heads()) {
    const Owned q = plan.HeadsOf(in.q, kTokens, kHeads), k = plan.HeadsOf(in.k, kTokens, kHeads),
                v = plan.HeadsOf(in.v, kTokens, kHeads), o = plan.HeadsOf(in.o, kTokens, kHeads),
                d_o = plan.HeadsOf(in.d_o, kTokens, kHeads), lse = plan.HeadsOf(in.lse, kLseTokens, kLseHeads);
    Owned d_lse;
    if (plan.any_lse()) d_lse = plan.HeadsOf(in.d_lse, kLseTokens, kLseHeads);
    const Owned d_q(q.view().dtype(), q.view().sizes()), d_k(k.view().dtype(), k.view().sizes()),
        d_v(v.view().dtype(), v.view().sizes());
    Gradients of_heads;
    if (out.dq.present()) of_heads.dq = d_q.view();
    if (dk) of_heads.dk = d_k.view();
    if (dv) of_heads.dv = d_v.view();
    attention::Backward(ctx, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), d_lse.view()}, options,
                        of_heads);
    if (out.dq.present()) plan.TokensBack(d_q.view(), kTokens, kHeads, out.dq);
    if (dk) plan.TokensBack(d_k.view(), kTokens, kHeads, out.dk);
    if (dv) plan.TokensBack(d_v.view(), kTokens, kHeads, out.dv);
    return;
  }
  const Owned k = plan.GatheredTokens(in.k), v = plan.GatheredTokens(in.v);
  Owned log_decay;
  const Options gathered = plan.GatheredOptions(options, log_decay);
  const auto whole = [](bool wanted, const ConstTensorView& like) {
    return wanted ? Owned(like.dtype(), like.sizes()) : Owned();
  };
  const Owned d_k = whole(dk, k.view()), d_v = whole(dv, v.view()), d_decay = whole(dlog_decay, log_decay.view());
  bool begun = false;
  plan.ForRanges(gathered, [&](int64_t first, const TokenRange& range, const Options& of_rows) {
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
                        {in.q.Slice(kTokens, first, end), k.view(), v.view(), in.o.Slice(kTokens, first, end),
                         in.lse.Slice(kLseTokens, first, end), in.d_o.Slice(kTokens, first, end),
                         Slice(in.d_lse, kLseTokens, first, end)},
                        of_rows,
                        {Slice(out.dq, kTokens, first, end), to(0), to(1),
                         bias_of_rows ? RowsOf(out.dbias, first, range.size()) : to(3), to(4), to(5), to(2)});
    for (size_t i = 0; begun && i < sums.size(); ++i) {
      if (sums[i].present()) Add(terms[i].view(), sums[i]);
    }
    begun = true;
  });
  if (dk) plan.ScatterSum(d_k.view(), out.dk);
  if (dv) plan.ScatterSum(d_v.view(), out.dv);
  if (dlog_decay) plan.ScatterSum(d_decay.view(), out.dlog_decay);
}

}  // namespace heed::distributed
