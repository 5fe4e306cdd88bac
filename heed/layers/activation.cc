// Names of activations, and their references.
#include "heed/layers/activation.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "heed/core/error.h"

namespace heed::layers {
namespace {

constexpr std::pair<std::string_view, Activation> kNames[] = {{"gelu", Activation::kGelu},
                                                              {"gelu_new", Activation::kGeluTanh},
                                                              {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                              {"gelu_fast", Activation::kGeluTanh},
                                                              {"silu", Activation::kSilu},
                                                              {"swish", Activation::kSilu},
                                                              {"relu", Activation::kRelu},
                                                              {"relu2", Activation::kSquaredRelu},
                                                              {"sigmoid", Activation::kSigmoid},
                                                              {"tanh", Activation::kTanh},
                                                              {"linear", Activation::kNone}};

}  // namespace

Activation ActivationFromName(std::string_view name) {
  std::string known;
  for (const auto& [text, activation] : kNames) {
    if (text == name) return activation;
    known += (known.empty() ? "'" : ", '") + std::string(text) + "'";
  }
  throw InvalidArgument("layers::Activation: name is '" + std::string(name) + "', expected one of " + known);
}

double ActivationReference(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kGelu: return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kRelu: return std::max(x, 0.0);
    case Activation::kSquaredRelu: return std::max(x, 0.0) * std::max(x, 0.0);
    case Activation::kSigmoid: return 1 / (1 + std::exp(-x));
    case Activation::kTanh: return std::tanh(x);
    case Activation::kMinusExp: return -std::exp(x);
  }
  return x;
}

}  // namespace heed::layers
