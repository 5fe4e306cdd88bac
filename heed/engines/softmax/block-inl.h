// The logits of a block of query rows, tile by tile: what every pass over exact attention does first.
//
// Compiled once per SIMD target, operand type and number of vectors. A tile is
// S[key][lane] = K Q^T, in cache, with soft cap, biases and masks applied.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "heed/engines/softmax/block_rows-inl.h"
#include "heed/engines/softmax/logits-inl.h"
#include "heed/engines/softmax/operands-inl.h"
#include "heed/engines/softmax/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/rows-inl.h"
#include "heed/engines/softmax/visit.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O, int C>
class Block : protected BlockRows<O, C> {
  using Base = BlockRows<O, C>;

 public:
  using Base::Base;
  using Base::Join;

 protected:
  using typename Base::D;
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::head_, Base::w_, Base::num_rows_, Base::lanes_,
      Base::decays_, Base::keys_until_, Base::raw_, Base::queries_finite_, Base::factor_, Base::hull_, Base::masked_,
      Base::partly_kept_, Base::kept_;

  // The parts of a tile that the same vectors of lanes see, ascending. A vector
  // outside them sees nothing there: neither product needs it.
  HWY_INLINE int SplitTile(const Tile& tile, Run* runs) const {
    if (tile.full && !partly_kept_) {
      runs[0] = {tile.keys.begin, tile.keys.end, 0, C};
      return 1;
    }
    // Borders stay between steps of keys, as the tile's own do.
    const auto up = [&](int64_t key) {
      return std::min(tile.keys.end, key + ((tile.grid - key) & (O::kKeyStep - 1)));
    };
    const auto down = [&](int64_t key) {
      return key - (key - tile.grid) % O::kKeyStep;
    };
    Interval seen[C];
    for (size_t c = 0; c < C; ++c) {
      Interval hull = hull_[c];
      if (partly_kept_) {
        const Interval kept = kept_.Hull(tile.keys, c);
        hull = {std::max(hull.begin, kept.begin), std::min(hull.end, kept.end)};
        if (hull.empty()) hull = {};
      }
      seen[c] = {down(std::max(hull.begin, tile.keys.begin)), up(std::max(hull.end, tile.keys.begin))};
    }
    int count = 0;
    for (int64_t at = tile.keys.begin; at < tile.keys.end;) {
      int64_t end = tile.keys.end;
      size_t c0 = C, c1 = 0;
      for (size_t c = 0; c < C; ++c) {
        if (seen[c].begin <= at && at < seen[c].end) {
          c0 = std::min(c0, c);
          c1 = c + 1;
        }
        if (seen[c].begin > at) end = std::min(end, seen[c].begin);
        if (seen[c].end > at) end = std::min(end, seen[c].end);
      }
      c0 = c0 / O::kLaneVectors * O::kLaneVectors;
      c1 = (c1 + O::kLaneVectors - 1) / O::kLaneVectors * O::kLaneVectors;
      if (c0 < c1) runs[count++] = {at, end, c0, c1};
      at = end;
    }
    return count;
  }

  // Whether these parts leave nothing of a tile out.
  HWY_INLINE static bool IsWhole(const Tile& tile, const Run* runs, int num_runs) {
    return num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == C && runs[0].begin == tile.keys.begin &&
           runs[0].end == tile.keys.end;
  }

  // f(std::integral_constant<int, number of vectors>) for a run.
  template <class F>
  HWY_INLINE static void WithVectors(size_t count, const F& f) {
    if constexpr (O::kLaneVectors == C) {
      f(std::integral_constant<int, C>());
    } else {
      if constexpr (C >= 4) {
        if (count == 4) return f(std::integral_constant<int, 4>());
        if (count == 3) return f(std::integral_constant<int, 3>());
      }
      if (count == 2) return f(std::integral_constant<int, 2>());
      f(std::integral_constant<int, 1>());
    }
  }

  // Logits that are stored as they are. A type of its own and not a lambda: products that are finished in the same way
  // are compiled once.
  struct Identity {
    HWY_INLINE V operator()(V x, int64_t /*key*/, int /*c*/) const { return x; }
  };

