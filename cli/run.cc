// heed run: one mechanism on the tensors of a file.
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/attention_call.h"
#include "cli/format.h"
#include "cli/mechanism_call.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/io/npy.h"
#include "heed/io/safetensors.h"
#include "heed/pages/sha256.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Inputs are found by name: q, k and v, and further inputs of a mechanism, "
    "such as\n"
    "log_decay. Scale, causal, window and softcap of attention default to what "
    "the\n"
    "file's metadata says; a pattern is ANDed with them. Of the other mechanisms,\n"
    "--scale alone is an option. OUT also receives their states, as state and\n"
    "state_z.\n"
    "sha256 is that of o's elements, row-major: it does not depend on "
    "--threads.\n\n"
    "Example:\n  heed run attention data/minilm_alice.safetensors --layer 2 -o "
    "o.safetensors\n"
    "  heed run retention data/minilm_alice.safetensors --layer 2";

struct RunOptions {
  std::string mechanism, out;
  bool json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

// Checks before any computation that OUT is a valid output.
void CheckOut(const RunOptions& options) {
  const std::string& out = options.out;
  if (out.empty()) return;
  if (!out.ends_with(".safetensors") && !out.ends_with(".npy")) {
    BadOption("-o", out, "a name that ends in .safetensors or .npy");
  }
  options.tensors.CheckNotInput("-o", out);
}

// The inputs of a call, its options, and its outputs, o first.
struct Outcome {
  const LayerOfFile& set;
  std::vector<NamedTensor> inputs, outputs;  // with the axes of the file
  Json in_force;                             // every option; null means the mechanism's own default
  std::string options;                       // the same for people
  std::vector<std::string> notes;
  double seconds, flops;
  int64_t workspace_bytes;
  std::string kernel, why;
};

void Write(const RunOptions& options, const Outcome& outcome) {
  if (options.out.ends_with(".npy")) {
    return WriteNpy(options.out, outcome.outputs[0].tensor);
  }
  std::map<std::string, std::string> metadata = {{"mechanism", options.mechanism}};
  if (!outcome.set.layer.empty()) metadata["layer"] = outcome.set.layer;
  WriteSafetensors(options.out, outcome.outputs, metadata);
}

Json ToJson(std::span<const int64_t> sizes) {
  Json json = Json::array();
  for (const int64_t size : sizes) json.push_back(size);
  return json;
}

// A tensor with the axes of the file: its first axis is dropped if the file has none.
ConstTensorView InFile(const ConstTensorView& x, bool batched) {
  if (batched) return x;
  return ConstTensorView(x.data(), x.dtype(), x.sizes().subspan(1), x.strides().subspan(1));
}

// The number of NaNs and infinities among the elements, which may have any strides.
int64_t CountNonFinite(const ConstTensorView& x) {
  std::vector<int64_t> index(static_cast<size_t>(x.rank()), 0);
  int64_t count = 0;
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    if (!std::isfinite(GetElement(x, index))) ++count;
    NextIndex(x.sizes(), index);
  }
  return count;
}

// {"v": 3} if v has three, without tensors that have none.
Json NonFinite(const std::vector<NamedTensor>& tensors) {
  Json counts = Json::object();
  for (const NamedTensor& x : tensors) {
    if (const int64_t count = CountNonFinite(x.tensor)) counts[x.name] = count;
  }
  return counts;
}

void Report(const RunOptions& options, const Context& ctx, const Outcome& outcome) {
  const LayerOfFile& set = outcome.set;
  const ConstTensorView& o = outcome.outputs[0].tensor;
  const std::string sha256 =
      pages::Sha256({o.as<uint8_t>(), static_cast<size_t>(o.num_elements()) * SizeOf(o.dtype())});
  const Json non_finite = NonFinite(outcome.inputs);
  if (!options.out.empty()) Write(options, outcome);

  if (options.json) {
    const Json path = options.out.empty() ? Json(nullptr) : Json(options.out);
    Json shapes = Json::object();
    for (const NamedTensor& input : outcome.inputs) {
      shapes[input.name] = ToJson(input.tensor.sizes());
    }
    PrintJson(Json{
        {"mechanism", options.mechanism},
        {"file", set.file},
        {"layer", set.layer},
        {"shapes", shapes},
        {"dtype", Name(set.dtype)},
        {"options", outcome.in_force},
        {"non_finite", non_finite},
        {"seconds", outcome.seconds},
        {"flops", outcome.flops},
        {"kernel", outcome.kernel},
        {"output", {{"shape", ToJson(o.sizes())}, {"dtype", Name(o.dtype())}, {"path", path}, {"sha256", sha256}}}});
    return;
  }
  const auto shapes = [](const std::vector<NamedTensor>& tensors) {
    std::string text;
    for (const NamedTensor& x : tensors) {
      text += (text.empty() ? "" : "  ") + x.name + " " + x.tensor.ShapeString();
    }
    return text;
  };
  Table table({"<mechanism", "<" + options.mechanism});
  table.Add({"file", set.file});
  if (!set.layer.empty()) {
    table.Add({"layer", Format("{} of {}", set.layer, set.layers.size())});
  }
  table.Add({"shapes", shapes(outcome.inputs)});
  table.Add({"dtype", set.dtype == set.file_dtype
                          ? std::string(Name(set.dtype))
                          : Format("{} ({} in the file)", Name(set.dtype), Name(set.file_dtype))});
  for (const auto& [name, count] : non_finite.items()) {
    table.Add({"not finite", Format("{} of the numbers of {}: NaN or infinite", count.get<int64_t>(), name)});
  }
  table.Add({"options", outcome.options});
  for (const std::string& note : outcome.notes) table.Add({"", note});
  table.Add({"kernel", outcome.kernel + ": " + outcome.why});
  table.Add({"time", Format("{} on {} thread{}, {}", Seconds(outcome.seconds), ctx.num_threads(),
                            ctx.num_threads() == 1 ? "" : "s", Rate(outcome.flops / outcome.seconds, "FLOP/s"))});
  table.Add({"workspace", Bytes(static_cast<double>(outcome.workspace_bytes))});
  for (const NamedTensor& x : outcome.outputs) {
    if (&x != outcome.outputs.data() && x.name == "lse") continue;
    table.Add({&x == outcome.outputs.data() ? "output" : "",
               Format("{} {} {}", x.name, x.tensor.ShapeString(), Name(x.tensor.dtype()))});
  }
  table.Add({"sha256", sha256});
  if (!options.out.empty()) table.Add({"written", options.out});
  Print(table.ToString());
}

