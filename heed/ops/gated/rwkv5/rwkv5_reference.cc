// RWKV-5 as it is defined, one token of one head: everything that it is.
//
//   o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t      S: [K, V]
//   S_t = diag(exp(log_decay)) S_{t-1} + k_t v_t^T
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"

namespace heed::rwkv5 {
namespace {

using mechanism::Array;

struct Token {
  double scale;

  template <class Number>
  void operator()(const Array<Number>& r, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& u, Array<Number>& S, Array<Number>& o) const {
    const Array<Number> a = Exp(log_decay);
    for (size_t j = 0; j < v.size(); ++j) {
      Number read = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        const Number written = k[i] * v[j];
        read += (S(i, j) + u[i] * written) * r[i];
        S(i, j) = a[i] * S(i, j) + written;
      }
      o[j] = scale * read;
    }
  }
};

Token TokenOf(const Inputs&, const Options& options) { return {options.scale.value_or(1)}; }

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = options.scale.value_or(1);
  math.log_decay = recurrent::PerHeadChannel(in.log_decay);
  math.bonus = true;
  return math;
}

}  // namespace heed::rwkv5
