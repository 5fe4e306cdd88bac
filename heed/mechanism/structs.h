// The structs of a mechanism's calls. Its header declares two templates, of its tensors and of its states:
//
//   template <class View> struct Tensors { View q, k, v, log_decay; };
//   template <class View> struct States { View S; };
//
// As structs of ConstTensorView they are inputs, as structs of TensorView gradients and final states, and as structs of
// mechanism::Tensor (table_internal.h) they are the table from which checks, cases and bindings follow.
#ifndef HEED_MECHANISM_STRUCTS_H_
#define HEED_MECHANISM_STRUCTS_H_

#include <cstdint>
#include <string>

#include "heed/core/tensor.h"

namespace heed::mechanism {

// The sequences of a call that heed makes for segments of another one (tokens_internal.h).
struct CutSequences;
using SequencesOfHeed = const CutSequences*;

// The states of a mechanism that has none.
template <class View>
struct NoStates {};

// A segment of tokens as a map of states: x before it becomes transition(x) + state after it.
//
// Segments compose, in the order of their tokens: a sequence may be cut anywhere, and each part be summarised where its
// tokens are. Each mechanism has four functions on CPUs:
//
//   Summarize(ctx, in, options, out)              the summary of all tokens of a call without an initial state
//   Compose(left, right, out)                     the summary of `left` and then `right`; `out` may be one of them
//   Apply(segment, before, after)                 the states after a segment; `after` may be `before`
//   ApplyBackward(segment, before, d_after, d_before)   adds the gradient of the states before the segment that comes
//                                                 from those after it, transition^T d_after; the rest of it, which
//                                                 comes from o, is what Backward computes without d_final
//
// `state` are the states after the segment if those before it are zeros, in the shapes and dtype of the mechanism's
// states. `transition` has the same dtype and one of these shapes:
//
//   S of a recurrence          [B, HV, K, 1]: the product of the decays of each row (ssd: [B, H, 1, N]); with
//                              log_decay_v [B, HV, K, V]
//   S of a delta rule          [B, HV, K, K]: M in S_after = M S_before + state
//   states of a scan           that of the state: its factors, complex ones if it is complex
//   the last inputs of a filter   that of the state: 1 where an input from before the segment remains, else 0
//   a running maximum m        that of m: the sum of log decays. It determines what happens to S and z, which are
//                              relative to it and have no transition
//   z                          absent: the rows of S decay alike
//
// The state of h3 depends on the keys before a segment: Summarize takes them as initial.tail, zeros by default, and
// their gradient is what Backward with d_final computes. A summary of a mechanism without a step for its options, such
// as a normalised sum over all tokens, does not exist. rg_lru treats the first token of a sequence without an initial
// state differently, so a first segment without one is not summarised: its states are those of Forward.
// Options::segment is ignored. Memory: states in f64. Sums are computed in f64 and rounded once, so that the states of
// a sequence depend on where it is cut by a rounding of f32, and on nothing else.
//
// Throw InvalidArgument for a shape, dtype or presence that disagrees with the above, Unsupported for tensors on a GPU.
template <template <class> class OfStates>
struct SegmentSummary {
  OfStates<TensorView> state = {}, transition = {};
};

template <template <class> class OfTensors, template <class> class OfStates>
struct Structs {
  template <class View>
  using Tensors = OfTensors<View>;
  template <class View>
  using States = OfStates<View>;

  struct Inputs : OfTensors<ConstTensorView> {
    OfStates<ConstTensorView> initial = {};  // before the first token; absent: no tokens so far
  };
  struct BackwardInputs : Inputs {
    ConstTensorView d_o = {};                // the gradient of o, in its shape and dtype
    OfStates<ConstTensorView> d_final = {};  // gradients of the final states; absent: zeros
  };
  struct Outputs {
    TensorView o;
    OfStates<TensorView> final = {};  // after the last token; absent: not computed
  };
  // Gradients have the names of what they are gradients of. Only present ones are computed, in the shapes and dtypes of
  // their inputs; they are zero for excluded tokens.
  struct Gradients : OfTensors<TensorView> {
    OfStates<TensorView> initial = {};
  };
  // One token of each sequence: the tensors without their axis T.
  using StepInputs = OfTensors<ConstTensorView>;
  using State = OfStates<TensorView>;  // updated in place
  using Summary = SegmentSummary<OfStates>;
};

// A plan of a call.
struct Explanation {
  std::string kernel, target, why;
  double flops = 0;             // of the recurrence, and of the features of queries and keys
  double bytes = 0;             // inputs read once, outputs written once
  int64_t workspace_bytes = 0;  // reserved by the forward pass, for all threads
  double visited_pairs = 0;     // of softmax attention: (query, key)
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_STRUCTS_H_
