// Rows through the state spaces of S4D: in chunks of tokens, or as the taps of a convolution.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SCAN_MODE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_MODE_ROWS_INL_H_
#undef HEED_ENGINES_SCAN_MODE_ROWS_INL_H_
#else
#define HEED_ENGINES_SCAN_MODE_ROWS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/modes-inl.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/rows-inl.h"
#include "heed/engines/scan/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// The scratch memory of one thread: rows of some channels, the tables of their modes, and sums of gradients.
template <class T>
struct ModeBuffers {
  size_t pitch;
  T *rows, *d_rows;
  std::array<ModeTables<T>, kRowChannels> tables;  // one per loaded channel
  std::array<ModeSums<T>, kRowChannels> sums;
  T *h, *p, *written;  // [Group + 1][2, width], as in ModesForward()
  ModeTrace<T> trace;

  void LayOut(const Problem& problem, bool backward, Carver& carver) {
    const int64_t most = MostTokens(problem);
    const size_t channels = ChannelsAtOnce(problem), width = PaddedModes(problem);
    pitch = RoundedUp<T>(static_cast<size_t>(most)) + Lanes<T>();
    const auto next = [&](T*& buffer, size_t elements) { carver.Next(buffer, static_cast<int64_t>(elements)); };
    next(rows, channels * pitch);
    for (size_t c = 0; c < channels; ++c) tables[c].LayOut(problem, backward, carver);
    for (T** row : {&h, &p, &written}) next(*row, (Group<T>() + 1) * 2 * width);
    if (!backward) return;
    next(d_rows, channels * pitch);
    for (size_t c = 0; c < channels; ++c) sums[c].LayOut(width, carver);
    trace.LayOut(width, most, carver);
  }
};

template <class T>
void FillTables(const Problem& p, int64_t channel, bool chunks, bool backward, ModeTables<T>& t) {
  FillTokenTables(p, channel, t);
  if (chunks) FillChunkTables(backward, t);
}

// Loads the state of a channel. Gradients in memory are those of the real and of the imaginary part, which is the
// complex conjugate of the gradient g that modes-inl.h uses.
template <class T>
HWY_INLINE void LoadState(const Numbers& x, int64_t sequence, int64_t channel, size_t modes, size_t width,
                          bool gradient, T* h) {
  std::fill_n(h, 2 * width, T{0});
  if (x.data == nullptr) return;
  const T* from = static_cast<const T*>(x.data) + sequence * x.sequence + channel * x.channel;
  for (size_t n = 0; n < modes; ++n) {
    const T* mode = from + static_cast<int64_t>(n) * x.state;
    h[n] = mode[0];
    h[width + n] = gradient ? -mode[x.part] : mode[x.part];
  }
}
template <class T>
HWY_INLINE void StoreState(const T* h, size_t modes, size_t width, bool gradient, int64_t sequence, int64_t channel,
                           const Numbers& x) {
  if (x.data == nullptr) return;
  T* to = static_cast<T*>(const_cast<void*>(x.data)) + sequence * x.sequence + channel * x.channel;
  for (size_t n = 0; n < modes; ++n) {
    T* mode = to + static_cast<int64_t>(n) * x.state;
    mode[0] = h[n];
    mode[x.part] = gradient ? -h[width + n] : h[width + n];
  }
}

template <class T>
class ModeBlock {
 public:
  ModeBlock(const Problem& p, ModeBuffers<T>& buffers, const ColumnBlock& block)
      : p_(p), b_(buffers), block_(block), modes_(static_cast<size_t>(p.states)), width_(PaddedModes(p)),
        has_chunks_(MostTokens(p) >= static_cast<int64_t>(kChunk)) {}

  void Forward(int64_t first, int64_t last) {
    ForChannels(p_, block_, [&](int64_t channel, size_t channels) {
      Prepare(channel, channels, false);
      for (int64_t i = first; i < last; ++i) {
        const Sequence& s = p_.sequences[static_cast<size_t>(i)];
        LoadRows(RowsOf(p_.x, s, channel, channels, false), b_.rows, b_.pitch);
        const bool outputs = p_.o.data != nullptr;
        for (size_t c = 0; c < channels; ++c) RowForward(s, channel, c, outputs, p_.initial, p_.final);
        if (outputs) StoreRows(b_.rows, b_.pitch, RowsOf(p_.o, s, channel, channels, false));
      }
    });
  }

  void Backward(const Gradients& g) {
    ForChannels(p_, block_, [&](int64_t channel, size_t channels) {
      Prepare(channel, channels, true);
      const bool states_alone = OfStatesAlone(g);
      for (const Sequence& s : p_.sequences) {
        LoadRows(RowsOf(p_.x, s, channel, channels, false), b_.rows, b_.pitch);
        LoadRows(RowsOf(g.d_o, s, channel, channels, false), b_.d_rows, b_.pitch);
        for (size_t c = 0; c < channels; ++c) {
          if (states_alone) {
            RowBackward<false>(g, s, channel, c, p_.initial, g.d_final, g.dinitial);
          } else {
            RowBackward<true>(g, s, channel, c, p_.initial, g.d_final, g.dinitial);
          }
        }
        if (g.dx.data == nullptr) continue;
        StoreRows(b_.d_rows, b_.pitch, RowsOf(g.dx, s, channel, channels, false));
      }
      StoreSums(g, channel, channels);
    });
  }

