// Binding of a mechanism to Python from its table: NAME, NAME_backward, NAME_step, its part of explain, and the
// functions that PyTorch's operators call. It does not depend on the engine.
#ifndef PYTHON_MECHANISM_BINDING_H_
#define PYTHON_MECHANISM_BINDING_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/table_internal.h"
#include "python/docstring.h"

namespace heed::binding {

// Hidden visibility, since members have hidden types.
#pragma GCC visibility push(hidden)

// A keyword of one mechanism only. A string is one of `choices`; an empty default means None.
using Range = std::pair<double, double>;
using Setting = std::variant<bool, double, std::string, Range>;
struct SettingSpec {
  const char* name;
  Setting value;  // the default, which determines the type
  std::vector<std::string> choices = {};
};

// The settings of a call: given values override the defaults.
class Settings {
 public:
  explicit Settings(const std::vector<SettingSpec>& specs) : specs_(&specs) {}
  void Set(size_t at, Setting value) { given_.emplace_back(at, std::move(value)); }
  template <class T>
  const T& Get(std::string_view name) const {
    return std::get<T>(Find(At(name)));
  }
  size_t Choice(std::string_view name) const;  // index of a word among the choices

 private:
  size_t At(std::string_view name) const;
  const Setting& Find(size_t at) const;

  const std::vector<SettingSpec>* specs_;
  std::vector<std::pair<size_t, Setting>> given_;
};

// A tensor argument of a mechanism.
struct Parameter {
  enum Reading {
    kRows,     // copied unless its last axis is contiguous
    kNumbers,  // like kRows; lists of numbers are accepted too
    kInPlace,  // with any strides
    kMask,     // a bool tensor, which has no gradient
  };
  enum Values { kNormal, kFractions, kRates, kDecays };  // for examples; the last two are negative

  std::string name;
  std::string axes;  // "B, T, H, K", or alternatives: "B, G, N, T|B, N, T|D, N"
  Reading reading = kRows;
  Values values = kNormal;
  bool optional = false;
  bool cast = false;         // autocast converts it, except where it may have tokens and is constant
  std::string said_of = "";  // its name in the header, if different
  bool keyword = false;      // not accepted by position
};

// A state, which is a field of a named tuple if there are several.
struct StateParameter {
  std::string name, axes;
  bool has_gradient = true;  // otherwise a constant
  const char* setting = "";  // it exists if this keyword is True
};

// The arguments of a call. Views are at the indices of their tensors and states in the lists; views of absent arguments
// are empty.
struct Call {
  Call(size_t num_tensors, const std::vector<SettingSpec>& specs) : in(num_tensors), settings(specs) {}

  std::vector<ConstTensorView> in;
  std::vector<ConstTensorView> initial, d_final;
  ConstTensorView d_o;
  TensorView o;
  std::vector<TensorView> gradients;
  std::vector<TensorView> states;  // final ones, those of a step, or gradients of initial ones
  std::optional<double> scale;
  ConstTensorView lengths, starts, cu_seqlens;
  bool reverse = false;
  Settings settings;
};

struct Explanation {
  std::string kernel, target, why;
  double flops, bytes;
  int64_t workspace_bytes;
  double visited_pairs;
};

// The functions of a mechanism, for a binding.
struct Functions {
  virtual ~Functions() = default;
  virtual void Forward(Context& ctx, const Call& call) const = 0;
  virtual void Backward(Context& ctx, const Call& call) const = 0;
  virtual void Step(Context& ctx, const Call& call) const = 0;
  virtual Explanation Explain(const Context& ctx, const Call& call) const = 0;
};

struct Binding {
  const char* name;
  // The order in Python, "q k v * log_decay": tensors after the star are optional keywords. `state` gives the place of
  // the state in a step, which by default follows the required tensors; `dstate` gives that of its gradient. Empty: the
  // order of the table.
  std::string_view inputs = "";
  std::vector<SettingSpec> settings = {};
  python::Docs docs = {};
  std::vector<python::Said> in_python = {};  // for keywords whose C++ name differs
  bool has_direction = true;                 // the options have `reverse`

  // The fields below follow from the definition if an engine computes the mechanism.
  bool states_together = false;                   // all of them are given, or none
  std::string output = "";                        // the tensor that o has the shape of; empty: the first
  std::string output_axes = "";                   // axes of o; empty: all of that tensor's
  std::function<int64_t(int64_t)> features = {};  // the size of axis F, from that of K

  // Bind sets these from the table and the passes.
  bool has_scale = false;
  std::vector<Parameter> tensors = {};
  std::vector<StateParameter> states = {};
  std::shared_ptr<const Functions> functions = nullptr;
};

// The members of a mechanism's structs, those of T, for a tensor and a state.
template <class T>
struct TensorPlace {
  Parameter parameter;
  ConstTensorView T::BackwardInputs::* input;
  ConstTensorView T::StepInputs::* step;
  TensorView T::Gradients::* gradient = nullptr;
};
template <class T>
struct StatePlace {
  StateParameter parameter;
  std::function<ConstTensorView&(typename T::BackwardInputs&)> initial, d_final;
  std::function<TensorView&(typename T::Outputs&)> final;
  std::function<TensorView&(typename T::Gradients&)> dinitial;
  std::function<TensorView&(typename T::StepState&)> step;
};
template <class T>
struct Table {
  std::vector<TensorPlace<T>> tensors;
  std::vector<StatePlace<T>> states = {};
};

// A mechanism's functions, and the conversion of a call's settings to its options.
template <class T, class Options>
struct Passes {
  void (*forward)(Context&, const typename T::Inputs&, const Options&, const typename T::Outputs&);
  void (*backward)(Context&, const typename T::BackwardInputs&, const Options&, const typename T::Gradients&);
  void (*step)(Context&, const typename T::StepInputs&, const Options&, const typename T::StepState&,
               const TensorView&);
  typename T::Explanation (*explain)(const Context&, const typename T::Inputs&, const Options&);
  Options (*own)(const Settings&) = [](const Settings&) { return Options(); };
};

template <class T, class Options>
class Adapter final : public Functions {
 public:
  Adapter(const Table<T>& table, const Passes<T, Options>& passes) : table_(table), passes_(passes) {}

