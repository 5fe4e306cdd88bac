// The references of titans, token by token, and bounds of their rounding errors, which are the references on numbers
// with a running error.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_reference_internal.h"
#include "heed/ops/delta/titans/titans_internal.h"

namespace heed::titans {
namespace {

using namespace test_time_training::reference;  // NOLINT: its matrices and norms

// One token in mathematical order, with what its gradients need.
template <class R>
struct Token {
  int64_t at;
  bool begins;  // a mini-batch
  R theta, alpha, eta;
  Row<R> q, k;
  Training<R> trained;
  Norm<R> read;             // LN of what the query reads
  Matrix<R> A, M, S, M_of;  // A; M and S before the token; M after it
};

// to = factor to.
template <class R>
void Scale(const R& factor, Matrix<R>& to) {
  for (R& x : to.elements) x = factor * x;
}
template <class R>
void Add(const Matrix<R>& from, Matrix<R>& to) {
  for (size_t i = 0; i < to.elements.size(); ++i) to.elements[i] += from.elements[i];
}

// One head of one sequence.
template <class R>
struct Head {
  const Call& call;
  int64_t n, h;
  size_t K;
  Factors<R> norm;
  Matrix<R> M, S, A;
  std::vector<Token<R>> tokens;  // kept for gradients

  Head(const Call& of, const Inputs& in, int64_t sequence, int64_t head)
      : call(of), n(sequence), h(head), K(static_cast<size_t>(of.K)), norm(in.weight, in.bias, head), M(K, K), S(K, K),
        A(K, K) {
    LoadPart(in.initial_state, n, h, 0, M);
    LoadPart(in.initial_state, n, h, 1, S);
    if (Place(0) > 0) LoadPart(in.initial_state, n, h, 2, A);
  }

  // The place in its mini-batch of the token after `tokens_before` of the call, and of the one after all.
  int64_t Place(int64_t tokens_before) const {
    return (call.offsets[static_cast<size_t>(n)] + tokens_before) % call.mini_batch;
  }
  int64_t PlaceAfter() const {
    const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
    return Place(s.end - s.begin);
  }

  // The passes of all tokens, in order. `keep` keeps them.
  void Forward(const Inputs& in, const TensorView& o, bool keep) {
    const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
    for (int64_t at = s.begin; at < s.end; ++at) {
      const bool begins = Place(at - s.begin) == 0;
      if (begins) A = M;
      const auto number = [&](const ConstTensorView& of) { return R(Number(of, {s.batch, at, h})); };
      Token<R> t = {at, begins, number(in.theta), number(in.alpha), number(in.eta), {}, {}, {}, {}, A, M, S, M};
      Row<R> v;
      for (int64_t i = 0; i < call.K; ++i) {
        t.q.push_back(R(call.scale) * R(Number(in.q, {s.batch, at, h, i})));
        t.k.emplace_back(Number(in.k, {s.batch, at, h, i}));
        v.emplace_back(Number(in.v, {s.batch, at, h, i}));
      }
      // d/dA |e|^2 = 2 k g^T.
      t.trained = Train(A, t.k, v, norm, call.eps);
      Scale(t.eta, S);
      AddOuter(R(-2) * t.theta, t.k, t.trained.g, S);
      Scale(R(1) - t.alpha, M);
      Add(S, M);
      t.M_of = M;
      const Row<R> read = Read(M, t.q);
      t.read = Normalise(read, call.eps);
      for (size_t j = 0; j < K; ++j) {
        Store(o, {s.batch, at, h, static_cast<int64_t>(j)}, read[j] + norm.w[j] * t.read.x[j] + norm.c[j]);
      }
      if (keep) tokens.push_back(std::move(t));
    }
    if (PlaceAfter() == 0) A = Matrix<R>(K, K);
  }

