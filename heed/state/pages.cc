// Pages: layout, tables, and every operation that moves no row.
#include "heed/state/pages_internal.h"

#include <algorithm>
#include <limits>

#include "heed/core/error.h"

namespace heed {
namespace {

// The limit is 2^62, so that rounding up and adding a few cannot overflow.
constexpr int64_t kMostBytes = int64_t{1} << 62;
constexpr int64_t kLine = 64;

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

const char* ClassName(CacheKind kind) {
  switch (kind) {
    case CacheKind::kRing: return "RingKVCache";
    case CacheKind::kLatent: return "LatentKVCache";
    default: return "KVCache";
  }
}

[[noreturn]] void Fail(const std::string& what) { throw InvalidArgument(what); }

// A quantised cache has nothing that is cheaper to read than its rows, and decays would have to enter every bound.
void CheckSketch(const std::string& name, const PagesOptions& o) {
  constexpr int64_t kMostChannels = 65536;  // sums of products of bytes are in 32 bits
  const auto expect = [&](bool holds, const std::string& got, const std::string& expected) {
    if (!holds) Fail(name + ": " + got + ", expected " + expected + " with a sketch");
  };
  expect(o.dtype != DType::kF64, "dtype is f64", "f32, bf16 or f16");
  expect(!o.quantized, "quantize is int8", "none");
  expect(o.log_decay_heads == 0, "log_decay_heads is " + std::to_string(o.log_decay_heads), "none");
  expect(o.page % SketchBlocks::kTokens == 0, "page is " + std::to_string(o.page), "a multiple of 64, or 0");
  expect(o.dim <= kMostChannels, "dim is " + std::to_string(o.dim), "at most " + std::to_string(kMostChannels));
}

void CheckOptions(const PagesOptions& o) {
  const std::string name = ClassName(o.kind);
  const auto at_least = [&](const char* option, int64_t value, int64_t least) {
    if (value >= least) return;
    Fail(name + ": " + option + " is " + std::to_string(value) + ", expected at least " + std::to_string(least));
  };
  at_least("batch", o.batch, 1);
  at_least("heads", o.heads, 1);
  at_least("dim", o.dim, 1);
  at_least("value_dim", o.value_dim, 1);
  at_least("page", o.page, 0);
  at_least("sink_tokens", o.sink_tokens, 0);
  if (o.kind == CacheKind::kRing) at_least("window", o.window, 1);
  if (o.capacity != -1 && o.capacity < 1) {
    Fail(name + ": capacity is " + std::to_string(o.capacity) + ", expected at least 1, or -1 for a cache that grows");
  }
  if (o.page == 0 && o.capacity == -1) {
    Fail(name +
         ": page is 0 and capacity is -1, expected a capacity: a contiguous cache "
         "cannot grow");
  }
  if (!IsFloat(o.dtype)) {
    Fail(name + ": dtype is " + Name(o.dtype) + ", expected f64, f32, bf16 or f16");
  }
  if (o.quantized && o.dtype == DType::kF64) {
    Fail(name + ": dtype is f64, expected f32, bf16 or f16 with quantised rows");
  }
  if (o.log_decay_heads < 0 || o.log_decay_heads % o.heads != 0) {
    Fail(name + ": log_decay_heads is " + std::to_string(o.log_decay_heads) + ", expected a multiple of heads, " +
         std::to_string(o.heads) + ", or 0 for none");
  }
  if (o.sketch) CheckSketch(name, o);
  if (o.rotary) CheckCacheRotary(name, *o.rotary, o.dim);
  if (o.rotated_in_cache && !o.rotary) {
    Fail(name +
         ": positions is kCache without rotary, expected rotary: nothing else has "
         "positions");
  }
}

// The product of positive factors. Throws InvalidArgument if it is too large.
int64_t Product(const PagesOptions& o, const char* what, std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product >= kMostBytes / 8) {
      std::string text;
      for (const int64_t f : factors) text += (text.empty() ? "" : " x ") + std::to_string(f);
      Fail(std::string(ClassName(o.kind)) + ": " + what + " of " + text +
           " bytes is too large, expected fewer than 2^59");
    }
  }
  return product;
}

