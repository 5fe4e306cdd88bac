// What the forward kernel of GPUs is given: a problem in numbers that fit a launch.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
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

// A Sequence, and where its rows begin, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, lse, bias, mask, slopes;
  uint32_t first_head;  // of all sequences' heads, one after the other
  int64_t start, key_begin, key_end, num_keys, query_end, prefix_end, sink_end;
  int32_t num_queries;
};

// Launches of more sequences are several: they travel with the other arguments, of which a launch takes 32 KiB.
inline constexpr int kMostSequences = 32;
inline constexpr int kMostNumbers = 1024;  // slopes, and learned sinks

struct ForwardParams {
  const void *q, *k, *v;
  void* o;
  float* lse;  // or null
  Strides q_strides, k_strides, v_strides, o_strides, lse_strides;
  int64_t window_left, window_right, chunk;
  bool causal;
  bool fused = false;  // the query heads of a key head are rows of the same blocks
  bool aligned;        // rows of q, k and v begin at multiples of 16 bytes
  int32_t group, depth, value_depth;
  float scale, softcap;  // 0: none
  DevicePairs bias, mask;
  bool has_slopes, has_sinks;
  float slopes[kMostNumbers] = {}, sinks[kMostNumbers] = {};  // by a sequence's, and by query head
  float dropout;                                              // 0: none
  uint64_t keep_below;                                        // a random word below keeps its pair
  uint32_t key_low, key_high, dropout_offset;
  DeviceSequence sequences[kMostSequences] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_PARAMS_H_
