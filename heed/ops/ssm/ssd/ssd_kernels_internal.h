// What SSD computes beside its recurrence, element by element. ssd_kernels.cc.
#ifndef HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_
#define HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/mechanism/recurrent_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::ssd {

// A checked call. Constants of heads in f64, on the CPU; [B, H, T] and [B, T, H, P] in the compute
// type, the staging memory of the context or of the device.
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

  // The backward pass alone has these.
  ConstTensorView d_o;
  TensorView y;            // with z: y, then dy in its place
  TensorView dv;           // [B, T, H, P]
  TensorView d_log_decay;  // [B, T, H]
  Gradients out;
};

// delta and log_decay; D as the engine takes it.
void ComputeTimeSteps(Context& ctx, const Elements& e);

// From y, z and d_o: dz, and dy in place of y.
void ComputeGateGradients(Context& ctx, const Elements& e);

// From dv, d_log_decay and dy (or d_o): dx, ddt, and the sums dA, dD and ddt_bias.
void FinishGradients(Context& ctx, const Elements& e);

// The same on GPUs. cuda/elements.cc.
namespace cuda {
void ComputeTimeSteps(const Context& ctx, const Elements& e);
void ComputeGateGradients(const Context& ctx, const Elements& e);
void FinishGradients(const Context& ctx, const Elements& e);
}  // namespace cuda

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_KERNELS_INTERNAL_H_
