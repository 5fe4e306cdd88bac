// heed view: the attention of a file's tensors as one page.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cli/attention_call.h"
#include "cli/format.h"
#include "cli/options.h"
#include "cli/page.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "cli/view_data.h"
#include "cli/view_kept.h"
#include "heed/core/error.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "One page that needs no network. Up to 2048 tokens it computes every\n"
    "probability itself, from q and k rounded to f16; beyond that, or where "
    "they\n"
    "would not fit into 6 MB, it holds pooled maps. Beside each head stands "
    "what\n"
    "linear mechanisms would make of its q and k. With --pattern maps stay those of\n"
    "attention without it; what it does not keep is shaded, and the page says how much\n"
    "of the pairs and of the attention it keeps.\n\n"
    "Example:\n  heed view data/minilm_alice.safetensors --html view.html";

constexpr int64_t kMaxPageBytes = 6'000'000;
constexpr int64_t kMaxExactTokens = 2048;
constexpr int64_t kPooledOverhead = 300'000;  // all but the maps, and rounding
constexpr size_t kMaxModelBytes = 100, kMaxPatternText = 400;

struct ViewOptions {
  std::string html;
  bool json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

// Sizes of all layers that are shown.
struct Extent {
  int64_t heads = 0, all_heads = 0, tokens = 0, exact_bytes = 0;
};

TensorSet LoadLayer(const ViewOptions& options, const std::string& layer) {
  TensorOptions tensors = options.tensors;
  if (!layer.empty()) tensors.layer = layer;
  TensorSet set = tensors.Load();
  if (set.q.size(0) == 0 || set.q.size(1) == 0 || set.q.size(2) == 0 ||
      set.k.size(1) == 0) {
    throw FileError(Format(
        "{}: {}q has shape {} and k {}, expected something to see: at least "
        "one head, query and key",
        set.file, set.layer.empty() ? "" : set.layer + ".",
        set.q.ShapeString(), set.k.ShapeString()));
  }
  return set;
}

Json HeadNames(const ViewOptions& options, int64_t num_heads) {
  Json names = Json::array();
  if (options.tensors.heads.empty()) {
    for (int64_t h = 0; h < num_heads; ++h) names.push_back(std::to_string(h));
  } else {
    names = SplitAtCommas(options.tensors.heads);
  }
  return names;
}

// Those names as numbers.
std::vector<int64_t> HeadNumbers(const ViewOptions& options,
                                 int64_t num_heads) {
  std::vector<int64_t> numbers;
  for (const Json& name : HeadNames(options, num_heads)) {
    numbers.push_back(std::stoll(name.get<std::string>()));
  }
  return numbers;
}

Extent Measure(const ViewOptions& options,
               const std::vector<std::string>& layers) {
  Extent extent;
  for (const std::string& layer : layers) {
    const TensorSet set = LoadLayer(options, layer);
    extent.heads = std::max(extent.heads, set.q.size(2));
    extent.tokens = std::max({extent.tokens, set.q.size(1), set.k.size(1)});
    extent.all_heads += set.q.size(2);
    extent.exact_bytes += ExactBytes(set);
  }
  return extent;
}

// Without its folder, which concerns nobody whom the page is shown to.
std::string FileName(const TensorSet& set) {
  if (set.file.find(", ") != std::string::npos) return set.file;
  return std::filesystem::path(set.file).filename().string();
}

Json PageHeader(const TensorSet& set) {
  Json header = {{"version", HEED_VERSION},
                 {"file", FileName(set)},
                 {"layers", Json::array()}};
  if (const auto model = set.facts.find("model"); model != set.facts.end()) {
    header["model"] = model->second.substr(0, kMaxModelBytes);
  }
  return header;
}

double Mean(const Json& numbers) {
  const auto list = numbers.get<std::vector<double>>();
  return std::accumulate(list.begin(), list.end(), 0.0) / static_cast<double>(list.size());
}

// What is the same in every kind of layer.
Json CommonHeader(const ViewOptions& options, const TensorSet& set,
                  const attention::Options& math) {
  return {{"name", set.layer},
          {"queries", set.q.size(1)},
          {"keys", set.k.size(1)},
          {"heads", HeadNames(options, set.q.size(2))},
          {"causal", math.causal},
          {"window", {math.window.left, math.window.right}},
          {"softcap", math.softcap},
          {"scale", math.scale ? Json(*math.scale) : Json(nullptr)},
          {"options", ToString(math)}};
}

// Adds the cells of what a pattern keeps to a page; layers that keep the same share them. Returns a line that
// says how much that is.
std::string AddKept(KeptSet kept, const Pattern& pattern, int64_t index, Json& header, Page& page) {
  const std::string cells = Base64(kept.cells);
  auto blob = std::find_if(page.blobs.begin(), page.blobs.end(),
                           [&](const auto& each) { return each.second == cells; });
  if (blob == page.blobs.end()) {
    blob = page.blobs.insert(blob, {Format("kept{}", index), cells});
  }
  kept.header["id"] = blob->first;
  page.data["pattern"] = Brief(pattern, kMaxPatternText);
  header["kept"] = kept.header;
  return Format("{} keeps {} of the pairs; maps are of attention without it",
                Brief(pattern, kMaxPatternText), Percent(Mean(kept.header["pairs"])));
}

// What holds of several layers is said once.
void AddNew(const std::vector<std::string>& from,
            std::vector<std::string>& notes) {
  for (const std::string& note : from) {
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) {
      notes.push_back(note);
    }
  }
}

