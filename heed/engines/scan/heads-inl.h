// Heads of H3: the product of each key channel and each value channel passes through the modes of its head.
//
// Compiled once per SIMD target. The row x_t = k'_t[i] v_t[j] of a pair is computed where it is used, so that nothing
// is stored for all pairs and all tokens. With y = S4D(x) and dx the gradient of x,
//
//   o_j += q_i y,  dy = q_i do_j,  dq_i += y do_j,  dk'_i += v_j dx,  dv_j += k'_i dx
//
// are sums over pairs, in ascending order of the other channel.
#if defined(HEED_ENGINES_SCAN_HEADS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_HEADS_INL_H_
#undef HEED_ENGINES_SCAN_HEADS_INL_H_
#else
#define HEED_ENGINES_SCAN_HEADS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/scan/convolution-inl.h"
#include "heed/engines/scan/mode_rows-inl.h"
#include "heed/engines/scan/problem.h"
#include "heed/engines/scan/rows-inl.h"
#include "heed/engines/scan/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// RecurrentRows and ConvolvedRows compute S4D of a row of the c-th loaded head, by chunks of tokens or by a
// convolution. Callers write inputs to Inputs(c) and gradients of outputs to Gradients(c).
template <class T>
class RecurrentRows {
 public:
  using Buffers = ModeBuffers<T>;
  RecurrentRows(Context&, const Problem& p, Buffers& buffers, const ColumnBlock& block) : block_(p, buffers, block) {}

  void Start(int64_t head, size_t heads, bool backward) { block_.Prepare(head, heads, backward); }
  void Start(const Sequence&, int64_t, size_t) {}
  T* Inputs(size_t c) const { return block_.RowAt(c); }
  T* Gradients(size_t c) const { return block_.GradientsAt(c); }
  const T* Forward(const Sequence& s, int64_t head, size_t c, bool outputs, const Numbers& initial,
                   const Numbers& final) {
    block_.RowForward(s, head, c, outputs, initial, final);
    return block_.RowAt(c);
  }
  const T* Backward(const scan::Gradients& g, const Sequence& s, int64_t head, size_t c, const Numbers& initial,
                    const Numbers& d_final, const Numbers& dinitial) {
    block_.template RowBackward<true>(g, s, head, c, initial, d_final, dinitial);
    return block_.GradientsAt(c);
  }
  void StoreSums(const scan::Gradients& g, int64_t head, size_t heads) const { block_.StoreSums(g, head, heads); }

 private:
  ModeBlock<T> block_;
};

template <class T>
class ConvolvedRows {
 public:
  struct Buffers : ConvolutionBuffers<T> {
    T* gradients;

    void LayOut(const Problem& p, bool backward, Carver& carver) {
      ConvolutionBuffers<T>::LayOut(p, backward, carver);
      if (backward) carver.Next(gradients, static_cast<int64_t>(this->pitch));
    }
  };
  ConvolvedRows(Context& ctx, const Problem& p, Buffers& buffers, const ColumnBlock& block)
      : p_(p), b_(buffers), block_(ctx, p, buffers, block), shape_(p, 0) {}

