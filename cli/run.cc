// heed run: one mechanism on the tensors of a file.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fmt/format.h"

#include "cli/attention_call.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/sha256.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/io/npy.h"
#include "heed/io/safetensors.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Scale, causal, window and softcap default to what the file's metadata "
    "says.\n"
    "sha256 is that of o's elements, row-major: it does not depend on "
    "--threads.\n\n"
    "Example:\n  heed run attention data/minilm_alice.safetensors --layer 2 -o "
    "o.safetensors";

struct RunOptions {
  std::string mechanism, out;
  bool json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

// Before anything is computed: whether OUT can be what it is asked to be.
void CheckOut(const RunOptions& options) {
  const std::string& out = options.out;
  if (out.empty()) return;
  if (!out.ends_with(".safetensors") && !out.ends_with(".npy")) {
    BadOption("-o", out, "a name that ends in .safetensors or .npy");
  }
  options.tensors.CheckNotInput("-o", out);
}

void Write(const RunOptions& options, const TensorSet& tensors,
           const AttentionCall& call) {
  if (options.out.ends_with(".npy")) return WriteNpy(options.out, call.o());
  std::map<std::string, std::string> metadata = {
      {"mechanism", options.mechanism}};
  if (!tensors.layer.empty()) metadata["layer"] = tensors.layer;
  const NamedTensor outputs[] = {{"o", call.o()}, {"lse", call.lse()}};
  WriteSafetensors(options.out, outputs, metadata);
}

Json ToJson(std::span<const int64_t> sizes) {
  Json json = Json::array();
  for (const int64_t size : sizes) json.push_back(size);
  return json;
}

// The shape that the file has.
std::span<const int64_t> FileSizes(const TensorSet& tensors,
                                   const ConstTensorView& x) {
  return tensors.batched ? x.sizes() : x.sizes().subspan(1);
}

void Run(const RunOptions& options) {
  const std::string mechanism = ChooseOps({options.mechanism})[0].name;
  if (mechanism != "attention") {
    throw Unsupported(mechanism + " does not run from the command line yet");
  }
  CheckOut(options);
  options.math.Check();
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  const TensorSet tensors = options.tensors.Load();
  std::vector<std::string> notes;
  const attention::Options math = options.math.Resolve(tensors, notes);

  const AttentionCall call(tensors, math, tensors.dtype);
  const attention::Explanation plan = call.Explain(ctx);
  const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
  const ConstTensorView o = call.o();
  const std::string sha256 =
      Sha256({o.as<uint8_t>(),
              static_cast<size_t>(o.num_elements()) * SizeOf(o.dtype())});
  if (!options.out.empty()) Write(options, tensors, call);

  const std::string kernel = plan.kernel + " " + plan.target;
  if (options.json) {
    const Json path = options.out.empty() ? Json(nullptr) : Json(options.out);
    PrintJson(Json{{"mechanism", mechanism},
                   {"file", tensors.file},
                   {"layer", tensors.layer},
                   {"shapes",
                    {{"q", ToJson(FileSizes(tensors, tensors.q))},
                     {"k", ToJson(FileSizes(tensors, tensors.k))},
                     {"v", ToJson(FileSizes(tensors, tensors.v))}}},
                   {"dtype", Name(tensors.dtype)},
                   {"seconds", seconds},
                   {"flops", plan.flops},
                   {"kernel", kernel},
                   {"output",
                    {{"shape", ToJson(o.sizes())},
                     {"dtype", Name(o.dtype())},
                     {"path", path},
                     {"sha256", sha256}}}});
    return;
  }
  const auto shape = [&](const ConstTensorView& x) {
    return ShapeString(FileSizes(tensors, x));
  };
  Table table({"<mechanism", "<" + mechanism});
  table.Add({"file", tensors.file});
  if (!tensors.layer.empty()) {
    table.Add({"layer",
               fmt::format("{} of {}", tensors.layer, tensors.layers.size())});
  }
  table.Add({"shapes", fmt::format("q {}  k {}  v {}", shape(tensors.q),
                                   shape(tensors.k), shape(tensors.v))});
  table.Add(
      {"dtype", tensors.dtype == tensors.file_dtype
                    ? std::string(Name(tensors.dtype))
                    : fmt::format("{} ({} in the file)", Name(tensors.dtype),
                                  Name(tensors.file_dtype))});
  table.Add({"options", ToString(math)});
  for (const std::string& note : notes) table.Add({"", note});
  table.Add({"kernel", fmt::format("{}: {}", kernel, plan.why)});
  table.Add(
      {"time", fmt::format("{} on {} thread{}, {}", Seconds(seconds),
                           ctx.num_threads(), ctx.num_threads() == 1 ? "" : "s",
                           Rate(plan.flops / seconds, "FLOP/s"))});
  table.Add({"workspace", Bytes(static_cast<double>(plan.workspace_bytes))});
  table.Add(
      {"output", fmt::format("o {} {}", o.ShapeString(), Name(o.dtype()))});
  table.Add({"sha256", sha256});
  if (!options.out.empty()) table.Add({"written", options.out});
  Print(table.ToString());
}

}  // namespace

void AddRun(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("run", "run one mechanism on q, k, v of a file");
  verb->footer(kFooter);
  const auto options = std::make_shared<RunOptions>();
  AddText(*verb, "MECHANISM", options->mechanism,
          "a name that heed list prints", "")
      ->required();
  options->tensors.Register(*verb);
  AddText(*verb, "-o,--output", options->out,
          "writes o and lse (.safetensors) or o alone (.npy)", "OUT");
  options->math.Register(*verb);
  options->machine.Register(*verb);
  verb->add_flag("--json", options->json, "one JSON document");
  verb->callback([options] { Run(*options); });
}

}  // namespace heed::cli
