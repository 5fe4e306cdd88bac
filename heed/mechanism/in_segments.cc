// Calls in segments: summaries of all segments but the last ones at once, the states between them, then the outputs of
// all segments at once. The gradients of states pass through the same transitions in reverse.
//
//   forward   1. states after the first segments, and summaries of those between the first and the last: no outputs
//             2. states before each segment, in f64 (segments.cc): a task owns some heads, or columns of a head
//             3. outputs and final states
//   backward  steps 1 and 2 of forward, then
//             3. gradients of the states before each segment but the first, and of nothing else, as if those after it
//                had none
//             4. those of the states after it, added in reverse order
//             5. gradients of all tensors
//
// Each step is a call of the mechanism whose sequences are segments, so that heads, columns and segments are the tasks
// of one loop. The cut and the order of sums depend on the tokens and on `segment` alone, never on threads.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/segments_internal.h"
#include "heed/mechanism/table_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::mechanism {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;  // of states; an empty one is of an absent state

std::string Is(int64_t segment) { return "is " + std::to_string(segment); }

[[noreturn]] void Refuse(const char* op, int64_t segment, const std::string& reason) {
  throw Unsupported(std::string(op) + ": segment " + Is(segment) + ", expected 0 " + reason);
}

void CopyFrom(const ConstTensorView& from, const TensorView& to, int axis = 0, int64_t from_offset = 0,
              int64_t to_offset = 0) {
  const auto size = static_cast<int64_t>(SizeOf(to.dtype()));
  if (axis == to.rank()) {
    std::memcpy(to.as<char>() + to_offset * size, from.as<char>() + from_offset * size, static_cast<size_t>(size));
    return;
  }
  const int64_t count = to.size(axis);
  if (axis + 1 == to.rank() && from.stride(axis) == 1 && to.stride(axis) == 1) {
    std::memcpy(to.as<char>() + to_offset * size, from.as<char>() + from_offset * size,
                static_cast<size_t>(count * size));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    CopyFrom(from, to, axis + 1, from_offset + i * from.stride(axis), to_offset + i * to.stride(axis));
  }
}

// States of many sequences.
class StatesOf {
 public:
  StatesOf(const Shapes& shapes, DType dtype, int64_t sequences) {
    for (std::vector<int64_t> shape : shapes) {
      views_.emplace_back();
      if (shape.empty()) continue;
      shape[0] = sequences;
      const TensorView described(nullptr, dtype, shape);
      const size_t bytes = static_cast<size_t>(described.num_elements()) * SizeOf(dtype);
      memory_.emplace_back(static_cast<std::byte*>(std::calloc(std::max<size_t>(bytes, 1), 1)), &std::free);
      if (memory_.back() == nullptr) throw std::bad_alloc();
      views_.back() = TensorView(memory_.back().get(), dtype, shape);
    }
  }
  const std::vector<TensorView>& views() const { return views_; }
  std::vector<ConstTensorView> inputs() const { return {views_.begin(), views_.end()}; }
  // Returns the states of sequences [begin, end).
  std::vector<TensorView> Of(int64_t begin, int64_t end) const {
    std::vector<TensorView> part;
    for (const TensorView& t : views_) part.push_back(t.present() ? t.Slice(0, begin, end) : t);
    return part;
  }
  // Copies the states of one sequence; absent ones stay as they are.
  template <class View>
  void Set(int64_t sequence, std::span<const View> from, int64_t index) const {
    for (size_t i = 0; i < views_.size(); ++i) {
      if (!views_[i].present() || !At(from, i).present()) continue;
      CopyFrom(At(from, i).Slice(0, index, index + 1), views_[i].Slice(0, sequence, sequence + 1));
    }
  }
  // Copies the states of the first sequences, or of those that `index` lists.
  void Get(StateViews to, const std::vector<int64_t>& index) const {
    for (size_t i = 0; i < to.size(); ++i) {
      if (!to[i].present()) continue;
      for (size_t s = 0; s < index.size(); ++s) {
        const auto at = static_cast<int64_t>(s);
        CopyFrom(views_[i].Slice(0, index[s], index[s] + 1), to[i].Slice(0, at, at + 1));
      }
    }
  }

