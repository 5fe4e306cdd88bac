// The softmax engine's problem: views, sizes and scalars, all checked.
//
// An operation fills a Problem from its own inputs and options; the engine knows no operation. Every tensor is a
// pointer to its element (0, 0, ...) with strides in elements, which are zero where it is broadcast.
#ifndef HEED_ENGINES_SOFTMAX_PROBLEM_H_
#define HEED_ENGINES_SOFTMAX_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"
#include "heed/engines/softmax/key_runs.h"
#include "heed/engines/softmax/block_sparse_mask.h"
#include "heed/engines/softmax/wide_sum.h"

namespace heed::softmax {

// One attention between the queries and keys of one sequence: an entry of a padded batch, or the rows between two
// cu_seqlens of a packed one.
struct Sequence {
  int64_t batch = 0;    // index for bias, mask, slopes and dropout
  int64_t first_q = 0;  // token offset of query 0 in q, o and lse
  int64_t first_k = 0;  // token offset of key 0 in k and v
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int64_t start = 0;      // position of query 0
  int64_t key_begin = 0;  // valid keys are [key_begin, key_end)
  int64_t key_end = 0;
  int64_t query_end = 0;   // rows from here on see nothing
  int64_t prefix_end = 0;  // keys below remain visible under `causal`
  int64_t sink_end = 0;    // keys below remain visible under `window`
  // Addresses of the pages of a paged cache. Only pages with visible keys are read.
  const std::byte* const* pages = nullptr;
  // From `tail_begin` on, which is a boundary of segments, keys need not be contiguous: key j is then token
  // tail[j - tail_begin], in pages or behind first_k. The backward pass does not support this.
  const int64_t* tail = nullptr;
  int64_t tail_begin = 0;
  int64_t own_begin = 0;                  // keys below are computed with a SharedKeys
  int64_t first_decay = 0;                // where its entries in the tables of log decays begin
  const BlockSparseMask* kept = nullptr;  // block mask of a pattern, by the sequence's queries; null: all is kept
  int64_t kept_batch = 0;                 // this sequence's index in it
  // The block mask by tiles instead of `kept`; its first key is on a boundary of tiles of 64
  const TileRows* tile_rows = nullptr;
};

// Shared prefix: sequences [first, first + count), each with as many queries, whose keys below `end`, a boundary of
// segments, are the same rows. The queries of all of them take these keys together. Neither a mask nor segments may
// distinguish them.
struct SharedKeys {
  int64_t first = 0, count = 0, end = 0;
};

// A tensor over tokens and heads. In pages, `page_offset` bytes from the start of each page take the place of `data`.
struct Rows {
  const void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t page_offset = 0;
};

// A tensor over (batch, head, query, key) pairs.
struct Pairs {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0, key_stride = 0;
};

// One number per query head, or per batch entry and query head, which device kernels read and write in place.
struct HeadNumbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, head_stride = 0;
};

// A bias by distance: b[head, d] is added to the logits of the pairs with p - j = d, 0 <= d < span. It is in the type
// of the computation, f64 or f32. Each head has kPad zeros before and after, so that a vector that overlaps the span
// can be loaded as a whole.
struct RelativeBias {
  static constexpr int64_t kPad = 16;
  std::shared_ptr<const std::vector<float>> f32;
  std::shared_ptr<const std::vector<double>> f64;
  int64_t span = 0;  // 0: none

  bool present() const { return span > 0; }
  int64_t head_stride() const { return span + 2 * kPad; }
  // Returns the address of b[0, 0].
  template <class T>
  const T* Data() const {
    if constexpr (sizeof(T) == sizeof(double)) {
      return f64->data() + kPad;
    } else {
      return f32->data() + kPad;
    }
  }
  double At(int64_t head, int64_t distance) const {
    if (distance < 0 || distance >= span) return 0;
    const int64_t at = head * head_stride() + distance;
    return f64 != nullptr ? Data<double>()[at] : static_cast<double>(Data<float>()[at]);
  }
};

// Sums of log decays, by sequence and query head; see decays.h.
struct DecayTables {
  const double* in_tile = nullptr;    // by key: sum over the later keys of its tile
  const WideSum* of_tiles = nullptr;  // by tile: sum up to its end
  int64_t entries = 0;                // size of in_tile
};

struct Problem {
  DType dtype = DType::kF32;
  Device device;  // of q, k, v, o, lse, bias and mask
  int64_t query_heads = 0, key_heads = 0;
  int64_t depth = 0, value_depth = 0;  // D and Dv
  std::vector<Sequence> sequences;
  std::vector<SharedKeys> shared;

  Rows q, k, v;
  int64_t page_tokens = 0;    // of k and v; 0: not in pages
  bool quantized = false;     // k and v are int8 in pages; a row is its scale times its bytes
  Rows k_scale, v_scale;      // the scales, f32
  bool pages_gone = false;    // pages that no row sees may be missing
  Rows o, lse;                // written; lse.data may be null
  bool wide_outputs = false;  // o is in the type of the computation, as lse always is
  bool packed = false;        // sequences follow each other in one batch entry

  // True if the bits may not depend on how queries are split into calls, with or without a cache: all calls then take
  // one kernel.
  bool invariant = false;
  bool high_precision = false;  // enough for f32, though not the highest

  double scale = 1;
  double softcap = 0;  // 0: none
  bool causal = false;
  int64_t window_left = kUnlimited, window_right = kUnlimited;
  int64_t chunk = 0;  // 0: none

  Pairs bias, mask;                                          // data null: none
  bool has_pattern = false;                                  // some sequence has one
  std::vector<std::shared_ptr<const BlockSparseMask>> kept;  // owns the masks that sequences point to
  std::vector<std::shared_ptr<const TileRows>> tile_rows;
  std::vector<int32_t> segments_q;  // by token, [batch * Tq]; empty: none
  std::vector<int32_t> segments_k;
  int64_t segments_q_stride = 0, segments_k_stride = 0;  // per batch
  std::vector<double> slopes;                            // [batch * Hq] or [Hq]; empty: none
  int64_t slopes_stride = 0;                             // per batch
  RelativeBias relative_bias;
  std::vector<double> sinks;                // [Hq]; empty: none
  HeadNumbers device_slopes, device_sinks;  // for numbers that are on the device
  bool forgets = false;                     // there are log decays, per key and query head
  Rows log_decay;                           // in pages: rows of a key head's query heads
  DType log_decay_dtype = DType::kF32;
  DecayTables decays;

  double dropout = 0;
  uint64_t keep_below = 0;  // a pair is kept if its random word is below
  uint32_t key_low = 0, key_high = 0, dropout_offset = 0;

  int64_t group() const { return query_heads / key_heads; }
  // The number of biases that are added to a logit.
  int biases() const { return (bias.data != nullptr ? 1 : 0) + (relative_bias.present() ? 1 : 0); }
  bool gathers() const { return !tile_rows.empty(); }
  bool windowed() const { return window_left != kUnlimited || window_right != kUnlimited; }
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_PROBLEM_H_
