// Appending: memory is allocated first, then rows are written, then one step that cannot fail publishes them.
#include <algorithm>
#include <cstring>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/state/pages_internal.h"
#include "heed/state/quantize_row_internal.h"

namespace heed {
namespace {

int64_t CeilDivide(int64_t x, int64_t y) { return (x + y - 1) / y; }

template <class T>
void CopyStrided(const std::byte* from, int64_t stride, int64_t n, std::byte* to) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), from + i * stride, sizeof(T));
  }
}

// Copies `n` elements of `size` bytes, `stride` bytes apart, to contiguous memory.
void CopyRow(const std::byte* from, int64_t stride, int64_t n, int64_t size, std::byte* to) {
  if (stride == size || n == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * size));
  } else if (size == 2) {
    CopyStrided<uint16_t>(from, stride, n, to);
  } else if (size == 4) {
    CopyStrided<uint32_t>(from, stride, n, to);
  } else {
    CopyStrided<uint64_t>(from, stride, n, to);
  }
}

// Copies the first `tokens` tokens of a page.
void CopyTokens(const Pages& pages, const std::byte* from, int64_t tokens, std::byte* to) {
  const PageLayout& layout = pages.layout();
  const auto part = [&](const PageRows& rows) {
    for (int64_t h = 0; h < pages.options().heads; ++h) {
      const int64_t at = rows.begin + h * rows.head_stride;
      std::memcpy(to + at, from + at, static_cast<size_t>(tokens * rows.token_stride));
    }
  };
  part(layout.key);
  if (pages.options().kind != CacheKind::kLatent) part(layout.value);
  if (pages.options().quantized) {
    part(layout.key_scale);
    part(layout.value_scale);
  }
  if (pages.options().log_decay_heads > 0) part(layout.log_decay);
  if (layout.sketch.present) {
    const SketchBlocks& sketch = layout.sketch;
    const int64_t blocks = CeilDivide(tokens, SketchBlocks::kTokens);
    for (int64_t h = 0; h < pages.options().heads; ++h) {
      const int64_t at = sketch.At(from, h, 0) - from;
      std::memcpy(to + at, from + at, static_cast<size_t>(blocks * sketch.block_stride));
    }
  }
}

void CheckRows(const std::string& op, const char* name, const ConstTensorView& rows, const PagesOptions& o,
               int64_t dim) {
  const std::string what = op + ": " + name;
  if (!rows.present()) throw InvalidArgument(what + " is absent, expected a tensor");
  if (rows.dtype() != o.dtype) {
    throw InvalidArgument(what + " has dtype " + Name(rows.dtype()) + ", expected " + Name(o.dtype));
  }
  const bool latent = o.kind == CacheKind::kLatent;
  if (rows.rank() != 4 || rows.size(0) != o.batch || rows.size(2) != o.heads || rows.size(3) != dim) {
    std::string shape = rows.ShapeString();
    if (latent && rows.rank() == 4) {
      shape = ShapeString(std::vector{rows.size(0), rows.size(1), rows.size(3)});
    }
    throw InvalidArgument(what + " has shape " + shape + ", expected [" + std::to_string(o.batch) + ",T," +
                          (latent ? "" : std::to_string(o.heads) + ",") + std::to_string(dim) + "]");
  }
  mechanism::CheckReadable(op.c_str(), name, rows);
}

void CheckLogDecay(const std::string& op, const ConstTensorView& t, const PagesOptions& o, int64_t tokens) {
  const std::string what = op + ": log_decay ";
  if (t.present() != (o.log_decay_heads > 0)) {
    throw InvalidArgument(
        what + (t.present() ? "is given, expected none: the cache has no log_decay_heads"
                            : "is absent, expected that of " + std::to_string(o.log_decay_heads) + " query heads"));
  }
  if (!t.present()) return;
  if (!IsFloat(t.dtype())) {
    throw InvalidArgument(what + "has dtype " + Name(t.dtype()) + ", expected a float dtype");
  }
  const int64_t expected[] = {o.batch, tokens, o.log_decay_heads};
  if (!std::ranges::equal(t.sizes(), expected)) {
    throw InvalidArgument(what + "has shape " + t.ShapeString() + ", expected " + ShapeString(expected));
  }
  mechanism::CheckReadable(op.c_str(), "log_decay", t);
}

