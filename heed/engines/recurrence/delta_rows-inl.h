// Reads the rows of a block of a delta rule: queries, keys, values and decays, with beta and the factors applied.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_DELTA_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DELTA_ROWS_INL_H_
#undef HEED_ENGINES_RECURRENCE_DELTA_ROWS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DELTA_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "heed/core/carver.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/delta_token-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The rows of one of each token's writes.
inline Rows RowsOfWrite(const Rows& rows, int64_t write) {
  Rows shifted = rows;
  shifted.data =
      static_cast<const char*>(rows.data) + write * rows.write_stride * static_cast<int64_t>(SizeOf(rows.dtype));
  return shifted;
}

// Rows of a block: [writes][row], values [writes][value_row]. A tensor with one row per token has it at one of the
// token's writes, and zeros at the others.
template <class T>
struct DeltaRows {
  T *q, *k, *read, *write_key;  // scale q, k, r or a, b
  T* read_state;                // the read key with which the state before the token's decay is read: a_t .* r_t, or a
  T* decay;                     // TileDecay(); a scalar fills [writes][kDeltaBlockVectors vectors]
  Decays* kinds;                // [writes]
  T* beta;                      // [writes]
  T *v, *w;                     // v, and beta .* write .* v
  T* raw;                       // scratch

  void LayOut(const Problem& p, Carver& carver, int64_t block) {
    const auto row = static_cast<int64_t>(Padded<T>(p.key_size));
    const auto value_row = static_cast<int64_t>(Padded<T>(p.value_size));
    constexpr auto N = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<T>()));
    for (T** rows : {&q, &k, &read, &read_state}) carver.Next(*rows, block * row);
    carver.Next(write_key, p.write_key.data == nullptr ? 0 : block * row);
    const int64_t decays = p.gate == Gate::kScalar ? std::max(row, kDeltaBlockVectors * N) : row;
    carver.Next(decay, p.gate == Gate::kNone ? 0 : block * decays);
    carver.Next(kinds, block);
    carver.Next(beta, block);
    carver.Next(v, block * value_row);
    carver.Next(w, block * value_row);
    carver.Next(raw, block * (row > value_row ? row : value_row) + block * N);
  }
};

// Reads the rows of one value head of one sequence. Scalar decays are stored as vectors, which are loaded once per
// token and not once per row.
template <class T>
class DeltaReader {
 public:
  DeltaReader(const Problem& p, const Sequence& s, int64_t value_head, const DeltaRows<T>& rows)
      : p_(p), s_(s), head_(value_head), key_head_(value_head / p.group()), keys_(static_cast<size_t>(p.key_size)),
        values_(static_cast<size_t>(p.value_size)), row_(Padded<T>(p.key_size)), value_row_(Padded<T>(p.value_size)),
        writes_(static_cast<size_t>(p.writes)), rows_(rows) {}

  // Loads the queries of n tokens, times `scale`.
  HWY_NOINLINE HWY_ATTR void Queries(int64_t first, size_t n) const {
    LoadTokens(p_.q, key_head_, first, n, keys_, p_.writes - 1, rows_.q, row_);
    const auto scale = hn::Set(d_, static_cast<T>(p_.scale));
    for (size_t i = 0; i < n * writes_ * row_; i += N) {
      hn::Store(hn::Mul(scale, hn::Load(d_, rows_.q + i)), d_, rows_.q + i);
    }
  }

  // Loads keys, values and decays of n tokens.
  HWY_NOINLINE HWY_ATTR void Writes(int64_t first, size_t n) const {
    LoadWrites(p_.k, key_head_, first, n, keys_, rows_.k, row_);
    LoadWrites(p_.v, head_, first, n, values_, rows_.v, value_row_);
    if (p_.write_key.data != nullptr) {
      LoadWrites(p_.write_key, key_head_, first, n, keys_, rows_.write_key, row_);
    }
    if (p_.beta.data != nullptr) {
      LoadWrites(p_.beta, head_, first, n, 1, rows_.raw, N);
      for (size_t i = 0; i < n * writes_; ++i) rows_.beta[i] = rows_.raw[i * N];
    }
    ReadKeys(first, n);
    ApplyFactors(p_.erase, first, n, keys_, row_, rows_.read, rows_.read);
    ApplyFactors(p_.write, first, n, values_, value_row_, rows_.v, rows_.w);
    Decays(first, n);
  }

