// Threads, switches, Contexts per thread, and explain.
#include "python/runtime.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "python/argument_names.h"

namespace heed::python {
namespace {

namespace nb = nanobind;
using namespace nanobind::literals;

std::atomic<int> num_threads_setting{0};
std::atomic<bool> checks{false};
std::atomic<bool> strict{false};

std::vector<std::pair<std::string, ExplainFunction>>& ExplainTable() {
  static std::vector<std::pair<std::string, ExplainFunction>> table;
  return table;
}

int ToThreads(const Argument& argument) {
  if (argument.value.is_none()) return 0;
  return static_cast<int>(ToInt(argument, 1, kMaxThreads));
}

nb::dict Explain(nb::handle name, nb::handle dtype, nb::handle threads, const nb::kwargs& rest) {
  constexpr char kOp[] = "explain";
  const std::string mechanism = ToString({kOp, "name", name}, "the name of a mechanism");
  std::string known;
  for (const auto& [candidate, function] : ExplainTable()) {
    if (candidate == mechanism) {
      const std::string dtype_name = ToString({kOp, "dtype", dtype}, "f64, f32, bf16 or f16");
      DType parsed = DType::kBool;
      try {
        parsed = DTypeFromName(dtype_name);
      } catch (const InvalidArgument&) {  // replaced by a message of this function
      }
      if (!IsFloat(parsed)) Fail({kOp, "dtype", dtype}, "f64, f32, bf16 or f16");
      return function(parsed, ToThreads({kOp, "threads", threads}), rest.ptr());
    }
    known += (known.empty() ? "" : ", ") + candidate;
  }
  Fail({kOp, "name", name}, "one of " + known);
}

}  // namespace

void SetNumThreads(int num_threads) { num_threads_setting = num_threads; }

int NumThreads() {
  const int setting = num_threads_setting;
  if (setting != 0) return setting;
  return std::min(os::NumUsableCpus(), static_cast<int>(kMaxThreads));
}

void SetChecks(bool on) { checks = on; }
bool Checks() { return checks; }
void SetStrict(bool on) { strict = on; }
bool Strict() { return strict; }

Context& ThreadContext(int num_threads) {
  thread_local std::unique_ptr<Context> context;
  if (num_threads == 0) num_threads = NumThreads();
  if (context == nullptr || context->num_threads() != num_threads) {
    context.reset();  // its scratch memory first
    context = std::make_unique<Context>(num_threads);
  }
  context->set_strict(strict);
  context->set_checks(checks);
  return *context;
}

void RegisterExplain(const char* name, ExplainFunction function) {
  ExplainTable().emplace_back(name, std::move(function));
}

nb::dict Described(const std::string& kernel, const std::string& target, const std::string& why, double flops,
                   double bytes, int64_t workspace_bytes, double visited_pairs, bool invariant,
                   std::span<const char* const> copied) {
  nb::dict result;
  result["kernel"] = kernel;
  result["target"] = target;
  result["why"] = why;
  result["flops"] = nb::steal(PyLong_FromDouble(flops));
  result["bytes"] = nb::steal(PyLong_FromDouble(bytes));
  result["workspace_bytes"] = workspace_bytes;
  result["visited_pairs"] = nb::steal(PyLong_FromDouble(visited_pairs));
  result["invariant"] = invariant;
  nb::list copies;
  for (const char* name : copied) copies.append(name);
  result["copies"] = copies;
  return result;
}

void BindRuntime(nb::module_& m) {
  m.def("explain", &Explain, "name"_a.none(), nb::kw_only(), "dtype"_a.none() = "f32", "threads"_a = nb::none(),
        "arguments_and_options"_a,
        nb::sig("def explain(name: str, *, dtype: str = 'f32', threads: int | "
                "None = None, "
                "**arguments_and_options: typing.Any) -> dict[str, typing.Any]"),
        "The plan of the mechanism `name` for these arguments, without "
        "computing it.\n\n"
        "Arguments:\n"
        "  name                   of the mechanism, as its function is called\n"
        "  dtype                  of shapes: 'f64', 'f32', 'bf16' or 'f16'\n"
        "  threads                that would compute; default as of a call\n"
        "  arguments_and_options  those of the mechanism's function, all as keywords\n\n"
        "Arguments are arrays, or shapes: tuples, whose elements have `dtype` "
        "where they are\n"
        "floats. Lengths and starts of which there is only the shape leave no token out, and\n"
        "cu_seqlens is then of sequences of one length (attention needs the numbers). Options are\n"
        "those of the mechanism's own function.\n\n"
        "  kernel           name of the kernel that would run\n"
        "  target           SIMD target\n"
        "  why              why this kernel\n"
        "  flops            of the visited work\n"
        "  bytes            inputs read once, outputs written once\n"
        "  workspace_bytes  scratch of all threads\n"
        "  visited_pairs    (query, key) pairs that the kernel computes\n"
        "  invariant        the bits do not depend on how the sequence is split\n"
        "  copies           names of the arguments that would be copied, because "
        "their last axis\n"
        "                   is not contiguous\n\n"
        "Example:\n\n"
        "  >>> import heed\n"
        "  >>> heed.explain(\"attention\", q=(1, 64, 4, 16), k=(1, 64, 4, 16), v=(1, 64, 4, 16),\n"
        "  ...              causal=True)[\"flops\"]\n"
        "  532480");

  m.def("_name_in_python", [](const std::string& operation, const std::string& name) {
    return std::string(NameInPython(operation, name));
  });
  m.def(
      "set_num_threads", [](nb::handle threads) { SetNumThreads(ToThreads({"set_num_threads", "threads", threads})); },
      "threads"_a.none(), nb::sig("def set_num_threads(threads: int | None) -> None"),
      "Sets the threads of every call that names none: to `threads`, or with None to one per CPU "
      "that the\nprocess may use.");
  m.def("get_num_threads", &NumThreads, "Threads of a call that names none.");
  m.def(
      "set_checks", [](nb::handle on) { SetChecks(ToBool({"set_checks", "on", on})); }, "on"_a.none(),
      nb::sig("def set_checks(on: bool) -> None"),
      "Whether values are checked too: with `on`, which costs a pass over them, a log decay above "
      "0 or\nNaN is an InvalidArgument, and attention and recurrences warn once where "
      "[B, H, T, D]\nseems to be read as [B, T, H, D], by fewer tokens than heads. Off at the start.");
  m.def(
      "set_strict", [](nb::handle on) { SetStrict(ToBool({"set_strict", "on", on})); }, "on"_a.none(),
      nb::sig("def set_strict(on: bool) -> None"),
      "Whether what is slow raises Unsupported: with `on`, an array that would be copied because its last\n"
      "axis is not contiguous, a mask or bias of attention that is read pair by pair, and causal_conv1d on an\n"
      "x that has neither axis contiguous. heed.explain names them, strict or not. Off at the start.");
}

}  // namespace heed::python
