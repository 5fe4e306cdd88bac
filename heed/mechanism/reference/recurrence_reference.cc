// The recurrence and its gradients, from the definition.
#include "heed/mechanism/reference/recurrence_reference_internal.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace heed::mechanism {
namespace {

struct State {
  Doubles S, z;
};

double ColumnDecay(const ReferenceHead& h, size_t t, size_t j) { return h.b.empty() ? 1 : h.b[t * h.V + j]; }

// Computes the state after token t from the previous one.
void Advance(const ReferenceHead& h, size_t t, State& state) {
  for (size_t i = 0; i < h.K; ++i) {
    const double a = h.a[t * h.K + i], k = h.k[t * h.K + i];
    for (size_t j = 0; j < h.V; ++j) {
      double& S = state.S[i * h.V + j];
      S = a * S * ColumnDecay(h, t, j) + k * h.v[t * h.V + j];
    }
    state.z[i] = a * state.z[i] + k;
  }
}

// An element of the state that token t's query reads.
double Seen(const ReferenceHead& h, size_t t, const State& before, const State& after, size_t i, size_t j) {
  const size_t at = i * h.V + j;
  if (h.u.empty()) return after.S[at];
  return before.S[at] + h.u[i] * h.k[t * h.K + i] * h.v[t * h.V + j];
}

double Product(const ReferenceHead& h, size_t t, const State& state) {
  double sum = 0;
  for (size_t i = 0; i < h.K; ++i) sum += state.z[i] * h.q[t * h.K + i];
  return sum;
}

// The denominator of token t's output.
double Denominator(const ReferenceHead& h, size_t t, double product) {
  if (!h.normalize) return 1;
  if (h.floors.empty()) return product + h.eps;
  return std::max(std::abs(product), h.floors[t]) + h.epsilons[t];
}

// The derivative by the product.
double Slope(const ReferenceHead& h, size_t t, double product) {
  if (!h.slopes.empty()) return h.slopes[t];
  if (h.floors.empty()) return 1;
  return std::abs(product) > h.floors[t] ? std::copysign(1.0, product) : 0;
}

// 1 / d_t, or the magnitude of its terms: a rounding error of d_t is relative to d_t itself.
double Inverse(const ReferenceHead& h, size_t t, double denominator) {
  if (h.denominators.empty()) return 1 / denominator;
  const double d = std::abs(h.denominators[t]);
  return (1 + denominator / d) / d;
}

}  // namespace

ReferenceHeadOutputs RunReference(const ReferenceHead& h) {
  ReferenceHeadOutputs out;
  out.o.assign(h.T * h.V, 0);
  State state = {h.S, h.z};
  for (size_t t = 0; t < h.T; ++t) {
    const State before = state;
    Advance(h, t, state);
    out.products.push_back(Product(h, t, state));
    out.denominators.push_back(Denominator(h, t, out.products.back()));
    for (size_t i = 0; i < h.K; ++i) {
      for (size_t j = 0; j < h.V; ++j) {
        out.o[t * h.V + j] += Seen(h, t, before, state, i, j) * h.q[t * h.K + i];
      }
    }
    const double inverse = Inverse(h, t, out.denominators[t]);
    for (size_t j = 0; j < h.V; ++j) out.o[t * h.V + j] *= inverse;
  }
  out.S = state.S;
  out.z = state.z;
  return out;
}

ReferenceHeadGradients RunBackwardReference(const ReferenceHead& h, const Doubles& d_o, const Doubles& d_S,
                                            const Doubles& d_z) {
  ReferenceHeadGradients g;
  g.q.assign(h.T * h.K, 0);
  g.k = g.a = g.q;
  g.v.assign(h.T * h.V, 0);
  g.u.assign(h.u.size(), 0);
  g.b.assign(h.b.size(), 0);
  Doubles D = d_S, dz = d_z;  // gradients of S_t and z_t

  // Visits tokens in reverse order, with the states before and after each: every kStretch-th state is stored, the
  // others are recomputed.
  constexpr size_t kStretch = 32;
  std::vector<State> kept;
  State state = {h.S, h.z};
  for (size_t t = 0; t < h.T; ++t) {
    if (t % kStretch == 0) kept.push_back(state);
    Advance(h, t, state);
  }
  for (size_t stretch = kept.size(); stretch-- > 0;) {
    const size_t begin = stretch * kStretch, end = std::min(begin + kStretch, h.T);
    std::vector<State> states = {kept[stretch]};
    for (size_t t = begin; t < end; ++t) {
      states.push_back(states.back());
      Advance(h, t, states.back());
    }
    for (size_t t = end; t-- > begin;) {
      const State &before = states[t - begin], &after = states[t - begin + 1];
      const double product = Product(h, t, after);
      const double inverse = Inverse(h, t, Denominator(h, t, product));
      // The gradients of the numerator and the denominator of o_t.
      Doubles d_n(h.V);
      double d_denominator = 0;
      for (size_t j = 0; j < h.V; ++j) {
        d_n[j] = d_o[t * h.V + j] * inverse;
        double numerator = 0;
        for (size_t i = 0; i < h.K; ++i) {
          numerator += Seen(h, t, before, after, i, j) * h.q[t * h.K + i];
        }
        d_denominator += (h.denominators.empty() ? -1 : 1) * d_n[j] * numerator * inverse;
      }
      d_denominator *= h.normalize ? Slope(h, t, product) : 0;
      for (size_t i = 0; i < h.K; ++i) {
        const size_t at = t * h.K + i;
        for (size_t j = 0; j < h.V; ++j) {
          double& d = D[i * h.V + j];
          const double of_seen = h.q[at] * d_n[j], k = h.k[at], v = h.v[t * h.V + j];
          g.q[at] += Seen(h, t, before, after, i, j) * d_n[j];
          if (h.u.empty()) {
            d += of_seen;
          } else {
            g.u[i] += of_seen * k * v;
            g.k[at] += of_seen * h.u[i] * v;
            g.v[t * h.V + j] += of_seen * h.u[i] * k;
          }
          g.k[at] += d * v;
          g.v[t * h.V + j] += d * k;
          const double b = ColumnDecay(h, t, j), carried = d * before.S[i * h.V + j];
          g.a[at] += carried * b;
          if (!h.b.empty()) g.b[t * h.V + j] += carried * h.a[at];
          d *= h.a[at] * b;
          if (!h.u.empty()) d += of_seen;
        }
        g.q[at] += after.z[i] * d_denominator;
        dz[i] += h.q[at] * d_denominator;
        g.k[at] += dz[i];
        g.a[at] += dz[i] * before.z[i];
        dz[i] *= h.a[at];
      }
    }
  }
  g.S = D;
  g.z = dz;
  return g;
}

}  // namespace heed::mechanism
