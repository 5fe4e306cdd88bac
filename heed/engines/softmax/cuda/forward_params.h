// Parameters of the forward kernels: a problem in a struct that fits a launch.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

// Strides in elements.
struct Strides {
  int64_t token, head;
};

// A tensor over (head, query, key).
struct DevicePairs {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t head_stride = 0, query_stride = 0, key_stride = 0;
};

// One number per query head, of any float dtype, or absent.
struct DeviceNumbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t head_stride = 0;
};

// A listed tile: 64 keys of which 64 rows keep some. `words` is the index of its mask words, one per row, or kAll.
struct ListedTile {
  static constexpr int32_t kAll = -1;
  int32_t tile, words;
};

// A Sequence with the offsets of its rows, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, lse, bias, mask, slopes;
  uint32_t first_head;  // index of its first head among those of all sequences
  int64_t start, key_begin, key_end, num_keys, query_end, prefix_end, sink_end;
  int64_t splits;     // index of its first split
  int64_t pages;      // index of its first page
  int64_t tile_list;  // index of its first tile list; -1: no block mask
  int64_t list_head_stride;
  int32_t num_queries;
  int32_t k_batch, v_batch;  // for TMA: batch entry, and first key in it
  int64_t first_key;
};

// Keys of a segment, counted from the first valid key. Each segment has a softmax state of its own, whichever block
// computes it. CPU kernels have segments of the same size.
inline constexpr int64_t kSegmentKeys = 512;
constexpr int64_t SegmentsOf(const DeviceSequence& s) {
  return s.key_begin < s.key_end ? (s.key_end - s.key_begin - 1) / kSegmentKeys + 1 : 0;
}

// A row's softmax state besides its outputs: the maximum of the logits and the sum of exponentials.
struct alignas(8) SoftmaxState {
  float max, sum;
};

// A call with more sequences has several launches: they are launch parameters, which are limited to 32 KiB.
inline constexpr int kMostSequences = 32;

struct ForwardParams {
  DType dtype;  // f32, bf16 or f16
  const void *q, *k, *v;
  void* o;
  float* lse;  // null: not wanted
  Strides q_strides, k_strides, v_strides, o_strides, lse_strides;
  int64_t window_left, window_right, chunk;
  // Keys and values in pages of `page_tokens` tokens, with the pages' addresses and the byte offsets of keys and values
  // in a page. 0: not paged.
  int32_t page_tokens = 0;
  const std::byte* const* pages = nullptr;
  int64_t k_in_page = 0, v_in_page = 0;
  bool uses_tma = false;  // whether TMA loads keys and values by these tensor maps
  heed::cuda::TensorMap k_tensor_map = {}, v_tensor_map = {};
  // Block masks of patterns and segments: the begin of the tile list of each block of 64 rows, the listed tiles, and
  // mask words. Null: no block mask.
  const int32_t* list_begins = nullptr;
  const ListedTile* list_tiles = nullptr;
  const uint64_t* mask_words = nullptr;
  bool causal;
  bool fused = false;  // blocks hold rows of all query heads of a key head
  bool aligned;        // rows of q, k and v begin at multiples of 16 bytes
  int32_t group, depth, value_depth;
  float scale, softcap;  // 0: none
  DevicePairs bias, mask;
  DeviceNumbers slopes, sinks;  // slopes are offset by the sequence's
  float dropout;                // 0: none
  uint64_t keep_below;          // a pair is kept if its random word is below
  uint32_t key_low, key_high, dropout_offset;
  // Split-KV: outputs that are not normalised yet, [split_channels] each, and softmax states, of [sequence][query
  // head][query][segment]. Null: each block sweeps all segments.
  float* split_outputs = nullptr;
  SoftmaxState* split_states = nullptr;
  int32_t split_channels = 0;  // a multiple of 8
  int32_t row_blocks = 1;      // row blocks per segment
  DeviceSequence sequences[kMostSequences] = {};
};

// True if logits are more than scale > 0 times a product with intervals of keys as masks, or if there is dropout.
constexpr bool IsGeneral(const ForwardParams& p) {
  const bool has_tensors =
      p.slopes.data != nullptr || p.bias.data != nullptr || p.mask.data != nullptr || p.list_begins != nullptr;
  return !(p.scale > 0) || p.softcap > 0 || has_tensors || p.dropout > 0;
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
