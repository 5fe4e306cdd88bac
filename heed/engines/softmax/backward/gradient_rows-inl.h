// The parts of a backward pass before and after its tasks, and the sums that tasks share: the terms of each row, sums
// that several tasks add to, and copies of rows, widened and rounded.
//
// Compiled once per SIMD target and dtype.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_ROWS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_ROWS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/simd/convert-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Returns the row length padded to whole vectors.
template <class T>
constexpr int64_t PaddedRow(int64_t depth) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  return (depth + N - 1) / N * N;
}

// Calls use(element, number of elements) for each vector of a row.
template <class T, class F>
HWY_INLINE void ForVectors(int64_t depth, const F& use) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  for (int64_t e = 0; e < depth; e += N) {
    use(e, static_cast<size_t>(std::min(N, depth - e)));
  }
}

// Copies one row, widened. `marks` becomes NaN if an element is not finite.
template <class T, class S, class V>
HWY_INLINE void CopyRow(const S* HWY_RESTRICT from, int64_t depth, T* HWY_RESTRICT to, V& marks) {
  const hn::ScalableTag<T> d;
  V of_row = hn::Zero(d);  // a separate chain per row
  ForVectors<T>(depth, [&](int64_t e, size_t n) HWY_ATTR {
    const V x = n == hn::MaxLanes(d) ? hs::LoadWide(d, from + e) : hs::LoadWideN(d, from + e, n);
    hn::Store(x, d, to + e);
    of_row = hn::MulAdd(x, hn::Zero(d), of_row);
  });
  marks = hn::Add(marks, of_row);
}

// Copies to[i] = rows[i], widened. Returns true if all elements are finite.
template <class T>
HWY_INLINE bool CopyRows(DType dtype, const void* const* rows, size_t num_rows, int64_t depth, T* to) {
  const hn::ScalableTag<T> d;
  auto marks = hn::Zero(d);
  hs::WithStorage<T>(dtype, [&](auto stored) HWY_ATTR {
    for (size_t i = 0; i < num_rows; ++i) {
      CopyRow(static_cast<const decltype(stored)*>(rows[i]), depth, to + static_cast<int64_t>(i) * PaddedRow<T>(depth),
              marks);
    }
  });
  return hn::AllTrue(d, hn::Eq(marks, hn::Zero(d)));
}

// CopyRows() for consecutive tokens.
template <class T>
HWY_INLINE bool CopyTokens(const SourceRows& from, const Interval& tokens, int64_t depth, T* to) {
  const hn::ScalableTag<T> d;
  auto marks = hn::Zero(d);
  hs::WithStorage<T>(from.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      CopyRow(from.At<decltype(stored)>(t), depth, to + (t - tokens.begin) * PaddedRow<T>(depth), marks);
    }
  });
  return hn::AllTrue(d, hn::Eq(marks, hn::Zero(d)));
}

// Stores factor * from, rounded, in rows of a tensor; a zero result is stored as +0.
template <class T>
HWY_INLINE void StoreTokens(const SourceRows& to, const Interval& tokens, int64_t depth, T factor, const T* from,
                            int64_t stride) {
  const hn::ScalableTag<T> d;
  hs::WithStorage<T>(to.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      S* row = const_cast<S*>(to.At<S>(t));
      ForVectors<T>(depth, [&](int64_t e, size_t n) HWY_ATTR {
        const auto x = n == hn::MaxLanes(d) ? hn::LoadU(d, from + e) : hn::LoadN(d, from + e, n);
        hs::StoreRounded(d, hn::Add(hn::Mul(x, hn::Set(d, factor)), hn::Zero(d)), row + e, n);
      });
      from += stride;
    }
  });
}

// Adds factor * from to `to`.
template <class T>
HWY_INLINE void AddScaledRow(T factor, const T* from, int64_t depth, T* to) {
  const hn::ScalableTag<T> d;
  ForVectors<T>(depth, [&](int64_t e, size_t n) HWY_ATTR {
    const auto x = hn::Load(d, from + e), scale = hn::Set(d, factor);
    if (n == hn::MaxLanes(d)) {
      hn::StoreU(hn::MulAdd(x, scale, hn::LoadU(d, to + e)), d, to + e);
    } else {
      hn::StoreN(hn::MulAdd(x, scale, hn::LoadN(d, to + e, n)), d, to + e, n);
    }
  });
}

inline void FillTokens(const SourceRows& to, const Interval& tokens, int64_t depth) {
  const size_t bytes = static_cast<size_t>(depth) * SizeOf(to.dtype);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    std::memset(const_cast<char*>(to.data) + t * to.stride * static_cast<int64_t>(SizeOf(to.dtype)), 0, bytes);
  }
}

