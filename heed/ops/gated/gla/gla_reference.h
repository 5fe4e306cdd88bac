// GLA as it is defined, one token of one head: everything that it is.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} diag(exp(log_decay_v_t)) + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
#ifndef HEED_OPS_GATED_GLA_GLA_REFERENCE_H_
#define HEED_OPS_GATED_GLA_GLA_REFERENCE_H_

#include <cstddef>

#include "heed/mechanism/reference/reference_array_internal.h"

namespace heed::gla {

template <class Number>
using Array = mechanism::Array<Number>;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& log_decay_v, Array<Number>& S,
                  Array<Number>& o) const {
    const Array<Number> a = Exp(log_decay), b = Exp(log_decay_v);
    for (size_t i = 0; i < k.size(); ++i) {
      for (size_t j = 0; j < v.size(); ++j) S(i, j) = a[i] * S(i, j) * b[j] + k[i] * v[j];
    }
    for (size_t j = 0; j < v.size(); ++j) {
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) read += S(i, j) * q[i];
      o[j] = scale * read;
    }
  }
};

}  // namespace heed::gla

#endif  // HEED_OPS_GATED_GLA_GLA_REFERENCE_H_