 private:
  std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> memory_;
  std::vector<TensorView> views_;
};

// The segments of a call's sequences. Lists of segments are in the order of sequences, and each in that of processing.
struct Cut {
  std::vector<TokenRange> sequences;
  // The first segment of each sequence, those between it and the last, and all others; and the first ones of sequences
  // that have several.
  CutSequences firsts, between, rest, begins;
  // Numbers of each sequence: its segments after the first, and where it begins in these lists.
  std::vector<int64_t> counts, rest_at, between_at, begins_at;

  Cut(std::vector<TokenRange> ranges, int64_t segment, bool reverse) : sequences(std::move(ranges)) {
    for (const TokenRange& range : sequences) {
      std::vector<TokenRange> parts;
      for (int64_t begin = range.begin; begin < range.end || parts.empty(); begin += segment) {
        parts.push_back({range.batch, begin, std::min(begin + segment, range.end)});
      }
      if (reverse) std::ranges::reverse(parts);
      firsts.ranges.push_back(parts[0]);
      rest_at.push_back(Count(rest));
      between_at.push_back(Count(between));
      begins_at.push_back(Count(begins));
      counts.push_back(static_cast<int64_t>(parts.size()) - 1);
      rest.ranges.insert(rest.ranges.end(), parts.begin() + 1, parts.end());
      if (parts.size() > 1) begins.ranges.push_back(parts[0]);
      if (parts.size() > 2) between.ranges.insert(between.ranges.end(), parts.begin() + 1, parts.end() - 1);
    }
  }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences.size()); }
  // The place of segment i of a sequence in the list of all segments, the first ones and then the rest.
  int64_t At(size_t sequence, int64_t i) const {
    return i == 0 ? static_cast<int64_t>(sequence) : num_sequences() + rest_at[sequence] + i - 1;
  }
  static int64_t Count(const CutSequences& of) { return static_cast<int64_t>(of.ranges.size()); }
};

// The segments of one list and then those of another.
CutSequences Both(const CutSequences& a, const CutSequences& b) {
  CutSequences both = {a.ranges};
  both.ranges.insert(both.ranges.end(), b.ranges.begin(), b.ranges.end());
  return both;
}

// A call: its states between segments, and the passes that find and use them.
class Segments {
 public:
  Segments(const CallInSegments& call, Context& ctx, const Arguments& in, int token_axis)
      : call_(call), ctx_(ctx), in_(in),
        cut_(RangesOf(call.op, call.table.tensors[0].name, in.tensors[0], Sequences(call), token_axis), call.segment,
             call.reverse) {}

  // A call on no tokens of each sequence checks all arguments.
  void Check(const CallInSegments::Pass& pass, const Results& out) {
    CutSequences none;
    for (const TokenRange& range : cut_.sequences) none.ranges.push_back({range.batch, range.begin, range.begin});
    if (call_.table.Has(Role::kLambda) && !At(in_.initial, 0).present() && !cut_.rest.ranges.empty()) {
      Refuse(call_.op, call_.segment, "without an initial state: its first token differs from the others");
    }
    pass(none, in_, out);
    shapes_ = none.state_shapes;
    dtype_ = none.state_dtype;
  }

  void Forward(const Results& out) {
    FindStates();
    const auto S = static_cast<size_t>(cut_.num_sequences());
    const bool wanted = std::ranges::any_of(out.states, [](const TensorView& t) { return t.present(); });
    const StatesOf after(wanted ? shapes_ : Shapes(shapes_.size()), dtype_,
                         cut_.num_sequences() + Cut::Count(cut_.rest));
    call_.forward(Both(cut_.firsts, cut_.rest), {in_.tensors, before_->inputs()}, {out.o, after.views()});
    std::vector<int64_t> last;
    for (size_t s = 0; s < S; ++s) last.push_back(cut_.At(s, cut_.counts[s]));
    after.Get(out.states, last);
    Clear(out.o, call_.table.tensors[0]);
  }

