// Caches in files. What a file says is checked against itself and against a limit before
// memory is taken for it.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"
#include "heed/io/safetensors.h"
#include "heed/state/pages_internal.h"

namespace heed {
namespace {

constexpr char kLogDecayHeads[] = "log_decay_heads";
constexpr char kSketch[] = "sketch", kSketchOfBytes[] = "int8";
constexpr char kPositionsKey[] = "positions", kTurnedInCache[] = "cache";
constexpr char kKindKey[] = "heed_cache", kVersionKey[] = "version", kVersion[] = "1";
constexpr std::pair<const char*, CacheKind> kKinds[] = {
    {"kv", CacheKind::kKV}, {"ring", CacheKind::kRing}, {"latent", CacheKind::kLatent}};

// A ring's table grows with tokens that no file holds.
constexpr int64_t kMostRingTokens = int64_t{1} << 30;
constexpr int64_t kDefaultMaxBytes = int64_t{1} << 36;

const char* NameOf(CacheKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "";
}

// Options by their name in the metadata.
using Numbers = std::pair<const char*, int64_t PagesOptions::*>;
constexpr Numbers kNumbers[] = {
    {"batch", &PagesOptions::batch},
    {"heads", &PagesOptions::heads},
    {"dim", &PagesOptions::dim},
    {"value_dim", &PagesOptions::value_dim},
    {"capacity", &PagesOptions::capacity},
    {"page", &PagesOptions::page},
    {"window", &PagesOptions::window},
    {"sink_tokens", &PagesOptions::sink_tokens}};

// One tensor per sequence: where its rows are in a page, and what a row is in the file.
struct Part {
  std::string name;
  PageRows rows;
  int64_t row_bytes;  // in a page
  DType dtype;
  int64_t width;  // elements in the file; a scale has none of this axis

  int64_t file_row_bytes() const {
    return std::max<int64_t>(width, 1) * static_cast<int64_t>(SizeOf(dtype));
  }
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
  std::vector<Part> parts = {part("k", layout.key, o.dim),
                             part("v", layout.value, o.value_dim)};
  if (o.quantized) {
    parts.push_back({"k_scale", layout.key_scale, 4, DType::kF32, 0});
    parts.push_back({"v_scale", layout.value_scale, 4, DType::kF32, 0});
  }
  if (o.log_decay_heads > 0) {
    parts.push_back({"log_decay", layout.log_decay, layout.log_decay.token_stride,
                     o.log_decay_dtype(), o.log_decay_heads / o.heads});
  }
  return parts;
}

std::vector<int64_t> SizesOf(const Part& part, const PagesOptions& o, int64_t rows) {
  std::vector<int64_t> sizes = {rows};
  if (o.kind != CacheKind::kLatent) sizes.push_back(o.heads);
  if (part.width != 0) sizes.push_back(part.width);
  return sizes;
}

std::string NameOf(const Part& part, int64_t b) {
  return part.name + "." + std::to_string(b);
}

// The runs less what the shared prefix has.
Pages::Runs OwnRuns(const Pages& pages, int64_t b) {
  Pages::Runs runs = pages.Kept(b);
  runs.run[0].first = pages.shared_prefix();
  return runs;
}

class Writer {
 public:
  explicit Writer(const Pages& pages) : pages_(pages) {}

  void Add(const std::string& name, std::span<const int64_t> list) {
    Add(name, DType::kI64, list.data(), static_cast<int64_t>(list.size()));
  }
  void Add(const std::string& name, DType dtype, const void* list, int64_t size) {
    tensors_.push_back({name, {list, dtype, {size}}});
  }

  void AddRows(const Part& part, const std::string& name, int64_t b,
               const Pages::Runs& runs) {
    const PagesOptions& o = pages_.options();
    const int64_t row_bytes = part.file_row_bytes();
    const size_t num_bytes =
        static_cast<size_t>(runs.num_tokens() * o.heads * row_bytes);
    AlignedBytes memory(os::AllocateAligned(num_bytes));
    std::byte* to = static_cast<std::byte*>(memory.get());
    std::memset(to, 0, num_bytes);
    for (const auto& [begin, end] : runs.run) {
      for (int64_t t = begin; t < end; ++t) {
        const std::byte* const row = pages_.Page(b, t) + part.rows.begin +
                                     t % pages_.layout().tokens * part.rows.token_stride;
        for (int64_t h = 0; h < o.heads; ++h, to += row_bytes) {
          std::memcpy(to, row + h * part.rows.head_stride,
                      static_cast<size_t>(part.row_bytes));
        }
      }
    }
    const auto sizes = SizesOf(part, o, runs.num_tokens());
    tensors_.push_back({name, {memory.get(), part.dtype, std::span(sizes)}});
    memory_.push_back(std::move(memory));
  }

