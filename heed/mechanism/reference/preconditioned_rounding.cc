// The rounding errors of preconditioned keys and of their gradients.
//
// A is a sum of terms of one sign, unless its inputs are not: the error of each token's update is a few roundings of
// its terms, and decays with A. An error of log(A + eps) enters M divided by (1 + |r|)^2. The delta rule then has keys
// that write with a relative error, and the gradients of A pass back through the same decays.
#include "heed/mechanism/reference/preconditioned_rounding_internal.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/mechanism/reference/reference_tensor_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;
using mechanism::ReferenceTensor;

double Unit(const ConstTensorView& t) { return t.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24; }

// A channel of a token: A, M, and their errors.
struct Channel {
  double k, A, before, error_A, error_before;  // before: A of the previous token
  double r, error_r, below, M, relative_M;     // below: 1 / (1 + |r|)
  double sum, relative_sum;                    // A + eps
};

// The keys that write, in f64, and their largest relative error.
class Keys {
 public:
  Keys(const PreconditionedInputs& in, const Options& options, const PreconditionedMath& math)
      : read({in.rule.k.size(0), in.rule.k.size(1), in.rule.k.size(2), in.rule.k.size(3)}), written(read.sizes),
        ranges(mechanism::SequencesOf(options, read.sizes[0], read.sizes[1])), in_(in), options_(options), math_(math) {
    ForEachRow([&](size_t, int64_t b, int64_t h, const std::vector<int64_t>& tokens, int64_t i,
                   const std::vector<Channel>& row) {
      for (size_t t = 0; t < tokens.size(); ++t) {
        Put(read.view(), {b, tokens[t], h, i}, row[t].k);
        Put(written.view(), {b, tokens[t], h, i}, row[t].M * row[t].k);
        key_error = std::max(key_error, row[t].relative_M + Unit(in_.rule.q));
      }
    });
  }

  // Calls f(sequence, batch, key head, tokens, channel, row) for all channels of all heads; tokens are in the order of
  // processing.
  template <class F>
  void ForEachRow(const F& f) const {
    for (size_t s = 0; s < ranges.size(); ++s) {
      std::vector<int64_t> tokens;
      for (int64_t t = ranges[s].begin; t < ranges[s].end; ++t) tokens.push_back(t);
      if (options_.reverse) std::reverse(tokens.begin(), tokens.end());
      for (int64_t h = 0; h < read.sizes[2]; ++h) {
        for (int64_t i = 0; i < read.sizes[3]; ++i) {
          f(s, ranges[s].batch, h, tokens, i, RowOf(static_cast<int64_t>(s), ranges[s].batch, h, i, tokens));
        }
      }
    }
  }
  double Decay(int64_t b, int64_t t, int64_t h) const { return std::exp(At(in_.curvature.log_decay_A, {b, t, h})); }
  double Rate(int64_t b, int64_t t, int64_t h) const { return At(in_.curvature.beta_A, {b, t, h}); }

  // The delta rule with these keys.
  ReferenceBackwardInputs Rule() const {
    ReferenceBackwardInputs rule = in_.rule;
    rule.k = written.view();
    rule.p = read.view();
    return rule;
  }
  DeltaMath Math() const {
    DeltaMath math;
    math.scale = math_.scale;
    math.log_decay = math_.log_decay;
    math.beta = true;
    math.read_key = &ReferenceInputs::p;
    math.d_read_key = &ReferenceGradients::p;
    math.key_error = key_error;
    return math;
  }

  ReferenceTensor read, written;
  double key_error = 0;
  std::vector<mechanism::ReferenceSequence> ranges;

 private:
  std::vector<Channel> RowOf(int64_t sequence, int64_t b, int64_t h, int64_t i,
                             const std::vector<int64_t>& tokens) const {
    const double u = Unit(in_.rule.q), L = std::log(math_.bound);
    const double center = in_.curvature.center.present() ? At(in_.curvature.center, {h}) : -0.2;
    double A = in_.A.present() ? At(in_.A, {sequence, h, i}) : 0, error = 0;
    std::vector<Channel> row;
    for (const int64_t t : tokens) {
      Channel c;
      c.k = At(in_.rule.k, {b, t, h, i});
      c.before = A;
      c.error_before = error;
      const double a = Decay(b, t, h), rate = Rate(b, t, h), added = std::abs(rate) * c.k * c.k;
      A = a * A + rate * c.k * c.k;
      error = a * error + u * (8 * a * std::abs(c.before) + 4 * added + 2 * std::abs(A));
      c.A = A;
      c.error_A = error;
      c.sum = A + math_.eps;
      c.relative_sum = (error + 2 * u * (std::abs(A) + math_.eps)) / c.sum;
      const double log = std::log(c.sum);
      c.r = log - center;
      c.error_r = c.relative_sum + u * (5 * std::abs(log) + 2 * std::abs(center) + 2 * std::abs(c.r));
      c.below = 1 / (1 + std::abs(c.r));
      const double share = c.r * c.below;
      c.M = std::exp(-L * share);
      c.relative_M = L * (c.error_r * c.below * c.below + 8 * u * std::abs(share)) + 5 * u;
      row.push_back(c);
    }
    return row;
  }

  const PreconditionedInputs& in_;
  const Options& options_;
  const PreconditionedMath& math_;
};

}  // namespace

