// State spaces with constant modes (S4D): chunks of 16 tokens with tables per channel.
//
// Compiled once per SIMD target. With X the state before a chunk, u its inputs and U = sum_j a^(15-j) u_j:
//
//   y_i = sum_{l <= i} K_l u_{i-l} + Re(2 c a^(i+1) X),  X <- a^16 X + b U,  K_l = Re(2 c b a^l)
//
// summed over modes. This takes two products per mode and token, with tokens or modes in lanes. Tokens after the last
// whole chunk are processed one by one. The gradient of a complex number z is the g for which Re(g dz) is the change of
// the loss. With P the gradient of the state after a chunk, V = sum_i a^i dy_i and R_l = sum_k dy_k u_{k-l}:
//
//   du_i = sum_{k >= i} K_{k-i} dy_k + Re(b a^(15-i) P),  P <- a^16 P + 2 c a V
//   g_a = 16 a^15 sum P X + b sum P U' + 2 c sum X V' + 2 b c sum_l l a^(l-1) R_l
//   g_b = sum P U + 2 c sum_l a^l R_l,  g_c = 2 a sum X V + 2 b sum_l a^l R_l
//
// where the sums are over chunks, and U' and V' are the derivatives of U and of a V with respect to a. Only these five
// sums and R are accumulated per chunk.
#if defined(HEED_ENGINES_SCAN_MODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_MODES_INL_H_
#undef HEED_ENGINES_SCAN_MODES_INL_H_
#else
#define HEED_ENGINES_SCAN_MODES_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/carver.h"
#include "heed/engines/scan/discretisation-inl.h"
#include "heed/engines/scan/matrix_view-inl.h"
#include "heed/engines/scan/problem.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

inline constexpr size_t kChunk = 16;
inline constexpr size_t kChunksPerSum = kChunkTokens / kChunk;

// The number of modes of a table's row, padded with zeros.
inline size_t PaddedModes(const Problem& p) { return (static_cast<size_t>(p.states) + kChunk - 1) / kChunk * kChunk; }

// The tables of one channel. Rows of modes are `width` real parts, then `width` imaginary parts.
template <class T>
struct ModeTables {
  size_t modes, width;
  ChannelModes exact;  // a, b, c and z in double
  T *a, *b, *c;        // [2, width]; c: 2 C
  T* jump;             // a^16: [2, width]
  T* returns;          // 2 c a: [2, width]
  T* taps;             // 16 zeros, then K
  T* reads;            // Re and -Im of 2 c a^(i+1): [modes, 2, 16]
  T* powers;           // a^l: [16, 2, width]
  // Only for the backward pass.
  T* reversed_taps;  // K reversed, then 16 zeros
  T* writes;         // Re and -Im of b a^(15-i): [modes, 2, 16]
  T* slopes;         // l a^(l-1): [17, 2, width]

  void LayOut(const Problem& p, bool backward, Carver& carver) {
    modes = static_cast<size_t>(p.states);
    width = PaddedModes(p);
    exact.LayOut(width, carver);
    const auto next = [&](T*& buffer, size_t elements) { carver.Next(buffer, static_cast<int64_t>(elements)); };
    for (T** row : {&a, &b, &c, &jump, &returns}) next(*row, 2 * width);
    next(taps, 2 * kChunk);
    next(reads, 2 * kChunk * width);
    next(powers, 2 * kChunk * width);
    if (!backward) return;
    next(reversed_taps, 2 * kChunk);
    next(writes, 2 * kChunk * width);
    next(slopes, 2 * (kChunk + 1) * width);
  }
};

