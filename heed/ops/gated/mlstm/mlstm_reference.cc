// The reference of mLSTM, in double: a gated recurrence of keys exp(i - M) k with one M for a whole head, the largest
// of all m. States are made relative to m at the end.
#include <algorithm>
#include <cmath>

#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"

namespace heed::mlstm {
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
  math.final_m = m;
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

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::mlstm