  void Backward(const Results& out) {
    FindStates();
    Shapes shapes = shapes_;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!call_.table.states[i].differentiable()) shapes[i].clear();
    }
    const int64_t S = cut_.num_sequences(), rest = Cut::Count(cut_.rest);
    const StatesOf d_rest(shapes, dtype_, rest);  // of the states before each segment but the first
    if (rest > 0) {
      const StatesOf d_after(shapes, dtype_, rest);
      for (int64_t s = 0; s < S; ++s) {
        const auto at = static_cast<size_t>(s);
        if (cut_.counts[at] > 0) d_after.Set(cut_.rest_at[at] + cut_.counts[at] - 1, in_.d_final, s);
      }
      const std::vector<TensorView> before = before_->Of(S, S + rest);
      const std::vector<ConstTensorView> before_inputs(before.begin(), before.end());
      call_.backward(cut_.rest, {in_.tensors, before_inputs, in_.d_o, d_after.inputs()}, {{}, d_rest.views(), {}});
      Transpose(d_rest);
    }
    const StatesOf d_after(shapes, dtype_, S + rest);
    for (size_t s = 0; s < static_cast<size_t>(S); ++s) {
      for (int64_t i = 0; i < cut_.counts[s]; ++i) {
        d_after.Set(cut_.At(s, i), std::span<const TensorView>(d_rest.views()), cut_.rest_at[s] + i);
      }
      d_after.Set(cut_.At(s, cut_.counts[s]), in_.d_final, static_cast<int64_t>(s));
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!At(out.states, i).present()) shapes[i].clear();
    }
    const StatesOf d_before(shapes, dtype_, S + rest);
    call_.backward(Both(cut_.firsts, cut_.rest), {in_.tensors, before_->inputs(), in_.d_o, d_after.inputs()},
                   {{}, d_before.views(), out.gradients});
    std::vector<int64_t> sequences;
    for (int64_t s = 0; s < S; ++s) sequences.push_back(s);
    d_before.Get(out.states, sequences);
    for (size_t i = 0; i < out.gradients.size(); ++i) Clear(out.gradients[i], call_.table.tensors[i]);
  }

  // Runs a pass as it is. A convolution would compute no states, so that its bits depended on the other sequences.
  bool RunWhole(const CallInSegments::Pass& pass, const Results& out) const {
    if (!cut_.rest.ranges.empty() || call_.table.Has(Role::kFrequency)) return false;
    pass({cut_.sequences}, in_, out);
    Clear(out.o, call_.table.tensors[0]);
    for (size_t i = 0; i < out.gradients.size(); ++i) Clear(out.gradients[i], call_.table.tensors[i]);
    return true;
  }

 private:
  // Steps 1 and 2.
  void FindStates() {
    const int64_t S = cut_.num_sequences(), between = Cut::Count(cut_.between), begins = Cut::Count(cut_.begins);
    before_ = std::make_unique<StatesOf>(shapes_, dtype_, S + Cut::Count(cut_.rest));
    after_ = std::make_unique<StatesOf>(shapes_, dtype_, begins + between);
    Shapes of_transitions;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      of_transitions.emplace_back();
      if (!shapes_[i].empty()) {
        of_transitions[i] = TransitionShape(call_.table, in_, i, ConstTensorView(nullptr, dtype_, shapes_[i]));
      }
    }
    transitions_ = std::make_unique<StatesOf>(of_transitions, dtype_, between);
    const std::vector<TensorView> summaries = after_->Of(begins, begins + between);
    SummaryPasses passes(call_.op, call_.table, {in_.tensors}, {summaries, transitions_->views()});
    const StatesOf first(shapes_, dtype_, begins + between);
    for (size_t i = 0; i < shapes_.size(); ++i) {
      if (shapes_[i].empty()) continue;
      const StateTensor& state = call_.table.states[i];
      if (state.absent != 0) Fill(before_->views()[i].Slice(0, 0, S), state.absent);
      if (state.role == StateTensor::kMaximum && between > 0) {
        CopyFrom(passes.zeros[i], first.views()[i].Slice(0, begins, begins + between));
      }
    }
    for (size_t s = 0; s < static_cast<size_t>(S); ++s) {
      const auto sequence = static_cast<int64_t>(s);
      before_->Set(sequence, in_.initial, sequence);
      if (cut_.counts[s] == 0) continue;
      first.Set(cut_.begins_at[s], std::span<const TensorView>(before_->views()), sequence);
    }
    if (begins > 0) {
      call_.forward(Both(cut_.begins, cut_.between), {in_.tensors, first.inputs()}, {{}, after_->views()});
    }
    if (between > 0) {
      passes.ComputeTransitions([&](const Arguments& in, const Results& out) { call_.forward(cut_.between, in, out); });
    }
    ForTasks([&](size_t s, const auto& sliced) {
      for (int64_t i = 0; i < cut_.counts[s]; ++i) {  // the states before segment i + 1
        const auto before = sliced(before_->views(), cut_.At(s, i + 1), false);
        if (i == 0) {
          const auto after = sliced(after_->views(), cut_.begins_at[s], false);
          for (size_t j = 0; j < before.size(); ++j) {
            if (before[j].present()) CopyFrom(after[j], before[j]);
          }
          continue;
        }
        const int64_t summary = cut_.between_at[s] + i - 1;
        const auto state = sliced(after_->views(), begins + summary, false),
                   transition = sliced(transitions_->views(), summary, true);
        Apply(call_.op, call_.table, {state, transition}, sliced(before_->views(), cut_.At(s, i), false), before);
      }
    });
  }

  // Step 4 of the backward pass.
  void Transpose(const StatesOf& d_rest) const {
    ForTasks([&](size_t s, const auto& sliced) {
      for (int64_t i = cut_.counts[s] - 1; i > 0; --i) {  // segment i, of which there is a summary
        const int64_t summary = cut_.between_at[s] + i - 1, at = cut_.rest_at[s] + i - 1;
        const auto state = sliced(after_->views(), Cut::Count(cut_.begins) + summary, false);
        const auto transition = sliced(transitions_->views(), summary, true);
        ApplyBackward(call_.op, call_.table, {state, transition}, sliced(before_->views(), cut_.At(s, i), false),
                      sliced(d_rest.views(), at + 1, false), sliced(d_rest.views(), at, false));
      }
    });
  }

  // Calls f(sequence, sliced) for the tasks of a step over states; sliced(views, sequence, transitions) are their parts
  // of this task: some heads or channels, or columns of a head where there is one state.
  template <class F>
  void ForTasks(const F& f) const {
    constexpr int64_t kElements = 4096, kColumns = 16;
    const Shapes& shapes = shapes_;
    size_t present = 0, which = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (shapes[i].empty()) continue;
      if (present++ == 0) which = i;
    }
    if (present == 0) return;
    const std::vector<int64_t>& shape = shapes[which];
    int64_t inner = 1;  // elements of a head or channel
    for (size_t i = 2; i < shape.size(); ++i) inner *= shape[i];
    const size_t columns = ColumnsOf(call_.table.states[which]);
    const int64_t heads = shape[1], per_task = std::max<int64_t>(1, kElements / std::max<int64_t>(inner, 1));
    const bool by_columns = present == 1 && columns != std::string_view::npos && per_task == 1;
    const int64_t width = by_columns ? shape[columns] : 1, part = by_columns ? kColumns : 1;
    const int64_t runs = (heads + per_task - 1) / per_task, parts = (width + part - 1) / part;
    const bool matrix = IsDelta(call_.table);
    ctx_.ParallelFor(cut_.num_sequences() * runs * parts, [&](int64_t task, int) {
      const int64_t s = task / (runs * parts), run = task / parts % runs, p = task % parts;
      if (cut_.counts[static_cast<size_t>(s)] == 0) return;
      f(static_cast<size_t>(s), [&](const std::vector<TensorView>& views, int64_t sequence, bool transitions) {
        std::vector<TensorView> sliced(views.size());
        for (size_t i = 0; i < views.size(); ++i) {
          if (!views[i].present()) continue;
          sliced[i] = views[i].Slice(0, sequence, sequence + 1);
          sliced[i] = sliced[i].Slice(1, run * per_task, std::min((run + 1) * per_task, heads));
          const auto axis = static_cast<int>(columns);
          if (!by_columns || (transitions && (matrix || sliced[i].size(axis) != width))) continue;
          sliced[i] = sliced[i].Slice(axis, p * part, std::min((p + 1) * part, width));
        }
        return sliced;
      });
    });
  }

  static void Fill(const TensorView& t, double value) {
    for (int64_t i = 0; i < t.num_elements(); ++i) StoreDouble(t.dtype(), t.data(), i, value);
  }

  void Clear(const TensorView& t, const Tensor& tensor) const {
    if (!t.present()) return;
    const size_t axis = AxesOfRank(tensor.axes, t.rank()).find('T');
    if (axis != std::string_view::npos) ClearOthers(cut_.sequences, t, static_cast<int>(axis));
  }

  const CallInSegments& call_;
  Context& ctx_;
  const Arguments in_;
  const Cut cut_;
  Shapes shapes_;
  DType dtype_ = DType::kF32;
  // The states after the first segments and, from zeros, those between; the states before all segments.
  std::unique_ptr<StatesOf> after_, before_, transitions_;
};

