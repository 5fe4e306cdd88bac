// Memory of the backward pass of delta rules: of a thread or of a slot, and what heads share.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_BUFFERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_BUFFERS_INL_H_
#undef HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_BUFFERS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_BUFFERS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/ticket.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/delta_rows-inl.h"
#include "heed/engines/recurrence/delta_token-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline int64_t DeltaBlocks(const Problem& p, int64_t tokens) {
  return (tokens + p.block_tokens() - 1) / p.block_tokens();
}

// The columns of a whole column block.
template <class T>
inline constexpr int64_t kDeltaBlockColumns = kDeltaBlockVectors * int64_t{hn::MaxLanes(hn::ScalableTag<T>())};

// Sums over lanes are those of whole column blocks, which parts of a head must not divide.
template <class T>
inline constexpr int64_t kDeltaPart = std::max(kPartColumns, kDeltaBlockColumns<T>);

// The gradients that are sums over the value heads of a key head.
enum DeltaSum { kOfQueries, kOfKeys, kOfReadKeys, kOfWriteKeys, kDeltaSums };

// The memory of a thread or of a slot.
template <class T>
struct DeltaBackwardBuffers {
  DeltaRows<T> rows;
  T *d_o, *d_written, *d_found, *dv;  // [writes][value_row]; d_written: de or dv, d_found: dx
  T* found;                           // [writes + 1][value_row], as in DeltaBlock
  T* sums[kDeltaSums];                // [writes + 1][row], the last row unused: dq, dk, dr or da, db
  T* later_sums[2];                   // dk and db of all column blocks but the first, in stages
  T *d_beta, *suffix;                 // [writes], [row]
  T* d_transposed;                    // D^T at the end of the block, [V][K]
  // A head has S and D, [K][V], S^T before each block, and e_t or x_t of all writes.
  T *state, *d_state;
  T *boundary_states, *kept;
  int64_t boundary_state_size;

  T* BoundaryState(int64_t block) const { return boundary_states + block * boundary_state_size; }

  void ShareStates(const DeltaBackwardBuffers& first) {
    state = first.state;
    d_state = first.d_state;
    boundary_states = first.boundary_states;
    kept = first.kept;
  }

  int64_t LayOut(Holds holds, const Problem& p, void* base) {
    Carver carver(base, (sizeof(DeltaBackwardBuffers) + 127) / 128 * 128);
    const auto row = static_cast<int64_t>(Padded<T>(p.key_size));
    const auto value_row = static_cast<int64_t>(Padded<T>(p.value_size));
    const int64_t writes = p.block_writes();
    boundary_state_size = p.value_size * row;
    rows.LayOut(p, carver, writes);
    const bool before = p.delta == Delta::kBeforeDecay;
    carver.Next(d_o, writes * value_row);
    carver.Next(d_written, writes * value_row);
    carver.Next(d_found, before ? writes * value_row : 0);
    carver.Next(dv, writes * value_row);
    carver.Next(found, (writes + 1) * value_row);
    for (T*& rows_of : sums) carver.Next(rows_of, (writes + 1) * row);
    const int64_t later = holds == Holds::kAll ? 0 : (value_row - 1) / kDeltaBlockColumns<T> + 1;
    carver.Next(later_sums[0], later * writes * row);
    carver.Next(later_sums[1], before ? later * writes * row : 0);
    carver.Next(d_beta, writes);
    carver.Next(suffix, row);
    carver.Next(d_transposed, boundary_state_size);
    if (holds == Holds::kSlot) return carver.bytes();
    int64_t blocks = 0;
    for (const Sequence& s : p.sequences) blocks = std::max(blocks, DeltaBlocks(p, s.count));
    carver.Next(state, p.key_size * value_row);
    carver.Next(d_state, p.key_size * value_row);
    carver.Next(boundary_states, blocks * boundary_state_size);
    carver.Next(kept, blocks * writes * value_row);
    return carver.bytes();
  }
};

// Sums over the value heads of a key head, [write][key head][row].
template <class T>
struct DeltaShared {
  T* sums[kDeltaSums] = {};
  TicketCounter* counters = nullptr;                    // [block][key head][DeltaSum]
  std::vector<int64_t> first_write{0}, first_block{0};  // per sequence, followed by the total

  explicit DeltaShared(const Problem& p) {
    for (const Sequence& s : p.sequences) {
      first_write.push_back(first_write.back() + s.count * p.writes);
      first_block.push_back(first_block.back() + DeltaBlocks(p, s.count));
    }
  }
  int64_t Bytes(const Problem& p) const {
    DeltaShared copy = *this;
    return copy.LayOut(p, nullptr);
  }
  void Init(const Problem& p, void* base) {
    LayOut(p, base);
    for (int64_t i = 0; p.group() > 1 && i < NumCounters(p); ++i) new (&counters[i]) TicketCounter(0);
  }
  TicketCounter& CounterOf(const Problem& p, const Task& task, int64_t block, DeltaSum of) const {
    const int64_t at = first_block[static_cast<size_t>(task.sequence)] + block;
    return counters[(at * p.key_heads + task.head / p.group()) * kDeltaSums + of];
  }
  // The row of a write in `sums`.
  int64_t RowOf(const Problem& p, const Task& task, int64_t write) const {
    return (first_write[static_cast<size_t>(task.sequence)] + write) * p.key_heads + task.head / p.group();
  }

 private:
  int64_t NumCounters(const Problem& p) const { return first_block.back() * p.key_heads * kDeltaSums; }
  int64_t LayOut(const Problem& p, void* base) {
    Carver carver(base);
    if (p.group() == 1) return 0;
    const auto row = static_cast<int64_t>(Padded<T>(p.key_size));
    for (T*& of : sums) carver.Next(of, first_write.back() * p.key_heads * row);
    carver.Next(counters, NumCounters(p));
    return carver.bytes();
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_BUFFERS_INL_H_