template <class T>
HWY_INLINE void Narrow(const double* from, T* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// Computes the tables for single tokens.
template <class T>
void FillTokenTables(const Problem& p, int64_t channel, ModeTables<T>& t) {
  Discretise(p, channel, t.exact);
  Narrow(t.exact.a, t.a, 2 * t.width);
  Narrow(t.exact.b, t.b, 2 * t.width);
  for (size_t i = 0; i < 2 * t.width; ++i) t.c[i] = static_cast<T>(2 * t.exact.c[i]);
}

// The powers a^0 to a^15 of one mode.
struct Powers {
  double re[kChunk], im[kChunk];
};

// Computes powers by repeated squaring, so that the powers of one step are independent.
HWY_INLINE void PowersOf(double a_re, double a_im, Powers& out) {
  out.re[0] = 1;
  out.im[0] = 0;
  double re = a_re, im = a_im;  // a^(2^k)
  for (size_t n = 1; n < kChunk; n *= 2) {
    for (size_t i = 0; i < n; ++i) {
      out.re[n + i] = out.re[i] * re - out.im[i] * im;
      out.im[n + i] = out.re[i] * im + out.im[i] * re;
    }
    const double square = re * re - im * im;
    im = 2 * re * im;
    re = square;
  }
}

template <class T>
HWY_NOINLINE HWY_ATTR void FillChunkTables(bool backward, ModeTables<T>& t) {
  double taps[kChunk] = {};
  const ChannelModes& exact = t.exact;
  std::fill_n(t.powers, 2 * kChunk * t.width, T{0});
  if (backward) std::fill_n(t.slopes, 2 * (kChunk + 1) * t.width, T{0});
  std::fill_n(t.jump, 2 * t.width, T{0});
  std::fill_n(t.returns, 2 * t.width, T{0});
  for (size_t n = 0; n < t.modes; ++n) {
    const size_t m = t.width + n;
    Powers power;
    PowersOf(exact.a[n], exact.a[m], power);
    // 2 c a, and 2 c b.
    const double read_re = 2 * (exact.c[n] * exact.a[n] - exact.c[m] * exact.a[m]);
    const double read_im = 2 * (exact.c[n] * exact.a[m] + exact.c[m] * exact.a[n]);
    const double tap_re = 2 * (exact.c[n] * exact.b[n] - exact.c[m] * exact.b[m]);
    const double tap_im = 2 * (exact.c[n] * exact.b[m] + exact.c[m] * exact.b[n]);
    T* reads = t.reads + 2 * kChunk * n;
    for (size_t i = 0; i < kChunk; ++i) {
      taps[i] += tap_re * power.re[i] - tap_im * power.im[i];
      reads[i] = static_cast<T>(read_re * power.re[i] - read_im * power.im[i]);
      reads[kChunk + i] = static_cast<T>(-(read_re * power.im[i] + read_im * power.re[i]));
    }
    for (size_t i = 0; i < kChunk; ++i) {
      t.powers[2 * i * t.width + n] = static_cast<T>(power.re[i]);
      t.powers[2 * i * t.width + m] = static_cast<T>(power.im[i]);
    }
    t.returns[n] = static_cast<T>(read_re);
    t.returns[m] = static_cast<T>(read_im);
    const double last_re = power.re[kChunk - 1], last_im = power.im[kChunk - 1];
    t.jump[n] = static_cast<T>(last_re * exact.a[n] - last_im * exact.a[m]);
    t.jump[m] = static_cast<T>(last_re * exact.a[m] + last_im * exact.a[n]);
    if (!backward) continue;
    T* writes = t.writes + 2 * kChunk * n;
    for (size_t i = 0; i < kChunk; ++i) {
      const size_t l = kChunk - 1 - i;
      writes[i] = static_cast<T>(exact.b[n] * power.re[l] - exact.b[m] * power.im[l]);
      writes[kChunk + i] = static_cast<T>(-(exact.b[n] * power.im[l] + exact.b[m] * power.re[l]));
      const auto order = static_cast<double>(i + 1);
      t.slopes[2 * (i + 1) * t.width + n] = static_cast<T>(order * power.re[i]);
      t.slopes[2 * (i + 1) * t.width + m] = static_cast<T>(order * power.im[i]);
    }
  }
  std::fill_n(t.taps, kChunk, T{0});
  for (size_t i = 0; i < kChunk; ++i) t.taps[kChunk + i] = static_cast<T>(taps[i]);
  if (!backward) return;
  std::fill_n(t.reversed_taps + kChunk, kChunk, T{0});
  for (size_t i = 0; i < kChunk; ++i) t.reversed_taps[kChunk - 1 - i] = static_cast<T>(taps[i]);
}

// The number of vectors of a chunk's tokens.
template <class T>
constexpr size_t ChunkVectors() {
  return Lanes<T>() < kChunk ? kChunk / Lanes<T>() : 1;
}
template <class T>
using ChunkTag = hn::CappedTag<T, kChunk>;

// The number of chunks that are computed together and share the loads from tables, which would be the bound for one
// chunk. The states of a group are sums over inputs, so they are known before its outputs.
template <class T>
constexpr size_t Group() {
  return hn::MaxLanes(hn::ScalableTag<T>()) * sizeof(T) >= 64 ? 4 : 1;
}

// Computes the outputs of G chunks: y_i = skip x_i + sum_j taps[i - j] x_j + Re(sum over modes n of table[n][i] z_n),
// with states z [G, 2, width]; or, with kGradient, the gradients of inputs from those of outputs and of states. x_j
// does not reach tokens before j (for gradients, after j), even if it is NaN. skip x is added last, because it may be
// much larger than the sums, to which every addition would add a rounding of that size.
template <size_t G, bool kGradient, class T>
HWY_INLINE void ChunkOutputs(const ModeTables<T>& t, const T* HWY_RESTRICT x, T skip, const T* taps,
                             const T* HWY_RESTRICT table, const T* HWY_RESTRICT z, T* HWY_RESTRICT y) {
  const ChunkTag<T> d;
  constexpr size_t V = ChunkVectors<T>(), N = hn::MaxLanes(ChunkTag<T>());
  using Vec = hn::Vec<ChunkTag<T>>;
  Vec first[G][V], second[G][V];
  for (size_t g = 0; g < G; ++g) {
    for (size_t v = 0; v < V; ++v) first[g][v] = second[g][v] = hn::Zero(d);
  }
  for (size_t j = 0; j < kChunk; ++j) {
    for (size_t v = 0; v < V; ++v) {
      const Vec shifted = hn::LoadU(d, taps + v * N - j);
      const size_t end = kGradient ? j + 1 : j, begin = v * N;
      const auto before = hn::FirstN(d, end > begin ? HWY_MIN(N, end - begin) : 0);
      const auto sees = kGradient ? before : hn::Not(before);
      for (size_t g = 0; g < G; ++g) {
        const Vec with = hn::MulAdd(hn::Set(d, x[g * kChunk + j]), shifted, first[g][v]);
        first[g][v] = hn::IfThenElse(sees, with, first[g][v]);
      }
    }
  }
  for (size_t n = 0; n < t.modes; ++n, table += 2 * kChunk) {
    for (size_t v = 0; v < V; ++v) {
      const Vec re = hn::LoadU(d, table + v * N), im = hn::LoadU(d, table + kChunk + v * N);
      for (size_t g = 0; g < G; ++g) {
        const T* mode = z + 2 * g * t.width + n;
        first[g][v] = hn::MulAdd(hn::Set(d, mode[0]), re, first[g][v]);
        second[g][v] = hn::MulAdd(hn::Set(d, mode[t.width]), im, second[g][v]);
      }
    }
  }
  for (size_t g = 0; g < G; ++g) {
    for (size_t v = 0; v < V; ++v) {
      const Vec sum = hn::Add(first[g][v], second[g][v]);
      const Vec own = hn::MulAdd(hn::Set(d, skip), hn::LoadU(d, x + g * kChunk + v * N), sum);
      hn::StoreU(skip == 0 ? sum : own, d, y + g * kChunk + v * N);  // without a skip, 0 times infinity must not be NaN
    }
  }
}

// sums[k] = sum_j x_j tables[k][row_of(j)] for each of G chunks, [G, 2, width], with modes in lanes.
template <size_t G, size_t kTables, class T, class RowOf>
HWY_INLINE void ChunkSums(const ModeTables<T>& t, const T* HWY_RESTRICT x, const T* const (&tables)[kTables],
                          const RowOf& row_of, T* const (&sums)[kTables], size_t apart) {
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<hn::ScalableTag<T>>;
  for (size_t n = 0; n < t.width; n += Lanes<T>()) {
    Vec re[kTables][G], im[kTables][G];
    for (size_t k = 0; k < kTables; ++k) {
      for (size_t g = 0; g < G; ++g) re[k][g] = im[k][g] = hn::Zero(d);
    }
    for (size_t j = 0; j < kChunk; ++j) {
      for (size_t k = 0; k < kTables; ++k) {
        const T* row = tables[k] + 2 * t.width * row_of(j) + n;
        const Vec row_re = hn::LoadU(d, row), row_im = hn::LoadU(d, row + t.width);
        for (size_t g = 0; g < G; ++g) {
          const Vec xj = hn::Set(d, x[g * kChunk + j]);
          re[k][g] = hn::MulAdd(xj, row_re, re[k][g]);
          im[k][g] = hn::MulAdd(xj, row_im, im[k][g]);
        }
      }
    }
    for (size_t k = 0; k < kTables; ++k) {
      for (size_t g = 0; g < G; ++g) {
        hn::StoreU(re[k][g], d, sums[k] + g * apart + n);
        hn::StoreU(im[k][g], d, sums[k] + g * apart + t.width + n);
      }
    }
  }
}

// to = f z + g w, for complex rows of modes; `to` may be z.
template <class T>
HWY_INLINE void Advance(size_t width, const T* f, const T* g, const T* w, const T* z, T* to) {
  const hn::ScalableTag<T> d;
  for (size_t n = 0; n < width; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto fr = load(f), fi = load(f + width), gr = load(g), gi = load(g + width);
    const auto wr = load(w), wi = load(w + width), zr = load(z), zi = load(z + width);
    const auto re = hn::MulAdd(fr, zr, hn::Mul(gr, wr)), im = hn::MulAdd(fr, zi, hn::Mul(gr, wi));
    hn::StoreU(hn::NegMulAdd(gi, wi, hn::NegMulAdd(fi, zi, re)), d, to + n);
    hn::StoreU(hn::MulAdd(gi, wr, hn::MulAdd(fi, zr, im)), d, to + width + n);
  }
}

// sum += z w, for complex rows of modes.
template <class T>
HWY_INLINE void AddProducts(size_t width, const T* z, const T* w, T* sum) {
  const hn::ScalableTag<T> d;
  for (size_t n = 0; n < width; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto zr = load(z), zi = load(z + width), wr = load(w), wi = load(w + width);
    const auto re = hn::MulAdd(zr, wr, load(sum)), im = hn::MulAdd(zr, wi, load(sum + width));
    hn::StoreU(hn::NegMulAdd(zi, wi, re), d, sum + n);
    hn::StoreU(hn::MulAdd(zi, wr, im), d, sum + width + n);
  }
}

// Processes one token: h <- a h + b x. Returns Re(2 c h).
template <class T>
HWY_INLINE T OneToken(const ModeTables<T>& t, T x, T* h) {
  const hn::ScalableTag<T> d;
  const size_t w = t.width;
  auto y = hn::Zero(d);
  for (size_t n = 0; n < w; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto hr = load(h), hi = load(h + w), ar = load(t.a), ai = load(t.a + w), v = hn::Set(d, x);
    const auto re = hn::NegMulAdd(ai, hi, hn::MulAdd(ar, hr, hn::Mul(load(t.b), v)));
    const auto im = hn::MulAdd(ai, hr, hn::MulAdd(ar, hi, hn::Mul(load(t.b + w), v)));
    hn::StoreU(re, d, h + n);
    hn::StoreU(im, d, h + w + n);
    y = hn::NegMulAdd(load(t.c + w), im, hn::MulAdd(load(t.c), re, y));
  }
  return hn::ReduceSum(d, y);
}

// Replaces G chunks of inputs by outputs, with kOutputs. h [G + 1, 2, width] begins with the state before them.
template <size_t G, bool kOutputs, class T>
HWY_INLINE void ChunksForward(const ModeTables<T>& t, T skip, T* h, T* written, T* row) {
  const size_t w = 2 * t.width;
  T x[G * kChunk];  // outputs take its place
  std::copy_n(row, G * kChunk, x);
  ChunkSums<G, 1>(t, x, {t.powers}, [](size_t j) { return kChunk - 1 - j; }, {written}, w);
  for (size_t g = 0; g < G; ++g) {
    Advance(t.width, t.jump, t.b, written + g * w, h + g * w, h + (g + 1) * w);
  }
  if constexpr (kOutputs) ChunkOutputs<G, false>(t, x, skip, t.taps + kChunk, t.reads, h, row);
  std::copy_n(h + G * w, w, h);
}

// Replaces a row of inputs by outputs, with kOutputs. h [Group + 1, 2, width] begins with the state before the row, and
// on return with the state after it; `written` is [Group, 2, width].
template <bool kOutputs, class T>
HWY_NOINLINE HWY_ATTR void ModesForward(const ModeTables<T>& t, T skip, size_t tokens, T* h, T* written, T* row) {
  constexpr size_t G = Group<T>();
  size_t i = 0;
  for (; i + G * kChunk <= tokens; i += G * kChunk) ChunksForward<G, kOutputs>(t, skip, h, written, row + i);
  for (; i + kChunk <= tokens; i += kChunk) ChunksForward<1, kOutputs>(t, skip, h, written, row + i);
  for (; i < tokens; ++i) {
    const T x = row[i], y = OneToken(t, x, h);
    if constexpr (kOutputs) row[i] = y + (skip == 0 ? T{0} : skip * x);
  }
}

// The sums of one channel's gradients: in the compute type over 128 tokens, then in f64.
template <class T>
struct ModeSums {
  // Sums over chunks of P X, P U', X V', P U and X V, and over single tokens of the gradients of a, b and c.
  enum Row : size_t { kPX, kPSlope, kXSlope, kPU, kXV, kOfA, kOfB, kOfC, kRows };
  T* sums;  // [kRows, 2, width]
  double* totals;
  T* lags;  // R: [16]
  double* total_lags;
  size_t width;

  void LayOut(size_t padded, Carver& carver) {
    width = padded;
    carver.Next(sums, static_cast<int64_t>(kRows * 2 * width));
    carver.Next(totals, static_cast<int64_t>(kRows * 2 * width));
    carver.Next(lags, kChunk);
    carver.Next(total_lags, kChunk);
  }
  T* At(Row row) const { return sums + 2 * row * width; }
  Complex64 Total(Row row, size_t n) const {
    const double* total = totals + 2 * row * width + n;
    return {total[0], total[width]};
  }
  void Clear() const {
    std::fill_n(sums, kRows * 2 * width, T{0});
    std::fill_n(totals, kRows * 2 * width, 0.0);
    std::fill_n(lags, kChunk, T{0});
    std::fill_n(total_lags, kChunk, 0.0);
  }
  HWY_ATTR void Flush() const {
    const auto flush = [](T* from, double* to, size_t count) HWY_ATTR {
      for (size_t i = 0; i < count; ++i) {
        to[i] += static_cast<double>(from[i]);
        from[i] = T{0};
      }
    };
    flush(sums, totals, kRows * 2 * width);
    flush(lags, total_lags, kChunk);
  }
};

// The intermediate results of the backward pass of a row.
template <class T>
struct ModeTrace {
  T* chunks;                             // X and U of each chunk: [chunks, 2, 2, width]
  T* tokens;                             // states before and after the tokens that fill no chunk: [16, 2, width]
  T *v, *v_slope, *u_slope, *gradients;  // V, V', U' and P of a group: [Group, 2, width]

  void LayOut(size_t width, int64_t most_tokens, Carver& carver) {
    const auto w = static_cast<int64_t>(2 * width);
    carver.Next(chunks, most_tokens / static_cast<int64_t>(kChunk) * 2 * w);
    carver.Next(tokens, static_cast<int64_t>(kChunk) * w);
    const auto group = static_cast<int64_t>(Group<T>());
    for (T** row : {&v, &v_slope, &u_slope, &gradients}) carver.Next(*row, group * w);
  }
};

// Processes one token in reverse: p, the gradient of the state after it, is replaced by that of the state before it.
// Returns Re(b (p + 2 c dy)). Without kGradients it computes p alone.
template <bool kGradients, class T>
HWY_INLINE T OneTokenBack(const ModeTables<T>& t, T x, T dy, const T* before, const T* after, const ModeSums<T>& sums,
                          T* p) {
  using Row = ModeSums<T>;
  const hn::ScalableTag<T> d;
  const size_t w = t.width;
  const auto vx = hn::Set(d, x), vdy = hn::Set(d, dy);
  auto du = hn::Zero(d);
  T *d_a = sums.At(Row::kOfA), *d_b = sums.At(Row::kOfB), *d_c = sums.At(Row::kOfC);
  for (size_t n = 0; n < w; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto add = [&](T* to, auto value) HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, to + n), value), d, to + n); };
    const auto re = hn::MulAdd(load(t.c), vdy, load(p));
    const auto im = hn::MulAdd(load(t.c + w), vdy, load(p + w));
    if constexpr (kGradients) {
      const auto hr = load(before), hi = load(before + w);
      add(d_a, hn::NegMulAdd(im, hi, hn::Mul(re, hr)));
      add(d_a + w, hn::MulAdd(im, hr, hn::Mul(re, hi)));
      add(d_b, hn::Mul(re, vx));
      add(d_b + w, hn::Mul(im, vx));
      add(d_c, hn::Mul(vdy, load(after)));
      add(d_c + w, hn::Mul(vdy, load(after + w)));
    }
    du = hn::NegMulAdd(load(t.b + w), im, hn::MulAdd(load(t.b), re, du));
    const auto ar = load(t.a), ai = load(t.a + w);
    hn::StoreU(hn::NegMulAdd(ai, im, hn::Mul(ar, re)), d, p + n);
    hn::StoreU(hn::MulAdd(ai, re, hn::Mul(ar, im)), d, p + w + n);
  }
  return hn::ReduceSum(d, du);
}

