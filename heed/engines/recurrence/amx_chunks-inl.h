// Chunked recurrences of bf16 tensors, 64 tokens per chunk, with AMX products.
//
// Compiled once per SIMD target that has AMX or emulates it. Let a_t be the decay of token t and w_t the factor of its
// value. Over the tokens 1..n of a chunk
//
//   D_tj = a_{j+1} ... a_t w_j, j <= t        E_t = a_1 ... a_t
//   o_t  = scale (E_t S^T q_t + sum_{j <= t} (q_t . k_j) D_tj v_j)
//   S    = E_n S + sum_j k_j (D_nj v_j)^T
//
// These are four matrix products, each with an operand that is exact in bf16: Q K^T, and Q S, P V and K^T (D_n V),
// whose other operand is split into three bf16 (3xBF16), so that results are as exact as in f32. The recurrence itself
// takes 2 K V multiply-adds per token; a chunk takes 6 K V + 48 K + 144 V, without factors 4 K V, at a dozen times the
// rate.
//
// Within 32 tokens j and j + 16 are a pair, so that the terms of P need no shuffle.
#if defined(HEED_ENGINES_RECURRENCE_AMX_CHUNKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_AMX_CHUNKS_INL_H_
#undef HEED_ENGINES_RECURRENCE_AMX_CHUNKS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_AMX_CHUNKS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/chunk_states.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/amx_products-inl.h"
#include "heed/simd/amx.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

inline constexpr int64_t kChunk = kBlockTokens;
inline constexpr int kTerms = 3;
// Columns that are computed together, so that the other operand stays in cache.
inline constexpr int64_t kColumnBlock = 2 * kTileWords;

// Pads channels or columns to pairs of tiles.
constexpr int64_t TilePadded(int64_t size) { return (size + 31) / 32 * 32; }

struct ChunkBuffers {
  uint16_t* q;                   // [token][K]
  uint32_t* k;                   // [pair of channels][token]
  uint32_t* k_channels;          // [32 tokens][channel][pair of tokens]
  uint32_t* v;                   // [column block][pair of tokens][column]
  uint32_t* written;             // [term][pair of tokens][column]: D_n V, if gated
  float* pairs;                  // [token][token]
  uint32_t* pair_splits;         // [term][token][pair of tokens]
  float* o;                      // [token][column]
  float* state;                  // [column block][K][column]
  uint32_t* state_splits;        // [term][pair of channels][column]
  float *values, *gate;          // for OutputRows
  float *decay, *value_factors;  // [token]: log a, then a; w

  static int64_t Bytes(const Problem& p) {
    ChunkBuffers unused = {};
    return unused.LayOut(p, nullptr);
  }
  void Init(const Problem& p) { LayOut(p, this); }

 private:
  int64_t LayOut(const Problem& p, void* base) {
    Carver carver(base, (sizeof(ChunkBuffers) + 127) / 128 * 128);
    const int64_t K = TilePadded(p.key_size), V = TilePadded(p.value_size);
    carver.Next(q, kChunk * K);
    carver.Next(k, K / 2 * kChunk);
    carver.Next(k_channels, K * kChunk / 2);
    carver.Next(v, kChunk / 2 * V);
    const bool gated = p.gate != Gate::kNone || p.value_factors.data != nullptr;
    carver.Next(written, gated ? kTerms * kChunk / 2 * kColumnBlock : 0);
    carver.Next(pairs, kChunk * kChunk);
    carver.Next(pair_splits, kTerms * kChunk * kChunk / 2);
    carver.Next(o, kChunk * kColumnBlock);
    carver.Next(state, K * V);
    carver.Next(state_splits, kTerms * K / 2 * kColumnBlock);
    const auto row = static_cast<int64_t>(Padded<float>(p.value_size));
    carver.Next(values, p.skip.data == nullptr ? 0 : kChunk * row);
    carver.Next(gate, p.output_gate.data == nullptr ? 0 : kChunk * row);
    carver.Next(decay, kChunk);
    carver.Next(value_factors, kChunk);
    return carver.bytes();
  }
};