  void Start(int64_t, size_t heads, bool backward) {
    if (backward) block_.ClearSums(heads);
  }
  void Start(const Sequence& s, int64_t head, size_t heads) {
    shape_ = RowShape<T>(p_, s.count);
    block_.Prepare(shape_, head, heads);
  }
  T* Inputs(size_t c) const { return block_.RowAt(c, shape_); }
  T* Gradients(size_t) const { return b_.gradients; }
  const T* Forward(const Sequence& s, int64_t head, size_t c, bool, const Numbers&, const Numbers&) {
    T* row = b_.rows + c * b_.pitch;
    block_.Complete(shape_, static_cast<size_t>(s.count), false, row);
    block_.Convolve(head, c, shape_, row);
    return row;
  }
  const T* Backward(const scan::Gradients& g, const Sequence& s, int64_t head, size_t c, const Numbers&, const Numbers&,
                    const Numbers&) {
    const auto count = static_cast<size_t>(s.count);
    const size_t before = shape_.inputs - count;
    T* d_row = b_.d_rows + c * b_.pitch;
    block_.Complete(shape_, count, false, b_.rows + c * b_.pitch);
    block_.Complete(shape_, count, true, d_row);
    std::reverse_copy(b_.gradients, b_.gradients + count, d_row + shape_.lead + before);
    scan::Gradients all = g;
    all.dx = p_.x;  // RowBackward() must compute it, even if dx is not wanted
    block_.RowBackward(all, head, c, shape_);
    std::reverse_copy(d_row + before, d_row + before + count, b_.gradients);
    return b_.gradients;
  }
  void StoreSums(const scan::Gradients& g, int64_t head, size_t heads) const { block_.StoreSums(g, head, heads); }

 private:
  const Problem& p_;
  Buffers& b_;
  RowConvolution<T> block_;
  RowShape<T> shape_;
};

// to = x y, or to += x y with kAdds.
template <bool kAdds, class T>
HWY_NOINLINE HWY_ATTR void MultiplyRows(const T* x, const T* y, size_t count, T* to) {
  const hn::ScalableTag<T> d;
  for (size_t i = 0; i < count; i += Lanes<T>()) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, y + i);
    hn::StoreU(kAdds ? hn::MulAdd(a, b, hn::LoadU(d, to + i)) : hn::Mul(a, b), d, to + i);
  }
}

template <class T>
struct HeadBuffers {
  size_t pitch = 0, lead = 0, tail = 0;
  T *q, *k, *v, *taps;  // keys follow the tail, which follows zeros
  T* o;
  // Only for the backward pass.
  T *keys, *dq, *dkeys, *dv;  // keys: k', dkeys: its gradients
  T* back;                    // a row of dkeys reversed, then of the gradients of k
  double *dtaps, *dskip;

  void LayOut(const Problem& p, bool backward, Carver& carver) {
    const auto num_taps = static_cast<size_t>(p.num_key_taps);
    const size_t rows = ChannelsAtOnce(p) * static_cast<size_t>(p.head_channels);
    tail = num_taps - 1;
    lead = RoundedUp<T>(num_taps);
    // Tokens follow a lead and precede a tail; the last vector of outputs may be partial.
    pitch = RoundedUp<T>(static_cast<size_t>(MostTokens(p)) + tail) + lead + (kRowVectors + 1) * Lanes<T>();
    const auto next = [&](auto*& buffer, size_t elements) { carver.Next(buffer, static_cast<int64_t>(elements)); };
    for (T** row : {&q, &k, &v, &o}) next(*row, rows * pitch);
    next(taps, rows * lead);
    if (!backward) return;
    for (T** row : {&keys, &dq, &dkeys, &dv}) next(*row, rows * pitch);
    next(back, pitch);
    next(dtaps, rows * num_taps);
    next(dskip, rows);
  }
};

// The scratch memory of one thread, with that of RecurrentRows or ConvolvedRows.
template <class T, template <class> class Rows>
struct HeadAndRowBuffers : HeadBuffers<T> {
  typename Rows<T>::Buffers rows;

  void LayOut(const Problem& p, bool backward, Carver& carver) {
    HeadBuffers<T>::LayOut(p, backward, carver);
    rows.LayOut(p, backward, carver);
  }
};

template <class T, template <class> class Rows>
class HeadBlock {
 public:
  HeadBlock(Context& ctx, const Problem& p, HeadAndRowBuffers<T, Rows>& buffers, const ColumnBlock& block)
      : p_(p), b_(buffers), block_(block), rows_(ctx, p, buffers.rows, block),
        channels_(static_cast<size_t>(p.head_channels)) {}

