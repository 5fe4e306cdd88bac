// The keys that a preconditioned delta rule writes, and their gradients. A is a state beside S, per key head:
//
//   A_t = exp(g_t) A_{t-1} + b_t k_t^2
//   r_t = log(A_t + eps) - center
//   M_t = bound^(-r_t / (1 + |r_t|))      between 1 / bound and bound
//   w_t = M_t k_t
//
// The recurrence engine writes w and reads with k.
#ifndef HEED_MECHANISM_KEY_PRECONDITIONER_INTERNAL_H_
#define HEED_MECHANISM_KEY_PRECONDITIONER_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/dtype.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrent {

// A checked call. Rows have key heads; strides are those of the engine, negative if the direction is reversed.
struct KeyPreconditioner {
  const std::vector<recurrence::Sequence>* sequences = nullptr;
  int64_t heads = 0, size = 0;
  DType compute = DType::kF32;
  double log_bound = 0, eps = 0;
  std::vector<double> center;           // per key head
  recurrence::Rows k, log_decay, rate;  // g and b: one element per token
  recurrence::States initial, final;    // A; data null: zeros, or not wanted
  recurrence::Rows written;             // w, in the dtype of computation
  recurrence::Rows curvature;           // A of each token; data null: not wanted

  // The backward pass. dw and the gradient of the keys that read are in the dtype of computation; outputs with null
  // data are not wanted.
  recurrence::Rows d_written, d_read;
  recurrence::States d_final, d_initial;
  recurrence::Rows dk, d_log_decay, d_rate;
  double* d_center = nullptr;  // [sequences, heads]
};

// Computes w, A of each token and the final A.
void WriteKeys(Context& ctx, const KeyPreconditioner& keys);
// Computes the gradients.
void WriteKeysBackward(Context& ctx, const KeyPreconditioner& keys);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_KEY_PRECONDITIONER_INTERNAL_H_
