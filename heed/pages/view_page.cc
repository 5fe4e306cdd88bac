// The page of attention: the data of each layer, and the texts about it.
#include "heed/pages/view_page.h"

#include <algorithm>
#include <cmath>
#include <ios>
#include <numeric>
#include <sstream>
#include <utility>

#include "heed/core/dtype.h"
#include "heed/harness/options_text.h"
#include "heed/pages/page.h"
#include "heed/pages/view_kept.h"
#include "heed/pages/view_numbers.h"

namespace heed::pages {
namespace {

constexpr int64_t kMaxPageBytes = 6'000'000;
constexpr int64_t kMaxSingleTokens = 2048;  // with each pair shown separately
constexpr int64_t kOverhead = 300'000;      // everything except the maps of a page of maps, and rounding
constexpr int64_t kMinBins = 24, kMaxBins = 512;
constexpr size_t kMaxModelBytes = 100, kMaxPatternText = 400;

// The totals over all layers.
struct Extent {
  int64_t heads = 0, all_heads = 0, tokens = 0;
  int64_t exact_bytes = 0, single_bytes = 0;  // size of their data, as q and k or as maps of single pairs
  bool computed = true;                       // by the page
  bool patterns = false, masks = false;       // overlays of the maps
};

// Checks all arguments of an attention call with q and k.
void Check(const Context& ctx, const ViewLayer& layer) {
  const ConstTensorView &q = layer.q, &k = layer.k;
  const ConstTensorView v(nullptr, k.dtype(), {k.size(0), k.size(1), k.size(2), 1});
  attention::Explain(ctx, {q, k, v}, layer.options);
}

Extent Measure(const Context& ctx, const ViewSubject& subject) {
  Extent extent;
  for (size_t i = 0; i < subject.num_layers; ++i) {
    const ViewLayer layer = subject.layer(i);
    Check(ctx, layer);
    const int64_t Tq = layer.q.size(1), Tk = layer.k.size(1), heads = layer.q.size(2);
    extent.heads = std::max(extent.heads, heads);
    extent.tokens = std::max({extent.tokens, Tq, Tk});
    extent.all_heads += heads;
    const bool computed = ComputedInPage(layer.options);
    extent.computed &= computed;
    extent.patterns |= computed && layer.options.pattern.present();
    extent.masks |= !computed && MasksPairs(layer.options);
    extent.exact_bytes += ExactBytes(layer);
    extent.single_bytes += MapBytes(layer, {Tq, Tk}, computed && layer.options.pattern.present());
  }
  return extent;
}

// The most rows and columns of maps that fit into this many bytes; 0 if the smallest do not.
int64_t PooledSize(const Extent& extent, int64_t max_bytes) {
  const double bytes_per_bin = (2 * sizeof(F16) + (extent.patterns ? 1 : 0) + (extent.masks ? 1.0 / 8 : 0)) * 4.0 / 3;
  const double bins = static_cast<double>(max_bytes) / (bytes_per_bin * static_cast<double>(extent.all_heads));
  const auto size = static_cast<int64_t>(std::sqrt(std::max(bins, 0.0)));
  return size < kMinBins ? 0 : std::min(size, kMaxBins);
}

double Mean(const Json& numbers) {
  const auto list = numbers.get<std::vector<double>>();
  return std::accumulate(list.begin(), list.end(), 0.0) / static_cast<double>(list.size());
}

std::string Percent(double share) {
  std::ostringstream text;
  text << std::fixed;
  text.precision(1);
  text << 100 * share << " %";
  return text.str();
}

Json HeadNames(const ViewLayer& layer) {
  Json names = Json::array();
  for (const int64_t head : layer.heads) names.push_back(std::to_string(head));
  return names;
}

// Header fields common to every kind of layer. If masks are a map of their own, rows have no separate end.
Json CommonHeader(const ViewLayer& layer, const attention::Options& options) {
  const bool masked = !ComputedInPage(options) && MasksPairs(options);
  const attention::Window window = masked ? attention::Window() : options.window;
  return {{"name", layer.name},
          {"queries", layer.q.size(1)},
          {"keys", layer.k.size(1)},
          {"start", Starts(layer)[0]},
          {"heads", HeadNames(layer)},
          {"causal", options.causal && !masked},
          {"window", {window.left, window.right}},
          {"softcap", options.softcap},
          {"sinks", options.sinks.present()},
          {"options", ToString(options)}};
}

// Adds the cells of a pattern's pairs to a page; layers with equal cells share them. Returns a line with their
// fraction.
std::string AddKept(KeptSet kept, const Pattern& pattern, int64_t index, Json& header, Page& page) {
  const std::string cells = Base64(kept.cells);
  auto blob = std::ranges::find(page.blobs, cells, [](const auto& each) -> const std::string& { return each.second; });
  if (blob == page.blobs.end()) {
    blob = page.blobs.insert(blob, {"kept" + std::to_string(index), cells});
  }
  kept.header["id"] = blob->first;
  page.data["pattern"] = Brief(pattern, kMaxPatternText);
  header["kept"] = kept.header;
  return Brief(pattern, kMaxPatternText) + " keeps " + Percent(Mean(kept.header["pairs"])) +
         " of the pairs; maps are of attention without it";
}

// Adds notes without duplicates of other layers.
void AddNew(const std::vector<std::string>& from, std::vector<std::string>& notes) {
  for (const std::string& note : from) {
    if (std::ranges::find(notes, note) == notes.end()) notes.push_back(note);
  }
}

// The fraction of pairs that patterns keep, averaged over the heads of a page.
double Density(const Page& page) {
  Json shares = Json::array();
  for (const Json& layer : page.data["layers"]) {
    if (!layer.contains("kept")) continue;
    for (const Json& share : layer["kept"]["pairs"]) shares.push_back(share);
  }
  return shares.empty() ? 0 : Mean(shares);
}

// Composes pages whose maps have at most this many rows and columns; 0 for a page that computes them.
class Composer {
 public:
  Composer(Context& ctx, const ViewSubject& subject, int64_t size) : ctx_(ctx), subject_(subject), size_(size) {
    page_.name = "view.html";
    page_.styles = {"base.css", "view.css"};
    page_.scripts = {"base.js",    "color.js", "math.js",  "labels.js", "map.js", "panel.js",
                     "implied.js", "find.js",  "heads.js", "save.js",   "view.js"};
    page_.title = subject.title;
    page_.data = {{"version", HEED_VERSION}, {"layers", Json::array()}};
    if (!subject.file.empty()) page_.data["file"] = subject.file;
    if (!subject.model.empty()) page_.data["model"] = subject.model.substr(0, kMaxModelBytes);
  }

