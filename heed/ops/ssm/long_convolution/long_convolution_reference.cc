// The reference of the long convolution, in double, a channel at a time.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/ops/ssm/long_convolution/long_convolution_reference_internal.h"

namespace heed::long_convolution {

using mechanism::At;
using mechanism::Put;

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), in.u.size(1), options)) {
    const int64_t b = place.batch, d = place.channel;
    ReferenceChannel c = {place, {}, {}, in.D.present() ? At(in.D, {d}) : 0};
    for (const int64_t token : place.tokens) c.u.push_back(At(in.u, {b, d, token}));
    const auto T = static_cast<int64_t>(c.T());
    for (int64_t s = 0; s < std::min(in.kernel.size(1), T); ++s) {
      c.taps.push_back(At(in.kernel, {d, s}));
    }
    f(c);
  }
}

Doubles Convolved(const Doubles& taps, const Doubles& x, size_t count) {
  Doubles sums(count, 0.0);
  for (size_t s = 0; s < std::min(taps.size(), count); ++s) {
    for (size_t t = s; t < count; ++t) sums[t] += taps[s] * x[t - s];
  }
  return sums;
}

Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c) {
  Doubles dy;
  for (const int64_t token : c.place.tokens) {
    dy.push_back(At(in.d_o, {c.place.batch, c.place.channel, token}));
  }
  return dy;
}

Doubles FromItsEnd(const Doubles& x) { return {x.rbegin(), x.rend()}; }

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  mechanism::Clear(out.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const Doubles sums = Convolved(c.taps, c.u, c.T());
    for (size_t t = 0; t < c.T(); ++t) {
      Put(out.o, {c.place.batch, c.place.channel, c.place.tokens[t]}, sums[t] + c.D * c.u[t]);
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t : {&out.u, &out.kernel, &out.D}) mechanism::Clear(*t);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    const Doubles dy = IncomingOf(in, c);
    for (size_t t = 0; t < c.T(); ++t) {
      double du = c.D * dy[t];
      for (size_t s = 0; s < c.taps.size() && t + s < c.T(); ++s) {
        du += c.taps[s] * dy[t + s];
        mechanism::Add(out.kernel, {d, static_cast<int64_t>(s)}, dy[t + s] * c.u[t]);
      }
      Put(out.u, {c.place.batch, d, c.place.tokens[t]}, du);
      mechanism::Add(out.D, {d}, dy[t] * c.u[t]);
    }
  });
}

}  // namespace heed::long_convolution
