// The selective scan as it is defined, one token of one channel: everything that it is.
//
//   s_t = softplus(delta_t + delta_bias), or delta_t + delta_bias
//   h_t = exp(s_t A) .* h_{t-1} + s_t u_t B_t                             h: [N]
//   y_t = <C_t, h_t> + D u_t,  o_t = y_t silu(z_t)                        silu(z) = z / (1 + e^-z)
#include <cmath>
#include <cstddef>
#include <utility>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_reference_internal.h"

namespace heed::selective_scan {
namespace {

using mechanism::At;

double WeightAt(const ConstTensorView& t, std::span<const int64_t> index) {
  int64_t at = 0;
  for (size_t axis = 0; axis < index.size(); ++axis) {
    at += index[axis] * t.stride(static_cast<int>(axis));
  }
  return LoadAsDouble(t.dtype(), t.data(), at);
}

int64_t NumGroups(const Inputs& in) {
  for (const ConstTensorView* t : {&in.B, &in.C}) {
    if (t->rank() == 4) return t->size(1);
  }
  return 1;
}

void Run(ReferenceChannel& c) {
  for (size_t t = 0; t < c.u.size(); ++t) {
    const double s = c.softplus ? scanning::Softplus(c.raw[t]) : c.raw[t];
    Doubles a, h;
    a.reserve(c.A.size());
    h.reserve(c.A.size());
    double y = c.D * c.u[t];
    for (size_t n = 0; n < c.A.size(); ++n) {
      a.push_back(std::exp(s * c.A[n]));
      h.push_back(a[n] * c.h[t][n] + s * c.u[t] * c.B[t][n]);
      y += c.C[t][n] * h[n];
    }
    c.s.push_back(s);
    c.a.push_back(std::move(a));
    c.h.push_back(std::move(h));
    c.y.push_back(y);
    c.o.push_back(c.gated ? y * c.z[t] * scanning::Sigmoid(c.z[t]) : y);
  }
}

}  // namespace

WeightPlace WeightIndex(const ConstTensorView& weights, const ReferenceChannel& c, int64_t t, int64_t n) {
  const int64_t token = c.place.tokens[static_cast<size_t>(t)];
  if (weights.rank() == 2) return {{c.place.channel, n}, 2};
  if (weights.rank() == 3) return {{c.place.batch, n, token}, 3};
  return {{c.place.batch, c.group, n, token}, 4};
}

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  const int64_t D = in.u.size(1), groups = NumGroups(in);
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), D, options)) {
    ReferenceChannel c;
    const int64_t b = place.batch, d = place.channel;
    c.place = place;
    c.N = in.A.size(1);
    c.group = d / (D / groups);
    c.gated = in.z.present();
    c.softplus = options.delta_softplus;
    c.D = in.D.present() ? At(in.D, {d}) : 0;
    const double bias = in.delta_bias.present() ? At(in.delta_bias, {d}) : 0;
    c.h.emplace_back();
    for (int64_t n = 0; n < c.N; ++n) {
      c.A.push_back(At(in.A, {d, n}));
      c.h[0].push_back(in.initial.S.present() ? At(in.initial.S, {place.sequence, d, n}) : 0);
    }
    for (size_t t = 0; t < place.tokens.size(); ++t) {
      const int64_t token = place.tokens[t];
      c.u.push_back(At(in.u, {b, d, token}));
      c.raw.push_back(At(in.delta, {b, d, token}) + bias);
      if (c.gated) c.z.push_back(At(in.z, {b, d, token}));
      for (const auto& [weights, rows] : {std::pair(&in.B, &c.B), {&in.C, &c.C}}) {
        rows->emplace_back().reserve(static_cast<size_t>(c.N));
        for (int64_t n = 0; n < c.N; ++n) {
          const auto index = WeightIndex(*weights, c, static_cast<int64_t>(t), n);
          rows->back().push_back(WeightAt(*weights, index));
        }
      }
    }
    Run(c);
    f(c);
  }
}

ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c) {
  ReferenceGradients g;
  const auto T = static_cast<size_t>(c.T()), N = static_cast<size_t>(c.N);
  for (Doubles* row : {&g.d_o, &g.dy, &g.of_input, &g.du, &g.ds, &g.ddelta, &g.dz}) {
    row->assign(T, 0.0);
  }
  g.q.assign(T, Doubles(N));
  g.p.assign(T + 1, Doubles(N));
  for (size_t n = 0; n < N && in.d_final.S.present(); ++n) {
    g.p[T][n] = At(in.d_final.S, {c.place.sequence, c.place.channel, static_cast<int64_t>(n)});
  }
  for (size_t t = T; t-- > 0;) {
    const double d_o = At(in.d_o, {c.place.batch, c.place.channel, c.place.tokens[t]});
    g.d_o[t] = g.dy[t] = d_o;
    if (c.gated) {
      const double z = c.z[t], sigmoid = scanning::Sigmoid(z);
      g.dy[t] = d_o * z * sigmoid;
      g.dz[t] = d_o * c.y[t] * sigmoid * (1 + z * (1 - sigmoid));
    }
    for (size_t n = 0; n < N; ++n) {
      g.q[t][n] = g.p[t + 1][n] + g.dy[t] * c.C[t][n];
      g.of_input[t] += g.q[t][n] * c.B[t][n];
      g.p[t][n] = c.a[t][n] * g.q[t][n];
      g.ds[t] += g.p[t][n] * c.h[t][n] * c.A[n];
    }
    g.du[t] = c.s[t] * g.of_input[t] + c.D * g.dy[t];
    g.ds[t] += c.u[t] * g.of_input[t];
    g.ddelta[t] = c.softplus ? g.ds[t] * scanning::Sigmoid(c.raw[t]) : g.ds[t];
  }
  return g;
}

namespace {

using mechanism::Array;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 'G', .o = "BDT"};
  bool softplus, gated;

  // u, delta, D, z, delta_bias and o have one element.
  template <class Number>
  void operator()(const Array<Number>& u, const Array<Number>& delta, const Array<Number>& A, const Array<Number>& B,
                  const Array<Number>& C, const Array<Number>& D, const Array<Number>& z,
                  const Array<Number>& delta_bias, Array<Number>& h, Array<Number>& o) const {
    using std::exp;
    const Number step = delta[0] + delta_bias[0], s = softplus ? mechanism::Softplus(step) : step;
    Number y = D[0] * u[0];
    for (size_t n = 0; n < A.size(); ++n) {
      h[n] = exp(s * A[n]) * h[n] + s * u[0] * B[n];
      y += C[n] * h[n];
    }
    o[0] = gated ? y * z[0] * mechanism::Sigmoid(z[0]) : y;
  }
};

Token TokenOf(const Inputs& in, const Options& options) { return {options.delta_softplus, in.z.present()}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::selective_scan