// The gradients that a call computes.
struct Wants {
  bool dq, dk, dv, bias_pairs, bias_rows, alibi, decays, relative;
  bool d_logits;     // anything besides dv
  bool any_row_sum;  // anything that goes through the ordered reduction
  bool any;          // anything that takes a pass over the pairs

  Wants(const Problem& p, const Gradients& g)
      : dq(g.dq.data != nullptr), dk(g.dk.data != nullptr), dv(g.dv.data != nullptr),
        bias_pairs(g.dbias.data != nullptr && !BiasByRows(p, g)), bias_rows(BiasByRows(p, g)),
        alibi(g.dalibi != nullptr), decays(g.dlog_decay.data != nullptr),
        relative(g.drelative_bias != nullptr && p.relative_bias.present()),
        d_logits(dq || dk || bias_pairs || bias_rows || alibi || decays || relative),
        any_row_sum(dq || bias_rows || alibi || decays), any(d_logits || dv) {}
};

template <class T>
struct SharedGradients {
  const RowIndex* index;
  Wants wants;
  // Per row: the shift subtracted from its logits, and delta and g of backward-inl.h.
  T *shift, *delta, *gain;
  T* dq_sums;                 // per row, if the caller's dq is not of type T
  T *bias_rows, *alibi_rows;  // per row, summed over keys
  double* sink_rows;          // per row: its part of dsinks
  // The gradient of the log decay at s is the sum of dS over the pairs j < s <= p. It is kept in three tables
  // (decay_gradients-inl.h): by s, for keys j in the tile of s; by tile of keys, the sums of rows behind the tile,
  // which count for every s from the tile's end to the row; and by row, the sum that ends there.
  T* decay_keys;
  WideSum *decay_tiles, *decay_rows;
  // The gradient of the relative bias. The part of each group of keys is added to the sums of the chain
  // group % kRelativeChains, where groups are counted over all sequences, in ascending order. Chains are added up in
  // the end.
  double* relative_sums;            // [chain][Hq][span]
  TicketCounter* relative_tickets;  // [chain][Hkv]
  TicketCounter* tickets;           // one ticket counter per block (ordered reduction)
  bool terms_by_group = false;      // each head has one group of keys, whose task computes the terms of its rows
  T* dbias_sums;                    // laid out as dbias, if that is not of type T
  struct {
    T* data;
    int64_t batch_stride, head_stride, query_stride;
  } dbias = {};

  SharedGradients(const Problem& p, const Gradients& g, const RowIndex& row_index) : index(&row_index), wants(p, g) {}

  static constexpr int64_t kRelativeChains = 16;
  // The length of one head's part of a task. Sums of whole vectors reach over both ends of the span.
  static int64_t RelativeRow(const Problem& p) { return p.relative_bias.span + 3 * RelativeBias::kPad; }

  static DType StoredAs(const Problem& p, const Gradients& g) { return g.wide ? DTypeOf<T>::value : p.dtype; }

  // Lays out all arrays at `base`, unless that is null. Returns the bytes they take.
  int64_t LayOut(const Problem& p, const Gradients& g, void* base) {
    Carver carver(base);
    const int64_t rows = index->rows();
    const auto& sizes = g.dbias_sizes;
    const bool own_dq = wants.dq && StoredAs(p, g) != DTypeOf<T>::value;
    const bool own_dbias = wants.bias_pairs && g.dbias.dtype != DTypeOf<T>::value;
    carver.Next(shift, rows);
    carver.Next(delta, rows);
    carver.Next(gain, rows);
    carver.Next(dq_sums, own_dq ? rows * p.depth : 0);
    carver.Next(bias_rows, wants.bias_rows ? rows : 0);
    carver.Next(alibi_rows, wants.alibi ? rows : 0);
    carver.Next(sink_rows, g.dsinks != nullptr ? rows : 0);
    carver.Next(decay_keys, wants.decays ? p.decays.entries : 0);
    carver.Next(decay_tiles, wants.decays ? p.decays.entries / kTileKeys : 0);
    carver.Next(decay_rows, wants.decays ? rows : 0);
    carver.Next(relative_sums, wants.relative ? kRelativeChains * p.query_heads * p.relative_bias.span : 0);
    carver.Next(relative_tickets, wants.relative ? kRelativeChains * p.key_heads : 0);
    carver.Next(tickets, wants.any_row_sum ? index->num_tickets() : 0);
    carver.Next(dbias_sums, own_dbias ? sizes[0] * sizes[1] * sizes[2] * sizes[3] : 0);
    if (!own_dq) dq_sums = nullptr;
    if (!own_dbias) dbias_sums = nullptr;
    if (wants.bias_pairs && !own_dbias) {
      dbias = {static_cast<T*>(const_cast<void*>(g.dbias.data)), g.dbias.batch_stride, g.dbias.head_stride,
               g.dbias.query_stride};
    } else if (own_dbias) {
      const auto step = [&](int axis, int64_t stride) { return sizes[static_cast<size_t>(axis)] == 1 ? 0 : stride; };
      dbias = {dbias_sums, step(0, sizes[1] * sizes[2] * sizes[3]), step(1, sizes[2] * sizes[3]), step(2, sizes[3])};
    }
    return carver.bytes();
  }