// Sequence b of a [B, T, H, D] view, as [T, H, D].
ConstTensorView Sequence(const ConstTensorView& rows, int64_t b) {
  const ConstTensorView one = rows.Slice(0, b, b + 1);
  return ConstTensorView(one.data(), one.dtype(), one.sizes().subspan(1), one.strides().subspan(1));
}

}  // namespace

void Pages::Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths,
                   const ConstTensorView& log_decay) {
  const std::string op = Op("Append");
  const bool latent = options_.kind == CacheKind::kLatent;
  CheckRows(op, latent ? "rows" : "k", k, options_, options_.dim);
  if (!latent) {
    CheckRows(op, "v", v, options_, options_.value_dim);
    if (v.size(1) != k.size(1)) {
      throw InvalidArgument(op + ": v has shape " + v.ShapeString() + ", expected " + std::to_string(k.size(1)) +
                            " tokens as in k");
    }
  }
  CheckLogDecay(op, log_decay, options_, k.size(1));
  std::vector<int64_t> counts(lengths.begin(), lengths.end());
  if (counts.empty()) counts.assign(lengths_.size(), k.size(1));
  if (counts.size() != lengths_.size()) {
    throw InvalidArgument(op + ": lengths has " + std::to_string(counts.size()) + " entries, expected " +
                          std::to_string(lengths_.size()) + ", one per sequence");
  }
  for (size_t b = 0; b < counts.size(); ++b) {
    if (counts[b] < 0 || counts[b] > k.size(1)) {
      throw InvalidArgument(op + ": lengths[" + std::to_string(b) + "] is " + std::to_string(counts[b]) +
                            ", expected 0 to " + std::to_string(k.size(1)) + ", the tokens in " +
                            (latent ? "rows" : "k"));
    }
  }
  Appending appending(*this, op, counts);
  for (int64_t b = 0; b < options_.batch; ++b) {
    const size_t i = static_cast<size_t>(b);
    if (counts[i] == 0) continue;
    const ConstTensorView none;
    appending.Write(b, lengths_[i], Sequence(k, b).Slice(0, 0, counts[i]),
                    latent ? none : Sequence(v, b).Slice(0, 0, counts[i]),
                    log_decay.present() ? Sequence(log_decay, b).Slice(0, 0, counts[i]) : none);
  }
  appending.Commit();
}

Appending::Staged::~Staged() {
  for (std::byte* page : taken) {
    if (page != nullptr) pool->Drop(page);
  }
}

Appending::Appending(Pages& pages, const std::string& op, std::span<const int64_t> counts,
                     std::span<const int64_t> first_kept)
    : pages_(pages), op_(op), staged_(counts.size()) {
  const PagesOptions& options = pages.options();
  const int64_t tokens = pages.layout().tokens;
  const int64_t most_pages = (int64_t{1} << 62) / pages.pool().footprint();
  for (size_t b = 0; b < counts.size(); ++b) {
    Staged& staged = staged_[b];
    const std::string what = op + ": sequence " + std::to_string(b) + " would have ";
    if (__builtin_add_overflow(pages.lengths_[b], counts[b], &staged.length) || staged.length / tokens >= most_pages) {
      throw InvalidArgument(what + "2^62 bytes, expected fewer");
    }
    if (options.capacity != -1 && staged.length > options.capacity) {
      throw InvalidArgument(what + std::to_string(staged.length) + " tokens, expected at most its capacity " +
                            std::to_string(options.capacity));
    }
  }
  if (options.quantized) {
    scratch_.resize(static_cast<size_t>(std::max(options.dim, options.value_dim)));
  }
  if (options.sketch && std::ranges::any_of(counts, [](int64_t n) { return n > 0; })) {
    sketch_.emplace(options.dtype, options.dim);
    // One bound of the keys per sequence and head.
    pages.certified_memory_.resize(counts.size() * static_cast<size_t>(options.heads));
  }
  if (pages.rotation_ != nullptr) {
    rotation_worker_.emplace(*pages.rotation_);
    gathered_.resize(static_cast<size_t>(options.heads * options.dim) * SizeOf(options.dtype));
    if (options.quantized) rotated_.resize(gathered_.size());
  }
  for (size_t b = 0; b < counts.size(); ++b) {
    Staged& staged = staged_[b];
    const Pages::Table& table = pages.tables_[b];
    const int64_t length = pages.lengths_[b];
    staged.pool = &pages.pool();
    staged.first_kept = !first_kept.empty()                ? first_kept[b]
                        : options.kind == CacheKind::kRing ? std::max(pages.first_kept_[b], length - options.window + 1)
                                                           : 0;
    staged.first_page = static_cast<int64_t>(table.size());
    if (counts[b] == 0) continue;
    // The last page is replaced if it has rows that others see.
    const int64_t used = length % tokens;
    if (used != 0 && pages.pool().IsShared(table.back())) --staged.first_page;
    const int64_t end = CeilDivide(staged.length, tokens);
    staged.taken.reserve(static_cast<size_t>(end - staged.first_page));
    for (int64_t page = staged.first_page; page < end; ++page) {
      const bool gone = pages.IsGone(page, staged.first_kept);
      staged.taken.push_back(gone ? nullptr : pages.pool().Take());
    }
    if (static_cast<size_t>(staged.first_page) < table.size()) {
      CopyTokens(pages, table.back(), used, staged.taken[0]);
    }
    if (static_cast<size_t>(end) > table.capacity()) {
      const size_t room = table.capacity() + table.capacity() / 2;
      staged.larger.reserve(std::max(static_cast<size_t>(end), room));
      staged.larger = table;
    }
  }
}

