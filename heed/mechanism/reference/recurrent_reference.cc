// Conversion of a call to heads of doubles, and the rounding errors of results.
#include <algorithm>
#include <cmath>
#include <vector>

#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Clear;
using mechanism::Put;
using mechanism::ReferenceHead;
using mechanism::ReferenceHeadGradients;
using mechanism::ReferenceHeadOutputs;

Doubles Row(const ConstTensorView& t, int64_t b, int64_t token, int64_t head) {
  Doubles row;
  for (int64_t i = 0; i < t.size(3); ++i) row.push_back(At(t, {b, token, head, i}));
  return row;
}

void Append(Doubles& to, const Doubles& from) { to.insert(to.end(), from.begin(), from.end()); }

using Place = ReferencePlace;

template <class F>
void ForEachHead(const ReferenceInputs& in, const Options& options, const F& f) {
  mechanism::RequireRank(in.q, 4);
  mechanism::RequireRank(in.v, 4);
  const int64_t H = in.q.size(2), HV = in.v.size(2);
  const auto ranges = mechanism::SequencesOf(options, in.q.size(0), in.q.size(1));
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (int64_t h = 0; h < HV; ++h) {
      Place place = {static_cast<int64_t>(i), ranges[i].batch, h, h / (HV / H), {}};
      for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) place.tokens.push_back(t);
      if (options.reverse) std::reverse(place.tokens.begin(), place.tokens.end());
      f(place);
    }
  }
}

Doubles StateOf(const ConstTensorView& t, const Place& place, size_t size) {
  Doubles state;
  if (!t.present()) return Doubles(size, 0.0);
  for (int64_t i = 0; i < t.size(2); ++i) {
    if (t.rank() == 3) {
      state.push_back(At(t, {place.sequence, place.head, i}));
      continue;
    }
    for (int64_t j = 0; j < t.size(3); ++j) {
      state.push_back(At(t, {place.sequence, place.head, i, j}));
    }
  }
  return state;
}

template <class F>
void PutState(const TensorView& t, const Place& place, const Doubles& state, const F& f) {
  if (!t.present()) return;
  size_t at = 0;
  for (int64_t i = 0; i < t.size(2); ++i) {
    if (t.rank() == 3) {
      f(t, std::initializer_list<int64_t>{place.sequence, place.head, i}, state[at++]);
      continue;
    }
    for (int64_t j = 0; j < t.size(3); ++j) {
      f(t, std::initializer_list<int64_t>{place.sequence, place.head, i, j}, state[at++]);
    }
  }
}

void Scale(Doubles& x, double factor) {
  for (double& value : x) value *= factor;
}

ReferenceHead HeadOf(const ReferenceInputs& in, const ReferenceMath& math, const Place& place) {
  ReferenceHead head;
  head.T = place.tokens.size();
  head.V = static_cast<size_t>(in.v.size(3));
  head.normalize = math.normalize;
  head.eps = math.eps;
  head.floors = math.floors;
  head.epsilons = math.epsilons;
  const int64_t channels = in.q.size(3);
  const auto feature = [&](const Doubles& x) { return math.feature ? math.feature(x) : x; };
  const auto key_feature = [&](const Doubles& x) { return math.key_feature ? math.key_feature(x) : feature(x); };
  head.K = feature(Doubles(static_cast<size_t>(channels), 0.0)).size();
  for (const int64_t t : place.tokens) {
    Doubles q = feature(Row(in.q, place.batch, t, place.key_head)), k, a;
    for (double& x : q) x *= math.scale;
    for (size_t i = 0; i < head.K; ++i) {
      const double g = math.log_decay ? math.log_decay(place.batch, t, place.head, static_cast<int64_t>(i)) : 0;
      a.push_back(std::exp(g));
      if (math.complement_keys) k.push_back(-std::expm1(g));
    }
    if (!math.complement_keys) k = key_feature(Row(in.k, place.batch, t, place.key_head));
    for (double& x : k) x *= math.key_factors.empty() ? 1 : math.key_factors[head.q.size() / head.K];
    Append(head.q, q);
    Append(head.k, k);
    Append(head.a, a);
    Append(head.v, Row(in.v, place.batch, t, place.head));
    if (math.log_decay_v.present()) {
      Doubles b = Row(math.log_decay_v, place.batch, t, place.head);
      for (double& x : b) x = std::exp(x);
      Append(head.b, b);
    }
  }
  for (size_t i = 0; math.bonus && i < head.K; ++i) {
    head.u.push_back(At(in.u, {place.head, static_cast<int64_t>(i)}));
  }
  head.S = StateOf(in.initial.S, place, head.K * head.V);
  head.z = StateOf(in.initial.z, place, head.K);
  Scale(head.S, math.initial_factor);
  Scale(head.z, math.initial_factor);
  return head;
}

