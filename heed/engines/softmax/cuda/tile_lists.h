// Tile lists and mask words of patterns and segments, as GPU kernels read them.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block_sparse_mask.h"

namespace heed::softmax::cuda {

// The lists of block_sparse_mask.h, concatenated. Equal masks of a tile, 64 words each, are stored once.
struct TileLists {
  struct Place {
    int64_t first = -1;  // index into `begins`, of head 0; -1: no block mask
    int64_t head_stride = 0;
  };

  std::vector<int32_t> begins;
  std::vector<ListedTile> tiles;
  std::vector<uint64_t> words;
  std::vector<Place> places;  // by sequence
};

// Lists the tiles of these sequences. Throws Unsupported if indices exceed 32 bits.
TileLists ListTiles(const Problem& p, std::span<const Sequence> sequences);

// Returns the pairs of equal segment ids that the sequence's pattern, if any, keeps. The lists have one batch entry.
BlockSparseMask SegmentMask(const Problem& p, const Sequence& s);

// True if heads have different lists.
bool HasListsByHead(const Problem& p);

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_
