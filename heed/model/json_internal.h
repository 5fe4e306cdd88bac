// JSON files of a model's folder: read within bounds, with fields that are checked when they are requested.
#ifndef HEED_MODEL_JSON_INTERNAL_H_
#define HEED_MODEL_JSON_INTERNAL_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>  // enough for the families, which use fields by name

namespace heed::model {

// Throws FileError, "PATH: got, expected", for a file that is too large, nested deeper than 64 levels or not JSON. An
// infinite number of Python's writer becomes {"__float__": "Infinity"}, the form in which Transformers 5 writes it.
nlohmann::json ReadJson(const std::string& path, int64_t most_bytes);
nlohmann::json ParseJson(const std::string& path, std::string_view text);

// Checks the name of a file or folder inside another: it must not lead out of it. Throws FileError "PATH: WHAT is ...".
void CheckName(const std::string& path, const std::string& what, const std::string& name);

// The fields of one object of a file. A field without a fallback is required; null is an error unless stated otherwise.
// Throws FileError. Copies share one record of the fields that have been requested.
class Fields {
 public:
  Fields(std::string path, nlohmann::json object);

  const std::string& path() const { return path_; }
  bool Has(const char* name) const;      // present and not null
  bool Present(const char* name) const;  // present, null or not
  int64_t Integer(const char* name, int64_t least, int64_t most, std::optional<int64_t> fallback = {}) const;
  // For fields that may be null instead of a number.
  std::optional<int64_t> IntegerOrNull(const char* name, int64_t least, int64_t most,
                                       std::optional<int64_t> fallback = {}) const;
  double Number(const char* name, double least, double most, std::optional<double> fallback = {}) const;
  bool Bool(const char* name, std::optional<bool> fallback = {}) const;
  std::string Text(const char* name, std::optional<std::string> fallback = {}) const;
  Fields Object(const char* name) const;
  std::vector<std::string> Texts(const char* name) const;  // of a list; empty if absent or null
  std::vector<double> Numbers(const char* name) const;     // of a list, also infinite numbers; empty if absent or null
  // A list or a single number, at least 0; empty if absent or null.
  std::vector<int64_t> Integers(const char* name) const;
  const nlohmann::json* Find(const char* name) const;  // null pointer if absent or null
  std::string Dump() const;                            // all fields, in a fixed order

  bool WasAsked(const char* name) const;

  // Declares a second name of a field. It takes precedence if the object has both.
  void Alias(const char* name, const char* other) const;
  // Declares fields that have no effect here, whatever their values.
  void Ignore(std::initializer_list<const char*> names) const;
  // Throws Unsupported for the first field that was never requested, is not ignored and is not null, since the option
  // would be ignored silently. `owner` names the model that has no such field.
  void CheckAllAsked(const std::string& owner) const;

  // "PATH: 'hidden_act' is "tanh", expected ..."
  [[noreturn]] void Fail(const char* name, const std::string& expected) const;

 private:
  struct Shared;

  std::string Called(const char* name) const;  // the name of the field that the object has
  const nlohmann::json* Value(const char* name) const;
  const nlohmann::json& Get(const char* name, const std::string& expected) const;

  std::string path_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace heed::model

#endif  // HEED_MODEL_JSON_INTERNAL_H_