ReferenceMath MathOf(const ReferenceMath& math, const Place& place) {
  return math.of_head ? math.of_head(place) : math;
}

// Without causality there are no decays, and every token reads the sum over all.
ReferenceHead AllAtOnce(const ReferenceHead& head) {
  ReferenceHead sums = head;
  for (size_t t = 0; t < head.T; ++t) {
    for (size_t i = 0; i < head.K; ++i) {
      for (size_t j = 0; j < head.V; ++j) {
        sums.S[i * head.V + j] += head.k[t * head.K + i] * head.v[t * head.V + j];
      }
      sums.z[i] += head.k[t * head.K + i];
    }
  }
  std::fill(sums.k.begin(), sums.k.end(), 0.0);
  return sums;
}

ReferenceHeadOutputs Run(const ReferenceHead& head, bool causal) {
  return mechanism::RunReference(causal ? head : AllAtOnce(head));
}

ReferenceHeadGradients RunBackward(const ReferenceHead& head, bool causal, const Doubles& d_o, const Doubles& d_S,
                                   const Doubles& d_z) {
  if (causal) return mechanism::RunBackwardReference(head, d_o, d_S, d_z);
  // The gradient of the sums is that of the initial state.
  auto g = mechanism::RunBackwardReference(AllAtOnce(head), d_o, d_S, d_z);
  for (size_t t = 0; t < head.T; ++t) {
    for (size_t j = 0; j < head.V; ++j) g.v[t * head.V + j] = 0;
    for (size_t i = 0; i < head.K; ++i) {
      g.k[t * head.K + i] = g.z[i];
      for (size_t j = 0; j < head.V; ++j) {
        g.k[t * head.K + i] += g.S[i * head.V + j] * head.v[t * head.V + j];
        g.v[t * head.V + j] += g.S[i * head.V + j] * head.k[t * head.K + i];
      }
    }
  }
  return g;
}

Doubles Absolute(Doubles x) {
  for (double& value : x) value = std::abs(value);
  return x;
}

// Where |z . q| is so close to its floor that rounding decides between them, either gradient is right: the slope is
// such that its whole value is a rounding error.
ReferenceHead Magnitudes(ReferenceHead head, bool causal, const Epsilon& e) {
  const ReferenceHeadOutputs values = Run(head, causal);
  head.denominators = values.denominators;
  for (size_t t = 0; t < head.floors.size(); ++t) {
    const double product = std::abs(values.products[t]);
    const double near = 1e3 * e.base * (product + head.floors[t]);
    head.slopes.push_back(std::abs(product - head.floors[t]) < near ? 1 / e.base : product > head.floors[t] ? 1 : 0);
  }
  for (Doubles* x : {&head.q, &head.k, &head.v, &head.S, &head.z, &head.u}) *x = Absolute(*x);
  return head;
}

Doubles GradientsOfO(const ReferenceBackwardInputs& in, const Place& place) {
  Doubles d_o;
  for (const int64_t t : place.tokens) {
    Append(d_o, Row(in.d_o, place.batch, t, place.head));
  }
  return d_o;
}

double Relative(const Epsilon& e, const ReferenceHead& head, const ReferenceMath& math) {
  return e.chain * std::sqrt(static_cast<double>(head.T + head.K)) + e.base + math.value_error;
}

constexpr double kStep = 1e-5;  // for the derivative by a common factor of decays

// Increases each decay by its error in units of e.decay.
ReferenceHead Slower(ReferenceHead head, const Epsilon& e, const ReferenceMath& math) {
  for (Doubles* decays : {&head.a, &head.b}) {
    for (double& a : *decays) {
      if (a > 0) a *= 1 + kStep * (1 - std::log(a) * math.log_decay_error / e.decay);
    }
  }
  return head;
}

