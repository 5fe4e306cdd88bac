// State spaces whose modes do not depend on the token: chunks of 16 tokens by tables of a channel.
//
// Compiled once per SIMD target. With X the state before a chunk, u its inputs and U = sum_j a^(15-j) u_j
//
//   y_i = sum_{l <= i} K_l u_{i-l} + Re(2 c a^(i+1) X),  X <- a^16 X + b U,  K_l = Re(2 c b a^l)
//
// summed over modes: two products per mode and token, of which lanes are tokens, or modes. Tokens after
// the last whole chunk go one by one. With P the gradient of the state after a chunk (of a complex number z
// it is that g for which Re(g dz) is the change), V = sum_i a^i dy_i and R_l = sum_k dy_k u_{k-l}
//
//   du_i = sum_{k >= i} K_{k-i} dy_k + Re(b a^(15-i) P),  P <- a^16 P + 2 c a V
//   g_a = 16 a^15 sum P X + b sum P U' + 2 c sum X V' + 2 b c sum_l l a^(l-1) R_l
//   g_b = sum P U + 2 c sum_l a^l R_l,  g_c = 2 a sum X V + 2 b sum_l a^l R_l
//
// with U' and V' the derivatives of U and a V by a. Only the five sums and R are added up over chunks.
#if defined(HEED_ENGINES_SCAN_MODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_MODES_INL_H_
#undef HEED_ENGINES_SCAN_MODES_INL_H_
#else
#define HEED_ENGINES_SCAN_MODES_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/engines/scan/discretisation-inl.h"
#include "heed/engines/scan/panel-inl.h"
#include "heed/engines/scan/problem.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

inline constexpr size_t kChunk = 16;
inline constexpr size_t kChunksPerSum = kChunkTokens / kChunk;

// Modes of a table's row: those beyond are zero.
inline size_t PaddedModes(const Problem& p) {
  return (static_cast<size_t>(p.states) + kChunk - 1) / kChunk * kChunk;
}

// Real and imaginary parts, a row of modes each.
template <class T>
struct ComplexRow {
  T *re, *im;
};

// What the chunks of one channel are multiplied with. Rows of modes are real parts, then imaginary.
template <class T>
struct ModeTables {
  size_t modes, width;
  ChannelModes of;           // in double
  T *a, *b, *c;              // [2, width]; c is twice C
  T* jump;                   // a^16: [2, width]
  T* returns;                // 2 c a: [2, width]
  T* taps;                   // 16 zeros, then K
  T* reads;                  // Re and -Im of 2 c a^(i+1): [modes, 2, 16]
  T* powers;                 // a^l: [16, 2, width]
  // Of the backward pass.
  T* taps_back;              // K from its end, then 16 zeros
  T* writes;                 // Re and -Im of b a^(15-i): [modes, 2, 16]
  T* slopes;                 // (l + 1) a^l: [16, 2, width]

  void LayOut(const Problem& p, bool backward, Carver& carver) {
    modes = static_cast<size_t>(p.states);
    width = PaddedModes(p);
    of.LayOut(width, carver);
    const auto next = [&](T*& buffer, size_t elements) {
      carver.Next(buffer, static_cast<int64_t>(elements));
    };
    for (T** row : {&a, &b, &c, &jump, &returns}) next(*row, 2 * width);
    next(taps, 2 * kChunk);
    next(reads, 2 * kChunk * width);
    next(powers, 2 * kChunk * width);
    if (!backward) return;
    next(taps_back, 2 * kChunk);
    next(writes, 2 * kChunk * width);
    next(slopes, 2 * kChunk * width);
  }

  ComplexRow<T> Row(T* rows, size_t row = 0) const {
    return {rows + 2 * row * width, rows + (2 * row + 1) * width};
  }
};

