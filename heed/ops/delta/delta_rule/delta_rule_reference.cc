// The delta rule as it is defined, one token of one head: everything that it is.
//
//   S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T      S: [K, V]
//   o_t = scale S_t^T q_t
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"

namespace heed::delta_rule {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v, const Array<Number>& beta,
                  Array<Number>& S, Array<Number>& o) const {
    for (size_t j = 0; j < v.size(); ++j) {
      Number found = 0;  // what the state has under this key
      for (size_t i = 0; i < k.size(); ++i) found += S(i, j) * k[i];
      const Number write = beta[0] * (v[j] - found);
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) += k[i] * write;
        read += S(i, j) * q[i];
      }
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
  math.beta = true;
  return math;
}

}  // namespace heed::delta_rule
