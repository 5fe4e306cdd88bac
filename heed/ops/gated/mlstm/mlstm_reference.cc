// mLSTM as it is defined, one token of one head: everything that it is.
//
//   m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)                            a constant, without a gradient
//   a_t = exp(log sigmoid(f_t) + m_{t-1} - m_t),  b_t = exp(i_t - m_t)
//   S_t = a_t S_{t-1} + b_t k_t v_t^T                                     S: [K, V]
//   z_t = a_t z_{t-1} + b_t k_t                                           z: [K]
//   o_t = scale S_t^T q_t / (max(|scale z_t . q_t|, exp(-m_t)) + eps)
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"

namespace heed::mlstm {
namespace {

using mechanism::Array;
using mechanism::ValueOf;

struct Token {
  double scale, eps;

  // i, f and m have one element.
  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v, const Array<Number>& i,
                  const Array<Number>& f, Array<Number>& S, Array<Number>& z, Array<Number>& m,
                  Array<Number>& o) const {
    using std::abs;
    using std::exp;
    const Number log_sigmoid = -mechanism::Softplus(-f[0]);
    const double before = ValueOf(m[0]), now = std::max(ValueOf(log_sigmoid) + before, ValueOf(i[0]));
    const Number a = exp(log_sigmoid - (now - before)), b = exp(i[0] - now);
    m[0] = now;
    Number sum = 0;
    for (size_t c = 0; c < k.size(); ++c) {
      z[c] = a * z[c] + b * k[c];
      sum += z[c] * q[c];
    }
    const Number size = abs(scale * sum), floor = std::exp(-now);
    const Number denominator = (size > floor ? size : floor) + eps;
    for (size_t j = 0; j < v.size(); ++j) {
      Number read = 0;
      for (size_t c = 0; c < k.size(); ++c) {
        S(c, j) = a * S(c, j) + b * k[c] * v[j];
        read += S(c, j) * q[c];
      }
      o[j] = scale * read / denominator;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) { return {recurrent::RootScale(in, options), options.eps}; }

}  // namespace

HEED_DEFINE_REFERENCES

// Tolerances: a gated recurrence of keys exp(i - M) k with one M for a whole head, the largest of all m. States are
// made relative to m at the end.
namespace {

using mechanism::At;
using mechanism::Doubles;
using recurrent::Epsilon;
using recurrent::ReferenceMath;
using recurrent::ReferencePlace;

double LogSigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

ReferenceMath MathOfHead(const Inputs& in, const Options& options, const ReferencePlace& place) {
  ReferenceMath math;
  math.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  math.normalize = true;
  math.log_decay = [f = in.f](int64_t b, int64_t t, int64_t head, int64_t) { return LogSigmoid(At(f, {b, t, head})); };
  const double before = in.initial.m.present() ? At(in.initial.m, {place.sequence, place.head}) : 0;
  Doubles maxima;
  double m = before, largest = before, size = std::abs(before);
  for (const int64_t t : place.tokens) {
    m = std::max(math.log_decay(place.batch, t, place.head, 0) + m, At(in.i, {place.batch, t, place.head}));
    maxima.push_back(m);
    largest = std::max(largest, m);
    size = std::max(size, std::abs(m));
  }
  for (size_t i = 0; i < place.tokens.size(); ++i) {
    const int64_t t = place.tokens[i];
    math.key_factors.push_back(std::exp(At(in.i, {place.batch, t, place.head}) - largest));
    math.floors.push_back(std::exp(-largest));
    math.epsilons.push_back(options.eps * std::exp(maxima[i] - largest));
    math.forget_slopes.push_back(1 / (1 + std::exp(At(in.f, {place.batch, t, place.head}))));
  }
  math.initial_factor = std::exp(before - largest);
  math.final_factor = std::exp(largest - m);
  // Log decays, and the exponents of keys and floors, have an error of a few roundings of themselves; m has in addition
  // one rounding at each end of a chunk of 64 tokens.
  const Epsilon e = recurrent::EpsilonOf(in.q.dtype());
  const double blocks = static_cast<double>(place.tokens.size()) / 64 + 1;
  math.log_decay_error = e.base;
  math.m_error = e.base * size * (1 + blocks / 4);
  math.value_error = math.m_error + e.base;
  return math;
}

}  // namespace

ReferenceMath Math(const Inputs& in, const Options& options) {
  ReferenceMath math;
  math.of_head = [in, options](const ReferencePlace& place) { return MathOfHead(in, options, place); };
  return math;
}

}  // namespace heed::mlstm