// Value columns [begin, end) of one head of one sequence.
template <class Tiles>
class ChunkedHead {
  using D = hn::ScalableTag<float>;
  using DW = hn::RebindToUnsigned<D>;
  using V = hn::Vec<D>;
  using Words = hn::Vec<DW>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t kHalf = kTileWords / N;  // vectors of 16 tokens
  static constexpr D d_{};
  static constexpr DW words_{};

 public:
  ChunkedHead(const Problem& p, const Task& task, const ChunkBuffers& b)
      : p_(p), s_(p.sequences[static_cast<size_t>(task.sequence)]), head_(task.head), key_head_(task.head / p.group()),
        b_(b), channels_(TilePadded(p.key_size)),
        begin_(static_cast<int64_t>(FirstColumn(task.part, task.parts, Padded<float>(p.value_size)))),
        end_(std::min(p.value_size,
                      static_cast<int64_t>(FirstColumn(task.part + 1, task.parts, Padded<float>(p.value_size))))),
        columns_(TilePadded(end_ - begin_)), scales_values_(p.gate != Gate::kNone || p.value_factors.data != nullptr) {}

  // Calls put(block, S before it) for each chunk, with all of S.
  HWY_NOINLINE HWY_ATTR void PutStates(const PutState& put) {
    LoadState();
    for (int64_t block = 0; block < NumBlocks(s_.count); ++block) {
      put(block, b_.state);
      const int64_t first = block * kChunk;
      if (block + 1 < NumBlocks(s_.count)) AdvanceState(first, std::min(kChunk, s_.count - first));
    }
  }

  // Without `o` computes the states alone.
  HWY_NOINLINE HWY_ATTR void Compute() {
    LoadState();
    for (int64_t first = 0; first < s_.count; first += kChunk) {
      const int64_t n = std::min(kChunk, s_.count - first);
      p_.o.data == nullptr ? AdvanceState(first, n) : Chunk(first, n);
    }
    StoreState();
  }

 private:
  HWY_NOINLINE HWY_ATTR void AdvanceState(int64_t first, int64_t n) {
    PackKeys(first, n);
    PackValues(first, n);
    DecayScores</*kState=*/true>(first, n);
    for (int64_t column_block = 0; column_block < columns_; column_block += kColumnBlock) {
      SplitState</*kState=*/true>(column_block);
      AddToState(column_block);
      if (!finite_) AddValuesThatAreNotFinite</*kState=*/true>(first, n, column_block);
    }
  }

  HWY_INLINE void Chunk(int64_t first, int64_t n) {
    PackQueries(first, n);
    PackKeys(first, n);
    PackValues(first, n);
    MultiplyKeys();
    DecayScores<false>(first, n);
    const OutputRows<float> rows(p_, s_, head_, first, static_cast<size_t>(n), b_.values, b_.gate,
                                 Padded<float>(p_.value_size), 0, static_cast<size_t>(p_.value_size));
    for (int64_t column_block = 0; column_block < columns_; column_block += kColumnBlock) {
      SplitState<false>(column_block);
      ReadState();
      AddValues(column_block);
      AddToState(column_block);
      if (!finite_) AddValuesThatAreNotFinite<false>(first, n, column_block);
      Store(first, n, column_block, rows);
    }
  }

  float* StateOf(int64_t column_block) const { return b_.state + column_block * channels_; }
  const uint32_t* ValuesOf(int64_t column_block) const { return b_.v + column_block * kChunk / 2; }

  const uint16_t* RowOf(const Rows& rows, int64_t head, int64_t token) const {
    return RowAt<uint16_t>(rows, s_, head, token);
  }

