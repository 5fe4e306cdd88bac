// The reference of S4D, in double, a channel at a time.
#include <cstddef>
#include <cstdint>

#include "heed/ops/ssm/s4d/s4d_reference_internal.h"

namespace heed::s4d {
namespace {

using mechanism::At;
using mechanism::Put;
using scanning::Complexes;

void PutState(const TensorView& to, const scanning::ReferencePlace& place, const Complexes& h, double sign) {
  for (size_t n = 0; n < h.size(); ++n) {
    const auto mode = static_cast<int64_t>(n);
    Put(to, {place.sequence, place.channel, mode, 0}, h[n].real());
    Put(to, {place.sequence, place.channel, mode, 1}, sign * h[n].imag());
  }
}

}  // namespace

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), in.u.size(1), options)) {
    const int64_t d = place.channel;
    ReferenceChannel c = {scanning::ModesOf(scanning::ModesIn(in), IsBilinear(options), d), place};
    c.h.emplace_back(c.N());
    for (size_t n = 0; n < c.N() && in.initial.S.present(); ++n) {
      const auto mode = static_cast<int64_t>(n);
      c.h[0][n] = {At(in.initial.S, {place.sequence, d, mode, 0}), At(in.initial.S, {place.sequence, d, mode, 1})};
    }
    for (const int64_t token : place.tokens) c.u.push_back(At(in.u, {place.batch, d, token}));
    scanning::Walk(c);
    f(c);
  }
}

Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c) {
  Doubles dy;
  for (const int64_t token : c.place.tokens) {
    dy.push_back(At(in.d_o, {c.place.batch, c.place.channel, token}));
  }
  return dy;
}

Complexes FinalGradientsOf(const BackwardInputs& in, const ReferenceChannel& c) {
  Complexes last(c.N());
  for (size_t n = 0; n < c.N() && in.d_final.S.present(); ++n) {
    const auto mode = static_cast<int64_t>(n);
    last[n] = {At(in.d_final.S, {c.place.sequence, c.place.channel, mode, 0}),
               -At(in.d_final.S, {c.place.sequence, c.place.channel, mode, 1})};
  }
  return last;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  mechanism::Clear(out.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    for (size_t t = 0; t < c.T(); ++t) {
      Put(out.o, {c.place.batch, c.place.channel, c.place.tokens[t]}, c.OutputAt(t));
    }
    PutState(out.final.S, c.place, c.h.back(), 1);
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t : {&out.u, &out.log_dt, &out.log_A_real, &out.A_imag, &out.C, &out.D}) {
    mechanism::Clear(*t);
  }
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const Doubles dy = IncomingOf(in, c);
    const auto l = GradientsOf(c, dy, FinalGradientsOf(in, c));
    for (size_t t = 0; t < c.T(); ++t) {
      Put(out.u, {c.place.batch, c.place.channel, c.place.tokens[t]}, c.InputGradientAt(t, dy, l));
    }
    AddParameterGradients(c, dy, l, scanning::ModesIn(out));
    PutState(out.initial.S, c.place, InitialGradients(c, l), -1);
  });
}

}  // namespace heed::s4d
