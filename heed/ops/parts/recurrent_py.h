// Binding a recurrent mechanism: NAME, NAME_backward, NAME_step and its part of explain,
// from what the mechanism says of itself.
#ifndef HEED_OPS_PARTS_RECURRENT_PY_H_
#define HEED_OPS_PARTS_RECURRENT_PY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/parts/recurrent.h"

namespace heed::recurrent {

// Keywords of one mechanism alone, by name.
using Setting = std::variant<bool, double, std::string>;
using Settings = std::map<std::string, Setting, std::less<>>;

// Its default has the type of its values; a string is one of `choices`.
struct SettingSpec {
  const char* name;
  Setting value;
  std::vector<std::string> choices;
};

// The functions of a mechanism with its settings bound, and the states of such a call.
struct Functions {
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)>
      backward;
  std::function<void(Context&, const StepInputs&, const Options&, const State&,
                     const TensorView&)>
      step;
  std::function<Explanation(const Context&, const Inputs&, const Options&)> explain;
  int64_t (*features)(int64_t key_size) = nullptr;  // rows of the state; null: as many
  bool normalizer = false;  // the state is a named tuple (S, z)
};

struct Binding {
  const char* name;
  std::vector<std::string> inputs;  // in order, of q, k, v (or what it is called), log_decay
  const char* value_name = "v";
  bool decay_optional = false;
  std::vector<SettingSpec> settings = {};
  Functions (*bind)(const Settings& settings);
  const char *forward_doc, *backward_doc, *step_doc;
};

void Bind(nanobind::module_& m, const Binding& binding);

}  // namespace heed::recurrent

#endif  // HEED_OPS_PARTS_RECURRENT_PY_H_