  // Loads the 2 N halves from element e on of `size` elements, with zeros beyond.
  static HWY_INLINE Words LoadWords(const uint16_t* row, int64_t e, int64_t size) {
    const hn::Repartition<uint16_t, D> halves;
    if (e + 2 * int64_t{N} <= size) return hn::BitCast(words_, hn::LoadU(halves, row + e));
    if (e >= size) return hn::Zero(words_);
    return hn::BitCast(words_, hn::LoadN(halves, row + e, static_cast<size_t>(size - e)));
  }
  // Loads N halves likewise, each in a word.
  static HWY_INLINE Words LoadHalves(const uint16_t* row, int64_t e, int64_t size) {
    const hn::Rebind<uint16_t, D> halves;
    if (e + int64_t{N} <= size) return hn::PromoteTo(words_, hn::LoadU(halves, row + e));
    if (e >= size) return hn::Zero(words_);
    return hn::PromoteTo(words_, hn::LoadN(halves, row + e, static_cast<size_t>(size - e)));
  }

  HWY_NOINLINE void PackQueries(int64_t first, int64_t n) {
    for (int64_t t = 0; t < kChunk; ++t) {
      const uint16_t* row = t < n ? RowOf(p_.q, key_head_, first + t) : nullptr;
      auto* to = reinterpret_cast<uint32_t*>(b_.q + t * channels_);
      for (int64_t e = 0; e < channels_; e += 2 * N) {
        hn::Store(row == nullptr ? hn::Zero(words_) : LoadWords(row, e, p_.key_size), words_, to + e / 2);
      }
    }
  }

  // Packs keys as pairs of channels by token, and by channel as pairs of tokens.
  HWY_NOINLINE void PackKeys(int64_t first, int64_t n) {
    const uint16_t* rows[kChunk];
    for (int64_t t = 0; t < kChunk; ++t) {
      rows[t] = t < n ? RowOf(p_.k, key_head_, first + t) : nullptr;
    }
    Words v[N];
    for (int64_t t = 0; t < kChunk; t += N) {
      for (int64_t e = 0; e < channels_; e += 2 * N) {
        HWY_UNROLL(16)
        for (size_t i = 0; i < N; ++i) {
          const uint16_t* row = rows[static_cast<size_t>(t) + i];
          v[i] = row == nullptr ? hn::Zero(words_) : LoadWords(row, e, p_.key_size);
        }
        hs::Transpose(words_, v);
        HWY_UNROLL(16)
        for (size_t i = 0; i < N; ++i) {
          hn::Store(v[i], words_, b_.k + (e / 2 + static_cast<int64_t>(i)) * kChunk + t);
        }
      }
    }
    for (int64_t j = 0; j < kChunk; j += kTileDepth) {
      for (size_t pair = 0; pair < kTileWords; pair += N) {
        for (int64_t e = 0; e < channels_; e += N) {
          HWY_UNROLL(16)
          for (size_t i = 0; i < N; ++i) {
            v[i] = PairOf(rows + j, pair + i, e, p_.key_size);
          }
          hs::Transpose(words_, v);
          HWY_UNROLL(16)
          for (size_t i = 0; i < N; ++i) {
            hn::Store(v[i], words_,
                      b_.k_channels + (j / 2 * channels_) + (e + static_cast<int64_t>(i)) * kTileWords + pair);
          }
        }
      }
    }
  }

  // Words of token `pair` and the token 16 after it.
  static HWY_INLINE Words PairOf(const uint16_t* const* rows, size_t pair, int64_t e, int64_t size) {
    const uint16_t *low = rows[pair], *high = rows[pair + kTileWords];
    const Words first = low == nullptr ? hn::Zero(words_) : LoadHalves(low, e, size);
    if (high == nullptr) return first;
    return hn::Or(first, hn::ShiftLeft<16>(LoadHalves(high, e, size)));
  }