  void Write(const std::string& path, const std::map<std::string, std::string>& metadata) {
    WriteSafetensors(path, tensors_, metadata);
  }

 private:
  const Pages& pages_;
  std::vector<NamedTensor> tensors_;
  std::vector<AlignedBytes> memory_;
};

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path) {}

  [[noreturn]] void Fail(const std::string& what) const {
    throw FileError(path_ + ": " + what);
  }

  const std::string& Text(const std::string& key, const char* expected) const {
    const auto it = file_.metadata().find(key);
    if (it == file_.metadata().end()) {
      Fail("metadata has no '" + key + "', expected " + expected);
    }
    return it->second;
  }

  int64_t Number(const std::string& key) const {
    const std::string& text = Text(key, "a number");
    int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end) {
      Fail("metadata '" + key + "' is " + Quote(text) + ", expected a number");
    }
    return value;
  }

  CacheKind Kind() const {
    const std::string& text = Text(kKindKey, "that of a saved cache");
    for (const auto& [name, kind] : kKinds) {
      if (text == name) return kind;
    }
    Fail("metadata 'heed_cache' is " + Quote(text) + ", expected kv, ring or latent");
  }

  PagesOptions Options() const {
    PagesOptions o;
    o.kind = Kind();
    if (const std::string& version = Text(kVersionKey, kVersion); version != kVersion) {
      Fail("metadata 'version' is " + Quote(version) + ", expected " + kVersion);
    }
    for (const auto& [name, member] : kNumbers) o.*member = Number(name);
    const std::string& quantize = Text("quantize", "none or int8");
    if (quantize != "none" && quantize != "int8") {
      Fail("metadata 'quantize' is " + Quote(quantize) + ", expected none or int8");
    }
    o.quantized = quantize == "int8";
    const std::string& dtype = Text("dtype", "f64, f32, bf16 or f16");
    try {
      o.dtype = DTypeFromName(dtype);
    } catch (const InvalidArgument&) {
      Fail("metadata 'dtype' is " + Quote(dtype) + ", expected f64, f32, bf16 or f16");
    }
    if (HasRotary(file_.metadata())) {
      const ConstTensorView numbers =
          Tensor("rotary", DType::kF64, std::vector{kRotaryNumbers});
      try {
        o.rotary = ReadRotary(file_.metadata(), numbers.as<double>());
      } catch (const InvalidArgument& error) {
        Fail(error.what());
      }
    }
    if (const auto it = file_.metadata().find(kPositionsKey); it != file_.metadata().end()) {
      if (it->second != kTurnedInCache) {
        Fail("metadata 'positions' is " + Quote(it->second) + ", expected " + kTurnedInCache);
      }
      o.turned_in_cache = true;
    }
    if (file_.metadata().contains(kLogDecayHeads)) o.log_decay_heads = Number(kLogDecayHeads);
    if (const auto it = file_.metadata().find(kSketch); it != file_.metadata().end()) {
      if (it->second != kSketchOfBytes) {
        Fail("metadata 'sketch' is " + Quote(it->second) + ", expected " + kSketchOfBytes);
      }
      o.sketch = true;
    }
    // What the constructors of the classes do not let anybody ask for.
    const PagesOptions plain;
    const bool ring = o.kind == CacheKind::kRing, latent = o.kind == CacheKind::kLatent;
    if ((ring && (o.capacity != plain.capacity || o.page != plain.page)) ||
        (!ring && (o.window != 0 || o.sink_tokens != 0)) ||
        (latent && (o.heads != 1 || o.value_dim > o.dim)) ||
        (o.kind != CacheKind::kKV && (o.quantized || o.log_decay_heads != 0 || o.sketch)) || (latent && o.rotary) ||
        (!ring && o.turned_in_cache)) {
      Fail(std::string("metadata has options that a cache of kind ") + NameOf(o.kind) +
           " cannot have, expected those of a saved one");
    }
    return o;
  }

  ConstTensorView Tensor(const std::string& name, DType dtype,
                         std::span<const int64_t> sizes) const {
    const ConstTensorView tensor = file_.tensor(name);
    if (tensor.dtype() != dtype) {
      Fail("tensor '" + name + "' has dtype " + heed::Name(tensor.dtype()) +
           ", expected " + heed::Name(dtype));
    }
    if (!std::ranges::equal(tensor.sizes(), sizes)) {
      Fail("tensor '" + name + "' has shape " + tensor.ShapeString() + ", expected " +
           ShapeString(sizes));
    }
    return tensor;
  }

  std::vector<int64_t> Integers(const std::string& name, int64_t batch) const {
    const ConstTensorView list = Tensor(name, DType::kI64, std::vector{batch});
    return {list.as<int64_t>(), list.as<int64_t>() + batch};
  }

  // The limit that the caller has not set.
  int64_t DefaultMaxBytes() const {
    int64_t sum = 0;  // below 2^63: the file has them
    for (const auto& entry : file_.entries()) sum += entry.num_bytes;
    return std::max(kDefaultMaxBytes, sum < (int64_t{1} << 59) ? 8 * sum : sum);
  }

 private:
  const std::string path_;
  const SafetensorsFile file_;
};