// The number of pages of a slab: enough for long runs and huge pages, but not more than a sequence can fill. Forks and
// shares of a cache must compute the same number.
int64_t SlabPages(const PagesOptions& o, int64_t tokens, int64_t page_bytes) {
  constexpr int64_t kFewestTokens = 1024, kMostTokens = 4096;
  constexpr int64_t kHuge = int64_t{1} << 22, kLargest = int64_t{1} << 24;  // bytes
  int64_t pages = std::clamp((kHuge - 1) / page_bytes + 1, kFewestTokens / tokens, kMostTokens / tokens);
  pages = std::min(pages, kLargest / page_bytes);
  if (o.capacity != -1) pages = std::min(pages, (o.capacity - 1) / tokens + 1);
  if (o.kind == CacheKind::kRing) {
    pages = std::min(pages, o.window / tokens + o.sink_tokens / tokens + 3);
  }
  return std::max<int64_t>(pages, 1);
}

PageLayout MakeLayout(const PagesOptions& o) {
  PageLayout layout;
  layout.tokens = o.page == 0 ? o.capacity : o.page;
  const bool latent = o.kind == CacheKind::kLatent;
  const int64_t size = o.quantized ? 1 : static_cast<int64_t>(SizeOf(o.dtype));
  PageShape& shape = layout.shape;
  const auto unit = [&](int64_t dim, PageRows* rows, PageRows* scales, PageRows* decays) {
    rows->token_stride = Product(o, "a row", {dim, size});
    int64_t bytes = Product(o, "a head of a page", {layout.tokens, rows->token_stride});
    Product(o, "a page", {o.heads, bytes});
    if (o.quantized) {
      constexpr int64_t kScale = sizeof(float);
      scales->begin = RoundUp(bytes, kScale);
      scales->token_stride = kScale;
      bytes = scales->begin + layout.tokens * kScale;
    }
    if (decays != nullptr && o.log_decay_heads > 0) {
      const auto decay_bytes = static_cast<int64_t>(heed::SizeOf(o.log_decay_dtype()));
      decays->begin = RoundUp(bytes, decay_bytes);
      decays->token_stride = Product(o, "log decays of a token", {o.log_decay_heads / o.heads, decay_bytes});
      bytes = decays->begin + Product(o, "log decays of a page", {layout.tokens, decays->token_stride});
    }
    shape.unit_bytes = std::max(shape.unit_bytes, RoundUp(bytes, kLine));
  };
  unit(o.dim, &layout.key, &layout.key_scale, &layout.log_decay);
  if (!latent) unit(o.value_dim, &layout.value, &layout.value_scale, nullptr);
  shape.lanes = latent ? 1 : 2 * o.heads;
  // Sketches have lanes of their own, so that keys and values stay contiguous; each lane has as many heads as fit.
  SketchBlocks& sketch = layout.sketch;
  if (o.sketch) {
    sketch = SketchLayout(o.dim);
    sketch.head_stride =
        Product(o, "a sketch of a page", {(layout.tokens - 1) / SketchBlocks::kTokens + 1, sketch.block_stride});
    shape.unit_bytes = std::max(shape.unit_bytes, sketch.head_stride);
    sketch.lane_heads = std::min(o.heads, shape.unit_bytes / sketch.head_stride);
    shape.lanes += (o.heads - 1) / sketch.lane_heads + 1;
  }
  const int64_t page_bytes = Product(o, "a page", {shape.lanes, shape.unit_bytes});
  shape.slab_pages = SlabPages(o, layout.tokens, page_bytes);

  const int64_t lane = shape.lane_bytes();
  layout.key.head_stride = layout.value.head_stride = layout.log_decay.head_stride = lane;
  layout.value.begin = o.heads * lane;
  sketch.begin = 2 * o.heads * lane;
  sketch.lane_stride = lane;
  if (o.quantized) {
    layout.key_scale.head_stride = layout.value_scale.head_stride = lane;
    layout.value_scale.begin += o.heads * lane;
  }
  if (latent) layout.value = layout.key;
  const int64_t pages = o.capacity == -1 ? 1 : (o.capacity - 1) / layout.tokens + 1;
  Product(o, "a full cache", {page_bytes, pages, o.batch});
  return layout;
}

}  // namespace