  void Forward(int64_t first, int64_t last) {
    ForChannels(p_, block_, [&](int64_t head, size_t heads) {
      Start(head, heads, false);
      for (int64_t i = first; i < last; ++i) {
        const Sequence& s = p_.sequences[static_cast<size_t>(i)];
        Load(s, head, heads, b_.k);
        StoreTail(s, head, heads);
        rows_.Start(s, head, heads);
        for (size_t c = 0; c < heads; ++c) HeadForward(s, head, c);
        Move<false>(p_.o, s, head, heads, b_.o);
      }
    });
  }

  void Backward(const Gradients& g) {
    ForChannels(p_, block_, [&](int64_t head, size_t heads) {
      const size_t rows = heads * channels_;
      Start(head, heads, true);
      std::fill_n(b_.dtaps, rows * static_cast<size_t>(p_.num_key_taps), 0.0);
      std::fill_n(b_.dskip, rows, 0.0);
      for (const Sequence& s : p_.sequences) {
        Load(s, head, heads, b_.k);
        Move<true>(g.d_o, s, head, heads, b_.o);
        std::copy_n(b_.k, rows * b_.pitch, b_.keys);
        rows_.Start(s, head, heads);
        for (size_t c = 0; c < heads; ++c) HeadBackward(g, s, head, c);
        for (size_t r = 0; r < rows; ++r) KeyBackward(static_cast<size_t>(s.count), ChannelAt(head, r), r);
        AddTailGradients(g.d_final_tail, s, head, heads);
        Move<false>(g.dinitial_tail, TailOf(s), head, heads, b_.dkeys);
        Move<false>(g.dx, s, head, heads, b_.dq);
        Move<false>(g.dkey, s, head, heads, b_.dkeys + b_.tail);
        Move<false>(g.dvalue, s, head, heads, b_.dv);
      }
      rows_.StoreSums(g, head, heads);
      for (size_t r = 0; r < rows; ++r) {
        const int64_t channel = ChannelAt(head, r);
        for (int64_t i = 0; i < p_.num_key_taps; ++i) {
          StoreNumber(g.dkey_taps, channel, i, DTapsAt(r)[i]);
        }
        StoreNumber(g.dkey_skip, channel, 0, b_.dskip[r]);
      }
    });
  }

 private:
  int64_t ChannelAt(int64_t head, size_t row) const { return head * p_.head_channels + static_cast<int64_t>(row); }
  T* At(T* rows, size_t c, size_t channel) const { return rows + (c * channels_ + channel) * b_.pitch; }
  double* DTapsAt(size_t r) const { return b_.dtaps + r * static_cast<size_t>(p_.num_key_taps); }

  // Tails are separate sequences, in ascending order of processing in both directions of time.
  Sequence TailOf(const Sequence& s) const { return {s.state, s.state, 0, p_.num_key_taps - 1}; }

  // Loads or stores the rows of all channels of these heads, at once if their strides are those of one larger head.
  template <bool kLoads>
  void Move(const Tokens& x, const Sequence& s, int64_t head, size_t heads, T* rows) const {
    if (x.data == nullptr) return;
    const bool flat = x.group == p_.head_channels * x.column;
    const size_t at_once = flat ? heads : 1;
    for (size_t c = 0; c < heads; c += at_once) {
      const int64_t at = (head + static_cast<int64_t>(c)) * x.group;
      Tokens of = x;
      of.data = static_cast<const char*>(x.data) + at * static_cast<int64_t>(SizeOf(x.dtype));
      const MatrixView view = RowsOf(of, s, 0, at_once * channels_, false);
      if constexpr (kLoads) {
        LoadRows(view, At(rows, c, 0), b_.pitch);
      } else {
        StoreRows(At(rows, c, 0), b_.pitch, view);
      }
    }
  }

  void Start(int64_t head, size_t heads, bool backward) {
    rows_.Start(head, heads, backward);
    const Numbers& x = p_.key_taps;
    const int64_t at = ChannelAt(head, 0) * x.channel;
    const char* data = static_cast<const char*>(x.data) + at * static_cast<int64_t>(SizeOf(x.dtype));
    LoadRows({data, x.dtype, x.channel, x.state, heads * channels_, static_cast<size_t>(p_.num_key_taps)}, b_.taps,
             b_.lead);
  }

