// Reads the arguments of a Python call: keywords, scalars, and errors that name the wrong argument.
//
// A function of the module takes (*args, **kwargs) and a table of its arguments. With thirty options this is faster
// than converting thirty defaults, and one table serves every function that has them.
#ifndef HEED_PYTHON_ARGUMENTS_H_
#define HEED_PYTHON_ARGUMENTS_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace heed::python {

namespace nb = nanobind;

// One argument that is being read. `operation` and `name` are for messages; `index` is its keyword's.
struct Argument {
  const char* operation;
  const char* name;
  nb::handle value;
  size_t index = 0;
};

// Throws InvalidArgument "attention: window is (1, -2), expected ...".
[[noreturn]] void Fail(const char* operation, const char* name, const std::string& got, const std::string& expected);

// Fails with "is <value>", the value printed if it is short.
[[noreturn]] void Fail(const Argument& argument, const std::string& expected);

// Each function throws InvalidArgument for a wrong type or value. A bool is not accepted as a number, and 3.0 not as an
// int. ToChoice() accepts one of the given words.
std::string ToChoice(const Argument& argument, const std::vector<std::string>& choices);
bool ToBool(const Argument& argument);
double ToFinite(const Argument& argument);
int64_t ToInt(const Argument& argument, int64_t min, int64_t max);
uint64_t ToUnsigned(const Argument& argument);
std::string ToString(const Argument& argument, const char* expected);

// An argument of a function whose call is collected in a `Call`.
template <class Call>
struct Keyword {
  const char* name;
  bool none_is_absent;  // its default is None
  void (*read)(Call& call, const Argument& argument);
  size_t index = 0;  // distinguishes keywords with a common reader
};

// Returns the keywords of all parts in this order.
template <class Call>
std::vector<Keyword<Call>> Joined(std::initializer_list<std::span<const Keyword<Call>>> parts) {
  std::vector<Keyword<Call>> all;
  for (const std::span<const Keyword<Call>> part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Throws a Python TypeError, as Python does for its own functions.
[[noreturn]] void FailTooMany(const char* operation, size_t expected, size_t got);
[[noreturn]] void FailUnknown(const char* operation, const std::string& name, const std::vector<std::string>& keywords);

// If `name` is another library's name for one of these keywords, the end of a message that says so; else empty.
std::string ForeignKeyword(const std::string& name, const std::vector<std::string>& keywords);
[[noreturn]] void FailTwice(const char* operation, const char* name);
[[noreturn]] void FailMissing(const char* operation, const char* name);

// Reads all arguments: the first `num_positional` keywords may be given by position.
template <class Call>
void Read(const char* operation, std::span<const Keyword<Call>> keywords, size_t num_positional, PyObject* args,
          PyObject* kwargs, Call& call) {
  const size_t num_args = args == nullptr ? 0 : static_cast<size_t>(NB_TUPLE_GET_SIZE(args));
  if (num_args > num_positional) FailTooMany(operation, num_positional, num_args);
  for (size_t i = 0; i < num_args; ++i) {
    PyObject* value = NB_TUPLE_GET_ITEM(args, static_cast<Py_ssize_t>(i));
    if (value == Py_None && keywords[i].none_is_absent) continue;
    keywords[i].read(call, {operation, keywords[i].name, value, keywords[i].index});
  }
  PyObject *key, *value;
  for (Py_ssize_t position = 0; kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value);) {
    const char* name = PyUnicode_AsUTF8AndSize(key, nullptr);
    if (name == nullptr) throw nb::python_error();
    size_t i = 0;
    while (i < keywords.size() && std::strcmp(keywords[i].name, name) != 0) ++i;
    if (i == keywords.size()) {
      std::vector<std::string> names;
      for (const auto& keyword : keywords) names.emplace_back(keyword.name);
      FailUnknown(operation, name, names);
    }
    if (i < num_args) FailTwice(operation, name);
    if (value == Py_None && keywords[i].none_is_absent) continue;
    keywords[i].read(call, {operation, keywords[i].name, value, keywords[i].index});
  }
}

}  // namespace heed::python

#endif  // HEED_PYTHON_ARGUMENTS_H_