// Runs a pass in segments, or as it is: where a sequence is no longer than a segment, and where it will be refused.
void Run(const CallInSegments& call, Context& ctx, const Arguments& in, const Results& out, bool backward) {
  CheckSegment(call.op, call.table, call.segment, call.causal);
  const ConstTensorView& first = At(in.tensors, 0);
  const os::ScopedFloatControl float_control;
  if (first.present() && first.device().type != DeviceType::kCpu) Refuse(call.op, call.segment, "on a GPU");
  const CallInSegments::Pass& pass = backward ? call.backward : call.forward;
  Segments segments(call, ctx, in, TokenAxisOf(call, pass, in));
  if (!backward && !out.o.present()) Fail(call.op, "o", "is absent", "a tensor");
  segments.Check(pass, out);
  if (segments.RunWhole(pass, out)) return;
  backward ? segments.Backward(out) : segments.Forward(out);
}

}  // namespace

void CheckSegment(const char* op, const Table& table, int64_t segment, bool causal) {
  if (segment == 0) return;
  if (segment < 0 || segment % recurrence::kBlockTokens != 0) {
    Fail(op, "segment", Is(segment), "0 or a multiple of " + std::to_string(recurrence::kBlockTokens));
  }
  if (table.states.empty() || !causal) Refuse(op, segment, "where all tokens see each other");
  if (table.Has(Role::kKeyTaps)) Refuse(op, segment, "as its state depends on the keys before a segment");
  if (table.Has(Role::kCurvatureRate)) Refuse(op, segment, "as what a segment writes depends on A before it");
  if (table.Has(Role::kAngleRate)) Refuse(op, segment, "as its keys are rotated by the angle before a segment");
}

