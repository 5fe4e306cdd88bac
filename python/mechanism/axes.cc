// Tables of tensors, as text for messages and docstrings: "B, G, N, T|D, N" for axes.
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/mechanism/bound.h"

namespace heed::binding {

std::string SpelledAxes(std::string_view letters, AxisNames names) {
  std::string axes;
  for (const char letter : letters) {
    if (!axes.empty() && letter != '|' && axes.back() != '|') axes += ", ";
    const auto* named = std::ranges::find(names, letter, &std::pair<char, const char*>::first);
    axes += named == names.end() ? std::string(1, letter) : named->second;
  }
  return axes;
}

std::vector<Parameter> ParametersOf(std::span<const mechanism::Tensor> tensors, AxisNames names) {
  std::vector<Parameter> parameters;
  for (const mechanism::Tensor& tensor : tensors) {
    Parameter& parameter = parameters.emplace_back();
    parameter.name = tensor.name;
    parameter.axes = SpelledAxes(tensor.axes, names);
    parameter.optional = tensor.optional;
    parameter.keyword = tensor.keyword;
    parameter.cast = tensor.type == mechanism::kSame;
    const char last = std::string_view(tensor.axes).back();
    if (last == 'G' || last == 'H') parameter.reading = Parameter::kNumbers;
    switch (tensor.values) {
      case mechanism::kMask: parameter.reading = Parameter::kMask; break;
      case mechanism::kDecays: parameter.values = Parameter::kDecays; break;
      case mechanism::kRates: parameter.values = Parameter::kRates; break;
      case mechanism::kFractions:
      case mechanism::kSteps:
      case mechanism::kStepBiases:
      case mechanism::kLogSteps: parameter.values = Parameter::kFractions; break;
      default: break;
    }
  }
  return parameters;
}

std::string_view FormOf(std::string_view axes, int rank) {
  while (!axes.empty()) {
    const std::string_view form = axes.substr(0, axes.find('|'));
    if (std::ranges::count(form, ',') + 1 == rank) return form;
    axes.remove_prefix(std::min(form.size() + 1, axes.size()));
  }
  return {};
}

std::vector<std::string_view> AxesIn(std::string_view form) {
  std::vector<std::string_view> axes;
  while (!form.empty()) {
    const size_t end = std::min(form.find(','), form.size());
    axes.push_back(form.substr(0, end));
    form.remove_prefix(std::min(end + 2, form.size()));
  }
  return axes;
}

int PlaceOf(std::string_view axis, std::string_view form) {
  const std::vector<std::string_view> axes = AxesIn(form);
  const auto found = std::ranges::find(axes, axis);
  return found == axes.end() ? -1 : static_cast<int>(found - axes.begin());
}

std::string WithoutTokens(std::string_view text) {
  std::string result(text);
  for (size_t at = 0; (at = result.find(", T", at)) != std::string::npos; ++at) {
    const bool axis = at + 3 == result.size() || std::string_view(",]|").find(result[at + 3]) != std::string_view::npos;
    if (axis) result.erase(at, 3);
  }
  return result;
}

std::string Bracketed(std::string axes) {
  for (size_t at; (at = axes.find('|')) != std::string::npos;) {
    axes.replace(at, 1, axes.find('|', at + 1) == std::string::npos ? "] or [" : "], [");
  }
  return "[" + axes + "]";
}

}  // namespace heed::binding
