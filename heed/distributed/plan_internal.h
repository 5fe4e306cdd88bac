// A call on a sequence that ranks hold in parts: how it is cut, and the passes on its segments.
#ifndef HEED_DISTRIBUTED_PLAN_INTERNAL_H_
#define HEED_DISTRIBUTED_PLAN_INTERNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/distributed/group_internal.h"
#include "heed/distributed/sequence.h"
#include "heed/distributed/sequence_internal.h"
#include "heed/mechanism/segments_internal.h"

namespace heed::distributed {

using mechanism::Arguments;
using mechanism::At;
using mechanism::Results;
using mechanism::Segment;
using mechanism::StateTensor;
using mechanism::StateViews;
using mechanism::Tensor;

// A segment: tokens [begin, end), which a rank holds.
struct Part {
  int rank;
  int64_t begin, end;
  friend bool operator==(const Part&, const Part&) = default;
};

// Shapes of states; those that do not exist have none.
using Shapes = std::vector<std::optional<Shape>>;

// Tensors of one dtype in one memory, one after the other, zeroed.
class Block {
 public:
  Block() = default;
  Block(DType dtype, const Shapes& shapes) {
    Shape offsets;
    int64_t count = 0;
    for (const std::optional<Shape>& shape : shapes) {
      offsets.push_back(count);
      if (shape) count += ConstTensorView(nullptr, dtype, *shape).num_elements();
    }
    const Shape all = {count};
    memory_ = Owned(dtype, all);
    auto* const data = memory_.view().as<std::byte>();
    for (size_t i = 0; i < shapes.size(); ++i) {
      views_.push_back(shapes[i]
                           ? TensorView(data + offsets[i] * static_cast<int64_t>(SizeOf(dtype)), dtype, *shapes[i])
                           : TensorView());
    }
  }
  StateViews views() const { return views_; }
  std::vector<ConstTensorView> inputs() const { return {views_.begin(), views_.end()}; }
  std::span<std::byte> bytes() { return memory_.bytes(); }

 private:
  Owned memory_;
  std::vector<TensorView> views_;
};

// Segments by their place in the order of processing.
using Blocks = std::map<size_t, Block>;

// The states of a summary, and then its transitions.
inline Segment SummaryOf(const Block& block) {
  const size_t half = block.views().size() / 2;
  return {block.views().first(half), block.views().subspan(half)};
}

// lengths, starts and cu_seqlens of a segment.
struct PartNumbers {
  PartNumbers(const SequenceNumbers& of, const Part& part) {
    views = {Clamped(of.lengths, part), Clamped(of.starts, part), Clamped(of.cu_seqlens, part)};
  }
  ConstTensorView Clamped(const ConstTensorView& t, const Part& part) {
    if (!t.present()) return {};
    std::vector<int64_t>& numbers = memory.emplace_back();
    for (int64_t i = 0; i < t.size(0); ++i) {
      const int64_t number = LoadAsInt64(t.dtype(), t.data(), i * t.stride(0));
      numbers.push_back(std::clamp<int64_t>(number - part.begin, 0, part.end - part.begin));
    }
    numbers.reserve(1);  // an empty tensor has an address too
    return {numbers.data(), DType::kI64, {static_cast<int64_t>(numbers.size())}};
  }
  std::vector<std::vector<int64_t>> memory;
  SequenceNumbers views;
};

// A tensor's tokens [begin, end); constants whole.
template <class View>
View Tokens(const View& t, int axis, int64_t begin, int64_t end) {
  return t.present() && axis >= 0 && axis < t.rank() ? t.Slice(axis, begin, end) : t;
}

struct SequenceStates::Content {
  std::vector<Part> parts;
  Blocks before, summaries;  // the states before a segment; summaries of all but the last one
};

class SequencePlan {
 public:
  SequencePlan(const Group& group, const Operation& operation, const char* pass, const Arguments& in,
               const Results& out, const SequenceOptions& options)
      : group_(group), of_(operation), op_(operation.name + "::" + pass), in_(in), out_(out), options_(options),
        backwards_(operation.reverse) {
    const auto& table = of_.table;
    for (size_t i = 0; i < table.tensors.size(); ++i) {
      axes_.push_back(mechanism::AxisOf(table.tensors[i], At(in.tensors, i), 'T'));
    }
    o_axis_ = static_cast<int>(std::string_view(table.tensors[0].axes).find('T'));
    tokens_ = axes_[0] < 0 ? 0 : in.tensors[0].size(axes_[0]);
    bool any_tail = false, all_tails = true, depends = false;
    for (const StateTensor& state : table.states) {
      exists_.push_back(of_.causal && (state.role != StateTensor::kNormaliser || of_.normalize));
      const bool tail = std::string_view(state.axes).find('w') != std::string_view::npos;
      any_tail |= tail;
      all_tails &= tail;
      depends |= state.role == StateTensor::kCurvature || state.role == StateTensor::kAngle;
    }
    // A state beside the tail of a filter depends on that tail, so that it has no summary of its own (h3); nor has one
    // whose keys depend on A or on an angle.
    relay_ = options.relay || (any_tail && !all_tails) || depends;
  }