  // Returns where a row's dq is summed.
  T* DqRow(const Problem& p, const Gradients& g, int64_t sequence, int64_t head, int64_t query) const {
    if (dq_sums != nullptr) {
      return dq_sums + index->Row(p, sequence, head, query) * p.depth;
    }
    const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
    return static_cast<T*>(const_cast<void*>(g.dq.data)) + s.batch * g.dq.batch_stride +
           (s.first_q + query) * g.dq.token_stride + head * g.dq.head_stride;
  }

  // Computes the terms of all rows and zeroes all sums.
  void Begin(Context& ctx, const Problem& p, const Gradients& g) {
    for (int64_t i = 0; wants.any_row_sum && i < index->num_tickets(); ++i) {
      new (&tickets[i]) TicketCounter(0);
    }
    if (wants.relative) {
      const int64_t size = p.query_heads * p.relative_bias.span;
      ctx.ParallelFor(kRelativeChains, [&](int64_t chain, int) {
        for (int64_t h = 0; h < p.key_heads; ++h) new (&relative_tickets[chain * p.key_heads + h]) TicketCounter(0);
        std::fill_n(relative_sums + chain * size, size, 0.0);
      });
    }
    if (wants.bias_pairs) {
      const auto& n = g.dbias_sizes;
      ctx.ParallelFor(n[0] * n[1] * n[2], [&](int64_t row, int) {
        T* at = dbias.data + row / (n[1] * n[2]) * dbias.batch_stride + row / n[2] % n[1] * dbias.head_stride +
                row % n[2] * dbias.query_stride;
        std::fill(at, at + n[3], T{0});
      });
    }
    const auto sequences = static_cast<int64_t>(p.sequences.size());
    ctx.ParallelFor(wants.decays ? sequences * p.query_heads : 0, [&](int64_t task, int) {
      const Sequence& s = p.sequences[static_cast<size_t>(task / p.query_heads)];
      const int64_t first = FirstDecay(s, task % p.query_heads), count = DecayEntries(s);
      std::fill(decay_keys + first, decay_keys + first + count, T{0});
      std::fill(decay_tiles + first / kTileKeys, decay_tiles + (first + count) / kTileKeys, WideSum());
    });
    if (!terms_by_group) {
      ForRows(ctx, p, [&](int64_t sequence, int64_t head, int64_t i) HWY_ATTR { BeginRow(p, g, sequence, head, i); });
    }
    // Keys outside of [key_begin, key_end) are in no group; their gradients are zero.
    ctx.ParallelFor(sequences * p.key_heads, [&](int64_t task, int) {
      const Sequence& s = p.sequences[static_cast<size_t>(task / p.key_heads)];
      for (const auto& [rows, depth] : {std::pair{&g.dk, p.depth}, {&g.dv, p.value_depth}}) {
        if (rows->data == nullptr) continue;
        const SourceRows to = SourceOf(*rows, StoredAs(p, g), s.batch, s.first_k, task % p.key_heads);
        FillTokens(to, {0, s.key_begin}, depth);
        FillTokens(to, {s.key_end, s.num_keys}, depth);
      }
    });
  }

  // Computes the terms of a row and zeroes its sums.
  HWY_INLINE void BeginRow(const Problem& p, const Gradients& g, int64_t sequence, int64_t head, int64_t i) const {
    hs::WithStorage<T>(p.dtype, [&](auto stored) HWY_ATTR { TermsOfRow<decltype(stored)>(p, g, sequence, head, i); });
    const int64_t row = index->Row(p, sequence, head, i);
    if (wants.bias_rows) bias_rows[row] = 0;
    if (wants.alibi) alibi_rows[row] = 0;
    if (wants.decays) decay_rows[row] = {};
    if (!wants.dq) return;
    T* dq = DqRow(p, g, sequence, head, i);
    std::fill(dq, dq + p.depth, T{0});
  }

