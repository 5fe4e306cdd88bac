// The references of ttt_linear, token by token, and bounds of their rounding errors, which are the references on
// numbers with a running error.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "heed/mechanism/reference/running_error_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using mechanism::Bounded;
using mechanism::Sum;

template <class R>
using Row = std::vector<R>;

// A double is stored as it is, of a bounded number its bound.
double Stored(double x) { return x; }
double Stored(const Bounded& x) { return x.error; }

template <class R>
struct Matrix {  // [rows, columns]
  size_t columns = 0;
  Row<R> elements;

  Matrix(size_t rows, size_t of_columns) : columns(of_columns), elements(rows * of_columns) {}
  size_t rows() const { return elements.size() / columns; }
  R& at(size_t i, size_t j) { return elements[i * columns + j]; }
  const R& at(size_t i, size_t j) const { return elements[i * columns + j]; }
};

// M^T x, M y, and M += factor x y^T.
template <class R>
Row<R> Read(const Matrix<R>& M, const Row<R>& x) {
  Row<R> y(M.columns);
  for (size_t j = 0; j < y.size(); ++j) y[j] = Sum<R>(M.rows(), [&](size_t i) { return M.at(i, j) * x[i]; });
  return y;
}
template <class R>
Row<R> Times(const Matrix<R>& M, const Row<R>& y) {
  Row<R> x(M.rows());
  for (size_t i = 0; i < x.size(); ++i) x[i] = Sum<R>(M.columns, [&](size_t j) { return M.at(i, j) * y[j]; });
  return x;
}
template <class R>
void AddOuter(const R& factor, const Row<R>& x, const Row<R>& y, Matrix<R>& M) {
  for (size_t i = 0; i < M.rows(); ++i) {
    for (size_t j = 0; j < M.columns; ++j) M.at(i, j) += factor * x[i] * y[j];
  }
}
template <class R>
R Inner(const Matrix<R>& A, const Matrix<R>& B) {
  return Sum<R>(A.elements.size(), [&](size_t i) { return A.elements[i] * B.elements[i]; });
}
template <class R>
R Mean(const Row<R>& x) {
  return Sum<R>(x.size(), [&](size_t i) { return x[i]; }) / R(static_cast<double>(x.size()));
}

// x = centred r, with centred = z - mean(z) and r = 1 / sqrt(var(z) + eps).
template <class R>
struct Norm {
  Row<R> centred, x;
  R r;
};
template <class R>
Norm<R> Normalise(const Row<R>& z, double eps) {
  Norm<R> norm = {z, z, 0};
  const R mean = Mean(z), n = static_cast<double>(z.size());
  for (R& c : norm.centred) c = c - mean;
  const auto square = [&](size_t i) { return norm.centred[i] * norm.centred[i]; };
  norm.r = R(1) / mechanism::Root(Sum<R>(z.size(), square) / n + R(eps));
  for (size_t i = 0; i < z.size(); ++i) norm.x[i] = norm.centred[i] * norm.r;
  return norm;
}

// The gradient of z, given those of x and of r beyond x.
template <class R>
Row<R> GradientOfNorm(const Norm<R>& norm, const Row<R>& dx, R dr) {
  const size_t n = dx.size();
  const R size = static_cast<double>(n);
  dr += Sum<R>(n, [&](size_t i) { return dx[i] * norm.centred[i]; });
  const R dvar = R(-0.5) * dr * norm.r * norm.r * norm.r;
  Row<R> dz(n);
  for (size_t i = 0; i < n; ++i) dz[i] = dx[i] * norm.r + R(2) * dvar * norm.centred[i] / size;
  const R mean = Mean(dz);
  for (R& d : dz) d -= mean;
  return dz;
}

// One token in mathematical order, with what its gradients need. k and q end in 1, the input of b.
template <class R>
struct Token {
  int64_t at;
  bool ends;  // a mini-batch
  R eta, lr;
  Row<R> q, k, e, y, g;   // y = w .* e, the gradient of LN; g, that of z
  Norm<R> trained, read;  // LN of z, and of what the query reads
  R mean_y, mean_xy;
  Matrix<R> W, G, Wt;  // part 0, the sum of gradients with this token's, what the query reads
};