// lags[l] += sum_k dy_k u_{k-l}.
template <class T>
HWY_INLINE void AddLags(const T* HWY_RESTRICT u, const T* HWY_RESTRICT dy, T* HWY_RESTRICT lags) {
  const ChunkTag<T> d;
  constexpr size_t V = ChunkVectors<T>(), N = hn::MaxLanes(ChunkTag<T>());
  T back[2 * kChunk] = {};  // u reversed, then zeros
  std::reverse_copy(u, u + kChunk, back);
  hn::Vec<ChunkTag<T>> sum[V];
  for (size_t v = 0; v < V; ++v) sum[v] = hn::LoadU(d, lags + v * N);
  for (size_t k = 0; k < kChunk; ++k) {
    for (size_t v = 0; v < V; ++v) {
      const auto x = hn::LoadU(d, back + kChunk - 1 - k + v * N);
      sum[v] = hn::MulAdd(hn::Set(d, dy[k]), x, sum[v]);
    }
  }
  for (size_t v = 0; v < V; ++v) hn::StoreU(sum[v], d, lags + v * N);
}

// Replaces the gradients of the outputs of G chunks by those of their inputs u, and advances p to the state before
// them. Without kGradients it does only the latter.
template <size_t G, bool kGradients, class T>
HWY_INLINE void ChunksBackward(const ModeTables<T>& t, T skip, const T* u, const T* trace_of, const ModeTrace<T>& trace,
                               const ModeSums<T>& sums, T* p, T* d_row) {
  using Row = ModeSums<T>;
  const size_t w = 2 * t.width;
  T dy[G * kChunk];
  std::copy_n(d_row, G * kChunk, dy);
  // Row l of the slopes is l a^(l-1).
  ChunkSums<G, 1>(t, dy, {t.powers}, [](size_t j) { return j; }, {trace.v}, w);
  if constexpr (!kGradients) {
    for (size_t g = G; g-- > 0;) Advance(t.width, t.jump, t.returns, trace.v + g * w, p, p);
    return;
  }
  ChunkSums<G, 1>(t, dy, {t.slopes}, [](size_t j) { return j + 1; }, {trace.v_slope}, w);
  ChunkSums<G, 1>(t, u, {t.slopes}, [](size_t j) { return kChunk - 1 - j; }, {trace.u_slope}, w);
  for (size_t g = G; g-- > 0;) {
    const T *before = trace_of + 2 * g * w, *written = before + w;
    std::copy_n(p, w, trace.gradients + g * w);
    AddProducts(t.width, p, before, sums.At(Row::kPX));
    AddProducts(t.width, p, trace.u_slope + g * w, sums.At(Row::kPSlope));
    AddProducts(t.width, before, trace.v_slope + g * w, sums.At(Row::kXSlope));
    AddProducts(t.width, p, written, sums.At(Row::kPU));
    AddProducts(t.width, before, trace.v + g * w, sums.At(Row::kXV));
    AddLags(u + g * kChunk, dy + g * kChunk, sums.lags);
    Advance(t.width, t.jump, t.returns, trace.v + g * w, p, p);
  }
  ChunkOutputs<G, true>(t, dy, skip, t.reversed_taps + kChunk - 1, t.writes, trace.gradients, d_row);
}

