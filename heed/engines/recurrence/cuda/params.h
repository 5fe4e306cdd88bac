// Parameters of the recurrence kernels: a problem in structs that fit a launch.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::recurrence::cuda {

// A tensor over tokens and heads, with strides in elements. `group` value heads share one of its heads.
struct DeviceRows {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t token_stride = 0, head_stride = 0;
  int32_t group = 1;
  int64_t write_stride = 0;  // 0 if all writes of a token share its row
};

// Offset of the row of write t. Kernels count writes, `writes` per token.
HEED_DEVICE int64_t OfToken(const DeviceRows& rows, int64_t t, int32_t writes) {
  if (writes == 1) return t * rows.token_stride;
  const auto write = static_cast<uint32_t>(t), of_each = static_cast<uint32_t>(writes);
  return write / of_each * rows.token_stride + write % of_each * rows.write_stride;
}

// S over (head, K, V), in f32.
struct DeviceStates {
  float* data = nullptr;  // null: zeros, or not wanted
  int64_t head_stride = 0, key_stride = 0, value_stride = 0;
};

// A Sequence with the offsets of its data, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, log_decay, value_decay, beta, read_key, output_gate, initial, final, initial_z, final_z;
  int64_t tokens;          // writes, if tokens have several
  int64_t segment_states;  // offset of the states at the ends of its segments except the last
  int64_t first_block;     // index among the blocks of 64 tokens of all sequences
  int32_t shift;           // tokens missing in its first tile, so that tiles end at block boundaries
};

// A call with more sequences has several launches: they are launch parameters, which are limited to 32 KiB.
inline constexpr int kMostSequences = 64;
inline constexpr int kMostDecays = 1024;  // decays that are constants per head
inline constexpr int kBlock = 64;         // tokens between stored states, from which gradients of decays start

enum class DecayKind : int32_t { kNone, kConstant, kToken, kKey };
enum class Map : int32_t {
  kIdentity,
  kElu1,
  kRelu,
  kReluSquared,
  kExp,         // phi
  kComplement,  // 1 - exp(x), of log decays
};
enum class DeltaKind : int32_t {
  kNone,
  kRule,
  kNotFound,   // outputs, f32, are the values minus what read keys retrieve
  kGradients,  // reversed, over D; outputs, f32, are gradients of what tokens write
};
enum class Start : int32_t {
  kSegments,     // the state at the end of the previous segment
  kBlockStates,  // reversed: the state at the end of the previous block, in start_states
  kZeros,
};

// One sweep over tokens. Gradients are sweeps with other tensors for q, k and v.
struct ChunkParams {
  // Without a delta rule, beta is a factor of values, or, if tokens read before the decay, the u term's weight of their
  // own values. Absent read keys are the keys.
  DeviceRows q, k, v, o, log_decay, value_decay, beta, read_key;
  DeviceRows skip, output_gate;  // o is (o + skip .* v) .* silu(output_gate); skip is per head
  DeviceStates initial, final, initial_z, final_z;
  float* segment_states = nullptr;      // [...][head][V][K]: states of segments; null: one segment
  const float* start_states = nullptr;  // [block][head][K][V], some rows of keys; all of them are start_size elements
  int64_t start_size = 0;
  int64_t segment_tokens;    // a multiple of kBlock
  int32_t column_blocks;     // blocks of columns
  bool states_only;          // only the states at the ends of segments are computed
  bool aligned;              // rows of q, k, v, o and read keys begin at multiples of 16 bytes
  bool decays_aligned;       // rows of log decays do too
  bool complement_keys;      // k = 1 - exp(log_decay) of the token; k itself is absent
  bool reversed;             // the sweep goes from the last token to the first
  bool decays_after_update;  // the token's decay comes after its update and read
  bool strict;               // a token reads the state before its own update
  int32_t writes;  // per token; each counts as a token, with the decay before the first and the read after the last
  bool reads_once, writes_once;  // outputs, or values, are per token, at its last write
  bool reads_only;               // no updates
  // A token's query reads the state before the token's decay, with a delta rule its read key does. Excludes
  // decays_after_update; decays are per channel or column.
  bool reads_before_decay;
  int32_t heads, key_size, value_size;
  float scale, write_scale;  // of outputs; of updates
  bool normalizes;           // the last column's values are 1, and its state is z
  bool adds;                 // adds to f32 outputs and products, those of key channels before
  Start start;               // of every segment except the first
  DeltaKind delta;
  DecayKind decay;
  Map query_map, key_map, value_map;
  // [block][head][V][K]: the state after each block of tokens is stored here; or is read from here, multiplied with the
  // sweep's state and summed over K into products, [block][head][V], from which gradients of decays start.
  float* block_states = nullptr;
  float* products = nullptr;  // null: block_states are stored
  float log_decays[kMostDecays] = {};
  DeviceSequence sequences[kMostSequences] = {};
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
