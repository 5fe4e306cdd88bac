// Docstrings of bound functions.
#include "python/docstring.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace heed::python {
namespace {

constexpr size_t kColumns = 92;

// Descriptions of arguments that many functions have.
constexpr Said kEverywhere[] = {
    {"do", "the gradient of o, in its shape and dtype"},
    {"dstate", "the gradient of the final state, in its shape; default zeros"},
    {"return_state", "True: the result is (o, state), with the state after the last token"},
    {"return_lse", "True: the result is (o, lse)"},
    {"out", "the array that the result is written to, and that is returned"},
    {"threads",
     "at most so many; default that of heed.set_num_threads, else one per CPU that the "
     "process may use"},
    {"options", "the other keywords of heed.attention, as they are there"},
};

// The names of the parameters, in order.
std::vector<std::string_view> Parameters(std::string_view signature) {
  std::vector<std::string_view> names;
  const size_t begin = signature.find('(') + 1;
  int depth = 1;
  for (size_t i = begin, start = begin; depth > 0 && i < signature.size(); ++i) {
    const char c = signature[i];
    if (c == '(' || c == '[') ++depth;
    if (c == ')' || c == ']') --depth;
    if (depth != 0 && (depth != 1 || c != ',')) continue;
    std::string_view name = signature.substr(start, i - start);
    name.remove_prefix(std::min(name.find_first_not_of(" *"), name.size()));
    name = name.substr(0, name.find_first_of(":= "));
    if (!name.empty() && name != "self") names.push_back(name);
    start = i + 1;
  }
  return names;
}

// Appends a text with `indent` spaces before its continuation lines.
void AppendWrapped(std::string_view text, size_t indent, std::string& to) {
  size_t column = indent;
  while (!text.empty()) {
    const size_t length = std::min(text.find(' '), text.size());
    if (column > indent && column + 1 + length > kColumns) {
      to += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      to += ' ';
      ++column;
    }
    to += text.substr(0, length);
    column += length;
    text.remove_prefix(std::min(length + 1, text.size()));
  }
}

}  // namespace

std::string_view Find(Tables tables, std::string_view name) {
  const auto in = [&](std::span<const Said> table) {
    const auto found = std::ranges::find_if(table, [&](const Said& x) { return x.name == name; });
    return std::string_view(found == table.end() ? "" : found->text);
  };
  for (const auto& table : tables) {
    if (const std::string_view text = in(table); !text.empty()) return text;
  }
  return in(kEverywhere);
}

std::string JoinedText(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

std::string Docstring(std::string_view text, std::string_view signature, Tables tables, std::string_view rest) {
  const std::vector<std::string_view> names = Parameters(signature);
  std::string result(text);
  if (!names.empty()) result += "\n\nArguments:";
  size_t width = 0;
  for (const std::string_view name : names) width = std::max(width, name.size());
  for (const std::string_view name : names) {
    result += "\n  " + std::string(name) + std::string(width - name.size() + 2, ' ');
    AppendWrapped(Find(tables, name), width + 4, result);
  }
  if (rest.starts_with('\n')) rest.remove_prefix(1);  // a literal begins with a line break
  if (!rest.empty()) result += "\n\n" + std::string(rest);
  return result;
}

}  // namespace heed::python
