// The gated delta rule with two gates as it is defined, one token of one head: everything that it is.
//
//   S~_t = diag(exp(log_decay_t)) S_{t-1}      S: [K, V]
//   S_t = S~_t + k_t (write_t .* v_t - S~_t^T (erase_t .* k_t))^T
//   o_t = scale S_t^T q_t
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/gdn2/gdn2_internal.h"

namespace heed::gdn2 {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& erase, const Array<Number>& write,
                  Array<Number>& S, Array<Number>& o) const {
    const Array<Number> a = Exp(log_decay);
    for (size_t j = 0; j < v.size(); ++j) {
      Number found = 0;  // what the decayed state has under the key that erases
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) *= a[i];
        found += S(i, j) * (erase[i] * k[i]);
      }
      const Number written = write[j] * v[j] - found;
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) += k[i] * written;
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
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.erase_and_write = true;
  return math;
}

}  // namespace heed::gdn2
