// Preconditioned Kimi delta attention as it is defined, one token of one head: everything that it is.
//
//   A_t = exp(log_decay_A_t) A_{t-1} + beta_A_t k_t^2      A: [K]
//   r_t = log(A_t + eps) - center,  w_t = bound^(-r_t / (1 + |r_t|)) .* k_t
//   S~_t = diag(exp(log_decay_t)) S_{t-1}      S: [K, V]
//   S_t = S~_t + beta_t w_t (v_t - S~_t^T k_t)^T
//   o_t = scale S_t^T q_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/precond_kda/precond_kda_internal.h"

namespace heed::precond_kda {
namespace {

using mechanism::Array;

struct Token {
  double scale, log_bound, eps;
  bool has_center;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& beta, const Array<Number>& log_decay_A,
                  const Array<Number>& beta_A, const Array<Number>& center, Array<Number>& S, Array<Number>& A,
                  Array<Number>& o) const {
    using std::abs, std::exp, std::log;
    const Array<Number> a = Exp(log_decay);
    Array<Number> w(k.size());  // the key that is written
    for (size_t i = 0; i < k.size(); ++i) {
      A[i] = exp(log_decay_A[0]) * A[i] + beta_A[0] * k[i] * k[i];
      const Number r = log(A[i] + eps) - (has_center ? center[0] : Number(-0.2));
      w[i] = exp(-log_bound * r / (1 + abs(r))) * k[i];
    }
    for (size_t j = 0; j < v.size(); ++j) {
      Number found = 0;  // what the decayed state has under this key
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) *= a[i];
        found += S(i, j) * k[i];
      }
      const Number write = beta[0] * (v[j] - found);
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) += w[i] * write;
        read += S(i, j) * q[i];
      }
      o[j] = scale * read;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) {
  return {recurrent::RootScale(in, options), std::log(options.bound), options.eps, in.center.present()};
}

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::PreconditionedMath Math(const Inputs& in, const Options& options) {
  return {recurrent::RootScale(in, options), recurrent::PerTokenChannel(in.log_decay), options.bound, options.eps};
}

}  // namespace heed::precond_kda
