// The input of the recurrence engine: views, sizes and scalars, all checked.
//
//   S_t = G_t .* S_{t-1} + k_t v_t^T       S: [K, V], one per value head
//   o_t = scale S_t^T q_t                  or, normalised, / (z_t . q_t + eps)
//   z_t = G_t .* z_{t-1} + k_t             z: [K]
//
// with G_t from a log decay: none, one per head, one per head and key channel, one per
// token, or one per token and key channel; of Feature::kRandomExp, from the running
// maximum that its keys are relative to. In the bonus form a query sees the state before
// its token, and its own key weighted by u:
//
//   o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T q_t
//
// In a delta rule a token takes out what its read key finds before it writes, after the decay or
// (RWKV-7) from before it, under another key:
//
//   S~_t = G_t .* S_{t-1},  S_t = S~_t + k_t (w_t - S~_t^T r_t)^T
//   S_t = G_t .* S_{t-1} + k_t v_t^T + b_t (S_{t-1}^T a_t)^T
//
// and it may do so several times, decayed before the first and read after the last.
//
// Beside G_t there may be a gate of S's columns: S_t = G_t .* S_{t-1} diag(b_t) + k_t v_t^T.
// Gates that are exponentials (mLSTM) are taken relative to their running maximum:
//
//   m_t = max(log sigmoid(f_t) + m_{t-1}, i_t),  G_t = exp(log sigmoid(f_t) + m_{t-1} - m_t)
//   exp(i_t - m_t) k_t in the place of k_t,  o_t / (max(|z_t . q_t|, exp(-m_t)) + eps)
//
// In a mean per channel (RWKV-4) a head is a channel, there is no query, and S and z are its num
// and den, relative to a maximum p; weights are exponentials:
//
//   o_t = (exp(p) num + exp(u + k_t) v_t) / (exp(p) den + exp(u + k_t))
//   exp(p') num' = exp(p + w) num + exp(k_t) v_t,  exp(p') den' = exp(p + w) den + exp(k_t)
//
//  Without causality S and z are sums over all tokens. q and k stand for
// feature maps of what is given. An operation fills a Problem from its own inputs
// and options; the engine knows no operation.
#ifndef HEED_ENGINES_RECURRENCE_PROBLEM_H_
#define HEED_ENGINES_RECURRENCE_PROBLEM_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"

namespace heed::recurrence {

// The tokens of one recurrence, in the order in which they are taken: `first`,
// first + 1, ... In a call that runs backwards in time token strides are negative, and
// `first` counts from the other end with them.
struct Sequence {
  int64_t batch = 0;  // of the tensors over tokens
  int64_t state = 0;  // of the initial and final states
  int64_t first = 0;
  int64_t count = 0;
};

// A tensor over tokens and heads, each row contiguous. Strides count elements.
struct Rows {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t write_stride = 0;  // of a token's rows, where there are Problem::writes
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

enum class Delta {
  kNone,
  kAfterDecay,   // r = beta .* erase .* read_key, w = beta .* write .* v
  kBeforeDecay,  // a = read_key, b = write_key
};

// phi(x), of a query or a key.
enum class Feature {
  kIdentity,
  kElu1,             // x + 1 if x > 0, else exp(x)
  kRelu,             // max(x, 0)
  kReluSquared,      // max(x, 0)^2
  kExp,              // exp(min(x, 80))
  kSoftmax,          // over the channels
  kSoftmaxOfTokens,  // over the tokens that count, of keys alone and not causal
  kTaylor,           // of y = x sqrt(scale): [1, y, y_i^2 / sqrt(2), y_i y_j (i < j)]
  // Random features take y = x sqrt(scale) and the M rows w_j of `projection`. m_t is the largest w_j . y
  // of a query, or of all keys so far; not causal, of all keys:
  kRandomExp,   // (exp(w_j . y - |y|^2 / 2 - m_t) + feature_eps) / sqrt(M)
  kRandomRelu,  // max(w_j . y, 0) + 1e-3
};

// True if each channel is mapped by itself.
inline bool IsElementwise(Feature feature) {
  return feature == Feature::kIdentity || feature == Feature::kElu1 || feature == Feature::kRelu ||
         feature == Feature::kReluSquared || feature == Feature::kExp;
}

inline bool IsRandom(Feature feature) { return feature == Feature::kRandomExp || feature == Feature::kRandomRelu; }

// Channels of phi(x) for x of `size` channels, but of random features.
inline int64_t FeatureSize(Feature feature, int64_t size) {
  return feature == Feature::kTaylor ? 1 + size + size * (size + 1) / 2 : size;
}

// Tokens whose states are not kept between: the grid on which splits keep the bits, and
// inside it that of the tables of decays.
inline constexpr int64_t kBlockTokens = 64;
inline constexpr int64_t kTileTokens = 4;

struct Problem {
  DType dtype = DType::kF32;  // of q, k, v and o
  Device device;              // where tensors are, but for decays that are constant
  int64_t key_heads = 0, value_heads = 0;
  int64_t key_size = 0, value_size = 0;  // of the tensors; S has FeatureSize() rows
  std::vector<Sequence> sequences;
  std::vector<Sequence> others;  // tokens of none of them, of which o is 0: on devices alone

