// Causal convolutions of rows: o_t = sum_s taps_s x_{t-s} + D x_t, one channel at a time, with tokens in lanes.
//
// Compiled once per SIMD target. A row, the widened tokens of one channel of a sequence, is stored after a lead of as
// many elements as the convolution looks back, so that an output replaces an input that no later output reads. Rows of
// gradients are reversed in time, so that the same function computes the gradients of inputs from them.
#if defined(HEED_ENGINES_SCAN_CONVOLUTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_CONVOLUTION_INL_H_
#undef HEED_ENGINES_SCAN_CONVOLUTION_INL_H_
#else
#define HEED_ENGINES_SCAN_CONVOLUTION_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/convolution.h"
#include "heed/engines/scan/fourier.h"
#include "heed/engines/scan/mode_rows-inl.h"
#include "heed/engines/scan/rows-inl.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/problem.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// True if the taps are computed from modes.
inline bool HasModes(const Problem& p) { return p.rule != Rule::kTaps; }

// The maximal number of vectors of outputs that share a broadcast tap.
inline constexpr size_t kRowVectors = 8;

// The shape of the rows of one sequence.
template <class T>
struct RowShape {
  size_t n = 0;       // length of the transforms; 0: direct convolution
  size_t taps = 0;    // taps that reach a token of the sequence
  size_t lead = 0;    // elements before the first input
  size_t inputs = 0;  // tokens, padded with zeros to whole blocks

  RowShape() = default;
  RowShape(const Problem& p, int64_t count)
      : n(static_cast<size_t>(TransformLength(p.num_taps, count))),
        taps(static_cast<size_t>(std::min(p.num_taps, count))), lead(n > 0 ? n : RoundedUp<T>(taps)),
        inputs(static_cast<size_t>(count)) {
    if (n > 0) inputs = (inputs + n - 1) / n * n;
  }
  size_t blocks() const { return n > 0 ? inputs / n : 0; }
  // The number of taps, or of elements of their spectrum.
  size_t prepared() const { return n > 0 ? 2 * n : taps; }
};

// The scratch memory of one thread, for any sequence of the problem.
template <class T>
struct ConvolutionBuffers {
  size_t pitch = 0;     // stride of rows: no power of two, so that rows do not share a cache set
  size_t prepared = 0;  // stride of the channels' taps or spectra
  T *rows, *taps;
  T* scratch;         // one spectrum
  ModeTaps<T> modes;  // if taps are computed from modes
  // Only for the backward pass.
  T *d_rows, *input_spectrum, *gradient_spectrum, *sum;
  double *dtaps, *dskip;

  void LayOut(const Problem& p, bool backward, Carver& carver) {
    size_t spectrum = 0;
    for (const Sequence& s : p.sequences) {
      const RowShape<T> shape(p, s.count);
      pitch = std::max(pitch, shape.lead + shape.inputs);
      prepared = std::max(prepared, shape.prepared());
      spectrum = std::max(spectrum, 2 * shape.n);
    }
    // The last vector of outputs may be partial.
    pitch = RoundedUp<T>(pitch) + (kRowVectors + 1) * Lanes<T>();
    prepared = RoundedUp<T>(prepared) + Lanes<T>();
    spectrum = std::max(spectrum, prepared);  // taps, before they are transformed
    const auto channels = ChannelsAtOnce(p);
    const auto next = [&](auto*& buffer, size_t elements) { carver.Next(buffer, static_cast<int64_t>(elements)); };
    next(rows, channels * pitch);
    next(taps, channels * prepared);
    next(scratch, spectrum);
    if (HasModes(p)) modes.LayOut(p, backward, carver);
    if (!backward) return;
    next(d_rows, channels * pitch);
    next(input_spectrum, spectrum);
    next(gradient_spectrum, spectrum);
    next(sum, spectrum);
    next(dtaps, kRowChannels * static_cast<size_t>(p.num_taps));
    next(dskip, kRowChannels);
  }
};