  void Load(const Sequence& s, int64_t head, size_t heads, T* k) const {
    Move<true>(p_.x, s, head, heads, b_.q);
    Move<true>(p_.value, s, head, heads, b_.v);
    for (size_t r = 0; r < heads * channels_; ++r) std::fill_n(k + r * b_.pitch, b_.lead, T{0});
    // LoadRows() pads to whole vectors, so keys are loaded after the tail and overwrite its padding.
    if (b_.tail > 0) Move<true>(p_.initial_tail, TailOf(s), head, heads, k + b_.lead - b_.tail);
    Move<true>(p_.key, s, head, heads, k + b_.lead);
  }
  void StoreTail(const Sequence& s, int64_t head, size_t heads) const {
    const T* last = b_.k + b_.lead + s.count - b_.tail;
    Move<false>(p_.final_tail, TailOf(s), head, heads, const_cast<T*>(last));
  }

  // Replaces a row of keys by k', which begins at the row's first element.
  HWY_ATTR void ConvolveKeys(int64_t channel, size_t r, size_t count, T* row) const {
    ConvolveRow(b_.taps + r * b_.lead, KeySkipAt(channel), ShapeOf(count), row);
  }
  T KeySkipAt(int64_t channel) const {
    const Numbers& x = p_.key_skip;
    if (x.data == nullptr) return T{0};
    return static_cast<T>(LoadAsDouble(x.dtype, x.data, channel * x.channel));
  }
  RowShape<T> ShapeOf(size_t count) const {
    RowShape<T> shape;
    shape.taps = static_cast<size_t>(p_.num_key_taps);
    shape.lead = b_.lead;
    shape.inputs = count;
    return shape;
  }

  // The states of key channel i and value channel j.
  static Numbers PairOf(const Numbers& x, size_t i, size_t j) {
    Numbers pair = x;
    if (x.data == nullptr) return pair;
    const int64_t at = static_cast<int64_t>(i) * x.key + static_cast<int64_t>(j) * x.value;
    pair.data = static_cast<const char*>(x.data) + at * static_cast<int64_t>(SizeOf(x.dtype));
    return pair;
  }

  HWY_ATTR void HeadForward(const Sequence& s, int64_t head, size_t c) {
    const auto count = static_cast<size_t>(s.count);
    const bool outputs = p_.o.data != nullptr;
    for (size_t i = 0; i < channels_; ++i) {
      const size_t r = c * channels_ + i;
      ConvolveKeys(ChannelAt(head, r), r, count, At(b_.k, c, i));
    }
    for (size_t j = 0; j < channels_; ++j) {
      T* o = At(b_.o, c, j);
      if (outputs) std::fill_n(o, count, T{0});
      for (size_t i = 0; i < channels_; ++i) {
        MultiplyRows<false>(At(b_.k, c, i), At(b_.v, c, j), count, rows_.Inputs(c));
        const T* y = rows_.Forward(s, head, c, outputs, PairOf(p_.initial, i, j), PairOf(p_.final, i, j));
        if (outputs) MultiplyRows<true>(At(b_.q, c, i), y, count, o);
      }
    }
  }