  Rows q, k, v;
  Rows o;                                    // written
  Feature feature = Feature::kIdentity;      // of queries
  Feature key_feature = Feature::kIdentity;  // of keys; of as many channels
  Rows projection;                           // of random features, a "token" per row
  int64_t projection_rows = 0;
  double feature_eps = 0;
  Rows key_mask;     // bool over tokens alone: those of false are left out; or absent
  double scale = 1;  // of phi(q), or in the map of kTaylor
  bool causal = true;

  Gate gate = Gate::kNone;
  Rows log_decay;                // over value heads; absent where running_max()
  bool constant_decay = false;   // it has no axes of sequences and tokens: strides of 0
  bool complement_keys = false;  // k = 1 - exp(log_decay) of each token, k is absent

  bool has_value_decay = false;  // beside a Gate; not normalised, no bonus
  Rows log_value_decay;          // of b, over tokens, value heads and value channels

  bool exp_gates = false;        // of Gate::kScalar, normalised
  Rows input_gate, forget_gate;  // i and f, over tokens and value heads, one element each

  bool has_bonus = false;  // of Gate::kKey, not normalised
  Rows bonus;              // u, over value heads alone

  bool channels = false;  // a mean per channel: q is k, sizes are 1, w is log_decay, u is bonus

  Delta delta = Delta::kNone;  // nothing else but decays over tokens
  int64_t writes = 1;          // of a token: k, v and beta have so many rows
  Rows read_key, write_key;    // over key heads; a read key that is absent is k
  Rows beta;                   // over tokens and value heads, one element each; absent: 1
  Rows erase, write;           // over tokens, value heads and channels; absent: 1

  // Each absent unless given: v_t is value_factors_t times what `v` holds, and what is
  // written as o is (o_t + skip .* `v`_t) .* silu(output_gate_t).
  Rows value_factors;  // over tokens and value heads, one element each
  Rows skip;           // over value heads alone
  Rows output_gate;    // like o

  bool normalize = false;  // not of Gate::kKey
  double eps = 0;          // added to the denominator

  States initial, initial_z;  // data null: zeros
  States final, final_z;      // written; data null: not asked for
  // One number each: m, where there is a running maximum; null: what Begin() of rows says.
  States initial_m, final_m;

  // The factors of phi(q), and of q and k before phi.
  bool scales_inside() const { return feature == Feature::kTaylor || IsRandom(feature); }
  double outer_scale() const { return scales_inside() ? 1 : scale; }
  double key_scale() const { return scales_inside() ? std::sqrt(std::abs(scale)) : 1; }
  double query_scale() const { return scale < 0 ? -key_scale() : key_scale(); }

  // S and z are relative to a maximum, of keys or of gates.
  bool running_max() const { return (feature == Feature::kRandomExp && causal) || exp_gates || channels; }
  // phi of a query may have any factor: it cancels in the quotient.
  bool factors_cancel() const { return feature_eps == 0; }

  int64_t features() const { return IsRandom(feature) ? projection_rows : FeatureSize(feature, key_size); }
  int64_t group() const { return value_heads / key_heads; }

  // Tokens of a block of a delta rule, which divide kBlockTokens, for it to have no more writes.
  int64_t block_tokens() const {
    int64_t tokens = kBlockTokens;
    while (tokens > 1 && tokens * writes > kBlockTokens) tokens /= 2;
    return tokens;
  }
  int64_t block_writes() const { return block_tokens() * writes; }
};

// The further inputs and outputs of the backward pass. States are in the compute
// type; outputs whose data is null are not asked for.
struct Gradients {
  Rows d_o;
  States d_final, d_final_z;      // data null: zeros
  Rows dq, dk, dv;                // written
  Rows d_log_decay;               // written; like log_decay over heads alone where constant; or of f
  Rows d_input_gate;              // written
  Rows d_log_value_decay;         // written
  Rows d_bonus;                   // written
  States d_initial, d_initial_z;  // written
  Rows d_projection;              // written; maxima count as constants
  Rows d_read_key, d_write_key, d_beta, d_erase, d_write;  // written
};

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_PROBLEM_H_
