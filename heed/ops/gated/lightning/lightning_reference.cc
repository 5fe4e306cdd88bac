// Lightning attention as it is defined, one token of one head: everything that it is.
//
//   S_t = exp(log_decay) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/lightning/lightning_internal.h"

namespace heed::lightning {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, Array<Number>& S, Array<Number>& o) const {
    using std::exp;
    const Number a = exp(log_decay[0]);
    for (size_t j = 0; j < v.size(); ++j) {
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) = a * S(i, j) + k[i] * v[j];
        read += S(i, j) * q[i];
      }
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
  math.log_decay = recurrent::PerHead(in.log_decay);
  return math;
}

}  // namespace heed::lightning