// Lengths and the like as a file gives them.
struct Lists {
  std::vector<int64_t> lengths, appended, first_kept;
  int64_t shared_prefix = 0;
};

Lists ReadLists(const Reader& reader, const PagesOptions& o) {
  const bool ring = o.kind == CacheKind::kRing;
  Lists lists;
  lists.lengths = reader.Integers("lengths", o.batch);
  lists.appended = reader.Integers("appended", o.batch);
  if (ring) lists.first_kept = reader.Integers("first_kept", o.batch);
  lists.shared_prefix = reader.Number("shared_prefix");
  if (lists.shared_prefix < 0 || (ring && lists.shared_prefix != 0)) {
    reader.Fail("metadata 'shared_prefix' is " + std::to_string(lists.shared_prefix) +
                (ring ? ", expected 0 in a ring" : ", expected at least 0"));
  }
  int64_t ring_tokens = 0;
  for (size_t b = 0; b < lists.lengths.size(); ++b) {
    const auto check = [&](const char* name, int64_t value, int64_t least, int64_t most) {
      if (value >= least && value <= most) return;
      reader.Fail(std::string(name) + " of sequence " + std::to_string(b) + " is " +
                  std::to_string(value) + ", expected " + std::to_string(least) + " to " +
                  std::to_string(most));
    };
    const int64_t length = lists.lengths[b];
    const int64_t most = ring               ? kMostRingTokens - ring_tokens
                         : o.capacity == -1 ? std::numeric_limits<int64_t>::max()
                                            : o.capacity;
    check("length", length, lists.shared_prefix, most);
    check("appended", lists.appended[b], 0, length);
    if (!ring) continue;
    ring_tokens += length;
    // What the first row of the last append sees is there, and nothing before it.
    const int64_t first_seen = length - lists.appended[b] - o.window + 1;
    check("first_kept", lists.first_kept[b], std::max<int64_t>(0, first_seen),
          std::min(length, std::max(o.sink_tokens, first_seen)));
  }
  return lists;
}

// Reads tensors of rows into caches like the one given, while they are being filled.
class RowReader {
 public:
  RowReader(const Reader& reader, const Pages& pages)
      : reader_(reader),
        options_(pages.options()),
        tokens_(pages.layout().tokens),
        parts_(PartsOf(pages)) {}

  // Rows of `runs` are in the tensors of this suffix: shapes and dtypes.
  void Check(const std::string& suffix, const Pages::Runs& runs) const {
    for (const Part& part : parts_) Tensor(part, suffix, runs);
  }

  void Read(const std::string& suffix, const Pages::Runs& runs, int64_t b,
            const Appending& to) const {
    for (const Part& part : parts_) {
      const std::byte* row = Tensor(part, suffix, runs).as<std::byte>();
      for (const auto& [begin, end] : runs.run) {
        for (int64_t t = begin; t < end; ++t) {
          std::byte* const out = to.Page(b, t) + part.rows.begin +
                                 t % tokens_ * part.rows.token_stride;
          for (int64_t h = 0; h < options_.heads; ++h, row += part.file_row_bytes()) {
            if (options_.quantized) CheckQuantized(part, suffix, row);
            std::memcpy(out + h * part.rows.head_stride, row,
                        static_cast<size_t>(part.row_bytes));
          }
        }
      }
    }
  }

 private:
  ConstTensorView Tensor(const Part& part, const std::string& suffix,
                         const Pages::Runs& runs) const {
    return reader_.Tensor(part.name + "." + suffix, part.dtype,
                          SizesOf(part, options_, runs.num_tokens()));
  }

  // Kernels may rely on what quantising never gives.
  void CheckQuantized(const Part& part, const std::string& suffix,
                      const std::byte* row) const {
    const std::string_view bytes(reinterpret_cast<const char*>(row),
                                 static_cast<size_t>(part.row_bytes));
    if (part.width != 0) {
      if (part.dtype != DType::kI32) return;
      if (bytes.find('\x80') == std::string_view::npos) return;
      reader_.Fail("tensor '" + part.name + "." + suffix +
                   "' has -128, expected -127 to 127");
    }
    float scale;
    std::memcpy(&scale, row, sizeof(scale));
    if (std::isnormal(scale) && scale > 0) return;
    reader_.Fail("tensor '" + part.name + "." + suffix + "' has the scale " +
                 std::to_string(scale) + ", expected finite ones of at least 2^-126");
  }