// Calls f(number of vectors as an integral constant, first vector), for kRowVectors vectors at a time as long as
// possible.
template <class F>
HWY_INLINE void ForVectorsAtOnce(size_t vectors, const F& f) {
  size_t v = 0;
  for (; v + kRowVectors <= vectors; v += kRowVectors) {
    f(std::integral_constant<size_t, kRowVectors>(), v);
  }
  if (vectors - v >= 4) f(std::integral_constant<size_t, 4>(), v), v += 4;
  if (vectors - v >= 2) f(std::integral_constant<size_t, 2>(), v), v += 2;
  if (vectors - v >= 1) f(std::integral_constant<size_t, 1>(), v);
}

// row[t] = skip x_t + sum_s taps[s] x_{t-s} with x_t = row[lead + t], in ascending order of t.
template <class T>
HWY_NOINLINE HWY_ATTR void ConvolveRow(const T* HWY_RESTRICT taps, T skip, const RowShape<T>& shape, T* row) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = Lanes<T>();
  ForVectorsAtOnce(RoundedUp<T>(shape.inputs) / N, [&](auto at_once, size_t first) HWY_ATTR {
    hn::Vec<decltype(d)> sum[at_once];
    const T* x = row + shape.lead + first * N;
    for (size_t v = 0; v < at_once; ++v) {
      const auto shared = hn::Mul(hn::Set(d, skip), hn::LoadU(d, x + v * N));
      sum[v] = skip == 0 ? hn::Zero(d) : shared;  // without a skip, 0 times infinity must not be NaN
    }
    for (size_t s = 0; s < shape.taps; ++s, --x) {
      const auto tap = hn::Set(d, taps[s]);
      for (size_t v = 0; v < at_once; ++v) {
        sum[v] = hn::MulAdd(tap, hn::LoadU(d, x + v * N), sum[v]);
      }
    }
    for (size_t v = 0; v < at_once; ++v) hn::StoreU(sum[v], d, row + (first + v) * N);
  });
}

// dtaps[s] += sum_t dy_t x_{t-s}, with x after the lead of its row, and dy reversed. Lanes are taps in descending
// order, which is the order of inputs in memory.
template <class T>
HWY_NOINLINE HWY_ATTR void AddTapGradients(const T* HWY_RESTRICT row, const T* HWY_RESTRICT d_row,
                                           const RowShape<T>& shape, double* HWY_RESTRICT dtaps) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = Lanes<T>();
  const T* x = row + shape.lead;
  const T* last = d_row + shape.lead + shape.inputs - 1;
  ForVectorsAtOnce(RoundedUp<T>(shape.taps) / N, [&](auto at_once, size_t first) HWY_ATTR {
    const size_t after = (first + at_once) * N;  // the taps
    for (size_t begin = 0; begin < shape.inputs; begin += kChunkTokens) {
      const size_t end = std::min<size_t>(begin + kChunkTokens, shape.inputs);
      hn::Vec<decltype(d)> sum[at_once];
      for (auto& s : sum) s = hn::Zero(d);
      for (size_t t = begin; t < end; ++t) {
        const auto dy = hn::Set(d, *(last - t));
        for (size_t v = 0; v < at_once; ++v) {
          sum[v] = hn::MulAdd(dy, hn::LoadU(d, x + t + 1 + v * N - after), sum[v]);
        }
      }
      HWY_ALIGN T lanes[kRowVectors * N];
      for (size_t v = 0; v < at_once; ++v) hn::Store(sum[v], d, lanes + v * N);
      for (size_t s = first * N; s < std::min(after, shape.taps); ++s) {
        dtaps[s] += static_cast<double>(lanes[after - 1 - s]);
      }
    }
  });
}

// convolution.cc instantiates both, for all files of the engine.
#ifndef HEED_TAPS_OF
#define HEED_TAPS_OF(EXTERN, T)                                          \
  EXTERN template void ConvolveRow(const T*, T, const RowShape<T>&, T*); \
  EXTERN template void AddTapGradients(const T*, const T*, const RowShape<T>&, double*);
