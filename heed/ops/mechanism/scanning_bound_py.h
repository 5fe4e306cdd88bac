// A mechanism on the scan engine with what its Python functions need: keywords, signatures, texts.
#ifndef HEED_OPS_MECHANISM_SCANNING_BOUND_PY_H_
#define HEED_OPS_MECHANISM_SCANNING_BOUND_PY_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/mechanism/scanning_py.h"
#include "python/arguments.h"
#include "python/tensor_caster.h"

namespace heed::scanning {

struct Bound;

// A call on its way in.
struct PythonCall {
  explicit PythonCall(const Bound& mechanism) : bound(mechanism) {}

  const Bound& bound;
  python::Arrays arrays;
  BackwardInputs in;
  Options options;
  Settings settings;
  StepState state;      // of a step
  Outputs finals;       // PyTorch's, without o
  Gradients gradients;  // PyTorch's
  nanobind::handle out;
  TensorView out_view;
  bool return_state = false, describe = false;
  int num_threads = 0;
};

// A mechanism with the tables and texts that its functions need for as long as the module lives.
struct Bound : Binding {
  Bound(nanobind::module_& m, const Binding& binding);

  std::string op_backward, op_step;
  std::vector<python::Keyword<PythonCall>> forward_keywords, backward_keywords, step_keywords;
  // Of PyTorch's operators: [incoming gradients,] inputs, settings, options, results.
  std::vector<python::Keyword<PythonCall>> torch_keywords, torch_backward_keywords;
  size_t num_required = 0;
  std::string forward_signature, state_signature, backward_signature, step_signature;
  std::string forward_text, backward_text, step_text;
  nanobind::object gradients;  // a type of named tuples
  States states;
  nanobind::object state;      // one of several states

  const Tensor& first() const { return definition.tensors[0]; }
  const Tensor& TensorOf(std::string_view tensor_name) const {
    for (const Tensor& tensor : definition.tensors) {
      if (tensor_name == tensor.name) return tensor;
    }
    throw InternalError("scanning: no tensor " + std::string(tensor_name));
  }

 private:
  void DescribeCalls(nanobind::module_& m);
  void WriteTexts(const std::string& type, const std::string& fields);
};

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_BOUND_PY_H_
