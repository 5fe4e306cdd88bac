// Cost models as JSON, which is read as untrusted input.
#include "heed/advise/cost_model_file.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/path.h"
#include "heed/io/atomic_file_internal.h"
#include "heed/model/json_internal.h"

namespace heed::advise {
namespace {

using nlohmann::ordered_json;
using model::Fields;

constexpr int64_t kMostBytes = int64_t{4} << 20;
constexpr int64_t kFormat = 1, kMostThreads = 4096, kMostText = 200;
constexpr double kMostSeconds = 1e9, kMostError = 1e12;
constexpr char kMark[] = "heed_cost_model";

// True for one line of printable ASCII.
bool IsPlain(const std::string& text) {
  const bool prints = std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
  return prints && !text.empty() && std::ssize(text) <= kMostText;
}

std::string TextOf(const Fields& fields, const char* name) {
  const std::string text = fields.Text(name);
  if (!IsPlain(text)) fields.Fail(name, "a text of 1 to " + std::to_string(kMostText) + " printable characters");
  return text;
}

const nlohmann::json& ListOf(const Fields& fields, const char* name) {
  const nlohmann::json* list = fields.Find(name);
  if (list == nullptr || !list->is_array()) fields.Fail(name, "a list");
  return *list;
}

int ThreadsOf(const Fields& fields) { return static_cast<int>(fields.Integer("threads", 1, kMostThreads)); }

DType DTypeOfName(const Fields& fields) {
  const std::string name = fields.Text("dtype");
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (name == Name(dtype)) return dtype;
  }
  fields.Fail("dtype", "f64, f32, bf16 or f16");
}

void ReadFit(const Fields& fit, CostModel& model) {
  const Work work = {TextOf(fit, "work"), DTypeOfName(fit), ThreadsOf(fit)};
  Coefficients& coefficients = model.fits[work];
  const nlohmann::json* seconds = fit.Find("seconds");
  if (seconds == nullptr || !seconds->is_object()) fit.Fail("seconds", "an object");
  const Fields units(fit.path(), *seconds);
  for (const auto& [unit, value] : seconds->items()) {
    if (!IsPlain(unit)) fit.Fail("seconds", "units of printable characters");
    coefficients[unit] = units.Number(unit.c_str(), 0, kMostSeconds);
  }
}

}  // namespace

std::string ModelFileName(const std::string& cpu, const std::string& target, int threads, const std::string& version) {
  std::string name = "cost-" + cpu + "-" + target + "-" + std::to_string(threads) + "-" + version + ".json";
  for (char& c : name) {
    const bool plain =
        (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' || c == '-';
    if (!plain) c = '_';
  }
  return name;
}

CostModel ParseModel(const std::string& path, std::string_view text) {
  const Fields fields(path, model::ParseJson(path, text));
  fields.Integer(kMark, kFormat, kFormat);
  CostModel model;
  model.cpu = TextOf(fields, "cpu");
  model.version = TextOf(fields, "version");
  model.target = TextOf(fields, "target");
  model.threads = ThreadsOf(fields);
  model.seconds = fields.Number("seconds", 0, kMostSeconds);
  const nlohmann::json& errors = ListOf(fields, "errors");
  for (size_t i = 0; i < errors.size(); ++i) {
    model.errors.push_back(Fields(path, {{"errors", errors[i]}}).Number("errors", 0, kMostError));
  }
  for (const nlohmann::json& fit : ListOf(fields, "fits")) ReadFit(Fields(path, fit), model);
  return model;
}

CostModel LoadModel(const std::string& path) {
  const os::MappedFile file(path);
  if (std::cmp_greater(file.num_bytes(), kMostBytes)) {
    throw FileError(path + ": has " + std::to_string(file.num_bytes()) + " bytes, expected at most " +
                    std::to_string(kMostBytes));
  }
  return ParseModel(path, {reinterpret_cast<const char*>(file.data()), file.num_bytes()});
}

void CheckFits(const std::string& path, const CostModel& model, const std::string& cpu, const std::string& target,
               int threads, const std::string& version) {
  const auto of = [](const std::string& c, const std::string& t, int n, const std::string& v) {
    return c + ", " + t + ", " + std::to_string(n) + (n == 1 ? " thread" : " threads") + ", heed " + v;
  };
  const std::string got = of(model.cpu, model.target, model.threads, model.version),
                    expected = of(cpu, target, threads, version);
  if (got != expected)
    throw FileError(path + ": was measured on " + got + ", expected " + expected + ": calibrate again");
}

void SaveModel(const std::string& path, const CostModel& model) {
  ordered_json fits = ordered_json::array();
  for (const auto& [work, coefficients] : model.fits) {
    ordered_json seconds = ordered_json::object();
    for (const auto& [unit, each] : coefficients) seconds[unit] = each;
    fits.push_back(
        {{"work", work.name}, {"dtype", heed::Name(work.dtype)}, {"threads", work.threads}, {"seconds", seconds}});
  }
  const ordered_json document = {
      {kMark, kFormat},           {"cpu", model.cpu},         {"version", model.version}, {"target", model.target},
      {"threads", model.threads}, {"seconds", model.seconds}, {"errors", model.errors},   {"fits", fits}};
  const std::filesystem::path folder = ToPath(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);  // writing the file reports the error
  AtomicFile file(path);
  file.Write(document.dump(1, ' ', true, ordered_json::error_handler_t::replace) + "\n");
  file.Commit();
}

}  // namespace heed::advise
