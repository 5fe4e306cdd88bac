// The selective scan as it is defined, in double, a channel at a time.
#include "heed/ops/ssm/selective_scan/selective_scan_reference.h"

#include <cmath>
#include <cstddef>
#include <utility>

#include "heed/mechanism/reference/readable_reference_internal.h"
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

mechanism::ReadableCall<8, 1> CallOf(const Inputs& in, const Gradients& d = {}) {
  return {.heads = 'D',
          .shared_heads = 'G',
          .tensors = {{{"BDT", in.u, d.u},
                       {"BDT", in.delta, d.delta},
                       {"DN", in.A, d.A},
                       {"BGNT|BNT|DN", in.B, d.B},
                       {"BGNT|BNT|DN", in.C, d.C},
                       {"D", in.D, d.D, 0},
                       {"BDT", in.z, d.z, 0},
                       {"D", in.delta_bias, d.delta_bias, 0}}},
          .states = {{{.axes = "BDN", .initial = in.initial.S, .dinitial = d.initial.S}}},
          .o = {.axes = "BDT"}};
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  auto call = CallOf(in);
  call.o.value = out.o;
  call.states[0].final = out.final.S;
  mechanism::RunReadable(Token{options.delta_softplus, in.z.present()}, call, options);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  auto call = CallOf(in, out);
  call.o.gradient = in.d_o;
  call.states[0].d_final = in.d_final.S;
  mechanism::RunReadableBackward(Token{options.delta_softplus, in.z.present()}, call, options);
}

}  // namespace heed::selective_scan
