// Problems as sweeps take them: what is not on the device yet, or not as they need it.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_
#define HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_

#include <optional>

#include "heed/core/context.h"
#include "heed/cuda/calls.h"
#include "heed/engines/recurrence/cuda/sweeps.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence::cuda {

// The same problem, but that constant decays of channels are on the device, and that what a token reads before it
// decays and writes under another key (RWKV-7) is a write of its own, before the other:
//
//   S = G_t .* S_{t-1} + b_t (0 - S_{t-1}^T (-a_t))^T,  S_t = S + k_t v_t^T
//
// a delta rule that writes twice, with b and k for keys, -a and 0 for read keys, and values for the second alone. Gates
// that are exponentials are log decays and factors of values, and floors of denominators. What has factors by channel
// is multiplied, in f32.
class ProblemOnDevice {
 public:
  ProblemOnDevice(const Context& ctx, const Problem& p);
  const Problem& problem() const { return moved_ ? *moved_ : given_; }
  const float* floors() const {
    return floors_ ? floors_->data() : nullptr;
  }  // [token of all sequences][value head]; or none

 private:
  void MoveDecays();
  void SplitTokens(const Context& ctx);
  void TakeGates(const Context& ctx);
  void TakeFactors(const Context& ctx);
  // As tensors over tokens are, with so many elements of a token.
  Rows RowsIn(std::optional<heed::cuda::DeviceMemory>& memory, DType dtype, int64_t of_token);

  const Problem& given_;
  std::optional<heed::cuda::Call> call_;
  std::optional<heed::cuda::Uploads> uploads_;
  std::optional<heed::cuda::DeviceMemory> decays_, keys_, read_keys_, values_, factors_;
  std::optional<Floats> floors_;
  std::optional<Problem> moved_;
};

// Such a problem as far as its form goes, for what a device is asked before.
Problem FormOnDevice(const Problem& p);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_PROBLEM_ON_DEVICE_H_
