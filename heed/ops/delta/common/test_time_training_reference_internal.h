// References of memories that are trained while they read: what those of the mechanisms share. R is double, or a number
// with a running error.
#ifndef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_REFERENCE_INTERNAL_H_
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/mechanism/reference/running_error_internal.h"

namespace heed::test_time_training::reference {

using mechanism::Bounded;
using mechanism::Sum;

template <class R>
using Row = std::vector<R>;

// A double is stored as it is, of a bounded number its bound.
inline double Stored(double x) { return x; }
inline double Stored(const Bounded& x) { return x.error; }

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

inline double Number(const ConstTensorView& t, std::initializer_list<int64_t> index) {
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

// Part `part` of a state, from and to tensors [N, H, parts, rows, K].
template <class R>
void LoadPart(const ConstTensorView& t, int64_t n, int64_t h, int64_t part, Matrix<R>& M) {
  for (size_t i = 0; t.present() && i < M.rows(); ++i) {
    for (size_t j = 0; j < M.columns; ++j) {
      M.at(i, j) = Number(t, {n, h, part, static_cast<int64_t>(i), static_cast<int64_t>(j)});
    }
  }
}
template <class R>
void StorePart(const TensorView& t, int64_t n, int64_t h, int64_t part, const Matrix<R>& M) {
  for (size_t i = 0; i < M.rows(); ++i) {
    for (size_t j = 0; j < M.columns; ++j) {
      Store(t, {n, h, part, static_cast<int64_t>(i), static_cast<int64_t>(j)}, M.at(i, j));
    }
  }
}

// The layer norm of a head, or the gradients of it.
template <class R>
struct Factors {
  Row<R> w, c;

  explicit Factors(int64_t K) : w(static_cast<size_t>(K)), c(w) {}
  Factors(const ConstTensorView& weight, const ConstTensorView& bias, int64_t h) {
    for (int64_t j = 0; j < weight.size(1); ++j) {
      w.emplace_back(Number(weight, {h, j}));
      c.emplace_back(Number(bias, {h, j}));
    }
  }

  void Store(const TensorView& weight, const TensorView& bias, int64_t h) const {
    for (size_t j = 0; j < w.size(); ++j) {
      reference::Store(weight, {h, static_cast<int64_t>(j)}, w[j]);
      reference::Store(bias, {h, static_cast<int64_t>(j)}, c[j]);
    }
  }
};

// A token that trains the memory A.
template <class R>
struct Training {
  Norm<R> norm;    // LN of z = A^T k
  Row<R> e, y, g;  // e = w .* x + c - (v - k); y = w .* e, the gradient of LN; g, that of z
  R mean_y, mean_xy;
};
template <class R>
Training<R> Train(const Matrix<R>& A, const Row<R>& k, const Row<R>& v, const Factors<R>& of, double eps) {
  Training<R> t;
  t.norm = Normalise(Read(A, k), eps);
  const Row<R>& x = t.norm.x;
  const size_t K = v.size();
  for (size_t j = 0; j < K; ++j) {
    t.e.push_back(of.w[j] * x[j] + of.c[j] - (v[j] - k[j]));
    t.y.push_back(of.w[j] * t.e[j]);
  }
  t.mean_y = Mean(t.y);
  t.mean_xy = Sum<R>(K, [&](size_t j) { return x[j] * t.y[j]; }) / R(static_cast<double>(K));
  for (size_t j = 0; j < K; ++j) t.g.push_back(t.norm.r * (t.y[j] - t.mean_y - x[j] * t.mean_xy));
  return t;
}

// Adds what the gradient of g gives to those of w, c, A and k; sets that of v.
template <class R>
void TrainBackward(const Training<R>& t, const Matrix<R>& A, const Row<R>& k, const Factors<R>& of, const Row<R>& dg,
                   Factors<R>& d_of, Matrix<R>& dA, Row<R>& dk, Row<R>& dv) {
  // g = r (y - mean(y) - x mean(x y)).
  const size_t K = dg.size();
  const R size = static_cast<double>(K);
  const Row<R>&x = t.norm.x, &y = t.y;
  const R& r = t.norm.r;
  const R dr = Sum<R>(K, [&](size_t j) { return dg[j] * (y[j] - t.mean_y - x[j] * t.mean_xy); });
  const R dmean_y = -r * Sum<R>(K, [&](size_t j) { return dg[j]; });
  const R dmean_xy = -r * Sum<R>(K, [&](size_t j) { return dg[j] * x[j]; });
  Row<R> dx(K);
  dv.resize(K);
  for (size_t j = 0; j < K; ++j) {
    const R dy = r * dg[j] + dmean_y / size + dmean_xy * x[j] / size;
    // y = w .* e, e = w .* x + c - (v - k).
    const R de = of.w[j] * dy;
    dx[j] = dmean_xy * y[j] / size - r * dg[j] * t.mean_xy + of.w[j] * de;
    d_of.w[j] += t.e[j] * dy + x[j] * de;
    d_of.c[j] += de;
    dk[j] += de;
    dv[j] = -de;
  }
  const Row<R> dz = GradientOfNorm(t.norm, dx, dr);
  // z = A^T k.
  const Row<R> of_z = Times(A, dz);
  AddOuter(R(1), k, dz, dA);
  for (size_t i = 0; i < K; ++i) dk[i] = dk[i] + of_z[i];
}

}  // namespace heed::test_time_training::reference

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_REFERENCE_INTERNAL_H_