  // Loads read keys, without beta and erase factors.
  HWY_ATTR void ReadKeys(int64_t first, size_t n) const {
    if (p_.read_key.data == nullptr) {
      std::memcpy(rows_.read, rows_.k, n * writes_ * row_ * sizeof(T));
    } else {
      LoadWrites(p_.read_key, key_head_, first, n, keys_, rows_.read, row_);
    }
  }

  // Loads a row per write.
  HWY_ATTR void LoadWrites(const Rows& from, int64_t head, int64_t first, size_t n, size_t size, T* to,
                           size_t row) const {
    for (size_t write = 0; write < writes_; ++write) {
      LoadRows(d_, RowsOfWrite(from, static_cast<int64_t>(write)), s_, head, first, n, size, to + write * row, row,
               writes_);
    }
  }

  // Loads a row per token at one of its writes, and zeros at the others.
  HWY_ATTR void LoadTokens(const Rows& from, int64_t head, int64_t first, size_t n, size_t size, int64_t write, T* to,
                           size_t row) const {
    if (writes_ > 1) std::memset(to, 0, n * writes_ * row * sizeof(T));
    LoadRows(d_, from, s_, head, first, n, size, to + static_cast<size_t>(write) * row, row, writes_);
  }

  // Returns the prefetches of the block from token `first` on in this many calls: the rows of the forward pass, with or
  // without `queries`, and `more`.
  struct MoreRows {
    std::initializer_list<const Rows*> by_key_head = {}, by_key = {}, by_value = {};
  };
  HWY_ATTR RowPrefetch Prefetch(int64_t first, size_t calls, bool queries, const MoreRows& more = {}) const {
    RowPrefetch prefetch;
    if (first < 0 || first >= s_.count) return prefetch;
    const auto add = [&](std::initializer_list<const Rows*> list, int64_t head, int64_t size) {
      for (const Rows* rows : list) {
        if (rows->data != nullptr) AddRows(prefetch, *rows, s_, head, first, 0, size);
      }
    };
    if (queries) add({&p_.q}, key_head_, p_.key_size);
    add({&p_.k, &p_.read_key, &p_.write_key}, key_head_, p_.key_size);
    add({&p_.erase}, head_, p_.key_size);
    if (p_.gate == Gate::kKey) add({&p_.log_decay}, head_, p_.key_size);
    add({&p_.v, &p_.o}, head_, p_.value_size);
    add(more.by_key_head, key_head_, p_.key_size);
    add(more.by_key, head_, p_.key_size);
    add(more.by_value, head_, p_.value_size);
    prefetch.Begin(static_cast<size_t>(std::min(p_.block_tokens(), s_.count - first)), calls);
    return prefetch;
  }

  // The decays of write t, per row, or per lane from `column` on.
  const T* DecayOf(size_t t, size_t column = 0) const {
    return p_.gate == Gate::kScalar ? rows_.decay + t * kDeltaBlockVectors * N : rows_.decay + t * row_ + column;
  }

 private:
  using D = hn::ScalableTag<T>;
  static constexpr size_t N = hn::MaxLanes(D());

  // Computes to = beta .* factors .* x.
  HWY_ATTR void ApplyFactors(const Rows& factors, int64_t first, size_t n, size_t size, size_t row, const T* x,
                             T* to) const {
    const bool by_channel = factors.data != nullptr, by_token = p_.beta.data != nullptr;
    if (by_channel) LoadWrites(factors, head_, first, n, size, rows_.raw, row);
    for (size_t t = 0; t < n * writes_; ++t) {
      const auto beta = hn::Set(d_, by_token ? rows_.beta[t] : T{1});
      for (size_t i = t * row; i < (t + 1) * row; i += N) {
        auto value = hn::Load(d_, x + i);
        if (by_channel) value = hn::Mul(value, hn::Load(d_, rows_.raw + i));
        hn::Store(hn::Mul(beta, value), d_, to + i);
      }
    }
  }

