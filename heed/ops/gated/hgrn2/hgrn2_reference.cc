// HGRN2 as it is defined, one token of one head: everything that it is.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} + (1 - exp(log_decay_t)) i_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"

namespace heed::hgrn2 {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& log_decay, const Array<Number>& i, Array<Number>& S,
                  Array<Number>& o) const {
    using std::expm1;
    const Array<Number> a = Exp(log_decay);
    for (size_t j = 0; j < i.size(); ++j) {
      Number read = 0;
      for (size_t c = 0; c < q.size(); ++c) {
        S(c, j) = a[c] * S(c, j) - expm1(log_decay[c]) * i[j];
        read += S(c, j) * q[c];
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
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.complement_keys = true;
  return math;
}

}  // namespace heed::hgrn2
