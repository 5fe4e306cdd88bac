// Caches in files. The content of a file is checked for consistency and against a limit before memory is allocated for
// it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"
#include "heed/io/sections_internal.h"
#include "heed/state/pages_internal.h"
#include "heed/state/saved_cache_internal.h"

namespace heed {
namespace {

constexpr char kLogDecayHeads[] = "log_decay_heads";
constexpr char kSketch[] = "sketch", kSketchOfBytes[] = "int8";
constexpr char kPositionsKey[] = "positions", kRotatedInCache[] = "cache";
constexpr char kKindKey[] = "heed_cache", kVersionKey[] = "version", kVersion[] = "1";
constexpr std::pair<const char*, CacheKind> kKinds[] = {
    {"kv", CacheKind::kKV}, {"ring", CacheKind::kRing}, {"latent", CacheKind::kLatent}};

// A ring's table grows with tokens that no file holds, so their number is limited.
constexpr int64_t kMostRingTokens = int64_t{1} << 30;

const char* NameOf(CacheKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "";
}

// Options by their name in the metadata.
using Numbers = std::pair<const char*, int64_t PagesOptions::*>;
constexpr Numbers kNumbers[] = {{"batch", &PagesOptions::batch},       {"heads", &PagesOptions::heads},
                                {"dim", &PagesOptions::dim},           {"value_dim", &PagesOptions::value_dim},
                                {"capacity", &PagesOptions::capacity}, {"page", &PagesOptions::page},
                                {"window", &PagesOptions::window},     {"sink_tokens", &PagesOptions::sink_tokens}};

// A tensor that each sequence has in the file: the place of its rows in a page, and their form in the file.
struct Part {
  std::string name;
  PageRows rows;
  int64_t row_bytes;  // bytes of a row in a page
  DType dtype;
  int64_t width;  // elements in the file; a scale lacks this axis