namespace {

// The time of the longest thread and the time of all together, of some sequences with so many tokens. Heads are divided
// into parts if there are fewer than threads.
struct Counted {
  double time = 0, work = 0;

  // A step of `counts` tokens per task, at a cost per token.
  void Add(std::vector<int64_t> counts, const Division& division, double cost, int64_t threads) {
    const auto whole = static_cast<int64_t>(counts.size()) * division.heads;
    if (whole == 0) return;
    const int64_t parts =
        whole >= threads ? 1 : std::min((threads + whole - 1) / whole, std::max<int64_t>(division.parts, 1));
    std::ranges::sort(counts, std::greater<>());
    std::priority_queue<double, std::vector<double>, std::greater<>> busy;  // the times at which threads are free
    for (int64_t i = 0; i < threads; ++i) busy.push(0);
    double end = 0;
    for (const int64_t count : counts) {
      for (int64_t task = 0; task < division.heads * parts; ++task) {
        const double until = busy.top() + cost * static_cast<double>(count) / static_cast<double>(parts);
        busy.pop();
        busy.push(until);
        end = std::max(end, until);
      }
      work += cost * static_cast<double>(count * division.heads);
    }
    time += end;
  }
};

std::vector<int64_t> Tokens(const std::vector<TokenRange>& ranges) {
  std::vector<int64_t> counts;
  for (const TokenRange& range : ranges) counts.push_back(range.end - range.begin);
  return counts;
}

Counted Count(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment, int64_t threads) {
  Counted counted;
  if (segment == 0) {
    counted.Add(Tokens(ranges), division, 1, threads);
    return counted;
  }
  const Cut cut(ranges, segment, false);
  counted.Add(Tokens(Both(cut.begins, cut.between).ranges), division, division.states, threads);
  counted.Add(Tokens(cut.between.ranges), division, division.transition, threads);
  counted.Add(Tokens(Both(cut.firsts, cut.rest).ranges), division, 1, threads);
  return counted;
}

std::string Rounded(double x) { return Text(std::round(10 * x) / 10); }

}  // namespace