// Replaces a row of gradients of outputs by those of inputs, and p, the gradient of the state after the row, by that of
// h, the state before it. Without kGradients it computes p alone.
template <bool kGradients, class T>
HWY_NOINLINE HWY_ATTR void ModesBackward(const ModeTables<T>& t, T skip, size_t tokens, const T* row, T* d_row, T* h,
                                         T* p, const ModeTrace<T>& trace, const ModeSums<T>& sums) {
  constexpr size_t G = Group<T>();
  const size_t w = 2 * t.width, chunks = tokens / kChunk, rest = tokens % kChunk;
  const size_t groups = chunks / G * G;
  const auto write = [&](auto at_once, size_t i) HWY_ATTR {
    T* written = trace.chunks + (2 * i + 1) * w;
    ChunkSums<at_once, 1>(t, row + i * kChunk, {t.powers}, [](size_t j) { return kChunk - 1 - j; }, {written}, 2 * w);
    for (size_t g = 0; g < at_once; ++g, written += 2 * w) {
      std::copy_n(h, w, written - w);
      Advance(t.width, t.jump, t.b, written, h, h);
    }
  };
  for (size_t i = 0; kGradients && i < groups; i += G) write(std::integral_constant<size_t, G>(), i);
  for (size_t i = groups; kGradients && i < chunks; ++i) write(std::integral_constant<size_t, 1>(), i);
  const T* last = row + chunks * kChunk;
  T* d_last = d_row + chunks * kChunk;
  for (size_t i = 0; kGradients && i < rest; ++i) {
    std::copy_n(h, w, trace.tokens + i * w);
    OneToken(t, last[i], h);
  }
  std::copy_n(h, w, trace.tokens + rest * w);
  for (size_t i = rest; i-- > 0;) {
    const T dy = d_last[i];
    const T* before = trace.tokens + i * w;
    const T du = OneTokenBack<kGradients>(t, last[i], dy, before, before + w, sums, p);
    d_last[i] = du + (skip == 0 ? T{0} : skip * dy);
  }
  size_t summed = 0;
  const auto back = [&](auto at_once, size_t i) HWY_ATTR {
    ChunksBackward<at_once, kGradients>(t, skip, row + i * kChunk, trace.chunks + 2 * i * w, trace, sums, p,
                                        d_row + i * kChunk);
    summed += at_once;
    if (summed < kChunksPerSum) return;
    sums.Flush();
    summed = 0;
  };
  for (size_t i = chunks; i-- > groups;) back(std::integral_constant<size_t, 1>(), i);
  for (size_t i = groups; i > 0; i -= G) back(std::integral_constant<size_t, G>(), i - G);
  sums.Flush();
}

