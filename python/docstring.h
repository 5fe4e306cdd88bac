// Docstrings of bound functions: the headers' comments, with the names and the order of Python.
#ifndef HEED_PYTHON_DOCSTRING_H_
#define HEED_PYTHON_DOCSTRING_H_

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace heed::python {

// The description of an argument.
struct Said {
  const char* name;
  const char* text;
};

// The header comments of a mechanism, as tools/docstrings.py extracts them.
struct Docs {
  const char *forward = "", *backward = "", *step = "";
  std::span<const Said> fields = {};
};

// The first description of `name` in these tables, then a general description of an argument with this name; "" if no
// table has one.
using Tables = std::initializer_list<std::span<const Said>>;
std::string_view Find(Tables tables, std::string_view name);

std::string JoinedText(std::initializer_list<std::string_view> parts);

// `text`, a line for each parameter of `signature`, "def f(q: Array, *, ...) -> Result", and `rest`, which may begin on
// the line after its literal's quotes.
std::string Docstring(std::string_view text, std::string_view signature, Tables tables, std::string_view rest = "");

}  // namespace heed::python

#endif  // HEED_PYTHON_DOCSTRING_H_
