// The tiles of keys and values that a block's rows see, and their copies to shared memory.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_KEY_TILES_H_
#define HEED_ENGINES_SOFTMAX_CUDA_KEY_TILES_H_

#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/block_shape.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/block_mask.h"
#include "heed/engines/softmax/cuda/pair_logits.h"

namespace heed::softmax::cuda {

// Keys [first(), end()) of a key head that the rows see. Tiles are counted from the sequence's first key. `kGeneral`:
// there may be a block mask.
template <class M, class Shape, bool kGeneral>
class KeyTiles {
  using Element = typename Shape::Element;

 public:
  HEED_DEVICE KeyTiles(M& m, const ForwardParams& p, const DeviceSequence& s, int key_head)
      : m_(m), p_(p), s_(s), block_mask_(p, s), key_head_(key_head), k_(RowsOf(p.k, s.k, p.k_strides)),
        v_(RowsOf(p.v, s.v, p.v_strides)) {}

  // Selects the keys that rows see, with split-KV those of one segment.
  HEED_DEVICE void Choose(const BlockKeys& seen, int64_t segment, bool is_split) {
    seen_ = seen;
    end_ = seen.end;
    first_ = s_.key_begin + (seen.begin - s_.key_begin) / kTileKeys * kTileKeys;
    if (!is_split) return;
    const int64_t segment_begin = s_.key_begin + segment * kSegmentKeys;
    if (first_ < segment_begin) first_ = PastGap(segment_begin);
    if (end_ > segment_begin + kSegmentKeys) end_ = segment_begin + kSegmentKeys;
  }
  // Applies the block mask of rows [first, last] of a head.
  HEED_DEVICE void Keep(int head, int first, int last) {
    has_block_mask_ = true;
    block_mask_.Choose(head, first, last);
    block_mask_.SkipTo(first_);
    first_ = From(first_);
  }
  HEED_DEVICE int64_t first() const { return first_; }
  HEED_DEVICE int64_t end() const { return end_; }
  HEED_DEVICE auto& block_mask() { return block_mask_; }
  HEED_DEVICE const auto& block_mask() const { return block_mask_; }

  // Returns the first tile from `tile` on of which some row sees a key.
  HEED_DEVICE int64_t From(int64_t tile) const {
    tile = PastGap(tile);
    if constexpr (kGeneral) {
      if (!has_block_mask_) return tile;
      for (int64_t next = block_mask_.From(tile); next != tile; next = block_mask_.From(tile)) tile = PastGap(next);
    }
    return tile;
  }
  // True if all rows see all keys of a tile, apart from the block mask.
  HEED_DEVICE bool IsCommon(int64_t tile) const { return seen_.common.Contains({tile, tile + kTileKeys}); }

  // Begin to copy keys or values of a tile, if it is before end().
  HEED_DEVICE void CopyKeys(int64_t tile, const typename Shape::Keys& to) const {
    if (tile < end_) CopyRows(to, tile, p_.depth, k_, p_.k_strides, p_.k_in_page);
  }
  HEED_DEVICE void CopyValues(int64_t tile, const typename Shape::Values& to) const {
    if (tile < end_) CopyRows(to, tile, p_.value_depth, v_, p_.v_strides, p_.v_in_page);
  }
  // Loads keys and values of tiles before end() by TMA. One thread calls this.
  HEED_DEVICE void TmaLoad(int64_t keys, const typename Shape::Keys& to_keys, int64_t values,
                           const typename Shape::Values& to_values, uint64_t* barrier) const {
    const bool has_keys = keys < end_, has_values = values < end_;
    m_.MbarrierExpectTx(barrier, (has_keys ? Shape::Keys::kBytes : 0) + (has_values ? Shape::Values::kBytes : 0));
    if (has_keys) to_keys.TmaLoad(m_, p_.k_tensor_map, s_.first_key + keys, key_head_, s_.k_batch, barrier);
    if (has_values) to_values.TmaLoad(m_, p_.v_tensor_map, s_.first_key + values, key_head_, s_.v_batch, barrier);
  }
  HEED_DEVICE const Element* ValueAt(int64_t key) const {
    return p_.page_tokens > 0 ? RowInPage(p_.v_strides, p_.v_in_page, key) : v_ + key * p_.v_strides.token;
  }
  // The number of existing keys in a tile.
  HEED_DEVICE int CountOf(int64_t tile) const {
    return static_cast<int>(s_.key_end - tile < kTileKeys ? s_.key_end - tile : kTileKeys);
  }

 private:
  HEED_DEVICE int64_t PastGap(int64_t tile) const {
    const Interval& gap = seen_.gap;
    return gap.Contains({tile, tile + kTileKeys}) ? tile + (gap.end - tile) / kTileKeys * kTileKeys : tile;
  }
  // `rows` are the key head's, from the sequence's first key on; paged rows are found in pages instead.
  template <class Tile>
  HEED_DEVICE void CopyRows(const Tile& to, int64_t tile, int channels, const Element* rows, const Strides& strides,
                            int64_t in_page) const {
    if (p_.page_tokens > 0) {
      to.Copy(m_, p_.aligned, channels, CountOf(tile),
              [&](int row) { return RowInPage(strides, in_page, tile + row); });
    } else {
      to.template CopyRows<Shape::kThreads>(m_, p_.aligned, channels, CountOf(tile), rows + tile * strides.token,
                                            strides.token);
    }
  }
  HEED_DEVICE const Element* RowsOf(const void* data, int64_t first, const Strides& strides) const {
    return static_cast<const Element*>(data) + first + key_head_ * strides.head;
  }
  HEED_DEVICE const Element* RowInPage(const Strides& strides, int64_t in_page, int64_t key) const {
    const auto index = static_cast<uint32_t>(key), tokens = static_cast<uint32_t>(p_.page_tokens),
               page = index / tokens;
    return reinterpret_cast<const Element*>(p_.pages[s_.pages + page] + in_page) + key_head_ * strides.head +
           (index - page * tokens) * strides.token;
  }

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  BlockMask<(Shape::kRows + 63) / 64> block_mask_;
  const int key_head_;
  const Element *const k_, *const v_;
  BlockKeys seen_;
  int64_t first_ = 0, end_ = 0;
  bool has_block_mask_ = false;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_KEY_TILES_H_
