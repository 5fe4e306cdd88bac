// Docstrings of mechanisms on the scan engine.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heed/ops/mechanism/scanning_bound_py.h"
#include "python/docstring.h"

namespace heed::scanning {
namespace {

using namespace python;  // NOLINT: the binding's own vocabulary

// Sizes of the examples, by letters of axes.
constexpr AxisSizes kExampleSizes = {.B = 1, .D = 8, .T = 6, .N = 16, .G = 1, .L = 6, .H = 2,
                                     .d = 4, .W = 4, .w = 3};

std::string TupleText(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + (sizes.size() == 1 ? ",)" : ")");
}

// What is said of a tensor, of one token of each sequence: without the axis T.
std::string OfOneToken(std::string text) {
  for (const std::string_view axis : {", T", "T, "}) {
    for (size_t at; (at = text.find(axis)) != std::string::npos;) text.erase(at, axis.size());
  }
  return text;
}

}  // namespace

void Bound::WriteTexts(const std::string& type, const std::string& fields) {
  std::string lines = "Example:\n\n  >>> import heed, numpy as np\n  >>> rng = np.random.default_rng(0)";
  std::string given, newest;
  for (const Tensor& tensor : definition.tensors) {
    if (tensor.optional) continue;
    // Constants, or the form without groups.
    std::string axes;
    for (const int rank : {3, 2, 1, 4}) {
      if (axes.empty()) axes = AxesOf(tensor, rank);
    }
    const bool negative = tensor.values == Tensor::kRates || tensor.values == Tensor::kDecays;
    const bool normal = tensor.values == Tensor::kNormal;
    lines += std::string("\n  >>> ") + tensor.name + " = " + (negative ? "-" : "") + "rng." +
             (normal ? "standard_normal" : "random") + "(" +
             TupleText(ShapeOf(axes, kExampleSizes)) + ", np.float32)";
    const std::string comma = given.empty() ? "" : ", ";
    given += comma + tensor.name;
    newest += comma + tensor.name +
              (axes.back() == 'T' ? "[..., -1]" : axes.find('T') == 1 ? "[:, -1]" : "");
  }
  const std::vector<int64_t> scanned = ShapeOf(first().axes, kExampleSizes);
  const bool has_state = definition.has_state();
  const std::string call = "\n  >>> o" + std::string(has_state ? ", state" : "") + " = heed." + name +
                           "(" + given + (has_state ? ", return_state=True)" : ")");

  const std::string state_is(has_state ? Find({docs.fields}, "initial") : "");
  std::string of_states, sizes;  // their axes, and those of the example
  for (const StateTensor& one : states) {
    const bool several = states.size() > 1;
    of_states += (of_states.empty() ? "" : " and ") + (several ? std::string(one.name) + " " : "") + "[";
    for (const char axis : std::string_view(one.axes)) {
      if (of_states.back() != '[') of_states += ", ";
      of_states += axis == 'w' ? std::string("W - 1") : std::string(1, axis);
    }
    of_states += "]";
    sizes += (sizes.empty() ? "" : ", ") + TupleText(ShapeOf(one.axes, kExampleSizes));
  }
  const std::string updated =
      "what a call with return_state=True returned, updated in place: " + of_states;
  const std::string before = states.size() > 1 ? "such a tuple, before the first token: " + of_states +
                                                     "; absent: zeros"
                                               : std::string(state_is);
  const std::vector<Said> known = {{"initial_state", before.c_str()}, {"state", updated.c_str()}};
  const std::string shapes = states.size() > 1 ? "state.tail.shape, state.S.shape" : "state.shape";
  const std::string o = "o, in the shape of " + std::string(first().name);
  forward_text = Docstring(
      docs.forward, forward_signature, {known, docs.fields},
      "Any strides are read in place; o lies in memory as " + std::string(first().name) +
          " does. Returns " + o +
          (has_state ? ",\nor (o, state) with return_state=True, as NumPy arrays.\n\n"
                     : ", as a NumPy array.\n\n") +
          lines + call +
          (has_state ? "\n  >>> o.shape, " + shapes + "\n  (" + TupleText(scanned) + ", " + sizes + ")"
                     : "\n  >>> o.shape\n  " + TupleText(scanned)));
  backward_text = Docstring(
      docs.backward, backward_signature, {known, docs.fields},
      "Returns the named tuple heed." + type + ": " + fields +
          ", NumPy arrays in the\nshape and dtype of what they are the gradients of; None where "
          "that was not given.\n\n" + lines + "\n  >>> gradients = heed." + op_backward +
          "(np.ones_like(" + first().name + "), " + given + ")\n  >>> gradients.d" +
          first().name + ".shape\n  " + TupleText(scanned));
  if (!has_state) return;
  std::vector<std::string> texts;
  for (const Tensor& tensor : definition.tensors) {
    texts.push_back(OfOneToken(std::string(Find({docs.fields}, tensor.name))));
  }
  std::vector<Said> of_one_token;
  for (size_t i = 0; i < texts.size(); ++i) {
    of_one_token.push_back({definition.tensors[i].name, texts[i].c_str()});
  }
  std::string axes = first().axes;
  std::erase(axes, 'T');
  step_text = Docstring(docs.step, step_signature, {of_one_token, known, docs.fields},
                        "Returns " + o + ".\n\n" + lines + call + "\n  >>> heed." + op_step + "(" +
                            newest + ", state).shape\n  " +
                            TupleText(ShapeOf(axes, kExampleSizes)));
}

}  // namespace heed::scanning
