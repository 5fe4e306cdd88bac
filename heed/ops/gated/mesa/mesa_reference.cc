// MesaNet as it is defined, and its gradient: states are made token by token, gradients are sums over pairs of tokens.
//
// They share only the checks with the kernels, and are to be read beside the header. Systems are solved by conjugate
// gradients, as in the kernels, or directly by Cholesky's factors.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "heed/ops/gated/mesa/mesa_internal.h"

namespace heed::mesa {
namespace {

using Index = std::initializer_list<int64_t>;
using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;

int64_t OffsetAt(const ConstTensorView& t, Index index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}
double At(const ConstTensorView& t, Index index) { return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index)); }
void Set(const TensorView& t, Index index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
Vector Times(const Matrix& a, const Vector& x) {
  Vector y;
  for (const Vector& row : a) y.push_back(Dot(row, x));
  return y;
}

Vector ByConjugateGradients(const Matrix& a, const Vector& b, int64_t iterations, double eps) {
  const auto quotient = [](double x, double by) { return x == 0 || by == 0 ? 0 : x / by; };
  Vector x(b.size()), r = b, p = b;
  const double converged = 1e-36 * Dot(b, b);
  for (int64_t n = 0; n < iterations && !(Dot(r, r) <= converged); ++n) {
    const Vector ap = Times(a, p);
    const double rr = Dot(r, r), step = quotient(rr, Dot(p, ap) + eps);
    for (size_t i = 0; i < b.size(); ++i) {
      x[i] += step * p[i];
      r[i] -= step * ap[i];
    }
    const double turn = quotient(Dot(r, r), rr + eps);
    for (size_t i = 0; i < b.size(); ++i) p[i] = r[i] + turn * p[i];
  }
  return x;
}

Vector ByCholesky(Matrix a, Vector b) {
  const size_t n = b.size();
  for (size_t j = 0; j < n; ++j) {  // a becomes L with A = L L^T
    for (size_t i = j; i < n; ++i) {
      for (size_t l = 0; l < j; ++l) a[i][j] -= a[i][l] * a[j][l];
      a[i][j] = i == j ? std::sqrt(a[j][j]) : a[i][j] / a[j][j];
    }
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t l = 0; l < i; ++l) b[i] -= a[i][l] * b[l];
    b[i] /= a[i][i];
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t l = i + 1; l < n; ++l) b[i] -= a[l][i] * b[l];
    b[i] /= a[i][i];
  }
  return b;
}

// One head of a sequence: its tokens in doubles, or their magnitudes.
struct Head {
  Solver solver;
  const Call& call;
  mechanism::TokenRange s;
  int64_t n, h, tokens;
  Matrix q, k, v, d_o;
  Vector gate, beta, lamb;
  Matrix state, magnitude;  // [K, K + V], after the tokens so far; of the magnitudes of what it is a sum of

  Head(Solver by, const Call& c, const Inputs& in, const ConstTensorView& of_o, int64_t sequence, int64_t head)
      : solver(by), call(c), s(c.sequences[static_cast<size_t>(sequence)]), n(sequence), h(head),
        tokens(s.end - s.begin), state(Initial(in.initial_state)), magnitude(state) {
    const auto rows = [&](const ConstTensorView& t, int64_t channels) {
      Matrix m;
      for (int64_t token = s.begin; token < s.end && t.present(); ++token) {
        m.emplace_back();
        for (int64_t i = 0; i < channels; ++i) m.back().push_back(At(t, {s.batch, token, h, i}));
      }
      return m;
    };
    q = rows(in.q, c.K);
    k = rows(in.k, c.K);
    v = rows(in.v, c.V);
    d_o = rows(of_o, c.V);
    for (int64_t token = s.begin; token < s.end; ++token) {
      const double g = in.log_decay.present() ? At(in.log_decay, {s.batch, token, h}) : 0;
      gate.push_back(std::exp(g > 0 ? 0 : g));
      beta.push_back(At(in.beta, {s.batch, token, h}));
    }
    for (int64_t i = 0; i < c.K; ++i) lamb.push_back(At(in.lamb, {h, i}));
    for (Vector& row : magnitude) {
      for (double& x : row) x = std::abs(x);
    }
  }

  Matrix Initial(const ConstTensorView& t) const {
    Matrix m(static_cast<size_t>(call.K), Vector(static_cast<size_t>(call.K + call.V)));
    for (size_t i = 0; i < m.size() && t.present(); ++i) {
      for (size_t j = 0; j < m[i].size(); ++j)
        m[i][j] = At(t, {n, h, static_cast<int64_t>(i), static_cast<int64_t>(j)});
    }
    return m;
  }

  // The row of k and v of a token.
  double KeyOrValue(size_t t, size_t j) const { return j < k[t].size() ? k[t][j] : v[t][j - k[t].size()]; }

