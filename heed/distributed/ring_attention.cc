// Exact attention of one part of a sequence to all parts, which move around a ring of ranks.
//
// Keys and values move to the next rank after each step, so that a rank holds two parts at a time and not all of them.
// The partial results of a row are merged by their log-sum-exps as the parts arrive: the rank's own part first, then
// those of the ranks before it. Gradients are those of each part with the log-sum-exp of all of them; the gradients of
// keys and values move with these, one step further, until they are on their own rank.
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

constexpr int kTokens = 1;  // axis of q, k, v and o

DType WideOf(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

Owned Copied(const ConstTensorView& t) {
  Owned copy(t.dtype(), t.sizes());
  Copy(t, copy.view());
  return copy;
}
Owned ZerosLike(bool wanted, const ConstTensorView& t, DType dtype) {
  return wanted ? Owned(dtype, t.sizes()) : Owned();
}

class Ring {
 public:
  Ring(const std::string& op, const Group& group, const std::vector<TokenRange>& parts, const Options& options,
       int64_t batch)
      : group_(group), parts_(parts), options_(options), batch_(batch), own_(At(group.rank())) {
    if (!options.key_lengths.present()) return;
    const ConstTensorView& t = options.key_lengths;
    if ((t.dtype() != DType::kI32 && t.dtype() != DType::kI64) || t.rank() != 1 || t.size(0) != batch) {
      Refuse(op, "key_lengths", std::string("is ") + Name(t.dtype()) + " " + t.ShapeString(),
             "i32 or i64 " + ShapeString(std::vector<int64_t>{batch}));
    }
    for (int64_t b = 0; b < batch; ++b) {
      key_lengths_.push_back(LoadAsInt64(t.dtype(), t.data(), b * t.stride(0)));
      if (key_lengths_.back() >= 0 && key_lengths_.back() <= total()) continue;
      Refuse(op, "key_lengths", "contains " + std::to_string(key_lengths_.back()), "0 to " + std::to_string(total()));
    }
  }

  int num_steps() const { return group_.size(); }
  // The rank whose keys are here in a step.
  int SourceOf(int step) const { return (group_.rank() + group_.size() - step) % group_.size(); }

  // Calls f(options of attention to the keys that are here) if a row sees them, and for this rank's own keys.
  template <class F>
  void Attend(int step, const F& f) const {
    const TokenRange& keys = At(SourceOf(step));
    if (step != 0 && !Sees(keys)) return;
    Options here = options_;
    const Shape batch = {batch_};
    const auto count = static_cast<size_t>(std::max<int64_t>(batch_, 1));
    const std::vector<int64_t> starts(count, own_.begin - keys.begin);
    if (options_.causal || options_.window.left >= 0 || options_.window.right >= 0) {
      here.query_starts = ConstTensorView(starts.data(), DType::kI64, batch);
    }
    std::vector<int64_t> lengths(count);
    if (options_.key_lengths.present()) {
      for (size_t b = 0; b < key_lengths_.size(); ++b) {
        lengths[b] = std::clamp<int64_t>(key_lengths_[b] - keys.begin, 0, keys.size());
      }
      here.key_lengths = ConstTensorView(lengths.data(), DType::kI64, batch);
    }
    f(here);
  }

  // Moves a tensor to the next rank; it becomes that of the rank before, which is here in `step`.
  void Shift(Owned& held, int step) const {
    Owned received(held.view().dtype(), Resized(held.view(), kTokens, At(SourceOf(step)).size()));
    const int rank = group_.rank(), size = group_.size();
    SendReceive(group_, held.bytes(), (rank + 1) % size, received.bytes(), (rank + size - 1) % size);
    held = std::move(received);
  }

 private:
  const TokenRange& At(int rank) const { return parts_[static_cast<size_t>(rank)]; }
  int64_t total() const { return parts_.back().end; }
  bool Sees(const TokenRange& keys) const {
    const auto [left, right] = options_.window;
    const int64_t first = left < 0 ? 0 : own_.begin - left;
    const int64_t last = options_.causal                            ? own_.end
                         : right < 0 || right >= total() - own_.end ? total()
                                                                    : own_.end + right;
    return own_.size() > 0 && keys.size() > 0 && keys.begin < last && keys.end > first;
  }

  const Group& group_;
  const std::vector<TokenRange>& parts_;
  const Options& options_;
  int64_t batch_;
  TokenRange own_;
  std::vector<int64_t> key_lengths_;
};

}  // namespace

void RingForward(Context& ctx, const Group& group, const std::vector<TokenRange>& parts, const attention::Inputs& in,
                 const Options& options, const attention::Outputs& out) {
  const Ring ring("attention::Forward", group, parts, options, in.q.size(0));
  const DType dtype = in.q.dtype(), wide = WideOf(dtype);
  const Shape o_shape(out.o.sizes().begin(), out.o.sizes().end());
  const Shape lse_shape = {in.q.size(0), in.q.size(2), in.q.size(kTokens)};
  Owned k = Copied(in.k), v = Copied(in.v), o, lse;
  const auto merge = [&](const std::vector<attention::Part>& of, const attention::Outputs& to) {
    attention::Merge(ctx, of, {}, to);
  };
  for (int step = 0; step < ring.num_steps(); ++step) {
    if (step > 0) {
      ring.Shift(k, step);
      ring.Shift(v, step);
    }
    ring.Attend(step, [&](const Options& here) {
      Owned o_part(dtype, o_shape), lse_part(wide, lse_shape);
      attention::Forward(ctx, {in.q, k.view(), v.view()}, here, {o_part.view(), lse_part.view()});
      if (step > 0) {
        Owned both(wide, o_shape), lse_of_both(wide, lse_shape);
        merge({{o.view(), lse.view()}, {o_part.view(), lse_part.view()}}, {both.view(), lse_of_both.view()});
        o_part = std::move(both);
        lse_part = std::move(lse_of_both);
      }
      o = std::move(o_part);
      lse = std::move(lse_part);
    });
  }
  merge({{o.view(), lse.view()}}, out);  // rounds to the dtype of o
}

void RingBackward(Context& ctx, const Group& group, const std::vector<TokenRange>& parts,
                  const attention::BackwardInputs& in, const Options& options, const attention::Gradients& out) {
  const Ring ring("attention::Backward", group, parts, options, in.q.size(0));
  const DType dtype = in.q.dtype(), wide = WideOf(dtype);
  const bool of_q = out.dq.present(), of_k = out.dk.present(), of_v = out.dv.present();
  Owned k = Copied(in.k), v = Copied(in.v);
  Owned dq = ZerosLike(of_q, in.q, wide), dk = ZerosLike(of_k, in.k, wide), dv = ZerosLike(of_v, in.v, wide);
  for (int step = 0; step < ring.num_steps(); ++step) {
    ring.Attend(step, [&](const Options& here) {
      const Owned dq_part = ZerosLike(of_q, in.q, dtype), dk_part = ZerosLike(of_k, k.view(), dtype),
                  dv_part = ZerosLike(of_v, v.view(), dtype);
      attention::Gradients gradients;
      gradients.dq = dq_part.view();
      gradients.dk = dk_part.view();
      gradients.dv = dv_part.view();
      attention::Backward(ctx, {in.q, k.view(), v.view(), in.o, in.lse, in.d_o, in.d_lse}, here, gradients);
      if (of_q) Add(dq_part.view(), dq.view());
      if (of_k) Add(dk_part.view(), dk.view());
      if (of_v) Add(dv_part.view(), dv.view());
    });
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