// The head with features increased by their errors, in the same units.
ReferenceHead Deviated(const ReferenceInputs& in, const Epsilon& e, const ReferenceMath& math, const Place& place) {
  ReferenceMath moved = math;
  const auto by = [&](const auto& feature, bool of_key) {
    return [feature, of_key, deviation = math.feature_deviation, &e](const Doubles& x) {
      Doubles y = feature(x);
      const Doubles dy = deviation(x, of_key);
      for (size_t i = 0; i < y.size(); ++i) y[i] += kStep / e.decay * dy[i];
      return y;
    };
  };
  moved.feature = by(math.feature, false);
  moved.key_feature = by(math.key_feature ? math.key_feature : math.feature, true);
  return HeadOf(in, moved, place);
}

// The head with errors in decays and features.
ReferenceHead Off(const ReferenceInputs& in, const Epsilon& e, const ReferenceMath& math, const Place& place,
                  const ReferenceHead& head) {
  if (math.feature_deviation) {
    ReferenceHead off = Magnitudes(Deviated(in, e, math, place), math.causal, e);
    off.denominators = head.denominators;
    return off;
  }
  return math.log_decay ? Slower(head, e, math) : head;
}

// relative x + decay dx + underflow, where `slower` is x with all decays increased.
Doubles Errors(const Doubles& x, const Doubles& slower, double relative, const Epsilon& e) {
  Doubles errors(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    errors[i] = relative * x[i] + e.decay * std::abs(slower[i] - x[i]) / kStep + e.underflow;
  }
  return errors;
}

}  // namespace

// Rounding. Every element of a result is a sum of products; a computed one differs by
// the sum of the magnitudes of its terms times
//
//   chain sqrt(T + K) + base
//
// a random walk of one rounding per token (of the state) and channel, bounded by six standard deviations of u /
// sqrt(3), which is 3.5 u; and single roundings per factor (scale, feature map, tables, tree reductions): base. A decay
// has a relative error of up to `decay`, and all errors may have the same sign, for example where decays are equal:
// `decay` times the derivative by a common factor of all decays. Results of 16 bits are rounded once more. Terms below
// the smallest normal number are flushed: `underflow`, for a thousand of them.
Epsilon EpsilonOf(DType dtype) {
  const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
  Epsilon e = {3.5 * u, 8 * u, 6 * u, 0, 0, 0};
  e.underflow = 1024 * (dtype == DType::kF64 ? 0x1p-1022 : 0x1p-126);
  if (dtype == DType::kBF16) e.output = 1.01 * 0x1p-8;
  if (dtype == DType::kF16) {
    e.output = 1.01 * 0x1p-11;
    e.subnormal = 0x1p-25;
  }
  return e;
}

Epsilon StoredIn(DType dtype, DType computed) {
  Epsilon e = EpsilonOf(dtype);
  if (dtype == DType::kF32 && computed == DType::kF64) {
    e.output = 1.01 * 0x1p-24;
    e.subnormal = 0x1p-150;
  }
  return e;
}

LogDecay PerHead(const ConstTensorView& g) {
  return [g](int64_t, int64_t, int64_t head, int64_t) { return At(g, {head}); };
}

LogDecay PerHeadChannel(const ConstTensorView& g) {
  return [g](int64_t, int64_t, int64_t head, int64_t channel) { return At(g, {head, channel}); };
}

LogDecay PerToken(const ConstTensorView& g) {
  return [g](int64_t b, int64_t t, int64_t head, int64_t) { return At(g, {b, t, head}); };
}

LogDecay PerTokenChannel(const ConstTensorView& g) {
  return [g](int64_t b, int64_t t, int64_t head, int64_t channel) { return At(g, {b, t, head, channel}); };
}

double RootScale(int64_t key_size, const Options& options) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(key_size)));
}

void Reference(const ReferenceInputs& in, const Options& options, const ReferenceMath& math,
               const ReferenceOutputs& out) {
  Clear(out.o);
  ForEachHead(in, options, [&](const Place& place) {
    const ReferenceHead head = HeadOf(in, math, place);
    const auto result = Run(head, math.causal);
    for (size_t t = 0; t < head.T; ++t) {
      for (size_t j = 0; j < head.V; ++j) {
        Put(out.o, {place.batch, place.tokens[t], place.head, static_cast<int64_t>(j)}, result.o[t * head.V + j]);
      }
    }
    PutState(out.final.S, place, result.S, Put);
    PutState(out.final.z, place, result.z, Put);
  });
}