  void Advance(size_t t) {
    for (size_t i = 0; i < state.size(); ++i) {
      for (size_t j = 0; j < state[i].size(); ++j) {
        const double written = beta[t] * k[t][i] * KeyOrValue(t, j);
        state[i][j] = gate[t] * state[i][j] + written;
        magnitude[i][j] = gate[t] * magnitude[i][j] + std::abs(written);
      }
    }
  }

  // At most the condition number: the Frobenius norm of the magnitudes of A over the least eigenvalue.
  double Condition() const {
    double sum = 0;
    for (size_t i = 0; i < state.size(); ++i) {
      for (size_t j = 0; j < state.size(); ++j) sum += std::pow(magnitude[i][j] + (i == j ? lamb[i] : 0), 2);
    }
    return std::sqrt(sum) / *std::min_element(lamb.begin(), lamb.end());
  }

  // A^-1 b. `error`: a bound of the error of b per unit of relative error, for magnitudes.
  Vector Solve(const Vector& b, const Vector& error) const {
    Matrix a = state;
    for (size_t i = 0; i < a.size(); ++i) {
      a[i].resize(a.size());
      a[i][i] += lamb[i];
    }
    if (solver == Solver::kConjugateGradients) return ByConjugateGradients(a, b, call.iterations, call.eps);
    Vector x = ByCholesky(a, b);
    if (solver == Solver::kCholesky) return x;
    const double most =
        Condition() * std::sqrt(Dot(x, x)) + std::sqrt(Dot(error, error)) / *std::min_element(lamb.begin(), lamb.end());
    return Vector(x.size(), most);
  }
  Vector Solution(size_t t) const { return Solve(q[t], Vector(q[t].size())); }

  // H_kv d_o.
  Vector Read(const Matrix& of, const Vector& row) const {
    Vector x(of.size());
    for (size_t i = 0; i < of.size(); ++i) {
      for (size_t j = 0; j < row.size(); ++j) x[i] += of[i][of.size() + j] * row[j];
    }
    return x;
  }
};

Vector Absolute(Vector x) {
  for (double& element : x) element = std::abs(element);
  return x;
}

// Calls f(head) for every head of every sequence.
template <class F>
void ForHeads(Solver solver, const Call& call, const Inputs& in, const ConstTensorView& d_o, const F& f) {
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.H; ++h) {
      Head head(solver, call, in, d_o, n, h);
      f(head);
    }
  }
}

}  // namespace

void ReferenceBy(Solver solver, const Inputs& in, const Options& options, const Outputs& out) {
  const Call call = CheckForward("mesa::Reference", in, options, out, true, false);
  for (const TensorView* t : {&out.o, &out.solution}) mechanism::ClearOthers(call.sequences, *t);
  ForHeads(solver, call, in, {}, [&](Head& head) {
    const bool magnitudes = solver == Solver::kMagnitudes;
    for (int64_t t = 0; t < head.tokens; ++t) {
      head.Advance(static_cast<size_t>(t));
      const Vector x = head.Solution(static_cast<size_t>(t));
      const Matrix& state = magnitudes ? head.magnitude : head.state;
      for (int64_t j = 0; j < call.V; ++j) {
        double o = 0;
        for (size_t i = 0; i < x.size(); ++i) o += x[i] * state[i][x.size() + static_cast<size_t>(j)];
        Set(out.o, {head.s.batch, head.s.begin + t, head.h, j}, o);
      }
      for (int64_t i = 0; i < call.K; ++i) {
        Set(out.solution, {head.s.batch, head.s.begin + t, head.h, i}, x[static_cast<size_t>(i)]);
      }
    }
    const Matrix& state = magnitudes ? head.magnitude : head.state;
    for (int64_t i = 0; i < call.K; ++i) {
      for (int64_t j = 0; j < call.K + call.V; ++j) {
        Set(out.final_state, {head.n, head.h, i, j}, state[static_cast<size_t>(i)][static_cast<size_t>(j)]);
      }
    }
  });
}

