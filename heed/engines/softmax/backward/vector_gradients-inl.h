// The last three products of the backward pass in vectors: the gradients of a group of keys, and the group's
// contribution to the gradients of queries.
//
// Compiled once per SIMD target and dtype. gradient_operands-inl.h defines words.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_VECTOR_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_VECTOR_GRADIENTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_VECTOR_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_VECTOR_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/backward/gradient_buffers-inl.h"
#include "heed/engines/softmax/backward/gradient_operands-inl.h"
#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Computes out[r] += sum_i a[r][i] b[i] for rows of `depth` elements, in register tiles. It is not inlined, so that the
// three products share one function.
template <class O, bool kSkipMasked>
HWY_NOINLINE void AccumulateRows(const typename O::Word* a, ptrdiff_t a_row, ptrdiff_t a_step,
                                 const typename O::Word* b, ptrdiff_t b_step, size_t count, typename O::Compute* out,
                                 ptrdiff_t out_row, size_t num_rows, int64_t depth, RowPrefetch& prefetch) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<typename O::Compute>());
  const size_t vectors = (static_cast<size_t>(depth) + N - 1) / N;
  hs::ForTiles<hs::kShapes.tile_vectors>(0, vectors, [&](auto columns, size_t c) HWY_ATTR {
    hs::ForTiles<hs::TileRows<columns.value>()>(0, num_rows, [&](auto rows, size_t r) HWY_ATTR {
      const auto at = static_cast<ptrdiff_t>(r);
      prefetch.Some();
      O::template Accumulate<rows.value, columns.value, kSkipMasked>(a + at * a_row, a_row, a_step, b + c * N, b_step,
                                                                     count, out + at * out_row + c * N, out_row);
    });
  });
}

template <class O>
class VectorGradients {
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  using Word = typename O::Word;
  static constexpr size_t N = hn::MaxLanes(D()), W = hs::kShapes.block_vectors * N;

 public:
  using Operands = typename O::Operands;
  static constexpr int kVectors = hs::kShapes.block_vectors;  // vectors of lanes per block
  static constexpr size_t kStep = O::kStep;                   // rows per word
  static constexpr ptrdiff_t kWords = O::kWords;              // words of a row per step of a sum
  static constexpr size_t kStepRows = kStep * kWords;
  static constexpr int64_t kGroupKeys = 256;
  static constexpr bool kFuseHeads = O::kFuseHeads;

  static int64_t Row(int64_t depth) { return PaddedRow<T>(depth); }

  // P of a logit, given the shift of its row. The factor, which turns logits into exponents of 2, is not used here.
  static constexpr bool kScalesShift = false;
  static T Shift(T lse) { return lse; }
  static HWY_INLINE V RowPart(V of_row, V /*factor*/) { return of_row; }
  struct Weight {
    HWY_INLINE V operator()(V s, V shift, V /*factor*/) const {
      // If the caller's lse is less than the logit, e^x may overflow; it is infinity then.
      constexpr T kOverflow = sizeof(T) == 4 ? T{128} : T{1024};
      const V x = hn::Mul(hn::Sub(s, shift), hn::Set(D(), static_cast<T>(hs::kLog2E)));
      return hs::Exp2NonPositive(D(), hs::AtMost(D(), x, kOverflow));
    }
  };

  struct Buffers {
    Word *q_rows, *d_o_rows;         // [W][.]
    T* columns;                      // dS by pairs of keys, if words differ between rows and keys
    T* dq;                           // [W][.]
    typename O::Key *keys, *values;  // [group][.]
    Word* key_rows;                  // the keys as words
    T *dk, *dv;                      // [group][.]

    void LayOut(Carver& carver, const Problem& p, const Plan& plan) {
      const int64_t row = Row(p.depth), value_row = Row(p.value_depth);
      carver.Next(columns, O::kKeysAreWords ? 0 : plan.logits / O::kStep);
      carver.Next(q_rows, plan.lanes / O::kStep * row);
      carver.Next(d_o_rows, plan.lanes / O::kStep * value_row);
      carver.Next(dq, plan.lanes * row);
      carver.Next(keys, kGroupKeys * O::KeyRow(p.depth));
      carver.Next(values, kGroupKeys * O::KeyRow(p.value_depth));
      carver.Next(key_rows, O::kKeysAreWords ? 0 : kGroupKeys / O::kStep * row);
      if constexpr (O::kKeysAreWords) key_rows = keys;
      carver.Next(dk, kGroupKeys * row);
      carver.Next(dv, kGroupKeys * value_row);
    }
  };

  VectorGradients(const Problem& p, const Wants& wants, const Interval& keys, const SourceRows& key_source,
                  const SourceRows& value_source, Buffers& b)
      : p_(p), wants_(wants), keys_(keys), b_(b) {
    if constexpr (!O::kKeysAreWords) O::CopyGroup(key_source, keys, p.depth, b.keys);
    keys_finite_ = O::ToWords(key_source, keys, p.depth, b.key_rows);
    O::CopyGroup(value_source, keys, p.value_depth, b.values);
    std::fill(b.dk, b.dk + keys.size() * row_, T{0});
    std::fill(b.dv, b.dv + keys.size() * value_row_, T{0});
  }

