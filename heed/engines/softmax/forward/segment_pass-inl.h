// The pass of a block of rows over its tiles: logits, probabilities and outputs of each tile, segment by segment.
//
// Compiled once per SIMD target, operand type and number of vectors.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_SEGMENT_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_SEGMENT_PASS_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_SEGMENT_PASS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_SEGMENT_PASS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/amx/block-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O, int C>
using BlockOf = std::conditional_t<O::kUsesAmx, AmxBlock<O, C>, Block<O, C>>;

template <class O, int C, class Outputs>
class SegmentPass : protected BlockOf<O, C> {
  using Base = BlockOf<O, C>;

 public:
  using Base::Join;

  SegmentPass(const Problem& problem, const Sequence& sequence, const BlockGrid& grid, int64_t key_head, int64_t block,
              Workspace<O>& workspace, const Head<O>& head)
      : Base(problem, sequence, grid, key_head, block, workspace, head),
        layout_(static_cast<size_t>(problem.value_depth), num_rows_), outputs_(workspace.outputs),
        totals_(workspace.totals) {}

 protected:
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::num_rows_, Base::lanes_, Base::w_, Base::head_;

  // Calls finish(segment, m, l) after the last tile of each segment, whose outputs are then in outputs_.
  template <bool kFlagMasked, class F>
  HWY_INLINE void Pass(const F& finish_segment) {
    V m[C], l[C];  // of the current segment
    const auto finish = [&](int64_t segment, V* max, const V* sum) HWY_ATTR {
      if (this->raw_) {
        const V unit = hn::Set(d_, static_cast<T>(this->factor_.of_logits));
        for (int c = 0; c < C; ++c) max[c] = hn::Mul(max[c], unit);
      }
      finish_segment(segment, max, sum);
    };
    outputs_ = w_.outputs;
    totals_ = w_.totals;
    any_tile_ = false;
    int64_t segment = -1;
    bool first_tile = true;
    Tile joined;  // tiles of a segment that are computed together later
    const auto flush = [&]() HWY_ATTR {
      if (joined.keys.empty()) return;
      if constexpr (O::kUsesAmx) this->WholeTiles(joined.keys, m, l, outputs_);
      if constexpr (kStreams) StreamedTiles(joined, first_tile, m, l);
      first_tile = false;
      any_tile_ = true;
      joined = {};
    };
    this->ForTiles([&](const Tile& tile) HWY_ATTR {
      bool joins = false;
      if constexpr (O::kUsesAmx && !kFlagMasked) {
        joins = tile.segment == segment && this->CanPipe(tile);
      }
      if constexpr (kStreams && !kFlagMasked) joins = CanStream(tile);
      if (!joins || tile.segment != segment || joined.keys.end != tile.keys.begin) flush();
      if (tile.segment != segment) {
        if (segment >= 0) finish(segment, m, l);
        segment = tile.segment;
        first_tile = true;
        for (int c = 0; c < C; ++c) {
          m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
          l[c] = hn::Zero(d_);
        }
      }
      if (joins) {
        if (joined.keys.empty()) joined = tile;
        joined.keys.end = tile.keys.end;
        return;
      }
      if constexpr (O::kUsesAmx) {
        this->template OneTile<kFlagMasked>(tile, first_tile, m, l, outputs_);
      } else {
        RescaledTile<kFlagMasked>(tile, first_tile, m, l);
      }
      first_tile = false;
      any_tile_ = true;
    });
    flush();
    if (any_tile_) finish(segment, m, l);
  }

  // Adds a tile to the segment's state and rescales the outputs where a maximum grows.
  template <bool kFlagMasked>
  HWY_NOINLINE void RescaledTile(const Tile& tile, bool first, V* m, V* l);

 private:
  // The bound of small M is memory, which delivers all keys of a segment and then all its values 10 to 20 % faster than
  // 64 keys and 64 values in turn. So the logits of all tiles of a segment are computed first; the rest is done tile by
  // tile, with the same bits.
  static constexpr bool kStreams = O::kKeysInLanes && !O::kQuantized;
  bool CanStream(const Tile& tile) const {
    return tile.full && !p_.has_pattern && p_.mask.data == nullptr && p_.segments_q.empty() && !p_.forgets;
  }

  // RescaledTile() for each tile of these keys, one segment's at most. `tiles` is the first tile, extended to the last
  // key.
  HWY_NOINLINE void StreamedTiles(const Tile& tiles, bool first, V* m, V* l);

  // The two halves of RescaledTile(): the tile's logits and their maxima, and everything after them.
  template <bool kFlagMasked>
  HWY_INLINE void TileLogits(const Tile& tile, const Run* runs, int num_runs, V* max);
  template <bool kFlagMasked>
  HWY_NOINLINE void AddTile(const Tile& tile, const Run* runs, int num_runs, const V* of_tile, bool first, V* m, V* l);

  // Computes P of a run from S in place, as operand of the second product: kKeyStep keys per row.
  template <bool kFlagMasked>
  HWY_INLINE void Weights(const Run& run, int64_t origin, const V* shift, V* l) {
    const size_t num_keys = static_cast<size_t>(run.end - run.begin);
    this->ForParts(run, [&](auto vectors, const Run& part) HWY_ATTR {
      constexpr int kVectors = vectors.value;
      T* s = this->At(part, origin);
      T* p = WeightsAt(part, origin);
      const auto put = [&](const V* weights, size_t j, int c) HWY_ATTR {
        if constexpr (O::kQuantized) this->between_.Prefetch();
        O::PutWeights(weights, p + j / O::kKeyStep * W + static_cast<size_t>(c) * N);
      };
      if (p_.dropout == 0) {
        Exponentials<W, kVectors, O::kKeyStep, kFlagMasked>(d_, num_keys, s, shift + part.c0, l + part.c0, put);
        return;
      }
      Exponentials<W, kVectors, 1, kFlagMasked>(d_, num_keys, s, shift + part.c0, l + part.c0,
                                                [&](const V* weights, size_t j, int c) HWY_ATTR {
                                                  hn::Store(weights[0], d_, s + j * W + static_cast<size_t>(c) * N);
                                                });
      ApplyDropout<W>(d_, part, origin, p_, lanes_, w_.logits);
      if constexpr (O::kKeyStep == 2) {
        for (size_t j = 0; j < num_keys; j += 2) {
          for (int c = 0; c < kVectors; ++c) {
            const T* at = s + j * W + static_cast<size_t>(c) * N;
            const V weights[2] = {hn::Load(d_, at), j + 1 < num_keys ? hn::Load(d_, at + W) : hn::Zero(d_)};
            put(weights, j, c);
          }
        }
      }
    });
  }

 protected:
  T* WeightsAt(const Run& run, int64_t origin) const {
    return w_.logits + static_cast<size_t>((run.begin - origin) / O::kKeyStep) * W + run.c0 * N;
  }

  template <bool kFlagMasked>
  HWY_INLINE void Values(const Run& run, int64_t origin, bool first, const V* rescale) {
    this->ForParts(run, [&](auto vectors, const Run& part) HWY_ATTR {
      layout_.template AddValues<vectors.value, kFlagMasked>(WeightsAt(part, origin), head_, run.begin, run.end,
                                                             part.c0 == 0 ? this->keys_until_ : 0, first,
                                                             rescale + part.c0, outputs_ + part.c0 * N, w_.ahead);
    });
  }

  const Outputs layout_;
  T* outputs_;  // of the current segment
  T* totals_;   // of all segments so far
  bool any_tile_ = false;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_SEGMENT_PASS_INL_H_
