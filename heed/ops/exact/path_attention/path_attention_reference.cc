// PaTH attention as it is defined, and its gradient: each query meets its keys from its own to the first, and passes
// through one transformation between two of them.
//
// The reference shares only the checks with the kernels, and is to be read beside the header.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "heed/ops/exact/common/transitions_check.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

namespace heed::path_attention {
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

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
void Add(double factor, const Vector& x, Vector& to) {
  for (size_t i = 0; i < x.size(); ++i) to[i] += factor * x[i];
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
      const int64_t key_head = h / call.group();
      for (int64_t i = 0; s.begin + i < s.end; ++i) {
        ReferenceRow row;
        row.sequence = s;
        row.head = h;
        row.i = i;
        const auto keys = static_cast<size_t>(i + 1);
        row.logits.resize(keys);
        row.forgotten.resize(keys);
        row.weights.resize(keys);
        row.queries.resize(keys);
        Vector x = RowOf(in.q, s.batch, s.begin + i, h);
        double forgotten = 0, most = -HUGE_VAL, sum = 0;
        for (int64_t j = i; j >= 0; --j) {
          const int64_t token = s.begin + j;
          const auto at = static_cast<size_t>(j);
          row.queries[at] = x;
          row.forgotten[at] = forgotten;
          row.logits[at] = call.scale * Dot(x, RowOf(in.k, s.batch, token, key_head)) + forgotten;
          most = std::fmax(most, row.logits[at]);
          const Vector w = RowOf(in.w, s.batch, token, key_head);
          Add(-At(in.beta, {s.batch, token, key_head}) * Dot(w, x), w, x);  // x = H_j x
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
  const Call call = CheckForward("path_attention::Reference", in, options, out, true, false);
  transitions::ClearOutputs(call, out);
  ForReferenceRows(call, in, [&](const ReferenceRow& row) {
    const int64_t b = row.sequence.batch, token = row.sequence.begin + row.i;
    Vector o(static_cast<size_t>(call.Dv));
    for (size_t j = 0; j < row.weights.size(); ++j) {
      Add(row.weights[j], RowOf(in.v, b, row.sequence.begin + static_cast<int64_t>(j), row.head / call.group()), o);
    }
    for (int64_t c = 0; c < call.Dv; ++c) Set(out.o, {b, token, row.head, c}, o[static_cast<size_t>(c)]);
    Set(out.lse, {b, row.head, token}, row.lse);
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("path_attention::BackwardReference", in, options, out, true, false);
  Sums dq(in.q, call.D), dk(in.k, call.D), dv(in.v, call.Dv), dw(in.w, call.D), dbeta(in.k, 1), dforget(in.q, 1);
  ForReferenceRows(call, in, [&](const ReferenceRow& row) {
    const int64_t b = row.sequence.batch, first = row.sequence.begin, h = row.head, key_head = h / call.group();
    const Vector d_o = RowOf(in.d_o, b, first + row.i, h);
    Vector of_weights;
    double delta = in.d_lse.present() ? -At(in.d_lse, {b, h, first + row.i}) : 0;
    for (size_t j = 0; j < row.weights.size(); ++j) {
      of_weights.push_back(Dot(d_o, RowOf(in.v, b, first + static_cast<int64_t>(j), key_head)));
      delta += row.weights[j] * of_weights[j];
    }
    // From the first key to the row's own: dx_ij, and the sum of dS over the keys so far.
    Vector dx(static_cast<size_t>(call.D));
    double crossing = 0;
    for (int64_t j = 0; j <= row.i; ++j) {
      const auto at = static_cast<size_t>(j);
      const Vector w = RowOf(in.w, b, first + j, key_head);
      const double beta = At(in.beta, {b, first + j, key_head}), wx = Dot(w, row.queries[at]), wdx = Dot(w, dx);
      dw.Add(b, first + j, key_head, -beta * wx, dx);
      dw.Add(b, first + j, key_head, -beta * wdx, row.queries[at]);
      *dbeta.At(b, first + j, key_head) -= wx * wdx;
      Add(-beta * wdx, w, dx);  // H_j dx_i,j-1
      *dforget.At(b, first + j, h) += crossing;
      const double of_logit = row.weights[at] * (of_weights[at] - delta);
      crossing += of_logit;
      Add(call.scale * of_logit, RowOf(in.k, b, first + j, key_head), dx);
      dk.Add(b, first + j, key_head, call.scale * of_logit, row.queries[at]);
      dv.Add(b, first + j, key_head, row.weights[at], d_o);
    }
    dq.Add(b, first + row.i, h, 1, dx);
  });
  dq.Store(out.dq);
  dk.Store(out.dk);
  dv.Store(out.dv);
  dw.Store(out.dw);
  dbeta.Store(out.dbeta);
  dforget.Store(out.dlog_forget);
}

void TransformKeysReference(const KeyInputs& in, const TensorView& keys) {
  CheckKeys("path_attention::TransformKeysReference", in, keys);
  const int64_t tokens = in.w.size(1), first = keys.size(1) - tokens;
  for (int64_t b = 0; b < keys.size(0); ++b) {
    for (int64_t h = 0; h < keys.size(2); ++h) {
      for (int64_t j = 0; j < keys.size(1); ++j) {
        Vector key = RowOf(keys, b, j, h);
        for (int64_t t = std::max<int64_t>(j + 1 - first, 0); t < tokens; ++t) {
          const Vector w = RowOf(in.w, b, t, h);
          Add(-At(in.beta, {b, t, h}) * Dot(w, key), w, key);
        }
        for (int64_t c = 0; c < keys.size(3); ++c) Set(keys, {b, j, h, c}, key[static_cast<size_t>(c)]);
      }
    }
  }
}

}  // namespace heed::path_attention