  // Packs values as pairs of tokens, with zeros for values that are not finite.
  HWY_NOINLINE void PackValues(int64_t first, int64_t n) {
    const Words low = hn::Set(words_, 0x7F80u), high = hn::Set(words_, 0x7F800000u);
    finite_ = true;
    for (int64_t j = 0; j < kChunk; j += kTileDepth) {
      const uint16_t* rows[kTileDepth];
      for (int64_t t = 0; t < kTileDepth; ++t) {
        rows[t] = j + t < n ? RowOf(p_.v, head_, first + j + t) + begin_ : nullptr;
      }
      for (size_t pair = 0; pair < kTileWords; ++pair) {
        uint32_t* to = b_.v + (j / 2 + static_cast<int64_t>(pair)) * kColumnBlock;
        for (int64_t c = 0; c < columns_; c += N) {
          Words x = PairOf(rows, pair, c, end_ - begin_);
          const auto odd_low = hn::Eq(hn::And(x, low), low), odd_high = hn::Eq(hn::And(x, high), high);
          if (HWY_UNLIKELY(!hn::AllFalse(words_, hn::Or(odd_low, odd_high)))) {
            finite_ = false;
            x = hn::And(x, hn::IfThenElse(odd_low, hn::Set(words_, 0xFFFF0000u), hn::Set(words_, ~0u)));
            x = hn::And(x, hn::IfThenElse(odd_high, hn::Set(words_, 0xFFFFu), hn::Set(words_, ~0u)));
          }
          hn::Store(x, words_, to + c / kColumnBlock * kChunk / 2 * kColumnBlock + c % kColumnBlock);
        }
      }
    }
  }

  hs::TileFactor QueryTiles() const {
    const ptrdiff_t row = channels_ * 2;
    return {reinterpret_cast<const char*>(b_.q), kTileRows * row, 64, 0, row};
  }
  // An operand of rows of `columns` words, 16 rows per step.
  static hs::TileFactor PairTiles(const uint32_t* words, int64_t columns, int64_t rows) {
    const ptrdiff_t row = columns * 4;
    return {reinterpret_cast<const char*>(words), 64, kTileRows * row, rows * row, row};
  }
  static hs::TileFactor Down(hs::TileFactor a, ptrdiff_t rows) {
    a.data += rows * a.row;
    return a;
  }

  // Q K^T, without blocks whose keys are all after the queries.
  HWY_NOINLINE void MultiplyKeys() {
    const hs::TileFactor q = QueryTiles(), k = PairTiles(b_.k, kChunk, 0);
    const int64_t steps = channels_ / kTileDepth;
    hs::MultiplyTiles<Tiles, 1, false>(q, 2, k, 2, steps, b_.pairs, kChunk);
    hs::MultiplyTiles<Tiles, 1, false>(Down(q, 2), 2, k, 4, steps, b_.pairs + kChunk * kChunk / 2, kChunk);
  }

  // Computes the terms of P, and D_n; with kState, D_n alone.
  template <bool kState>
  HWY_NOINLINE void DecayScores(int64_t first, int64_t n) {
    constexpr size_t kVectors = kChunk / N;
    LoadScalars(p_.log_decay, 0, first, n, b_.decay);
    LoadScalars(p_.value_factors, 1, first, n, b_.value_factors);
    float log_sum = 0;
    for (int64_t t = 0; t < kChunk; ++t) {
      b_.decay[t] = b_.decay[t] > 0 ? 0 : b_.decay[t];
      log_sum += b_.decay[t];
    }
    for (int64_t t = 0; t < kChunk; t += N) {
      hn::Store(hs::Exp(d_, hn::Load(d_, b_.decay + t)), d_, b_.decay + t);
    }
    V row[kVectors];
    for (V& x : row) x = hn::Zero(d_);
    float from_begin = 1;
    for (int64_t t = 0; t < kChunk; ++t) {
      const V a = hn::Set(d_, b_.decay[t]), own = hn::Set(d_, b_.value_factors[t]);
      from_begin *= b_.decay[t];
      from_begin_[t] = from_begin;
      V p[kVectors];
      const size_t vectors = t < kTileDepth ? kVectors / 2 : kVectors;
      if (!kState) Prefetch(first + kChunk + t);
      HWY_UNROLL(8)
      for (size_t c = 0; c < vectors; ++c) {
        const auto at = hn::Iota(d_, static_cast<float>(c * N));
        const V now = hn::Set(d_, static_cast<float>(t));
        row[c] = hn::IfThenElse(hn::Eq(at, now), own, hn::Mul(row[c], a));
        if constexpr (kState) continue;
        const V pair = hn::Load(d_, b_.pairs + t * kChunk + static_cast<int64_t>(c * N));
        p[c] = hn::IfThenElseZero(hn::Le(at, now), hn::Mul(pair, row[c]));
      }
      HWY_UNROLL(4)
      for (size_t c = 0; c < vectors; ++c) {
        if (kState || c % (2 * kHalf) >= kHalf) continue;
        Words split[kTerms];
        hs::TruncateToPairs(d_, p[c], p[c + kHalf], split);
        const size_t word = c / (2 * kHalf) * kTileWords + c % (2 * kHalf) * N;
        HWY_UNROLL(2)
        for (int i = 0; i < kTerms; ++i) {
          hn::Store(split[i], words_, b_.pair_splits + (i * kChunk + t) * kChunk / 2 + static_cast<int64_t>(word));
        }
      }
    }
    // E_n - 1, which keeps bits that E_n rounds away.
    less_one_ = std::expm1(log_sum);
    for (size_t c = 0; c < kVectors; ++c) hn::StoreU(row[c], d_, to_end_ + c * N);
  }

