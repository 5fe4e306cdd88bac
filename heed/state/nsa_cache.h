// NSACache: the cache of native sparse attention for sequences that grow token by token. It has keys and values of all
// tokens, and a compressed row of keys and of values for each window.
#ifndef HEED_STATE_NSA_CACHE_H_
#define HEED_STATE_NSA_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/state/kv_cache.h"
#include "heed/state/kv_view.h"

namespace heed {

// The content of the cache as attention sees it, valid until the cache changes.
struct NSAView {
  KVView tokens;
  ConstTensorView k_cmp;  // [B, N, H, D], N the windows of the longest sequence; others have fewer
  ConstTensorView v_cmp;  // [B, N, H, Dv]
  int64_t length = 0, stride = 0;
};

// B sequences, H key heads, D key channels, Dv value channels.
class HEED_API NSACache {
 public:
  struct Options {
    int64_t batch = 1;          // B, at least 1
    int64_t heads = 1;          // H, at least 1
    int64_t dim = 1;            // D, at least 1
    int64_t value_dim = 0;      // Dv; 0 is dim
    int64_t length = 64;        // tokens of a window, at least 1
    int64_t stride = 64;        // tokens between the beginnings of two windows, at least 1
    int64_t capacity = -1;      // tokens per sequence, at least 1; -1: grows without bound
    int64_t page = 64;          // tokens; 0: contiguous, one page of `capacity` per sequence
    DType dtype = DType::kF32;  // f64, f32, bf16 or f16
  };

  // An empty cache. Throws InvalidArgument for an option outside what is said above, as KVCache does.
  explicit NSACache(const Options& options);

  const Options& options() const { return options_; }

  // Appends rows [0, lengths[b]) of k[b] and v[b] to sequence b, all T if `lengths` is empty, and one row for each
  // window that becomes complete: the mean of its keys and of its values, rounded to the dtype, or the next row of
  // k_cmp and v_cmp.
  //
  //   k      [B, T, H, D]   dtype of the cache, any strides
  //   v      [B, T, H, Dv]  dtype of the cache, any strides
  //   k_cmp  [B, n, H, D]   dtype of the cache, n at least the windows that any sequence completes now; may be absent
  //   v_cmp  [B, n, H, Dv]  dtype of the cache, present if k_cmp is
  //
  // The cost is O(rows appended), and length tokens for each mean. Throws as KVCache::Append does; on throw the cache
  // is unchanged.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths = {},
              const ConstTensorView& k_cmp = {}, const ConstTensorView& v_cmp = {});

  // The number of tokens of each sequence, [batch], and how many of them the last Append() added.
  std::span<const int64_t> lengths() const { return tokens_.lengths(); }
  std::span<const int64_t> appended() const { return tokens_.appended(); }

  // Shortens sequence b to lengths[b] tokens, as KVCache::Trim does. Windows that are no longer complete are removed.
  void Trim(std::span<const int64_t> lengths) { tokens_.Trim(lengths); }

  // A cache with equal content. Tokens are shared until one of the two writes; rows of windows are copied.
  NSACache Fork() const;

  // Bytes of all pages held, and of the rows of windows.
  int64_t nbytes() const;

  NSAView view() const;

 private:
  NSACache(const Options& options, KVCache&& tokens) : options_(options), tokens_(std::move(tokens)) {}

  int64_t NumWindows(int64_t tokens) const {
    return tokens < options_.length ? 0 : (tokens - options_.length) / options_.stride + 1;
  }
  // Reserves memory for this many windows of each sequence. Existing rows keep their values.
  void Reserve(int64_t windows);
  void Compress(int64_t sequence, int64_t window, int64_t given, const ConstTensorView& k_cmp,
                const ConstTensorView& v_cmp);

  Options options_;
  KVCache tokens_;
  int64_t room_ = 0;              // windows of each sequence
  std::vector<std::byte> k_, v_;  // [B, room, H, D] and [B, room, H, Dv]
};

}  // namespace heed

#endif  // HEED_STATE_NSA_CACHE_H_
