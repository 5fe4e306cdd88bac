// Pages: the pages and tables that implement all caches, and Appending, which adds rows.
#ifndef HEED_STATE_PAGES_INTERNAL_H_
#define HEED_STATE_PAGES_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/state/cache_rotary_internal.h"
#include "heed/state/kv_cache_base.h"
#include "heed/state/page_pool_internal.h"
#include "heed/state/sketch_internal.h"

namespace heed {

// The options of any kind of cache. A latent cache has one head, and its values are the first columns of its keys.
struct PagesOptions {
  CacheKind kind = CacheKind::kKV;
  int64_t batch = 1, heads = 1, dim = 1, value_dim = 1;
  int64_t capacity = -1;                // tokens per sequence, -1: grows
  int64_t page = 64;                    // tokens, 0: one page of `capacity`
  int64_t window = 0, sink_tokens = 0;  // nonzero in a ring
  DType dtype = DType::kF32;
  bool quantized = false;
  std::optional<CacheRotary> rotary = {};
  bool rotated_in_cache = false;  // a ring that rotates in every Attend(), not in Append()
  int64_t log_decay_heads = 0;
  bool sketch = false;

  DType log_decay_dtype() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  bool operator==(const PagesOptions&) const = default;
};

struct PageLayout {
  int64_t tokens = 0;
  PageRows key, value, key_scale, value_scale, log_decay;
  SketchBlocks sketch;
  PageShape shape;
};

class Pages {
 public:
  // Throws InvalidArgument "KVCache: heads is 0, expected ...".
  explicit Pages(const PagesOptions& options);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const PagesOptions& options() const { return options_; }
  const PageLayout& layout() const { return layout_; }
  PagePool& pool() const { return *pool_; }
  std::span<const int64_t> lengths() const { return lengths_; }
  std::span<const int64_t> appended() const { return appended_; }
  int64_t first_kept(int64_t b) const { return first_kept_[static_cast<size_t>(b)]; }
  int64_t shared_prefix() const { return shared_prefix_; }

  // For example "RingKVCache::Trim" for "Trim".
  std::string Op(const std::string& function) const;

  KVView view() const;
  int64_t num_bytes() const;

  // The page of a token, which must not have been released.
  std::byte* Page(int64_t b, int64_t token) const {
    return tables_[static_cast<size_t>(b)][static_cast<size_t>(token / layout_.tokens)];
  }

  // The runs of tokens that are not released; the second run is often empty.
  struct Runs {
    std::pair<int64_t, int64_t> run[2];
    int64_t num_tokens() const { return (run[0].second - run[0].first) + (run[1].second - run[1].first); }
  };
  static Runs Kept(const PagesOptions& options, int64_t first_kept, int64_t length);
  Runs Kept(int64_t b) const;

  // k is [B, T, H, D]; v is [B, T, H, Dv], or absent for a latent cache. lengths and log_decay are those of KVCache.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths,
              const ConstTensorView& log_decay = {});
  void Trim(std::span<const int64_t> lengths);
  void Reorder(std::span<const int64_t> indices);
  std::unique_ptr<Pages> Fork() const;
  std::unique_ptr<Pages> Share(int64_t batch) const;  // the batch must be 1

  // Sets the counts of the last append, read from a file.
  void SetAppended(std::vector<int64_t> appended) { appended_ = std::move(appended); }

 private:
  friend class Appending;
  using Table = std::vector<std::byte*>;  // by token / page; null for a released page

  Pages(const PagesOptions& options, std::shared_ptr<PagePool> pool, std::shared_ptr<const KeyRotation> rotation);
  void TakeSequences(const Pages& from, std::span<const int64_t> indices);
  bool IsGone(int64_t page, int64_t first_kept) const;
  void DropFrom(Table& table, size_t begin) noexcept;
  void LetGo(size_t b, int64_t first_kept) noexcept;

  PagesOptions options_;
  PageLayout layout_;
  std::shared_ptr<PagePool> pool_;
  std::shared_ptr<const KeyRotation> rotation_;  // used by Append(); may be null
  std::vector<Table> tables_;
  std::vector<const std::byte* const*> rows_;  // tables_[b].data()
  std::vector<int64_t> lengths_, appended_, first_kept_;
  int64_t shared_prefix_ = 0;
  mutable std::vector<uint8_t> certified_memory_;  // [batch, heads] once a cache with a sketch has rows
};

// Rows that are being added to a cache. The constructor allocates all memory, Write() fills it, and Commit() changes
// the cache: an exception before that leaves the cache unchanged.
class Appending {
 public:
  // counts[b] >= 0 is the number of new tokens of sequence b. A ring never takes pages for tokens before `first_kept`;
  // by default, tokens that the first of the new rows does not see are released.
  //
  // Throws InvalidArgument beyond the capacity and beyond 2^62 bytes, and std::bad_alloc.
  Appending(Pages& pages, const std::string& op, std::span<const int64_t> counts,
            std::span<const int64_t> first_kept = {});

  // The page that `token` will be in.
  std::byte* Page(int64_t b, int64_t token) const;

  // Writes rows of tokens from `token` on: k [T, H, D] and v [T, H, Dv] in the cache's dtype, and log decays [T, Hq] in
  // any dtype. Throws InvalidArgument for rows that cannot be quantised, naming the token.
  void Write(int64_t b, int64_t token, const ConstTensorView& k, const ConstTensorView& v,
             const ConstTensorView& log_decay = {});

  // Computes the sketch of rows [begin, end), which are in their pages; does nothing if the cache has no sketch.
  // Write() calls it.
  void Sketch(int64_t b, int64_t begin, int64_t end);

  void Commit() noexcept;

 private:
  struct Staged {
    ~Staged();
    Staged() = default;
    Staged(Staged&&) = default;
    PagePool* pool = nullptr;
    int64_t first_page = 0;  // index of the first taken page; the taken pages replace and continue the table's
    Pages::Table taken;
    Pages::Table larger;  // a copy of the table if the table is too small
    int64_t length = 0, first_kept = 0;
  };

  void Copy(const char* name, int64_t b, int64_t token, const ConstTensorView& rows, const PageRows& to,
            const PageRows& scales);
  void CopyLogDecays(int64_t b, int64_t token, const ConstTensorView& log_decay);
  void CopyRotated(int64_t b, int64_t token, const ConstTensorView& k);
  void Quantize(const char* name, int64_t b, int64_t token, int64_t h, const std::byte* row, int64_t stride,
                int64_t dim, std::byte* to, std::byte* scale);

  Pages& pages_;
  const std::string op_;
  std::vector<Staged> staged_;
  std::vector<float> scratch_;  // one row
  std::optional<KeyRotation::Worker> rotation_worker_;
  std::vector<std::byte> gathered_, rotated_;  // keys of one token
  std::optional<SketchWriter> sketch_;
};

// Save() and Load() of all caches. `max_bytes` is that of KVCache::Load().
void SavePages(const Pages& pages, const std::string& path);
std::unique_ptr<Pages> LoadPages(const std::string& path, CacheKind kind, int64_t max_bytes);

}  // namespace heed

#endif  // HEED_STATE_PAGES_INTERNAL_H_
