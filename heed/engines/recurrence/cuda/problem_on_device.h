// Problems in the form that sweeps take, with what is missing on the device or has another form.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_
#define HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_

#include <optional>

#include "heed/core/context.h"
#include "heed/cuda/calls.h"
#include "heed/engines/recurrence/cuda/sweeps.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence::cuda {

// The problem with constant decays of channels on the device. The read before the decay of RWKV-7, whose update has
// another key, becomes a write of its own before the other:
//
//   S = G_t .* S_{t-1} + b_t (0 - S_{t-1}^T (-a_t))^T,  S_t = S + k_t v_t^T
//
// This is a delta rule with two writes: keys b and k, read keys -a and 0, and values for the second write only.
// Exponential gates become log decays, factors of values, and floors of denominators. Tensors with factors per channel
// are multiplied in f32.
class ProblemOnDevice {
 public:
  ProblemOnDevice(const Context& ctx, const Problem& p);
  const Problem& problem() const { return moved_ ? *moved_ : given_; }
  const float* floors() const {
    return floors_ ? floors_->data() : nullptr;
  }  // [token of all sequences][value head]; or null

 private:
  void MoveDecays();
  void SplitTokens(const Context& ctx);
  void TakeGates(const Context& ctx);
  void TakeFactors(const Context& ctx);
  // Allocates a tensor over tokens with `of_token` elements per token.
  Rows RowsIn(std::optional<heed::cuda::DeviceMemory>& memory, DType dtype, int64_t of_token);

  const Problem& given_;
  std::optional<heed::cuda::Call> call_;
  std::optional<heed::cuda::Uploads> uploads_;
  std::optional<heed::cuda::DeviceMemory> decays_, keys_, read_keys_, values_, factors_;
  std::optional<Floats> floors_;
  std::optional<Problem> moved_;
};

// Returns a problem of the same form, for the checks of a device.
Problem FormOnDevice(const Problem& p);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_