// Computes the gradients of one channel's parameters from its sums.
template <class T>
void StoreModeGradients(const Problem& p, const Gradients& g, int64_t channel, const ModeTables<T>& t,
                        const ModeSums<T>& sums) {
  using Row = ModeSums<T>;
  const ChannelModes& exact = t.exact;
  const auto store = [&](const Numbers& to, size_t n, int64_t part, double value) {
    if (to.data == nullptr) return;
    StoreDouble(to.dtype, const_cast<void*>(to.data),
                channel * to.channel + static_cast<int64_t>(n) * to.state + part * to.part, value);
  };
  double d_log_dt = 0;
  for (size_t n = 0; n < t.modes; ++n) {
    const auto mode = [&](const double* row) { return Complex64{row[n], row[exact.width + n]}; };
    const Complex64 a = mode(exact.a), b = mode(exact.b), c = mode(exact.c);
    Complex64 power = {1, 0}, seen = {0, 0}, slope = {0, 0};  // sums of R_l a^l and of its derivative
    for (size_t l = 0; l < kChunk; ++l) {
      const double lag = sums.total_lags[l];
      seen = seen + lag * power;
      if (l + 1 < kChunk) {
        slope = slope + (static_cast<double>(l + 1) * sums.total_lags[l + 1]) * power;
        power = power * a;
      }
    }
    // power is a^15.
    const Complex64 d_a = static_cast<double>(kChunk) * (power * sums.Total(Row::kPX, n)) +
                          b * sums.Total(Row::kPSlope, n) + 2 * (c * (sums.Total(Row::kXSlope, n) + b * slope)) +
                          sums.Total(Row::kOfA, n);
    const Complex64 d_b = sums.Total(Row::kPU, n) + 2 * (c * seen) + sums.Total(Row::kOfB, n);
    const Complex64 d_c = 2 * (a * sums.Total(Row::kXV, n) + b * seen + sums.Total(Row::kOfC, n));
    const RateGradients rates = GradientsOfRates(p.bilinear, exact.dt, mode(exact.z), a, b, d_a, d_b);
    d_log_dt += rates.log_dt;
    store(g.dlog_A_real, n, 0, rates.log_A_real);
    store(g.dA_imag, n, 0, rates.A_imag);
    store(g.dC.constants, n, 0, d_c.re);
    store(g.dC.constants, n, 1, -d_c.im);
  }
  store(g.dlog_dt, 0, 0, d_log_dt);
}