  // Adds a group's part of the gradient of the relative bias: [query heads][RelativeRow], from distance -kPad on.
  void AddRelative(const Problem& p, int64_t key_head, int64_t group, const T* part) const {
    const int64_t chain = group % kRelativeChains, span = p.relative_bias.span;
    TicketCounter& ticket = relative_tickets[chain * p.key_heads + key_head];
    WaitForTicket(ticket, group / kRelativeChains);
    for (int64_t h = 0; h < p.group(); ++h) {
      double* HWY_RESTRICT to = relative_sums + (chain * p.query_heads + key_head * p.group() + h) * span;
      const T* HWY_RESTRICT from = part + h * RelativeRow(p) + RelativeBias::kPad;
      for (int64_t d = 0; d < span; ++d) to[d] += static_cast<double>(from[d]);
    }
    ReleaseTicket(ticket);
  }

  // Adds up sums over rows, sequences and heads, and rounds what is stored in another type.
  void Finish(Context& ctx, const Problem& p, const Gradients& g) {
    const auto sequences = static_cast<int64_t>(p.sequences.size());
    if (dq_sums != nullptr) {
      ForRows(ctx, p, [&](int64_t sequence, int64_t head, int64_t i) HWY_ATTR {
        const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
        StoreTokens<T>(SourceOf(g.dq, p.dtype, s.batch, s.first_q, head), {i, i + 1}, p.depth, T{1},
                       DqRow(p, g, sequence, head, i), p.depth);
      });
    }
    if (dbias_sums != nullptr) {
      const auto& n = g.dbias_sizes;
      ctx.ParallelFor(n[0] * n[1] * n[2], [&](int64_t row, int) {
        const int64_t at = row / (n[1] * n[2]) * g.dbias.batch_stride + row / n[2] % n[1] * g.dbias.head_stride +
                           row % n[2] * g.dbias.query_stride;
        for (int64_t j = 0; j < n[3]; ++j) {
          StoreDouble(g.dbias.dtype, const_cast<void*>(g.dbias.data), at + j,
                      static_cast<double>(dbias_sums[row * n[3] + j]));
        }
      });
    }
    if (wants.bias_rows) FinishBiasRows(ctx, p, g);
    if (wants.decays) FinishDecays(ctx, p, g);
    const int64_t span = p.relative_bias.span;
    ctx.ParallelFor(wants.relative ? p.query_heads : 0, [&](int64_t h, int) {
      for (int64_t chain = 0; chain < kRelativeChains; ++chain) {
        const double* from = relative_sums + (chain * p.query_heads + h) * span;
        for (int64_t d = 0; d < span; ++d) g.drelative_bias[h * span + d] += from[d];
      }
    });
    for (int64_t h = 0; h < p.query_heads; ++h) {
      for (int64_t s = 0; g.dsinks != nullptr && s < sequences; ++s) {
        for (int64_t i = 0; i < p.sequences[static_cast<size_t>(s)].num_queries; ++i) {
          g.dsinks[h] += sink_rows[index->Row(p, s, h, i)];
        }
      }
      for (int64_t s = 0; wants.alibi && s < sequences; ++s) {
        const Sequence& sequence = p.sequences[static_cast<size_t>(s)];
        for (int64_t i = 0; i < sequence.num_queries; ++i) {
          g.dalibi[sequence.batch * p.slopes_stride + h] += static_cast<double>(alibi_rows[index->Row(p, s, h, i)]);
        }
      }
    }
  }

 private:
  // Calls f(sequence, head, query) for all rows, 256 to a task.
  template <class F>
  void ForRows(Context& ctx, const Problem& p, const F& f) const {
    constexpr int64_t kRows = 256;
    const int64_t rows = index->rows();
    ctx.ParallelFor((rows + kRows - 1) / kRows, [&](int64_t task, int) HWY_ATTR {
      const auto& first = index->first_row;
      int64_t row = task * kRows;
      const int64_t end = std::min(row + kRows, rows);
      auto sequence = std::upper_bound(first.begin(), first.end(), row) - first.begin() - 1;
      for (; row < end; ++sequence) {
        const auto s = static_cast<size_t>(sequence);
        const int64_t queries = p.sequences[s].num_queries;
        for (const int64_t stop = std::min(end, first[s + 1]); row < stop; ++row) {
          f(sequence, (row - first[s]) / queries, (row - first[s]) % queries);
        }
      }
    });
  }

