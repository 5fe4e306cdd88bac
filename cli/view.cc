// heed view: the attention of a file's tensors as one page.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cli/attention_call.h"
#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_labels.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/core/path.h"
#include "heed/pages/page.h"
#include "heed/pages/view_page.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "One page that needs no network. Up to 2048 tokens it computes every\n"
    "probability itself, from q and k rounded to f16; beyond that, or where "
    "they\n"
    "would not fit into 6 MB, it holds pooled maps. Each head is shown beside\n"
    "the weights of linear mechanisms for its q and k. With --pattern, maps are those of\n"
    "attention without it; pairs that it does not keep are shaded, and the page gives the share\n"
    "of the pairs and of the probability that it keeps.\n\n"
    "Example:\n  heed view data/minilm_alice.safetensors --html view.html";

struct ViewOptions {
  std::string html;
  bool json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

TensorSet LoadLayer(const ViewOptions& options, const std::string& layer) {
  TensorOptions tensors = options.tensors;
  if (!layer.empty()) tensors.layer = layer;
  TensorSet set = tensors.Load();
  if (set.q.size(0) == 0 || set.q.size(1) == 0 || set.q.size(2) == 0 || set.k.size(1) == 0) {
    throw FileError(
        Format("{}: {}q has shape {} and k {}, expected something to see: at least "
               "one head, query and key",
               set.file, set.layer.empty() ? "" : set.layer + ".", set.q.ShapeString(), set.k.ShapeString()));
  }
  return set;
}

std::vector<int64_t> HeadNumbers(const ViewOptions& options, int64_t num_heads) {
  std::vector<int64_t> numbers(static_cast<size_t>(num_heads));
  std::iota(numbers.begin(), numbers.end(), 0);
  if (options.tensors.heads.empty()) return numbers;
  numbers.clear();
  for (const std::string& name : SplitAtCommas(options.tensors.heads)) numbers.push_back(std::stoll(name));
  return numbers;
}

// The file's name without its folder, which would tell readers of the page about this machine.
std::string FileName(const TensorSet& set) {
  if (set.file.find(", ") != std::string::npos) return set.file;
  return ToUtf8(ToPath(set.file).filename());
}

// The subject of the page: the layers of a file, of which one is in memory at a time.
pages::ViewSubject SubjectOf(const ViewOptions& options, const TensorSet& first) {
  const std::vector<std::string> layers =
      options.tensors.layer.empty() ? first.layers : std::vector<std::string>{first.layer};
  pages::ViewSubject subject;
  subject.title = subject.file = FileName(first);
  if (const auto model = first.facts.find("model"); model != first.facts.end()) subject.model = model->second;
  subject.num_layers = layers.size();
  subject.layer = [&options, layers](size_t index) {
    Progress(Format("layer {} of {}", index + 1, layers.size()));
    const auto set = std::make_shared<TensorSet>(LoadLayer(options, layers[index]));
    pages::ViewLayer layer = {set->layer, set->q, set->k, {}, nullptr, HeadNumbers(options, set->q.size(2)), {}, set};
    layer.options = options.math.Resolve(*set, layer.notes);
    layer.labels = TokenLabels(*set, layer.notes);
    return layer;
  };
  return subject;
}

void View(const ViewOptions& options) {
  options.tensors.CheckNotInput("--html", options.html);
  options.math.Check();
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  const TensorSet first = LoadLayer(options, "");
  std::vector<std::string> notes;
  options.math.Resolve(first, notes);  // throws, also if a pattern does not apply
  pages::CheckWritable(options.html);
  const pages::ViewSubject subject = SubjectOf(options, first);
  const pages::ViewPage page = Named(first.file, [&] { return pages::ComposeView(ctx, subject); });
  Progress("");
  if (page.html.empty()) {
    throw FileError(Format("{}: {} heads in {} layers, expected fewer in one page: choose with --layer and --heads",
                           first.file, page.all_heads, subject.num_layers));
  }
  pages::WriteText(options.html, page.html);

  if (options.json) {
    Json document = {{"path", options.html},
                     {"bytes", page.html.size()},
                     {"layers", subject.num_layers},
                     {"heads", page.heads},
                     {"tokens", page.tokens}};
    if (options.math.HasPattern()) {
      document["pattern"] = ParsePattern(options.math.pattern).ToString();
      document["density"] = page.density;
    }
    PrintJson(document);
    return;
  }
  std::string text =
      Format("{}: {}, {} layer{} of {} head{}, {} tokens, {}\n", options.html,
             Bytes(static_cast<double>(page.html.size())), subject.num_layers, subject.num_layers == 1 ? "" : "s",
             page.heads, page.heads == 1 ? "" : "s", page.tokens, page.kind);
  for (const std::string& note : page.notes) text += note + "\n";
  Print(text);
}

}  // namespace

void AddView(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "view", "heat maps of these tensors' attention, one page", kFooter);
  const auto options = std::make_shared<ViewOptions>();
  options->tensors.Register(verb, "all");
  AddText(verb, "--html", options->html, "the page to write", "OUT", Need::kRequired);
  options->math.Register(verb);
  options->machine.Register(verb);
  AddFlag(verb, "--json", options->json, "one JSON document");
  OnChosen(verb, [options] { View(*options); });
}

}  // namespace heed::cli