  void Add(int64_t index) {
    const ViewLayer layer = subject_.layer(static_cast<size_t>(index));
    std::vector<std::string> notes = layer.notes;
    if (layer.q.size(0) > 1) {
      notes.push_back("the first of " + std::to_string(layer.q.size(0)) + " sequences is shown");
    }
    attention::Options options = layer.options;
    Pattern over;  // pattern shown over the maps
    if (ComputedInPage(options)) over = std::exchange(options.pattern, {});
    const int64_t Tq = layer.q.size(1), Tk = layer.k.size(1);
    const Bins bins = size_ == 0 ? Bins{Tq, Tk} : Bins{std::min(size_, Tq), std::min(size_, Tk)};
    Json header = CommonHeader(layer, options);
    Numbers numbers =
        size_ == 0 ? ExactNumbers(ctx_, layer, options, index) : MapNumbers(ctx_, layer, options, index, bins);
    header.update(numbers.header);
    if (size_ == 0) header["implied"] = ImpliedList(layer);
    if (bins.rows == Tq && bins.columns == Tk) AddTokens(layer, header);
    if (over.present()) {
      notes.push_back(
          AddKept(KeptCells(ctx_, layer, options, over, bins.rows, bins.columns), over, index, header, page_));
    }
    page_.data["layers"].push_back(header);
    for (auto& blob : numbers.blobs) page_.blobs.push_back(std::move(blob));
    AddNew(notes, notes_);
  }

  ViewPage Finish() {
    page_.data["notes"] = notes_;
    ViewPage result;
    result.html = ComposePage(page_);
    result.notes = notes_;
    result.density = Density(page_);
    return result;
  }

 private:
  // Most files have one text for all layers.
  void AddTokens(const ViewLayer& layer, Json& header) {
    if (!page_.data.contains("tokens")) page_.data["tokens"] = layer.labels;
    if (layer.labels != page_.data["tokens"]) header["tokens"] = layer.labels;
  }

  Context& ctx_;
  const ViewSubject& subject_;
  const int64_t size_;
  Page page_;
  std::vector<std::string> notes_;
};

ViewPage Compose(Context& ctx, const ViewSubject& subject, int64_t size) {
  Composer composer(ctx, subject, size);
  for (size_t i = 0; i < subject.num_layers; ++i) composer.Add(static_cast<int64_t>(i));
  return composer.Finish();
}

}  // namespace

ViewPage ComposeView(Context& ctx, const ViewSubject& subject) {
  const Extent extent = Measure(ctx, subject);
  ViewPage page;
  if (extent.tokens <= kMaxSingleTokens) {
    if (extent.computed && extent.exact_bytes <= kMaxPageBytes) {
      page = Compose(ctx, subject, 0);
    } else if (!extent.computed && extent.single_bytes <= kMaxPageBytes - kOverhead) {
      page = Compose(ctx, subject, kMaxSingleTokens);
    }
    page.kind = "exact";
  }
  if (page.html.empty() || static_cast<int64_t>(page.html.size()) > kMaxPageBytes) {
    const int64_t size = PooledSize(extent, kMaxPageBytes - kOverhead);
    page = size == 0 ? ViewPage() : Compose(ctx, subject, size);
    page.kind = "pooled into " + std::to_string(size) + " x " + std::to_string(size);
  }
  page.heads = extent.heads;
  page.all_heads = extent.all_heads;
  page.tokens = extent.tokens;
  return page;
}

}  // namespace heed::pages
