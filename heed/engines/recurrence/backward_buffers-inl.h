// Memory of the backward pass: of a thread or of a slot, and what tasks share.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_BACKWARD_BUFFERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_BACKWARD_BUFFERS_INL_H_
#undef HEED_ENGINES_RECURRENCE_BACKWARD_BUFFERS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_BACKWARD_BUFFERS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/ticket.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The padded size of rows of v and d_o, which have one more column for a normaliser.
template <class T>
size_t ValueRow(const Problem& p) {
  return Padded<T>(p.value_size + (p.normalize ? 1 : 0));
}

template <class T>
struct BackwardBuffers {
  BlockRows<T> rows;
  T *read, *write, *pairs, *reversed_pairs;  // tables (block-inl.h); only with decays
  T* value_pairs;                            // w_tj: [tiles of the sequence][TB][TB]
  T *v, *d_o, *dv;                           // [kBlock][value_row]
  T* dq;                                     // [kBlock][row], or [tokens of the sequence][row]
  T* dk;                                     // [kBlock][row]
  T* d_decay;                                // [kBlock][row], with decays per token and channel
  T* d_bonus;                                // [row]
  // Decays of columns need d_o with the decays from the beginnings of tiles, o of all tokens, the state from which o is
  // computed, and <S, D> per column.
  T *value_read, *outputs, *state, *value_suffix;
  T* denominators;               // [kBlock]
  T *inverses, *d_denominators;  // [tokens of the sequence]: 1 / d_t, and the gradient of z_t . q_t
  T *z, *scratch_row, *suffix;   // z_t: [kBlock][row]; [row]; <S, D>: [row]
  T* unmapped;                   // x of elementwise phi: [kBlock][row]
  T *d_state, *d_transposed;     // D [K][V], D^T [V or V + 1][K]
  T* boundary_states;            // S^T [V][K] after each block, or one for all blocks
  T *boundary_z, *boundary_m;    // z [K] and m before each block, and after the last
  // Random features: W in column blocks, its gradient, the gradient of y [kBlock][padded key_size], and [kBlock].
  T *projection, *d_projection, *d_raw, *feature_sums;
  int64_t boundary_state_size, boundary_z_size;

  // Gradients of decays per channel need dq of all blocks, and all gradients of decays need the boundary states. A
  // chunked kernel computes all states before the pass. Decays of random features have no gradient.
  static bool KeepsQueryGradients(const Problem& p) { return p.gate == Gate::kKey; }
  static bool StoresBoundaryStates(const Problem& p, bool in_chunks) {
    return in_chunks || (p.gate != Gate::kNone && !IsRandom(p.feature));
  }

  static int64_t Bytes(const Problem& p, int64_t columns, bool in_chunks) {
    return BackwardBuffers().LayOut(Holds::kAll, p, columns, in_chunks, nullptr);
  }
  void Init(const Problem& p, int64_t columns, bool in_chunks) { LayOut(Holds::kAll, p, columns, in_chunks, this); }

  T* BoundaryState(int64_t block) const { return boundary_states + block * boundary_state_size; }
  T* BoundaryZ(int64_t block) const { return boundary_z + block * boundary_z_size; }

  // Takes what blocks of a head share. Random features are not computed in stages.
  void ShareStates(const BackwardBuffers& first) {
    rows.ShareHead(first.rows);
    value_pairs = first.value_pairs;
    inverses = first.inverses;
    d_denominators = first.d_denominators;
    d_state = first.d_state;
    d_transposed = first.d_transposed;
    boundary_states = first.boundary_states;
    boundary_z = first.boundary_z;
    boundary_m = first.boundary_m;
    if (dq == nullptr) dq = first.dq;
  }

