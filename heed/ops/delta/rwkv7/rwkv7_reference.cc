// RWKV-7 as it is defined, one token of one head: everything that it is.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T r_t
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"

namespace heed::rwkv7 {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& r, const Array<Number>& log_decay, const Array<Number>& k,
                  const Array<Number>& v, const Array<Number>& a, const Array<Number>& b, Array<Number>& S,
                  Array<Number>& o) const {
    const Array<Number> w = Exp(log_decay);
    for (size_t j = 0; j < v.size(); ++j) {
      Number found = 0;  // what the state has under a, before its decay
      for (size_t i = 0; i < k.size(); ++i) found += S(i, j) * a[i];
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        S(i, j) = w[i] * S(i, j) + b[i] * found + k[i] * v[j];
        read += S(i, j) * r[i];
      }
      o[j] = scale * read;
    }
  }
};

Token TokenOf(const Inputs&, const Options& options) { return {options.scale.value_or(1)}; }

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = options.scale.value_or(1);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.read_key = &recurrent::ReferenceInputs::a;
  math.d_read_key = &recurrent::ReferenceGradients::a;
  math.reads_before_decay = true;
  return math;
}

}  // namespace heed::rwkv7
