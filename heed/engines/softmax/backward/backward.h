// The backward pass: its inputs and outputs besides a Problem, and the order in which threads take its tasks.
#ifndef HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_H_
#define HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_H_

#include <array>
#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/ticket.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// The inputs and outputs of a backward pass besides a Problem, whose o and lse are read here. Each gradient has the
// dtype of its tensor; the gradient of lse is f64 where the problem is f64, else f32.
struct Gradients {
  Rows d_o;
  Rows d_lse;         // data null: all zero
  Rows dq, dk, dv;    // written; data null: not needed
  bool wide = false;  // dq, dk and dv are stored in the type of the computation
  Pairs dbias;        // written, laid out as the problem's bias; data null: not needed
  std::array<int64_t, 4> dbias_sizes = {};
  double* dsinks = nullptr;                  // added to: [Hq], or null
  double* dalibi = nullptr;                  // added to, laid out as the problem's slopes, or null
  double* drelative_bias = nullptr;          // added to: [Hq, span], or null
  HeadNumbers device_dsinks, device_dalibi;  // written; for numbers that are on the device
  Rows dlog_decay;                           // written, in the problem's dtype of log decays; data null: not needed
};

// Hands out the tasks. A task owns the gradients of `group_keys` keys of one key head, and the elements of the bias
// gradient at these keys: all heads and sequences that share a bias are in one task, one after the other. The queue
// hands out tasks so that every block of rows meets its groups in ascending order. A task that waits for its ticket in
// an ordered reduction therefore waits for a task that a thread has already taken, so there is no deadlock.
class GroupQueue {
 public:
  GroupQueue(const Problem& problem, const Gradients& gradients, int64_t group_keys);

  static constexpr int64_t kAll = -1;
  struct Task {
    int64_t sequence, key_head, group;  // or kAll of them, in one task
  };
  int64_t size() const { return begins_.back(); }
  Task At(int64_t index) const;

 private:
  bool all_sequences_, all_heads_, all_groups_;
  std::vector<int64_t> order_;   // sequence indices, in order of falling cost
  std::vector<int64_t> begins_;  // first task of each sequence, in the order of order_
  int64_t heads_;
};

// Returns whether the bias gradient is summed over keys row by row. A bias gradient is a sum over all axes that the
// bias is broadcast over; if one of them is the key axis, each row has one number, else pairs are added one by one.
inline bool BiasByRows(const Problem& problem, const Gradients& gradients) {
  if (gradients.dbias.data == nullptr) return false;
  bool many_keys = false;
  for (const Sequence& s : problem.sequences) many_keys |= s.num_keys > 1;
  return gradients.dbias_sizes[3] == 1 && many_keys;
}

// Numbers all rows (sequence, head, query) and all blocks (sequence, key head, block) of a problem.
struct RowIndex {
  RowIndex(const Problem& problem, int64_t lanes, bool fuse_heads);
  int64_t Row(const Problem& p, int64_t sequence, int64_t head, int64_t query) const {
    const auto s = static_cast<size_t>(sequence);
    return first_row[s] + head * p.sequences[s].num_queries + query;
  }
  int64_t rows() const { return first_row.back(); }
  int64_t num_tickets() const { return first_ticket.back(); }

  std::vector<int64_t> first_row, first_ticket;  // index of each sequence's first; the total comes last
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_H_
