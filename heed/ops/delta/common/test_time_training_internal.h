// Common parts of memories that are trained while they read (TTT-Linear, Titans): a call, and checks of its arguments.
//
// Such a memory is a matrix that maps keys to values. A token trains it by one step of gradient descent, through a
// layer norm; all gradients of a mini-batch are those of the memory before its first token.
#ifndef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INTERNAL_H_
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::test_time_training {

struct Call {
  std::vector<mechanism::TokenRange> sequences;
  std::vector<int64_t> offsets;  // tokens of the current mini-batch before each sequence's first
  int64_t B = 0, T = 0, H = 0, K = 0, mini_batch = 16;
  double eps = 0, scale = 1;
};

inline DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// Check arguments and write what they say to `call`. Without `data`, pointers may be null. All throw InvalidArgument.
void CheckRows(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, bool data,
               Call& call);
void CheckOptions(const char* op, int64_t mini_batch, double eps, double scale, Call& call);

// A tensor in the dtype of q, or f32, or f64 for f64.
void CheckFactor(const char* op, const char* name, const ConstTensorView& t, const mechanism::Axes& shape, DType dtype,
                 bool data);

// The place in its mini-batch of the first token of each sequence; `call` has its sequences. Positions without data
// count as 0.
void CheckPositions(const char* op, const ConstTensorView& positions, bool with_state, bool data, Call& call);

}  // namespace heed::test_time_training

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INTERNAL_H_