  // S of a run, in the normative order. Each step leaves the maximum of what it
  // wrote, so that the last one has it.
  template <bool kFlagMasked>
  HWY_INLINE void Logits(const Run& run, const Tile& visited, V* max) {
    const int64_t origin = visited.keys.begin;
    WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
      constexpr int kVectors = vectors.value;
      V m[kVectors];
      for (int c = 0; c < kVectors; ++c) {
        m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
      }
      T* tile = w_.logits;
      bool multiplied = raw_;
      if constexpr (O::kMatrixTiles) {
        if (raw_) {
          TileProducts(w_.queries, head_.keys, run, p_.depth, At(run, origin),
                       queries_finite_ && w_.keys_finite);
        }
      }
      // x = f(x, key, vector): while the logits are in registers, if they have not left them.
      const auto finish = [&](const auto& f) HWY_ATTR {
        if (multiplied) return Rewrite<W, kVectors>(d_, run, origin, tile, m, f);
        LogitProducts<kVectors>(run, origin, m, f);
        multiplied = true;
      };
      const auto multiply = [&]() HWY_ATTR {
        if (!multiplied) finish(Identity());
      };
      if (p_.softcap > 0) {
        multiply();
        ApplySoftcap<W, kVectors>(d_, run, origin, p_.softcap, tile, w_.slopes, m);
      }
      if (!p_.slopes.empty()) {
        finish(Alibi<kVectors, D>(d_, run, visited.grid, lanes_));
      }
      if (p_.forgets && decays_.BeforeRows() && decays_.OfOneHead()) {
        finish([&](V x, int64_t key, int c) HWY_ATTR {
          return decays_.template Added<kFlagMasked>(x, decays_.OfKey(key), run.c0 + static_cast<size_t>(c));
        });
      } else if (p_.forgets) {
        multiply();
        decays_.template AddByRow<kVectors, kFlagMasked>(p_, run, origin, tile, m);
      }
      multiply();
      AddBiasAndMasks<kVectors, kFlagMasked>(run, visited, m);
      for (int c = 0; c < kVectors; ++c) {
        V& of_tile = max[run.c0 + static_cast<size_t>(c)];
        of_tile = hn::Max(m[c], of_tile);
      }
    });
  }

  // What comes after the products, in memory.
  template <int kVectors, bool kFlagMasked>
  HWY_INLINE void AddBiasAndMasks(const Run& run, const Tile& visited, V* m) {
    const int64_t origin = visited.keys.begin;
    T* tile = w_.logits;
    if (p_.bias.data != nullptr) {
      ApplyBias<W, kVectors, kFlagMasked>(d_, run, origin, p_.bias, lanes_, tile, m);
    }
    if (partly_kept_ && !kept_.KeepsAll(run, origin)) {
      ApplyPattern<W, kVectors>(d_, run, origin, kept_.bits[0], tile, m);
    }
    if (masked_ && p_.mask.data != nullptr) {
      ApplyMask<W, kVectors>(d_, run, origin, p_.mask, lanes_, tile, m);
    }
    if (masked_ && !p_.segments_q.empty()) {
      ApplySegments<W, kVectors>(
          d_, run, origin, p_.segments_k.data() + s_.batch * p_.segments_k_stride,
          lanes_, tile, m);
    }
    if (!visited.full && p_.windowed()) {
      ApplyRuns<W, kVectors, 2>(d_, run, origin, lanes_, tile, m);
    } else if (!visited.full) {
      ApplyRuns<W, kVectors, 1>(d_, run, origin, lanes_, tile, m);
    }
  }

  // To be called before a tile's logits are computed.
  HWY_INLINE void BeginLogits(const Tile& tile) {
    if (p_.forgets) decays_.BeginTile(p_, s_, tile, raw_ ? 1 / factor_.of_logits : 1);
  }

  // Logits lack what their rows have forgotten as a whole since the tile: their maximum with it,
  // and what is to be subtracted from logits without it.
  HWY_INLINE V WithRow(V max, size_t c) const {
    if (!p_.forgets) return max;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), none, hn::Add(max, decays_.OfRow(c)));
  }
  HWY_INLINE V WithoutRow(V shift, size_t c) const {
    return p_.forgets ? hn::Sub(shift, decays_.OfRow(c)) : shift;
  }

  // What is subtracted from logits: the maximum, or 0 where there is none yet.
  HWY_INLINE V Shift(V max) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), hn::Zero(d_), max);
  }

  T* At(const Run& run, int64_t origin) const {
    return w_.logits + static_cast<size_t>(run.begin - origin) * W + run.c0 * N;
  }

 private:
  // Asks for the biases of lanes [begin, end) and the next tile's keys. Rows of a
  // bias lie far apart, where no hardware prefetcher follows, and there are more of
  // them than a core can wait for at once: hence a few at a time, between products.
  HWY_INLINE void PrefetchBias(size_t begin, size_t end, int64_t key) const {
    if (p_.bias.data == nullptr || p_.bias.key_stride != 1) return;
    const int64_t element = static_cast<int64_t>(SizeOf(p_.bias.dtype));
    for (size_t lane = begin; lane < std::min(end, num_rows_); ++lane) {
      const char* row = static_cast<const char*>(lanes_.bias[lane]) + key * element;
      for (int64_t at = 0; at < O::kGrid.tile * element; at += 64) {
        hs::PrefetchToL2(row + at);
      }
    }
  }

  // K Q^T of a run, each logit finished by f(logit, key, vector).
  template <int kVectors, class F>
  HWY_INLINE void LogitProducts(const Run& run, int64_t origin, V* max, const F& f) {
    const auto products = [&](const auto& finish) HWY_ATTR {
      const auto before = [&](size_t j, size_t count) HWY_ATTR {
        PrefetchBias(j, j + count, run.end);
      };
      Products<kVectors>(run, w_.queries, head_.keys, p_.depth, At(run, origin), max,
                         before, finish);
    };
    if constexpr (O::kFinishesLogits) {
      if (factor_.of_logits != 1) {
        const V factor = hn::Set(d_, static_cast<T>(factor_.of_logits));
        return products([&](V x, int64_t key, int c) HWY_ATTR {
          return f(hn::Mul(x, factor), key, c);
        });
      }
    }
    products(f);
  }

 protected:
  // out[key][lane] = f(sum_e rows[key][e] lanes[e][lane], key, vector) for a run, and
  // before(j, count) before the rows [j, j + count) of it.
  template <int kVectors, class Before, class F>
  HWY_INLINE void Products(const Run& run, const typename O::Query* lanes,
                           const Operand<typename O::Key>& rows, int64_t depth, T* out,
                           V* max, const Before& before, const F& f) {
    if constexpr (O::kMatrixTiles) {
      before(0, static_cast<size_t>(run.end - run.begin));
      TileProducts(lanes, rows, run, depth, out, queries_finite_ && w_.keys_finite);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, f);
    } else if constexpr (O::kKeysInLanes) {
      O::KeyProducts(lanes, num_rows_, head_, run.begin, run.end, keys_until_,
                     static_cast<size_t>(depth), out);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, f);
    } else {
      hs::ForTiles<hs::TileRows<kVectors>()>(
          0, static_cast<size_t>(run.end - run.begin),
          [&](auto count, size_t j) HWY_ATTR {
            const int64_t key = run.begin + static_cast<int64_t>(j);
            before(j, size_t{count.value});
            O::template Logits<count.value, kVectors>(
                lanes + run.c0 * N, W, rows, key, static_cast<size_t>(depth),
                out + j * W, max,
                [&](V x, int r, int c) HWY_ATTR { return f(x, key + r, c); });
          });
    }
  }

  HWY_INLINE void TileProducts(const typename O::Query* lanes,
                               const Operand<typename O::Key>& rows, const Run& run,
                               int64_t depth, T* out, bool finite) {
    O::LogitTiles(lanes, W, rows, run.begin, run.end, depth, out);
    if (!O::kInfinite && !finite) {
      O::RepeatNaN(lanes, W, rows, run.begin, run.end, depth, W, out);
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
