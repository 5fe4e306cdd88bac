// DeltaFormer as it is defined, and its gradient: token by token, with the weights of all pairs.
//
// The reference shares only the checks with the kernels, and is to be read beside the header.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "heed/ops/exact/deltaformer/deltaformer_internal.h"

namespace heed::deltaformer {
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

// sum_j weights_j rows_j over as many rows as there are weights.
Vector Mean(const Vector& weights, const std::vector<Vector>& rows, int64_t channels) {
  Vector mean(static_cast<size_t>(channels));
  for (size_t j = 0; j < weights.size(); ++j) Add(weights[j], rows[j], mean);
  return mean;
}

// The gradient of the logits of a softmax, from that of its weights and of its lse.
Vector OfLogits(const Vector& weights, const Vector& of_weights, double of_lse) {
  const double mean = Dot(weights, of_weights);
  Vector gradient;
  for (size_t j = 0; j < weights.size(); ++j) gradient.push_back(weights[j] * (of_weights[j] - mean + of_lse));
  return gradient;
}

}  // namespace

std::vector<double> ReferenceRow(const ConstTensorView& t, int64_t b, int64_t token, int64_t h) {
  Vector row;
  for (int64_t c = 0; c < t.size(3); ++c) row.push_back(At(t, {b, token, h, c}));
  return row;
}

ReferenceSoftmax ReferenceHead::Softmax(const Vector& query, size_t keys) const {
  ReferenceSoftmax softmax;
  double most = -HUGE_VAL, sum = 0;
  for (size_t j = 0; j < keys; ++j) {
    softmax.logits.push_back(scale * Dot(query, k[j]));
    most = std::fmax(most, softmax.logits[j]);
  }
  for (const double logit : softmax.logits) sum += std::exp(logit - most);
  softmax.lse = keys == 0 ? -HUGE_VAL : most + std::log(sum);
  for (const double logit : softmax.logits) softmax.weights.push_back(std::exp(logit - softmax.lse));
  return softmax;
}

void ForReferenceHeads(const Call& call, const ValueInputs& in, const ConstTensorView& u, int64_t given,
                       const std::function<void(const ReferenceHead&)>& f) {
  for (const mechanism::TokenRange& s : call.sequences) {
    for (int64_t h = 0; h < call.Hkv; ++h) {
      ReferenceHead head;
      head.sequence = s;
      head.key_head = h;
      head.scale = call.scale;
      for (int64_t token = s.begin; token < s.end; ++token) {
        const auto i = static_cast<size_t>(token - s.begin);
        const int64_t own = token - call.first;  // in v, beta and w
        Vector w, r;
        ReferenceSoftmax W;
        double beta = 1;
        if (own >= 0) {
          w = ReferenceRow(call.w, s.batch, own, h);
          W = head.Softmax(w, i);
          r = Mean(W.weights, head.u, call.Dv);
          if (in.beta.present()) beta = At(in.beta, {s.batch, own, h});
        }
        Vector row = ReferenceRow(token < given ? u : in.v, s.batch, token < given ? token : own, h);
        if (token >= given) Add(-beta, r, row);
        head.k.push_back(ReferenceRow(in.k, s.batch, token, h));
        head.u.push_back(row);
        head.w.push_back(w);
        head.W.push_back(W);
        head.r.push_back(r);
        head.beta.push_back(beta);
      }
      f(head);
    }
  }
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  const Call call = CheckForward("deltaformer::Reference", in, options, out, true);
  ClearExcluded(call, out);
  ForReferenceHeads(call, ValuesOf(in), {}, 0, [&](const ReferenceHead& head) {
    const int64_t b = head.sequence.batch;
    for (size_t i = 0; i < head.u.size(); ++i) {
      const int64_t token = head.sequence.begin + static_cast<int64_t>(i);
      SetRow(out.u, b, token, head.key_head, head.u[i]);
      for (int64_t g = 0; g < call.group(); ++g) {
        const int64_t h = head.key_head * call.group() + g;
        const ReferenceSoftmax P = head.Softmax(ReferenceRow(in.q, b, token, h), i + 1);
        SetRow(out.o, b, token, h, Mean(P.weights, head.u, call.Dv));
        Set(out.lse, {b, h, token}, P.lse);
      }
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("deltaformer::BackwardReference", in, options, out, true);
  ClearExcluded(call, out);
  ForReferenceHeads(call, ValuesOf(in), in.u, call.T, [&](const ReferenceHead& head) {
    const int64_t b = head.sequence.batch, first = head.sequence.begin, kh = head.key_head;
    const size_t tokens = head.u.size();
    std::vector<Vector> du, dk(tokens, Vector(static_cast<size_t>(call.D)));
    for (size_t i = 0; i < tokens; ++i) {
      const int64_t token = first + static_cast<int64_t>(i);
      du.push_back(in.d_u.present() ? ReferenceRow(in.d_u, b, token, kh) : Vector(static_cast<size_t>(call.Dv)));
    }
    for (int64_t h = kh * call.group(); h < (kh + 1) * call.group(); ++h) {
      for (size_t i = 0; i < tokens; ++i) {
        const int64_t token = first + static_cast<int64_t>(i);
        const Vector q = ReferenceRow(in.q, b, token, h), d_o = ReferenceRow(in.d_o, b, token, h);
        const ReferenceSoftmax P = head.Softmax(q, i + 1);
        Vector of_weights, dq(static_cast<size_t>(call.D));
        for (size_t j = 0; j <= i; ++j) of_weights.push_back(Dot(d_o, head.u[j]));
        const Vector dS = OfLogits(P.weights, of_weights, in.d_lse.present() ? At(in.d_lse, {b, h, token}) : 0);
        for (size_t j = 0; j <= i; ++j) {
          Add(call.scale * dS[j], head.k[j], dq);
          Add(call.scale * dS[j], q, dk[j]);
          Add(P.weights[j], d_o, du[j]);
        }
        SetRow(out.dq, b, token, h, dq);
      }
    }
    for (size_t i = tokens; i-- > 0;) {  // du of a token is complete after all later ones
      const int64_t token = first + static_cast<int64_t>(i);
      SetRow(out.dv, b, token, kh, du[i]);
      Set(out.dbeta, {b, token, kh}, -Dot(head.r[i], du[i]));
      Vector dr(static_cast<size_t>(call.Dv)), of_weights, dw(static_cast<size_t>(call.D));
      Add(-head.beta[i], du[i], dr);
      for (size_t j = 0; j < i; ++j) of_weights.push_back(Dot(dr, head.u[j]));
      const Vector dR = OfLogits(head.W[i].weights, of_weights, 0);
      for (size_t j = 0; j < i; ++j) {
        Add(call.scale * dR[j], head.k[j], dw);
        Add(call.scale * dR[j], head.w[i], dk[j]);
        Add(head.W[i].weights[j], dr, du[j]);
      }
      SetRow(out.dw, b, token, kh, dw);
      if (!in.w.present()) Add(1, dw, dk[i]);
      SetRow(out.dk, b, token, kh, dk[i]);
    }
  });
}

void ValuesReference(const ValueInputs& in, std::optional<double> scale, const TensorView& u) {
  const Call call = CheckValues("deltaformer::ValuesReference", in, scale, u, true);
  ForReferenceHeads(call, in, u, call.first, [&](const ReferenceHead& head) {
    for (int64_t token = call.first; token < call.T; ++token) {
      SetRow(u, head.sequence.batch, token, head.key_head, head.u[static_cast<size_t>(token)]);
    }
  });
}

}  // namespace heed::deltaformer