#endif
HEED_TAPS_OF(extern, float)
HEED_TAPS_OF(extern, double)

// Convolves the rows of a column block, one sequence after the other.
template <class T>
class RowConvolution {
 public:
  RowConvolution(Context& ctx, const Problem& p, ConvolutionBuffers<T>& buffers, const ColumnBlock& block)
      : targets_(ctx.allowed_targets()), p_(p), b_(buffers), block_(block) {}

  HWY_ATTR void Forward(int64_t first, int64_t last) {
    ForChannels(p_, block_, [&](int64_t channel, size_t channels) HWY_ATTR {
      for (int64_t i = first; i < last; ++i) {
        const Sequence& s = p_.sequences[static_cast<size_t>(i)];
        const RowShape<T> shape(p_, s.count);
        if (s.count == 0) continue;
        Load(p_.x, s, channel, channels, shape, false, b_.rows);
        Prepare(shape, channel, channels);
        for (size_t c = 0; c < channels; ++c) Convolve(channel, c, shape, b_.rows + c * b_.pitch);
        Store(p_.o, s, channel, channels, shape, false, b_.rows);
      }
    });
  }

  HWY_ATTR void Backward(const Gradients& g) {
    ForChannels(p_, block_, [&](int64_t channel, size_t channels) HWY_ATTR {
      ClearSums(channels);
      for (const Sequence& s : p_.sequences) {
        const RowShape<T> shape(p_, s.count);
        if (s.count == 0) continue;
        Load(p_.x, s, channel, channels, shape, false, b_.rows);
        Load(g.d_o, s, channel, channels, shape, true, b_.d_rows);
        Prepare(shape, channel, channels);
        for (size_t c = 0; c < channels; ++c) RowBackward(g, channel, c, shape);
        if (g.dx.data != nullptr) Store(g.dx, s, channel, channels, shape, true, b_.d_rows);
      }
      StoreSums(g, channel, channels);
    });
  }

  // ConvolvedRows uses the following too.
  void ClearSums(size_t channels) const {
    std::fill_n(b_.dtaps, channels * static_cast<size_t>(p_.num_taps), 0.0);
    std::fill_n(b_.dskip, channels, 0.0);
  }
  void StoreSums(const Gradients& g, int64_t channel, size_t channels) const {
    for (size_t c = 0; c < channels; ++c) {
      const auto at = channel + static_cast<int64_t>(c);
      if (HasModes(p_)) {
        b_.modes.StoreGradients(p_, g, at, TapsOf(c));
      } else {
        for (int64_t i = 0; i < p_.num_taps; ++i) StoreNumber(g.dtaps, at, i, TapsOf(c)[i]);
      }
      StoreNumber(g.dskip, at, 0, b_.dskip[c]);
    }
  }

  // The memory for the inputs of row c. Complete() then zeros the lead of direct convolutions and the padding of the
  // last block, which comes first if the row is reversed.
  T* RowAt(size_t c, const RowShape<T>& shape) const { return b_.rows + c * b_.pitch + shape.lead; }
  void Complete(const RowShape<T>& shape, size_t count, bool reversed, T* row) const {
    if (shape.n == 0) std::fill_n(row, shape.lead, T{0});
    T* zeros = row + shape.lead + (reversed ? 0 : count);
    std::fill_n(zeros, shape.inputs - count, T{0});
  }
  // Prepares the taps, or their spectrum, for the length of this sequence, so that bits do not depend on other
  // sequences.
  HWY_ATTR void Prepare(const RowShape<T>& shape, int64_t channel, size_t channels) {
    const Prepared wanted = {channel, shape.n, shape.taps};
    if (ready_ == wanted) return;
    ready_ = wanted;
    for (size_t c = 0; c < channels; ++c) {
      T* to = b_.taps + c * b_.prepared;
      LoadTaps(channel + static_cast<int64_t>(c), shape.taps, shape.n > 0 ? b_.scratch : to);
      if (shape.n == 0) continue;
      std::fill(b_.scratch + shape.taps, b_.scratch + shape.n, T{0});
      Spectrum(targets_, PlanOf(shape), b_.scratch, nullptr, to);
    }
  }
  // Replaces a row of inputs by outputs.
  HWY_ATTR void Convolve(int64_t channel, size_t c, const RowShape<T>& shape, T* row) const {
    const T* taps = b_.taps + c * b_.prepared;
    const T skip = SkipOf(channel, c);
    if (shape.n == 0) return ConvolveRow(taps, skip, shape, row);
    const FourierPlan<T>& plan = PlanOf(shape);
    for (size_t i = 0; i < shape.blocks(); ++i) {
      TransformBlock(plan, shape, row, i, b_.scratch);
      scan::Convolve(targets_, plan, taps, b_.scratch, b_.scratch, row + i * shape.n);
      AddSkip(skip, shape, i, row);
    }
  }