double CountedTime(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment, int64_t threads) {
  const double work = CountedWork(ranges, division, 0);
  return work == 0 ? 1 : Count(ranges, division, segment, threads).time / work;
}

double CountedWork(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment) {
  return Count(ranges, division, segment, 1).work;
}

void ExplainSegments(const std::vector<TokenRange>& ranges, const Division& division, int64_t segment, int64_t threads,
                     Explanation& e) {
  constexpr int64_t kProposed = 4096, kMostThreads = 256;
  constexpr double kWorthProposing = 1.25;
  if (division.heads == 0) return;
  const double whole = CountedWork(ranges, division, 0);
  const bool given = segment != 0;
  if (!given) segment = kProposed;
  const double work = whole == 0 ? 1 : CountedWork(ranges, division, segment) / whole;
  if (work == 1) return;  // no sequence is cut
  const auto gain = [&](int64_t n) {
    return CountedTime(ranges, division, 0, n) / CountedTime(ranges, division, segment, n);
  };
  if (!given && gain(threads) < kWorthProposing) return;
  int64_t pays = 2;
  while (pays < kMostThreads && gain(pays) <= 1) ++pays;
  const std::string times = Rounded(gain(threads)) + " times as fast on " + std::to_string(threads) + " threads";
  e.why += given ? ", in segments of " + std::to_string(segment) + " tokens: " + Rounded(work) +
                       " times the work, by count " + times
                 : ", segment=" + std::to_string(segment) + " would be by count " + times;
  if (given) {
    e.why += gain(pays) > 1 ? ", faster from " + std::to_string(pays) + " threads on" : ", faster on none";
    e.flops *= work;
  }
}

void CallInSegments::Forward(Context& ctx, const Arguments& in, const Results& out) const {
  Run(*this, ctx, in, out, false);
}

void CallInSegments::Backward(Context& ctx, const Arguments& in, const Results& out) const {
  Run(*this, ctx, in, out, true);
}

}  // namespace heed::mechanism
