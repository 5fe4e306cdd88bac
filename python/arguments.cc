// Reads the arguments of a Python call: scalars and messages.
#include "python/arguments.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "heed/core/error.h"

namespace heed::python {
namespace {

constexpr size_t kLongestValue = 60;  // of a value in a message

// The type's name, with its module if it is not a builtin type.
std::string TypeName(nb::handle value) {
  const nb::handle type = value.type();
  const std::string name = nb::cast<std::string>(nb::str(nb::getattr(type, "__name__", nb::str("?"))));
  const nb::object module = nb::getattr(type, "__module__", nb::none());
  if (!PyUnicode_Check(module.ptr())) return name;
  const std::string prefix = nb::cast<std::string>(module);
  return prefix == "builtins" ? name : prefix + "." + name;
}

// "3", "'abc'", "(1, 2)", or "a numpy.ndarray" for long or large values.
std::string Describe(nb::handle value) {
  PyObject* const p = value.ptr();
  if (p == Py_None || PyBool_Check(p) || PyLong_Check(p) || PyFloat_Check(p) || PyUnicode_Check(p) ||
      ((PyTuple_Check(p) || PyList_Check(p)) && PyObject_Size(p) <= 8)) {
    const std::string text = nb::cast<std::string>(nb::repr(value));
    if (text.size() <= kLongestValue && text.find('\n') == std::string::npos) return text;
  }
  return "of type " + TypeName(value);
}

// True for bools of Python and of NumPy.
bool IsBool(nb::handle value) {
  if (PyBool_Check(value.ptr())) return true;
  if (PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr())) return false;  // without a look at the name
  const std::string name = TypeName(value);
  return name == "numpy.bool" || name == "numpy.bool_";
}

// An integer of Python or NumPy as a Python int; a null object for anything else.
nb::object AsInt(nb::handle value) {
  if (IsBool(value) || !PyIndex_Check(value.ptr())) return {};
  nb::object result = nb::steal(PyNumber_Index(value.ptr()));
  if (!result.is_valid()) PyErr_Clear();
  return result;
}

[[noreturn]] void RaiseTypeError(const char* operation, const std::string& text) {
  throw nb::type_error((std::string(operation) + "() " + text).c_str());
}

}  // namespace

void Fail(const char* operation, const char* name, const std::string& got, const std::string& expected) {
  throw InvalidArgument(std::string(operation) + ": " + name + " " + got + ", expected " + expected);
}

void Fail(const Argument& argument, const std::string& expected) {
  Fail(argument.operation, argument.name, "is " + Describe(argument.value), expected);
}

std::string ToChoice(const Argument& argument, const std::vector<std::string>& choices) {
  std::string expected;
  for (const std::string& choice : choices) {
    expected += (expected.empty() ? "'" : ", '") + choice + "'";
  }
  std::string text = ToString(argument, expected.c_str());
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    Fail(argument, "one of " + expected);
  }
  return text;
}

bool ToBool(const Argument& argument) {
  if (!IsBool(argument.value)) Fail(argument, "True or False");
  return PyObject_IsTrue(argument.value.ptr()) == 1;
}

double ToFinite(const Argument& argument) {
  constexpr char kExpected[] = "a finite number";
  PyObject* const p = argument.value.ptr();
  double value;
  if (PyFloat_Check(p)) {
    value = PyFloat_AsDouble(p);
  } else {
    const bool is_number = PyIndex_Check(p) || PyType_GetSlot(Py_TYPE(p), Py_nb_float) != nullptr;
    if (!is_number || IsBool(argument.value)) Fail(argument, kExpected);
    value = PyFloat_AsDouble(p);
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      Fail(argument, kExpected);
    }
  }
  if (!std::isfinite(value)) Fail(argument, kExpected);
  return value;
}

int64_t ToInt(const Argument& argument, int64_t min, int64_t max) {
  const nb::object value = AsInt(argument.value);
  int overflow = 0;
  const int64_t result = value.is_valid() ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : 0;
  if (!value.is_valid() || overflow != 0 || result < min || result > max) {
    std::string expected = "an int of at least " + std::to_string(min);
    if (max != INT64_MAX) {
      expected = "an int from " + std::to_string(min) + " to " + std::to_string(max);
    }
    Fail(argument, expected);
  }
  return result;
}

uint64_t ToUnsigned(const Argument& argument) {
  const nb::object value = AsInt(argument.value);
  const uint64_t result = value.is_valid() ? PyLong_AsUnsignedLongLong(value.ptr()) : 0;
  if (!value.is_valid() || (result == UINT64_MAX && PyErr_Occurred())) {
    PyErr_Clear();
    Fail(argument, "an int from 0 to 2^64 - 1");
  }
  return result;
}

std::string ToString(const Argument& argument, const char* expected) {
  const char* text =
      PyUnicode_Check(argument.value.ptr()) ? PyUnicode_AsUTF8AndSize(argument.value.ptr(), nullptr) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    Fail(argument, expected);
  }
  return text;
}

void FailTooMany(const char* operation, size_t expected, size_t got) {
  RaiseTypeError(operation, "takes " + std::to_string(expected) + " positional arguments but " + std::to_string(got) +
                                " were given");
}

std::string ForeignKeyword(const std::string& name, const std::vector<std::string>& keywords) {
  // The names of these arguments in PyTorch, FlashAttention, flash-linear-attention and mamba_ssm.
  static const std::map<std::string, const char*> words = {
      {"is_causal", "causal (align='top_left' counts as PyTorch does)"},
      {"attn_mask", "mask if it is boolean, True for kept pairs, else bias"},
      {"attention_mask", "mask, True for kept keys, or key_lengths"},
      {"key_padding_mask", "key_lengths, or mask with True for kept keys"},
      {"dropout_p", "dropout"},
      {"enable_gqa", "nothing: fewer heads of k and v are shared by themselves"},
      {"softmax_scale", "scale"},
      {"sm_scale", "scale"},
      {"window_size", "window"},
      {"alibi_slopes", "alibi"},
      {"deterministic", "nothing: results are always reproducible"},
      {"return_attn_probs", "return_lse, or the function attention_weights"},
      {"cu_seqlens_kv", "cu_seqlens_k"},
      {"max_seqlen_q", "nothing: the longest length is found by itself"},
      {"max_seqlen_k", "nothing: the longest length is found by itself"},
      {"g", "log_decay"},
      {"gk", "log_decay"},
      {"g_gamma", "log_decay"},
      {"gv", "log_decay_v"},
      {"output_final_state", "return_state"},
      {"return_final_states", "return_state"},
      {"return_final_state", "return_state"},
      {"initial_states", "initial_state"},
      {"chunk_size", "nothing: there are no chunks to choose"},
      {"offsets", "cu_seqlens"},
  };
  const auto found = words.find(name);
  if (found == words.end()) return "";
  const std::string text = found->second, word = text.substr(0, text.find_first_of(" :,"));
  const bool known = word == "nothing" || std::ranges::find(keywords, word) != keywords.end();
  return known ? ": here that is " + text : "";
}

void FailUnknown(const char* operation, const std::string& name, const std::vector<std::string>& keywords) {
  RaiseTypeError(operation, "got an unexpected keyword argument '" + name + "'" + ForeignKeyword(name, keywords));
}

void FailTwice(const char* operation, const char* name) {
  RaiseTypeError(operation, "got multiple values for argument '" + std::string(name) + "'");
}

void FailMissing(const char* operation, const char* name) {
  RaiseTypeError(operation, "missing required argument: '" + std::string(name) + "'");
}

}  // namespace heed::python