void Tolerance(const ReferenceInputs& in, const Options& options, const ReferenceMath& shared,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  Clear(tolerance.o);
  ForEachHead(in, options, [&](const Place& place) {
    const ReferenceMath math = MathOf(shared, place);
    const ReferenceHead head = Magnitudes(HeadOf(in, math, place), math.causal, e);
    auto sums = Run(head, math.causal);
    auto slower = Run(Off(in, e, math, place, head), math.causal);
    const double relative = Relative(e, head, math);
    const auto o = Errors(sums.o, slower.o, relative, e);
    for (size_t t = 0; t < head.T; ++t) {
      for (size_t j = 0; j < head.V; ++j) {
        const auto column = static_cast<int64_t>(j);
        const double value = At(expected.o, {place.batch, place.tokens[t], place.head, column});
        Put(tolerance.o, {place.batch, place.tokens[t], place.head, column},
            o[t * head.V + j] + std::abs(value) * e.output + e.subnormal);
      }
    }
    for (Doubles* state : {&sums.S, &sums.z, &slower.S, &slower.z}) {
      Scale(*state, math.final_factor);
    }
    PutState(tolerance.final.S, place, Errors(sums.S, slower.S, relative, e), Put);
    PutState(tolerance.final.z, place, Errors(sums.z, slower.z, relative, e), Put);
    if (tolerance.final.m.present()) {
      Put(tolerance.final.m, {place.sequence, place.head}, math.m_error);
    }
  });
}

