// Exact attention of one part of a sequence to all parts, which move around a ring of ranks.
//
// Keys and values move to the next rank while this one attends to them, so that a rank holds two parts at a time and
// not all of them. The partial results of a row are merged by their log-sum-exps as the parts arrive: the rank's own
// part first, then those of the ranks before it. Sinks join the sum when all parts have. Gradients are those of each
// part with the log-sum-exp of all of them; the gradients of keys and values follow these, one step later, until they
// are on their own rank. Results do not depend on when messages move: terms of a step are added in order after the
// sum of earlier ranks has arrived. A transport without `start` moves messages between the steps.
//
// Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
// arXiv:2310.01889.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/distributed/attention_internal.h"
#include "heed/distributed/group_internal.h"

namespace heed::distributed {
namespace {

using attention::Options;

DType WideOf(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

Owned Copied(const ConstTensorView& t) {
  Owned copy(t.dtype(), t.sizes());
  Copy(t, copy.view());
  return copy;
}
Owned ZerosLike(bool wanted, const ConstTensorView& t, DType dtype) {
  return wanted ? Owned(dtype, t.sizes()) : Owned();
}

template <class View>
View Slice(const View& t, int axis, int64_t begin, int64_t end) {
  return t.present() ? t.Slice(axis, begin, end) : t;
}

// A range of tokens, and where it begins among those of its rank.
struct LocalRange {
  TokenRange range;
  int64_t first = 0;
  int64_t end() const { return first + range.size(); }
};

class Ring {
 public:
  Ring(const Group& group, const std::vector<std::vector<TokenRange>>& ranges, const WholeOptions& whole)
      : group_(group), ranges_(ranges), whole_(whole) {}

  int num_steps() const { return group_.size(); }
  std::vector<LocalRange> rows() const { return LocalRangesOf(group_.rank()); }

  // Calls f(range of the keys that are here, options of attention to it, whether it is the range of these rows) for
  // ranges of which a row sees a key, and for the range of these rows.
  template <class F>
  void Attend(int step, const LocalRange& rows, const F& f) const {
    for (const LocalRange& keys : LocalRangesOf(SourceOf(step))) {
      const bool own = step == 0 && keys.first == rows.first && keys.range == rows.range;
      if (!own && !whole_.Sees(rows.range, keys.range)) continue;
      const PartOptions part = whole_.Of(rows.range, rows.first, keys.range);
      f(keys, part.options, own);
    }
  }

  const Group& group() const { return group_; }
  // The tensor of the rank before that `t` is replaced by in `step`.
  Owned Incoming(const ConstTensorView& t, int step) const {
    return {t.dtype(), Resized(t, TokenAxis(t), CountTokens(RangesAt(SourceOf(step))))};
  }

 private:
  // The rank whose keys are here in a step.
  int SourceOf(int step) const { return (group_.rank() + group_.size() - step) % group_.size(); }
  const std::vector<TokenRange>& RangesAt(int rank) const { return ranges_[static_cast<size_t>(rank)]; }
  std::vector<LocalRange> LocalRangesOf(int rank) const {
    std::vector<LocalRange> local;
    int64_t first = 0;
    for (const TokenRange& range : RangesAt(rank)) {
      local.push_back({range, first});
      first += range.size();
    }
    return local;
  }

  const Group& group_;
  const std::vector<std::vector<TokenRange>>& ranges_;
  const WholeOptions& whole_;
};

// A tensor that moves to the next rank, while that of the rank before comes here. A transport with `start` moves it
// from the constructor on, any other one in Finish. Until then `held` may be read.
class Move {
 public:
  Move(const Ring& ring, Owned& held, int step)
      : group_(ring.group()), held_(held), received_(ring.Incoming(held.view(), step)),
        next_((group_.rank() + 1) % group_.size()), before_((group_.rank() + group_.size() - 1) % group_.size()) {
    if (group_.transport().start != nullptr) started_ = Start(group_, held_.bytes(), next_, received_.bytes(), before_);
  }
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;
  // After an error memory is not released while a message uses it.
  ~Move() {
    try {
      Wait();
    } catch (const std::exception&) {  // the error that ended the call counts
    }
  }

  void Finish() {
    if (group_.transport().start == nullptr) {
      SendReceive(group_, held_.bytes(), next_, received_.bytes(), before_);
    } else {
      Wait();
    }
    held_ = std::move(received_);
  }

 private:
  void Wait() {
    if (void* const started = std::exchange(started_, nullptr)) heed::distributed::Finish(group_, started);
  }

  const Group& group_;
  Owned& held_;
  Owned received_;
  int next_, before_;
  void* started_ = nullptr;
};

using Moves = std::list<Move>;

void Finish(Moves& moves) {
  for (Move& move : moves) move.Finish();
  moves.clear();
}

template <class View>
View TokensAt(const View& t, const LocalRange& range) {
  return Slice(t, TokenAxis(t), range.first, range.end());
}
template <class View>
View LseAt(const View& lse, const LocalRange& range) {
  return Slice(lse, LseTokenAxis(lse), range.first, range.end());
}

// The sum over parts for the rows of one range.
struct Sum {
  Owned o, lse;
};

}  // namespace

void RingForward(Context& ctx, const Group& group, const std::vector<std::vector<TokenRange>>& ranges,
                 const WholeOptions& whole, const attention::Inputs& in, const Options& options,
                 const attention::Outputs& out) {
  const Ring ring(group, ranges, whole);
  const DType dtype = in.q.dtype(), wide = WideOf(dtype);
  const std::vector<LocalRange> rows = ring.rows();
  std::vector<Sum> sums(rows.size());
  Owned k = Copied(in.k), v = Copied(in.v);
  for (int step = 0; step < ring.num_steps(); ++step) {
    Moves moves;
    if (step + 1 < ring.num_steps()) {
      moves.emplace_back(ring, k, step + 1);
      moves.emplace_back(ring, v, step + 1);
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      Sum& sum = sums[i];
      const ConstTensorView q = TokensAt(in.q, rows[i]);
      const Shape o_shape = Resized(q, q.rank() - 1, in.v.size(in.v.rank() - 1));
      Shape lse_shape = {q.size(HeadAxis(q)), q.size(TokenAxis(q))};
      if (q.rank() == 4) lse_shape.insert(lse_shape.begin(), q.size(0));
      ring.Attend(step, rows[i], [&](const LocalRange& keys, Options here, bool) {
        here.sinks = {};
        Sum part{Owned(dtype, o_shape), Owned(wide, lse_shape)};
        attention::Forward(ctx, {q, TokensAt(k.view(), keys), TokensAt(v.view(), keys)}, here,
                           {part.o.view(), part.lse.view()});
        if (sum.o.view().present()) {
          Sum both{Owned(wide, o_shape), Owned(wide, lse_shape)};
          attention::Merge(
              ctx, std::vector<attention::Part>{{sum.o.view(), sum.lse.view()}, {part.o.view(), part.lse.view()}}, {},
              {both.o.view(), both.lse.view()});
          part = std::move(both);
        }
        sum = std::move(part);
      });
    }
    Finish(moves);
  }
  for (size_t i = 0; i < rows.size(); ++i) {  // rounds to the dtype of o
    const std::vector<attention::Part> parts = {{sums[i].o.view(), sums[i].lse.view()}};
    attention::Merge(ctx, parts, options.sinks, {TokensAt(out.o, rows[i]), LseAt(out.lse, rows[i])});
  }
}

void RingBackward(Context& ctx, const Group& group, const std::vector<std::vector<TokenRange>>& ranges,
                  const WholeOptions& whole, const attention::BackwardInputs& in, const attention::Gradients& out) {
  const Ring ring(group, ranges, whole);
  const DType dtype = in.q.dtype(), wide = WideOf(dtype);
  const bool of_q = out.dq.present(), of_k = out.dk.present(), of_v = out.dv.present();
  Owned k = Copied(in.k), v = Copied(in.v);
  Owned dq = ZerosLike(of_q, in.q, wide), dk = ZerosLike(of_k, in.k, wide), dv = ZerosLike(of_v, in.v, wide);
  for (const TensorView& sum : {out.dbias, out.dsinks, out.dalibi}) {
    if (sum.present()) Copy(Owned(sum.dtype(), sum.sizes()).view(), sum);
  }
  const auto add = [](const Owned& term, const TensorView& sum) {
    if (term.view().present()) Add(term.view(), sum);
  };
  struct Term {
    LocalRange keys;
    Owned dk, dv;
  };
  Moves of_gradients;
  for (int step = 0; step < ring.num_steps(); ++step) {
    Moves moves;
    if (step + 1 < ring.num_steps()) {
      moves.emplace_back(ring, k, step + 1);
      moves.emplace_back(ring, v, step + 1);
    }
    std::vector<Term> terms;
    for (const LocalRange& rows : ring.rows()) {
      const ConstTensorView q = TokensAt(in.q, rows);
      ring.Attend(step, rows, [&](const LocalRange& keys, const Options& here, bool own) {
        const ConstTensorView k_here = TokensAt(k.view(), keys), v_here = TokensAt(v.view(), keys);
        const TensorView dbias = SliceUnlessOne(SliceUnlessOne(out.dbias, 2, rows.first, rows.range.size()), 1,
                                                keys.range.begin, keys.range.size());
        Owned dk_part = ZerosLike(of_k, k_here, dtype), dv_part = ZerosLike(of_v, v_here, dtype);
        const Owned dq_part = ZerosLike(of_q, q, dtype), dbias_part = ZerosLike(dbias.present(), dbias, dbias.dtype()),
                    // dsinks depends on o alone, so that one call has all of it.
            dsinks_part = ZerosLike(own && out.dsinks.present(), out.dsinks, out.dsinks.dtype()),
                    dalibi_part = ZerosLike(out.dalibi.present(), out.dalibi, out.dalibi.dtype());
        attention::Gradients gradients;
        gradients.dq = dq_part.view();
        gradients.dk = dk_part.view();
        gradients.dv = dv_part.view();
        gradients.dbias = dbias_part.view();
        gradients.dsinks = dsinks_part.view();
        gradients.dalibi = dalibi_part.view();
        attention::Backward(ctx,
                            {q, k_here, v_here, TokensAt(in.o, rows), LseAt(in.lse, rows), TokensAt(in.d_o, rows),
                             LseAt(in.d_lse, rows)},
                            here, gradients);
        add(dq_part, TokensAt(dq.view(), rows));
        add(dbias_part, dbias);
        add(dsinks_part, out.dsinks);
        add(dalibi_part, out.dalibi);
        terms.push_back({keys, std::move(dk_part), std::move(dv_part)});
      });
    }
    Finish(of_gradients);
    for (const Term& term : terms) {
      add(term.dk, TokensAt(dk.view(), term.keys));
      add(term.dv, TokensAt(dv.view(), term.keys));
    }
    Finish(moves);
    const int next = (step + 1) % ring.num_steps();
    if (of_k) of_gradients.emplace_back(ring, dk, next);
    if (of_v) of_gradients.emplace_back(ring, dv, next);
    if (group.transport().start == nullptr) Finish(of_gradients);
  }
  Finish(of_gradients);
  if (of_q) Convert(dq.view(), out.dq);
  if (of_k) Convert(dk.view(), out.dk);
  if (of_v) Convert(dv.view(), out.dv);
}

}  // namespace heed::distributed
