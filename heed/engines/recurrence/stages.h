// Tasks of heads that are fewer than threads, which share a head's columns and prepare its rows once.
//
// Compiled into the kernels, for any target. A pass is one sweep over the blocks of a head or several. Each step of a
// sweep, a block, has three stages:
//
//   prepare   loads the block's rows and computes its tables, into one of kSlots slots of the head's memory
//   pass      passes a part of the state's columns over the block: a part's steps follow each other
//   finish    optional: what needs all columns
//
// A task is one step to prepare or to finish, or a part's pass over a window of steps, for which the columns of the
// state stay in one core's cache. Windows overlap: while one is passed over, the next is prepared and the one before is
// finished. Memory is that of the slots, whatever the number of tokens.
//
// Tasks wait only for tasks before them, which have been started (core/ticket.h). A thread alone may therefore run all
// of them in order.
#ifndef HEED_ENGINES_RECURRENCE_STAGES_H_
#define HEED_ENGINES_RECURRENCE_STAGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/core/ticket.h"
#include "heed/engines/kernel_list.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"

namespace heed::recurrence {

// A buffer of a thread or a head contains the rows of one block, the states of a head, or both. In stages all
// slots of a head have rows, and the first has the states.
enum class Holds { kAll, kFirstSlot, kSlot };

// The stages of a pass, and those which depend on the step before.
struct StagesOf {
  int64_t sweeps = 1;
  bool prepares_in_order = false;
  bool finishes = false, finishes_in_order = false;
  bool divided = false;  // parts of columns may also be tasks without stages, each of which prepares all rows
};

// One step of a sweep over the blocks of a head.
struct Step {
  Task task;
  int64_t sweep, index;  // of the sweep, and of the step in it
  int64_t slot;
};

class Stages {
 public:
  static constexpr int64_t kWindow = 4, kSlots = 2 * kWindow;
  static constexpr int64_t kMostSweeps = 2;

  // The columns of a head may be divided at multiples of `unit`. Blocks have `block_tokens` tokens.
  Stages(const Problem& p, int64_t threads, int64_t columns, int64_t unit, int64_t block_tokens, const StagesOf& of)
      : of_(of), value_heads_(p.value_heads), heads_(p.value_heads * static_cast<int64_t>(p.sequences.size())),
        columns_(of.divided ? columns : 0) {
    for (const Sequence& s : p.sequences) {
      steps_.push_back((s.count + block_tokens - 1) / block_tokens);
      windows_ = std::max(windows_, WindowsOf(steps_.back()));
      slots_ = std::clamp(steps_.back(), slots_, kSlots);
    }
    used_ = heads_ > 0 && heads_ < threads && windows_ > 1;
    parts_ = used_ ? NumParts(heads_, threads, columns, unit) : 1;
  }

  // True if there are fewer heads than threads, and more than one window, so that stages overlap. Otherwise each head
  // is one task, which runs its stages in order, or a task per part of its columns.
  bool used() const { return used_; }
  // The columns that tasks without stages divide; 0: none.
  int64_t columns() const { return columns_; }
  int64_t parts() const { return parts_; }
  int64_t heads() const { return heads_; }
  int64_t slots() const { return slots_; }
  int64_t sweeps() const { return of_.sweeps; }
  int64_t StepsOf(int64_t sequence) const { return steps_[static_cast<size_t>(sequence)]; }

  // The number of tasks.
  int64_t size() const { return of_.sweeps * Rounds() * TasksOfRound(); }

  Task TaskOf(int64_t head) const { return {head / value_heads_, head % value_heads_, 0, 1}; }

  // Bytes of counters, which must be initialised before tasks run.
  int64_t Bytes() const { return used_ ? heads_ * CountersOfHead() * static_cast<int64_t>(sizeof(Counter)) : 0; }
  void Init(void* counters) {
    counters_ = static_cast<Counter*>(counters);
    for (int64_t i = 0; used_ && i < heads_ * CountersOfHead(); ++i) new (&counters_[i]) Counter;
  }

  // Runs a task. `at(head, step)` returns an object with the head's task and the buffers of the step's slot, and
  //   Prepare(sweep, index), Pass(sweep, index), Finish(sweep, index)
  //   Begin(sweep), End(sweep): before the first step of a part in a sweep, and after the last
  template <class At>
  void Run(int64_t index, const At& at_step) const {
    const int64_t sweep = index / (Rounds() * TasksOfRound()), round = index / TasksOfRound() % Rounds();
    int64_t at = index % TasksOfRound();
    if (of_.finishes) {
      if (at < heads_ * kWindow) return Finish(at / kWindow, sweep, (round - 2) * kWindow + at % kWindow, at_step);
      at -= heads_ * kWindow;
    }
    if (at < heads_ * parts_) return Pass(at / parts_, sweep, round - 1, at % parts_, at_step);
    at -= heads_ * parts_;
    Prepare(at / kWindow, sweep, round * kWindow + at % kWindow, at_step);
  }