namespace {

// Adds a head's contribution to the gradients: errors of values of these magnitudes, or values of a recurrence without
// features and gates.
void AddGradients(const ReferenceBackwardInputs& in, const ReferenceMath& math, const Place& place,
                  const ReferenceHead& head, const ReferenceHeadGradients& g, const Doubles& of_decay,
                  const Doubles& of_value_decay, const ReferenceHeadGradients* magnitudes, double rounding,
                  const ReferenceGradients& out) {
  const bool errors = magnitudes != nullptr;
  Doubles of_projection;
  const auto through_feature = [&](const ConstTensorView& from, int64_t t, const Doubles& dy, const Doubles& magnitude,
                                   bool key) {
    if (!math.feature) return dy;
    const Doubles x = Row(from, place.batch, t, place.key_head);
    if (math.d_projection_errors && out.projection.present()) {
      const Doubles d_W = math.d_projection_errors(x, dy, magnitude, key);
      of_projection.resize(d_W.size(), 0.0);
      for (size_t i = 0; i < d_W.size(); ++i) of_projection[i] += d_W[i];
    }
    if (math.feature_errors) return math.feature_errors(x, dy, magnitude, key);
    // Each row of the derivative separately: errors add up, whatever their signs.
    Doubles dx(x.size(), 0.0);
    for (size_t i = 0; i < dy.size(); ++i) {
      Doubles unit(dy.size(), 0.0);
      unit[i] = 1;
      const Doubles column = math.feature_backward(x, unit);
      for (size_t c = 0; c < dx.size(); ++c) dx[c] += std::abs(column[c]) * dy[i];
    }
    return dx;
  };
  const auto row = [&](const Doubles& of, size_t t) {
    return Doubles(of.begin() + static_cast<int64_t>(t * head.K), of.begin() + static_cast<int64_t>((t + 1) * head.K));
  };
  for (size_t t = 0; t < head.T; ++t) {
    const int64_t token = place.tokens[t];
    Doubles d_query = row(g.q, t);
    for (double& x : d_query) x *= errors ? std::abs(math.scale) : math.scale;
    const auto add = [&](const TensorView& to, const Doubles& values, int64_t head_index) {
      for (size_t i = 0; to.present() && i < values.size(); ++i) {
        Add(to, {place.batch, token, head_index, static_cast<int64_t>(i)}, values[i]);
      }
    };
    const Doubles of_query = errors ? row(magnitudes->q, t) : Doubles();
    const Doubles of_key = errors ? row(magnitudes->k, t) : Doubles();
    add(out.q, through_feature(in.q, token, d_query, of_query, false), place.key_head);
    Doubles d_key = row(g.k, t);
    if (!math.key_factors.empty()) {
      double d_gate = 0;
      for (size_t i = 0; i < head.K; ++i) {
        d_gate += head.k[t * head.K + i] * d_key[i];
        d_gate += rounding * std::abs(head.k[t * head.K + i]) * magnitudes->k[t * head.K + i];
      }
      Add(out.i, {place.batch, token, place.head}, d_gate);
      Scale(d_key, math.key_factors[t]);
    }
    if (!math.complement_keys) {
      add(out.k, through_feature(in.k, token, d_key, of_key, true), place.key_head);
    }
    for (size_t i = 0; out.f.present() && i < head.K; ++i) {
      Add(out.f, {place.batch, token, place.head}, of_decay[t * head.K + i] * math.forget_slopes[t]);
    }
    for (size_t j = 0; out.v.present() && j < head.V; ++j) {
      Add(out.v, {place.batch, token, place.head, static_cast<int64_t>(j)}, g.v[t * head.V + j]);
    }
    for (size_t j = 0; out.log_decay_v.present() && j < head.V; ++j) {
      Add(out.log_decay_v, {place.batch, token, place.head, static_cast<int64_t>(j)}, of_value_decay[t * head.V + j]);
    }
    for (size_t i = 0; out.log_decay.present() && i < head.K; ++i) {
      const double value = of_decay[t * head.K + i];
      if (out.log_decay.rank() == 1) {
        Add(out.log_decay, {place.head}, value);
      } else if (out.log_decay.rank() == 2) {
        Add(out.log_decay, {place.head, static_cast<int64_t>(i)}, value);
      } else if (out.log_decay.rank() == 3) {
        Add(out.log_decay, {place.batch, token, place.head}, value);
      } else {
        Add(out.log_decay, {place.batch, token, place.head, static_cast<int64_t>(i)}, value);
      }
    }
  }
  for (size_t i = 0; i < of_projection.size(); ++i) {
    const auto at = static_cast<int64_t>(i), columns = in.q.size(3);
    Add(out.projection, {at / columns, at % columns}, of_projection[i]);
  }
  for (size_t i = 0; out.u.present() && i < g.u.size(); ++i) {
    Add(out.u, {place.head, static_cast<int64_t>(i)}, g.u[i]);
  }
  PutState(out.initial.S, place, g.S, Put);
  PutState(out.initial.z, place, g.z, Put);
}

// Clears gradients before heads add to them. Gradients of tensors that the equations do not use are not written.
void ClearAll(const ReferenceMath& math, const ReferenceGradients& out) {
  for (const TensorView* t : {&out.q, &out.k, &out.v, &out.log_decay, &out.projection, &out.i, &out.f}) Clear(*t);
  if (math.bonus) Clear(out.u);
  if (math.log_decay_v.present()) Clear(out.log_decay_v);
}

}  // namespace

void BackwardReference(const ReferenceBackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const ReferenceGradients& out) {
  ClearAll(math, out);
  ForEachHead(in, options, [&](const Place& place) {
    const ReferenceHead head = HeadOf(in, math, place);
    const auto g = RunBackward(head, math.causal, GradientsOfO(in, place), StateOf(in.d_final.S, place, head.S.size()),
                               StateOf(in.d_final.z, place, head.K));
    Doubles of_decay(g.a.size());
    for (size_t i = 0; i < g.a.size(); ++i) of_decay[i] = g.a[i] * head.a[i];
    AddGradients(in, math, place, head, g, of_decay, {}, nullptr, 0, out);
  });
}

