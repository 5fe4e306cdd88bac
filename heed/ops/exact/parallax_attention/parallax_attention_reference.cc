// Parallax attention as it is defined, and its gradient: row by row, with the weights of all pairs.
//
// The reference shares only the checks with the kernels, and is to be read beside the header.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"

namespace heed::parallax_attention {
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
void SetRow(const TensorView& t, int64_t b, int64_t token, int64_t h, const Vector& row) {
  for (size_t c = 0; c < row.size(); ++c) Set(t, {b, token, h, static_cast<int64_t>(c)}, row[c]);
}
double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}
void Add(double factor, const Vector& x, Vector& to) {
  for (size_t c = 0; c < x.size(); ++c) to[c] += factor * x[c];
}

// Sums of gradients of keys or values, [B, Tk, Hkv, channels].
struct Sums {
  const ConstTensorView& like;
  std::vector<Vector> rows;

  explicit Sums(const ConstTensorView& t)
      : like(t), rows(static_cast<size_t>(t.size(0) * t.size(1) * t.size(2)), Vector(static_cast<size_t>(t.size(3)))) {}
  Vector& At(int64_t b, int64_t token, int64_t h) {
    return rows[static_cast<size_t>((b * like.size(1) + token) * like.size(2) + h)];
  }
  void Store(const TensorView& to) {
    for (int64_t b = 0; b < like.size(0); ++b) {
      for (int64_t token = 0; token < like.size(1); ++token) {
        for (int64_t h = 0; h < like.size(2); ++h) SetRow(to, b, token, h, At(b, token, h));
      }
    }
  }
};

}  // namespace

void ForReferenceRows(const Call& call, const Inputs& in, const std::function<void(const ReferenceRow&)>& f) {
  for (const mechanism::TokenRange& s : call.sequences) {
    for (int64_t h = 0; h < call.H; ++h) {
      const int64_t key_head = h / (call.H / call.Hkv);
      for (int64_t row = 0; row < call.Tq; ++row) {
        const int64_t position = call.Tk - call.Tq + row;
        if (position < s.begin || position >= s.end) continue;
        ReferenceRow x;
        x.batch = s.batch;
        x.head = h;
        x.row = row;
        x.first_key = s.begin;
        if (call.window > 0) x.first_key = std::max(s.begin, position - call.window + 1);
        const Vector q = RowOf(in.q, s.batch, row, h), r = RowOf(in.r, s.batch, row, h);
        double most = -HUGE_VAL, sum = 0;
        for (int64_t j = x.first_key; j <= position; ++j) {
          const Vector k = RowOf(in.k, s.batch, j, key_head);
          x.logits.push_back(call.scale * Dot(q, k));
          x.second.push_back(Dot(r, k));
          most = std::fmax(most, x.logits.back());
        }
        for (const double logit : x.logits) sum += std::exp(logit - most);
        x.lse = most + std::log(sum);
        for (const double logit : x.logits) x.weights.push_back(std::exp(logit - most) / sum);
        x.mean = Dot(x.weights, x.second);
        f(x);
      }
    }
  }
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  const Call call = CheckForward("parallax_attention::Reference", in, options, out, true);
  ClearExcluded(call, out);
  ForReferenceRows(call, in, [&](const ReferenceRow& x) {
    Vector o(static_cast<size_t>(call.Dv)), m(o.size());
    for (size_t j = 0; j < x.weights.size(); ++j) {
      const Vector v = RowOf(in.v, x.batch, x.first_key + static_cast<int64_t>(j), x.head / call.group());
      Add(x.weights[j], v, m);
      Add(x.weights[j] * (1 + x.mean - x.second[j]), v, o);
    }
    SetRow(out.o, x.batch, x.row, x.head, o);
    SetRow(out.m, x.batch, x.row, x.head, m);
    Set(out.a, {x.batch, x.head, x.row}, x.mean);
    Set(out.lse, {x.batch, x.head, x.row}, x.lse);
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("parallax_attention::BackwardReference", in, options, out, true);
  ClearExcluded(call, out);
  Sums dk(in.k), dv(in.v);
  ForReferenceRows(call, in, [&](const ReferenceRow& x) {
    const int64_t key_head = x.head / call.group();
    const auto key = [&](size_t j) { return x.first_key + static_cast<int64_t>(j); };
    const Vector q = RowOf(in.q, x.batch, x.row, x.head), r = RowOf(in.r, x.batch, x.row, x.head),
                 d_o = RowOf(in.d_o, x.batch, x.row, x.head);
    // <o, d_o> is a function of the weights P and of t: sum_j P_j (1 + sum_l P_l t_l - t_j) g_j. Its derivative by P_j
    // is (1 + a - t_j) (g_j - mean) but for a term that is the same for all j, which the softmax removes.
    Vector g, centred, dq(q.size()), dr(r.size());
    for (size_t j = 0; j < x.weights.size(); ++j) g.push_back(Dot(d_o, RowOf(in.v, x.batch, key(j), key_head)));
    const double mean = Dot(x.weights, g);
    for (size_t j = 0; j < g.size(); ++j) centred.push_back((1 + x.mean - x.second[j]) * (g[j] - mean));
    const double of_sum = Dot(x.weights, centred),
                 of_lse = in.d_lse.present() ? At(in.d_lse, {x.batch, x.head, x.row}) : 0;
    for (size_t j = 0; j < g.size(); ++j) {
      const double P = x.weights[j], of_logit = call.scale * P * (centred[j] - of_sum + of_lse),
                   of_second = P * (mean - g[j]);
      const Vector k = RowOf(in.k, x.batch, key(j), key_head);
      Add(of_logit, k, dq);
      Add(of_second, k, dr);
      Add(of_logit, q, dk.At(x.batch, key(j), key_head));
      Add(of_second, r, dk.At(x.batch, key(j), key_head));
      Add(P * (1 + x.mean - x.second[j]), d_o, dv.At(x.batch, key(j), key_head));
    }
    SetRow(out.dq, x.batch, x.row, x.head, dq);
    SetRow(out.dr, x.batch, x.row, x.head, dr);
  });
  dk.Store(out.dk);
  dv.Store(out.dv);
}

}  // namespace heed::parallax_attention