double Number(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0, axis = 0;
  for (const int64_t i : index) at += i * t.stride(static_cast<int>(axis++));
  return LoadAsDouble(t.dtype(), t.data(), at);
}
template <class R>
void Store(const TensorView& t, std::initializer_list<int64_t> index, const R& x) {
  if (!t.present()) return;
  int64_t at = 0, axis = 0;
  for (const int64_t i : index) at += i * t.stride(static_cast<int>(axis++));
  StoreDouble(t.dtype(), t.data(), at, Stored(x));
}

// One head of one sequence.
template <class R>
struct Head {
  const Call& call;
  int64_t n, h;
  size_t K;
  Row<R> w, c;
  Matrix<R> W, G;
  std::vector<Token<R>> tokens;  // kept for gradients

  Head(const Call& of, const Inputs& in, int64_t sequence, int64_t head)
      : call(of), n(sequence), h(head), K(static_cast<size_t>(of.K)), W(K + 1, K), G(K + 1, K) {
    for (int64_t j = 0; j < call.K; ++j) {
      w.emplace_back(Number(in.weight, {h, j}));
      c.emplace_back(Number(in.bias, {h, j}));
    }
    if (!in.initial_state.present()) return;
    const bool inside = call.offsets[static_cast<size_t>(n)] > 0;
    for (size_t i = 0; i <= K; ++i) {
      for (size_t j = 0; j < K; ++j) {
        const auto row = static_cast<int64_t>(i), column = static_cast<int64_t>(j);
        W.at(i, j) = Number(in.initial_state, {n, h, 0, row, column});
        if (inside) G.at(i, j) = Number(in.initial_state, {n, h, 1, row, column});
      }
    }
  }

  // The passes of all tokens, in order. `keep` keeps them.
  void Forward(const Inputs& in, const TensorView& o, bool keep) {
    const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
    for (int64_t at = s.begin; at < s.end; ++at) {
      const bool ends = (call.offsets[static_cast<size_t>(n)] + at - s.begin + 1) % call.mini_batch == 0;
      const double lr = in.lr.present() ? Number(in.lr, {s.batch, at, h}) : 1;
      Token<R> t = {at, ends, Number(in.eta, {s.batch, at, h}), lr, {}, {}, {}, {}, {}, {}, {}, {}, {}, W, G, W};
      for (int64_t i = 0; i < call.K; ++i) {
        t.q.push_back(R(call.scale) * R(Number(in.q, {s.batch, at, h, i})));
        t.k.emplace_back(Number(in.k, {s.batch, at, h, i}));
      }
      t.q.emplace_back(1);
      t.k.emplace_back(1);

      t.trained = Normalise(Read(W, t.k), call.eps);
      const Row<R>& x = t.trained.x;
      for (size_t j = 0; j < K; ++j) {
        t.e.push_back(w[j] * x[j] + c[j] - (R(Number(in.v, {s.batch, at, h, static_cast<int64_t>(j)})) - t.k[j]));
        t.y.push_back(w[j] * t.e[j]);
      }
      t.mean_y = Mean(t.y);
      t.mean_xy = Sum<R>(K, [&](size_t j) { return x[j] * t.y[j]; }) / R(static_cast<double>(K));
      for (size_t j = 0; j < K; ++j) t.g.push_back(t.trained.r * (t.y[j] - t.mean_y - x[j] * t.mean_xy));

      AddOuter(t.lr, t.k, t.g, G);
      t.G = G;
      for (size_t i = 0; i < G.elements.size(); ++i) t.Wt.elements[i] -= t.eta * G.elements[i];
      const Row<R> read = Read(t.Wt, t.q);
      t.read = Normalise(read, call.eps);
      for (size_t j = 0; j < K; ++j) {
        const R& summand = call.query_residual ? t.q[j] : read[j];
        Store(o, {s.batch, at, h, static_cast<int64_t>(j)}, summand + w[j] * t.read.x[j] + c[j]);
      }
      if (t.ends) {
        W = t.Wt;
        G = Matrix<R>(K + 1, K);
      }
      if (keep) tokens.push_back(std::move(t));
    }
  }

  static void StoreParts(const TensorView& t, int64_t n, int64_t h, const Matrix<R>& first, const Matrix<R>& second) {
    for (size_t i = 0; i < first.rows(); ++i) {
      for (size_t j = 0; j < first.columns; ++j) {
        const auto row = static_cast<int64_t>(i), column = static_cast<int64_t>(j);
        Store(t, {n, h, 0, row, column}, first.at(i, j));
        Store(t, {n, h, 1, row, column}, second.at(i, j));
      }
    }
  }

