// HGRN as it is defined, one token of one channel: everything that it is.
//
//   h_t = exp(log_decay_t) h_{t-1} + x_t,  o_t = h_t
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"

namespace heed::hgrn {
namespace {

using mechanism::Array;
using mechanism::Reverse;

// A positive log decay counts as 0, but has the gradient of the decay.
double Clamped(double log_decay) { return log_decay > 0 ? 0 : log_decay; }
Reverse Clamped(const Reverse& log_decay) { return mechanism::Unary(Clamped(log_decay.value), log_decay, 1); }

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 0, .o = "BTD"};

  // All have one element.
  template <class Number>
  void operator()(const Array<Number>& x, const Array<Number>& log_decay, Array<Number>& h, Array<Number>& o) const {
    using std::exp;
    h[0] = exp(Clamped(log_decay[0])) * h[0] + x[0];
    o[0] = h[0];
  }
};

Token TokenOf(const Inputs&, const Options&) { return {}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::hgrn
