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

// The states of a mechanism that has none.
template <class View>
struct NoStates {};

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