// modes.cc instantiates these, for all files of the engine.
#ifndef HEED_MODES_OF
#define HEED_MODES_OF(EXTERN, T)                                                                                       \
  EXTERN template void FillTokenTables(const Problem&, int64_t, ModeTables<T>&);                                       \
  EXTERN template void FillChunkTables(bool, ModeTables<T>&);                                                          \
  EXTERN template void ModesForward<true>(const ModeTables<T>&, T, size_t, T*, T*, T*);                                \
  EXTERN template void ModesForward<false>(const ModeTables<T>&, T, size_t, T*, T*, T*);                               \
  EXTERN template void ModesBackward<true>(const ModeTables<T>&, T, size_t, const T*, T*, T*, T*, const ModeTrace<T>&, \
                                           const ModeSums<T>&);                                                        \
  EXTERN template void ModesBackward<false>(const ModeTables<T>&, T, size_t, const T*, T*, T*, T*,                     \
                                            const ModeTrace<T>&, const ModeSums<T>&);                                  \
  EXTERN template void StoreModeGradients(const Problem&, const Gradients&, int64_t, const ModeTables<T>&,             \
                                          const ModeSums<T>&);
#endif
HEED_MODES_OF(extern, float)
HEED_MODES_OF(extern, double)

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_MODES_INL_H_
