// Common parts of the example programs: options, and errors of one line.
#ifndef HEED_EXAMPLES_TASKS_COMMAND_H_
#define HEED_EXAMPLES_TASKS_COMMAND_H_

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

inline int64_t Parse(const std::string& what, std::string_view text, int64_t smallest, int64_t largest) {
  int64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc() || end != last || value < smallest || value > largest) {
    throw std::runtime_error(what + " is '" + std::string(text) + "', expected " + std::to_string(smallest) + " to " +
                             std::to_string(largest));
  }
  return value;
}

// PROGRAM FILE... [--option VALUE]..., with `files` files. A --prompt must not be empty.
class Command {
 public:
  // `values` has all options and their defaults.
  Command(std::span<char* const> arguments, std::map<std::string, std::string> values, const char* usage,
          size_t files = 1)
      : arguments_(arguments), values_(std::move(values)) {
    bool good = arguments.size() > files && (arguments.size() - files) % 2 == 1;
    for (size_t i = 1 + files; good && i < arguments.size(); i += 2) {
      good = values_.contains(arguments[i]);
      values_[arguments[i]] = arguments[i + 1];
    }
    if (!good) throw std::runtime_error(std::string("expected ") + usage);
    if (values_.contains("--prompt") && Text("--prompt").empty()) {
      throw std::runtime_error("--prompt is empty, expected a byte or more");
    }
  }

  std::string file(size_t i = 0) const { return arguments_[1 + i]; }
  const std::string& Text(const char* option) const { return values_.at(option); }
  int64_t Integer(const char* option, int64_t smallest, int64_t largest) const {
    return Parse(option, Text(option), smallest, largest);
  }

 private:
  std::span<char* const> arguments_;
  std::map<std::string, std::string> values_;
};

// The exit status of a program that calls `run`.
template <class Run>
int Main(const char* program, int argc, char** argv, const Run& run) {
  try {
    run(std::span<char* const>(argv, static_cast<size_t>(argc)));
    return 0;
  } catch (const std::exception& error) {  // one line: the error, and what was expected
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}

#endif  // HEED_EXAMPLES_TASKS_COMMAND_H_
