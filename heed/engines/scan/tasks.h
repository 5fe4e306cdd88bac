// The tasks of a scan: column blocks of channels of one group, and ranges of sequences.
#ifndef HEED_ENGINES_SCAN_TASKS_H_
#define HEED_ENGINES_SCAN_TASKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/engines/scan/problem.h"

namespace heed::scan {

// Consecutive channels of one group that a task computes together.
struct ColumnBlock {
  int64_t index;            // index among all column blocks
  int64_t group, in_group;  // in_group: index among those of the group
  int64_t first, channels;
};

class ColumnBlocks {
 public:
  ColumnBlocks(const Problem& p, size_t width)
      : width_(static_cast<int64_t>(width)), group_channels_(p.groups > 0 ? p.channels / p.groups : 0),
        per_group_((group_channels_ + width_ - 1) / width_), size_(per_group_ * p.groups) {}

  int64_t size() const { return size_; }
  int64_t per_group() const { return per_group_; }
  ColumnBlock At(int64_t index) const {
    const int64_t group = index / per_group_, in_group = index % per_group_;
    return {index, group, in_group, group * group_channels_ + in_group * width_,
            std::min(width_, group_channels_ - in_group * width_)};
  }

 private:
  int64_t width_, group_channels_, per_group_, size_;
};

inline int64_t NumTiles(int64_t tokens) { return (tokens + kTileTokens - 1) / kTileTokens; }
inline int64_t NumChunks(int64_t tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens; }

inline int64_t MostTokens(const Problem& p) {
  int64_t most = 0;
  for (const Sequence& s : p.sequences) most = std::max(most, s.count);
  return most;
}

// The division of a forward pass into tasks. A task processes several column blocks side by side, so that rows are read
// in longer runs, and several sequences in order, so that constants are prepared once; for single tokens, preparing
// them would be half the work. Both numbers are limited so that there are enough tasks for all threads.
struct TaskGrid {
  int64_t blocks = 1, sequences = 1;
  int64_t runs_of_blocks, runs_of_sequences;

  TaskGrid(const Problem& p, int64_t all_blocks, int64_t most_blocks, int64_t threads) {
    constexpr int64_t kTokens = 64, kTasksPerThread = 4;
    const auto all_sequences = static_cast<int64_t>(p.sequences.size());
    const int64_t most = all_sequences * all_blocks / (threads * kTasksPerThread);
    blocks = std::clamp<int64_t>(most, 1, most_blocks);
    sequences =
        std::clamp<int64_t>(kTokens / std::max<int64_t>(MostTokens(p), 1), 1, std::max<int64_t>(most / blocks, 1));
    runs_of_blocks = (all_blocks + blocks - 1) / blocks;
    runs_of_sequences = (all_sequences + sequences - 1) / sequences;
  }
  int64_t tasks() const { return runs_of_blocks * runs_of_sequences; }
};

// True if at most the gradients of initial states are wanted. They have the same bits then.
inline bool OfStatesAlone(const Gradients& g) {
  const auto absent = [](const auto&... of) { return (... && (of.data == nullptr)); };
  return absent(g.dx, g.ddelta, g.dgate, g.dlog_decay, g.dinput_gate, g.drecurrence_gate, g.dA, g.dbias, g.dskip) &&
         absent(g.dlambda, g.dtaps, g.dlog_dt, g.dlog_A_real, g.dA_imag, g.dB.tokens, g.dB.constants, g.dC.tokens) &&
         absent(g.dC.constants, g.dkey, g.dvalue, g.dkey_taps, g.dkey_skip);
}

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_TASKS_H_