void BackwardReferenceBy(Solver solver, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("mesa::BackwardReference", in, options, out, true, false);
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dbeta, &out.dlog_decay}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
  const bool magnitudes = solver == Solver::kMagnitudes;
  const double minus = magnitudes ? 1 : -1;
  Matrix dlamb(static_cast<size_t>(call.H), Vector(static_cast<size_t>(call.K)));
  ForHeads(solver, call, in, in.d_o, [&](Head& head) {
    const auto T = static_cast<size_t>(head.tokens), K = static_cast<size_t>(call.K), V = static_cast<size_t>(call.V);
    const size_t h = static_cast<size_t>(head.h);
    Matrix x, y;
    Matrix S = head.Initial(in.initial_state), dS = head.Initial({}), last = head.Initial(in.d_final_state);
    for (size_t t = 0; t < T; ++t) {
      head.Advance(t);
      x.push_back(head.Solution(t));
      y.push_back(head.Solve(head.Read(head.state, head.d_o[t]), head.Read(head.magnitude, Absolute(head.d_o[t]))));
    }
    if (magnitudes) {
      for (Matrix* m : {&head.k, &head.v, &head.d_o, &S, &last}) {
        for (Vector& row : *m) row = Absolute(row);
      }
    }
    Matrix dk(T, Vector(K)), dv(T, Vector(V));
    Vector dbeta(T), dg(T + 1);
    // dg counts the terms that tokens of (s, t] are a factor of, and s = -1 is the initial state. With magnitudes,
    // every term counts for every token: the kernel's sums over a chunk have terms that cancel.
    const auto decays = [&](size_t after_s, size_t after_t, double term) {
      dg[magnitudes ? 0 : after_s] += term;
      dg[magnitudes ? T : after_t] -= term;
    };
    for (size_t t = 0; t < T; ++t) {
      for (size_t i = 0; i < K; ++i) {
        Set(out.dq, {head.s.batch, head.s.begin + static_cast<int64_t>(t), head.h, static_cast<int64_t>(i)}, y[t][i]);
        dlamb[h][i] += minus * y[t][i] * x[t][i];
      }
      double decay = 1;  // D_ts
      for (size_t s = t + 1; s-- > 0;) {
        const double xk = Dot(x[t], head.k[s]), yk = Dot(y[t], head.k[s]), dv_of = Dot(head.d_o[t], head.v[s]);
        const double weight = decay * head.beta[s], term = xk * dv_of + minus * yk * xk;
        dbeta[s] += decay * term;
        decays(s + 1, t + 1, weight * term);
        for (size_t i = 0; i < K; ++i) {
          dk[s][i] += weight * (dv_of * x[t][i] + minus * xk * y[t][i] + minus * yk * x[t][i]);
        }
        for (size_t j = 0; j < V; ++j) dv[s][j] += weight * xk * head.d_o[t][j];
        decay *= head.gate[s];
      }
      for (size_t i = 0; i < K; ++i) {
        for (size_t j = 0; j < K + V; ++j) {
          const double of_token = j < K ? minus * y[t][i] * x[t][j] : x[t][i] * head.d_o[t][j - K];
          dS[i][j] += decay * of_token;
          decays(0, t + 1, decay * of_token * S[i][j]);
        }
      }
    }
    double decay = 1;
    for (size_t s = T; s-- > 0;) {
      for (size_t i = 0; i < K; ++i) {
        for (size_t j = 0; j < K + V; ++j) {
          const double weight = decay * last[i][j], of = head.KeyOrValue(s, j);
          dbeta[s] += weight * head.k[s][i] * of;
          dk[s][i] += weight * head.beta[s] * of;
          (j < K ? dk[s][j] : dv[s][j - K]) += weight * head.beta[s] * head.k[s][i];
          decays(s + 1, T, weight * head.beta[s] * head.k[s][i] * of);
        }
      }
      decay *= head.gate[s];
    }
    for (size_t i = 0; i < K; ++i) {
      for (size_t j = 0; j < K + V; ++j) {
        dS[i][j] += decay * last[i][j];
        decays(0, T, decay * last[i][j] * S[i][j]);
        Set(out.dinitial_state, {head.n, head.h, static_cast<int64_t>(i), static_cast<int64_t>(j)}, dS[i][j]);
      }
    }
    double sum = 0;
    for (size_t t = 0; t < T; ++t) {
      sum += dg[t];
      const int64_t b = head.s.batch, at = head.s.begin + static_cast<int64_t>(t);
      for (size_t i = 0; i < K; ++i) Set(out.dk, {b, at, head.h, static_cast<int64_t>(i)}, dk[t][i]);
      for (size_t j = 0; j < V; ++j) Set(out.dv, {b, at, head.h, static_cast<int64_t>(j)}, dv[t][j]);
      Set(out.dbeta, {b, at, head.h}, dbeta[t]);
      Set(out.dlog_decay, {b, at, head.h}, sum);
    }
  });
  for (int64_t h = 0; h < call.H; ++h) {
    for (int64_t i = 0; i < call.K; ++i) {
      Set(out.dlamb, {h, i}, dlamb[static_cast<size_t>(h)][static_cast<size_t>(i)]);
    }
  }
}

double ConditionBound(const Inputs& in, const Options& options) {
  BackwardInputs checked;  // a call without results
  static_cast<Inputs&>(checked) = in;
  checked.d_o = in.v;
  const Call call = CheckBackward("mesa::ConditionBound", checked, options, {}, true, false);
  double most = 1;
  ForHeads(Solver::kCholesky, call, in, {}, [&](Head& head) {
    for (int64_t t = 0; t < head.tokens; ++t) {
      head.Advance(static_cast<size_t>(t));
      most = std::max(most, head.Condition());
    }
  });
  return most;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  ReferenceBy(Solver::kConjugateGradients, in, options, out);
}
void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  BackwardReferenceBy(Solver::kConjugateGradients, in, options, out);
}

}  // namespace heed::mesa
