// Binding a recurrent mechanism: NAME, NAME_backward, NAME_step and its part of explain,
// from what the mechanism says of itself.
#ifndef HEED_OPS_MECHANISM_RECURRENT_PY_H_
#define HEED_OPS_MECHANISM_RECURRENT_PY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/mechanism/recurrent.h"
#include "heed/ops/mechanism/recurrent_internal.h"
#include "python/docstring.h"

namespace heed::recurrent {

// Keywords of one mechanism alone, by name.
using Range = std::pair<double, double>;
using Setting = std::variant<bool, double, std::string, Range>;
using Settings = std::map<std::string, Setting, std::less<>>;

// Its default has the type of its values; a string is one of `choices`.
struct SettingSpec {
  const char* name;
  Setting value;
  std::vector<std::string> choices;
};

// Tensors that few mechanisms have, by name.
template <class View>
using Others = std::map<std::string, View, std::less<>>;
struct Arguments : BackwardInputs {
  Others<ConstTensorView> others;
};
struct StepArguments : StepInputs {
  Others<ConstTensorView> others;
};
struct Results : Gradients {
  Others<TensorView> others;
};

// The functions of a mechanism with its settings bound, and the states of such a call.
struct Functions {
  std::function<void(Context&, const Arguments&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const Arguments&, const Options&, const Results&)> backward;
  std::function<void(Context&, const StepArguments&, const Options&, const State&,
                     const TensorView&)>
      step = {};
  std::function<Explanation(const Context&, const Arguments&, const Options&)> explain;
  int64_t (*features)(int64_t key_size) = nullptr;  // rows of the state; null: as many
  bool normalizer = false;   // the state is a named tuple: (S, z), with a maximum (S, z, m)
  bool value_first = false;  // the state is [B, HV, V, K]
};

// The same of functions that take options of their own kind, with these.
template <class Own>
struct OwnFunctions {
  void (*forward)(Context&, const Inputs&, const Own&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Own&, const Gradients&);
  void (*step)(Context&, const StepInputs&, const Own&, const State&, const TensorView&);
  Explanation (*explain)(const Context&, const Inputs&, const Own&);
};
template <class Own>
Functions FunctionsOf(const Own& own, const OwnFunctions<Own>& f) {
  return {.forward = [=](Context& ctx, const Inputs& in, const Options& options,
                         const Outputs& out) { f.forward(ctx, in, With(own, options), out); },
          .backward = [=](Context& ctx, const BackwardInputs& in, const Options& options,
                          const Gradients& out) {
            f.backward(ctx, in, With(own, options), out);
          },
          .step = [=](Context& ctx, const StepInputs& in, const Options& options,
                      const State& state, const TensorView& o) {
            f.step(ctx, in, With(own, options), state, o);
          },
          .explain = [=](const Context& ctx, const Inputs& in, const Options& options) {
            return f.explain(ctx, in, With(own, options));
          }};
}

// An input tensor and its part in the recurrence, which its name says where that is one of the
// table's (Tensors::Any). Others have rows, are lists (constants of heads, numbers of tokens), or
// bool, which have no gradient. States have a row for each of a projection.
struct Input {
  enum Role { kQuery, kKey, kValue, kDecay, kProjection, kTensor, kOther, kConstants, kMask };

  Input(const char* input) : Input(input, RoleOf(input)) {}  // NOLINT: reads as its name
  Input(const char* input, Role input_role, bool is_optional = false)
      : name(input), role(input_role), optional(is_optional),
        tensor(Tensors::Any(role == kQuery   ? "q"
                            : role == kKey   ? "k"
                            : role == kValue ? "v"
                            : role >= kOther ? ""
                                             : input)) {}

  std::string name;
  Role role;
  bool optional = false;  // and a keyword
  bool nullable = false;  // may be None, in its place
  const Tensor* tensor;   // null: one of the others

 private:
  static Role RoleOf(const std::string& name) {
    return name == "q" || name == "r" ? kQuery
           : name == "k"              ? kKey
           : name == "v"              ? kValue
           : name == "log_decay"      ? kDecay
           : name == "projection"     ? kProjection
                                      : kTensor;
  }
};

inline Input Nullable(const char* name) {
  Input input(name);
  input.nullable = true;
  return input;
}

struct Binding {
  const char* name;
  std::vector<Input> inputs;  // in order, the optional ones last
  std::vector<SettingSpec> settings = {};
  bool has_state = true;  // and so steps and a direction
  bool has_maximum = false;  // states are (S, z, m); of projections they are
  bool several_writes = false;  // k, v and beta have an axis of steps
  bool channels = false;        // tensors are [B, T, C], states [B, C]
  const char* state_names = "S z m";
  Functions (*bind)(const Settings& settings);
  python::Docs docs = {};
  std::vector<python::Said> in_python = {};  // of keywords that have another name in C++
};

void Bind(nanobind::module_& m, const Binding& binding);

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_PY_H_
