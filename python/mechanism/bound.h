// A mechanism as bound to Python: its keywords, signatures and texts, and the arguments of a call.
#ifndef PYTHON_MECHANISM_BOUND_H_
#define PYTHON_MECHANISM_BOUND_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "python/mechanism/binding.h"
#include "python/arguments.h"
#include "python/tensor_caster.h"

namespace heed::binding {

// Hidden visibility, since members have hidden types.
#pragma GCC visibility push(hidden)

struct Bound;

struct PythonCall : Call {
  explicit PythonCall(const Bound& mechanism);

  const Bound& bound;
  python::Arrays arrays;
  nanobind::handle out, comm;
  bool return_state = false, describe = false;
  int num_threads = 0;
};

// The source of the size of a state's axis: this axis of a tensor, and alternatives.
struct AxisPlace {
  size_t tensor = 0;
  int place = -1;
  int64_t others = 0;
  bool sequences = false;  // packed sequences replace a batch
  bool features = false;   // features of that many channels
};

// A mechanism with the data of its functions, which lives as long as the module.
struct Bound : Binding {
  using Keywords = std::vector<python::Keyword<PythonCall>>;

  Bound(nanobind::module_& m, const Binding& binding);

  bool has_state() const { return !states.empty(); }
  const Parameter& output_tensor() const { return tensors[output_index]; }

  std::string op_backward, op_step;
  Keywords forward_keywords, backward_keywords, step_keywords;
  // Arguments of PyTorch's operators: [output gradients,] inputs, settings, options, results.
  Keywords torch_keywords, torch_backward_keywords;
  size_t num_positional = 0;     // tensors accepted by position
  size_t num_required = 0;       // up to the last required one
  size_t state_place = 0;        // among the inputs of a step
  bool dstate_by_place = false;  // after the inputs of the backward pass
  size_t output_index = 0;
  int dropped_axis = -1;                // the axis that o does not have
  std::vector<unsigned> ranks_of_step;  // a bit for each rank that a tensor may have; constants have any
  std::vector<std::vector<AxisPlace>> axes_of_states;
  std::string forward_signature, state_signature, backward_signature, step_signature;
  std::string forward_text, backward_text, step_text;
  nanobind::object gradients, state;  // named tuple types

 private:
  AxisPlace PlaceOfAxis(std::string_view axis) const;
  void ListKeywords();
  void WriteSignatures(nanobind::module_& m);
  void WriteTexts(const std::string& gradients_type, const std::string& gradient_names);

  std::deque<std::string> names_;  // names of the parts of states for PyTorch
};

// True if the default of a word is not one of its choices.
bool MayBeNone(const SettingSpec& spec);

// Axes are alternatives, "B, G, N, T|D, N". These return the alternative of a rank, or none; the index of an axis in an
// alternative, or -1; all axes of an alternative.
std::string_view FormOf(std::string_view axes, int rank);
int PlaceOf(std::string_view axis, std::string_view form);
std::vector<std::string_view> AxesIn(std::string_view form);

// Axes, or a text about them, without the axis T, for one token.
std::string WithoutTokens(std::string_view text);

// "[B, G, N, T] or [D, N]".
std::string Bracketed(std::string axes);

#pragma GCC visibility pop

}  // namespace heed::binding

#endif  // PYTHON_MECHANISM_BOUND_H_