  // `columns` is the size of the largest part of a row of keys.
  int64_t LayOut(Holds holds, const Problem& p, int64_t columns, bool in_chunks, void* base) {
    Carver carver(base, (sizeof(BackwardBuffers) + 127) / 128 * 128);
    const auto row = static_cast<int64_t>(Padded<T>(p.features()));
    const auto value_row = static_cast<int64_t>(ValueRow<T>(p));
    const auto block = static_cast<int64_t>(kBlock), tile = static_cast<int64_t>(kTile);
    const bool gated = p.gate != Gate::kNone;
    int64_t blocks = 0;
    for (const Sequence& s : p.sequences) blocks = std::max(blocks, NumBlocks(s.count));
    boundary_state_size = StoresBoundaryStates(p, in_chunks) ? p.value_size * columns : 0;
    boundary_z_size = p.normalize ? row : 0;
    const bool of_head = holds != Holds::kSlot, keeps = KeepsQueryGradients(p);
    rows.LayOut(p, carver, kBlockTokens, of_head);
    carver.Next(read, gated ? block * row : 0);
    carver.Next(write, gated ? block * row : 0);
    carver.Next(pairs, gated ? block * tile : 0);
    carver.Next(reversed_pairs, gated ? block * tile : 0);
    carver.Next(value_pairs, gated && of_head ? blocks * block * tile : 0);
    carver.Next(v, block * value_row);
    carver.Next(d_o, block * value_row);
    carver.Next(dv, block * value_row);
    carver.Next(dq, !keeps ? block * row : of_head ? blocks * block * row : 0);
    if (keeps && !of_head) dq = nullptr;
    carver.Next(dk, block * row);
    carver.Next(d_decay, p.gate == Gate::kKey && !p.constant_decay ? block * row : 0);
    carver.Next(d_bonus, p.has_bonus ? row : 0);
    const bool by_value = p.has_value_decay;
    carver.Next(value_read, by_value ? block * value_row : 0);
    carver.Next(outputs, by_value ? blocks * block * value_row : 0);
    carver.Next(state, by_value ? p.features() * value_row : 0);
    carver.Next(value_suffix, by_value ? value_row : 0);
    carver.Next(denominators, block);
    carver.Next(inverses, p.normalize && of_head ? blocks * block : 0);
    carver.Next(d_denominators, p.normalize && of_head ? blocks * block : 0);
    carver.Next(z, p.normalize ? block * row : 0);
    carver.Next(scratch_row, row);
    carver.Next(suffix, row);
    const auto maps = [](Feature feature) { return IsElementwise(feature) && feature != Feature::kIdentity; };
    carver.Next(unmapped, maps(p.feature) || maps(p.key_feature) ? block * row : 0);
    carver.Next(d_state, of_head ? p.features() * value_row : 0);
    carver.Next(d_transposed, of_head ? (p.value_size + 1) * row : 0);
    const int64_t states = boundary_state_size != 0 ? blocks * boundary_state_size : p.value_size * columns;
    carver.Next(boundary_states, of_head ? states : 0);
    carver.Next(boundary_z, of_head ? (blocks + 1) * boundary_z_size : 0);
    carver.Next(boundary_m, of_head && p.running_max() ? blocks + 1 : 0);
    const bool random = IsRandom(p.feature);
    const auto raw_row = static_cast<int64_t>(Padded<T>(p.key_size));
    carver.Next(projection, random ? p.features() * raw_row : 0);
    carver.Next(d_projection, random ? p.features() * raw_row : 0);
    carver.Next(d_raw, random ? block * raw_row : 0);
    carver.Next(feature_sums, random ? block : 0);
    return carver.bytes();
  }
};

// Sums of several tasks.
template <class T>
struct SharedBuffers {
  // dq and dk summed over the value heads of a key head, [token][key head][row].
  T *dq = nullptr, *dk = nullptr;
  TicketCounter* counters = nullptr;  // [block][key head][part][dq or dk]
  // Scalar decays: sums of q .* dq - k .* dk over kPartColumns columns, [value head][unit][token] per sequence.
  double* decay_parts = nullptr;
  // Gradients of constants per value head, [sequence][value head][row]: of u, and of constant decays.
  double *d_bonus = nullptr, *d_decay = nullptr;
  // The gradient of the projection of random features, [M, K], to which tasks add in order.
  double* d_projection = nullptr;
  TicketCounter* projection_counter = nullptr;

