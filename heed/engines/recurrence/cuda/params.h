// What the kernels of GPUs are given: a problem in numbers that fit a launch.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::recurrence::cuda {

// Elements of q, k, v, o and so on between tokens and heads. So many heads of values share one of theirs.
struct DeviceRows {
  const void* data = nullptr;  // or none
  DType dtype = DType::kF32;
  int64_t token_stride = 0, head_stride = 0;
  int32_t group = 1;
  int64_t write_stride = 0;  // 0 where all writes of a token have its row
};

// Where the row of write t is: kernels count writes, so many to a token.
HEED_DEVICE int64_t OfToken(const DeviceRows& rows, int64_t t, int32_t writes) {
  if (writes == 1) return t * rows.token_stride;
  const auto write = static_cast<uint32_t>(t), of_each = static_cast<uint32_t>(writes);
  return write / of_each * rows.token_stride + write % of_each * rows.write_stride;
}

// S over (head, K, V), f32.
struct DeviceStates {
  float* data = nullptr;  // or none: zeros, or not asked for
  int64_t head_stride = 0, key_stride = 0, value_stride = 0;
};

// A Sequence, and where what is its own begins, in elements.
struct DeviceSequence {
  int64_t q, k, v, o, log_decay, value_decay, beta, read_key, output_gate, initial, final, initial_z, final_z;
  int64_t tokens;          // or writes of them, where there are several
  int64_t segment_states;  // states at the ends of its segments but the last
  int64_t first_block;     // of 64 tokens, of all sequences'
  int32_t shift;           // tokens that its first tile lacks, so that it ends where blocks begin
};

// Launches of more sequences are several: they travel with the other arguments, of which a launch takes 32 KiB.
inline constexpr int kMostSequences = 64;
inline constexpr int kMostDecays = 1024;  // constants of heads
inline constexpr int kBlock = 64;         // tokens between the states that gradients of decays begin with

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
  kNotFound,   // whose outputs, of f32, are what read keys do not find
  kGradients,  // against time, over D; outputs, of f32, are gradients of what tokens write
};
enum class Start : int32_t {
  kSegments,     // where the segment before ends
  kBlockStates,  // against time: where the block of tokens before ended, by `starts`
  kZeros,
};

// One sweep over the tokens: of the forward pass, or of gradients, which are the same with other tensors for q, k and
// v.
struct ChunkParams {
  // Without a delta rule, beta is a factor of what is written, or, where a token reads early, what its own key means to
  // it. No read keys: they are the keys.
  DeviceRows q, k, v, o, log_decay, value_decay, beta, read_key;
  DeviceRows skip, output_gate;  // o is (o + skip .* v) .* silu(output_gate); skip: over heads alone
  DeviceStates initial, final, initial_z, final_z;
  float* segment_states = nullptr;      // [...][head][V][K], of segments; null: there is one
  const float* start_states = nullptr;  // [block][head][K][V] of some rows of keys; all of them are start_size elements
  int64_t start_size = 0;
  int64_t segment_tokens;    // a multiple of kBlock
  int32_t column_blocks;     // strips of columns
  bool states_only;          // states at the ends of segments are computed, and nothing else
  bool aligned;              // rows of q, k, v, o and read keys begin at multiples of 16 bytes
  bool decays_aligned;       // those of log decays do
  bool complement_keys;      // k = 1 - exp(log_decay), of the token's own, and absent
  bool reversed;             // time, in which tensors are swept
  bool decays_after_update;  // a token decays the state after it has been written to and read, not before
  bool strict;               // a token reads the state before it has written
  int32_t writes;  // of a token, each of which counts as one: it decays before the first and reads after the last
  bool reads_once, writes_once;  // outputs, or values, are rows of tokens, at their last write
  bool reads_only;               // nothing is written
  // A token reads before it has decayed the state, by its query, or by its read key where there is a delta rule. Not
  // late; decays are of channels or columns.
  bool reads_before_decay;
  int32_t heads, key_size, value_size;
  float scale, write_scale;  // of outputs; of what is written
  bool normalizes;           // the last column's values are 1, its state is z
  bool adds;                 // to outputs of f32, and to products: the channels of keys before these
  Start start;               // of all segments but the first
  DeltaKind delta;
  DecayKind decay;
  Map query_map, key_map, value_map;
  // [block][head][V][K]: the state after each block of tokens is written to, or read from these to be multiplied with,
  // and summed over K into [block][head][V]: what a gradient of decays begins with.
  float* block_states = nullptr;
  float* products = nullptr;  // null: kept is written
  float log_decays[kMostDecays] = {};
  DeviceSequence sequences[kMostSequences] = {};
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_PARAMS_H_
