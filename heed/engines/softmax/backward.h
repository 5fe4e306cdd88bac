// The backward pass: what it reads and writes beside a Problem, and in which order threads take its tasks.
#ifndef HEED_ENGINES_SOFTMAX_BACKWARD_H_
#define HEED_ENGINES_SOFTMAX_BACKWARD_H_

#include <array>
#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/turn.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// Beside a Problem, whose o and lse are read here. In the dtypes of what they are
// the gradients of, which for lse is f64 beside f64 and else f32.
struct Gradients {
  Rows d_o;
  Rows d_lse;         // data null: zero
  Rows dq, dk, dv;    // written; data null: not wanted
  bool wide = false;  // these three are in the type that is computed in
  Pairs dbias;        // the same, laid out as the problem's bias
  std::array<int64_t, 4> dbias_sizes = {};
  double* dsinks = nullptr;                  // added to: [Hq], or null
  double* dalibi = nullptr;                  // the same, as the problem's slopes
  HeadNumbers device_dsinks, device_dalibi;  // those of numbers on the device, written
  Rows dlog_decay;                           // written, in the problem's dtype of log decays; data null: not wanted
};

// A task owns the gradients of `group_keys` keys of a key head, and the biases of
// these keys: heads and sequences that share a bias are one task's, in turn. Tasks
// are taken in an order in which a block of rows meets its groups ascending, so
// that whoever waits for a turn waits for a task that has been taken.
class GroupQueue {
 public:
  GroupQueue(const Problem& problem, const Gradients& gradients, int64_t group_keys);

  static constexpr int64_t kAll = -1;
  struct Task {
    int64_t sequence, key_head, group;  // or kAll of them
  };
  int64_t size() const { return begins_.back(); }
  Task At(int64_t index) const;

 private:
  bool all_sequences_, all_heads_, all_groups_;
  std::vector<int64_t> order_;   // sequence indices, long ones first
  std::vector<int64_t> begins_;  // first task, by place in order_
  int64_t heads_;
};

// A gradient of the bias is a sum over whatever axes the bias repeats: over keys by
// rows, else pair by pair.
inline bool BiasByRows(const Problem& problem, const Gradients& gradients) {
  if (gradients.dbias.data == nullptr) return false;
  bool many_keys = false;
  for (const Sequence& s : problem.sequences) many_keys |= s.num_keys > 1;
  return gradients.dbias_sizes[3] == 1 && many_keys;
}

// Rows (sequence, head, query) and blocks (sequence, key head, block) counted
// through.
struct RowIndex {
  RowIndex(const Problem& problem, int64_t lanes, bool fuse_heads);
  int64_t Row(const Problem& p, int64_t sequence, int64_t head, int64_t query) const {
    const auto s = static_cast<size_t>(sequence);
    return first_row[s] + head * p.sequences[s].num_queries + query;
  }
  int64_t rows() const { return first_row.back(); }
  int64_t turns() const { return first_turn.back(); }

  std::vector<int64_t> first_row, first_turn;  // by sequence, and the total
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_H_
