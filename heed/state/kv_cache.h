// KVCache: keys and values of a batch of sequences, paged or contiguous, in their dtype or quantised.
#ifndef HEED_STATE_KV_CACHE_H_
#define HEED_STATE_KV_CACHE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/state/cache_rotary.h"
#include "heed/state/kv_cache_base.h"

namespace heed {

enum class Quantize { kNone, kInt8 };
enum class Sketch { kNone, kInt8 };

// B sequences, T tokens, H key heads, D key channels, Dv value channels.
class HEED_API KVCache : public KVCacheBase {
 public:
  struct Options {
    int64_t batch = 1;          // B, at least 1
    int64_t heads = 1;          // H, at least 1
    int64_t dim = 1;            // D, at least 1
    int64_t value_dim = 0;      // Dv; 0 is dim
    int64_t capacity = -1;      // tokens per sequence, at least 1; -1: grows without bound
    int64_t page = 64;          // tokens; 0: contiguous, one page of `capacity` per sequence
    DType dtype = DType::kF32;  // f64, f32, bf16 or f16

    // kInt8: one byte per element and one f32 scale per row, for keys and for values: scale = max |x| / 127 (at least
    // 2^-126; 1 for a row of zeros), and x / scale is rounded half to even and never -128. Not with f64.
    Quantize quantize = Quantize::kNone;

    // Append() rotates the key of token t by position t, and attention::Attend() rotates each query by its position:
    // both are passed without rotary encoding. The rows have the bits of heed::Rotary(k) appended to a cache without
    // this option, also if they are quantised.
    std::optional<CacheRotary> rotary = {};

    // Forgetting attention: the number of query heads, a multiple of H, whose log decays Append() takes and
    // attention::Attend() accumulates. 0: none.
    int64_t log_decay_heads = 0;

    // kInt8: the cache also keeps int8 rows of its stored keys with a bound of their error, and min, max and mean of
    // each channel for every complete block of 64 tokens: SketchBlocks in kv_view.h. Attention that skips keys and
    // bounds their probability reads it (certified_attention.h), and so do selectors. Not with f64, kInt8 rows or log
    // decays; pages must have a multiple of 64 tokens, or 0.
    Sketch sketch = Sketch::kNone;
  };

  // An empty cache, which holds no page yet. Throws InvalidArgument for an option outside what is said above and in
  // CacheRotary, for page 0 without a capacity, and for sizes of 2^59 bytes or more.
  explicit KVCache(const Options& options);

  Options options() const;

  // Appends rows [0, lengths[b]) of k[b] and v[b] to sequence b; all T rows if `lengths` is empty.
  //
  //   k        [B, T, H, D]   dtype of the cache, any strides
  //   v        [B, T, H, Dv]  dtype of the cache, any strides
  //   lengths  [B]            from 0 to T
  //   log_decay  [B, T, Hq]   any float dtype and strides; present if and only if the cache has
  //                           log_decay_heads, Hq. Stored in f32, or in f64 if the cache is f64
  //
  // k and v may be rows of this cache. A last page that is shared with a fork or another sequence is copied first. The
  // cost is O(rows appended), apart from that copy.
  //
  // Throws InvalidArgument for other shapes, dtypes, devices or lengths, for a sequence that would exceed its capacity
  // and, if quantised, for a row with NaN or infinity (of a key after its rotation), and std::bad_alloc. On throw,
  // the cache is unchanged.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths = {},
              const ConstTensorView& log_decay = {});

  // A cache with equal content. Nothing is copied until one of the two writes, and then at most one page per sequence.
  // O(pages).
  KVCache Fork() const;

  // `batch` sequences that all begin as `prefix`, whose batch is 1: forks of it that share every page, including a
  // partly filled last one until it is written. Throws InvalidArgument if the batch of `prefix` is not 1, and for a
  // batch below 1.
  static KVCache Share(const KVCache& prefix, int64_t batch);

  // The number of leading tokens whose rows are known to be equal in all sequences: the length of Share()'s prefix,
  // less what Trim() has removed in any sequence. 0 for other caches.
  int64_t shared_prefix() const;

  // Block tables of another library, in compressed rows: the pages of sequence b are
  //
  //   indices[indptr[b]] to indices[indptr[b + 1] - 1]
  //
  // of the pools. All of them are full but the last, which has last_page_len[b] tokens. A sequence without pages is
  // empty, and its last_page_len[b] is not read.
  struct BlockTables {
    ConstTensorView k_pool;         // [pages, tokens, H, D], any strides; tokens >= 1
    ConstTensorView v_pool;         // [pages, tokens, H, Dv]
    ConstTensorView indptr;         // [B + 1], i32 or i64: from 0 on, not decreasing
    ConstTensorView indices;        // [indptr[B] or more], i32 or i64
    ConstTensorView last_page_len;  // [B], i32 or i64: from 1 to tokens
    bool heads_first = false;       // pools are [pages, H, tokens, D]
  };

  // A new cache with copies of these rows, as if they were appended at once (with rotary, keys are therefore rotated).
  // Tables have no log decays, and neither has such a cache. Rows that no sequence refers to are never read. Throws
  // InvalidArgument as the constructor and Append() do, and for an entry outside its range, which it names.
  static KVCache Import(const Options& options, const BlockTables& tables);

  // Reads a file of Save(): the options, lengths and bits of rows are equal. Pages are shared again for a shared prefix
  // only.
  //
  // Throws FileError, "PATH: got, expected", for any other file, however hostile, and if the pages would occupy more
  // than `max_bytes`, by default 64 GiB or 8 times the file's rows, whichever is more. Only pages that receive rows are
  // touched.
  static KVCache Load(const std::string& path, int64_t max_bytes = -1);

 private:
  using KVCacheBase::KVCacheBase;
};

}  // namespace heed

#endif  // HEED_STATE_KV_CACHE_H_
