// What Python's functions call the arguments of C++'s, where that differs.
#ifndef HEED_PYTHON_ARGUMENT_NAMES_H_
#define HEED_PYTHON_ARGUMENT_NAMES_H_

#include <string_view>

namespace heed::python {

// What Python's function `operation` calls an argument of C++'s: text that lives as long as the module, or `name` where it has no other.
std::string_view NameInPython(std::string_view operation, std::string_view name);

}  // namespace heed::python

#endif  // HEED_PYTHON_ARGUMENT_NAMES_H_
