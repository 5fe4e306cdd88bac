// The computations of SSD beside its recurrence, element by element: ssd_kernels.cc.
#ifndef HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_
#define HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::ssd {

// A checked call. Constants per head are in f64, on the CPU; [B, H, T] and [B, T, H, P] are in the accumulation dtype,
// in the staging memory of the context or of the device.
struct Elements {
  Inputs in;
  bool softplus;
  double dt_min, dt_max;
  int64_t heads, channels;
  DType compute;
  std::vector<mechanism::TokenRange> ranges;
  std::vector<double> A, bias, D;  // [H], [H], [H, P] or empty

  TensorView delta, log_decay;  // [B, T, H]
  TensorView skip;              // [H, P], or absent

  // For the backward pass only.
  ConstTensorView d_o;
  TensorView y;            // with z: y, overwritten with dy
  TensorView dv;           // [B, T, H, P]
  TensorView d_log_decay;  // [B, T, H]
  Gradients out;
};

// Computes delta and log_decay, and D in the engine's form.
void ComputeTimeSteps(Context& ctx, const Elements& e);

// Computes dz, and dy in place of y, from y, z and d_o.
void ComputeGateGradients(Context& ctx, const Elements& e);

// Computes dx, ddt, and the sums dA, dD and ddt_bias, from dv, d_log_decay and dy (or d_o).
void FinishGradients(Context& ctx, const Elements& e);

// GPUs run these functions from cuda/elements.cc.
namespace cuda {
void ComputeTimeSteps(const Context& ctx, const Elements& e);
void ComputeGateGradients(const Context& ctx, const Elements& e);
void FinishGradients(const Context& ctx, const Elements& e);
}  // namespace cuda

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_