  int64_t units = 0, parts = 1;
  size_t row = 0;
  std::vector<int64_t> first_token, first_block;  // per sequence, followed by the total

  SharedBuffers(const Problem& p, const TaskQueue& queue)
      : units((p.features() + kPartColumns - 1) / kPartColumns), parts(queue.parts()), row(Padded<T>(p.features())),
        first_token{0}, first_block{0} {
    for (const Sequence& s : p.sequences) {
      first_token.push_back(first_token.back() + s.count);
      first_block.push_back(first_block.back() + NumBlocks(s.count));
    }
  }

  int64_t Bytes(const Problem& p) const {
    SharedBuffers copy = *this;
    return copy.LayOut(p, nullptr);
  }
  void Init(const Problem& p, void* base) {
    LayOut(p, base);
    for (int64_t i = 0; counters != nullptr && i < NumCounters(p); ++i) new (&counters[i]) TicketCounter(0);
    if (d_bonus != nullptr) std::fill_n(d_bonus, NumConstants(p), 0.0);
    if (d_decay != nullptr) std::fill_n(d_decay, NumConstants(p), 0.0);
    if (!IsRandom(p.feature)) return;
    new (projection_counter) TicketCounter(0);
    std::fill_n(d_projection, p.projection_rows * p.key_size, 0.0);
  }

  int64_t TokenOf(const Problem& p, const Task& task, int64_t token) const {
    return (first_token[static_cast<size_t>(task.sequence)] + token) * p.key_heads + task.head / p.group();
  }
  // `which`: 0 for dq, 1 for dk.
  TicketCounter& CounterOf(const Problem& p, const Task& task, int64_t block, int64_t which) const {
    const int64_t of = first_block[static_cast<size_t>(task.sequence)] + block;
    const int64_t place = (of * p.key_heads + task.head / p.group()) * parts + task.part;
    return counters[2 * place + which];
  }
  // A value head's row of d_bonus or d_decay.
  double* ConstantsOf(double* sums, const Problem& p, int64_t sequence, int64_t head) const {
    return sums + (sequence * p.value_heads + head) * static_cast<int64_t>(row);
  }
  // A value head's part of decay_parts, [unit][token].
  double* DecayParts(const Problem& p, int64_t sequence, int64_t head) const {
    const auto s = static_cast<size_t>(sequence);
    return decay_parts + units * (first_token[s] * p.value_heads + head * p.sequences[s].count);
  }

 private:
  int64_t NumConstants(const Problem& p) const {
    return static_cast<int64_t>(p.sequences.size()) * p.value_heads * static_cast<int64_t>(row);
  }
  int64_t NumCounters(const Problem& p) const { return 2 * first_block.back() * p.key_heads * parts; }
  int64_t LayOut(const Problem& p, void* base) {
    Carver carver(base);
    const bool shares = p.group() > 1;
    const int64_t tokens = first_token.back();
    const int64_t sums = tokens * p.key_heads * static_cast<int64_t>(row);
    carver.Next(dq, shares ? sums : 0);
    carver.Next(dk, shares ? sums : 0);
    carver.Next(counters, shares ? NumCounters(p) : 0);
    const bool decays = p.gate == Gate::kScalar && !IsRandom(p.feature);
    carver.Next(decay_parts, decays ? tokens * p.value_heads * units : 0);
    const bool constant = p.gate == Gate::kKey && p.constant_decay;
    carver.Next(d_bonus, p.has_bonus ? NumConstants(p) : 0);
    carver.Next(d_decay, constant ? NumConstants(p) : 0);
    const bool random = IsRandom(p.feature);
    carver.Next(d_projection, random ? p.projection_rows * p.key_size : 0);
    carver.Next(projection_counter, random ? 1 : 0);
    if (!shares) counters = nullptr;
    if (!p.has_bonus) d_bonus = nullptr;
    if (!constant) d_decay = nullptr;
    return carver.bytes();
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_BACKWARD_BUFFERS_INL_H_
