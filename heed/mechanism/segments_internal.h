// Segments of tokens: facts of tables, some of which heed_distributed, a library of its own, needs to know, and the
// passes of a summary.
#ifndef HEED_MECHANISM_SEGMENTS_INTERNAL_H_
#define HEED_MECHANISM_SEGMENTS_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/table_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::mechanism {

// Returns the axis of a tensor that has this letter in the table; -1 if the tensor is absent, or has none.
HEED_API int AxisOf(const Tensor& tensor, const ConstTensorView& t, char letter);

// Returns the axis of tokens of a call's first tensor. Without such a tensor `pass` says what is wrong.
int TokenAxisOf(const CallInSegments& call, const CallInSegments::Pass& pass, const Arguments& in);

// Returns the shape of the transition of state i, which has the shape of `state`; empty if it has none.
HEED_API std::vector<int64_t> TransitionShape(const Table& table, const Arguments& in, size_t i,
                                              const ConstTensorView& state);

// The tasks of a forward pass over one sequence.
struct Division {
  int64_t heads = 0;  // tasks that need all its tokens; 0: tokens are divided already
  int64_t parts = 1;  // into which columns of a head may be divided
  // The work relative to that of the whole pass: without outputs, and of the pass that finds a summary's transition.
  double states = 1, transition = 0;
};

// A forward pass over these sequences by counted work: the time of the longest thread relative to the time of one
// thread without segments. Tasks are handed out as Context::ParallelFor does, parts of a head are equal, and what is as
// large as a state counts as nothing.
double CountedTime(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment, int64_t threads);
// Returns the counted work of all threads together.
double CountedWork(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment);

// Adds to an explanation what segments cost and where they pay, or that they would.
void ExplainSegments(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment, int64_t threads,
                     Explanation& e);

// True if a segment multiplies the state with a matrix.
bool IsDelta(const Table& table);

// The axis of the columns of a matrix-valued state, each of which is changed alike; npos for other states.
size_t ColumnsOf(const StateTensor& state);

// Memory for the views of a pass.
class Constants {
 public:
  // All elements are `value`; the axes that `shared` names have strides of 0.
  ConstTensorView Of(double value, DType dtype, const std::vector<int64_t>& sizes, std::string_view axes,
                     std::string_view shared);
  void* Next(DType dtype, int64_t count);

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

// The two passes of a summary: one from zeros, whose final states are the state of the summary, and one without input,
// whose final states are its transition. They may be calls of many segments, each with a state in `out`.
class SummaryPasses {
  const Table& table_;
  const Arguments in_;

 public:
  // Checks the states of `in` and of `out`.
  SummaryPasses(const char* op, const Table& table, const Arguments& in, const Segment& out);
  void ComputeTransitions(const ForwardPass& forward);

  std::vector<ConstTensorView> zeros;  // the states before the first pass
  std::vector<TensorView> transitions;

 private:
  std::vector<ConstTensorView> basis_;
  int64_t columns_ = -1;
  Constants constants_;
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_SEGMENTS_INTERNAL_H_
