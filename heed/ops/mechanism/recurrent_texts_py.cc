// Docstrings of recurrent mechanisms: what their headers say, their arguments, and an example
// that is made of these, so that every mechanism has one.
#include <cctype>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/ops/mechanism/recurrent_bound_py.h"
#include "python/docstring.h"
#include "python/numpy_array.h"

namespace heed::recurrent {
namespace {

using python::Find;
using python::Said;

// Of the example.
constexpr std::pair<std::string_view, int> kSizes[] = {
    {"B", 1}, {"T", 6}, {"H", 2}, {"HV", 4}, {"K", 8}, {"V", 16}, {"M", 32}, {"G", 2}, {"N", 8},
    {"P", 16}, {"n", 2}, {"C", 32}};

// "[B, T, H, K]: ..." as "(1, 6, 2, 8)".
std::string Shape(std::string_view text) {
  std::string shape = "(", axis;
  size_t axes = 0;
  for (const char c : text.substr(0, text.find(']') + 1)) {
    if (std::isalpha(static_cast<unsigned char>(c)) != 0) {
      axis += c;
      continue;
    }
    for (const auto& [name, size] : kSizes) {
      if (name == axis) shape += (axes++ == 0 ? "" : ", ") + std::to_string(size);
    }
    axis.clear();
  }
  return shape + (axes == 1 ? ",)" : ")");
}

bool OverTokens(std::string_view text) { return text.starts_with("[B, T"); }

// The text of a step's argument, which has no axis of tokens.
std::string OfOneToken(std::string_view text) {
  std::string result(text);
  const size_t at = result.find("[B, T");
  if (at != std::string::npos) result.erase(at + 2, 3);
  return result;
}

// What is said of an input, under its name or that of its part in the recurrence.
std::string_view TextOf(const Bound& b, const Input& input) {
  const std::string_view text = Find({b.docs.fields}, input.name);
  if (!text.empty()) return text;
  return Find({b.docs.fields}, input.role == Input::kQuery ? "q"
                               : input.role == Input::kKey ? "k"
                                                           : "v");
}

// Lines that make the inputs, and the inputs as they are given.
class Example {
 public:
  explicit Example(const Bound& b) : b_(b) {
    lines_ = "Example:\n\n  >>> import heed, numpy as np\n  >>> rng = np.random.default_rng(0)";
    for (const Input& input : b.inputs) {
      if (input.optional) continue;
      const std::string_view text = TextOf(b, input);
      const bool decays = text.find("<= 0") != std::string::npos ||
                          text.find("< 0") != std::string::npos;
      const bool fractions = decays || input.role == Input::kConstants ||
                             (input.tensor != nullptr &&
                              input.tensor->values == Tensor::kFractions);
      Add(input.name + " = " + (decays ? "-" : "") + "rng." +
          (fractions ? "random" : "standard_normal") + "(" + Shape(text) + ", np.float32)");
      const std::string comma = given_.empty() ? "" : ", ";
      given_ += comma + input.name;
      newest_ += comma + input.name + (OverTokens(text) ? "[:, -1]" : "");
      if (input.role != Input::kValue) continue;
      const char* step = b.several_writes ? ", 0" : "";
      like_o_ = input.name + (b.several_writes ? "[:, :, 0]" : "");
      like_new_o_ = input.name + "[:, -1" + step + "]";
    }
    for (const SettingSpec& spec : b.settings) {
      const bool* causal = std::get_if<bool>(&spec.value);
      if (std::string_view(spec.name) == "causal" && !*causal) causal_ = ", causal=True";
    }
  }

  std::string Forward() const {
    const std::string call = "heed." + std::string(b_.name) + "(" + given_;
    if (!b_.has_state) return Shown("o = " + call + ")", "o.shape == " + like_o_ + ".shape");
    return Shown("o, state = " + call + causal_ + ", return_state=True)",
                 "o.shape == " + like_o_ + ".shape");
  }
  std::string Backward() const {
    const std::string call = b_.op_backward + "(np.ones_like(" + like_o_ + "), " + given_;
    const Input& first = b_.inputs.front();
    return Shown("gradients = heed." + call + ")",
                 "gradients.d" + first.name + ".shape == " + first.name + ".shape");
  }
  std::string Step() const {
    std::string lines = "o, state = heed." + std::string(b_.name) + "(" + given_ + causal_ +
                        ", return_state=True)\n  >>> o = heed." + b_.op_step + "(" + newest_ +
                        ", state" + causal_ + ")";
    return Shown(lines, "o.shape == " + like_new_o_ + ".shape");
  }

 private:
  void Add(const std::string& line) { lines_ += "\n  >>> " + line; }
  std::string Shown(const std::string& lines, const std::string& truth) const {
    return lines_ + "\n  >>> " + lines + "\n  >>> " + truth + "\n  True";
  }

  const Bound& b_;
  std::string lines_, given_, newest_, like_o_, like_new_o_, causal_;
};

}  // namespace

void Bound::WriteTexts(const std::string& gradients_type, const std::string& gradient_names) {
  const Example example(*this);
  const std::string_view own = Find({docs.fields}, "initial");
  const std::string_view states = Find({docs.fields}, "states");
  const std::string state_is =
      !own.empty()      ? std::string(own)
      : !states.empty() ? std::string(states)
                        : "[B, HV, K, V]; f32, or f64 for f64; absent: 0";
  const std::string before = "the state before the first token: " + state_is;
  const std::string updated = "what a call with return_state=True returned, updated in place: " +
                              state_is;
  std::vector<Said> known = {{"initial_state", before.c_str()}, {"state", updated.c_str()}};
  known.insert(known.end(), in_python.begin(), in_python.end());
  std::string value;
  for (const Input& input : inputs) {
    known.push_back({input.name.c_str(), TextOf(*this, input).data()});
    if (input.role == Input::kValue) value = input.name;
  }
  constexpr std::string_view kCopied =
      "An array whose last axis is not contiguous is copied, all others are read in place.";
  const std::string named = state.is_valid() ? "The state is a named tuple, heed." +
                                                   python::TypeName(state) + ".\n"
                                             : "";
  const std::string of_steps = several_writes ? " without the axis of steps" : "";
  forward_text = python::Docstring(
      docs.forward, forward_signature, {known, docs.fields},
      std::string(kCopied) + "\n\nReturns o, in the shape of " + value + of_steps +
          (has_state ? ", or (o, state) with return_state=True" : "") + ", as NumPy arrays.\n" +
          named + "\n" + example.Forward());
  backward_text = python::Docstring(
      docs.backward, backward_signature, {known, docs.fields},
      "Returns the named tuple heed." + gradients_type + ": " + gradient_names +
          ", NumPy arrays in the\nshape and dtype of what they are the gradients of; None where "
          "that was not given.\n\n" + example.Backward());
  if (!has_state) return;
  std::vector<std::string> texts;
  for (const Input& input : inputs) texts.push_back(OfOneToken(TextOf(*this, input)));
  std::vector<Said> of_one_token;
  for (size_t i = 0; i < inputs.size(); ++i) {
    of_one_token.push_back({inputs[i].name.c_str(), texts[i].c_str()});
  }
  step_text = python::Docstring(docs.step, step_signature,
                                {of_one_token, known, docs.fields},
                                "Returns o, in the shape of " + value + of_steps + ".\n\n" + example.Step());
}

}  // namespace heed::recurrent
