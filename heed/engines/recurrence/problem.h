// The input of the recurrence engine: views, sizes and scalars, all checked.
//
//   S_t = G_t .* S_{t-1} + k_t v_t^T       S: [K, V], one per value head
//   o_t = scale S_t^T q_t                  normalised: divided by z_t . q_t + eps
//   z_t = G_t .* z_{t-1} + k_t             z: [K]
//
// The decay G_t is exp of a log decay: absent, one per head, one per head and key channel, one per token, or one per
// token and key channel. With Feature::kRandomExp it follows from the running maximum to which the keys are relative. q
// and k are feature maps phi of the given tensors. Without causality S and z are sums over all tokens.
//
// With RWKV's u term (has_bonus) a query reads the state before its token, and its own key is weighted by u:
//
//   o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T q_t
//
// A delta rule subtracts what the state holds for a read key r_t before it writes. DeltaNet and its gated variants read
// after the decay; RWKV-7 reads before it and writes what it has read under another key b_t:
//
//   S~_t = G_t .* S_{t-1},  S_t = S~_t + k_t (w_t - S~_t^T r_t)^T
//   S_t = G_t .* S_{t-1} + k_t v_t^T + b_t (S_{t-1}^T a_t)^T
//
// A token may write several times (DeltaProduct): the state decays before its first write and is read after its last.
//
// The columns of S may decay too (has_value_decay): S_t = G_t .* S_{t-1} diag(b_t) + k_t v_t^T.
//
// Exponential gates (mLSTM) are relative to their running maximum m_t:
//
//   m_t = max(log sigmoid(f_t) + m_{t-1}, i_t),  G_t = exp(log sigmoid(f_t) + m_{t-1} - m_t)
//   exp(i_t - m_t) k_t replaces k_t,  o_t is divided by max(|z_t . q_t|, exp(-m_t)) + eps
//
// RWKV-4 (channels) is a weighted mean per channel, a head being one channel. It has no query; S and z are numerator
// and denominator, relative to a maximum p:
//
//   o_t = (exp(p) num + exp(u + k_t) v_t) / (exp(p) den + exp(u + k_t))
//   exp(p') num' = exp(p + w) num + exp(k_t) v_t,  exp(p') den' = exp(p + w) den + exp(k_t)
//
// An operation fills a Problem from its own inputs and options; the engine knows no operation.
#ifndef HEED_ENGINES_RECURRENCE_PROBLEM_H_
#define HEED_ENGINES_RECURRENCE_PROBLEM_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"

namespace heed::recurrence {

// The tokens of one recurrence in order of processing: `first`, first + 1, ... If the direction is reversed, token
// strides are negative and `first` counts from the end.
struct Sequence {
  int64_t batch = 0;  // index into tensors over tokens
  int64_t state = 0;  // index into initial and final states
  int64_t first = 0;
  int64_t count = 0;
};

// A tensor over tokens and heads, each row contiguous. Strides count elements.
struct Rows {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t write_stride = 0;  // between the rows of a token, of which there are Problem::writes
};

// S over (sequence, value head, K, V), or z over (sequence, value head, K).
struct States {
  const void* data = nullptr;
  int64_t sequence_stride = 0, head_stride = 0, key_stride = 0, value_stride = 0;
};

enum class Gate {
  kNone,
  kScalar,  // one factor for all of S
  kKey,     // one per row of S
};

// The delta rule, and its vectors in terms of the tensors.
enum class Delta {
  kNone,
  kAfterDecay,   // r = beta .* erase .* read_key, w = beta .* write .* v
  kBeforeDecay,  // a = read_key, b = write_key
};

// The feature map phi(x) of a query or a key.
enum class Feature {
  kIdentity,
  kElu1,             // x + 1 if x > 0, else exp(x)
  kRelu,             // max(x, 0)
  kReluSquared,      // max(x, 0)^2
  kExp,              // exp(min(x, 80))
  kSoftmax,          // over the channels
  kSoftmaxOfTokens,  // over the unmasked tokens; for keys of non-causal calls only
  kTaylor,           // [1, y, y_i^2 / sqrt(2), y_i y_j (i < j)] with y = x sqrt(scale)
  // Random features of y = x sqrt(scale) with the M rows w_j of `projection`. m_t is the largest w_j . y of a query, or
  // of all keys up to token t; in non-causal calls, of all keys.
  kRandomExp,   // (exp(w_j . y - |y|^2 / 2 - m_t) + feature_eps) / sqrt(M)
  kRandomRelu,  // max(w_j . y, 0) + 1e-3
};

// True if each channel is mapped by itself.
inline bool IsElementwise(Feature feature) {
  return feature == Feature::kIdentity || feature == Feature::kElu1 || feature == Feature::kRelu ||
         feature == Feature::kReluSquared || feature == Feature::kExp;
}

inline bool IsRandom(Feature feature) { return feature == Feature::kRandomExp || feature == Feature::kRandomRelu; }

// The number of channels of phi(x) for x of `size` channels. Random features have projection_rows instead.
inline int64_t FeatureSize(Feature feature, int64_t size) {
  return feature == Feature::kTaylor ? 1 + size + size * (size + 1) / 2 : size;
}

// Tokens per block and per tile. States are stored at block boundaries only, where a split of a sequence keeps the
// bits; a tile shares a table of decays.
inline constexpr int64_t kBlockTokens = 64;
inline constexpr int64_t kTileTokens = 4;

struct Problem {
  DType dtype = DType::kF32;  // of q, k, v and o
  Device device;              // of all tensors except constant decays
  int64_t key_heads = 0, value_heads = 0;
  int64_t key_size = 0, value_size = 0;  // channels of the tensors; S has features() rows
  std::vector<Sequence> sequences;
  std::vector<Sequence> others;  // tokens that belong to no sequence, whose o is 0; on devices only

