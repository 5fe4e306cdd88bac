// The tasks of a recurrence: one per sequence and head, longest sequences first. If there are fewer than threads, they
// are divided by columns.
#ifndef HEED_ENGINES_RECURRENCE_TASKS_H_
#define HEED_ENGINES_RECURRENCE_TASKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence {

// Parts begin at multiples of this many columns: two vectors on the widest target, because a register tile of one
// vector is bound by loads.
inline constexpr int64_t kPartColumns = 32;

struct Task {
  int64_t sequence, head;
  int64_t part, parts;  // index and number of parts of the columns
  int64_t place = 0;    // rank of the sequence in order of processing
};

// The number of parts into which `columns` are divided, at multiples of `unit`, so that `whole` heads occupy all
// threads.
inline int64_t NumParts(int64_t whole, int64_t threads, int64_t columns, int64_t unit = kPartColumns) {
  const int64_t units = (columns + unit - 1) / unit;
  if (whole <= 0 || whole >= threads || units <= 1) return 1;
  return std::min((threads + whole - 1) / whole, units);
}

class TaskQueue {
 public:
  // `columns` may be divided among tasks; 0: none.
  TaskQueue(const Problem& p, int64_t threads, int64_t columns) : heads_(p.value_heads), order_(p.sequences.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return p.sequences[static_cast<size_t>(a)].count > p.sequences[static_cast<size_t>(b)].count;
    });
    parts_ = NumParts(heads_ * static_cast<int64_t>(order_.size()), threads, columns);
  }

  int64_t parts() const { return parts_; }
  int64_t size() const { return static_cast<int64_t>(order_.size()) * heads_ * parts_; }
  Task At(int64_t index) const {
    const int64_t whole = index / parts_;
    return {order_[static_cast<size_t>(whole / heads_)], whole % heads_, index % parts_, parts_, whole / heads_};
  }

 private:
  int64_t heads_, parts_ = 1;
  std::vector<int64_t> order_;
};

// True if at most the gradients of initial states are wanted. They have the same bits then.
inline bool OfStatesAlone(const Gradients& g) {
  for (const Rows* rows : {&g.dq, &g.dk, &g.dv, &g.d_log_decay, &g.d_input_gate, &g.d_log_value_decay, &g.d_bonus,
                           &g.d_projection, &g.d_read_key, &g.d_write_key, &g.d_beta, &g.d_erase, &g.d_write}) {
    if (rows->data != nullptr) return false;
  }
  return true;
}

inline int64_t NumBlocks(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// The first column of a part.
inline size_t FirstColumn(int64_t part, int64_t parts, size_t columns, size_t unit = kPartColumns) {
  const size_t units = (columns + unit - 1) / unit;
  const size_t first = units * static_cast<size_t>(part) / static_cast<size_t>(parts);
  return std::min(first * unit, columns);
}

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_TASKS_H_