  // The gradients of all tokens, in reverse. `dw` and `dc` are sums over sequences.
  void Backward(const BackwardInputs& in, const Gradients& out, Row<R>& dw, Row<R>& dc) {
    const int64_t batch = call.sequences[static_cast<size_t>(n)].batch;
    const R size = static_cast<double>(K);
    Matrix<R> dW(K + 1, K), dG(K + 1, K);  // of W and G after a token
    for (size_t i = 0; in.d_final_state.present() && i <= K; ++i) {
      for (size_t j = 0; j < K; ++j) {
        const auto row = static_cast<int64_t>(i), column = static_cast<int64_t>(j);
        dW.at(i, j) = Number(in.d_final_state, {n, h, 0, row, column});
        dG.at(i, j) = Number(in.d_final_state, {n, h, 1, row, column});
      }
    }
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
        dx.push_back(w[j] * d_o[j]);
        dw[j] += d_o[j] * t.read.x[j];
        dc[j] += d_o[j];
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
      const Row<R> dG_g = Times(dG, t.g);
      Row<R> dg = Read(dG, t.k), dk;
      Store(out.dlr, {batch, t.at, h}, Sum<R>(K + 1, [&](size_t i) { return t.k[i] * dG_g[i]; }));
      for (R& x : dg) x = t.lr * x;
      for (const R& x : dG_g) dk.push_back(t.lr * x);
      // g = r (y - mean(y) - x mean(x y)).
      const Row<R>&x = t.trained.x, &y = t.y;
      const R& r = t.trained.r;
      const R dr = Sum<R>(K, [&](size_t j) { return dg[j] * (y[j] - t.mean_y - x[j] * t.mean_xy); });
      const R dmean_y = -r * Sum<R>(K, [&](size_t j) { return dg[j]; });
      const R dmean_xy = -r * Sum<R>(K, [&](size_t j) { return dg[j] * x[j]; });
      Row<R> dx_trained(K);
      for (size_t j = 0; j < K; ++j) {
        const R dy = r * dg[j] + dmean_y / size + dmean_xy * x[j] / size;
        // y = w .* e, e = w .* x + c - (v - k).
        const R de = w[j] * dy;
        dx_trained[j] = dmean_xy * y[j] / size - r * dg[j] * t.mean_xy + w[j] * de;
        dw[j] += t.e[j] * dy + x[j] * de;
        dc[j] += de;
        dk[j] += de;
        Store(out.dv, {batch, t.at, h, static_cast<int64_t>(j)}, -de);
      }
      const Row<R> dz = GradientOfNorm(t.trained, dx_trained, dr);
      // z = W^T k.
      const Row<R> of_z = Times(t.W, dz);
      AddOuter(R(1), t.k, dz, dW);
      for (size_t i = 0; i < K; ++i) Store(out.dk, {batch, t.at, h, static_cast<int64_t>(i)}, dk[i] + of_z[i]);
    }
    // The first mini-batch begins with a sum of 0, unless it began before.
    if (call.offsets[static_cast<size_t>(n)] == 0) dG = Matrix<R>(K + 1, K);
    StoreParts(out.dinitial_state, n, h, dW, dG);
  }
};

template <class R>
void RunForward(const Call& call, const Inputs& in, const Outputs& out) {
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.H; ++h) {
      Head<R> head(call, in, n, h);
      head.Forward(in, out.o, false);
      Head<R>::StoreParts(out.final_state, n, h, head.W, head.G);
    }
  }
  mechanism::ClearOthers(call.sequences, out.o);
}

template <class R>
void RunBackward(const Call& call, const BackwardInputs& in, const Gradients& out) {
  for (int64_t h = 0; h < call.H; ++h) {
    Row<R> dw(static_cast<size_t>(call.K)), dc(dw);
    for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
      Head<R> head(call, in, n, h);
      head.Forward(in, {}, true);
      head.Backward(in, out, dw, dc);
    }
    for (size_t j = 0; j < dw.size(); ++j) {
      Store(out.dweight, {h, static_cast<int64_t>(j)}, dw[j]);
      Store(out.dbias, {h, static_cast<int64_t>(j)}, dc[j]);
    }
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
