// The error bounds of kernels of delta rules against their references.
#ifndef HEED_MECHANISM_REFERENCE_DELTA_ROUNDING_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_DELTA_ROUNDING_INTERNAL_H_

#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::recurrent {

// The equations of a delta rule, whose tolerances follow from passes over its states and their gradients. They are
// independent of the engine definition of its kernels.
//
//   S~_t = diag(exp(log_decay_t)) S_{t-1}      S: [K, V]
//   S_t = S~_t + k_t (w_t - S~_t^T r_t)^T
//   o_t = scale S_t^T q_t
//
// with r_t = beta_t erase_t .* read_key_t and w_t = beta_t write_t .* v_t. A rule that reads before the decay adds the
// read value with a second key, without a difference:
//
//   S_t = S~_t + k_t w_t^T + b_t (S_{t-1}^T r_t)^T
//
// Tensors that are not named here are not read, and ranks other than those of recurrent.h throw.
struct DeltaMath {
  double scale = 1;
  LogDecay log_decay;                                                 // empty: no decay
  ConstTensorView ReferenceInputs::* read_key = &ReferenceInputs::k;  // [B, T, H, K]
  TensorView ReferenceGradients::* d_read_key = &ReferenceGradients::k;
  bool beta = false, erase_and_write = false;  // whether these factors exist; otherwise they are 1
  bool reads_before_decay = false;             // b exists
  double key_error = 0;                        // of the keys that write, relative, where a mechanism computes them
  // A token has n writes, with a decay before the first and a read after the last: k is [B, T, n, H, K], v [B, T, n,
  // HV, V], beta [B, T, n, HV].
  bool several_writes = false;
};

// The gradients of the keys that write and of those that read, where a mechanism computes the former. Both are cleared
// first.
void KeyGradients(const ReferenceBackwardInputs& in, const Options& options, const DeltaMath& math,
                  const TensorView& d_written, const TensorView& d_read);

// The tolerance of each output, derived in the .cc file. It depends on the equations only. Arguments are those of a
// kernel, which has checked them.
void Tolerance(const ReferenceInputs& in, const Options& options, const DeltaMath& math,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance);
void BackwardTolerance(const ReferenceBackwardInputs& in, const Options& options, const DeltaMath& math,
                       const ReferenceGradients& expected, const ReferenceGradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_REFERENCE_DELTA_ROUNDING_INTERNAL_H_
