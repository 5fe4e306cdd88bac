// DeltaProduct as it is defined, one token of one head: everything that it is.
//
//   S_t^0 = exp(log_decay_t) S_{t-1}      S: [K, V]
//   S_t^n = S_t^{n-1} + beta_tn k_tn (v_tn - (S_t^{n-1})^T k_tn)^T,   n = 1 .. N
//   S_t = S_t^N,  o_t = scale S_t^T q_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/delta_product/delta_product_internal.h"

namespace heed::delta_product {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  // k is [N, K], v [N, V], beta [N].
  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& beta, Array<Number>& S, Array<Number>& o) const {
    using std::exp;
    const Number a = exp(log_decay[0]);
    for (size_t j = 0; j < o.size(); ++j) {
      for (size_t i = 0; i < q.size(); ++i) S(i, j) *= a;
      for (size_t n = 0; n < beta.size(); ++n) {
        Number found = 0;  // what the state has under this key
        for (size_t i = 0; i < q.size(); ++i) found += S(i, j) * k(n, i);
        const Number write = beta[n] * (v(n, j) - found);
        for (size_t i = 0; i < q.size(); ++i) S(i, j) += k(n, i) * write;
      }
      Number read = 0;
      for (size_t i = 0; i < q.size(); ++i) read += S(i, j) * q[i];
      o[j] = scale * read;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) { return {recurrent::RootScale(in, options)}; }

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  if (in.log_decay.present()) math.log_decay = recurrent::PerToken(in.log_decay);
  math.beta = true;
  math.several_writes = true;
  return math;
}

}  // namespace heed::delta_product
