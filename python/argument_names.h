// Names of arguments in Python, if they differ from those in C++.
#ifndef HEED_PYTHON_ARGUMENT_NAMES_H_
#define HEED_PYTHON_ARGUMENT_NAMES_H_

#include <string_view>

namespace heed::python {

// The name in Python's function `operation` of the C++ argument `name`, in static storage, or `name` itself if they are
// equal.
std::string_view NameInPython(std::string_view operation, std::string_view name);

}  // namespace heed::python

#endif  // HEED_PYTHON_ARGUMENT_NAMES_H_
