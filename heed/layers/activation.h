// Elementwise activations of layers.
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
  kMinusExp,     // -e^x: a log decay, not among the names below
};

// The activation with this name in Transformers' configurations: "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast",
// "silu", "swish", "relu", "relu2", "sigmoid", "tanh", "linear". Throws InvalidArgument that lists them for any other
// name.
HEED_API Activation ActivationFromName(std::string_view name);

// The activation of one number in double, for tests.
HEED_API double ActivationReference(Activation activation, double x);

}  // namespace heed::layers

#endif  // HEED_LAYERS_ACTIVATION_H_
