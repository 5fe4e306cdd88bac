// GLA as it is defined, one token of one head: everything that it is.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} diag(exp(log_decay_v_t)) + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/gla/gla_internal.h"

namespace heed::gla {
namespace {

using mechanism::Array;

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

Token TokenOf(const Inputs& in, const Options& options) { return {recurrent::RootScale(in, options)}; }

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.log_decay_v = in.log_decay_v;
  return math;
}

}  // namespace heed::gla