 private:
  // Counters on cache lines of their own.
  struct alignas(64) Counter {
    TicketCounter count{0};
  };

  static int64_t WindowsOf(int64_t steps) { return std::max<int64_t>(1, (steps + kWindow - 1) / kWindow); }
  int64_t StepsOfHead(int64_t head) const { return StepsOf(head / value_heads_); }
  // Windows are prepared in one round, passed over in the next, and finished in the one after that.
  int64_t Rounds() const { return windows_ + (of_.finishes ? 2 : 1); }
  int64_t TasksOfRound() const { return heads_ * (parts_ + (of_.finishes ? 2 : 1) * kWindow); }

  // For kMostSweeps, so that the memory does not depend on which gradients are wanted.
  int64_t CountersOfHead() const { return 1 + kMostSweeps * (kSlots + parts_); }
  // Counts the tasks of a head that have passed or finished.
  TicketCounter& DoneOf(int64_t head) const { return counters_[head * CountersOfHead()].count; }
  // Counts the stages of the steps in a slot.
  TicketCounter& SlotOf(int64_t head, int64_t sweep, int64_t step) const {
    return (&counters_[head * CountersOfHead() + 1 + sweep * (kSlots + parts_)])[step % slots_].count;
  }
  // Counts the windows that a part has passed over.
  TicketCounter& PartOf(int64_t head, int64_t sweep, int64_t part) const {
    return (&counters_[head * CountersOfHead() + 1 + sweep * (kSlots + parts_) + kSlots])[part].count;
  }
  // The count of a slot when a stage of a step may begin.
  int64_t Empty(int64_t step) const { return step / slots_ * (1 + parts_ + (of_.finishes ? 1 : 0)); }
  int64_t Prepared(int64_t step) const { return Empty(step) + 1; }
  int64_t Passed(int64_t step) const { return Prepared(step) + parts_; }

  // Waits until all tasks of earlier sweeps have ended.
  void WaitForSweeps(int64_t head, int64_t sweep) const {
    const int64_t steps = StepsOfHead(head);
    WaitForTicket(DoneOf(head), sweep * (WindowsOf(steps) * parts_ + (of_.finishes ? steps : 0)));
  }

  template <class At>
  void Prepare(int64_t head, int64_t sweep, int64_t step, const At& at) const {
    if (step >= StepsOfHead(head)) return;
    WaitForSweeps(head, sweep);
    TicketCounter& slot = SlotOf(head, sweep, step);
    WaitForTicket(slot, Empty(step));
    if (of_.prepares_in_order && step > 0) WaitForTicket(SlotOf(head, sweep, step - 1), Prepared(step - 1));
    const Step here = {TaskOf(head), sweep, step, step % slots_};
    at(head, here).Prepare(sweep, step);
    ReleaseTicket(slot);
  }

  template <class At>
  void Pass(int64_t head, int64_t sweep, int64_t window, int64_t part, const At& at) const {
    const int64_t steps = StepsOfHead(head), windows = WindowsOf(steps);
    if (window < 0 || window >= windows) return;
    WaitForSweeps(head, sweep);
    TicketCounter& passed = PartOf(head, sweep, part);
    WaitForTicket(passed, window);
    Step step = {TaskOf(head), sweep, window * kWindow, 0};
    step.task.part = part;
    step.task.parts = parts_;
    if (window == 0) at(head, step).Begin(sweep);
    for (; step.index < std::min(steps, (window + 1) * kWindow); ++step.index) {
      TicketCounter& slot = SlotOf(head, sweep, step.index);
      step.slot = step.index % slots_;
      WaitForTicket(slot, Prepared(step.index));
      at(head, step).Pass(sweep, step.index);
      ReleaseTicket(slot);
    }
    if (window + 1 == windows) at(head, step).End(sweep);
    ReleaseTicket(passed);
    ReleaseTicket(DoneOf(head));
  }

  template <class At>
  void Finish(int64_t head, int64_t sweep, int64_t step, const At& at) const {
    if (step < 0 || step >= StepsOfHead(head)) return;
    TicketCounter& slot = SlotOf(head, sweep, step);
    WaitForTicket(slot, Passed(step));
    if (of_.finishes_in_order && step > 0) WaitForTicket(SlotOf(head, sweep, step - 1), Empty(step - 1 + slots_));
    const Step here = {TaskOf(head), sweep, step, step % slots_};
    if constexpr (requires { at(head, here).Finish(sweep, step); }) at(head, here).Finish(sweep, step);
    ReleaseTicket(slot);
    ReleaseTicket(DoneOf(head));
  }