  int64_t file_row_bytes() const { return std::max<int64_t>(width, 1) * static_cast<int64_t>(SizeOf(dtype)); }
};

std::vector<Part> PartsOf(const Pages& pages) {
  const PagesOptions& o = pages.options();
  const PageLayout& layout = pages.layout();
  const auto part = [&](const char* name, const PageRows& rows, int64_t dim) {
    const int64_t bytes = rows.token_stride;
    if (o.quantized) return Part{name, rows, bytes, DType::kI32, (dim + 3) / 4};
    return Part{name, rows, bytes, o.dtype, dim};
  };
  if (o.kind == CacheKind::kLatent) return {part("rows", layout.key, o.dim)};
  std::vector<Part> parts = {part("k", layout.key, o.dim), part("v", layout.value, o.value_dim)};
  if (o.quantized) {
    parts.push_back({"k_scale", layout.key_scale, 4, DType::kF32, 0});
    parts.push_back({"v_scale", layout.value_scale, 4, DType::kF32, 0});
  }
  if (o.log_decay_heads > 0) {
    parts.push_back({"log_decay", layout.log_decay, layout.log_decay.token_stride, o.log_decay_dtype(),
                     o.log_decay_heads / o.heads});
  }
  return parts;
}

std::vector<int64_t> SizesOf(const Part& part, const PagesOptions& o, int64_t rows) {
  std::vector<int64_t> sizes = {rows};
  if (o.kind != CacheKind::kLatent) sizes.push_back(o.heads);
  if (part.width != 0) sizes.push_back(part.width);
  return sizes;
}

std::string NameOf(const Part& part, int64_t b) { return part.name + "." + std::to_string(b); }

// The runs without the shared prefix.
Pages::Runs OwnRuns(const Pages& pages, int64_t b) {
  Pages::Runs runs = pages.Kept(b);
  runs.run[0].first = pages.shared_prefix();
  return runs;
}

void AddRows(const SectionWriter& to, const Part& part, const std::string& name, const Pages& pages, int64_t b,
             const Pages::Runs& runs) {
  const PagesOptions& o = pages.options();
  const int64_t row_bytes = part.file_row_bytes();
  std::byte* row_to = to.Make(name, part.dtype, SizesOf(part, o, runs.num_tokens()));
  for (const auto& [begin, end] : runs.run) {
    for (int64_t t = begin; t < end; ++t) {
      const std::byte* const row =
          pages.Page(b, t) + part.rows.begin + t % pages.layout().tokens * part.rows.token_stride;
      for (int64_t h = 0; h < o.heads; ++h, row_to += row_bytes) {
        std::memcpy(row_to, row + h * part.rows.head_stride, static_cast<size_t>(part.row_bytes));
      }
    }
  }
}

CacheKind KindOf(const SectionReader& reader) {
  const std::string& text = reader.Text(kKindKey, "that of a saved cache");
  for (const auto& [name, kind] : kKinds) {
    if (text == name) return kind;
  }
  reader.Fail(reader.Key("heed_cache") + " is " + Quote(text) + ", expected kv, ring or latent");
}

PagesOptions OptionsOf(const SectionReader& reader) {
  PagesOptions o;
  o.kind = KindOf(reader);
  if (const std::string& version = reader.Text(kVersionKey, kVersion); version != kVersion) {
    reader.Fail(reader.Key("version") + " is " + Quote(version) + ", expected " + kVersion);
  }
  for (const auto& [name, member] : kNumbers) o.*member = reader.Number(name);
  const std::string& quantize = reader.Text("quantize", "none or int8");
  if (quantize != "none" && quantize != "int8") {
    reader.Fail(reader.Key("quantize") + " is " + Quote(quantize) + ", expected none or int8");
  }
  o.quantized = quantize == "int8";
  const std::string& dtype = reader.Text("dtype", "f64, f32, bf16 or f16");
  try {
    o.dtype = DTypeFromName(dtype);
  } catch (const InvalidArgument&) {
    reader.Fail(reader.Key("dtype") + " is " + Quote(dtype) + ", expected f64, f32, bf16 or f16");
  }
  if (HasRotary(reader.metadata())) {
    const ConstTensorView numbers = reader.Tensor("rotary", DType::kF64, std::vector{kRotaryNumbers});
    try {
      o.rotary = ReadRotary(reader.metadata(), numbers.as<double>());
    } catch (const InvalidArgument& error) {
      reader.Fail(error.what());
    }
  }
  if (const auto it = reader.metadata().find(kPositionsKey); it != reader.metadata().end()) {
    if (it->second != kRotatedInCache) {
      reader.Fail(reader.Key("positions") + " is " + Quote(it->second) + ", expected " + kRotatedInCache);
    }
    o.rotated_in_cache = true;
  }
  if (reader.metadata().contains(kLogDecayHeads)) o.log_decay_heads = reader.Number(kLogDecayHeads);
  if (const auto it = reader.metadata().find(kSketch); it != reader.metadata().end()) {
    if (it->second != kSketchOfBytes) {
      reader.Fail(reader.Key("sketch") + " is " + Quote(it->second) + ", expected " + kSketchOfBytes);
    }
    o.sketch = true;
  }
  // Checks the combinations of options that the constructors of the classes rule out.
  const PagesOptions plain;
  const bool ring = o.kind == CacheKind::kRing, latent = o.kind == CacheKind::kLatent;
  if ((ring && (o.capacity != plain.capacity || o.page != plain.page)) ||
      (!ring && (o.window != 0 || o.sink_tokens != 0)) || (latent && (o.heads != 1 || o.value_dim > o.dim)) ||
      (o.kind != CacheKind::kKV && (o.quantized || o.log_decay_heads != 0 || o.sketch)) || (latent && o.rotary) ||
      (!ring && o.rotated_in_cache)) {
    reader.Fail(std::string("metadata has options that a cache of kind ") + NameOf(o.kind) +
                " cannot have, expected those of a saved one");
  }
  return o;
}

// The lengths and related lists of a file.
struct Lists {
  std::vector<int64_t> lengths, appended, first_kept;
  int64_t shared_prefix = 0;
};

Lists ReadLists(const SectionReader& reader, const PagesOptions& o) {
  const bool ring = o.kind == CacheKind::kRing;
  Lists lists;
  lists.lengths = reader.Integers("lengths", o.batch);
  lists.appended = reader.Integers("appended", o.batch);
  if (ring) lists.first_kept = reader.Integers("first_kept", o.batch);
  lists.shared_prefix = reader.Number("shared_prefix");
  if (lists.shared_prefix < 0 || (ring && lists.shared_prefix != 0)) {
    reader.Fail(reader.Key("shared_prefix") + " is " + std::to_string(lists.shared_prefix) +
                (ring ? ", expected 0 in a ring" : ", expected at least 0"));
  }
  int64_t ring_tokens = 0;
  for (size_t b = 0; b < lists.lengths.size(); ++b) {
    const auto check = [&](const char* name, int64_t value, int64_t least, int64_t most) {
      if (value >= least && value <= most) return;
      reader.Fail(std::string(name) + " of sequence " + std::to_string(b) + " is " + std::to_string(value) +
                  ", expected " + std::to_string(least) + " to " + std::to_string(most));
    };
    const int64_t length = lists.lengths[b];
    const int64_t most = ring               ? kMostRingTokens - ring_tokens
                         : o.capacity == -1 ? std::numeric_limits<int64_t>::max()
                                            : o.capacity;
    check("length", length, lists.shared_prefix, most);
    check("appended", lists.appended[b], 0, length);
    if (!ring) continue;
    ring_tokens += length;
    // The ring has exactly the rows from the first one that the last append's first row sees.
    const int64_t first_seen = length - lists.appended[b] - o.window + 1;
    check("first_kept", lists.first_kept[b], std::max<int64_t>(0, first_seen),
          std::min(length, std::max(o.sink_tokens, first_seen)));
  }
  return lists;
}

// Reads tensors of rows into caches of the given form while they are filled.
class RowReader {
 public:
  RowReader(const SectionReader& reader, const Pages& pages)
      : reader_(reader), options_(pages.options()), tokens_(pages.layout().tokens), parts_(PartsOf(pages)) {}

