// Docstrings of mechanisms: the text of their headers, their arguments, and an example generated from these, so that
// every mechanism has one.
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "python/mechanism/bound.h"
#include "python/docstring.h"
#include "python/numpy_array.h"

namespace heed::binding {
namespace {

using python::Find;
using python::Said;

// Sizes of axes in the example.
constexpr std::pair<std::string_view, int> kSizes[] = {{"B", 1},  {"T", 6}, {"H", 2}, {"HV", 4}, {"K", 8},  {"V", 16},
                                                       {"M", 32}, {"n", 2}, {"D", 8}, {"N", 16}, {"G", 1},  {"P", 4},
                                                       {"L", 6},  {"d", 4}, {"W", 4}, {"R", 8},  {"C", 32}, {"2", 2}};

std::string Shape(std::string_view form) {
  std::string shape;
  const std::vector<std::string_view> axes = AxesIn(form);
  for (const std::string_view axis : axes) {
    const auto* known = std::ranges::find(kSizes, axis, &std::pair<std::string_view, int>::first);
    if (known == std::end(kSizes)) throw InternalError("binding: no size of axis " + std::string(axis));
    shape += (shape.empty() ? "" : ", ") + std::to_string(known->second);
  }
  return "(" + shape + (axes.size() == 1 ? ",)" : ")");
}

std::string_view TextOf(const Bound& b, const Parameter& tensor) { return Find({b.docs.fields}, tensor.name); }

// Lines that create the inputs, and the inputs as arguments.
class Example {
 public:
  explicit Example(const Bound& b) : b_(b) {
    lines_ = "Example:\n\n  >>> import heed, numpy as np\n  >>> rng = np.random.default_rng(0)";
    for (size_t i = 0; i < b.tensors.size(); ++i) {
      const Parameter& tensor = b.tensors[i];
      if (tensor.optional && (tensor.keyword || i >= b.num_required)) continue;
      // Alternatives are chosen by that of constants, or that without groups.
      std::string_view form;
      for (const int rank : {3, 2, 1, 4, 5}) {
        if (form.empty()) form = FormOf(tensor.axes, rank);
      }
      const bool normal = tensor.values == Parameter::kNormal;
      const bool negative = tensor.values == Parameter::kRates || tensor.values == Parameter::kDecays;
      lines_ += "\n  >>> " + tensor.name + " = " + (negative ? "-" : "") + "rng." +
                (normal ? "standard_normal" : "random") + "(" + Shape(form) + ", np.float32)";
      const std::string comma = given_.empty() ? "" : ", ";
      given_ += comma + tensor.name;
      const std::string newest = form.ends_with(", T") ? "[..., -1" : PlaceOf("T", form) == 1 ? "[:, -1" : "";
      newest_ += comma + tensor.name + newest + (newest.empty() ? "" : "]");
      if (i != b.output_index) continue;
      like_o_ = tensor.name + (b.dropped_axis < 0 ? "" : "[:, :, 0]");
      like_new_o_ = tensor.name + newest + (b.dropped_axis < 0 ? "]" : ", 0]");
    }
    for (const SettingSpec& spec : b.settings) {
      const bool* causal = std::get_if<bool>(&spec.value);
      if (std::string_view(spec.name) == "causal" && !*causal) causal_ = ", causal=True";
    }
  }

  std::string Forward() const {
    const std::string call = "heed." + std::string(b_.name) + "(" + given_;
    if (!b_.has_state()) return Shown("o = " + call + ")", "o.shape == " + like_o_ + ".shape");
    return Shown("o, state = " + call + causal_ + ", return_state=True)", "o.shape == " + like_o_ + ".shape");
  }
  std::string Backward() const {
    const std::string& first = b_.tensors.front().name;
    return Shown("gradients = heed." + b_.op_backward + "(np.ones_like(" + like_o_ + "), " + given_ + ")",
                 "gradients.d" + first + ".shape == " + first + ".shape");
  }
  std::string Step() const {
    const bool next = b_.state_place == b_.num_required;
    return Shown("o, state = heed." + std::string(b_.name) + "(" + given_ + causal_ +
                     ", return_state=True)\n  >>> o = heed." + b_.op_step + "(" + newest_ +
                     (next ? ", state" : ", state=state") + causal_ + ")",
                 "o.shape == " + like_new_o_ + ".shape");
  }

