// Exact attention of one part of a sequence to all parts, which move around a ring of ranks.
//
// Keys and values move to the next rank after each step, so that a rank holds two parts at a time and not all of them.
// The partial results of a row are merged by their log-sum-exps as the parts arrive: the rank's own part first, then
// those of the ranks before it. Sinks join the sum when all parts have. Gradients are those of each part with the
// log-sum-exp of all of them; the gradients of keys and values move with these, one step further, until they are on
// their own rank.
//
// Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
// arXiv:2310.01889.
#include <algorithm>
#include <cstddef>
#include <cstdint>
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

  // Moves a tensor to the next rank; it becomes that of the rank before, which is here in `step`.
  void Shift(Owned& held, int step) const {
    const ConstTensorView& t = held.view();
    Owned received(t.dtype(), Resized(t, TokenAxis(t), CountTokens(RangesAt(SourceOf(step)))));
    const int rank = group_.rank(), size = group_.size();
    SendReceive(group_, held.bytes(), (rank + 1) % size, received.bytes(), (rank + size - 1) % size);
    held = std::move(received);
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
    if (step > 0) {
      ring.Shift(k, step);
      ring.Shift(v, step);
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
  for (int step = 0; step < ring.num_steps(); ++step) {
    for (const LocalRange& rows : ring.rows()) {
      const ConstTensorView q = TokensAt(in.q, rows);
      ring.Attend(step, rows, [&](const LocalRange& keys, const Options& here, bool own) {
        const ConstTensorView k_here = TokensAt(k.view(), keys), v_here = TokensAt(v.view(), keys);
        const TensorView dbias = SliceUnlessOne(SliceUnlessOne(out.dbias, 2, rows.first, rows.range.size()), 1,
                                                keys.range.begin, keys.range.size());
        const Owned dq_part = ZerosLike(of_q, q, dtype), dk_part = ZerosLike(of_k, k_here, dtype),
                    dv_part = ZerosLike(of_v, v_here, dtype),
                    dbias_part = ZerosLike(dbias.present(), dbias, dbias.dtype()),
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
        add(dk_part, TokensAt(dk.view(), keys));
        add(dv_part, TokensAt(dv.view(), keys));
        add(dbias_part, dbias);
        add(dsinks_part, out.dsinks);
        add(dalibi_part, out.dalibi);
      });
    }
    const int next = (step + 1) % ring.num_steps();
    if (next > 0) {
      ring.Shift(k, next);
      ring.Shift(v, next);
    }
    if (of_k) ring.Shift(dk, next);
    if (of_v) ring.Shift(dv, next);
  }
  if (of_q) Convert(dq.view(), out.dq);
  if (of_k) Convert(dk.view(), out.dk);
  if (of_v) Convert(dv.view(), out.dv);
}

}  // namespace heed::distributed