void BackwardTolerance(const ReferenceBackwardInputs& in, const Options& options, const ReferenceMath& shared,
                       const ReferenceGradients& expected, const ReferenceGradients& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  ClearAll(shared, tolerance);
  ForEachHead(in, options, [&](const Place& place) {
    const ReferenceMath math = MathOf(shared, place);
    const ReferenceHead head = Magnitudes(HeadOf(in, math, place), math.causal, e);
    const Doubles d_o = Absolute(GradientsOfO(in, place));
    Doubles d_S = Absolute(StateOf(in.d_final.S, place, head.S.size()));
    Doubles d_z = Absolute(StateOf(in.d_final.z, place, head.K));
    Scale(d_S, math.final_factor);
    Scale(d_z, math.final_factor);
    const auto sums = RunBackward(head, math.causal, d_o, d_S, d_z);
    const auto slower = RunBackward(Off(in, e, math, place, head), math.causal, d_o, d_S, d_z);
    const double relative = Relative(e, head, math) * 2;
    ReferenceHeadGradients g;
    g.q = Errors(sums.q, slower.q, relative, e);
    g.k = Errors(sums.k, slower.k, relative, e);
    g.v = Errors(sums.v, slower.v, relative, e);
    g.u = Errors(sums.u, slower.u, relative, e);
    g.S = Errors(sums.S, slower.S, relative, e);
    g.z = Errors(sums.z, slower.z, relative, e);
    Scale(g.S, math.initial_factor);
    Scale(g.z, math.initial_factor);
    // A log decay's gradient is a sum of q dq - k dk over the rest of a chunk plus <S, D> at its end; adds the errors
    // of each.
    Doubles of_decay(sums.a.size(), 0.0);
    const auto final = Run(head, math.causal);
    for (size_t i = 0; i < head.K; ++i) {
      double end = 0;
      for (size_t j = 0; j < head.V; ++j) {
        end += final.S[i * head.V + j] * d_S[i * head.V + j];
      }
      end += final.z[i] * d_z[i];
      double sum = 0;
      for (size_t t = head.T; t-- > 0;) {
        const size_t at = t * head.K + i;
        if ((t + 1) % 64 == 0 && t + 1 < head.T) {
          sum = relative * sums.a[at + head.K] * head.a[at + head.K];
        } else if (t + 1 == head.T) {
          sum = relative * end;
        }
        sum += head.q[at] * (g.q[at] + e.base * sums.q[at]) + head.k[at] * (g.k[at] + e.base * sums.k[at]);
        of_decay[at] = sum;
        if (math.complement_keys) of_decay[at] += g.k[at] * head.a[at];
      }
    }
    // Decays of columns have a sum of o d_o - v dv and <S, D>.
    Doubles of_value_decay(sums.b.size(), 0.0);
    Doubles of_o;
    if (!head.b.empty()) {
      of_o = Errors(final.o, Run(Slower(head, e, math), math.causal).o, relative, e);
    }
    for (size_t j = 0; !head.b.empty() && j < head.V; ++j) {
      double end = 0, sum = 0;
      for (size_t i = 0; i < head.K; ++i) {
        end += final.S[i * head.V + j] * d_S[i * head.V + j];
      }
      for (size_t t = head.T; t-- > 0;) {
        const size_t at = t * head.V + j;
        if ((t + 1) % 64 == 0 && t + 1 < head.T) {
          sum = relative * sums.b[at + head.V] * head.b[at + head.V];
        } else if (t + 1 == head.T) {
          sum = relative * end;
        }
        sum += d_o[at] * (of_o[at] + e.base * final.o[at]) + head.v[at] * (g.v[at] + e.base * sums.v[at]);
        of_value_decay[at] = sum;
      }
    }
    AddGradients(in, math, place, head, g, of_decay, of_value_decay, &sums, relative, tolerance);
  });
  const auto round = [&](const TensorView& t, const TensorView& value, DType dtype) {
    const Epsilon of = StoredIn(dtype, in.q.dtype());
    for (int64_t i = 0; t.present() && i < t.num_elements(); ++i) {
      double* at = t.as<double>() + i;  // both as generated by the harness
      *at += std::abs(value.as<double>()[i]) * of.output + of.subnormal;
    }
  };
  round(tolerance.q, expected.q, in.q.dtype());
  round(tolerance.k, expected.k, in.q.dtype());
  round(tolerance.v, expected.v, in.q.dtype());
  round(tolerance.projection, expected.projection, in.q.dtype());
  round(tolerance.u, expected.u, in.u.dtype());
  round(tolerance.log_decay_v, expected.log_decay_v, in.log_decay_v.dtype());
  round(tolerance.log_decay, expected.log_decay, in.log_decay.dtype());
  round(tolerance.i, expected.i, in.i.dtype());
  round(tolerance.f, expected.f, in.f.dtype());
}

}  // namespace heed::recurrent
