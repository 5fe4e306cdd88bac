// Tables of scans for their bindings.
#include "heed/ops/mechanism/scanning_py.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace heed::scanning {
namespace {

using binding::Parameter;

std::string Spelled(const char* letters) { return binding::SpelledAxes(letters, {{'w', "W - 1"}}); }

}  // namespace

binding::Table<Structs> TableOf(const Definition& definition) {
  binding::Table<Structs> table;
  for (const Tensor& tensor : definition.tensors) {
    const std::string_view axes = tensor.axes;
    table.tensors.push_back(
        {.parameter = {.name = tensor.name,
                       .axes = Spelled(tensor.axes),
                       .reading = Parameter::kInPlace,
                       .values = tensor.values == Tensor::kNormal   ? Parameter::kNormal
                                 : tensor.values == Tensor::kRates  ? Parameter::kRates
                                 : tensor.values == Tensor::kDecays ? Parameter::kDecays
                                                                    : Parameter::kFractions,
                       .optional = tensor.optional,
                       .cast = std::min(axes.find('|'), axes.size()) > 2},
         .input = tensor.input,
         .step = tensor.input,
         .gradient = tensor.gradient});
  }
  for (const StateTensor& state : definition.states()) {
    table.states.push_back({.parameter = {.name = state.name, .axes = Spelled(state.axes)},
                            .initial = state.initial,
                            .d_final = state.d_final,
                            .final = state.final,
                            .dinitial = state.dinitial,
                            .step = state.step});
  }
  return table;
}

}  // namespace heed::scanning
