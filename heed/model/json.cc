// JSON files of a model's folder.
#include "heed/model/json_internal.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/io/bytes_internal.h"

namespace heed::model {
namespace {

using nlohmann::json;

constexpr int kMostDepth = 64;
constexpr char kInfinity[] = "Infinity", kFloat[] = "__float__";

// Replaces Python's infinities and NaN, which JSON does not have, by objects.
std::string WithoutInfinity(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!quoted && text.substr(i).starts_with(kInfinity)) {
      plain += std::string("{\"") + kFloat + "\":\"" + kInfinity + "\"}";
      i += sizeof(kInfinity) - 2;
      continue;
    }
    plain += text[i];
    if (text[i] == '"') quoted = !quoted;
    if (quoted && text[i] == '\\' && i + 1 < text.size()) plain += text[++i];
  }
  return plain;
}

bool IsInfinity(const json& value) {
  return value.is_object() && value.size() == 1 && value.contains(kFloat) && value[kFloat] == kInfinity;
}

}  // namespace

json ParseJson(const std::string& path, std::string_view text) {
  bool deep = false;
  json document;
  try {
    document = json::parse(WithoutInfinity(text), [&](int depth, json::parse_event_t, json&) {
      deep = deep || depth > kMostDepth;
      if (deep)
        throw FileError(path + ": is nested deeper than " + std::to_string(kMostDepth) +
                        " levels, expected a model's JSON");
      return true;
    });
  } catch (const json::exception&) {
    throw FileError(path + ": is no JSON, expected a model's");
  }
  return document;
}

json ReadJson(const std::string& path, int64_t most_bytes) {
  const os::MappedFile file(path);
  if (std::cmp_greater(file.num_bytes(), most_bytes)) {
    throw FileError(path + ": has " + std::to_string(file.num_bytes()) + " bytes, expected at most " +
                    std::to_string(most_bytes));
  }
  return ParseJson(path, {reinterpret_cast<const char*>(file.data()), file.num_bytes()});
}

void CheckName(const std::string& path, const std::string& what, const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.size() > 255 ||
      name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
    throw FileError(path + ": " + what + " is " + Quote(name) + ", expected a name inside of the folder");
  }
}

struct Fields::Shared {
  json object;
  std::set<std::string> asked;
  std::map<std::string, std::string> aliases;
};

Fields::Fields(std::string path, json object)
    : path_(std::move(path)), shared_(std::make_shared<Shared>(Shared{std::move(object), {}, {}})) {
  if (!shared_->object.is_object()) throw FileError(path_ + ": holds no object, expected one");
}

std::string Fields::Called(const char* name) const {
  const auto other = shared_->aliases.find(name);
  return other != shared_->aliases.end() && shared_->object.contains(other->second) ? other->second : name;
}

const json* Fields::Value(const char* name) const {
  shared_->asked.insert(name);
  const auto found = shared_->object.find(Called(name));
  return found == shared_->object.end() ? nullptr : &*found;
}

const json* Fields::Find(const char* name) const {
  const json* value = Value(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

bool Fields::Has(const char* name) const { return Find(name) != nullptr; }
bool Fields::Present(const char* name) const { return Value(name) != nullptr; }

bool Fields::WasAsked(const char* name) const { return shared_->asked.contains(name); }

std::string Fields::Dump() const { return shared_->object.dump(-1, ' ', true, json::error_handler_t::replace); }

void Fields::Alias(const char* name, const char* other) const {
  shared_->aliases[name] = other;
  shared_->asked.insert(other);
}

void Fields::Ignore(std::initializer_list<const char*> names) const {
  shared_->asked.insert(names.begin(), names.end());
}

void Fields::CheckAllAsked(const std::string& owner) const {
  for (const auto& [name, value] : shared_->object.items()) {
    if (value.is_null() || shared_->asked.contains(name)) continue;
    throw Unsupported(path_ + ": " + Quote(name) + " is " +
                      Quote(value.dump(-1, ' ', true, json::error_handler_t::replace)) +
                      ", expected no such field: " + owner + " here has none, and its result may depend on it");
  }
}

void Fields::Fail(const char* name, const std::string& expected) const {
  const json* value = Value(name);
  const std::string got =
      value == nullptr ? "is absent" : "is " + Quote(value->dump(-1, ' ', true, json::error_handler_t::replace));
  throw FileError(path_ + ": '" + Called(name) + "' " + got + ", expected " + expected);
}

const json& Fields::Get(const char* name, const std::string& expected) const {
  const json* value = Value(name);
  if (value == nullptr) Fail(name, expected);
  return *value;
}

int64_t Fields::Integer(const char* name, int64_t least, int64_t most, std::optional<int64_t> fallback) const {
  if (fallback && !Present(name)) return *fallback;
  const std::string expected = "an integer, " + std::to_string(least) + " to " + std::to_string(most);
  const json& value = Get(name, expected);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))) {
    Fail(name, expected);
  }
  const int64_t number = value.get<int64_t>();
  if (number < least || number > most) Fail(name, expected);
  return number;
}

std::optional<int64_t> Fields::IntegerOrNull(const char* name, int64_t least, int64_t most,
                                             std::optional<int64_t> fallback) const {
  if (Present(name)) return Has(name) ? std::optional(Integer(name, least, most)) : std::nullopt;
  return fallback;
}

double Fields::Number(const char* name, double least, double most, std::optional<double> fallback) const {
  if (fallback && !Present(name)) return *fallback;
  const std::string expected = "a number, " + json(least).dump() + " to " + json(most).dump();
  const json& value = Get(name, expected);
  if (!value.is_number()) Fail(name, expected);
  const double number = value.get<double>();
  if (!(number >= least && number <= most)) Fail(name, expected);
  return number;
}

bool Fields::Bool(const char* name, std::optional<bool> fallback) const {
  if (fallback && !Present(name)) return *fallback;
  const json& value = Get(name, "true or false");
  if (!value.is_boolean()) Fail(name, "true or false");
  return value.get<bool>();
}

std::string Fields::Text(const char* name, std::optional<std::string> fallback) const {
  if (fallback && !Present(name)) return *fallback;
  const json& value = Get(name, "a text");
  if (!value.is_string()) Fail(name, "a text");
  return value.get<std::string>();
}

Fields Fields::Object(const char* name) const {
  const json& value = Get(name, "an object");
  if (!value.is_object()) Fail(name, "an object");
  return Fields(path_, value);
}

std::vector<std::string> Fields::Texts(const char* name) const {
  std::vector<std::string> texts;
  const json* value = Find(name);
  if (value == nullptr) return texts;
  if (!value->is_array()) Fail(name, "a list of texts");
  for (const json& text : *value) {
    if (!text.is_string()) Fail(name, "a list of texts");
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

std::vector<double> Fields::Numbers(const char* name) const {
  std::vector<double> numbers;
  const json* value = Find(name);
  if (value == nullptr) return numbers;
  if (!value->is_array()) Fail(name, "a list of numbers");
  for (const json& number : *value) {
    if (!number.is_number() && !IsInfinity(number)) Fail(name, "a list of numbers");
    numbers.push_back(number.is_number() ? number.get<double>() : std::numeric_limits<double>::infinity());
  }
  return numbers;
}

std::vector<int64_t> Fields::Integers(const char* name) const {
  std::vector<int64_t> numbers;
  const json* value = Find(name);
  if (value == nullptr) return numbers;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& number : list) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      Fail(name, "integers of at least 0");
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

}  // namespace heed::model
