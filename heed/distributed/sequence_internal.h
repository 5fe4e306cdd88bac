// A call of any mechanism with states, as a table and functions over lists of views.
#ifndef HEED_DISTRIBUTED_SEQUENCE_INTERNAL_H_
#define HEED_DISTRIBUTED_SEQUENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/distributed/group.h"
#include "heed/distributed/sequence.h"
#include "heed/mechanism/table_internal.h"

namespace heed::distributed {

// The numbers of a call that concern the whole sequence.
struct SequenceNumbers {
  ConstTensorView lengths, starts, cu_seqlens;
};

// A mechanism with its options.
struct Operation {
  std::string name;  // "gla"
  mechanism::Table table;
  SequenceNumbers numbers;
  bool reverse = false, causal = true, normalize = true;
  bool taylor = false;        // features of K channels are those of a Taylor expansion
  bool zeros_differ = false;  // a sequence without an initial state is not like one with zeros
  std::string options;        // as ranks compare them

  // Calls on a segment, with its own numbers.
  std::function<void(Context&, const mechanism::Arguments&, const SequenceNumbers&, const mechanism::Results&)> forward,
      backward;
  std::function<void(Context&, const mechanism::Arguments&, const SequenceNumbers&, const mechanism::Segment&)>
      summarize;
  std::function<void(const mechanism::Segment&, mechanism::StateViews, mechanism::StateViews)> apply;
  std::function<void(const mechanism::Segment&, mechanism::StateViews, mechanism::StateViews, mechanism::StateViews)>
      apply_backward;
};

void Forward(Context& ctx, const Group& group, const Operation& operation, const mechanism::Arguments& in,
             const mechanism::Results& out, const SequenceOptions& sequence);
void Backward(Context& ctx, const Group& group, const Operation& operation, const mechanism::Arguments& in,
              const mechanism::Results& out, const SequenceOptions& sequence);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_SEQUENCE_INTERNAL_H_