 private:
  std::string Shown(const std::string& lines, const std::string& truth) const {
    return lines_ + "\n  >>> " + lines + "\n  >>> " + truth + "\n  True";
  }

  const Bound& b_;
  std::string lines_, given_, newest_, like_o_, like_new_o_, causal_;
};

// The memory of inputs and of o.
std::string MemoryText(const Bound& b) {
  std::string in_place;
  size_t count = 0;
  for (const Parameter& tensor : b.tensors) {
    if (tensor.reading != Parameter::kInPlace) continue;
    in_place += (count++ == 0 ? "" : " and ") + tensor.name;
  }
  if (count == b.tensors.size()) {
    return "Any strides are read in place; o has the memory layout of " + b.output_tensor().name + ".";
  }
  return "An array whose last axis is not contiguous is copied, all others are read in place" +
         (count == 0 ? "." : ", and " + in_place + " always.");
}

// "[B, HV, K, V]", or "S [B, HV, K, V] and z [B, HV, K]".
std::string AxesOfStates(const Bound& b) {
  std::string text;
  for (const StateParameter& state : b.states) {
    if (&state != &b.states.front()) text += &state == &b.states.back() ? " and " : ", ";
    text += (b.states.size() > 1 ? state.name + " " : "") + "[" + state.axes + "]";
  }
  return text;
}

}  // namespace

void Bound::WriteTexts(const std::string& gradients_type, const std::string& gradient_names) {
  const Example example(*this);
  const std::string own(Find({docs.fields}, "states"));
  const std::string axes = own.empty() ? AxesOfStates(*this) + "; f32, or f64 for f64" : own;
  const std::string before =
      "the state before the first token: " + axes + (own.empty() ? "; absent: no tokens so far" : "");
  const std::string updated = "what a call with return_state=True returned, updated in place: " + axes;
  std::vector<Said> known = in_python;
  known.insert(known.end(), {{"initial_state", before.c_str()}, {"state", updated.c_str()}});
  known.insert(
      known.end(),
      {{"comm",
        "a communicator of mpi4py: arrays are this rank's tokens of one sequence, in the order of ranks; "
        "lengths, starts and cu_seqlens are those of the whole, initial_state is given on rank 0 (with reverse "
        "on the last), the state is returned where return_state=True, gradients of arrays without tokens are "
        "this rank's part"},
       {"relay", "with comm: each rank waits for the states of the one before it"},
       {"segment",
        "tokens of a segment, a multiple of 64: segments are summarised at once and computed at once, so that a head "
        "occupies more threads; none by default; with comm any number, 4096 by default"}});
  std::vector<std::string> texts;
  for (const Parameter& tensor : tensors) {
    known.push_back({tensor.name.c_str(), TextOf(*this, tensor).data()});
    texts.push_back(WithoutTokens(TextOf(*this, tensor)));
  }
  const std::string o =
      "Returns o, in the shape of " + output_tensor().name + (dropped_axis < 0 ? "" : " without the axis of steps");
  const std::string named =
      state.is_valid() ? "The state is a named tuple, heed." + python::TypeName(state) + ".\n" : "";
  forward_text = python::Docstring(
      docs.forward, forward_signature, {known, docs.fields},
      MemoryText(*this) + "\n\n" + o +
          (has_state() ? ", or (o, state) with return_state=True, as NumPy arrays.\n" : ", as a NumPy array.\n") +
          named + "\n" + example.Forward());
  backward_text =
      python::Docstring(docs.backward, backward_signature, {known, docs.fields},
                        "Returns the named tuple heed." + gradients_type + ": " + gradient_names +
                            ", NumPy arrays in the\nshape and dtype of what they are the gradients of; None where "
                            "that was not given.\n\n" +
                            example.Backward());
  if (!has_state()) return;
  std::vector<Said> of_one_token;
  for (size_t i = 0; i < tensors.size(); ++i) of_one_token.push_back({tensors[i].name.c_str(), texts[i].c_str()});
  step_text =
      python::Docstring(docs.step, step_signature, {of_one_token, known, docs.fields}, o + ".\n\n" + example.Step());
}

}  // namespace heed::binding
