// Binding a mechanism on the scan engine: NAME, NAME_backward, NAME_step and its part of
// explain, from the table of its tensors.
#ifndef HEED_OPS_MECHANISM_SCANNING_PY_H_
#define HEED_OPS_MECHANISM_SCANNING_PY_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/mechanism/scanning.h"
#include "heed/ops/mechanism/scanning_internal.h"
#include "python/docstring.h"

namespace heed::scanning {

// A word among those that a keyword may be.
struct Word {
  std::string value;
  std::vector<std::string> choices;
};

// Keywords of one mechanism alone, by name; the default of each has the type of its values.
using Setting = std::variant<bool, double, Word>;
using Settings = std::map<std::string, Setting, std::less<>>;

// The functions of a mechanism with its settings bound.
struct Functions {
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)> backward;
  std::function<void(Context&, const StepInputs&, const StepState& state, const TensorView& o)>
      step;
  std::function<Explanation(const Context&, const Inputs&, const Options&)> explain;
};

// The same of functions that take options of their own kind, with these.
template <class Own>
struct BoundFunctions {
  void (*forward)(Context&, const Inputs&, const Own&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Own&, const Gradients&);
  void (*step)(Context&, const StepInputs&, const Own&, const StepState&, const TensorView&);
  Explanation (*explain)(const Context&, const Inputs&, const Own&);
};
template <class Own>
Functions FunctionsOf(const Own& own, const BoundFunctions<Own>& f) {
  return {.forward = [=](Context& ctx, const Inputs& in, const Options& options,
                         const Outputs& out) { f.forward(ctx, in, With(own, options), out); },
          .backward = [=](Context& ctx, const BackwardInputs& in, const Options& options,
                          const Gradients& out) {
            f.backward(ctx, in, With(own, options), out);
          },
          .step = [=](Context& ctx, const StepInputs& in, const StepState& state,
                      const TensorView& o) { f.step(ctx, in, own, state, o); },
          .explain = [=](const Context& ctx, const Inputs& in, const Options& options) {
            return f.explain(ctx, in, With(own, options));
          }};
}

struct Binding {
  const char* name;
  Definition definition;
  size_t num_positional;  // tensors that may be given by position, in the table's order
  Settings settings = {};
  Functions (*bind)(const Settings& settings);
  python::Docs docs = {};
};

void Bind(nanobind::module_& m, const Binding& binding);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_PY_H_
