// Recurrences in double, a token and an element at a time: what the references of
// mechanisms on the recurrence engine are written in.
#ifndef HEED_OPS_MECHANISM_RECURRENCE_REFERENCE_INTERNAL_H_
#define HEED_OPS_MECHANISM_RECURRENCE_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace heed::mechanism {

using Doubles = std::vector<double>;

// The tokens of one head of one sequence, in the order in which they are taken, and the
// state before the first.
//
//   S_t = a_t .* S_{t-1} + k_t v_t^T,  z_t = a_t .* z_{t-1} + k_t
//   o_t = S_t^T q_t, or S_t^T q_t / (z_t . q_t + eps)
//   or in the bonus form (S_{t-1} + diag(u) k_t v_t^T)^T q_t
//   or with floors S_t^T q_t / (max(|z_t . q_t|, floor_t) + epsilon_t)
//
// With b, S_t = a_t .* S_{t-1} diag(b_t) + k_t v_t^T.
struct ReferenceHead {
  size_t T = 0, K = 0, V = 0;
  Doubles q, k, a;  // [T, K]
  Doubles v;        // [T, V]
  Doubles S, z;     // [K, V], [K]: initial
  Doubles b;        // [T, V]; empty: 1
  Doubles u;        // [K]; empty: not the bonus form
  bool normalize = false;
  double eps = 0;
  Doubles floors, epsilons;  // [T]; empty: none
  // Not empty: all of the above are absolute values, and results shall be sums of the
  // magnitudes of all terms, which rounding errors are relative to. These are the true
  // denominators, which may be smaller than the sums of their terms.
  Doubles denominators;
  Doubles slopes;  // and of denominators by z . q, where there are floors
};

struct ReferenceHeadOutputs {
  Doubles o;             // [T, V]
  Doubles S, z;          // final
  Doubles denominators;  // [T], or 1
  Doubles products;      // [T]: z . q
};

ReferenceHeadOutputs RunReference(const ReferenceHead& head);

struct ReferenceHeadGradients {
  Doubles q, k, a;  // [T, K]; of a, not of its logarithm
  Doubles v;        // [T, V]
  Doubles S, z;     // of the initial state
  Doubles u;        // [K]
  Doubles b;        // [T, V]
};

// The gradients of <d_o, o> + <d_S, S_T> + <d_z, z_T>.
ReferenceHeadGradients RunBackwardReference(const ReferenceHead& head, const Doubles& d_o, const Doubles& d_S,
                                            const Doubles& d_z);

}  // namespace heed::mechanism

#endif  // HEED_OPS_MECHANISM_RECURRENCE_REFERENCE_INTERNAL_H_
