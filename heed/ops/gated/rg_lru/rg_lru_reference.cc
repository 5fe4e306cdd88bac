// The reference of RG-LRU, in double, a channel at a time.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/ops/gated/rg_lru/rg_lru_reference_internal.h"

namespace heed::rg_lru {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;
using scanning::Sigmoid;

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.x.size(0), in.x.size(1), in.x.size(2), options)) {
    const int64_t b = place.batch, d = place.channel;
    ReferenceChannel c;
    c.place = place;
    c.c = options.c;
    c.lambda = At(in.a, {d});
    c.rate = -c.c * scanning::Softplus(c.lambda);
    c.begins = !in.initial.S.present();
    c.h.push_back(c.begins ? 0 : At(in.initial.S, {place.sequence, d}));
    for (size_t t = 0; t < place.tokens.size(); ++t) {
      const int64_t token = place.tokens[t];
      c.x.push_back(At(in.x, {b, token, d}));
      c.raw_input.push_back(At(in.input_gate, {b, token, d}));
      c.raw_recurrence.push_back(At(in.recurrence_gate, {b, token, d}));
      c.input.push_back(Sigmoid(c.raw_input[t]));
      c.recurrence.push_back(Sigmoid(c.raw_recurrence[t]));
      c.log_a.push_back(c.rate * c.recurrence[t]);
      c.a.push_back(std::exp(c.log_a[t]));
      c.root.push_back(c.is_first(t) ? 1 : std::sqrt(-std::expm1(2 * c.log_a[t])));
      c.written.push_back(c.root[t] * c.input[t] * c.x[t]);
      c.h.push_back(c.a[t] * c.h[t] + c.written[t]);
    }
    f(c);
  }
}

ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c) {
  constexpr double kMostSlope = 1000;  // limit of the derivative of the square root
  const int64_t d = c.place.channel;
  const size_t T = c.T();
  ReferenceGradients g;
  g.p.assign(T + 1, 0.0);
  for (Doubles* row : {&g.q, &g.slope, &g.dx, &g.dinput, &g.drecurrence, &g.dlog_a}) {
    row->assign(T, 0.0);
  }
  if (in.d_final.S.present()) g.p[T] = At(in.d_final.S, {c.place.sequence, d});
  for (size_t t = T; t-- > 0;) {
    g.q[t] = g.p[t + 1] + At(in.d_o, {c.place.batch, c.place.tokens[t], d});
    g.p[t] = c.a[t] * g.q[t];
    const double gated = c.input[t] * c.x[t];
    g.dlog_a[t] = g.p[t] * c.h[t];
    if (!c.is_first(t)) {
      const double of_sqrt = std::fmin(1 / (2 * c.root[t]), kMostSlope);
      g.slope[t] = 2 * c.a[t] * c.a[t] * of_sqrt;
      g.dlog_a[t] -= g.q[t] * gated * g.slope[t];
    }
    g.dx[t] = g.q[t] * c.root[t] * c.input[t];
    g.dinput[t] = g.q[t] * c.root[t] * c.x[t] * c.input[t] * Sigmoid(-c.raw_input[t]);
    g.drecurrence[t] = g.dlog_a[t] * c.rate * c.recurrence[t] * Sigmoid(-c.raw_recurrence[t]);
  }
  return g;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  mechanism::Clear(out.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      Put(out.o, {c.place.batch, c.place.tokens[t], d}, c.h[t + 1]);
    }
    Put(out.final.S, {c.place.sequence, d}, c.h.back());
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t : {&out.x, &out.input_gate, &out.recurrence_gate, &out.a}) {
    mechanism::Clear(*t);
  }
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const ReferenceGradients g = GradientsOf(in, c);
    const int64_t b = c.place.batch, d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      const int64_t token = c.place.tokens[t];
      Put(out.x, {b, token, d}, g.dx[t]);
      Put(out.input_gate, {b, token, d}, g.dinput[t]);
      Put(out.recurrence_gate, {b, token, d}, g.drecurrence[t]);
      Add(out.a, {d}, -c.c * g.dlog_a[t] * c.recurrence[t] * Sigmoid(c.lambda));
    }
    Put(out.initial.S, {c.place.sequence, d}, g.p[0]);
  });
}

}  // namespace heed::rg_lru