  // Replaces a reversed row of gradients of outputs by gradients of inputs.
  HWY_ATTR void RowBackward(const Gradients& g, int64_t channel, size_t c, const RowShape<T>& shape) const {
    const T* row = b_.rows + c * b_.pitch;
    T* d_row = b_.d_rows + c * b_.pitch;
    if (g.dskip.data != nullptr) {
      b_.dskip[c] += RowProduct<true>(row + shape.lead, d_row + shape.lead, shape.inputs);
    }
    if (shape.n > 0) return BlocksBackward(g, c, SkipOf(channel, c), shape, row, d_row);
    if (WantsTaps(g)) AddTapGradients(row, d_row, shape, TapsOf(c));
    if (g.dx.data != nullptr) Convolve(channel, c, shape, d_row);
  }

 private:
  bool WantsTaps(const Gradients& g) const { return g.dtaps.data != nullptr || HasModes(p_); }
  double* TapsOf(size_t c) const { return b_.dtaps + c * static_cast<size_t>(p_.num_taps); }
  static const FourierPlan<T>& PlanOf(const RowShape<T>& shape) { return SharedPlan<T>(static_cast<int64_t>(shape.n)); }

  // Loads rows after their lead, padded with zeros, which come first if rows are reversed.
  HWY_ATTR void Load(const Tokens& x, const Sequence& s, int64_t channel, size_t channels, const RowShape<T>& shape,
                     bool reversed, T* rows) const {
    const auto count = static_cast<size_t>(s.count);
    const size_t before = reversed ? shape.inputs - count : 0;
    LoadRows(RowsOf(x, s, channel, channels, reversed), rows + shape.lead + before, b_.pitch);
    for (size_t c = 0; c < channels; ++c) Complete(shape, count, reversed, rows + c * b_.pitch);
  }
  HWY_ATTR void Store(const Tokens& to, const Sequence& s, int64_t channel, size_t channels, const RowShape<T>& shape,
                      bool reversed, const T* rows) const {
    const size_t before = reversed ? shape.inputs - static_cast<size_t>(s.count) : 0;
    StoreRows(rows + before, b_.pitch, RowsOf(to, s, channel, channels, reversed));
  }

  HWY_ATTR void LoadTaps(int64_t channel, size_t count, T* to) {
    if (HasModes(p_)) return b_.modes.Fill(p_, channel, count, to);
    const Numbers& x = p_.taps;
    const char* data = static_cast<const char*>(x.data);
    data += channel * x.channel * static_cast<int64_t>(SizeOf(x.dtype));
    LoadRows({data, x.dtype, 0, x.state, 1, count}, to, 0);
  }

  const T* Block(const RowShape<T>& shape, const T* row, size_t block) const {
    return row + shape.lead + block * shape.n;
  }
  void TransformBlock(const FourierPlan<T>& plan, const RowShape<T>& shape, const T* row, size_t block,
                      T* spectrum) const {
    const T* x = Block(shape, row, block);
    Spectrum(targets_, plan, x, block > 0 ? x - shape.n : nullptr, spectrum);
  }

