// Gradients of constants per channel: sums over tokens and sequences whose bits depend neither on the number of threads
// nor on the division into column blocks.
//
// Compiled once per SIMD target. A column block sums chunks of 128 tokens in the compute type, and chunks in f64. For
// each column block, the sequences then add their sums to the shared ones in ascending order.
#if defined(HEED_ENGINES_SCAN_CONSTANT_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_CONSTANT_SUMS_INL_H_
#undef HEED_ENGINES_SCAN_CONSTANT_SUMS_INL_H_
#else
#define HEED_ENGINES_SCAN_CONSTANT_SUMS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "heed/core/carver.h"
#include "heed/core/ticket.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// The sums of one column block of one sequence, in rows of the block's width.
template <class T>
struct ConstantSums {
  T* chunk;
  double* total;
  int64_t rows;

  void LayOut(int64_t num_rows, Carver& carver) {
    rows = num_rows;
    carver.Next(chunk, rows * static_cast<int64_t>(BlockWidth<T>()));
    carver.Next(total, rows * static_cast<int64_t>(BlockWidth<T>()));
  }
  size_t size() const { return static_cast<size_t>(rows) * BlockWidth<T>(); }
  T* Row(int64_t row) const { return chunk + static_cast<size_t>(row) * BlockWidth<T>(); }
  void Clear() const {
    std::fill_n(chunk, size(), T{0});
    std::fill_n(total, size(), 0.0);
  }
  HWY_ATTR void EndChunk() const {
    for (size_t i = 0; i < size(); ++i) {
      total[i] += static_cast<double>(chunk[i]);
      chunk[i] = T{0};
    }
  }
};

// The sums over all sequences, [rows][channels].
struct SharedSums {
  double* sums;
  TicketCounter* counters;  // one per column block, which orders its sequences
  int64_t rows, channels, blocks;

  void LayOut(int64_t num_rows, int64_t num_channels, int64_t num_blocks, Carver& carver) {
    rows = num_rows;
    channels = num_channels;
    blocks = num_blocks;
    carver.Next(sums, rows * channels);
    carver.Next(counters, blocks);
  }
  void Begin() const {
    std::fill_n(sums, rows * channels, 0.0);
    for (int64_t i = 0; i < blocks; ++i) new (counters + i) TicketCounter(0);
  }
  template <class T>
  void Add(const ConstantSums<T>& of, const ColumnBlock& block, int64_t sequence) const {
    WaitForTicket(counters[block.index], sequence);
    for (int64_t row = 0; row < rows; ++row) {
      const double* from = of.total + static_cast<size_t>(row) * BlockWidth<T>();
      double* to = sums + row * channels + block.first;
      for (int64_t i = 0; i < block.channels; ++i) to[i] += from[i];
    }
    ReleaseTicket(counters[block.index]);
  }
  // Stores rows [first, first + count), one per state.
  void Store(int64_t first, int64_t count, const Numbers& to) const {
    if (to.data == nullptr) return;
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t c = 0; c < channels; ++c) {
        StoreDouble(to.dtype, const_cast<void*>(to.data), c * to.channel + n * to.state,
                    sums[(first + n) * channels + c]);
      }
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_CONSTANT_SUMS_INL_H_