  Operand<typename O::Key> Keys() const { return {b_.keys, static_cast<ptrdiff_t>(O::KeyRow(p_.depth)), keys_.begin}; }
  Operand<typename O::Key> Values() const {
    return {b_.values, static_cast<ptrdiff_t>(O::KeyRow(p_.value_depth)), keys_.begin};
  }

  // Copies the rows of a block as words, and points q and d_o at them. Returns their dtype.
  HWY_INLINE DType BeginBlock(size_t num_rows, const void** q, const void** d_o) {
    num_rows_ = num_rows;
    const bool q_finite = O::ToWords(p_.dtype, q, num_rows, p_.depth, b_.q_rows);
    const bool d_o_finite = O::ToWords(p_.dtype, d_o, num_rows, p_.value_depth, b_.d_o_rows);
    skip_masked_ = !(q_finite && d_o_finite && keys_finite_);
    std::fill(b_.dq, b_.dq + static_cast<int64_t>(num_rows) * row_, T{0});
    O::PointToRows(p_.dtype, b_.q_rows, num_rows, p_.depth, q);
    return O::PointToRows(p_.dtype, b_.d_o_rows, num_rows, p_.value_depth, d_o);
  }

  // Adds the products of a run, given P and dS [key][lane] from the first key of the tile on.
  HWY_INLINE void Add(const Run& run, int64_t origin, T* p, T* ds, RowPrefetch& prefetch) {
    if (skip_masked_) {
      Accumulate<true>(run, origin, p, ds, prefetch);
    } else {
      Accumulate<false>(run, origin, p, ds, prefetch);
    }
  }

  HWY_INLINE void EndBlock() {}
  HWY_INLINE void EndGroup() {}

  T* Dq(size_t lane) const { return b_.dq + static_cast<int64_t>(lane) * row_; }

 private:
  template <bool kSkipMasked>
  HWY_INLINE void Accumulate(const Run& run, int64_t origin, T* p, T* ds, RowPrefetch& prefetch) {
    const size_t first = run.c0 * N, end = std::min(num_rows_, run.c1 * N);
    const auto keys = static_cast<size_t>(run.end - run.begin);
    const auto tile_key = static_cast<size_t>(run.begin - origin);
    const int64_t key = run.begin - keys_.begin;
    const size_t steps = (end - first + kStepRows - 1) / kStepRows;
    const auto last = static_cast<int64_t>(first / kStepRows + steps - 1);  // the step of the last rows
    p += tile_key * W;
    ds += tile_key * W;
    T* columns = b_.columns + tile_key / kStep * W;
    for (size_t lane = end; lane < first + steps * kStepRows; ++lane) {  // rows that do not exist: never NaN
      for (size_t j = 0; j < keys; ++j) p[j * W + lane] = ds[j * W + lane] = T{-0.0};
    }
    O::RoundWeights(keys, run.c0, run.c1, W, p, ds, columns);
    const auto* p_words = reinterpret_cast<const Word*>(p);
    const auto* ds_words = reinterpret_cast<const Word*>(ds);
    constexpr auto lanes = static_cast<ptrdiff_t>(W);
    const auto accumulate = [&](const Word* a, ptrdiff_t a_row, ptrdiff_t a_step, const Word* b, ptrdiff_t b_step,
                                size_t count, T* out, size_t num_rows, int64_t depth) HWY_ATTR {
      AccumulateRows<O, kSkipMasked>(a, a_row, a_step, b, b_step, count, out, Row(depth), num_rows, depth, prefetch);
    };
    constexpr ptrdiff_t kAlong = kWords * kWords;  // from step to step of P and dS: a quad has words of two keys
    if (wants_.dv) {
      accumulate(p_words + last * kAlong, lanes, -kAlong, b_.d_o_rows + last * kWords * value_row_,
                 -kWords * value_row_, steps, b_.dv + key * value_row_, keys, p_.value_depth);
    }
    if (wants_.dk) {
      accumulate(ds_words + last * kAlong, lanes, -kAlong, b_.q_rows + last * kWords * row_, -kWords * row_, steps,
                 b_.dk + key * row_, keys, p_.depth);
    }
    if (wants_.dq) {
      accumulate(O::Columns(ds_words, reinterpret_cast<const Word*>(columns)) + first * kWords, kWords, kWords * lanes,
                 b_.key_rows + key / int64_t{kStep} * row_, kWords * row_, (keys + kStepRows - 1) / kStepRows,
                 b_.dq + static_cast<int64_t>(first) * row_, end - first, p_.depth);
    }
  }

  const Problem& p_;
  const Wants& wants_;
  const Interval keys_;
  Buffers& b_;
  const int64_t row_ = Row(p_.depth), value_row_ = Row(p_.value_depth);
  size_t num_rows_ = 0;
  bool keys_finite_ = true;
  bool skip_masked_ = false;  // some row or key is not finite
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_VECTOR_GRADIENTS_INL_H_
