// The block mask of patterns and segments on a GPU: a cursor over tile lists and their mask words.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BLOCK_MASK_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BLOCK_MASK_H_

#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"

namespace heed::softmax::cuda {

// The mask of a block's rows, which are in at most `kLists` blocks of 64 rows. All threads of the block hold the same
// values.
//
// Listed tiles begin at multiples of 64 keys, a kernel's tiles at any key: a kernel's tile is the end of one listed
// tile and the beginning of the next.
template <int kLists>
class BlockMask {
  static constexpr int64_t kKeys = 64, kRows = 64;

 public:
  HEED_DEVICE BlockMask(const ForwardParams& p, const DeviceSequence& s) : p_(p), s_(s) {}

  // True if there is a block mask; if not, the other functions keep everything.
  HEED_DEVICE bool present() const { return s_.tile_list >= 0; }

  // Selects rows [first, last] of a head. Tiles are then visited in ascending order.
  HEED_DEVICE void Choose(int head, int first, int last) {
    if (!present()) return;
    first_block_ = first / static_cast<int>(kRows);
    for (int i = 0; i < kLists; ++i) {
      const bool exists = i == 0 || first_block_ + i <= last / static_cast<int>(kRows);
      const int32_t* begin =
          p_.list_begins + s_.tile_list + int64_t{head} * s_.list_head_stride + first_block_ + (exists ? i : 0);
      next_[i] = begin[0];
      end_[i] = exists ? begin[1] : begin[0];
    }
  }
  // Skips listed tiles before `tile`.
  HEED_DEVICE void SkipTo(int64_t tile) {
    if (!present()) return;
    for (int i = 0; i < kLists; ++i) {
      int32_t low = next_[i], high = end_[i];
      while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (EndOf(middle) <= tile) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      next_[i] = low;
    }
  }

  // Returns the first tile from `tile` on, in steps of 64, of which some row keeps a key; if there is none, one past
  // all keys.
  HEED_DEVICE int64_t From(int64_t tile) const {
    if (!present()) return tile;
    int64_t key = s_.key_end;
    for (int i = 0; i < kLists; ++i) {
      int32_t at = next_[i];
      while (at < end_[i] && EndOf(at) <= tile) ++at;
      if (at < end_[i] && EndOf(at) - kKeys < key) key = EndOf(at) - kKeys;
    }
    if (key == s_.key_end) key += kKeys - 1;
    return key > tile ? tile + (key - tile) / kKeys * kKeys : tile;
  }

  // Selects a tile, not before the last one.
  HEED_DEVICE void Begin(int64_t tile) {
    tile_ = tile;
    if (!present()) return;
    shift_ = static_cast<int>(tile % kKeys);
    for (int i = 0; i < kLists; ++i) {
      while (next_[i] < end_[i] && EndOf(next_[i]) <= tile) ++next_[i];
      low_[i] = high_[i] = kNone;
      int32_t at = next_[i];
      if (at < end_[i] && EndOf(at) - kKeys <= tile) low_[i] = p_.list_tiles[at++].words;
      if (shift_ > 0 && at < end_[i] && EndOf(at) - kKeys < tile + kKeys) high_[i] = p_.list_tiles[at].words;
    }
  }
  HEED_DEVICE int64_t tile() const { return tile_; }
  HEED_DEVICE bool KeepsAll() const {
    if (!present()) return true;
    bool all = true;
    for (int i = 0; i < kLists; ++i)
      all &= low_[i] == ListedTile::kAll && (shift_ == 0 || high_[i] == ListedTile::kAll);
    return all;
  }
  // Returns the row's mask of the tile: bit i is key i.
  HEED_DEVICE uint64_t WordOf(int query) const {
    if (!present()) return ~uint64_t{0};
    const int list = query / static_cast<int>(kRows) - first_block_;
    int32_t low = low_[0], high = high_[0];
    HEED_DEVICE_UNROLL
    for (int i = 1; i < kLists; ++i) {
      low = list >= i ? low_[i] : low;
      high = list >= i ? high_[i] : high;
    }
    const uint64_t word = Load(low, query);
    return shift_ == 0 ? word : word >> shift_ | Load(high, query) << (kKeys - shift_);
  }

 private:
  static constexpr int32_t kNone = -2;

  HEED_DEVICE int64_t EndOf(int32_t at) const { return (p_.list_tiles[at].tile + int64_t{1}) * kKeys; }
  HEED_DEVICE uint64_t Load(int32_t words, int query) const {
    if (words < 0) return words == ListedTile::kAll ? ~uint64_t{0} : 0;
    return p_.mask_words[words * kRows + query % static_cast<int>(kRows)];
  }

  const ForwardParams& p_;
  const DeviceSequence& s_;
  int first_block_ = 0, shift_ = 0;
  int64_t tile_ = 0;
  int32_t next_[kLists] = {}, end_[kLists] = {};  // indices of the remaining listed tiles
  int32_t low_[kLists] = {}, high_[kLists] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BLOCK_MASK_H_
