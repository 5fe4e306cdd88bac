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
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/distributed/sequence.h"
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
  bool cast = false;     // autocast converts it, except where it may have tokens and is constant
  bool keyword = false;  // not accepted by position
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
  std::optional<int64_t> segment;
  Settings settings;
  const distributed::Group* group = nullptr;  // of the processes that hold the sequence; null: this one
  distributed::SequenceOptions sequence;
};

using mechanism::Explanation;

// The passes of a mechanism, for a binding.
struct Passes {
  virtual ~Passes() = default;
  virtual void Forward(Context& ctx, const Call& call) const = 0;
  virtual void Backward(Context& ctx, const Call& call) const = 0;
  virtual void Step(Context& ctx, const Call& call) const = 0;
  virtual Explanation Explain(const Context& ctx, const Call& call) const = 0;
};

struct Binding {
  const char* name;
  std::vector<SettingSpec> settings = {};
  python::Docs docs = {};
  std::vector<python::Said> in_python = {};  // for keywords whose C++ name differs
  bool has_direction = true;                 // the options have `reverse`
  // A step takes the state after all tensors, and the backward pass its gradient as well, by position. Otherwise the
  // state follows the required tensors, and its gradient is a keyword.
  bool state_last = false;

  // The fields below follow from the definition if an engine computes the mechanism.
  std::vector<Parameter> tensors = {};
  std::vector<StateParameter> states = {};
  bool states_together = false;                   // all of them are given, or none
  std::string output = "";                        // the tensor that o has the shape of; empty: the first
  std::string output_axes = "";                   // axes of o; empty: all of that tensor's
  std::function<int64_t(int64_t)> features = {};  // the size of axis F, from that of K

  // Bind sets these from the passes.
  bool has_scale = false;
  std::shared_ptr<const Passes> passes = nullptr;
};

// The options of a mechanism without settings.
template <class Options>
Options Default(const Settings& /*settings*/) {
  return {};
}

template <class Structs, class Options>
class Adapter final : public Passes {
  using Of = mechanism::Lists<Structs>;

 public:
  Adapter(const mechanism::Functions<Structs, Options>& f, Options (*own)(const Settings&)) : f_(f), own_(own) {}

  void Forward(Context& ctx, const Call& call) const override {
    if constexpr (kDivided) {
      if (call.group != nullptr) {
        distributed::Forward(ctx, *call.group, Of::InputsOf(ArgumentsOf(call)), OptionsOf(call),
                             Of::OutputsOf({call.o, call.states}), call.sequence);
        return;
      }
    }
    f_.Forward(ctx, ArgumentsOf(call), OptionsOf(call), {call.o, call.states});
  }
  void Backward(Context& ctx, const Call& call) const override {
    if constexpr (kDivided) {
      if (call.group != nullptr) {
        distributed::Backward(ctx, *call.group, Of::InputsOf(ArgumentsOf(call)), OptionsOf(call),
                              Of::GradientsOf({{}, call.states, call.gradients}), call.sequence);
        return;
      }
    }
    f_.Backward(ctx, ArgumentsOf(call), OptionsOf(call), {{}, call.states, call.gradients});
  }
  void Step(Context& ctx, const Call& call) const override {
    f_.Step(ctx, ArgumentsOf(call), OptionsOf(call), {call.o, call.states});
  }
  Explanation Explain(const Context& ctx, const Call& call) const override {
    const auto in = Of::InputsOf(ArgumentsOf(call));
    return f_.explain(ctx, in, OptionsOf(call));
  }

 private:
  static constexpr bool kDivided = requires(
      Context& ctx, const distributed::Group& group, const typename Structs::Inputs& in, const Options& options,
      const typename Structs::Outputs& out) { distributed::Forward(ctx, group, in, options, out); };

  static mechanism::Arguments ArgumentsOf(const Call& call) { return {call.in, call.initial, call.d_o, call.d_final}; }
  Options OptionsOf(const Call& call) const {
    Options options = own_(call.settings);
    options.lengths = call.lengths;
    options.starts = call.starts;
    options.cu_seqlens = call.cu_seqlens;
    if constexpr (requires { options.scale; }) options.scale = call.scale;
    if constexpr (requires { options.reverse; }) options.reverse = call.reverse;
    if constexpr (requires { options.segment; }) {
      if (call.group == nullptr) options.segment = call.segment.value_or(0);
    }
    return options;
  }

  mechanism::Functions<Structs, Options> f_;
  Options (*own_)(const Settings&);
};

// The Python parameters of the tensors of a table, with these names for letters of axes. Rows are read as kRows, or as
// kNumbers where the last axis is one of heads.
using AxisNames = std::initializer_list<std::pair<char, const char*>>;
std::string SpelledAxes(std::string_view letters, AxisNames names);
std::vector<Parameter> ParametersOf(std::span<const mechanism::Tensor> tensors, AxisNames names = {});

void Bind(nanobind::module_& m, const Binding& binding);

template <class Structs, class Options>
void Bind(nanobind::module_& m, Binding binding, const mechanism::Functions<Structs, Options>& functions,
          Options (*own)(const Settings&) = &Default<Options>) {
  binding.has_scale = requires(Options options) { options.scale; };
  binding.has_direction = binding.has_direction && requires(Options options) { options.reverse; };
  binding.passes = std::make_shared<Adapter<Structs, Options>>(functions, own);
  Bind(m, binding);
}

// Binds a mechanism on an engine: its table follows from its definition, by a function Describe() of the engine.
template <class Structs, class Options, class Definition>
void Bind(nanobind::module_& m, Binding binding, const Definition& definition,
          const mechanism::Functions<Structs, Options>& functions,
          Options (*own)(const Settings&) = &Default<Options>) {
  Describe(definition, binding);
  Bind<Structs, Options>(m, std::move(binding), functions, own);
}

#pragma GCC visibility pop

}  // namespace heed::binding

#endif  // PYTHON_MECHANISM_BINDING_H_
