// The long convolution as it is defined, one token of one channel: everything that it is.
//
//   o_t = sum_{s <= min(t, L - 1)} kernel_s u_{t-s} + D u_t
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {
namespace {

using mechanism::Array;

// The mechanism has no states; those of the function below are the last L inputs, oldest first, and how many tokens
// there were.
template <class T>
struct ReadableStates {
  T inputs, count;
};
constexpr ReadableStates<mechanism::StateTensor> kReadableStates = {.inputs = {"inputs", "BDL"},
                                                                    .count = {"count", "BD"}};

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 0, .o = "BDT"};

  // u, D, count and o have one element.
  template <class Number>
  void operator()(const Array<Number>& u, const Array<Number>& kernel, const Array<Number>& D, Array<Number>& inputs,
                  Array<Number>& count, Array<Number>& o) const {
    mechanism::ShiftIn(u, inputs);
    count[0] += 1;
    const size_t L = kernel.size();
    Number sum = 0;
    for (size_t s = 0; s < L && static_cast<double>(s) < count[0]; ++s) sum += kernel[s] * inputs[L - 1 - s];
    o[0] = sum + D[0] * u[0];
  }
};

Token TokenOf(const Inputs&, const Options&) { return {}; }

}  // namespace

HEED_DEFINE_REFERENCES_WITH(kReadableStates)

}  // namespace heed::long_convolution
