// Common parts of the files of mesa: a checked call, its passes, and the reference that solves directly.
#ifndef HEED_OPS_GATED_MESA_MESA_INTERNAL_H_
#define HEED_OPS_GATED_MESA_MESA_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/gated/mesa/mesa.h"

namespace heed::mesa {

struct Call {
  std::vector<mechanism::TokenRange> sequences;
  int64_t B = 0, T = 0, H = 0, K = 0, V = 0, iterations = 0;
  double eps = 0;
};

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide, bool values);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values);

// Compute a checked call: mesa_forward.cc and mesa_backward.cc. A step is a forward pass whose initial and final state
// are one tensor.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);

// The memory that these reserve for tensors of this dtype.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

inline constexpr int64_t kChunkTokens = 16;

// Flops per token and head, whose chunk has `tokens` tokens: one solution, and the products around it.
struct Flops {
  double solution, around;
};
inline Flops FlopsOf(int64_t K, int64_t V, int64_t iterations, int64_t tokens) {
  const auto k = static_cast<double>(K), v = static_cast<double>(V), pairs = static_cast<double>(2 * tokens);
  return {static_cast<double>(iterations) * k * (2 * k + pairs), (4 * k + pairs) * (k + v)};
}

// The solver of the references. Magnitudes replace each number by a bound of its magnitude and of its rounding error
// per unit of relative error, for tolerances.
enum class Solver { kConjugateGradients, kCholesky, kMagnitudes };
void ReferenceBy(Solver solver, const Inputs& in, const Options& options, const Outputs& out);
void BackwardReferenceBy(Solver solver, const BackwardInputs& in, const Options& options, const Gradients& out);

// The largest condition number of A of any token, at most: by the Frobenius norm of the magnitudes and the least
// lambda.
double ConditionBound(const Inputs& in, const Options& options);

}  // namespace heed::mesa

#endif  // HEED_OPS_GATED_MESA_MESA_INTERNAL_H_