  // Checks the shapes and dtypes of the tensors with this suffix, which hold the rows of `runs`.
  void Check(const std::string& suffix, const Pages::Runs& runs) const {
    for (const Part& part : parts_) Tensor(part, suffix, runs);
  }

  void Read(const std::string& suffix, const Pages::Runs& runs, int64_t b, const Appending& to) const {
    for (const Part& part : parts_) {
      const std::byte* row = Tensor(part, suffix, runs).as<std::byte>();
      for (const auto& [begin, end] : runs.run) {
        for (int64_t t = begin; t < end; ++t) {
          std::byte* const out = to.Page(b, t) + part.rows.begin + t % tokens_ * part.rows.token_stride;
          for (int64_t h = 0; h < options_.heads; ++h, row += part.file_row_bytes()) {
            if (options_.quantized) CheckQuantized(part, suffix, row);
            std::memcpy(out + h * part.rows.head_stride, row, static_cast<size_t>(part.row_bytes));
          }
        }
      }
    }
  }

 private:
  ConstTensorView Tensor(const Part& part, const std::string& suffix, const Pages::Runs& runs) const {
    return reader_.Tensor(part.name + "." + suffix, part.dtype, SizesOf(part, options_, runs.num_tokens()));
  }

  // Kernels may rely on properties of quantised rows, so rows that quantisation never gives are refused.
  void CheckQuantized(const Part& part, const std::string& suffix, const std::byte* row) const {
    const std::string_view bytes(reinterpret_cast<const char*>(row), static_cast<size_t>(part.row_bytes));
    if (part.width != 0) {
      if (part.dtype != DType::kI32) return;
      if (bytes.find('\x80') == std::string_view::npos) return;
      reader_.Fail(reader_.Name(part.name + "." + suffix) + " has -128, expected -127 to 127");
    }
    float scale;
    std::memcpy(&scale, row, sizeof(scale));
    if (std::isnormal(scale) && scale > 0) return;
    reader_.Fail(reader_.Name(part.name + "." + suffix) + " has the scale " + std::to_string(scale) +
                 ", expected finite ones of at least 2^-126");
  }

