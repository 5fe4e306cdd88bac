// KVCacheBase: the common part of the caches of keys and values. A cache is a batch of sequences, each a list of tokens
// with one row of keys and one of values per head.
//
// Memory. Tokens are in pages that never move: growing takes pages and copies no row. A page is one unit of memory for
// the keys of each head and one for its values; a latent cache has no values. A unit is
//
//   [token][dim or value_dim] and, if quantised, the scales of these rows, f32 [token]
//   and, for keys, [token][log decays of the head's query heads], f32, or f64 with f64
//
// All units of a cache have one size, that of the larger of keys and values,
//
//   unit = page max(dim, value_dim) size     (quantised: rounded up to 4, and 4 page more)
//
// bytes, rounded up to 64. With a sketch, a page has for each key head and every 64 tokens 64 (D + 8) + 12 D bytes,
// with D rounded up to 4 and the sum to 64. The sketches of as many heads as fit into a unit, at least one, take one
// more unit, and a unit is at least as large as one of them. Otherwise a page occupies 2 heads unit bytes, or unit
// bytes in a latent cache. A sequence of n tokens holds ceil(n / page) pages and 8 bytes for each in a table, or 12
// with the table's room to grow; a page has 16 more bytes beside its slab.
//
// Pages come from slabs, which a cache and its forks share, lowest addresses first. A slab is [keys of each head,
// values of each head][page][unit]: in pages that are taken consecutively, the rows of a head are contiguous. The
// number of pages of a slab is
//
//   4 MiB / bytes of a page, rounded up; at least 1024 / page, at most 4096 / page; then
//   at most 16 MiB / bytes of a page, at most ceil(capacity / page), in a ring at most
//   window / 64 + sink_tokens / 64 + 3; at least 1.
//
// A slab of 4 MiB or more is on huge pages where the system has them, and is therefore mostly resident from its first
// token on: set a capacity for small caches. Released pages are used again; slabs return to the system with the last of
// these caches. Rows beyond a sequence's length are indeterminate.
//
// Threads. A cache is used by one thread at a time. Forks count as separate caches: different threads may use them at
// once.
//
// A cache that has been moved from may only be assigned to or destroyed.
#ifndef HEED_STATE_KV_CACHE_BASE_H_
#define HEED_STATE_KV_CACHE_BASE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "heed/core/export.h"
#include "heed/state/kv_view.h"

namespace heed {

enum class CacheKind { kKV, kRing, kLatent };

// The class that can load the file. Throws FileError if it is not a saved cache.
HEED_API CacheKind KindOfSavedCache(const std::string& path);

class Pages;
struct SavedCache;

class HEED_API KVCacheBase {
 public:
  KVCacheBase(KVCacheBase&&) noexcept;
  KVCacheBase& operator=(KVCacheBase&&) noexcept;

  CacheKind kind() const;
  int64_t batch() const;

  // The number of tokens of each sequence, [batch], and how many of them the last append added. Like all of view(),
  // they are valid until the cache changes or is destroyed; a call that throws changes nothing.
  std::span<const int64_t> lengths() const;
  std::span<const int64_t> appended() const;

  KVView view() const;

  // Bytes of all pages held. A page that several sequences share counts once; a page that is shared with another cache
  // counts in each. O(pages log pages).
  int64_t nbytes() const;

  // Shortens sequence b to lengths[b] tokens and releases the pages beyond. With before = min(length - appended,
  // lengths[b]), the number of tokens of the last append becomes lengths[b] - before.
  //
  // Throws InvalidArgument unless there is one length per sequence, from 0 to the present one; a ring adds a rule.
  void Trim(std::span<const int64_t> lengths);

  // Sequence b becomes a copy of the former sequence indices[b]; nothing is copied until it is written. O(pages).
  //
  // Throws InvalidArgument unless there is one index per sequence, in [0, batch).
  void Reorder(std::span<const int64_t> indices);

  // Writes a safetensors file that Load() of the same class reads: options and kind as metadata, `lengths` and
  // `appended` (in a ring `first_kept`), I64 [batch], and for each sequence b its rows, "k.b" [rows, heads, dim] and
  // "v.b" [rows, heads, value_dim]; a latent cache has "rows.b" alone. Rows of a shared prefix are stored once, as
  // "k.prefix". Quantised rows are bytes, four to an I32, the last filled up with zeros, and their scales are
  // "k_scale.b" F32 [rows, heads]. Log decays are "log_decay.b" F32 or F64 [rows, heads, log_decay_heads / heads]. With
  // rotary, its pairs and type are metadata, as is "positions" of a ring that rotates by cache positions, and its
  // numbers are "rotary" F64 [13], NaN where absent: base, dim, truncate, factor, original_max_position_embeddings,
  // max_position_embeddings, attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, low_freq_factor,
  // high_freq_factor. A sketch is stored as metadata alone: Load() computes it again from the keys. Needs as much
  // additional memory as the rows have.
  //
  // Throws FileError if writing fails, and InvalidArgument for a ring whose sequences have had more than 2^30 tokens
  // together, which Load() would refuse.
  void Save(const std::string& path) const;

 protected:
  friend struct SavedCache;
  explicit KVCacheBase(std::unique_ptr<Pages> pages);
  ~KVCacheBase();

  std::unique_ptr<Pages> pages_;
};

}  // namespace heed

#endif  // HEED_STATE_KV_CACHE_BASE_H_