  // The gradients of all tokens, in reverse. `d_norm` has sums over sequences.
  void Backward(const BackwardInputs& in, const Gradients& out, Factors<R>& d_norm) {
    const int64_t batch = call.sequences[static_cast<size_t>(n)].batch;
    Matrix<R> dM(K, K), dS(K, K), dA(K, K);  // of M and S after a token, and of its A
    LoadPart(in.d_final_state, n, h, 0, dM);
    LoadPart(in.d_final_state, n, h, 1, dS);
    if (PlaceAfter() > 0) LoadPart(in.d_final_state, n, h, 2, dA);
    for (size_t at = tokens.size(); at-- > 0;) {
      const Token<R>& t = tokens[at];
      // o = y + w .* LN(y) + c, y = M^T q.
      Row<R> d_o, dx;
      for (size_t j = 0; j < K; ++j) {
        d_o.emplace_back(Number(in.d_o, {batch, t.at, h, static_cast<int64_t>(j)}));
        dx.push_back(norm.w[j] * d_o[j]);
        d_norm.w[j] += d_o[j] * t.read.x[j];
        d_norm.c[j] += d_o[j];
      }
      Row<R> dy = GradientOfNorm(t.read, dx, R(0));
      for (size_t j = 0; j < K; ++j) dy[j] += d_o[j];
      const Row<R> dq = Times(t.M_of, dy);
      AddOuter(R(1), t.q, dy, dM);
      // M = (1 - alpha) M + S.
      Store(out.dalpha, {batch, t.at, h}, -Inner(dM, t.M));
      Add(dM, dS);
      Scale(R(1) - t.alpha, dM);
      // S = eta S - 2 theta k g^T.
      Store(out.deta, {batch, t.at, h}, Inner(dS, t.S));
      const Row<R> dS_g = Times(dS, t.trained.g);
      Store(out.dtheta, {batch, t.at, h}, R(-2) * Sum<R>(K, [&](size_t i) { return t.k[i] * dS_g[i]; }));
      Row<R> dg = Read(dS, t.k), dk, dv;
      for (R& x : dg) x = R(-2) * t.theta * x;
      for (const R& x : dS_g) dk.push_back(R(-2) * t.theta * x);
      Scale(t.eta, dS);
      TrainBackward(t.trained, t.A, t.k, norm, dg, d_norm, dA, dk, dv);
      if (t.begins) {
        Add(dA, dM);
        dA = Matrix<R>(K, K);
      }
      for (size_t i = 0; i < K; ++i) {
        const auto column = static_cast<int64_t>(i);
        Store(out.dq, {batch, t.at, h, column}, R(call.scale) * dq[i]);
        Store(out.dk, {batch, t.at, h, column}, dk[i]);
        Store(out.dv, {batch, t.at, h, column}, dv[i]);
      }
    }
    StorePart(out.dinitial_state, n, h, 0, dM);
    StorePart(out.dinitial_state, n, h, 1, dS);
    StorePart(out.dinitial_state, n, h, 2, dA);
  }
};

template <class R>
void RunForward(const Call& call, const Inputs& in, const Outputs& out) {
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.H; ++h) {
      Head<R> head(call, in, n, h);
      head.Forward(in, out.o, false);
      StorePart(out.final_state, n, h, 0, head.M);
      StorePart(out.final_state, n, h, 1, head.S);
      StorePart(out.final_state, n, h, 2, head.A);
    }
  }
  mechanism::ClearOthers(call.sequences, out.o);
}

template <class R>
void RunBackward(const Call& call, const BackwardInputs& in, const Gradients& out) {
  for (int64_t h = 0; h < call.H; ++h) {
    Factors<R> d_norm(call.K);
    for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
      Head<R> head(call, in, n, h);
      head.Forward(in, {}, true);
      head.Backward(in, out, d_norm);
    }
    d_norm.Store(out.dweight, out.dbias, h);
  }
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dtheta, &out.dalpha, &out.deta}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  RunForward<double>(CheckForward("titans::Reference", in, options, out, true), in, out);
}
void ReferenceBounds(const Inputs& in, const Options& options, const Outputs& out) {
  RunForward<Bounded>(CheckForward("titans::Reference", in, options, out, true), in, out);
}
void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  RunBackward<double>(CheckBackward("titans::BackwardReference", in, options, out, true), in, out);
}
void BackwardReferenceBounds(const BackwardInputs& in, const Options& options, const Gradients& out) {
  RunBackward<Bounded>(CheckBackward("titans::BackwardReference", in, options, out, true), in, out);
}

}  // namespace heed::titans
