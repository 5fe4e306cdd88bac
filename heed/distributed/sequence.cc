// The passes on the segments of a sequence.
#include "heed/distributed/sequence.h"

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/distributed/plan_internal.h"

namespace heed::distributed {

SequenceStates::SequenceStates() = default;
SequenceStates::~SequenceStates() = default;
SequenceStates::SequenceStates(SequenceStates&& other) noexcept = default;
SequenceStates& SequenceStates::operator=(SequenceStates&& other) noexcept = default;

Blocks SequencePlan::Share(Blocks own, const Shapes& shapes) {
  Block row(wide_, shapes);
  const size_t num_bytes = row.bytes().size();
  std::vector<size_t> rows(static_cast<size_t>(group_.size()));
  for (const Part& part : parts_) ++rows[static_cast<size_t>(part.rank)];
  const size_t most = *std::ranges::max_element(rows);
  Bytes sent(most * num_bytes);
  for (size_t at = 0; at < own_.size(); ++at) {
    if (const auto found = own.find(own_[at]); found != own.end()) {
      std::ranges::copy(found->second.bytes(), sent.begin() + static_cast<ptrdiff_t>(at * num_bytes));
    }
  }
  const Bytes received = AllGather(group_, sent);
  std::vector<size_t> place(rows.size());
  Blocks shared;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto rank = static_cast<size_t>(parts_[i].rank);
    const size_t begin = (rank * most + place[rank]++) * num_bytes;
    Block block(wide_, shapes);
    std::copy_n(received.begin() + static_cast<ptrdiff_t>(begin), num_bytes, block.bytes().begin());
    shared.emplace(i, std::move(block));
  }
  return shared;
}

void SequencePlan::RunSegment(Context& ctx, size_t i, const TensorView& o, StateViews states, const Content& content) {
  const Part& part = parts_[i];
  const std::vector<ConstTensorView> tensors = TensorsOf(part), before = Before(i, content.before);
  const PartNumbers numbers(of_.numbers, part);
  if (o.present()) {
    of_.forward(ctx, {tensors, before}, numbers.views, {OutputOf(o, part), states});
    return;
  }
  const ConstTensorView like = OutputOf(in_.d_o, part);
  const Owned scratch(like.dtype(), like.sizes());
  of_.forward(ctx, {tensors, before}, numbers.views, {scratch.view(), states});
}

void SequencePlan::RunForward(Context& ctx, const TensorView& o, Block* final, Content& content) {
  content.parts = parts_;
  const auto run = [&](size_t i) {
    if (!o.present() && final == nullptr) return;
    if (o.present() || i == last_)
      RunSegment(ctx, i, o, i == last_ && final != nullptr ? final->views() : StateViews(), content);
  };
  if (last_ == 0) {
    if (IsOwn(0)) run(0);
    return;
  }
  if (relay_) {
    for (const size_t i : own_) {  // one
      if (i > 0) {
        Block before(wide_, states_);
        ReceiveFrom(group_, before.bytes(), parts_[i - 1].rank);
        content.before[i] = std::move(before);
      }
      if (i == last_) {
        run(i);
        continue;
      }
      Block after(wide_, states_);
      RunSegment(ctx, i, o, after.views(), content);
      SendTo(group_, after.bytes(), parts_[i + 1].rank);
    }
    return;
  }
  Blocks own;
  for (const size_t i : own_) {
    if (i == last_) continue;
    Block block(wide_, SummaryShapes());
    const Segment summary = SummaryOf(block);
    if (i == 0) {  // these states are those after it: its transition is zero
      RunSegment(ctx, i, o, summary.state, content);
    } else {
      const std::vector<ConstTensorView> tensors = TensorsOf(parts_[i]);
      const PartNumbers numbers(of_.numbers, parts_[i]);
      of_.summarize(ctx, {tensors}, numbers.views, summary);
    }
    own[i] = std::move(block);
  }
  content.summaries = Share(std::move(own), SummaryShapes());
  for (size_t i = 1; i <= last_; ++i) {
    Block before(wide_, states_);
    const Segment segment = SummaryOf(content.summaries.at(i - 1));
    if (i == 1) {
      for (size_t s = 0; s < states_.size(); ++s) {
        if (states_[s]) Copy(segment.state[s], before.views()[s]);
      }
    } else {
      of_.apply(segment, content.before.at(i - 1).views(), before.views());
    }
    content.before[i] = std::move(before);
  }
  for (const size_t i : own_) {
    if (i > 0) run(i);
  }
}

void SequencePlan::Forward(Context& ctx) {
  int64_t wanted = 0, elsewhere = 0;
  const int owner = parts_[last_].rank;
  for (int r = 0; r < group_.size(); ++r) {
    wanted |= agreed_[static_cast<size_t>(r)][2];
    if (r != owner) elsewhere |= agreed_[static_cast<size_t>(r)][2];
  }
  Block final(wide_, states_);
  auto content = std::make_unique<Content>();
  RunForward(ctx, out_.o, wanted != 0 ? &final : nullptr, *content);
  if (elsewhere != 0) Broadcast(group_, final.bytes(), owner);
  for (size_t i = 0; i < out_.states.size(); ++i) {
    if (out_.states[i].present()) Copy(final.views()[i], out_.states[i]);
  }
  if (options_.states != nullptr) options_.states->content() = std::move(content);
}

