// Which keys rows keep of a pattern and of segments, as kernels of GPUs read it.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visits.h"

namespace heed::softmax::cuda {

// The lists of visits.h one behind the other. Words of tiles that are the same stand there once, 64 of them together.
struct TileLists {
  struct Place {
    int64_t first = -1;  // of `begins`, of head 0; -1: everything is kept
    int64_t head_stride = 0;
  };

  std::vector<int32_t> begins;
  std::vector<ListedTile> tiles;
  std::vector<uint64_t> words;
  std::vector<Place> places;  // by sequence
};

// Of some sequences of a problem. Throws Unsupported if they are too long to count in 32 bits.
TileLists ListTiles(const Problem& p, std::span<const Sequence> sequences);

// Pairs of one segment that the sequence's pattern keeps, if it has one, in lists of one batch entry.
Visits SegmentVisits(const Problem& p, const Sequence& s);

// Whether heads have lists of their own.
bool HasListsByHead(const Problem& p);

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_TILE_LISTS_H_