Pages::Pages(const PagesOptions& options) : Pages((CheckOptions(options), options), nullptr, nullptr) {
  if (!options.rotary || options.rotated_in_cache) return;
  rotation_ = std::make_shared<const KeyRotation>(*options.rotary, options.dim);
}

Pages::Pages(const PagesOptions& options, std::shared_ptr<PagePool> pool, std::shared_ptr<const KeyRotation> rotation)
    : options_(options), layout_(MakeLayout(options)),
      pool_(pool != nullptr ? std::move(pool) : std::make_shared<PagePool>(layout_.shape)),
      rotation_(std::move(rotation)) {
  const size_t B = static_cast<size_t>(options.batch);
  tables_.resize(B);
  rows_.resize(B);
  lengths_.resize(B);
  appended_.resize(B);
  first_kept_.resize(B);
}

Pages::~Pages() {
  for (Table& table : tables_) DropFrom(table, 0);
}

std::string Pages::Op(const std::string& function) const {
  return std::string(ClassName(options_.kind)) + "::" + function;
}

KVView Pages::view() const {
  KVView view;
  view.dtype = options_.dtype;
  view.batch = options_.batch;
  view.heads = options_.heads;
  view.dim = options_.dim;
  view.value_dim = options_.value_dim;
  view.page_tokens = layout_.tokens;
  view.key = layout_.key;
  view.value = layout_.value;
  view.quantized = options_.quantized;
  view.key_scale = layout_.key_scale;
  view.value_scale = layout_.value_scale;
  view.log_decay_heads = options_.log_decay_heads;
  view.log_decay = layout_.log_decay;
  view.sketch = layout_.sketch;
  view.certified_memory = certified_memory_.data();
  view.pages = rows_.data();
  view.lengths = lengths_;
  view.appended = appended_;
  view.shared_prefix = shared_prefix_;
  if (options_.kind == CacheKind::kRing) {
    view.first_kept = first_kept_;
    view.sink_tokens = options_.sink_tokens;
    view.window = options_.window;
  }
  if (options_.rotary) view.rotary = &*options_.rotary;
  view.rotated_in_cache = options_.rotated_in_cache;
  return view;
}

int64_t Pages::num_bytes() const {
  std::vector<const std::byte*> pages;
  for (const Table& table : tables_) {
    for (const std::byte* page : table) {
      if (page != nullptr) pages.push_back(page);
    }
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return static_cast<int64_t>(pages.size()) * pool_->footprint();
}

Pages::Runs Pages::Kept(const PagesOptions& options, int64_t first_kept, int64_t length) {
  if (first_kept <= options.sink_tokens) return {{{0, length}, {length, length}}};
  return {{{0, options.sink_tokens}, {first_kept, length}}};
}

Pages::Runs Pages::Kept(int64_t b) const { return Kept(options_, first_kept(b), lengths_[static_cast<size_t>(b)]); }

bool Pages::IsGone(int64_t page, int64_t first_kept) const {
  const int64_t sinks = options_.sink_tokens, tokens = layout_.tokens;
  return page >= sinks / tokens + (sinks % tokens != 0) && page < first_kept / tokens;
}

void Pages::DropFrom(Table& table, size_t begin) noexcept {
  for (size_t i = begin; i < table.size(); ++i) {
    if (table[i] != nullptr) pool_->Drop(table[i]);
  }
  table.resize(begin);
}

// Releases pages. O(pages released).
void Pages::LetGo(size_t b, int64_t first_kept) noexcept {
  int64_t page = first_kept_[b] / layout_.tokens;
  for (; page < first_kept / layout_.tokens; ++page) {
    if (!IsGone(page, first_kept)) continue;  // sinks
    std::byte*& entry = tables_[b][static_cast<size_t>(page)];
    if (entry != nullptr) pool_->Drop(std::exchange(entry, nullptr));
  }
  first_kept_[b] = first_kept;
}

void Pages::Trim(std::span<const int64_t> lengths) {
  const std::string op = Op("Trim");
  if (lengths.size() != lengths_.size()) {
    Fail(op + ": lengths has " + std::to_string(lengths.size()) + " entries, expected " +
         std::to_string(lengths_.size()) + ", one per sequence");
  }
  const bool ring = options_.kind == CacheKind::kRing;
  for (size_t b = 0; b < lengths.size(); ++b) {
    const std::string what = op + ": lengths[" + std::to_string(b) + "] is " + std::to_string(lengths[b]);
    if (lengths[b] < 0 || lengths[b] > lengths_[b]) {
      Fail(what + ", expected 0 to the present " + std::to_string(lengths_[b]));
    }
    // The rows that the next row would see must not be released.
    const int64_t sinks = options_.sink_tokens, kept = first_kept_[b];
    if (ring && kept > sinks && lengths[b] > sinks && lengths[b] - options_.window + 1 < kept) {
      Fail(what + ", expected at least " + std::to_string(kept + options_.window - 1) + " or at most the " +
           std::to_string(sinks) + " sink tokens: the window before it is gone");
    }
  }
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t before = std::min(lengths_[b] - appended_[b], lengths[b]);
    const int64_t pages = (lengths[b] + layout_.tokens - 1) / layout_.tokens;
    DropFrom(tables_[b], static_cast<size_t>(pages));
    lengths_[b] = lengths[b];
    appended_[b] = lengths[b] - before;
    first_kept_[b] = std::min(first_kept_[b], lengths[b]);
    shared_prefix_ = std::min(shared_prefix_, lengths[b]);
  }
}

