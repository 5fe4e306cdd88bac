// The input of the scan engine: views, sizes and scalars, all checked.
//
//   h_t = a_t .* h_{t-1} + b_t      h: [channels, states]
//
// with a_t and b_t made on the fly from the tensors of a token, by one of three rules. The
// selective one has N states per channel, which share what they read and write by:
//
//   s_t = softplus(delta_t + bias), or delta_t + bias                             per channel
//   a_t = exp(s_t A),  b_t = s_t x_t B_t,  y_t = sum_n C_t h_t + D x_t,  o_t = y_t silu(z_t)
//
// The others have one, which is the output: a_t = exp(log_decay_t), b_t = x_t; and
//
//   log a_t = -c sigmoid(r_t) softplus(lambda),  b_t = sqrt(1 - a_t^2) sigmoid(i_t) x_t
//
// whose root is 1 at the first token of a sequence that has no initial state. The sum over what is
// written, decayed by any law that the distance of tokens alone decides, has no state:
//
//   o_t = sum_{s < num_taps} taps_s x_{t-s} + D x_t
//
// and where that law is a sum of damped oscillations, modes of a state space whose input and reading
// weights do not change, there is a state again, of a complex number per mode:
//
//   h_t = a h_{t-1} + b x_t,  o_t = 2 Re(<c, h_t>) + D x_t
//
// with a and b from a step size and rates. Heads of d channels put products through them, of all pairs of
// a key's channel i, convolved with a few taps, and a value's channel j; queries read them:
//
//   k'_t = sum_s taps_s k_{t-s} + D' k_t,  y_t[i, j] = the above of x_t = k'_t[i] v_t[j]
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

// The tokens of one sequence, in the order in which they are taken: `first`, first + 1, ... In a
// call that runs backwards in time token strides are negative, and `first` counts from the
// other end with them.
struct Sequence {
  int64_t batch = 0;  // of the tensors over tokens
  int64_t state = 0;  // of the initial and final states
  int64_t first = 0;
  int64_t count = 0;
};

// A tensor over tokens and columns, which are channels, or the states of a group. Strides count
// elements; null data: absent.
struct Tokens {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch = 0, token = 0, column = 0;
  int64_t group = 0;
};

// One over channels and states, and of states also over sequences; of complex ones over their
// real and imaginary parts; of heads over pairs of their channels.
struct Numbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t sequence = 0, channel = 0, state = 0, part = 0;
  int64_t key = 0, value = 0;
};

enum class Rule { kSelective, kDecay, kGates, kTaps, kModes, kHeads };

// The method for state spaces of kModes and kHeads.
enum class Method { kAuto, kRecurrent, kConvolution };

// The vectors by which a token reads or writes states: one per group, or constants of each channel.
struct Weights {
  Tokens tokens;      // columns are states
  Numbers constants;  // present: these instead
};

struct Problem {
  DType dtype = DType::kF32;  // of x and o
  Device device;              // where tensors are
  Rule rule = Rule::kSelective;
  int64_t channels = 0, states = 1;  // of kHeads: heads
  int64_t groups = 1;                // of channels, consecutive and of one size
  std::vector<Sequence> sequences;
  std::vector<Sequence> others;  // tokens of none of them, whose outputs and gradients are 0: on devices alone

  Tokens x, o;  // o is written

  Numbers skip;  // D, of kSelective, kTaps, kModes and kHeads; absent: left out

  Weights B, C;  // of kSelective; C also of kModes and kHeads

  // kSelective has these. Absent bias and gate (z) are left out.
  Tokens delta, gate;
  Numbers A, bias;
  bool softplus = false;

  Tokens log_decay;  // of kDecay; what is positive counts as 0

  // kGates has these.
  Tokens input_gate, recurrence_gate;
  Numbers lambda;
  double c = 0;

  // kTaps has these: a state's place is that of a tap.
  Numbers taps;
  int64_t num_taps = 0;

  // kModes, whose number is that of states, has the step exp(log_dt) per channel, rates
  // -exp(log_A_real) + i A_imag, and C's constants.
  Numbers log_dt, log_A_real, A_imag;
  bool bilinear = false;  // else zero-order hold
  bool has_taps = false;  // made of them, num_taps, are convolved with: there are no states

  // kHeads, whose queries are x, has tensors over tokens, channels of a head and heads, which are groups.
  // At least one tap per channel of any head. Tails are the tokens that taps look back to from the first,
  // and from the first after the last.
  Tokens key, value, initial_tail, final_tail;
  int64_t head_channels = 0;
  Numbers key_taps, key_skip;  // k's, and D'
  int64_t num_key_taps = 0;

  Numbers initial, final;  // data null: zeros; not asked for
};

// The further inputs and outputs of the backward pass, by the names of what they are the
// gradients of. Outputs whose data is null are not asked for.
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

// Tokens whose states are not kept between: the backward pass computes them again.
inline constexpr int64_t kTileTokens = 16;
// Tokens of a sum in the compute type, and between two turns.
inline constexpr int64_t kChunkTokens = 128;

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_PROBLEM_H_