  StagesOf of_;
  bool used_ = false;
  int64_t value_heads_, heads_, columns_, parts_ = 1, slots_ = 1, windows_ = 1;
  std::vector<int64_t> steps_;  // per sequence
  Counter* counters_ = nullptr;
};

// Runs all stages of a head in order, for a task that owns the head.
template <class Head>
void InOrder(Head&& head, int64_t sweeps, int64_t steps) {
  for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
    head.Begin(sweep);
    for (int64_t step = 0; step < steps; ++step) {
      head.Prepare(sweep, step);
      head.Pass(sweep, step);
      if constexpr (requires { head.Finish(sweep, step); }) head.Finish(sweep, step);
    }
    head.End(sweep);
  }
}

// The buffers of all heads in stages, in one block of memory.
template <class Buffers>
class SlotBuffers {
 public:
  template <class... Arguments>
  explicit SlotBuffers(const Stages& stages, const Arguments&... arguments)
      : slots_(stages.slots()), heads_(stages.heads()),
        first_bytes_(Buffers().LayOut(Holds::kFirstSlot, arguments..., nullptr)),
        slot_bytes_(Buffers().LayOut(Holds::kSlot, arguments..., nullptr)) {}

  int64_t Bytes() const { return heads_ * BytesOfHead(); }

  template <class... Arguments>
  void Init(void* base, const Arguments&... arguments) {
    base_ = static_cast<char*>(base);
    for (int64_t head = 0; head < heads_; ++head) {
      Buffers& first = Of(head, 0);
      first.LayOut(Holds::kFirstSlot, arguments..., &first);
      for (int64_t slot = 1; slot < slots_; ++slot) {
        Of(head, slot).LayOut(Holds::kSlot, arguments..., &Of(head, slot));
        Of(head, slot).ShareStates(first);
      }
    }
  }
  Buffers& Of(int64_t head, int64_t slot) const {
    char* at = base_ + head * BytesOfHead() + (slot == 0 ? 0 : first_bytes_ + (slot - 1) * slot_bytes_);
    return *reinterpret_cast<Buffers*>(at);
  }

 private:
  int64_t BytesOfHead() const { return first_bytes_ + (slots_ - 1) * slot_bytes_; }

  int64_t slots_, heads_, first_bytes_, slot_bytes_;
  char* base_ = nullptr;
};

// A pass over all heads, in stages or without. Buffers::LayOut(holds, arguments..., base) lays out the memory
// of a thread or of a slot and returns its bytes; Buffers::ShareStates(first) takes what the first slot alone has.
template <class Buffers, class... Arguments>
engine::BackwardBytes BytesOfHeads(const Stages& stages, const Arguments&... arguments) {
  if (!stages.used()) return {Buffers().LayOut(Holds::kAll, arguments..., nullptr), 0};
  return {0, stages.Bytes() + SlotBuffers<Buffers>(stages, arguments...).Bytes()};
}

// `shared` is the memory of BytesOfHeads().shared. make(task, buffers, worker, in_stages) returns a head, whose
// functions Stages::Run() calls.
template <class Buffers, class Make, class... Arguments>
void RunHeads(Context& ctx, const Problem& p, Stages& stages, void* shared, const Make& make,
              const Arguments&... arguments) {
  if (stages.used()) {
    stages.Init(shared);
    SlotBuffers<Buffers> slots(stages, arguments...);
    slots.Init(static_cast<char*>(shared) + stages.Bytes(), arguments...);
    ctx.ParallelFor(stages.size(), [&](int64_t index, int worker) {
      stages.Run(index, [&](int64_t head, const Step& step) {
        return make(step.task, slots.Of(head, step.slot), worker, true);
      });
    });
    return;
  }
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<Buffers*>(ctx.Scratch(worker))->LayOut(Holds::kAll, arguments..., ctx.Scratch(worker));
  }
  const TaskQueue queue(p, ctx.num_threads(), stages.columns());
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) {
    const Task task = queue.At(index);
    auto head = make(task, *static_cast<Buffers*>(ctx.Scratch(worker)), worker, false);
    InOrder(head, stages.sweeps(), stages.StepsOf(task.sequence));
  });
}

// The bytes per thread of memory that threads share.
inline int64_t ShareOf(int64_t bytes, int64_t threads) { return (bytes + threads - 1) / threads; }

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_STAGES_H_