  Rows q, k, v;
  Rows o;                                    // written; absent: only the states are computed, with the same bits
  Feature feature = Feature::kIdentity;      // of queries
  Feature key_feature = Feature::kIdentity;  // of keys; has as many channels
  Rows projection;                           // W of random features, with one "token" per row
  int64_t projection_rows = 0;
  double feature_eps = 0;
  Rows key_mask;     // bool per token, or absent: tokens with false are left out
  double scale = 1;  // factor of phi(q); with kTaylor and random features, of the product of q and k before phi
  bool causal = true;

  Gate gate = Gate::kNone;
  Rows log_decay;                // per value head; absent if running_max()
  bool constant_decay = false;   // log_decay has no axes of sequences and tokens: their strides are 0
  bool complement_keys = false;  // k = 1 - exp(log_decay) of each token; k is absent

  bool has_value_decay = false;  // requires a Gate; excludes normalize and has_bonus
  Rows log_value_decay;          // log b, per token, value head and value channel

  bool exp_gates = false;        // requires Gate::kScalar and normalize
  Rows input_gate, forget_gate;  // i and f, one element per token and value head

  bool has_bonus = false;  // requires Gate::kKey; excludes normalize
  Rows bonus;              // u, per value head

  bool channels = false;  // RWKV-4: k is in q, sizes are 1, w is log_decay, u is bonus

  Delta delta = Delta::kNone;  // allows only decays per token besides
  int64_t writes = 1;          // per token; k, v and beta have as many rows
  Rows read_key, write_key;    // per key head; an absent read key is k
  Rows beta;                   // one element per token and value head; absent: 1
  Rows erase, write;           // per token, value head and channel; absent: 1

  // Optional. With x_t the row of `v`, v_t is value_factors_t x_t, and the stored output is
  // (o_t + skip .* x_t) .* silu(output_gate_t).
  Rows value_factors;  // one element per token and value head
  Rows skip;           // per value head
  Rows output_gate;    // like o

  bool normalize = false;  // excludes Gate::kKey
  double eps = 0;          // added to the denominator

  States initial, initial_z;  // data null: zeros
  States final, final_z;      // written; data null: not wanted
  // The running maximum m, one number each. Without `initial_m`, RowReader::Begin() sets it.
  States initial_m, final_m;

  // The factor of phi(q), and the factors of q and k before phi.
  bool scales_inside() const { return feature == Feature::kTaylor || IsRandom(feature); }
  double outer_scale() const { return scales_inside() ? 1 : scale; }
  double key_scale() const { return scales_inside() ? std::sqrt(std::abs(scale)) : 1; }
  double query_scale() const { return scale < 0 ? -key_scale() : key_scale(); }

  // True if S and z are relative to a running maximum of keys or gates.
  bool running_max() const { return (feature == Feature::kRandomExp && causal) || exp_gates || channels; }
  // True if a factor of phi(q) cancels in the quotient.
  bool factors_cancel() const { return feature_eps == 0; }

  int64_t features() const { return IsRandom(feature) ? projection_rows : FeatureSize(feature, key_size); }
  int64_t group() const { return value_heads / key_heads; }

  // Tokens per block of a delta rule: a divisor of kBlockTokens with which a block has at most kBlockTokens writes.
  int64_t block_tokens() const {
    int64_t tokens = kBlockTokens;
    while (tokens > 1 && tokens * writes > kBlockTokens) tokens /= 2;
    return tokens;
  }
  int64_t block_writes() const { return block_tokens() * writes; }
};

// Inputs and outputs of the backward pass besides the Problem. States are in the compute type; outputs with null data
// are not wanted.
struct Gradients {
  Rows d_o;
  States d_final, d_final_z;      // data null: zeros
  Rows dq, dk, dv;                // written
  Rows d_log_decay;               // written; per head if log_decay is constant; with exp_gates, the gradient of f
  Rows d_input_gate;              // written
  Rows d_log_value_decay;         // written
  Rows d_bonus;                   // written
  States d_initial, d_initial_z;  // written
  Rows d_projection;              // written; maxima are treated as constants
  Rows d_read_key, d_write_key, d_beta, d_erase, d_write;  // written
};

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_PROBLEM_H_