Block SequencePlan::SumOfFinalGradients() {
  const int owner = parts_[last_].rank;
  int64_t given = 0, elsewhere = 0;
  for (int r = 0; r < group_.size(); ++r) {
    given |= agreed_[static_cast<size_t>(r)][2];
    if (r != owner) elsewhere |= agreed_[static_cast<size_t>(r)][2];
  }
  Shapes shapes = GradientShapes();
  for (size_t i = 0; i < shapes.size(); ++i) {
    if ((given >> i & 1) == 0) shapes[i].reset();
  }
  Block sum(wide_, shapes);
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i] && At(in_.d_final, i).present()) Copy(in_.d_final[i], sum.views()[i]);
  }
  if (elsewhere == 0) return sum;
  Bytes received = AllGather(group_, sum.bytes());
  const size_t num_bytes = sum.bytes().size();
  std::copy_n(received.begin(), num_bytes, sum.bytes().begin());
  const Shape all = {static_cast<int64_t>(num_bytes / SizeOf(wide_))};
  const TensorView total(sum.bytes().data(), wide_, all);
  for (int r = 1; r < group_.size(); ++r) {
    Add(ConstTensorView(received.data() + static_cast<size_t>(r) * num_bytes, wide_, all), total);
  }
  return sum;
}

void SequencePlan::RunBackward(Context& ctx, size_t i, StateViews d_after, bool tensors, StateViews d_before,
                               const Content& content) {
  const Part& part = parts_[i];
  const std::vector<ConstTensorView> inputs = TensorsOf(part), before = Before(i, content.before);
  const std::vector<ConstTensorView> d_final(d_after.begin(), d_after.end());
  const PartNumbers numbers(of_.numbers, part);
  std::vector<TensorView> gradients(tensors ? out_.gradients.size() : 0);
  std::map<size_t, Owned> terms;  // of sums over segments
  for (size_t j = 0; j < gradients.size(); ++j) {
    const TensorView& to = out_.gradients[j];
    if (!to.present()) continue;
    if (axes_[j] < 0 && summed_[j]) {
      gradients[j] = terms.emplace(j, Owned(to.dtype(), to.sizes())).first->second.view();
    } else {
      gradients[j] = Tokens(to, axes_[j], part.begin - begin_, part.end - begin_);
      summed_[j] = true;
    }
  }
  of_.backward(ctx, {inputs, before, OutputOf(in_.d_o, part), d_final}, numbers.views, {{}, d_before, gradients});
  for (const auto& [j, term] : terms) Add(term.view(), out_.gradients[j]);
}

void SequencePlan::Backward(Context& ctx) {
  Content computed;
  const Content* content = &computed;
  if (options_.states != nullptr) {
    content = options_.states->content().get();
    if (content == nullptr || content->parts != parts_) {
      Refuse(op_, "states", content == nullptr ? "are empty" : "are those of another call", "those of Forward");
    }
  } else {
    RunForward(ctx, {}, nullptr, computed);
  }
  const Block d_final = SumOfFinalGradients();
  const Shapes shapes = GradientShapes();
  // The gradients of the states before a segment that is not the first one are sent; those before it are the caller's.
  if (last_ == 0) {
    if (IsOwn(0)) RunBackward(ctx, 0, d_final.views(), true, out_.states, *content);
  } else if (relay_) {
    for (const size_t i : own_) {  // one
      Block received;
      if (i < last_) {
        received = Block(wide_, shapes);
        ReceiveFrom(group_, received.bytes(), parts_[i + 1].rank);
      }
      const StateViews d_after = i < last_ ? received.views() : d_final.views();
      if (i == 0) {
        RunBackward(ctx, i, d_after, true, out_.states, *content);
        continue;
      }
      Block d_before(wide_, shapes);
      RunBackward(ctx, i, d_after, true, d_before.views(), *content);
      SendTo(group_, d_before.bytes(), parts_[i - 1].rank);
    }
  } else {
    Blocks own;
    for (const size_t i : own_) {
      if (i == 0) continue;
      Block d_before(wide_, shapes);
      RunBackward(ctx, i, i == last_ ? d_final.views() : StateViews(), i == last_, d_before.views(), *content);
      own[i] = std::move(d_before);
    }
    const Blocks shared = Share(std::move(own), shapes);  // becomes the whole gradients, the last segment first
    for (size_t i = last_ - 1; i > 0; --i) {
      of_.apply_backward(SummaryOf(content->summaries.at(i)), content->before.at(i).views(), shared.at(i + 1).views(),
                         shared.at(i).views());
    }
    for (const size_t i : own_) {
      if (i == last_) continue;
      RunBackward(ctx, i, shared.at(i + 1).views(), true, i == 0 ? out_.states : StateViews(), *content);
    }
  }
  for (size_t j = 0; j < out_.gradients.size(); ++j) {
    if (!out_.gradients[j].present() || axes_[j] >= 0 || summed_[j]) continue;
    const Owned zeros(out_.gradients[j].dtype(), out_.gradients[j].sizes());
    Copy(zeros.view(), out_.gradients[j]);
  }
}

void Forward(Context& ctx, const Group& group, const Operation& operation, const Arguments& in, const Results& out,
             const SequenceOptions& sequence) {
  SequencePlan plan(group, operation, "Forward", in, out, sequence);
  plan.Start(ctx, false);
  plan.Forward(ctx);
}

void Backward(Context& ctx, const Group& group, const Operation& operation, const Arguments& in, const Results& out,
              const SequenceOptions& sequence) {
  SequencePlan plan(group, operation, "Backward", in, out, sequence);
  plan.Start(ctx, true);
  plan.Backward(ctx);
}

}  // namespace heed::distributed