  template <class S>
  HWY_INLINE void TermsOfRow(const Problem& p, const Gradients& g, int64_t sequence, int64_t head, int64_t i) const {
    const hn::ScalableTag<T> d;
    const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
    const auto of_row = [&](const Rows& rows) {
      return static_cast<const T*>(
          rows.data)[s.batch * rows.batch_stride + (s.first_q + i) * rows.token_stride + head * rows.head_stride];
    };
    const int64_t row = index->Row(p, sequence, head, i);
    if (g.dsinks != nullptr) sink_rows[row] = 0;
    const T lse = of_row(p.lse);
    if (i >= s.query_end || lse == -std::numeric_limits<T>::infinity()) {
      shift[row] = std::numeric_limits<T>::infinity();  // P = 0
      delta[row] = gain[row] = 0;
      return;
    }
    const S* o = SourceOf(p.o, p.dtype, s.batch, s.first_q, head).template At<S>(i);
    const S* d_o = SourceOf(g.d_o, p.dtype, s.batch, s.first_q, head).template At<S>(i);
    auto products = hn::Zero(d);
    ForVectors<T>(p.value_depth, [&](int64_t e, size_t n) HWY_ATTR {
      products = hn::MulAdd(hs::LoadWideN(d, o + e, n), hs::LoadWideN(d, d_o + e, n), products);
    });
    const double dot = static_cast<double>(hn::ReduceSum(d, products));
    double w = 1;
    if (!p.sinks.empty()) {
      const double excess = p.sinks[static_cast<size_t>(head)] - static_cast<double>(lse);
      w = 1 / (1 + std::exp(excess));
      if (g.dsinks != nullptr) sink_rows[row] = -dot / (1 + std::exp(-excess));
    }
    const double d_lse = g.d_lse.data == nullptr ? 0 : static_cast<double>(of_row(g.d_lse));
    shift[row] = lse;
    delta[row] = static_cast<T>(w * dot - d_lse);
    gain[row] = static_cast<T>(w / (1 - p.dropout));
  }

  // The gradient at s is the sum of tiles that end before s, less the sums of rows before s; both are made of the same
  // numbers, so that they cancel exactly.
  void FinishDecays(Context& ctx, const Problem& p, const Gradients& g) {
    const auto sequences = static_cast<int64_t>(p.sequences.size());
    ctx.ParallelFor(sequences * p.query_heads, [&](int64_t task, int) {
      const int64_t sequence = task / p.query_heads, head = task % p.query_heads;
      const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
      const auto store = [&](int64_t key, double sum) {
        StoreDouble(p.log_decay_dtype, const_cast<void*>(g.dlog_decay.data),
                    s.batch * g.dlog_decay.batch_stride + (s.first_k + key) * g.dlog_decay.token_stride +
                        head * g.dlog_decay.head_stride,
                    sum);
      };
      const int64_t first = FirstDecay(s, head);
      WideSum passing;
      int64_t row = 0;
      for (int64_t key = 0; key < s.num_keys; ++key) {
        if (key < s.key_begin || key >= s.key_end) {
          store(key, 0);
          continue;
        }
        const int64_t at = key - s.key_begin;
        if (at > 0 && at % kTileKeys == 0) passing.Add(decay_tiles[(first + at) / kTileKeys - 1]);
        for (; row < s.num_queries && s.start + row < key; ++row) {
          passing.Add(decay_rows[index->Row(p, sequence, head, row)], -1);
        }
        store(key, static_cast<double>(decay_keys[first + at]) + passing.Value());
      }
    });
  }

  void FinishBiasRows(Context& ctx, const Problem& p, const Gradients& g) {
    const auto& n = g.dbias_sizes;
    ctx.ParallelFor(n[0] * n[1] * n[2], [&](int64_t task, int) {
      const int64_t b = task / (n[1] * n[2]), h = task / n[2] % n[1], i = task % n[2];
      double sum = 0;
      for (size_t s = 0; s < p.sequences.size(); ++s) {
        if (n[0] != 1 && static_cast<int64_t>(s) != b) continue;
        for (int64_t head = 0; head < p.query_heads; ++head) {
          if (n[1] != 1 && head != h) continue;
          const int64_t queries = p.sequences[s].num_queries;
          const int64_t begin = n[2] == 1 ? 0 : i, end = n[2] == 1 ? queries : i + 1;
          for (int64_t query = begin; query < end; ++query) {
            sum += static_cast<double>(bias_rows[index->Row(p, static_cast<int64_t>(s), head, query)]);
          }
        }
      }
      StoreDouble(g.dbias.dtype, const_cast<void*>(g.dbias.data),
                  b * g.dbias.batch_stride + h * g.dbias.head_stride + i * g.dbias.query_stride, sum);
    });
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_ROWS_INL_H_