  HWY_ATTR void Decays(int64_t first, size_t n) const {
    if (p_.gate == Gate::kNone) {
      std::memcpy(rows_.read_state, rows_.read, n * writes_ * row_ * sizeof(T));
    } else if (p_.gate == Gate::kScalar) {
      ScalarDecays(first, n);
    } else {
      KeyDecays(first, n);
    }
  }

  HWY_ATTR void ScalarDecays(int64_t first, size_t n) const {
    T* numbers = rows_.raw;
    LoadTokens(p_.log_decay, head_, first, n, 1, 0, numbers, N);
    for (size_t t = 0; t < n * writes_; ++t) numbers[t] = numbers[t * N];
    for (size_t begin = 0; begin < n * writes_; begin += N) {
      HWY_ALIGN T factors[N], decays[N];
      const auto g = Clamped(hn::Load(d_, numbers + begin));
      const auto [a, less_one] = ExpsOfDecay(d_, g);
      hn::Store(a, d_, factors);
      hn::Store(TileDecay(d_, a, less_one), d_, decays);
      for (size_t t = begin; t < HWY_MIN(begin + N, n * writes_); ++t) {
        const T decay = decays[t - begin];
        T* to = rows_.decay + t * kDeltaBlockVectors * N;
        for (size_t i = 0; i < kDeltaBlockVectors * N; i += N) hn::Store(hn::Set(d_, decay), d_, to + i);
        ReadState(t, [&](size_t) HWY_ATTR { return hn::Set(d_, factors[t - begin]); });
        rows_.kinds[t] = !(decay < 0) ? Decays::kMixed : decay > kSlowToken<T> ? Decays::kSlow : Decays::kNear;
      }
    }
  }

  HWY_ATTR void KeyDecays(int64_t first, size_t n) const {
    LoadTokens(p_.log_decay, head_, first, n, keys_, 0, rows_.decay, row_);
    for (size_t t = 0; t < n * writes_; ++t) {
      bool all_near = true, any_slow = false;
      ReadState(t, [&](size_t i) HWY_ATTR {
        T* at = rows_.decay + t * row_ + i;
        const auto [a, less_one] = ExpsOfDecay(d_, Clamped(hn::Load(d_, at)));
        const auto decay = TileDecay(d_, a, less_one);
        hn::Store(decay, d_, at);
        const auto exists = hn::FirstN(d_, keys_ - i);
        const auto is_near = hn::Lt(decay, hn::Zero(d_));
        all_near &= hn::AllTrue(d_, hn::Or(is_near, hn::Not(exists)));
        any_slow |= !hn::AllFalse(d_, hn::And(hn::And(is_near, exists), hn::Gt(decay, hn::Set(d_, kSlowToken<T>))));
        return a;
      });
      rows_.kinds[t] = any_slow ? Decays::kSlow : all_near ? Decays::kNear : Decays::kMixed;
    }
  }

  HWY_INLINE hn::Vec<D> Clamped(hn::Vec<D> g) const {
    const auto zero = hn::Zero(d_);
    return hn::IfThenElse(hn::Gt(g, zero), zero, g);  // NaN propagates
  }

  // Computes read_state of write t: the read key times its token's decay, or the read key if it reads before the decay.
  template <class F>
  HWY_INLINE void ReadState(size_t t, const F& decay_of) const {
    const bool before = p_.delta == Delta::kBeforeDecay;
    for (size_t i = 0; i < row_; i += N) {
      const auto decay = decay_of(i), read = hn::Load(d_, rows_.read + t * row_ + i);
      hn::Store(before ? read : hn::Mul(decay, read), d_, rows_.read_state + t * row_ + i);
    }
  }

  const D d_;
  const Problem& p_;
  const Sequence& s_;
  const int64_t head_, key_head_;
  const size_t keys_, values_, row_, value_row_, writes_;
  const DeltaRows<T>& rows_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DELTA_ROWS_INL_H_