template <class T>
HWY_INLINE void Narrow(const double* from, T* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// Numbers of single tokens; those of chunks are made of them.
template <class T>
void FillTokenTables(const Problem& p, int64_t channel, ModeTables<T>& t) {
  Discretise(p, channel, t.of);
  Narrow(t.of.a, t.a, 2 * t.width);
  Narrow(t.of.b, t.b, 2 * t.width);
  for (size_t i = 0; i < 2 * t.width; ++i) t.c[i] = static_cast<T>(2 * t.of.c[i]);
}

// Sixteen numbers in double: the powers of one mode.
struct Powers {
  double re[kChunk], im[kChunk];
};

// a^0 to a^15: by squares, so that lanes are independent.
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
  const ChannelModes& of = t.of;
  std::fill_n(t.powers, 2 * kChunk * t.width, T{0});
  if (backward) std::fill_n(t.slopes, 2 * kChunk * t.width, T{0});
  std::fill_n(t.jump, 2 * t.width, T{0});
  std::fill_n(t.returns, 2 * t.width, T{0});
  for (size_t n = 0; n < t.modes; ++n) {
    const size_t m = t.width + n;
    Powers power;
    PowersOf(of.a[n], of.a[m], power);
    // 2 c a, and 2 c b.
    const double read_re = 2 * (of.c[n] * of.a[n] - of.c[m] * of.a[m]);
    const double read_im = 2 * (of.c[n] * of.a[m] + of.c[m] * of.a[n]);
    const double tap_re = 2 * (of.c[n] * of.b[n] - of.c[m] * of.b[m]);
    const double tap_im = 2 * (of.c[n] * of.b[m] + of.c[m] * of.b[n]);
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
    t.jump[n] = static_cast<T>(last_re * of.a[n] - last_im * of.a[m]);
    t.jump[m] = static_cast<T>(last_re * of.a[m] + last_im * of.a[n]);
    if (!backward) continue;
    T* writes = t.writes + 2 * kChunk * n;
    for (size_t i = 0; i < kChunk; ++i) {
      const size_t l = kChunk - 1 - i;
      writes[i] = static_cast<T>(of.b[n] * power.re[l] - of.b[m] * power.im[l]);
      writes[kChunk + i] = static_cast<T>(-(of.b[n] * power.im[l] + of.b[m] * power.re[l]));
      const auto order = static_cast<double>(i + 1);
      t.slopes[2 * i * t.width + n] = static_cast<T>(order * power.re[i]);
      t.slopes[2 * i * t.width + m] = static_cast<T>(order * power.im[i]);
    }
  }
  std::fill_n(t.taps, kChunk, T{0});
  for (size_t i = 0; i < kChunk; ++i) t.taps[kChunk + i] = static_cast<T>(taps[i]);
  if (!backward) return;
  std::fill_n(t.taps_back + kChunk, kChunk, T{0});
  for (size_t i = 0; i < kChunk; ++i) t.taps_back[kChunk - 1 - i] = static_cast<T>(taps[i]);
}

// Vectors of a chunk's tokens.
template <class T>
constexpr size_t ChunkVectors() {
  return Lanes<T>() < kChunk ? kChunk / Lanes<T>() : 1;
}
template <class T>
using ChunkTag = hn::CappedTag<T, kChunk>;