std::byte* Appending::Page(int64_t b, int64_t token) const {
  const Staged& staged = staged_[static_cast<size_t>(b)];
  const int64_t page = token / pages_.layout().tokens;
  if (page < staged.first_page) return pages_.Page(b, token);
  return staged.taken[static_cast<size_t>(page - staged.first_page)];
}

void Appending::Write(int64_t b, int64_t token, const ConstTensorView& k, const ConstTensorView& v,
                      const ConstTensorView& log_decay) {
  const os::ScopedFloatControl control;  // for rotation and quantisation
  const PageLayout& layout = pages_.layout();
  if (rotation_worker_) {
    CopyRotated(b, token, k);
  } else {
    Copy("k", b, token, k, layout.key, layout.key_scale);
  }
  if (v.present()) Copy("v", b, token, v, layout.value, layout.value_scale);
  if (log_decay.present()) CopyLogDecays(b, token, log_decay);
  Sketch(b, token, token + k.size(0));
}

// The sketch is computed from the stored keys, after rotation, because attention multiplies these.
void Appending::Sketch(int64_t b, int64_t begin, int64_t end) {
  if (!sketch_) return;
  const os::ScopedFloatControl control;
  const PageLayout& layout = pages_.layout();
  constexpr int64_t kTokens = SketchBlocks::kTokens;
  for (int64_t t = begin; t < end; ++t) {
    std::byte* const page = Page(b, t);
    const int64_t in_page = t % layout.tokens, in_block = in_page % kTokens;
    for (int64_t h = 0; h < pages_.options().heads; ++h) {
      const std::byte* const key =
          page + layout.key.begin + h * layout.key.head_stride + in_page * layout.key.token_stride;
      std::byte* const block = page + (layout.sketch.At(page, h, in_page) - page);
      sketch_->WriteRow(key, in_block, block);
      if (in_block != kTokens - 1) continue;
      sketch_->WriteStatistics(key - in_block * layout.key.token_stride, layout.key.token_stride, block);
    }
  }
}

void Appending::CopyLogDecays(int64_t b, int64_t token, const ConstTensorView& log_decay) {
  const PageLayout& layout = pages_.layout();
  const PagesOptions& o = pages_.options();
  const int64_t group = o.log_decay_heads / o.heads;
  for (int64_t t = 0; t < log_decay.size(0); ++t) {
    std::byte* const row =
        Page(b, token + t) + layout.log_decay.begin + (token + t) % layout.tokens * layout.log_decay.token_stride;
    for (int64_t h = 0; h < o.log_decay_heads; ++h) {
      StoreDouble(o.log_decay_dtype(), row + h / group * layout.log_decay.head_stride, h % group,
                  LoadAsDouble(log_decay.dtype(), log_decay.data(), t * log_decay.stride(0) + h * log_decay.stride(1)));
    }
  }
}