  // Agrees with the other ranks on the call, and cuts the sequence.
  void Start(const Context& ctx, bool backward);
  void Forward(Context& ctx);
  void Backward(Context& ctx);

 private:
  using Content = SequenceStates::Content;

  std::string Describe(const Context& ctx, bool backward);
  // Throws for a log decay or a rate that is positive, as a Context with checks does.
  void CheckValues() const;
  void CheckNumbers(int64_t total) const;
  // Throws Unsupported for a sequence that begins after the first segment, whose state before it would be zeros.
  void CheckFirstTokens(bool has_initial) const;
  void FindShapes();
  int64_t SizeOfAxis(char letter) const;
  int first_rank() const { return backwards_ ? group_.size() - 1 : 0; }
  bool IsOwn(size_t i) const { return parts_[i].rank == group_.rank(); }
  bool MayHaveGradient(size_t i) const { return exists_[i] && of_.table.states[i].differentiable(); }
  Shapes GradientShapes() const {
    Shapes shapes = states_;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!MayHaveGradient(i)) shapes[i].reset();
    }
    return shapes;
  }
  Shapes SummaryShapes() const {
    Shapes shapes = states_;
    shapes.insert(shapes.end(), transitions_.begin(), transitions_.end());
    return shapes;
  }

  std::vector<ConstTensorView> TensorsOf(const Part& part) const {
    std::vector<ConstTensorView> tensors;
    for (size_t i = 0; i < of_.table.tensors.size(); ++i) {
      tensors.push_back(Tokens(At(in_.tensors, i), axes_[i], part.begin - begin_, part.end - begin_));
    }
    return tensors;
  }
  template <class View>
  View OutputOf(const View& o, const Part& part) const {
    return Tokens(o, o_axis_, part.begin - begin_, part.end - begin_);
  }
  // The states before a segment: before the first one those of the call.
  std::vector<ConstTensorView> Before(size_t i, const Blocks& before) const {
    if (i > 0) return before.at(i).inputs();
    return {in_.initial.begin(), in_.initial.end()};
  }

  // Shares tensors of segments, each of which one rank has, among all ranks.
  Blocks Share(Blocks own, const Shapes& shapes);
  // Computes the outputs here if there are any, the states before segments, and the states after the last one.
  void RunForward(Context& ctx, const TensorView& o, Block* final, Content& content);
  void RunSegment(Context& ctx, size_t i, const TensorView& o, StateViews states, const Content& content);
  // Computes gradients of a segment: those of its first states, and with `tensors` those of tensors.
  void RunBackward(Context& ctx, size_t i, StateViews d_after, bool tensors, StateViews d_before,
                   const Content& content);
  Block SumOfFinalGradients();

  const Group& group_;
  const Operation& of_;
  std::string op_;
  const Arguments& in_;
  const Results& out_;
  const SequenceOptions& options_;
  bool backwards_, relay_ = false;
  std::vector<int> axes_;  // of the tokens of each tensor; -1: it has none
  int o_axis_ = 0;
  int64_t tokens_ = 0, begin_ = 0;  // of this rank
  std::vector<bool> exists_;
  DType wide_ = DType::kF32;
  Shapes states_, transitions_;
  std::vector<Numbers> agreed_;
  std::vector<Part> parts_;
  std::vector<size_t> own_;
  size_t last_ = 0;
  std::vector<bool> summed_;  // tensors without tokens whose gradient has been written
};

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_PLAN_INTERNAL_H_