// y = skip x + sum_j x_j column(j) + Re(sum over modes of table rows and z): the tokens of a chunk, from
// taps shifted by one per token and from states, or gradients of states.
template <class T, class Column>
HWY_INLINE void ChunkOutputs(const ModeTables<T>& t, const T* HWY_RESTRICT x, T skip,
                             const Column& column, const T* HWY_RESTRICT table,
                             ComplexRow<const T> z, T* y) {
  const ChunkTag<T> d;
  constexpr size_t V = ChunkVectors<T>(), N = hn::MaxLanes(ChunkTag<T>());
  using Vec = hn::Vec<ChunkTag<T>>;
  Vec even[V], odd[V], re[V], im[V];
  for (size_t v = 0; v < V; ++v) {
    const Vec own = hn::Mul(hn::Set(d, skip), hn::LoadU(d, x + v * N));
    even[v] = skip == 0 ? hn::Zero(d) : own;  // infinity times nothing is nothing
    odd[v] = re[v] = im[v] = hn::Zero(d);
  }
  for (size_t j = 0; j < kChunk; j += 2) {
    for (size_t v = 0; v < V; ++v) {
      even[v] = hn::MulAdd(hn::Set(d, x[j]), hn::LoadU(d, column(j) + v * N), even[v]);
      odd[v] = hn::MulAdd(hn::Set(d, x[j + 1]), hn::LoadU(d, column(j + 1) + v * N), odd[v]);
    }
  }
  for (size_t n = 0; n < t.modes; ++n) {
    const T* row = table + 2 * kChunk * n;
    for (size_t v = 0; v < V; ++v) {
      re[v] = hn::MulAdd(hn::Set(d, z.re[n]), hn::LoadU(d, row + v * N), re[v]);
      im[v] = hn::MulAdd(hn::Set(d, z.im[n]), hn::LoadU(d, row + kChunk + v * N), im[v]);
    }
  }
  for (size_t v = 0; v < V; ++v) {
    hn::StoreU(hn::Add(hn::Add(even[v], odd[v]), hn::Add(re[v], im[v])), d, y + v * N);
  }
}

// sum_j x_j rows[row(j)], of modes in lanes, for one or two tables of 16 rows.
template <size_t kTables, class T, class RowOf>
HWY_INLINE void ChunkSums(const ModeTables<T>& t, const T* HWY_RESTRICT x,
                          const T* const (&tables)[kTables], const RowOf& row_of,
                          T* const (&sums)[kTables]) {
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<hn::ScalableTag<T>>;
  for (size_t n = 0; n < t.width; n += Lanes<T>()) {
    Vec re[kTables], im[kTables];
    for (size_t k = 0; k < kTables; ++k) re[k] = im[k] = hn::Zero(d);
    for (size_t j = 0; j < kChunk; ++j) {
      const Vec xj = hn::Set(d, x[j]);
      for (size_t k = 0; k < kTables; ++k) {
        const T* row = row_of(k, j) < kChunk ? tables[k] + 2 * t.width * row_of(k, j) + n : nullptr;
        if (row == nullptr) continue;
        re[k] = hn::MulAdd(xj, hn::LoadU(d, row), re[k]);
        im[k] = hn::MulAdd(xj, hn::LoadU(d, row + t.width), im[k]);
      }
    }
    for (size_t k = 0; k < kTables; ++k) {
      hn::StoreU(re[k], d, sums[k] + n);
      hn::StoreU(im[k], d, sums[k] + t.width + n);
    }
  }
}

// z = f z + g w, of complex rows of modes.
template <class T>
HWY_INLINE void Advance(size_t width, const T* f, const T* g, const T* w, T* z) {
  const hn::ScalableTag<T> d;
  for (size_t n = 0; n < width; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto fr = load(f), fi = load(f + width), gr = load(g), gi = load(g + width);
    const auto wr = load(w), wi = load(w + width), zr = load(z), zi = load(z + width);
    const auto re = hn::MulAdd(fr, zr, hn::Mul(gr, wr)), im = hn::MulAdd(fr, zi, hn::Mul(gr, wi));
    hn::StoreU(hn::NegMulAdd(gi, wi, hn::NegMulAdd(fi, zi, re)), d, z + n);
    hn::StoreU(hn::MulAdd(gi, wr, hn::MulAdd(fi, zr, im)), d, z + width + n);
  }
}

// sum += z w, likewise.
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

// One token: h = a h + b x; returns Re(2 c h).
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

// A row of inputs becomes one of outputs; h goes from the state before it to that after it.
template <class T>
HWY_NOINLINE HWY_ATTR void ModesForward(const ModeTables<T>& t, T skip, size_t tokens, T* h, T* sums,
                                        T* row) {
  size_t i = 0;
  for (; i + kChunk <= tokens; i += kChunk) {
    T* x = row + i;
    T chunk[kChunk];  // outputs take its place
    std::copy_n(x, kChunk, chunk);
    const T* zeros_and_taps = t.taps + kChunk;
    ChunkOutputs(t, chunk, skip, [&](size_t j) { return zeros_and_taps - j; }, t.reads,
                 {h, h + t.width}, x);
    ChunkSums<1>(t, chunk, {t.powers}, [](size_t, size_t j) { return kChunk - 1 - j; }, {sums});
    Advance(t.width, t.jump, t.b, sums, h);
  }
  for (; i < tokens; ++i) {
    const T x = row[i];
    row[i] = OneToken(t, x, h) + (skip == 0 ? T{0} : skip * x);
  }
}

