// What the forward kernel of GPUs is given: a problem in numbers that fit a launch.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"

namespace heed::recurrence::cuda {

// Elements of q, k, v, o and so on between tokens and heads.
struct DeviceRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0, head_stride = 0;
};

// S over (head, K, V), f32.
struct DeviceStates {
  float* data = nullptr;  // or none: zeros, or not asked for
  int64_t head_stride = 0, key_stride = 0, value_stride = 0;
};

// A Sequence, and where what is its own begins, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, log_decay, beta, read_key, initial, final;
  int64_t tokens;
  int64_t borders;  // states at the ends of its segments but the last
  bool is_zero;     // of no recurrence: its o is 0
};

// Launches of more sequences are several: they travel with the other arguments, of which a launch takes 32 KiB.
inline constexpr int kMostSequences = 64;
inline constexpr int kMostDecays = 1024;  // constants of heads

enum class DecayKind : int32_t { kNone, kConstant, kToken, kKey };
enum class Map : int32_t { kIdentity, kElu1, kRelu, kReluSquared, kExp };  // phi

struct ChunkParams {
  DeviceRows q, k, v, o, log_decay, beta, read_key;  // read_key: the keys, unless it is theirs
  DeviceStates initial, final;
  float* borders = nullptr;  // [...][head][V][K], of segments; null: there is one
  int64_t segment_tokens;    // a multiple of a tile's
  int32_t parts;             // strips of columns
  bool to_borders;           // states at the ends of segments are computed, and nothing else
  bool aligned;              // rows of q, k, v, o and read keys begin at multiples of 16 bytes
  bool decays_aligned;       // those of log decays of channels do
  bool complement_keys;      // k = 1 - exp(log_decay), k is absent
  int32_t group, heads, key_size, value_size;
  float scale;
  DecayKind decay;
  Map query_map, key_map;
  float log_decays[kMostDecays] = {};
  DeviceSequence sequences[kMostSequences] = {};
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