  void Forward(Context& ctx, const Call& call) const override {
    typename T::Outputs out;
    out.o = call.o;
    for (size_t i = 0; i < call.states.size(); ++i) table_.states[i].final(out) = call.states[i];
    passes_.forward(ctx, InputsOf(call), OptionsOf(call), out);
  }
  void Backward(Context& ctx, const Call& call) const override {
    typename T::Gradients out;
    for (size_t i = 0; i < call.gradients.size(); ++i) {
      if (table_.tensors[i].gradient != nullptr) out.*table_.tensors[i].gradient = call.gradients[i];
    }
    for (size_t i = 0; i < call.states.size(); ++i) table_.states[i].dinitial(out) = call.states[i];
    passes_.backward(ctx, InputsOf(call), OptionsOf(call), out);
  }
  void Step(Context& ctx, const Call& call) const override {
    typename T::StepInputs in;
    for (size_t i = 0; i < table_.tensors.size(); ++i) in.*table_.tensors[i].step = call.in[i];
    typename T::StepState state;
    for (size_t i = 0; i < call.states.size(); ++i) table_.states[i].step(state) = call.states[i];
    passes_.step(ctx, in, OptionsOf(call), state, call.o);
  }
  Explanation Explain(const Context& ctx, const Call& call) const override {
    const auto e = passes_.explain(ctx, InputsOf(call), OptionsOf(call));
    double pairs = 0;
    if constexpr (requires { e.visited_pairs; }) pairs = e.visited_pairs;
    return {e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, pairs};
  }

 private:
  typename T::BackwardInputs InputsOf(const Call& call) const {
    typename T::BackwardInputs in;
    for (size_t i = 0; i < table_.tensors.size(); ++i) in.*table_.tensors[i].input = call.in[i];
    for (size_t i = 0; i < call.initial.size(); ++i) table_.states[i].initial(in) = call.initial[i];
    for (size_t i = 0; i < call.d_final.size(); ++i) table_.states[i].d_final(in) = call.d_final[i];
    in.d_o = call.d_o;
    return in;
  }
  Options OptionsOf(const Call& call) const {
    Options options = passes_.own(call.settings);
    options.lengths = call.lengths;
    options.starts = call.starts;
    options.cu_seqlens = call.cu_seqlens;
    if constexpr (requires { options.scale; }) options.scale = call.scale;
    if constexpr (requires { options.reverse; }) options.reverse = call.reverse;
    return options;
  }

  Table<T> table_;
  Passes<T, Options> passes_;
};

// The Python parameter of a row of a table, with these names for letters of axes. Rows are read as kRows, or as
// kNumbers where the last axis is one of heads.
using AxisNames = std::initializer_list<std::pair<char, const char*>>;
std::string SpelledAxes(std::string_view letters, AxisNames names);
Parameter ParameterOf(const char* name, const char* axes, mechanism::Type type, mechanism::Values values, bool optional,
                      AxisNames names);

template <class T, class Rows>
std::vector<TensorPlace<T>> PlacesOf(const Rows& rows, AxisNames names = {}) {
  std::vector<TensorPlace<T>> places;
  for (const auto& row : rows) {
    places.push_back({ParameterOf(row.name, row.axes, row.type, row.values, row.optional, names), row.input,
                      row.of_step(), row.gradient});
  }
  return places;
}

// The indices of the table's `tensors` in the order of Python; marks keywords.
std::vector<size_t> PythonOrder(std::string_view inputs, std::vector<Parameter>& tensors);

void Bind(nanobind::module_& m, const Binding& binding);

template <class T, class Options>
void Bind(nanobind::module_& m, Binding binding, const Table<T>& table, const Passes<T, Options>& passes) {
  std::vector<Parameter> parameters;
  for (const auto& tensor : table.tensors) parameters.push_back(tensor.parameter);
  Table<T> ordered = {{}, table.states};
  for (const size_t i : PythonOrder(binding.inputs, parameters)) {
    ordered.tensors.push_back(table.tensors[i]);
    binding.tensors.push_back(parameters[i]);
  }
  for (const auto& state : table.states) binding.states.push_back(state.parameter);
  binding.has_scale = requires(Options options) { options.scale; };
  binding.has_direction = binding.has_direction && requires(Options options) { options.reverse; };
  binding.functions = std::make_shared<Adapter<T, Options>>(ordered, passes);
  Bind(m, binding);
}

#pragma GCC visibility pop

}  // namespace heed::binding

#endif  // PYTHON_MECHANISM_BINDING_H_
