// The reference of HGRN, in double, a channel at a time.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/ops/gated/hgrn/hgrn_reference_internal.h"

namespace heed::hgrn {

using mechanism::At;
using mechanism::Put;

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.x.size(0), in.x.size(1), in.x.size(2), options)) {
    const int64_t b = place.batch, d = place.channel;
    ReferenceChannel c = {place, {}, {}, {}, {}};
    c.h.push_back(in.initial.S.present() ? At(in.initial.S, {place.sequence, d}) : 0);
    for (const int64_t token : place.tokens) {
      c.x.push_back(At(in.x, {b, token, d}));
      const double g = At(in.log_decay, {b, token, d});
      c.g.push_back(g > 0 ? 0 : g);
      c.a.push_back(std::exp(c.g.back()));
      c.h.push_back(c.a.back() * c.h.back() + c.x.back());
    }
    f(c);
  }
}

ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c) {
  const int64_t d = c.place.channel;
  ReferenceGradients g = {Doubles(c.T() + 1), Doubles(c.T())};
  g.p[c.T()] = in.d_final.S.present() ? At(in.d_final.S, {c.place.sequence, d}) : 0;
  for (size_t t = c.T(); t-- > 0;) {
    g.q[t] = g.p[t + 1] + At(in.d_o, {c.place.batch, c.place.tokens[t], d});
    g.p[t] = c.a[t] * g.q[t];
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
  for (const TensorView* t : {&out.x, &out.log_decay}) mechanism::Clear(*t);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const ReferenceGradients g = GradientsOf(in, c);
    const int64_t b = c.place.batch, d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      Put(out.x, {b, c.place.tokens[t], d}, g.q[t]);
      Put(out.log_decay, {b, c.place.tokens[t], d}, g.p[t] * c.h[t]);
    }
    Put(out.initial.S, {c.place.sequence, d}, g.p[0]);
  });
}

}  // namespace heed::hgrn