  // Computes D_n V.
  HWY_NOINLINE void DecayValues(int64_t column_block) {
    const uint32_t* v = ValuesOf(column_block);
    for (int64_t pair = 0; pair < kChunk / 2; ++pair) {
      const int64_t j = pair / kTileWords * kTileDepth + pair % kTileWords;
      const V low = hn::Set(d_, to_end_[j]), high = hn::Set(d_, to_end_[j + kTileWords]);
      HWY_UNROLL(4)
      for (int64_t c = 0; c < kColumnBlock; c += N) {
        const Words x = hn::Load(words_, v + pair * kColumnBlock + c);
        Words split[kTerms];
        hs::TruncateToPairs(d_, hn::Mul(low, hn::BitCast(d_, hn::ShiftLeft<16>(x))),
                            hn::Mul(high, hn::BitCast(d_, hn::And(x, hn::Set(words_, 0xFFFF0000u)))), split);
        HWY_UNROLL(3)
        for (int i = 0; i < kTerms; ++i) {
          hn::Store(split[i], words_, b_.written + (i * kChunk / 2 + pair) * kColumnBlock + c);
        }
      }
    }
  }

  // Loads one number per token, or `otherwise` if the tensor is absent; 0 after the n tokens.
  HWY_INLINE void LoadScalars(const Rows& rows, float otherwise, int64_t first, int64_t n, float* to) const {
    std::fill(to, to + n, otherwise);
    std::fill(to + n, to + kChunk, 0.0f);
    if (rows.data == nullptr || (&rows == &p_.log_decay && p_.gate == Gate::kNone)) return;
    hs::WithStorage<float>(rows.dtype, [&](auto stored) HWY_ATTR {
      const hn::CappedTag<float, 1> one;
      for (int64_t t = 0; t < n; ++t) {
        const auto* at = RowAt<decltype(stored)>(rows, s_, head_, first + t);
        to[t] = hn::GetLane(hs::LoadWide(one, at));
      }
    });
  }

  // Prefetches the rows of a token.
  HWY_INLINE void Prefetch(int64_t token) const {
    if (token >= s_.count) return;
    const auto prefetch = [](const void* row, int64_t size) {
      for (int64_t at = 0; at < 2 * size; at += 64) {
        hs::PrefetchToL2(static_cast<const char*>(row) + at);
      }
    };
    prefetch(RowOf(p_.q, key_head_, token), p_.key_size);
    prefetch(RowOf(p_.k, key_head_, token), p_.key_size);
    prefetch(RowOf(p_.v, head_, token) + begin_, end_ - begin_);
    prefetch(RowOf(p_.o, head_, token) + begin_, end_ - begin_);
  }

