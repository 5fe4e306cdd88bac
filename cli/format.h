// Format: the text of fmt::format. fmt's own function compiles the formatting of integers and floating-point numbers in
// every file that calls it, which takes two seconds each; here only format.cc does.
#ifndef CLI_FORMAT_H_
#define CLI_FORMAT_H_

#include <string>

#include "fmt/format.h"

namespace heed {

std::string FormatArguments(fmt::string_view text, fmt::format_args values);

// The compiler checks `text`, a format string of fmt, against the values.
template <class... Values>
std::string Format(fmt::format_string<Values...> text, Values&&... values) {
  return FormatArguments(text, fmt::make_format_args(values...));
}

}  // namespace heed

#endif  // CLI_FORMAT_H_
