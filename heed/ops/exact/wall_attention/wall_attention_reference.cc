// Wall attention as it is defined, and its gradient: each query meets its keys from its own to the first, and decays by
// one token between two of them.
//
// The reference shares only the checks with the kernels, and is to be read beside the header.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "heed/ops/exact/common/transitions_check.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

namespace heed::wall_attention {
namespace {

using Index = std::initializer_list<int64_t>;
using Vector = std::vector<double>;

int64_t OffsetAt(const ConstTensorView& t, Index index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}
double At(const ConstTensorView& t, Index index) { return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index)); }
void Set(const TensorView& t, Index index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}
Vector RowOf(const ConstTensorView& t, int64_t b, int64_t token, int64_t h) {
  Vector row;
  for (int64_t c = 0; c < t.size(3); ++c) row.push_back(At(t, {b, token, h, c}));
  return row;
}

// Sums of gradients, [B, T, heads, channels].
struct Sums {
  int64_t T, heads, channels;
  Vector values;

  Sums(const ConstTensorView& like, int64_t of_rows)
      : T(like.size(1)), heads(like.size(2)), channels(of_rows),
        values(static_cast<size_t>(like.size(0) * T * heads * channels)) {}
  double* At(int64_t b, int64_t token, int64_t h) { return values.data() + ((b * T + token) * heads + h) * channels; }
  void Add(int64_t b, int64_t token, int64_t h, double factor, const Vector& x) {
    for (size_t c = 0; c < x.size(); ++c) At(b, token, h)[c] += factor * x[c];
  }
  void Store(const TensorView& to) const {
    if (!to.present()) return;
    const bool rows = to.rank() == 4;
    for (int64_t n = 0; n < static_cast<int64_t>(values.size()); ++n) {
      const int64_t c = n % channels, h = n / channels % heads, token = n / channels / heads % T,
                    b = n / channels / heads / T;
      const double value = values[static_cast<size_t>(n)];
      rows ? Set(to, {b, token, h, c}, value) : Set(to, {b, token, h}, value);
    }
  }
};

}  // namespace

