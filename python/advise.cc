// Binds the adviser: heed._advise, which heed.advise calls with all of its arguments.
#include "python/advise.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "heed/advise/advise.h"
#include "heed/advise/cost_model_file.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "python/arguments.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::python {
namespace {

namespace nb = nanobind;
using namespace nanobind::literals;

constexpr char kOp[] = "advise";
constexpr int64_t kMostTokens = int64_t{1} << 32;

bool IsAbsent(const nb::dict& options, const char* name) { return options[name].is_none(); }

Argument At(const nb::dict& options, const char* name) { return {kOp, name, options[name]}; }

double ToAtLeast(const Argument& argument, double least, const std::string& expected) {
  const double value = ToFinite(argument);
  if (value < least) Fail(argument, expected);
  return value;
}

std::vector<std::string> ToWords(const Argument& argument) {
  constexpr char kExpected[] = "a list of names";
  if (argument.value.is_none()) return {};
  if (!PyList_Check(argument.value.ptr()) && !PyTuple_Check(argument.value.ptr())) Fail(argument, kExpected);
  std::vector<std::string> words;
  for (const nb::handle word : argument.value) words.push_back(ToString({kOp, argument.name, word}, kExpected));
  return words;
}

attention::Options ToExact(const nb::dict& options) {
  attention::Options exact;
  exact.causal = ToBool(At(options, "causal"));
  if (!IsAbsent(options, "scale")) exact.scale = ToFinite(At(options, "scale"));
  if (!IsAbsent(options, "softcap")) exact.softcap = ToAtLeast(At(options, "softcap"), 0, "a number of 0 or more");
  if (!IsAbsent(options, "window")) {
    const Argument window = At(options, "window");
    constexpr char kExpected[] = "(left, right), each -1 or more";
    if (!PyTuple_Check(window.value.ptr()) || NB_TUPLE_GET_SIZE(window.value.ptr()) != 2) Fail(window, kExpected);
    const auto side = [&](Py_ssize_t i) {
      return ToInt({kOp, "window", NB_TUPLE_GET_ITEM(window.value.ptr(), i)}, -1, kMostTokens);
    };
    exact.window = {side(0), side(1)};
  }
  return exact;
}

// The inputs, given as arrays or as shapes alone.
struct Given {
  Arrays arrays;
  TensorMap tensors;
  bool are_shapes = false;
};

void ReadTensors(const nb::dict& tensors, Given& given) {
  const bool shapes[] = {PyTuple_Check(tensors["q"].ptr()) != 0, PyTuple_Check(tensors["k"].ptr()) != 0,
                         PyTuple_Check(tensors["v"].ptr()) != 0};
  given.are_shapes = shapes[0] && shapes[1] && shapes[2];
  if (given.are_shapes) given.arrays.AllowShapes(DType::kF32);
  given.arrays.AllowTorch();
  for (const auto& [name, value] : tensors) {
    const std::string text = nb::cast<std::string>(name);
    given.tensors[text] = given.arrays.Read({kOp, text.c_str(), value}, Kind::kFloat);
  }
}

Sizes SizesOfShapes(const TensorMap& tensors) {
  const ConstTensorView &q = tensors.at("q"), &k = tensors.at("k"), &v = tensors.at("v");
  for (const auto& [name, x] : tensors) {
    if (x.rank() != 4) Fail(kOp, name.c_str(), "has shape " + x.ShapeString(), "[B,T,H,D]");
  }
  const auto expect = [](const char* name, const ConstTensorView& x, std::initializer_list<int64_t> shape) {
    const std::string expected = ShapeString({shape.begin(), shape.size()});
    if (x.ShapeString() != expected) Fail(kOp, name, "has shape " + x.ShapeString(), expected);
  };
  const int64_t heads = std::max<int64_t>(k.size(2), 1);
  if (q.size(2) % heads != 0)
    Fail(kOp, "k", "has " + std::to_string(heads) + " heads", "a divisor of q's " + std::to_string(q.size(2)));
  expect("k", k, {q.size(0), q.size(1), k.size(2), q.size(3)});
  expect("v", v, {q.size(0), q.size(1), k.size(2), v.size(3)});
  return {q.size(0), q.size(1), q.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
}

advise::Purpose ToPurpose(const Argument& argument) {
  const std::string word = ToChoice(argument, {"prefill", "training", "decode"});
  return word == "prefill"    ? advise::Purpose::kPrefill
         : word == "training" ? advise::Purpose::kTraining
                              : advise::Purpose::kDecode;
}

// The processes of `ranks`; none without.
std::optional<advise::Cluster> ToCluster(const nb::dict& options) {
  if (IsAbsent(options, "ranks")) {
    for (const char* name : {"bandwidth", "latency"}) {
      if (!IsAbsent(options, name)) Fail(At(options, name), "None without ranks");
    }
    return std::nullopt;
  }
  advise::Cluster cluster;
  cluster.ranks = ToInt(At(options, "ranks"), 1, advise::Cluster::kMostRanks);
  if (!IsAbsent(options, "bandwidth")) {
    constexpr char kExpected[] = "bytes per second, above 0";
    cluster.bandwidth = ToAtLeast(At(options, "bandwidth"), 0, kExpected);
    if (cluster.bandwidth == 0) Fail(At(options, "bandwidth"), kExpected);
  }
  if (!IsAbsent(options, "latency")) cluster.latency = ToAtLeast(At(options, "latency"), 0, "seconds, 0 or more");
  return cluster;
}

nb::object OrNone(double value) { return std::isfinite(value) ? nb::cast(value) : nb::none(); }

nb::dict ToDict(const advise::Traffic& traffic) {
  nb::dict dict;
  dict["bytes"] = traffic.bytes;
  dict["messages"] = traffic.messages;
  return dict;
}

// The predictions for the processes of a cluster, by the names of the command's JSON.
nb::dict DividedOf(const advise::Row& row) {
  nb::list methods;
  for (const advise::Divided& divided : row.divided) {
    nb::dict method;
    method["method"] = divided.method;
    method["forward"] = ToDict(divided.forward);
    method["backward"] = ToDict(divided.backward);
    method["communication_seconds"] = divided.communication_seconds;
    method["computation_seconds"] = divided.computation_seconds;
    method["seconds"] = divided.seconds();
    method["memory_bytes"] = divided.memory_bytes;
    methods.append(method);
  }
  nb::dict dict;
  dict["methods"] = methods;
  dict["refused"] = row.not_divided.empty() ? nb::none() : nb::cast(row.not_divided);
  return dict;
}

nb::dict ToDict(const advise::Row& row, bool has_cluster) {
  nb::dict dict;
  dict["rank"] = row.rank;
  dict["mechanism"] = row.mechanism;
  dict["options"] = row.options;
  dict["python"] = row.python;
  dict["dtype"] = heed::Name(row.dtype);
  dict["threads"] = row.threads;
  dict["seconds"] = OrNone(row.seconds);
  dict["predicted_seconds"] = OrNone(row.predicted_seconds);
  dict["measured_seconds"] = OrNone(row.measured_seconds);
  dict["predicted_sample_seconds"] = OrNone(row.predicted_sample_seconds);
  dict["memory_bytes"] = static_cast<int64_t>(row.memory_bytes());
  dict["workspace_bytes"] = static_cast<int64_t>(row.memory.workspace);
  dict["state_bytes"] = static_cast<int64_t>(row.memory.state);
  dict["relative_error"] = OrNone(row.error.relative);
  dict["max_error"] = OrNone(row.error.max);
  dict["kept"] = row.kept;
  dict["softmax"] = row.is_softmax;
  dict["causal"] = row.is_causal;
  nb::list assumed;
  for (const std::string& name : row.assumed) assumed.append(name);
  dict["assumed"] = nb::tuple(assumed);
  dict["within"] = row.within;
  dict["frontier"] = row.frontier;
  dict["reason"] = row.reason;
  dict["divided"] = has_cluster ? nb::object(DividedOf(row)) : nb::none();
  return dict;
}

int ToThreads(const Argument& argument) {
  return argument.value.is_none() ? NumThreads() : static_cast<int>(ToInt(argument, 1, kMaxThreads));
}

std::string Target() { return TargetName(ThreadContext(0).allowed_targets()); }

// Computes the result of heed.advise as a dict.
nb::dict Advise(const nb::dict& tensors, const nb::dict& options) {
  Given given;
  ReadTensors(tensors, given);
  advise::Request request;
  request.exact = ToExact(options);
  request.purpose = ToPurpose(At(options, "purpose"));
  request.threads = ToThreads(At(options, "threads"));
  if (!IsAbsent(options, "length")) request.length = ToInt(At(options, "length"), 1, kMostTokens);
  if (!IsAbsent(options, "memory"))
    request.budget.memory_bytes = ToAtLeast(At(options, "memory"), 1, "bytes, 1 or more");
  if (!IsAbsent(options, "error"))
    request.budget.relative_error = ToAtLeast(At(options, "error"), 0, "a number of 0 or more");
  request.seconds = ToAtLeast(At(options, "seconds"), 0, "0 or more");
  request.cluster = ToCluster(options);
  request.mechanisms = ToWords(At(options, "mechanisms"));
  if (!IsAbsent(options, "dtypes")) {
    request.dtypes.clear();
    for (const std::string& name : ToWords(At(options, "dtypes"))) {
      const nb::str word(name.c_str());
      request.dtypes.push_back(DTypeFromName(ToChoice({kOp, "dtypes", word}, {"f64", "f32", "bf16", "f16"})));
    }
    if (request.dtypes.empty()) Fail(At(options, "dtypes"), "one or more of f64, f32, bf16 and f16");
  }
  if (given.are_shapes) {
    if (request.budget.relative_error) Fail(At(options, "error"), "none: of shapes alone nothing is computed");
    request.sizes = SizesOfShapes(given.tensors);
  } else {
    request.source = [&](std::span<const InputSpec> inputs, std::optional<int64_t> tokens) {
      TensorChoice choice;
      choice.tokens = tokens;
      return NamedOf(kOp, given.tensors, inputs, choice);
    };
  }
  std::optional<advise::CostModel> model;
  if (!IsAbsent(options, "model")) {
    const std::string path = ToString(At(options, "model"), "a path");
    model = advise::LoadModel(path);
    advise::CheckFits(path, *model, os::CpuName(), Target(), request.threads, HEED_VERSION);
    request.model = &*model;
  }
  advise::Advice advice;
  try {
    for (const std::string& name : request.mechanisms) FindOp(name);
    Compute(kOp, [&] { advice = advise::Advise(request); });
  } catch (const FileError& error) {  // raised for arrays, not files
    throw InvalidArgument(error.what());
  } catch (const InvalidArgument& error) {
    const std::string what = error.what(), prefix = std::string(kOp) + ": ";
    throw InvalidArgument(what.starts_with(prefix) ? what : prefix + what);
  }
  nb::list rows;
  for (const advise::Row& row : advice.rows) rows.append(ToDict(row, request.cluster.has_value()));
  nb::dict left_out;
  for (const auto& [mechanism, reason] : advice.left_out) left_out[mechanism.c_str()] = reason;
  nb::dict result;
  result["rows"] = rows;
  result["left_out"] = left_out;
  result["length"] = advice.length;
  result["cluster"] = nb::none();
  if (request.cluster) {
    nb::dict cluster;
    cluster["ranks"] = request.cluster->ranks;
    cluster["bandwidth"] = request.cluster->bandwidth;
    cluster["latency"] = request.cluster->latency;
    result["cluster"] = cluster;
  }
  result["sample_tokens"] = advice.sample_tokens;
  result["prediction_error"] = model ? OrNone(advise::Summarized(model->errors).nine_of_ten) : nb::none();
  return result;
}

std::string ModelName(nb::handle threads) {
  return advise::ModelFileName(os::CpuName(), Target(), ToThreads({kOp, "threads", threads}), HEED_VERSION);
}

}  // namespace

void BindAdvise(nb::module_& m) {
  m.def("_advise", &Advise);
  m.def("_cost_model_name", &ModelName, "threads"_a.none());
}

}  // namespace heed::python
