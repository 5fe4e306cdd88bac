// The references of ttt_linear, token by token, and bounds of their rounding errors, which are the references on
// numbers with a running error.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_reference_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using namespace test_time_training::reference;  // NOLINT: its matrices and norms

// One token in mathematical order, with what its gradients need. k and q end in 1, the input of b.
template <class R>
struct Token {
  int64_t at;
  bool ends;  // a mini-batch
  R eta, lr;
  Row<R> q, k;
  Training<R> trained;
  Norm<R> read;        // LN of what the query reads
  Matrix<R> W, G, Wt;  // part 0, the sum of gradients with this token's, what the query reads
};

// One head of one sequence.
template <class R>
struct Head {
  const Call& call;
  int64_t n, h;
  size_t K;
  Factors<R> norm;
  Matrix<R> W, G;
  std::vector<Token<R>> tokens;  // kept for gradients

  Head(const Call& of, const Inputs& in, int64_t sequence, int64_t head)
      : call(of), n(sequence), h(head), K(static_cast<size_t>(of.K)), norm(in.weight, in.bias, head), W(K + 1, K),
        G(K + 1, K) {
    LoadPart(in.initial_state, n, h, 0, W);
    if (call.offsets[static_cast<size_t>(n)] > 0) LoadPart(in.initial_state, n, h, 1, G);
  }

  // The passes of all tokens, in order. `keep` keeps them.
  void Forward(const Inputs& in, const TensorView& o, bool keep) {
    const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
    for (int64_t at = s.begin; at < s.end; ++at) {
      const bool ends = (call.offsets[static_cast<size_t>(n)] + at - s.begin + 1) % call.mini_batch == 0;
      const double lr = in.lr.present() ? Number(in.lr, {s.batch, at, h}) : 1;
      Token<R> t = {at, ends, Number(in.eta, {s.batch, at, h}), lr, {}, {}, {}, {}, W, G, W};
      Row<R> v;
      for (int64_t i = 0; i < call.K; ++i) {
        t.q.push_back(R(call.scale) * R(Number(in.q, {s.batch, at, h, i})));
        t.k.emplace_back(Number(in.k, {s.batch, at, h, i}));
        v.emplace_back(Number(in.v, {s.batch, at, h, i}));
      }
      t.q.emplace_back(1);
      t.k.emplace_back(1);

      t.trained = Train(W, t.k, v, norm, call.eps);
      AddOuter(t.lr, t.k, t.trained.g, G);
      t.G = G;
      for (size_t i = 0; i < G.elements.size(); ++i) t.Wt.elements[i] -= t.eta * G.elements[i];
      const Row<R> read = Read(t.Wt, t.q);
      t.read = Normalise(read, call.eps);
      for (size_t j = 0; j < K; ++j) {
        const R& summand = call.query_residual ? t.q[j] : read[j];
        Store(o, {s.batch, at, h, static_cast<int64_t>(j)}, summand + norm.w[j] * t.read.x[j] + norm.c[j]);
      }
      if (t.ends) {
        W = t.Wt;
        G = Matrix<R>(K + 1, K);
      }
      if (keep) tokens.push_back(std::move(t));
    }
  }

  // The gradients of all tokens, in reverse. `d_norm` has sums over sequences.
  void Backward(const BackwardInputs& in, const Gradients& out, Factors<R>& d_norm) {
    const int64_t batch = call.sequences[static_cast<size_t>(n)].batch;
    Matrix<R> dW(K + 1, K), dG(K + 1, K);  // of W and G after a token
    LoadPart(in.d_final_state, n, h, 0, dW);
    LoadPart(in.d_final_state, n, h, 1, dG);
    for (size_t at = tokens.size(); at-- > 0;) {
      const Token<R>& t = tokens[at];
      Matrix<R> dWt(K + 1, K);
      if (t.ends) {
        dWt = dW;
        dW = dG = Matrix<R>(K + 1, K);
      }
      // o = residual + w .* LN(Wt^T q) + c.
      Row<R> d_o, dx;
      for (size_t j = 0; j < K; ++j) {
        d_o.emplace_back(Number(in.d_o, {batch, t.at, h, static_cast<int64_t>(j)}));
        dx.push_back(norm.w[j] * d_o[j]);
        d_norm.w[j] += d_o[j] * t.read.x[j];
        d_norm.c[j] += d_o[j];
      }
      Row<R> d_read = GradientOfNorm(t.read, dx, R(0));
      if (!call.query_residual) {
        for (size_t j = 0; j < K; ++j) d_read[j] += d_o[j];
      }
      Row<R> dq = Times(t.Wt, d_read);
      AddOuter(R(1), t.q, d_read, dWt);
      for (size_t i = 0; i < K; ++i) {
        if (call.query_residual) dq[i] += d_o[i];
        Store(out.dq, {batch, t.at, h, static_cast<int64_t>(i)}, R(call.scale) * dq[i]);
      }
      // Wt = W - eta G.
      Store(out.deta, {batch, t.at, h}, -Inner(dWt, t.G));
      for (size_t i = 0; i < dW.elements.size(); ++i) {
        dW.elements[i] += dWt.elements[i];
        dG.elements[i] -= t.eta * dWt.elements[i];
      }
      // G += lr k g^T.
      const Row<R> dG_g = Times(dG, t.trained.g);
      Row<R> dg = Read(dG, t.k), dk, dv;
      Store(out.dlr, {batch, t.at, h}, Sum<R>(K + 1, [&](size_t i) { return t.k[i] * dG_g[i]; }));
      for (R& x : dg) x = t.lr * x;
      for (const R& x : dG_g) dk.push_back(t.lr * x);
      TrainBackward(t.trained, t.W, t.k, norm, dg, d_norm, dW, dk, dv);
      for (size_t i = 0; i < K; ++i) {
        Store(out.dk, {batch, t.at, h, static_cast<int64_t>(i)}, dk[i]);
        Store(out.dv, {batch, t.at, h, static_cast<int64_t>(i)}, dv[i]);
      }
    }
    // The first mini-batch begins with a sum of 0, unless it began before.
    if (call.offsets[static_cast<size_t>(n)] == 0) dG = Matrix<R>(K + 1, K);
    StorePart(out.dinitial_state, n, h, 0, dW);
    StorePart(out.dinitial_state, n, h, 1, dG);
  }
};

template <class R>
void RunForward(const Call& call, const Inputs& in, const Outputs& out) {
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.H; ++h) {
      Head<R> head(call, in, n, h);
      head.Forward(in, out.o, false);
      StorePart(out.final_state, n, h, 0, head.W);
      StorePart(out.final_state, n, h, 1, head.G);
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
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.deta, &out.dlr}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  RunForward<double>(CheckForward("ttt_linear::Reference", in, options, out, true), in, out);
}
void ReferenceBounds(const Inputs& in, const Options& options, const Outputs& out) {
  RunForward<Bounded>(CheckForward("ttt_linear::Reference", in, options, out, true), in, out);
}
void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  RunBackward<double>(CheckBackward("ttt_linear::BackwardReference", in, options, out, true), in, out);
}
void BackwardReferenceBounds(const BackwardInputs& in, const Options& options, const Gradients& out) {
  RunBackward<Bounded>(CheckBackward("ttt_linear::BackwardReference", in, options, out, true), in, out);
}

}  // namespace heed::ttt_linear