// Sequence b becomes sequence indices[b] of `from`; *this must have no sequence yet.
void Pages::TakeSequences(const Pages& from, std::span<const int64_t> indices) {
  for (size_t b = 0; b < indices.size(); ++b) {
    const size_t i = static_cast<size_t>(indices[b]);
    tables_[b] = from.tables_[i];
    for (std::byte* page : tables_[b]) {
      if (page != nullptr) pool_->Keep(page);
    }
    rows_[b] = tables_[b].data();
    lengths_[b] = from.lengths_[i];
    appended_[b] = from.appended_[i];
    first_kept_[b] = from.first_kept_[i];
    if (from.certified_memory_.empty()) continue;
    const auto heads = static_cast<size_t>(options_.heads);
    certified_memory_.resize(indices.size() * heads);
    std::copy_n(from.certified_memory_.data() + i * heads, heads, certified_memory_.data() + b * heads);
  }
  shared_prefix_ = from.shared_prefix_;
}

void Pages::Reorder(std::span<const int64_t> indices) {
  const std::string op = Op("Reorder");
  if (indices.size() != lengths_.size()) {
    Fail(op + ": indices has " + std::to_string(indices.size()) + " entries, expected " +
         std::to_string(lengths_.size()) + ", one per sequence");
  }
  for (size_t b = 0; b < indices.size(); ++b) {
    if (indices[b] < 0 || indices[b] >= options_.batch) {
      Fail(op + ": indices[" + std::to_string(b) + "] is " + std::to_string(indices[b]) + ", expected 0 to " +
           std::to_string(options_.batch - 1));
    }
  }
  Pages next(options_, pool_, rotation_);
  next.TakeSequences(*this, indices);
  tables_.swap(next.tables_);
  rows_.swap(next.rows_);
  lengths_.swap(next.lengths_);
  appended_.swap(next.appended_);
  first_kept_.swap(next.first_kept_);
  certified_memory_.swap(next.certified_memory_);
}

std::unique_ptr<Pages> Pages::Fork() const {
  std::unique_ptr<Pages> fork(new Pages(options_, pool_, rotation_));
  std::vector<int64_t> same(lengths_.size());
  for (size_t b = 0; b < same.size(); ++b) same[b] = static_cast<int64_t>(b);
  fork->TakeSequences(*this, same);
  return fork;
}

std::unique_ptr<Pages> Pages::Share(int64_t batch) const {
  if (options_.batch != 1) {
    Fail(Op("Share") + ": prefix has batch " + std::to_string(options_.batch) + ", expected 1");
  }
  PagesOptions options = options_;
  options.batch = batch;
  CheckOptions(options);
  std::unique_ptr<Pages> shared(new Pages(options, pool_, rotation_));
  shared->TakeSequences(*this, std::vector<int64_t>(static_cast<size_t>(batch), 0));
  shared->shared_prefix_ = lengths_[0];
  return shared;
}

}  // namespace heed
