// Recurrences in double, a token and an element at a time, for the references of mechanisms on the recurrence engine.
#ifndef HEED_MECHANISM_REFERENCE_RECURRENCE_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_RECURRENCE_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heed::mechanism {

using Doubles = std::vector<double>;

// The tokens of one head of one sequence, in the order of processing, and the initial state.
//
//   S_t = a_t .* S_{t-1} + k_t v_t^T,  z_t = a_t .* z_{t-1} + k_t
//   o_t = S_t^T q_t, or S_t^T q_t / (z_t . q_t + eps)
//   or with RWKV's u term (S_{t-1} + diag(u) k_t v_t^T)^T q_t
//   or with floors S_t^T q_t / (max(|z_t . q_t|, floor_t) + epsilon_t)
//
// With b, S_t = a_t .* S_{t-1} diag(b_t) + k_t v_t^T.
struct ReferenceHead {
  size_t T = 0, K = 0, V = 0;
  Doubles q, k, a;  // [T, K]
  Doubles v;        // [T, V]
  Doubles S, z;     // [K, V], [K]: initial
  Doubles b;        // [T, V]; empty: 1
  Doubles u;        // [K]; empty: no u term
  bool normalize = false;
  double eps = 0;
  Doubles floors, epsilons;  // [T]; empty: none
  // If not empty, all of the above are absolute values, and results are sums of the magnitudes of all terms, to which
  // rounding errors are relative. These are the true denominators, which may be smaller than the sums of their terms.
  Doubles denominators;
  Doubles slopes;  // and the derivatives of denominators by z . q, if there are floors
};

struct ReferenceHeadOutputs {
  Doubles o;             // [T, V]
  Doubles S, z;          // final
  Doubles denominators;  // [T], or 1
  Doubles products;      // [T]: z . q
};

ReferenceHeadOutputs RunReference(const ReferenceHead& head);

struct ReferenceHeadGradients {
  Doubles q, k, a;  // [T, K]; with respect to a, not its logarithm
  Doubles v;        // [T, V]
  Doubles S, z;     // of the initial state
  Doubles u;        // [K]
  Doubles b;        // [T, V]
};

// The gradients of <d_o, o> + <d_S, S_T> + <d_z, z_T>.
ReferenceHeadGradients RunBackwardReference(const ReferenceHead& head, const Doubles& d_o, const Doubles& d_S,
                                            const Doubles& d_z);

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_RECURRENCE_REFERENCE_INTERNAL_H_
