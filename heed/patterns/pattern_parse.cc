// Parser of pattern expressions, for untrusted input.
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern_internal.h"

namespace heed {
namespace patterns {
namespace {

constexpr int kMostLevels = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {
    if (text.size() > kMostText) Fail("2^20 characters at most");
  }

  Pattern Whole() {
    Pattern pattern = Union();
    Skip();
    if (at_ != text_.size()) Fail("'|', '&' or the end");
    return pattern;
  }

 private:
  [[noreturn]] void Fail(const std::string& expected) const { FailAt(at_, expected); }
  [[noreturn]] void FailAt(size_t at, const std::string& expected) const {
    constexpr size_t kShown = 16;
    std::string shown(text_.substr(std::min(at, text_.size()), kShown));
    for (char& c : shown) c = c >= ' ' && c <= '~' ? c : '?';  // keeps what() one line of text
    const std::string got = at < text_.size() ? "'" + shown + "'" : "the end";
    throw InvalidArgument("pattern: has " + got + " at character " + std::to_string(at + 1) + ", expected " + expected);
  }

  void Skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool Take(char c) {
    Skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Take(c)) Fail(std::string("'") + c + "'");
  }
  std::string_view Word() {
    Skip();
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_')) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  // Increments the nesting level while it exists.
  struct Level {
    explicit Level(Parser& parser) : levels(parser.levels_) {
      if (++levels > kMostLevels) parser.Fail(std::to_string(kMostLevels) + " levels at most");
    }
    ~Level() { --levels; }
    int& levels;
  };

  Pattern Union() {
    const Level level(*this);
    Pattern pattern = Intersection();
    while (Take('|')) pattern = pattern | Intersection();
    return pattern;
  }
  Pattern Intersection() {
    Pattern pattern = Factor();
    while (Take('&')) pattern = pattern & Factor();
    return pattern;
  }
  Pattern Factor() {
    if (Take('(')) {
      Pattern pattern = Union();
      Expect(')');
      return pattern;
    }
    Skip();
    const size_t begin = at_;
    const std::string_view name = Word();
    const Builder* builder = FindBuilder(name);
    if (builder == nullptr) {
      std::string names;
      for (const Builder& known : Builders()) names += (names.empty() ? "" : ", ") + std::string(known.name);
      FailAt(begin, "one of " + names);
    }
    return Call(*builder);
  }

  Pattern Call(const Builder& builder) {
    const size_t count = builder.parameters.size();
    std::vector<std::optional<Value>> given(count);
    bool by_name = false;
    Expect('(');
    for (size_t next = 0; !Take(')'); ++next) {
      if (next > 0) Expect(',');
      Skip();
      const size_t begin = at_;
      size_t index = next;
      const std::string_view word = Word();
      if (!word.empty() && Take('=')) {
        by_name = true;
        for (index = 0; index < count && word != builder.parameters[index].name;) ++index;
        if (index == count || given[index]) FailAt(begin, "another argument of " + std::string(builder.name));
      } else {
        at_ = begin;
        if (by_name) Fail("an argument by name");
        if (index >= count) Fail("')': " + std::string(builder.name) + " takes " + std::to_string(count));
      }
      given[index] = ValueOf(builder.parameters[index]);
    }
    std::vector<Value> values;
    for (size_t i = 0; i < count; ++i) {
      const Parameter& parameter = builder.parameters[i];
      if (!given[i] && !parameter.otherwise) Fail(std::string(parameter.name) + " of " + builder.name);
      values.push_back(given[i] ? std::move(*given[i]) : Value(*parameter.otherwise));
    }
    return Build(builder, std::move(values));
  }

  Value ValueOf(const Parameter& parameter) {
    switch (parameter.kind) {
      case Parameter::kPatterns: {
        std::vector<Pattern> patterns;
        Expect('[');
        while (!Take(']')) {
          if (!patterns.empty()) Expect(',');
          patterns.push_back(Union());
        }
        return patterns;
      }
      case Parameter::kBlock:
        if (Take('(')) {
          Table block = {{2}, {}};
          block.values.push_back(Number(false));
          Expect(',');
          block.values.push_back(Number(false));
          Expect(')');
          return block;
        }
        return Number(false);
      case Parameter::kInts:
      case Parameter::kBools: {
        Table table;
        table.is_bool = parameter.kind == Parameter::kBools;
        Skip();
        if (at_ >= text_.size() || text_[at_] != '[') Fail("'['");
        List(table, 0);
        return table;
      }
      default: return Number(parameter.kind == Parameter::kSeed);
    }
  }

  // Reads nested lists of one shape.
  void List(Table& table, size_t axis) {
    const Level level(*this);
    const bool is_new = axis == table.shape.size();
    if (is_new) table.shape.push_back(-1);
    Expect('[');
    int64_t count = 0;
    for (; !Take(']'); ++count) {
      if (count > 0) Expect(',');
      Skip();
      const bool is_list = at_ < text_.size() && text_[at_] == '[';
      if (is_list) {
        if (axis + 1 == table.shape.size() && !(table.values.empty() && count == 0 && is_new)) Fail("a number");
        List(table, axis + 1);
        continue;
      }
      if (axis + 1 != table.shape.size()) Fail("'['");
      table.values.push_back(table.is_bool ? Truth() : Number(false));
    }
    int64_t& size = table.shape[axis];
    if (size < 0) size = count;
    if (size != count) Fail("lists of one length, " + std::to_string(size));
  }

  int64_t Truth() {
    Skip();
    const size_t begin = at_;
    const std::string_view word = Word();
    if (word != "True" && word != "False") FailAt(begin, "True or False");
    return word == "True";
  }

  // Reads a number of magnitude below 2^62; a seed may have 64 bits.
  int64_t Number(bool is_seed) {
    const uint64_t most = is_seed ? std::numeric_limits<uint64_t>::max() : (uint64_t{1} << 62) - 1;
    Skip();
    const size_t begin = at_;
    const bool negative = !is_seed && Take('-');
    const size_t digits = at_;
    uint64_t number = 0;
    for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])); ++at_) {
      const auto digit = static_cast<uint64_t>(text_[at_] - '0');
      if (number > (most - digit) / 10) FailAt(begin, "a smaller number");
      number = number * 10 + digit;
    }
    if (at_ == digits) FailAt(begin, "a whole number");
    return negative ? -static_cast<int64_t>(number) : static_cast<int64_t>(number);
  }

  std::string_view text_;
  size_t at_ = 0;
  int levels_ = 0;
};

}  // namespace
}  // namespace patterns

Pattern Pattern::Parse(std::string_view expression) { return patterns::Parser(expression).Whole(); }

}  // namespace heed
