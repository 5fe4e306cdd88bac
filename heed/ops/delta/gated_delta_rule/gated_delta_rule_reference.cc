// The gated delta rule as it is defined, one token of one head: everything that it is.
//
//   S~_t = exp(log_decay_t) S_{t-1}      S: [K, V]
//   S_t = S~_t + beta_t k_t (v_t - S~_t^T k_t)^T
//   o_t = scale S_t^T q_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"

namespace heed::gated_delta_rule {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& beta, Array<Number>& S, Array<Number>& o) const {
    using std::exp;
    const Number a = exp(log_decay[0]);
    for (size_t j = 0; j < v.size(); ++j) {
      Number found = 0;  // what the decayed state has under this key
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) *= a;
        found += S(i, j) * k[i];
      }
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
  math.log_decay = recurrent::PerToken(in.log_decay);
  math.beta = true;
  return math;
}

}  // namespace heed::gated_delta_rule