  // HeadBlock uses the following too. Prepare() is for channels [channel, channel + channels), and row c is of the c-th
  // of them.
  void Prepare(int64_t channel, size_t channels, bool backward) {
    for (size_t c = 0; c < channels; ++c) {
      FillTables(p_, channel + static_cast<int64_t>(c), has_chunks_, backward, b_.tables[c]);
      if (backward) b_.sums[c].Clear();
      dskip_[c] = 0;
    }
  }
  T* RowAt(size_t c) const { return b_.rows + c * b_.pitch; }
  T* GradientsAt(size_t c) const { return b_.d_rows + c * b_.pitch; }

  void RowForward(const Sequence& s, int64_t channel, size_t c, bool outputs, const Numbers& initial,
                  const Numbers& final) {
    const int64_t at = channel + static_cast<int64_t>(c);
    LoadState(initial, s.state, at, modes_, width_, false, b_.h);
    const auto forward = outputs ? &ModesForward<true, T> : &ModesForward<false, T>;
    forward(b_.tables[c], SkipAt<T>(p_, at), static_cast<size_t>(s.count), b_.h, b_.written, RowAt(c));
    StoreState(b_.h, modes_, width_, false, s.state, at, final);
  }

  // Without kGradients computes that of the initial state alone.
  template <bool kGradients>
  void RowBackward(const Gradients& g, const Sequence& s, int64_t channel, size_t c, const Numbers& initial,
                   const Numbers& d_final, const Numbers& dinitial) {
    const int64_t at = channel + static_cast<int64_t>(c);
    const auto tokens = static_cast<size_t>(s.count);
    if (g.dskip.data != nullptr) dskip_[c] += RowProduct<false>(RowAt(c), GradientsAt(c), tokens);
    LoadState(initial, s.state, at, modes_, width_, false, b_.h);
    LoadState(d_final, s.state, at, modes_, width_, true, b_.p);
    ModesBackward<kGradients>(b_.tables[c], SkipAt<T>(p_, at), tokens, RowAt(c), GradientsAt(c), b_.h, b_.p, b_.trace,
                              b_.sums[c]);
    StoreState(b_.p, modes_, width_, true, s.state, at, dinitial);
  }

  void StoreSums(const Gradients& g, int64_t channel, size_t channels) const {
    for (size_t c = 0; c < channels; ++c) {
      const int64_t at = channel + static_cast<int64_t>(c);
      StoreModeGradients(p_, g, at, b_.tables[c], b_.sums[c]);
      StoreNumber(g.dskip, at, 0, dskip_[c]);
    }
  }

 private:
  const Problem& p_;
  ModeBuffers<T>& b_;
  const ColumnBlock block_;
  const size_t modes_, width_;
  const bool has_chunks_;
  double dskip_[kRowChannels] = {};
};

// Taps for a convolution from modes, which are their impulse response; and the gradients of the modes from those of the
// taps.
template <class T>
struct ModeTaps {
  ModeTables<T> tables;
  ModeSums<T> sums;
  ModeTrace<T> trace;
  T *h, *p, *written, *impulse, *d_row;

  void LayOut(const Problem& problem, bool backward, Carver& carver) {
    const size_t width = PaddedModes(problem);
    const auto next = [&](T*& buffer, size_t elements) { carver.Next(buffer, static_cast<int64_t>(elements)); };
    tables.LayOut(problem, backward, carver);
    for (T** row : {&h, &p, &written}) next(*row, (Group<T>() + 1) * 2 * width);
    if (!backward) return;
    const auto taps = static_cast<size_t>(problem.num_taps);
    sums.LayOut(width, carver);
    trace.LayOut(width, problem.num_taps, carver);
    next(impulse, taps + kChunk);
    next(d_row, taps + kChunk);
  }

  // Computes the first `count` taps of a channel.
  void Fill(const Problem& problem, int64_t channel, size_t count, T* taps) {
    FillTables(problem, channel, count >= kChunk, false, tables);
    SetImpulse(count, taps);
    std::fill_n(h, 2 * tables.width, T{0});
    ModesForward<true>(tables, T{0}, count, h, written, taps);
  }

  void StoreGradients(const Problem& problem, const Gradients& g, int64_t channel, const double* dtaps) {
    const auto count = static_cast<size_t>(problem.num_taps);
    FillTables(problem, channel, count >= kChunk, true, tables);
    sums.Clear();
    SetImpulse(count, impulse);
    Narrow(dtaps, d_row, count);
    for (T* row : {h, p}) std::fill_n(row, 2 * tables.width, T{0});
    ModesBackward<true>(tables, T{0}, count, impulse, d_row, h, p, trace, sums);
    StoreModeGradients(problem, g, channel, tables, sums);
  }

 private:
  static void SetImpulse(size_t count, T* row) {
    std::fill_n(row, count, T{0});
    if (count > 0) row[0] = 1;
  }
};

template <class T>
void ModesRun(Context& ctx, const Problem& p) {
  using Buffers = ModeBuffers<T>;
  RowsForward<Buffers>(ctx, p, [&](Buffers& buffers, const ColumnBlock& block, int64_t first, int64_t last) {
    ModeBlock<T>(p, buffers, block).Forward(first, last);
  });
}

template <class T>
void ModesBackRun(Context& ctx, const Problem& p, const Gradients& g) {
  using Buffers = ModeBuffers<T>;
  RowsBackward<Buffers>(
      ctx, p, [&](Buffers& buffers, const ColumnBlock& block) { ModeBlock<T>(p, buffers, block).Backward(g); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_MODE_ROWS_INL_H_