void ForReferenceRows(const Call& call, const Inputs& in, const std::function<void(const ReferenceRow&)>& f) {
  for (const mechanism::TokenRange& s : call.sequences) {
    for (int64_t h = 0; h < call.H; ++h) {
      const int64_t key_head = h / (call.H / call.Hkv), decay_head = h / (call.H / call.heads);
      for (int64_t i = 0; s.begin + i < s.end; ++i) {
        ReferenceRow row;
        row.sequence = s;
        row.head = h;
        row.i = i;
        const auto keys = static_cast<size_t>(i + 1);
        row.logits.resize(keys);
        row.forgotten.resize(keys);
        row.weights.resize(keys);
        row.decays.resize(keys);
        const Vector q = RowOf(in.q, s.batch, s.begin + i, h);
        Vector logs(q.size());  // sums of log decays
        double forgotten = 0, most = -HUGE_VAL, sum = 0;
        for (int64_t j = i; j >= 0; --j) {
          const int64_t token = s.begin + j;
          const auto at = static_cast<size_t>(j);
          const Vector k = RowOf(in.k, s.batch, token, key_head);
          double product = 0;
          for (size_t n = 0; n < q.size(); ++n) {
            row.decays[at].push_back(std::exp(logs[n]));
            product += q[n] * k[n] * row.decays[at][n];
          }
          row.forgotten[at] = forgotten;
          row.logits[at] = call.scale * product + forgotten;
          most = std::fmax(most, row.logits[at]);
          const Vector log_decay = RowOf(in.log_decay, s.batch, token, decay_head);
          for (size_t n = 0; n < q.size(); ++n) logs[n] += log_decay[n];
          if (in.log_forget.present()) forgotten += At(in.log_forget, {s.batch, token, h});
        }
        for (const double logit : row.logits) sum += std::exp(logit - most);
        row.lse = most + std::log(sum);
        for (size_t j = 0; j < keys; ++j) row.weights[j] = std::exp(row.logits[j] - row.lse);
        f(row);
      }
    }
  }
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  const Call call = CheckForward("wall_attention::Reference", in, options, out, true, false);
  transitions::ClearOutputs(call, out);
  ForReferenceRows(call, in, [&](const ReferenceRow& row) {
    const int64_t b = row.sequence.batch, token = row.sequence.begin + row.i, key_head = row.head / (call.H / call.Hkv);
    Vector o(static_cast<size_t>(call.Dv));
    for (size_t j = 0; j < row.weights.size(); ++j) {
      const Vector v = RowOf(in.v, b, row.sequence.begin + static_cast<int64_t>(j), key_head);
      for (size_t c = 0; c < o.size(); ++c) o[c] += row.weights[j] * v[c];
    }
    for (int64_t c = 0; c < call.Dv; ++c) Set(out.o, {b, token, row.head, c}, o[static_cast<size_t>(c)]);
    Set(out.lse, {b, row.head, token}, row.lse);
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("wall_attention::BackwardReference", in, options, out, true, false);
  Sums dq(in.q, call.D), dk(in.k, call.D), dv(in.v, call.Dv), ddecay(in.log_decay, call.D), dforget(in.q, 1);
  ForReferenceRows(call, in, [&](const ReferenceRow& row) {
    const int64_t b = row.sequence.batch, first = row.sequence.begin, token = first + row.i, h = row.head,
                  key_head = h / (call.H / call.Hkv), decay_head = h / (call.H / call.heads);
    const Vector d_o = RowOf(in.d_o, b, token, h), q = RowOf(in.q, b, token, h);
    Vector of_weights;
    double delta = in.d_lse.present() ? -At(in.d_lse, {b, h, token}) : 0;
    for (size_t j = 0; j < row.weights.size(); ++j) {
      const Vector v = RowOf(in.v, b, first + static_cast<int64_t>(j), key_head);
      double product = 0;
      for (size_t c = 0; c < v.size(); ++c) product += d_o[c] * v[c];
      of_weights.push_back(product);
      delta += row.weights[j] * product;
    }
    Vector crossing(q.size()), dq_row(q.size());  // crossing: scale sum_j dS_ij q_in k_jn W_ijn over the keys so far
    double forgotten = 0;                         // sum of dS over the keys so far
    for (int64_t j = 0; j <= row.i; ++j) {
      const auto at = static_cast<size_t>(j);
      ddecay.Add(b, first + j, decay_head, 1, crossing);
      *dforget.At(b, first + j, h) += forgotten;
      const double of_logit = row.weights[at] * (of_weights[at] - delta);
      forgotten += of_logit;
      const Vector k = RowOf(in.k, b, first + j, key_head);
      Vector dk_row(q.size());
      for (size_t n = 0; n < q.size(); ++n) {
        const double factor = call.scale * of_logit * row.decays[at][n];
        dq_row[n] += factor * k[n];
        dk_row[n] = factor * q[n];
        crossing[n] += factor * q[n] * k[n];
      }
      dk.Add(b, first + j, key_head, 1, dk_row);
      dv.Add(b, first + j, key_head, row.weights[at], d_o);
    }
    dq.Add(b, token, h, 1, dq_row);
  });
  dq.Store(out.dq);
  dk.Store(out.dk);
  dv.Store(out.dv);
  ddecay.Store(out.dlog_decay);
  dforget.Store(out.dlog_forget);
}

void TransformKeysReference(const KeyInputs& in, const TensorView& keys) {
  CheckKeys("wall_attention::TransformKeysReference", in, keys, false);
  const int64_t tokens = in.log_decay.size(1), first = keys.size(1) - tokens;
  for (int64_t b = 0; b < keys.size(0); ++b) {
    for (int64_t h = 0; h < keys.size(2); ++h) {
      Vector logs(static_cast<size_t>(keys.size(3)));  // sums of log decays after key j
      for (int64_t j = keys.size(1); j-- > 0;) {
        for (int64_t c = 0; c < keys.size(3); ++c) {
          double& sum = logs[static_cast<size_t>(c)];
          Set(keys, {b, j, h, c}, At(keys, {b, j, h, c}) * std::exp(sum));
          if (j >= first) sum += At(in.log_decay, {b, j - first, h, c});
        }
      }
    }
  }
}

}  // namespace heed::wall_attention
