// The input of the scan engine: views, sizes and scalars, all checked.
//
//   h_t = a_t .* h_{t-1} + b_t      h: [channels, states]
//
// a_t and b_t are computed from the tensors of token t. Selective scans (Mamba) have N states per channel; the channels
// of a group share B and C:
//
//   s_t = softplus(delta_t + bias), or delta_t + bias
//   a_t = exp(s_t A),  b_t = s_t x_t B_t,  y_t = sum_n C_t h_t + D x_t,  o_t = y_t silu(z_t)
//
// HGRN and RG-LRU have one state per channel, which is the output: a_t = exp(log_decay_t), b_t = x_t, and
//
//   log a_t = -c sigmoid(r_t) softplus(lambda),  b_t = sqrt(1 - a_t^2) sigmoid(i_t) x_t
//
// where the root is 1 at the first token of a sequence without an initial state. A causal convolution has no state:
//
//   o_t = sum_{s < num_taps} taps_s x_{t-s} + D x_t
//
// S4D, whose convolution kernel is a sum of damped oscillations, has a complex state per mode; a and b follow from a
// step size and rates (discretisation-inl.h):
//
//   h_t = a h_{t-1} + b x_t,  o_t = 2 Re(<c, h_t>) + D x_t
//
// A head of H3 has d key channels i, which are first convolved with a few taps, and d value channels j. The product of
// each pair passes through S4D, and queries read the results:
//
//   k'_t = sum_s taps_s k_{t-s} + D' k_t,  y_t[i, j] = S4D of x_t = k'_t[i] v_t[j]
//   o_t[j] = sum_i q_t[i] y_t[i, j]
//
// An operation fills a Problem from its own inputs and options; the engine knows no operation.
#ifndef HEED_ENGINES_SCAN_PROBLEM_H_
#define HEED_ENGINES_SCAN_PROBLEM_H_

#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"

namespace heed::scan {

// The tokens of one sequence in order of processing: `first`, first + 1, ... If the direction is reversed, token
// strides are negative and `first` counts from the end.
struct Sequence {
  int64_t batch = 0;  // index into tensors over tokens
  int64_t state = 0;  // index into initial and final states
  int64_t first = 0;
  int64_t count = 0;
};

// A tensor over tokens and columns, which are channels or the states of a group. Strides count elements. Null data:
// absent.
struct Tokens {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch = 0, token = 0, column = 0;
  int64_t group = 0;
};

// A tensor over channels and states: constants, or the states of sequences. Complex numbers have real and imaginary
// `part`s; the states of heads are over pairs of a key channel and a value channel.
struct Numbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t sequence = 0, channel = 0, state = 0, part = 0;
  int64_t key = 0, value = 0;
};

enum class Rule { kSelective, kDecay, kGates, kTaps, kModes, kHeads };

// The method for the state spaces of kModes and kHeads.
enum class Method { kAuto, kRecurrent, kConvolution };

// B or C: per token and group, or constants per channel.
struct Weights {
  Tokens tokens;      // columns are states
  Numbers constants;  // if present, used instead
};

struct Problem {
  DType dtype = DType::kF32;  // of x and o
  Device device;              // of all tensors
  Rule rule = Rule::kSelective;
  int64_t channels = 0, states = 1;  // with kHeads, `channels` are heads
  int64_t groups = 1;                // of consecutive channels, all of one size
  std::vector<Sequence> sequences;
  std::vector<Sequence> others;  // tokens of no sequence, whose outputs and gradients are 0; on devices only

  Tokens x, o;  // o is written; absent: only the states are computed, with the same bits

  Numbers skip;  // D of kSelective, kTaps, kModes and kHeads; optional

  Weights B, C;  // for kSelective; C also for kModes and kHeads

  // For kSelective. The bias and the gate z are optional.
  Tokens delta, gate;
  Numbers A, bias;
  bool softplus = false;

  Tokens log_decay;  // for kDecay; positive elements are treated as 0

  // For kGates.
  Tokens input_gate, recurrence_gate;
  Numbers lambda;
  double c = 0;

  // For kTaps. The state index is that of the tap.
  Numbers taps;
  int64_t num_taps = 0;

  // For kModes, with `states` modes per channel: the step exp(log_dt) per channel, the rates -exp(log_A_real) + i
  // A_imag, and the constants of C.
  Numbers log_dt, log_A_real, A_imag;
  bool bilinear = false;  // otherwise zero-order hold
  bool has_taps = false;  // the modes are converted to num_taps taps of a convolution, which has no states

  // For kHeads, whose queries are x. Tensors are over tokens, channels of a head, and heads, which are groups. There is
  // at least one tap. Tails are the num_key_taps - 1 keys before the first token, and before the token after the last.
  Tokens key, value, initial_tail, final_tail;
  int64_t head_channels = 0;
  Numbers key_taps, key_skip;  // the taps of keys, and D'
  int64_t num_key_taps = 0;

  Numbers initial, final;  // data null: zeros; not wanted
};

// Inputs and outputs of the backward pass besides the Problem: gradients, named after their tensors. Outputs with null
// data are not wanted.
struct Gradients {
  Tokens d_o;
  Numbers d_final;  // data null: zeros

  Tokens dx, ddelta, dgate, dlog_decay, dinput_gate, drecurrence_gate;
  Numbers dA, dbias, dskip, dlambda, dtaps;
  Numbers dlog_dt, dlog_A_real, dA_imag;
  Weights dB, dC;
  Tokens dkey, dvalue, d_final_tail, dinitial_tail;
  Numbers dkey_taps, dkey_skip;
  Numbers dinitial;
};

// Tokens per tile. States are stored between tiles only; the backward pass recomputes the others.
inline constexpr int64_t kTileTokens = 16;
// Tokens that are summed in the compute type, before sums are added in f64 or over tasks.
inline constexpr int64_t kChunkTokens = 128;

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_PROBLEM_H_