  // Splits S, and computes E_n S; with kState, E_n S alone.
  template <bool kState>
  HWY_NOINLINE void SplitState(int64_t column_block) {
    const bool near = from_begin_[kChunk - 1] >= 0.5f && less_one_ < 0;
    const V factor = hn::Set(d_, near ? less_one_ : from_begin_[kChunk - 1]);
    const auto decayed = [&](V x) HWY_ATTR { return near ? hn::MulAdd(factor, x, x) : hn::Mul(factor, x); };
    const bool gated = p_.gate != Gate::kNone;
    for (int64_t r = 0; r < channels_; r += 2) {
      float *even = StateOf(column_block) + r * kColumnBlock, *odd = even + kColumnBlock;
      HWY_UNROLL(4)
      for (int64_t c = 0; c < kColumnBlock; c += N) {
        const V low = hn::Load(d_, even + c), high = hn::Load(d_, odd + c);
        if constexpr (!kState) {
          Words split[kTerms];
          hs::TruncateToPairs(d_, low, high, split);
          HWY_UNROLL(3)
          for (int i = 0; i < kTerms; ++i) {
            hn::Store(split[i], words_, b_.state_splits + (i * channels_ / 2 + r / 2) * kColumnBlock + c);
          }
        }
        if (!gated) continue;
        hn::Store(decayed(low), d_, even + c);
        hn::Store(decayed(high), d_, odd + c);
      }
    }
  }

  // o = E Q S.
  HWY_NOINLINE void ReadState() {
    hs::MultiplyTiles<Tiles, 13, false>(QueryTiles(), kChunk / kTileRows,
                                        PairTiles(b_.state_splits, kColumnBlock, channels_ / 2), 2,
                                        channels_ / kTileDepth, b_.o, kColumnBlock);
    if (p_.gate == Gate::kNone) return;
    for (int64_t t = 0; t < kChunk; ++t) {
      const V factor = hn::Set(d_, from_begin_[t]);
      HWY_UNROLL(4)
      for (int64_t c = 0; c < kColumnBlock; c += N) {
        float* at = b_.o + t * kColumnBlock + c;
        hn::Store(hn::Mul(factor, hn::Load(d_, at)), d_, at);
      }
    }
  }

  // o += P V, without blocks whose keys are all after the queries.
  HWY_NOINLINE void AddValues(int64_t column_block) {
    constexpr ptrdiff_t kRow = kChunk * 2;
    const hs::TileFactor p = {reinterpret_cast<const char*>(b_.pair_splits), kTileRows * kRow, 64, kChunk * kRow, kRow};
    const hs::TileFactor v = PairTiles(ValuesOf(column_block), kColumnBlock, 0);
    hs::MultiplyTiles<Tiles, 31, true>(p, 2, v, 2, 1, b_.o, kColumnBlock);
    hs::MultiplyTiles<Tiles, 31, true>(Down(p, 2), 2, v, 2, 2, b_.o + kChunk / 2 * kColumnBlock, kColumnBlock);
  }

  // S += K^T D_n V.
  HWY_NOINLINE void AddToState(int64_t column_block) {
    const hs::TileFactor k = {reinterpret_cast<const char*>(b_.k_channels), kTileBytes, channels_ * 64, 0, 64};
    const int64_t rows = channels_ / kTileRows;
    if (scales_values_) {
      DecayValues(column_block);
      hs::MultiplyTiles<Tiles, 13, true>(k, rows, PairTiles(b_.written, kColumnBlock, kChunk / 2), 2, 2,
                                         StateOf(column_block), kColumnBlock);
    } else {
      hs::MultiplyTiles<Tiles, 1, true>(k, rows, PairTiles(ValuesOf(column_block), kColumnBlock, 0), 2, 2,
                                        StateOf(column_block), kColumnBlock);
    }
  }