  HWY_ATTR void HeadBackward(const Gradients& g, const Sequence& s, int64_t head, size_t c) {
    const auto count = static_cast<size_t>(s.count);
    for (size_t i = 0; i < channels_; ++i) {
      const size_t r = c * channels_ + i;
      ConvolveKeys(ChannelAt(head, r), r, count, At(b_.keys, c, i));
      for (T* sum : {b_.dq, b_.dkeys, b_.dv}) std::fill_n(At(sum, c, i), b_.pitch, T{0});
    }
    for (size_t j = 0; j < channels_; ++j) {
      const T *v = At(b_.v, c, j), *d_o = At(b_.o, c, j);
      for (size_t i = 0; i < channels_; ++i) {
        const T* k = At(b_.keys, c, i);
        if (g.dx.data != nullptr) {
          MultiplyRows<false>(k, v, count, rows_.Inputs(c));
          const T* y = rows_.Forward(s, head, c, true, PairOf(p_.initial, i, j), {});
          MultiplyRows<true>(d_o, y, count, At(b_.dq, c, i));
        }
        MultiplyRows<false>(k, v, count, rows_.Inputs(c));
        MultiplyRows<false>(At(b_.q, c, i), d_o, count, rows_.Gradients(c));
        const T* dx =
            rows_.Backward(g, s, head, c, PairOf(p_.initial, i, j), PairOf(g.d_final, i, j), PairOf(g.dinitial, i, j));
        MultiplyRows<true>(v, dx, count, At(b_.dkeys, c, i));
        MultiplyRows<true>(k, dx, count, At(b_.dv, c, j));
      }
    }
  }

  // Computes the gradients of taps from those of k', and replaces these by the gradients of the tail and of keys.
  HWY_ATTR void KeyBackward(size_t count, int64_t channel, size_t r) const {
    const T* k = b_.k + r * b_.pitch;
    T* d_row = b_.dkeys + r * b_.pitch;
    b_.dskip[r] += RowProduct<false>(k + b_.lead, d_row, count);
    RowShape<T> shape = ShapeOf(count);
    std::fill_n(b_.back, b_.pitch, T{0});
    std::reverse_copy(d_row, d_row + count, b_.back + b_.lead);
    AddTapGradients(k, b_.back, shape, DTapsAt(r));
    shape.inputs += b_.tail;
    ConvolveRow(b_.taps + r * b_.lead, KeySkipAt(channel), shape, b_.back);
    std::reverse_copy(b_.back, b_.back + shape.inputs, d_row);
  }
  void AddTailGradients(const Tokens& d_final, const Sequence& s, int64_t head, size_t heads) const {
    if (d_final.data == nullptr) return;
    Move<true>(d_final, TailOf(s), head, heads, b_.o);
    for (size_t r = 0; r < heads * channels_; ++r) {
      T* last = b_.dkeys + r * b_.pitch + s.count;
      for (size_t i = 0; i < b_.tail; ++i) last[i] += b_.o[r * b_.pitch + i];
    }
  }

  const Problem& p_;
  HeadAndRowBuffers<T, Rows>& b_;
  const ColumnBlock block_;
  Rows<T> rows_;
  const size_t channels_;
};

template <class F>
auto WithRows(const Problem& p, const F& f) {
  return p.has_taps ? f.template operator()<ConvolvedRows>() : f.template operator()<RecurrentRows>();
}

template <class T>
void HeadsRun(Context& ctx, const Problem& p) {
  if (p.has_taps) MakePlans<T>(p);
  WithRows(p, [&]<template <class> class Rows>() {
    using Buffers = HeadAndRowBuffers<T, Rows>;
    RowsForward<Buffers>(ctx, p, [&](Buffers& buffers, const ColumnBlock& block, int64_t first, int64_t last) {
      HeadBlock<T, Rows>(ctx, p, buffers, block).Forward(first, last);
    });
  });
}

template <class T>
void HeadsBackRun(Context& ctx, const Problem& p, const Gradients& g) {
  if (p.has_taps) MakePlans<T>(p);
  WithRows(p, [&]<template <class> class Rows>() {
    using Buffers = HeadAndRowBuffers<T, Rows>;
    RowsBackward<Buffers>(ctx, p, [&](Buffers& buffers, const ColumnBlock& block) {
      HeadBlock<T, Rows>(ctx, p, buffers, block).Backward(g);
    });
  });
}

template <class T>
int64_t HeadsScratchBytes(const Problem& p, bool backward) {
  return WithRows(p, [&]<template <class> class Rows>() { return RowBytes<HeadAndRowBuffers<T, Rows>>(p, backward); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_HEADS_INL_H_