// The share of pairs that a pattern keeps, on average over the heads of a page.
double Density(const Page& page) {
  Json shares = Json::array();
  for (const Json& layer : page.data["layers"]) {
    for (const Json& share : layer["kept"]["pairs"]) shares.push_back(share);
  }
  return Mean(shares);
}

// `bins` is 0 for exact maps.
Page MakePage(Context& ctx, const ViewOptions& options,
              const std::vector<std::string>& layers, int64_t bins,
              std::vector<std::string>& notes) {
  Page page;
  page.name = "view.html";
  page.styles = {"base.css", "view.css"};
  page.scripts = {"base.js", "color.js", "math.js", "labels.js",
                  "map.js",  "panel.js", "implied.js", "view.js"};
  Json shared;  // most files have one text for all layers
  for (size_t i = 0; i < layers.size(); ++i) {
    Progress(Format("layer {} of {}", i + 1, layers.size()));
    const TensorSet set = LoadLayer(options, layers[i]);
    if (i == 0) page.data = PageHeader(set);
    if (i == 0) page.title = FileName(set);
    std::vector<std::string> layer_notes;
    attention::Options math = options.math.Resolve(set, layer_notes);
    const Pattern pattern = std::exchange(math.pattern, {});
    if (set.q.size(0) > 1) {
      layer_notes.push_back(
          Format("the first of {} sequences is shown", set.q.size(0)));
    }
    const Json labels = TokenLabels(set, layer_notes);
    const auto index = static_cast<int64_t>(i);
    ViewLayer layer =
        bins == 0 ? ExactLayer(ctx, set, math, index)
                  : PooledLayer(ctx, set, math, index, labels, bins);
    if (bins == 0) {
      if (i == 0) page.data["tokens"] = shared = labels;
      if (labels != shared) layer.header["tokens"] = labels;
      layer.header["implied"] =
          ImpliedList(set, HeadNumbers(options, set.q.size(2)));
    }
    Json header = CommonHeader(options, set, math);
    header.update(layer.header);
    if (pattern.present()) {
      const int64_t rows = bins == 0 ? set.q.size(1) : layer.header["bins"][0].get<int64_t>();
      const int64_t columns = bins == 0 ? set.k.size(1) : layer.header["bins"][1].get<int64_t>();
      layer_notes.push_back(
          AddKept(KeptCells(ctx, set, math, pattern, rows, columns), pattern, index, header, page));
    }
    page.data["layers"].push_back(header);
    for (auto& blob : layer.blobs) page.blobs.push_back(std::move(blob));
    AddNew(layer_notes, notes);
  }
  page.data["notes"] = notes;
  return page;
}

void View(const ViewOptions& options) {
  options.tensors.CheckNotInput("--html", options.html);
  options.math.Check();
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  const TensorSet first = LoadLayer(options, "");
  std::vector<std::string> notes;
  options.math.Resolve(first, notes);  // throws, for a pattern that does not fit too
  CheckWritable(options.html);
  std::vector<std::string> layers = first.layers;
  if (!options.tensors.layer.empty()) layers = {first.layer};
  const Extent extent = Measure(options, layers);

  // Exact where that fits, pooled where it does not.
  Page page;
  std::string html, kind;
  notes.clear();
  if (extent.tokens <= kMaxExactTokens && extent.exact_bytes <= kMaxPageBytes) {
    page = MakePage(ctx, options, layers, /*bins=*/0, notes);
    html = ComposePage(page);
    kind = "exact";
  }
  if (html.empty() || static_cast<int64_t>(html.size()) > kMaxPageBytes) {
    const int64_t bins =
        PooledSize(extent.all_heads, options.math.HasPattern(), kMaxPageBytes - kPooledOverhead);
    if (bins == 0) {
      throw FileError(Format(
          "{}: {} heads in {} layers, expected fewer in one page: choose with "
          "--layer and --heads",
          first.file, extent.all_heads, layers.size()));
    }
    notes.clear();
    page = MakePage(ctx, options, layers, bins, notes);
    html = ComposePage(page);
    kind = Format("pooled into {0} x {0}", bins);
  }
  Progress("");
  WriteText(options.html, html);

  if (options.json) {
    Json document = {{"path", options.html},
                     {"bytes", html.size()},
                     {"layers", layers.size()},
                     {"heads", extent.heads},
                     {"tokens", extent.tokens}};
    if (options.math.HasPattern()) {
      document["pattern"] = ParsePattern(options.math.pattern).ToString();
      document["density"] = Density(page);
    }
    PrintJson(document);
    return;
  }
  std::string text = Format(
      "{}: {}, {} layer{} of {} head{}, {} tokens, {}\n", options.html,
      Bytes(static_cast<double>(html.size())), layers.size(),
      layers.size() == 1 ? "" : "s", extent.heads,
      extent.heads == 1 ? "" : "s", extent.tokens, kind);
  for (const std::string& note : notes) text += note + "\n";
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