void RunAttention(const RunOptions& options, Context& ctx) {
  options.math.Check();
  const TensorSet tensors = options.tensors.Load();
  std::vector<std::string> notes;
  const attention::Options math = options.math.Resolve(tensors, notes);
  const AttentionCall call(tensors, math, tensors.dtype);
  const attention::Explanation plan = call.Explain(ctx);
  const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
  const auto given = [&](const char* name, const ConstTensorView& x) {
    return NamedTensor{name, InFile(x, tensors.batched)};
  };
  Report(options, ctx,
         {tensors,
          {given("q", tensors.q), given("k", tensors.k), given("v", tensors.v)},
          {{"o", call.o()}, {"lse", call.lse()}},
          {{"scale", math.scale.value_or(1 / std::sqrt(static_cast<double>(tensors.q.size(3))))},
           {"causal", math.causal},
           {"window", {math.window.left, math.window.right}},
           {"softcap", math.softcap},
           {"pattern", math.pattern.present() ? Json(math.pattern.ToString()) : Json(nullptr)}},
          ToString(math),
          notes,
          seconds,
          plan.flops,
          plan.workspace_bytes,
          plan.kernel + " " + plan.target,
          plan.why});
}

void RunMechanism(const OpEntry& op, const RunOptions& options, Context& ctx) {
  const std::optional<double> scale = options.math.ScaleAlone(op.name);
  const NamedTensors tensors = options.tensors.Load(op.inputs);
  const MechanismCall call(ctx, op, tensors.file, tensors.tensors, scale);
  const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
  std::vector<NamedTensor> given;
  for (const InputSpec& spec : op.inputs) {
    const auto found = tensors.tensors.find(spec.name);
    if (found == tensors.tensors.end()) continue;
    const bool batched = tensors.batched || !spec.axes.starts_with('B');
    given.push_back({spec.name, InFile(found->second, batched)});
  }
  const TensorCall& plan = call.plan();
  Report(options, ctx,
         {tensors,
          given,
          call.Outputs(tensors.batched),
          {{"scale", scale ? Json(*scale) : Json(nullptr)}, {"causal", plan.causal}},
          scale ? Format("scale {:.6g}", *scale) : "defaults",
          {},
          seconds,
          plan.flops,
          plan.workspace_bytes,
          plan.kernel + " " + plan.target,
          plan.why});
}

void Run(const RunOptions& options) {
  const OpEntry op = ChooseOps({options.mechanism})[0];
  if (op.name != "attention" && op.call == nullptr) {
    throw Unsupported(op.name + " does not run from the command line yet");
  }
  CheckOut(options);
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  if (op.call != nullptr) return RunMechanism(op, options, ctx);
  RunAttention(options, ctx);
}

}  // namespace

void AddRun(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "run", "run one mechanism on q, k, v of a file", kFooter);
  const auto options = std::make_shared<RunOptions>();
  AddText(verb, "MECHANISM", options->mechanism, "a name that heed list prints", "", Need::kRequired);
  options->tensors.Register(verb);
  AddText(verb, "-o,--output", options->out, "writes o and lse or the state (.safetensors), or o alone (.npy)", "OUT");
  options->math.Register(verb);
  options->machine.Register(verb);
  AddFlag(verb, "--json", options->json, "one JSON document");
  OnChosen(verb, [options] { Run(*options); });
}

}  // namespace heed::cli