  const Reader& reader_;
  const PagesOptions options_;
  const int64_t tokens_;
  const std::vector<Part> parts_;
};

// What all pages and tables will occupy is within the limit.
void CheckBytes(const Reader& reader, const Pages& pages, const Lists& lists,
                std::span<const Pages::Runs> runs, int64_t max_bytes) {
  const int64_t tokens = pages.layout().tokens;
  int64_t sum = 0;
  const auto add = [&](int64_t count, int64_t size) {
    int64_t bytes = 0;
    if (!__builtin_mul_overflow(count, size, &bytes) &&
        !__builtin_add_overflow(sum, bytes, &sum) && sum <= max_bytes) {
      return;
    }
    reader.Fail("pages of " + std::to_string(pages.pool().footprint()) +
                " bytes would be more than max_bytes, " + std::to_string(max_bytes) +
                ", expected at most that");
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

}  // namespace

CacheKind KindOfSavedCache(const std::string& path) { return Reader(path).Kind(); }

void SavePages(const Pages& pages, const std::string& path) {
  const PagesOptions& o = pages.options();
  std::map<std::string, std::string> metadata = {
      {kKindKey, NameOf(o.kind)},
      {kVersionKey, kVersion},
      {"dtype", Name(o.dtype)},
      {"quantize", o.quantized ? "int8" : "none"},
      {"shared_prefix", std::to_string(pages.shared_prefix())}};
  for (const auto& [name, member] : kNumbers) metadata[name] = std::to_string(o.*member);
  if (o.log_decay_heads != 0) metadata[kLogDecayHeads] = std::to_string(o.log_decay_heads);
  // The sketch itself is made again of the keys: what a bound stands on is not taken from a file.
  if (o.sketch) metadata[kSketch] = kSketchOfBytes;
  Writer writer(pages);
  RotaryInFile rotary;
  if (o.rotary) {
    rotary = WriteRotary(*o.rotary);
    metadata.merge(rotary.metadata);
    writer.Add("rotary", DType::kF64, rotary.numbers.data(), kRotaryNumbers);
  }
  if (o.turned_in_cache) metadata[kPositionsKey] = kTurnedInCache;
  writer.Add("lengths", pages.lengths());
  writer.Add("appended", pages.appended());
  std::vector<int64_t> first_kept;
  if (o.kind == CacheKind::kRing) {
    int64_t sum = 0;
    for (int64_t b = 0; b < o.batch; ++b) {
      first_kept.push_back(pages.first_kept(b));
      sum += pages.lengths()[static_cast<size_t>(b)];
      if (sum > kMostRingTokens) {
        throw InvalidArgument(pages.Op("Save") + ": the sequences have more than " +
                              std::to_string(kMostRingTokens) +
                              " tokens, expected at most that");
      }
    }
    writer.Add("first_kept", first_kept);
  }
  for (const Part& part : PartsOf(pages)) {
    const int64_t prefix = pages.shared_prefix();
    if (prefix != 0) {
      writer.AddRows(part, part.name + ".prefix", 0, {{{0, prefix}, {0, 0}}});
    }
    for (int64_t b = 0; b < o.batch; ++b) {
      writer.AddRows(part, NameOf(part, b), b, OwnRuns(pages, b));
    }
  }
  writer.Write(path, metadata);
}

std::unique_ptr<Pages> LoadPages(const std::string& path, CacheKind kind,
                                 int64_t max_bytes) {
  const Reader reader(path);
  const PagesOptions options = reader.Options();
  if (options.kind != kind) {
    reader.Fail(std::string("metadata 'heed_cache' is ") + NameOf(options.kind) +
                ", expected " + NameOf(kind));
  }
  reader.Integers("lengths", options.batch);  // bounds what the next step takes
  std::unique_ptr<Pages> pages;
  try {
    pages = std::make_unique<Pages>(options);
  } catch (const InvalidArgument& error) {
    reader.Fail(error.what());
  }
  const Lists lists = ReadLists(reader, options);
  const int64_t prefix = lists.shared_prefix;
  const bool ring = kind == CacheKind::kRing;
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
  CheckBytes(reader, *pages, lists, runs,
             max_bytes < 0 ? reader.DefaultMaxBytes() : max_bytes);

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

}  // namespace heed
