// Retention as it is defined, one token of one head: everything that it is.
//
//   S_t = exp(log_decay) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// where an absent log_decay is log(1 - 2^(-5 - head)).
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/retention/retention_internal.h"

namespace heed::retention {
namespace {

using mechanism::Array;

struct Token {
  double scale;
  bool given;  // log_decay is
  int64_t head = 0;

  Token OfHead(int64_t index) const { return {scale, given, index}; }

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, Array<Number>& S, Array<Number>& o) const {
    using std::exp;
    const Number a = given ? exp(log_decay[0]) : Number(1 - std::exp2(-5.0 - static_cast<double>(head)));
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

Token TokenOf(const Inputs& in, const Options& options) {
  return {recurrent::RootScale(in, options), in.log_decay.present()};
}

}  // namespace

HEED_DEFINE_REFERENCES

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  if (in.log_decay.present()) {
    math.log_decay = recurrent::PerHead(in.log_decay);
    return math;
  }
  math.log_decay = [](int64_t, int64_t, int64_t head, int64_t) {
    return std::log(1 - std::pow(2.0, static_cast<double>(-5 - head)));
  };
  return math;
}

}  // namespace heed::retention
