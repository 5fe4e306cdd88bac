// The computations of mamba3 beside its recurrence: mamba3_kernels.cc.
//
// A unit is one value head of one sequence. Units are computed in groups, and a group in blocks of tokens, so that what
// passes between these computations and the engine stays in cache. For the engine a unit is a sequence whose tokens are
// the R writes of each token, one after the other; weights are those with which later tokens read a write,
//
//   w_t = gamma_t + beta_{t+1},   gamma_t = lambda_t delta_t,   beta_t = (1 - lambda_t) delta_t
//
// and what the reads of the token itself should have got instead is added to its output:
//
//   o_tr += scale sum_r' c_rr' (q_tr . k_tr') v_tr',   c_rr' = -beta_{t+1} if r' <= r, else gamma_t
#ifndef HEED_OPS_SSM_MAMBA3_MAMBA3_KERNELS_INTERNAL_H_
#define HEED_OPS_SSM_MAMBA3_MAMBA3_KERNELS_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/table_internal.h"
#include "heed/ops/ssm/mamba3/mamba3.h"

namespace heed::mamba3 {

inline constexpr int64_t kBlock = 128;  // tokens, a multiple of those of the engine's blocks

struct Unit {
  int64_t sequence, batch, head;
  int64_t first, count;  // of tokens in order of processing
  int64_t blocks() const { return (count + kBlock - 1) / kBlock; }
};

// A token before which the gradients of dt and trap are not complete, and sums over the tokens after it.
struct Pending {
  bool is_set = false;
  int64_t token = 0;
  double delta = 0, lambda = 0, rest = 0;  // rest = 1 - lambda
  double d_gamma = 0, d_delta = 0;         // what the angle adds to the gradient of delta
};

// A checked call, and the memory of a group. Rows of staged tensors have `key_row` or `value_row` elements, and each
// unit has `rows` of them. T is f64 for f64, else f32.
struct Elements {
  Tensors<ConstTensorView> in;
  States<ConstTensorView> initial, d_final;
  ConstTensorView d_o;
  TensorView o;
  Tensors<TensorView> gradients;
  States<TensorView> final, d_initial;
  DType compute = DType::kF32;
  double scale = 1;
  int64_t direction = 1;                                     // -1: from the last token to the first
  int64_t R = 0, K = 0, V = 0, P = 0, heads = 0, group = 0;  // group: value heads per key head
  int64_t key_row = 0, value_row = 0, angle_row = 0, rows = 0;
  int64_t before = 0;  // rows before the block: the writes of the token before it, in a step
  std::vector<Unit> units;

  // Constants, [HV, R, key_row] of T.
  void *q_bias = nullptr, *k_bias = nullptr;

  // [units, rows, ...] of T.
  void *q = nullptr, *k = nullptr, *v = nullptr, *o_rows = nullptr;
  void *log_decay = nullptr, *weight = nullptr;
  void* dots = nullptr;                    // [units, kBlock, R, R]: q_tr . k_tr'
  void *gamma = nullptr, *beta = nullptr;  // [units, kBlock]: gamma_t, beta_{t+1}
  double* angle = nullptr;                 // [units, angle_row]: of the token before the next block
  void* state = nullptr;                   // [units, slots, K, V]: S + beta_{t+1} k_t v_t^T
  int64_t slots = 1;

  // The backward pass.
  void *lambda = nullptr, *rest = nullptr, *delta = nullptr;  // [units, kBlock]
  void* rotation = nullptr;                                   // [units, kBlock, 2, key_row]: see Rotate()
  double* angles = nullptr;                                   // [units, slots, angle_row]: before each block
  void *d_o_rows = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr, *d_log_decay = nullptr;
  void* d_states[2] = {};      // [units, K, V]
  double* d_angle = nullptr;   // [units, angle_row]: sums over later tokens
  double* d_biases = nullptr;  // [units, 2, R, key_row]
  Pending* pending = nullptr;  // [units]
  void* sums[2] = {};          // [T, R, key_row]: dq and dk of the heads so far
};

// Fills the biases.
void LoadBiases(const Context& ctx, const Elements& e);

// Begins the units: the running angle, and the state with the write of the token before the first. For a step the
// state stays as it is.
void Begin(Context& ctx, const Elements& e, bool with_states);

// Computes the rows of block `b` of each unit; without `reads`, not those of queries.
void Prepare(Context& ctx, const Elements& e, int64_t b, bool reads, bool backward);

// Rounds o of the block, with what its own tokens add.
void Finish(Context& ctx, const Elements& e, int64_t b);

// Stores the final states of units whose last block is `b`; -1: units without tokens. Those of a step have no S.
void End(Context& ctx, const Elements& e, int64_t b, bool with_states);

// The backward pass: d_o of the block for the engine; then the gradients of the block, from those of the engine.
void PrepareBackward(Context& ctx, const Elements& e, int64_t b);
void FinishBackward(Context& ctx, const Elements& e, int64_t b);
// Sums dq and dk of the block over these heads and, unless they are the first ones, those before them.
void SumHeads(Context& ctx, const Elements& e, int64_t b, bool first, bool last);
// Begins and ends the gradients of states.
void BeginBackward(Context& ctx, const Elements& e);
void EndBackward(Context& ctx, const Elements& e);

}  // namespace heed::mamba3

#endif  // HEED_OPS_SSM_MAMBA3_MAMBA3_KERNELS_INTERNAL_H_
