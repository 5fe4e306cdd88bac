// Docstrings of bound functions: what the headers say, in the words and order of Python.
#ifndef HEED_PYTHON_DOCSTRING_H_
#define HEED_PYTHON_DOCSTRING_H_

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace heed::python {

// What is said of an argument.
struct Said {
  const char* name;
  const char* text;
};

// What the header of a mechanism says; tools/docstrings.py makes it.
struct Docs {
  const char *forward = "", *backward = "", *step = "";
  std::span<const Said> fields = {};
};

// The first that these tables say of `name`, then what is said of it wherever it occurs; "" if
// that is nothing.
using Tables = std::initializer_list<std::span<const Said>>;
std::string_view Find(Tables tables, std::string_view name);

// `text`, a line for each parameter of `signature`, "def f(q: Array, *, ...) -> Result", and
// `rest`, which may begin on the line after its literal's quotes.
std::string Docstring(std::string_view text, std::string_view signature, Tables tables, std::string_view rest = "");

}  // namespace heed::python

#endif  // HEED_PYTHON_DOCSTRING_H_
