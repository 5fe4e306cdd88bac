// What the forward kernel of GPUs is given: a problem in numbers that fit a launch.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

// Elements between tokens and heads.
struct Strides {
  int64_t token, head;
};

// A tensor over (head, query, key).
struct DevicePairs {
  const void* data = nullptr;  // or none
  DType dtype = DType::kF32;
  int64_t head_stride = 0, query_stride = 0, key_stride = 0;
};

// A number per query head, of any float dtype, or none.
struct DeviceNumbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t head_stride = 0;
};

// A tile of 64 keys of which some of 64 rows keep something: which words, one per row, or all.
struct ListedTile {
  static constexpr int32_t kAll = -1;
  int32_t tile, words;
};

// A Sequence, and where its rows begin, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, lse, bias, mask, slopes;
  uint32_t first_head;  // of all sequences' heads, one after the other
  int64_t start, key_begin, key_end, num_keys, query_end, prefix_end, sink_end;
  int64_t splits;     // index of the first one
  int64_t pages;      // likewise
  int64_t tile_list;  // likewise, of lists; -1: everything is kept
  int64_t list_head_stride;
  int32_t num_queries;
  int32_t k_batch, v_batch;  // for bulk copies: the entry of a batch, and the first key of it
  int64_t first_key;
};

// Keys whose sums a row begins anew, counted from the first valid key, and adds to those of the keys before: whichever
// block takes them. As many as kernels of CPUs take.
inline constexpr int64_t kSegmentKeys = 512;
constexpr int64_t SegmentsOf(const DeviceSequence& s) {
  return s.key_begin < s.key_end ? (s.key_end - s.key_begin - 1) / kSegmentKeys + 1 : 0;
}

// What a row has of a segment besides its outputs: the largest logit and the sum of weights.
struct alignas(8) SoftmaxState {
  float max, sum;
};

// Launches of more sequences are several: they travel with the other arguments, of which a launch takes 32 KiB.
inline constexpr int kMostSequences = 32;

struct ForwardParams {
  DType dtype;  // f32, bf16 or f16
  const void *q, *k, *v;
  void* o;
  float* lse;  // or null
  Strides q_strides, k_strides, v_strides, o_strides, lse_strides;
  int64_t window_left, window_right, chunk;
  // Keys and values may be in pages of so many tokens: where these begin, and how many bytes from there. 0: they are
  // not.
  int32_t page_tokens = 0;
  const std::byte* const* pages = nullptr;
  int64_t k_in_page = 0, v_in_page = 0;
  bool uses_tma = false;  // bulk copies take keys and values by these
  heed::cuda::TensorMap k_tensor_map = {}, v_tensor_map = {};
  // What rows keep of a pattern and of segments: where the lists of blocks of 64 rows begin, those, and words. Null:
  // everything.
  const int32_t* list_begins = nullptr;
  const ListedTile* list_tiles = nullptr;
  const uint64_t* mask_words = nullptr;
  bool causal;
  bool fused = false;  // the query heads of a key head are rows of the same blocks
  bool aligned;        // rows of q, k and v begin at multiples of 16 bytes
  int32_t group, depth, value_depth;
  float scale, softcap;  // 0: none
  DevicePairs bias, mask;
  DeviceNumbers slopes, sinks;  // slopes from a sequence's on
  float dropout;                // 0: none
  uint64_t keep_below;          // a random word below keeps its pair
  uint32_t key_low, key_high, dropout_offset;
  // Where rows leave what they have of each segment, by sequence, query head, query and segment: outputs that are not
  // divided yet, [part_channels] each, and terms. Null: blocks sweep over all segments.
  float* split_outputs = nullptr;
  SoftmaxState* split_states = nullptr;
  int32_t split_channels = 0;  // a multiple of 8
  int32_t row_blocks = 1;      // of a segment, one behind the other
  DeviceSequence sequences[kMostSequences] = {};
};

// Whether there is more to logits than a scale times a product and intervals of keys, or weights are dropped.
constexpr bool IsGeneral(const ForwardParams& p) {
  const bool has_tensors =
      p.slopes.data != nullptr || p.bias.data != nullptr || p.mask.data != nullptr || p.list_begins != nullptr;
  return !(p.scale > 0) || p.softcap > 0 || has_tensors || p.dropout > 0;
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
