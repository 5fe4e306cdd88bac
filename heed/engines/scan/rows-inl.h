// Rows: the tokens of one channel of a sequence. Channels are processed one by one, with tokens in lanes.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SCAN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_ROWS_INL_H_
#undef HEED_ENGINES_SCAN_ROWS_INL_H_
#else
#define HEED_ENGINES_SCAN_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// Calls f(T()) with the compute type T.
template <class F>
auto WithCompute(const Problem& p, const F& f) {
  return p.dtype == DType::kF64 ? f(double{}) : f(float{});
}

// Channels per task: as many as a cache line has. With kHeads these are heads, which have several channels each.
inline constexpr size_t kRowChannels = 16;
inline size_t ChannelsOfTask(const Problem& p) {
  if (p.rule != Rule::kHeads) return kRowChannels;
  const auto channels = static_cast<size_t>(std::max<int64_t>(p.head_channels, 1));
  return (kRowChannels + channels - 1) / channels;
}
// The number of channels whose rows are loaded at once: several if channels are contiguous in memory.
inline size_t ChannelsAtOnce(const Problem& p) {
  const bool gathers = std::abs(p.x.token) != 1 && std::abs(p.x.column) == 1;
  return gathers ? std::min(ChannelsOfTask(p), static_cast<size_t>(p.channels)) : 1;
}

// Calls f(channel, channels) for the channels of a column block, as many as are loaded at once.
template <class F>
HWY_INLINE void ForChannels(const Problem& p, const ColumnBlock& block, const F& f) {
  const auto at_once = static_cast<int64_t>(ChannelsAtOnce(p));
  const int64_t end = block.first + block.channels;
  for (int64_t channel = block.first; channel < end; channel += at_once) {
    f(channel, static_cast<size_t>(std::min(at_once, end - channel)));
  }
}

// The view of a sequence whose rows are channels. With `reversed` tokens are reversed.
inline MatrixView RowsOf(const Tokens& x, const Sequence& s, int64_t channel, size_t channels, bool reversed) {
  const int64_t token = reversed ? s.first + s.count - 1 : s.first;
  const int64_t at = s.batch * x.batch + token * x.token + channel * x.column;
  const char* data = static_cast<const char*>(x.data);
  return {data + at * static_cast<int64_t>(SizeOf(x.dtype)),
          x.dtype,
          x.column,
          reversed ? -x.token : x.token,
          channels,
          static_cast<size_t>(s.count)};
}

// Calls f(block, first, last, worker) for column blocks and runs of sequences [first, last). Tables of channels are
// computed once per run, so there are only as many runs as occupy all threads.
template <class F>
void ForBlocksAndSequences(Context& ctx, const Problem& p, const F& f) {
  const ColumnBlocks blocks(p, ChannelsOfTask(p));
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  if (blocks.size() == 0 || sequences == 0) return;
  constexpr int64_t kTasksPerThread = 4;
  const int64_t wanted = (kTasksPerThread * ctx.num_threads() + blocks.size() - 1) / blocks.size();
  const int64_t runs = std::clamp<int64_t>(wanted, 1, sequences);
  ctx.ParallelFor(runs * blocks.size(), [&](int64_t task, int worker) {
    const int64_t run = task / blocks.size();
    f(blocks.At(task % blocks.size()), run * sequences / runs, (run + 1) * sequences / runs, worker);
  });
}

// The bytes of one thread's scratch memory.
template <class Buffers>
int64_t RowBytes(const Problem& p, bool backward) {
  Carver carver(nullptr);
  Buffers unused;
  unused.LayOut(p, backward, carver);
  return carver.bytes();
}

// Calls f(buffers, block, first, last) for column blocks and runs of sequences [first, last).
template <class Buffers, class F>
void RowsForward(Context& ctx, const Problem& p, const F& f) {
  ctx.ReserveScratch(RowBytes<Buffers>(p, false));
  ForBlocksAndSequences(ctx, p, [&](const ColumnBlock& block, int64_t first, int64_t last, int worker) {
    Carver carver(ctx.Scratch(worker));
    Buffers buffers;
    buffers.LayOut(p, false, carver);
    f(buffers, block, first, last);
  });
}

// Calls f(buffers, block) for column blocks, each with all sequences, over which its gradients are sums.
template <class Buffers, class F>
void RowsBackward(Context& ctx, const Problem& p, const F& f) {
  ctx.ReserveScratch(RowBytes<Buffers>(p, true));
  const ColumnBlocks blocks(p, ChannelsOfTask(p));
  ctx.ParallelFor(blocks.size(), [&](int64_t task, int worker) {
    Carver carver(ctx.Scratch(worker));
    Buffers buffers;
    buffers.LayOut(p, true, carver);
    f(buffers, blocks.At(task));
  });
}

// Returns the dot product of two rows: in the compute type over 128 tokens, then in f64. With kReversed, dy is
// reversed.
template <bool kReversed, class T>
HWY_NOINLINE HWY_ATTR double RowProduct(const T* x, const T* dy, size_t tokens) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = Lanes<T>();
  double total = 0;
  for (size_t begin = 0; begin < tokens; begin += kChunkTokens) {
    const size_t end = std::min<size_t>(begin + kChunkTokens, tokens);
    auto sum = hn::Zero(d);
    size_t t = begin;
    for (; t + N <= end; t += N) {
      const auto v = kReversed ? hn::Reverse(d, hn::LoadU(d, dy + tokens - t - N)) : hn::LoadU(d, dy + t);
      sum = hn::MulAdd(hn::LoadU(d, x + t), v, sum);
    }
    total += static_cast<double>(hn::ReduceSum(d, sum));
    for (; t < end; ++t) {
      total += static_cast<double>(x[t]) * static_cast<double>(dy[kReversed ? tokens - 1 - t : t]);
    }
  }
  return total;
}

template <class T>
T SkipAt(const Problem& p, int64_t channel) {
  if (p.skip.data == nullptr) return T{0};
  return static_cast<T>(LoadAsDouble(p.skip.dtype, p.skip.data, channel * p.skip.channel));
}

// Stores one number if it is wanted.
inline void StoreNumber(const Numbers& to, int64_t channel, int64_t state, double value) {
  if (to.data == nullptr) return;
  StoreDouble(to.dtype, const_cast<void*>(to.data), channel * to.channel + state * to.state, value);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_ROWS_INL_H_