  const SectionReader& reader_;
  const PagesOptions options_;
  const int64_t tokens_;
  const std::vector<Part> parts_;
};

// Checks that all pages and tables together stay within the limit.
void CheckBytes(const SectionReader& reader, const Pages& pages, const Lists& lists, std::span<const Pages::Runs> runs,
                int64_t max_bytes) {
  const int64_t tokens = pages.layout().tokens;
  int64_t sum = 0;
  const auto add = [&](int64_t count, int64_t size) {
    int64_t bytes = 0;
    if (!__builtin_mul_overflow(count, size, &bytes) && !__builtin_add_overflow(sum, bytes, &sum) && sum <= max_bytes) {
      return;
    }
    reader.Fail("pages of " + std::to_string(pages.pool().footprint()) + " bytes would be more than max_bytes, " +
                std::to_string(max_bytes) + ", expected at most that");
  };
  const auto pages_of = [&](std::pair<int64_t, int64_t> run) {
    if (run.first == run.second) return int64_t{0};
    return (run.second - 1) / tokens - run.first / tokens + 1;
  };
  add(pages_of({0, lists.shared_prefix}), pages.pool().footprint());
  for (size_t b = 0; b < runs.size(); ++b) {
    for (const auto& run : runs[b].run) add(pages_of(run), pages.pool().footprint());
    add(pages_of({0, lists.lengths[b]}), static_cast<int64_t>(sizeof(void*)));
  }
}

void WritePages(const Pages& pages, const SectionWriter& to) {
  const PagesOptions& o = pages.options();
  to.Set(kKindKey, NameOf(o.kind));
  to.Set(kVersionKey, kVersion);
  to.Set("dtype", Name(o.dtype));
  to.Set("quantize", o.quantized ? "int8" : "none");
  to.Set("shared_prefix", pages.shared_prefix());
  for (const auto& [name, member] : kNumbers) to.Set(name, o.*member);
  if (o.log_decay_heads != 0) to.Set(kLogDecayHeads, o.log_decay_heads);
  // The sketch itself is computed again from the keys: bounds are not read from a file.
  if (o.sketch) to.Set(kSketch, kSketchOfBytes);
  if (o.rotary) {
    const RotaryInFile rotary = WriteRotary(*o.rotary);
    for (const auto& [key, value] : rotary.metadata) to.Set(key, value);
    std::memcpy(to.Make("rotary", DType::kF64, std::vector{kRotaryNumbers}), rotary.numbers.data(),
                rotary.numbers.size() * sizeof(double));
  }
  if (o.rotated_in_cache) to.Set(kPositionsKey, kRotatedInCache);
  to.Add("lengths", pages.lengths());
  to.Add("appended", pages.appended());
  if (o.kind == CacheKind::kRing) {
    auto* first_kept = reinterpret_cast<int64_t*>(to.Make("first_kept", DType::kI64, std::vector{o.batch}));
    int64_t sum = 0;
    for (int64_t b = 0; b < o.batch; ++b) {
      first_kept[b] = pages.first_kept(b);
      sum += pages.lengths()[static_cast<size_t>(b)];
      if (sum > kMostRingTokens) {
        throw InvalidArgument(pages.Op("Save") + ": the sequences have more than " + std::to_string(kMostRingTokens) +
                              " tokens, expected at most that");
      }
    }
  }
  for (const Part& part : PartsOf(pages)) {
    const int64_t prefix = pages.shared_prefix();
    if (prefix != 0) AddRows(to, part, part.name + ".prefix", pages, 0, {{{0, prefix}, {0, 0}}});
    for (int64_t b = 0; b < o.batch; ++b) AddRows(to, part, NameOf(part, b), pages, b, OwnRuns(pages, b));
  }
}

std::unique_ptr<Pages> ReadPages(const SectionReader& reader, const PagesOptions& options, int64_t max_bytes) {
  reader.Integers("lengths", options.batch);  // bounds what the next step takes
  std::unique_ptr<Pages> pages;
  try {
    pages = std::make_unique<Pages>(options);
  } catch (const InvalidArgument& error) {
    reader.Fail(error.what());
  }
  const Lists lists = ReadLists(reader, options);
  const int64_t prefix = lists.shared_prefix;
  const bool ring = options.kind == CacheKind::kRing;
  const Pages::Runs prefix_run = {{{0, prefix}, {0, 0}}};
  std::vector<Pages::Runs> runs;
  std::vector<int64_t> counts;
  const RowReader rows(reader, *pages);
  if (prefix != 0) rows.Check("prefix", prefix_run);
  for (size_t b = 0; b < lists.lengths.size(); ++b) {
    const int64_t length = lists.lengths[b];
    runs.push_back(Pages::Kept(options, ring ? lists.first_kept[b] : 0, length));
    runs.back().run[0].first = prefix;
    counts.push_back(length - prefix);
    rows.Check(std::to_string(b), runs.back());
  }
  CheckBytes(reader, *pages, lists, runs, max_bytes);

  if (prefix != 0) {
    PagesOptions one = options;
    one.batch = 1;
    Pages first(one);
    Appending appending(first, "Load", std::vector{prefix});
    rows.Read("prefix", prefix_run, 0, appending);
    appending.Sketch(0, 0, prefix);
    appending.Commit();
    pages = first.Share(options.batch);
  }
  Appending appending(*pages, "Load", counts, lists.first_kept);
  for (size_t b = 0; b < runs.size(); ++b) {
    rows.Read(std::to_string(b), runs[b], static_cast<int64_t>(b), appending);
    appending.Sketch(static_cast<int64_t>(b), prefix, lists.lengths[b]);
  }
  appending.Commit();
  pages->SetAppended(lists.appended);
  return pages;
}

}  // namespace

CacheKind KindOfSavedCache(const std::string& path) { return KindOf(SectionReader(path)); }

void SavePages(const Pages& pages, const std::string& path) {
  const SectionWriter writer;
  WritePages(pages, writer);
  writer.Write(path);
}

std::unique_ptr<Pages> LoadPages(const std::string& path, CacheKind kind, int64_t max_bytes) {
  const SectionReader reader(path);
  const PagesOptions options = OptionsOf(reader);
  if (options.kind != kind) {
    reader.Fail(reader.Key(kKindKey) + " is " + NameOf(options.kind) + ", expected " + NameOf(kind));
  }
  return ReadPages(reader, options, max_bytes < 0 ? reader.DefaultMaxBytes() : max_bytes);
}

void SavedCache::Write(const KVCacheBase& cache, const SectionWriter& to) { WritePages(*cache.pages_, to); }

void SavedCache::Read(const SectionReader& from, int64_t max_bytes, KVCacheBase& cache) {
  const PagesOptions options = OptionsOf(from), &expected = cache.pages_->options();
  for (const auto& [name, member] : kNumbers) {
    if (options.*member == expected.*member) continue;
    from.Fail(from.Key(name) + " is " + std::to_string(options.*member) + ", expected " +
              std::to_string(expected.*member));
  }
  if (options != expected) {
    from.Fail(from.Key(kKindKey) +
              " does not match this cache's options, expected its kind, dtype, rotary encoding and " + "others");
  }
  const int64_t page = cache.pages_->pool().footprint();
  if (page > max_bytes) {
    from.Fail("a page has " + std::to_string(page) + " bytes, expected at most max_bytes, " +
              std::to_string(max_bytes));
  }
  cache.pages_ = ReadPages(from, options, max_bytes);
}

}  // namespace heed
