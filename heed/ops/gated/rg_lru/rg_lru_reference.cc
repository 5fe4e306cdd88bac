// RG-LRU as it is defined, one token of one channel: everything that it is.
//
//   log a_t = -c sigmoid(recurrence_gate_t) softplus(a)
//   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(input_gate_t) x_t,  o_t = h_t
//
// At the first token of a sequence without an initial state the root is 1.
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"

namespace heed::rg_lru {
namespace {

using mechanism::Array;
using mechanism::Reverse;
using mechanism::Sigmoid;
using mechanism::Softplus;

// The square root, whose derivative is limited to 1000, as in the paper's code.
double Root(double x) { return std::sqrt(x); }
Reverse Root(const Reverse& x) {
  const double root = std::sqrt(x.value);
  return mechanism::Unary(root, x, std::fmin(1 / (2 * root), 1000));
}

// The state of the mechanism, and one of the function below: 1 before the first token of a sequence, then 0.
template <class T>
struct ReadableStates {
  T h, is_first;
};
constexpr ReadableStates<mechanism::StateTensor> kReadableStates = {
    .h = kStates.S, .is_first = {.name = "is_first", .axes = "BD", .absent = 1}};

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 0, .o = "BTD"};
  double c;
  bool has_initial;

  // All have one element.
  template <class Number>
  void operator()(const Array<Number>& x, const Array<Number>& input_gate, const Array<Number>& recurrence_gate,
                  const Array<Number>& a, Array<Number>& h, Array<Number>& is_first, Array<Number>& o) const {
    using std::exp;
    using std::expm1;
    const Number log_a = -c * Sigmoid(recurrence_gate[0]) * Softplus(a[0]);
    const Number root = is_first[0] > 0 && !has_initial ? Number(1) : Root(-expm1(2 * log_a));
    h[0] = exp(log_a) * h[0] + root * Sigmoid(input_gate[0]) * x[0];
    is_first[0] = 0;
    o[0] = h[0];
  }
};

Token TokenOf(const Inputs& in, const Options& options) { return {options.c, in.initial.S.present()}; }

}  // namespace

HEED_DEFINE_REFERENCES_WITH(kReadableStates)

}  // namespace heed::rg_lru
