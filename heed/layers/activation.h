// Activations of layers, elementwise.
#ifndef HEED_LAYERS_ACTIVATION_H_
#define HEED_LAYERS_ACTIVATION_H_

#include <string_view>

#include "heed/core/export.h"

namespace heed::layers {

enum class Activation {
  kNone,
  kGelu,         // x Phi(x), exact
  kGeluTanh,     // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
  kSilu,         // x / (1 + e^-x)
  kRelu,         // max(x, 0)
  kSquaredRelu,  // max(x, 0)^2
  kSigmoid,      // 1 / (1 + e^-x)
  kTanh,         // tanh(x)
  kMinusExp,     // -e^x: a log decay, of layers alone
};

// That which a configuration of Transformers calls so: "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "silu",
// "swish", "relu", "relu2", "sigmoid", "tanh", "linear". Throws InvalidArgument that lists them for anything else.
HEED_API Activation ActivationFromName(std::string_view name);

// Of one number, in double: what tests compare with.
HEED_API double ActivationReference(Activation activation, double x);

}  // namespace heed::layers

#endif  // HEED_LAYERS_ACTIVATION_H_