  // Adds the values that PackValues() left out to later outputs and to the state; with kState, to the state alone.
  template <bool kState>
  HWY_NOINLINE void AddValuesThatAreNotFinite(int64_t first, int64_t n, int64_t column_block) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < std::min(kColumnBlock, end_ - begin_ - column_block); ++c) {
        const float v = Widened(RowOf(p_.v, head_, first + j)[begin_ + column_block + c]);
        if (std::isfinite(v)) continue;
        for (int64_t t = j; t < n && !kState; ++t) {
          const int64_t word = j / kTileDepth * kTileWords + j % kTileWords;
          const uint32_t pair = b_.pair_splits[t * kChunk / 2 + word];
          b_.o[t * kColumnBlock + c] +=
              v * Widened(static_cast<uint16_t>(j % kTileDepth < kTileWords ? pair : pair >> 16));
        }
        const uint16_t* k = RowOf(p_.k, key_head_, first + j);
        for (int64_t r = 0; r < p_.key_size; ++r) {
          StateOf(column_block)[r * kColumnBlock + c] += v * to_end_[j] * Widened(k[r]);
        }
      }
    }
  }

  static float Widened(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }

  HWY_NOINLINE void Store(int64_t first, int64_t n, int64_t column_block, const OutputRows<float>& rows) {
    const V scale = hn::Set(d_, static_cast<float>(p_.outer_scale()));
    const int64_t begin = begin_ + column_block, end = std::min(begin + kColumnBlock, end_);
    StoreRows(d_, b_.o - begin, static_cast<size_t>(kColumnBlock), p_.o, s_, head_, first, static_cast<size_t>(n),
              static_cast<size_t>(begin), static_cast<size_t>(end),
              [&](V x, size_t t, size_t i) HWY_ATTR { return rows.Finished(hn::Mul(x, scale), t, i); });
  }

  void LoadState() {
    std::memset(b_.state, 0, static_cast<size_t>(channels_ * columns_) * sizeof(float));
    if (p_.initial.data == nullptr) return;
    const float* from = StateAt<float>(p_.initial, s_.state, head_);
    // An addition makes a NaN quiet, so that truncation leaves a NaN.
    ForState(p_.initial, [&](float& x, int64_t at) { x = from[at] + 0.0f; });
  }
  void StoreState() {
    if (p_.final.data == nullptr) return;
    float* to = StateAt<float>(p_.final, s_.state, head_);
    ForState(p_.final, [&](float& x, int64_t at) { to[at] = x; });
  }
  template <class F>
  void ForState(const States& states, const F& f) {
    for (int64_t r = 0; r < p_.key_size; ++r) {
      for (int64_t c = begin_; c < end_; ++c) {
        const int64_t column_block = (c - begin_) / kColumnBlock * kColumnBlock;
        f(StateOf(column_block)[r * kColumnBlock + (c - begin_) % kColumnBlock],
          r * states.key_stride + c * states.value_stride);
      }
    }
  }

  const Problem& p_;
  const Sequence& s_;
  const int64_t head_, key_head_;
  const ChunkBuffers& b_;
  const int64_t channels_, begin_, end_, columns_;
  const bool scales_values_;  // the state's values have factors
  bool finite_ = true;        // whether the chunk's values are finite
  float less_one_ = 0;        // E_n - 1
  float from_begin_[kChunk];  // E_t
  float to_end_[kChunk];      // D_nt
};

template <class Tiles>
void StatesOfChunks(const Problem& p, const Task& task, void* scratch, const PutState& put) {
  const typename Tiles::Session session;
  auto& buffers = *static_cast<ChunkBuffers*>(scratch);
  buffers.Init(p);
  ChunkedHead<Tiles>(p, {task.sequence, task.head, 0, 1}, buffers).PutStates(put);
}

template <class Tiles>
void ForwardInChunks(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(ChunkBuffers::Bytes(p));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<ChunkBuffers*>(ctx.Scratch(worker))->Init(p);
  }
  const TaskQueue queue(p, ctx.num_threads(), p.value_size);
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) HWY_ATTR {
    const typename Tiles::Session session;
    const auto& buffers = *static_cast<const ChunkBuffers*>(ctx.Scratch(worker));
    ChunkedHead<Tiles>(p, queue.At(index), buffers).Compute();
  });
}

template <class Tiles>
Passes ForwardPasses() {
  return {.forward = &ForwardInChunks<Tiles>,
          .workspace = [](const Context&, const Problem& p) { return ChunkBuffers::Bytes(p); }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_AMX_CHUNKS_INL_H_