void Appending::Copy(const char* name, int64_t b, int64_t token, const ConstTensorView& rows, const PageRows& to,
                     const PageRows& scales) {
  const int64_t T = rows.size(0), H = rows.size(1), D = rows.size(2);
  const int64_t size = static_cast<int64_t>(SizeOf(rows.dtype()));
  const int64_t page_tokens = pages_.layout().tokens;
  const std::byte* const data = rows.as<std::byte>();
  for (int64_t t = 0; t < T;) {
    std::byte* const page = Page(b, token + t);
    const int64_t begin = (token + t) % page_tokens;  // index in the page
    const int64_t n = std::min(T - t, page_tokens - begin);
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        const std::byte* const row = data + ((t + i) * rows.stride(0) + h * rows.stride(1)) * size;
        std::byte* const out = page + to.begin + h * to.head_stride + (begin + i) * to.token_stride;
        if (pages_.options().quantized) {
          Quantize(name, b, token + t + i, h, row, rows.stride(2), D, out,
                   page + scales.begin + h * scales.head_stride + (begin + i) * scales.token_stride);
        } else {
          CopyRow(row, rows.stride(2) * size, D, size, out);
        }
      }
    }
    t += n;
  }
}

// Keys are rotated token by token, all heads at once, because the heads of a token have the same angles.
void Appending::CopyRotated(int64_t b, int64_t token, const ConstTensorView& k) {
  const PageLayout& layout = pages_.layout();
  const PageRows &to = layout.key, &scales = layout.key_scale;
  const int64_t T = k.size(0), H = k.size(1), D = k.size(2);
  const int64_t size = static_cast<int64_t>(SizeOf(k.dtype()));
  const bool quantized = pages_.options().quantized;
  for (int64_t t = 0; t < T; ++t) {
    std::byte* const page = Page(b, token + t);
    const int64_t in_page = (token + t) % layout.tokens;
    KeyRotation::Rows rows = {};
    rows.from = k.as<std::byte>() + t * k.stride(0) * size;
    rows.from_stride = k.stride(1);
    if (k.stride(2) != 1 && D != 1) {
      for (int64_t h = 0; h < H; ++h) {
        CopyRow(rows.from + h * k.stride(1) * size, k.stride(2) * size, D, size, gathered_.data() + h * D * size);
      }
      rows.from = gathered_.data();
      rows.from_stride = D;
    }
    rows.to = quantized ? rotated_.data() : page + to.begin + in_page * to.token_stride;
    rows.to_stride = quantized ? D : to.head_stride / size;
    rows.heads = H;
    rows.dtype = k.dtype();
    rotation_worker_->Rotate(token + t, rows);
    for (int64_t h = 0; h < H && quantized; ++h) {
      Quantize("k, rotated,", b, token + t, h, rotated_.data() + h * D * size, 1, D,
               page + to.begin + h * to.head_stride + in_page * to.token_stride,
               page + scales.begin + h * scales.head_stride + in_page * scales.token_stride);
    }
  }
}

void Appending::Quantize(const char* name, int64_t b, int64_t token, int64_t h, const std::byte* row, int64_t stride,
                         int64_t dim, std::byte* to, std::byte* scale) {
  float s;
  if (!QuantizeRow(pages_.options().dtype, row, stride, dim, scratch_.data(), reinterpret_cast<int8_t*>(to), &s)) {
    throw InvalidArgument(op_ + ": " + name + " has NaN or infinity in token " + std::to_string(token) + ", head " +
                          std::to_string(h) + " of sequence " + std::to_string(b) +
                          ", expected finite rows to quantise");
  }
  std::memcpy(scale, &s, sizeof(s));
}

void Appending::Commit() noexcept {
  for (size_t b = 0; b < staged_.size(); ++b) {
    Staged& staged = staged_[b];
    Pages::Table& table = pages_.tables_[b];
    if (!staged.taken.empty()) {
      if (staged.larger.capacity() != 0) table.swap(staged.larger);
      pages_.DropFrom(table, static_cast<size_t>(staged.first_page));
      table.insert(table.end(), staged.taken.begin(), staged.taken.end());  // capacity was reserved
      staged.taken.clear();
      pages_.rows_[b] = table.data();
    }
    pages_.appended_[b] = staged.length - pages_.lengths_[b];
    pages_.lengths_[b] = staged.length;
    pages_.LetGo(b, staged.first_kept);
  }
}

}  // namespace heed