  T SkipOf(int64_t channel, size_t c) const { return SkipAt<T>(p_, channel + static_cast<int64_t>(c)); }
  // Adds D x to block i, before the next block's outputs overwrite its inputs.
  HWY_ATTR void AddSkip(T skip, const RowShape<T>& shape, size_t i, T* row) const {
    if (p_.skip.data == nullptr) return;
    const hn::ScalableTag<T> d;
    const T* x = Block(shape, row, i);
    T* y = row + i * shape.n;
    for (size_t t = 0; t < shape.n; t += Lanes<T>()) {
      hn::StoreU(hn::MulAdd(hn::Set(d, skip), hn::LoadU(d, x + t), hn::LoadU(d, y + t)), d, y + t);
    }
  }

  // RowBackward() by transforms. The product of block i of the reversed gradients and block blocks - 1 - i of the
  // inputs has the gradients of taps, reversed.
  HWY_ATTR void BlocksBackward(const Gradients& g, size_t c, T skip, const RowShape<T>& shape, const T* row,
                               T* d_row) const {
    const FourierPlan<T>& plan = PlanOf(shape);
    const T* taps = b_.taps + c * b_.prepared;
    double* dtaps = TapsOf(c);
    const size_t blocks = shape.blocks();
    for (size_t i = 0; i < blocks; ++i) {
      TransformBlock(plan, shape, d_row, i, b_.gradient_spectrum);
      if (WantsTaps(g)) {
        if (i % kBlocksPerSum == 0) std::fill_n(b_.sum, 2 * shape.n, T{0});
        Spectrum(targets_, plan, Block(shape, row, blocks - 1 - i), nullptr, b_.input_spectrum);
        AddProduct(targets_, plan, b_.gradient_spectrum, b_.input_spectrum, b_.sum);
        if (i % kBlocksPerSum == kBlocksPerSum - 1 || i == blocks - 1) {
          scan::Convolve(targets_, plan, b_.sum, nullptr, b_.sum, b_.scratch);
          for (size_t s = 0; s < shape.taps; ++s) {
            dtaps[s] += static_cast<double>(b_.scratch[shape.n - 1 - s]);
          }
        }
      }
      if (g.dx.data == nullptr) continue;
      scan::Convolve(targets_, plan, taps, b_.gradient_spectrum, b_.gradient_spectrum, d_row + i * shape.n);
      AddSkip(skip, shape, i, d_row);
    }
  }

  // The channel, transform length and number of taps of the taps in memory.
  struct Prepared {
    int64_t channel = -1;
    size_t n = 0, taps = 0;
    bool operator==(const Prepared&) const = default;
  };

  const int64_t targets_;
  const Problem& p_;
  ConvolutionBuffers<T>& b_;
  const ColumnBlock block_;
  Prepared ready_;
};

// Computes the roots of unity before threads start.
template <class T>
void MakePlans(const Problem& p) {
  for (const Sequence& s : p.sequences) {
    const int64_t n = TransformLength(p.num_taps, s.count);
    if (n > 0) SharedPlan<T>(n);
  }
}

template <class T>
void ConvolutionRun(Context& ctx, const Problem& p) {
  MakePlans<T>(p);
  using Buffers = ConvolutionBuffers<T>;
  RowsForward<Buffers>(ctx, p, [&](Buffers& buffers, const ColumnBlock& block, int64_t first, int64_t last) {
    RowConvolution<T>(ctx, p, buffers, block).Forward(first, last);
  });
}

template <class T>
void ConvolutionBackRun(Context& ctx, const Problem& p, const Gradients& g) {
  MakePlans<T>(p);
  using Buffers = ConvolutionBuffers<T>;
  RowsBackward<Buffers>(ctx, p, [&](Buffers& buffers, const ColumnBlock& block) {
    RowConvolution<T>(ctx, p, buffers, block).Backward(g);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_CONVOLUTION_INL_H_