// What a thread adds up for one channel: in the compute type over 128 tokens, then in f64.
template <class T>
struct ModeSums {
  // Of chunks: P X, P U', X V', P U, X V. Of single tokens: what belongs to a, b and c.
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

// What the backward pass of a row keeps.
template <class T>
struct ModeTrace {
  T* chunks;  // X and U of each: [chunks, 2, 2, width]
  T* tokens;  // the states before each of the last tokens, and after: [16, 2, width]
  T *v, *v_slope, *u_slope;  // [2, width]

  void LayOut(size_t width, int64_t most_tokens, Carver& carver) {
    const auto w = static_cast<int64_t>(2 * width);
    carver.Next(chunks, most_tokens / static_cast<int64_t>(kChunk) * 2 * w);
    carver.Next(tokens, static_cast<int64_t>(kChunk) * w);
    for (T** row : {&v, &v_slope, &u_slope}) carver.Next(*row, w);
  }
};

// One token back: p, the gradient of the state after it, becomes that of the state before it. Returns
// Re(b (p + 2 c dy)).
template <class T>
HWY_INLINE T OneTokenBack(const ModeTables<T>& t, T x, T dy, const T* before, const T* after,
                          const ModeSums<T>& sums, T* p) {
  using Row = ModeSums<T>;
  const hn::ScalableTag<T> d;
  const size_t w = t.width;
  const auto vx = hn::Set(d, x), vdy = hn::Set(d, dy);
  auto du = hn::Zero(d);
  T *of_a = sums.At(Row::kOfA), *of_b = sums.At(Row::kOfB), *of_c = sums.At(Row::kOfC);
  for (size_t n = 0; n < w; n += Lanes<T>()) {
    const auto load = [&](const T* from) HWY_ATTR { return hn::LoadU(d, from + n); };
    const auto add = [&](T* to, auto value) HWY_ATTR {
      hn::StoreU(hn::Add(hn::LoadU(d, to + n), value), d, to + n);
    };
    const auto re = hn::MulAdd(load(t.c), vdy, load(p));
    const auto im = hn::MulAdd(load(t.c + w), vdy, load(p + w));
    const auto hr = load(before), hi = load(before + w);
    add(of_a, hn::NegMulAdd(im, hi, hn::Mul(re, hr)));
    add(of_a + w, hn::MulAdd(im, hr, hn::Mul(re, hi)));
    add(of_b, hn::Mul(re, vx));
    add(of_b + w, hn::Mul(im, vx));
    add(of_c, hn::Mul(vdy, load(after)));
    add(of_c + w, hn::Mul(vdy, load(after + w)));
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
  T back[2 * kChunk] = {};  // u from its end, then zeros
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

// A row of gradients of outputs becomes one of inputs; p goes from the gradient of the state after it
// to that of h, the state before it.
template <class T>
HWY_NOINLINE HWY_ATTR void ModesBackward(const ModeTables<T>& t, T skip, size_t tokens, const T* row,
                                         T* d_row, T* h, T* p, const ModeTrace<T>& trace,
                                         const ModeSums<T>& sums) {
  using Row = ModeSums<T>;
  const size_t w = 2 * t.width, chunks = tokens / kChunk, rest = tokens % kChunk;
  for (size_t i = 0; i < chunks; ++i) {
    T *before = trace.chunks + 2 * i * w, *written = before + w;
    std::copy_n(h, w, before);
    ChunkSums<1>(t, row + i * kChunk, {t.powers}, [](size_t, size_t j) { return kChunk - 1 - j; },
                 {written});
    Advance(t.width, t.jump, t.b, written, h);
  }
  const T *last = row + chunks * kChunk;
  T* d_last = d_row + chunks * kChunk;
  for (size_t i = 0; i < rest; ++i) {
    std::copy_n(h, w, trace.tokens + i * w);
    OneToken(t, last[i], h);
  }
  std::copy_n(h, w, trace.tokens + rest * w);
  for (size_t i = rest; i-- > 0;) {
    const T dy = d_last[i];
    const T *before = trace.tokens + i * w;
    d_last[i] = OneTokenBack(t, last[i], dy, before, before + w, sums, p) +
                (skip == 0 ? T{0} : skip * dy);
  }
  for (size_t i = chunks; i-- > 0;) {
    const T *before = trace.chunks + 2 * i * w, *written = before + w, *u = row + i * kChunk;
    T dy[kChunk];
    std::copy_n(d_row + i * kChunk, kChunk, dy);
    ChunkSums<2>(t, dy, {t.powers, t.slopes}, [](size_t, size_t j) { return j; },
                 {trace.v, trace.v_slope});
    ChunkSums<1>(t, u, {t.slopes}, [](size_t, size_t j) { return kChunk - 2 - j; },
                 {trace.u_slope});
    AddProducts(t.width, p, before, sums.At(Row::kPX));
    AddProducts(t.width, p, trace.u_slope, sums.At(Row::kPSlope));
    AddProducts(t.width, before, trace.v_slope, sums.At(Row::kXSlope));
    AddProducts(t.width, p, written, sums.At(Row::kPU));
    AddProducts(t.width, before, trace.v, sums.At(Row::kXV));
    AddLags(u, dy, sums.lags);
    const T* back = t.taps_back + kChunk - 1;
    ChunkOutputs(t, dy, skip, [&](size_t j) { return back - j; }, t.writes,
                 {p, p + t.width}, d_row + i * kChunk);
    Advance(t.width, t.jump, t.returns, trace.v, p);
    if (i % kChunksPerSum == 0) sums.Flush();
  }
  if (chunks == 0) sums.Flush();
}

// The gradients of one channel's parameters from its sums.
template <class T>
void StoreModeGradients(const Problem& p, const Gradients& g, int64_t channel,
                        const ModeTables<T>& t, const ModeSums<T>& sums) {
  using Row = ModeSums<T>;
  const ChannelModes& of = t.of;
  const auto store = [&](const Numbers& to, size_t n, int64_t part, double value) {
    if (to.data == nullptr) return;
    StoreDouble(to.dtype, const_cast<void*>(to.data),
                channel * to.channel + static_cast<int64_t>(n) * to.state + part * to.part, value);
  };
  double of_log_dt = 0;
  for (size_t n = 0; n < t.modes; ++n) {
    const auto mode = [&](const double* row) { return Complex64{row[n], row[of.width + n]}; };
    const Complex64 a = mode(of.a), b = mode(of.b), c = mode(of.c);
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
    const Complex64 of_a = static_cast<double>(kChunk) * (power * sums.Total(Row::kPX, n)) +
                           b * sums.Total(Row::kPSlope, n) +
                           2 * (c * (sums.Total(Row::kXSlope, n) + b * slope)) +
                           sums.Total(Row::kOfA, n);
    const Complex64 of_b = sums.Total(Row::kPU, n) + 2 * (c * seen) + sums.Total(Row::kOfB, n);
    const Complex64 of_c = 2 * (a * sums.Total(Row::kXV, n) + b * seen + sums.Total(Row::kOfC, n));
    const RateGradients rates = GradientsOfRates(p.bilinear, of.dt, mode(of.z), a, b, of_a, of_b);
    of_log_dt += rates.log_dt;
    store(g.dlog_A_real, n, 0, rates.log_A_real);
    store(g.dA_imag, n, 0, rates.A_imag);
    store(g.dC_modes, n, 0, of_c.re);
    store(g.dC_modes, n, 1, -of_c.im);
  }
  store(g.dlog_dt, 0, 0, of_log_dt);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_MODES_INL_H_
