// A recurrent mechanism as Python sees it: its keywords, signatures and texts, and a call
// on its way in.
#ifndef HEED_OPS_MECHANISM_RECURRENT_BOUND_PY_H_
#define HEED_OPS_MECHANISM_RECURRENT_BOUND_PY_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <vector>

#include "heed/ops/mechanism/recurrent_py.h"
#include "python/arguments.h"
#include "python/tensor_caster.h"

namespace heed::recurrent {

// Visible no further than what is in it.
#pragma GCC visibility push(hidden)

// A call on its way in.
struct Call {
  python::Arrays arrays;
  Arguments in;
  Options options;
  State state;  // of a step, or the final one of PyTorch's
  Results gradients;  // PyTorch's
  nanobind::handle out;
  TensorView out_view;
  bool return_state = false, describe = false;
  int num_threads = 0;
  const std::vector<SettingSpec>* specs = nullptr;
  Settings settings;
};

// A mechanism with the tables and texts that its functions need for as long as the module
// lives.
struct Bound : Binding {
  Bound(nanobind::module_& m, const Binding& binding);

  std::string op_backward, op_step;
  std::vector<python::Keyword<Call>> positional, forward_keywords, backward_keywords,
      step_keywords;
  // Of PyTorch's operators: [incoming gradients,] inputs, settings, options, results.
  std::vector<python::Keyword<Call>> torch_keywords, torch_backward_keywords;
  size_t num_positional = 0;  // what may be left out is a keyword
  std::string forward_signature, state_signature, backward_signature, step_signature;
  std::string forward_text, backward_text, step_text;
  nanobind::object gradients, state;  // named tuples

 private:
  void DescribeTorch();
  void Describe(nanobind::module_& m);
  void WriteTexts(const std::string& gradients_type, const std::string& gradient_names);
};

#pragma GCC visibility pop

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_BOUND_PY_H_