void Tolerance(const PreconditionedInputs& in, const Options& options, const PreconditionedMath& math,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance, const TensorView& tolerance_of_A) {
  const Keys keys(in, options, math);
  Tolerance(keys.Rule(), options, keys.Math(), expected, tolerance);
  const double underflow = EpsilonOf(in.rule.q.dtype()).underflow;
  keys.ForEachRow([&](size_t s, int64_t, int64_t h, const std::vector<int64_t>& tokens, int64_t i,
                      const std::vector<Channel>& row) {
    const double error = tokens.empty() ? 0 : row.back().error_A + underflow;
    Put(tolerance_of_A, {static_cast<int64_t>(s), h, i}, error);
  });
}

void BackwardTolerance(const PreconditionedInputs& in, const Options& options, const PreconditionedMath& math,
                       const PreconditionedGradients& expected, const PreconditionedGradients& tolerance) {
  const Keys keys(in, options, math);
  const double u = Unit(in.rule.q), L = std::log(math.bound);
  const Epsilon e = EpsilonOf(in.rule.q.dtype());
  ReferenceTensor d_written(keys.read.sizes), d_read(keys.read.sizes), of_written(keys.read.sizes),
      of_read(keys.read.sizes);
  KeyGradients(keys.Rule(), options, keys.Math(), d_written.view(), d_read.view());
  ReferenceGradients values = expected.rule, errors = tolerance.rule;
  values.k = d_written.view();
  values.p = d_read.view();
  errors.k = of_written.view();
  errors.p = of_read.view();
  BackwardTolerance(keys.Rule(), options, keys.Math(), values, errors);

  // Sums over channels, and over the tokens of a block.
  const double chain = u * (3.5 * std::sqrt(static_cast<double>(keys.read.sizes[3])) + 8);
  const double long_chain = u * (3.5 * std::sqrt(static_cast<double>(64 * keys.read.sizes[3])) + 8);
  const CurvatureTensors<TensorView>& of = tolerance.curvature;
  for (const TensorView& t : {tolerance.rule.k, of.log_decay_A, of.beta_A, of.center, tolerance.A}) mechanism::Clear(t);
  keys.ForEachRow([&](size_t s, int64_t b, int64_t h, const std::vector<int64_t>& tokens, int64_t i,
                      const std::vector<Channel>& row) {
    double dA = in.d_A.present() ? At(in.d_A, {static_cast<int64_t>(s), h, i}) : 0, error = 0;
    for (size_t t = tokens.size(); t-- > 0;) {
      const Channel& c = row[t];
      const int64_t token = tokens[t];
      const double a = keys.Decay(b, token, h), rate = keys.Rate(b, token, h), slope = L * c.below * c.below;
      const double dw = At(d_written.view(), {b, token, h, i}), dw_error = At(of_written.view(), {b, token, h, i});
      const double dr = -slope * c.M * c.k * dw;
      const double dr_error = slope * c.M * std::abs(c.k) * dw_error +
                              std::abs(dr) * (c.relative_M + 2 * (c.error_r * c.below + 4 * u) + 8 * u);
      Add(of.center, {h}, dr_error + long_chain * std::abs(dr));
      dA += dr / c.sum;
      error += dr_error / c.sum + std::abs(dr / c.sum) * (c.relative_sum + 3 * u) + u * std::abs(dA) + e.underflow;
      const double through = 2 * rate * c.k * dA, direct = c.M * dw, read = At(d_read.view(), {b, token, h, i});
      Add(tolerance.rule.k, {b, token, h, i},
          c.M * dw_error + std::abs(direct) * (c.relative_M + u) + At(of_read.view(), {b, token, h, i}) +
              2 * std::abs(rate * c.k) * error + 4 * u * (std::abs(through) + std::abs(direct) + std::abs(read)) +
              e.underflow);
      Add(of.beta_A, {b, token, h}, c.k * c.k * (error + chain * std::abs(dA)) + e.underflow);
      dA *= a;
      error = a * error + 8 * u * std::abs(dA);
      Add(of.log_decay_A, {b, token, h},
          std::abs(c.before) * (error + chain * std::abs(dA)) + c.error_before * std::abs(dA) + e.underflow);
    }
    Add(tolerance.A, {static_cast<int64_t>(s), h, i}, error + e.underflow);
  });

  // Conversion to the dtype of the result.
  const auto round = [&](const TensorView& to, const TensorView& value, const ConstTensorView& input) {
    if (!to.present()) return;
    const Epsilon rounded = StoredIn(input.dtype(), in.rule.q.dtype());
    for (int64_t n = 0; n < to.num_elements(); ++n) {
      int64_t rest = n, at = 0, from = 0;
      for (int axis = to.rank() - 1; axis >= 0; --axis) {
        at += rest % to.size(axis) * to.stride(axis);
        from += rest % to.size(axis) * value.stride(axis);
        rest /= to.size(axis);
      }
      const double error = LoadAsDouble(to.dtype(), to.data(), at);
      const double size = std::abs(LoadAsDouble(value.dtype(), value.data(), from));
      StoreDouble(to.dtype(), to.data(), at, error + size * (2 * u + rounded.output) + rounded.subnormal);
    }
  };
  round(tolerance.rule.k, expected.rule.k, in.rule.k);
  round(of.log_decay_A, expected.curvature.log_decay_A, in.curvature.log_decay_A);
  round(of.beta_A, expected.curvature.beta_A, in.curvature.beta_A);
  round(of.center, expected.curvature.center, in.curvature.center);
}

}  // namespace heed::recurrent
