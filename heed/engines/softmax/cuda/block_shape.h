// Shapes of the forward blocks of attention, by dtype, channels and kind.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BLOCK_SHAPE_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BLOCK_SHAPE_H_

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/forward_params.h"

namespace heed::softmax::cuda {

using heed::cuda::SharedTile;

inline constexpr int kTileKeys = 64;
static_assert(kSegmentKeys % kTileKeys == 0);
inline constexpr int kSmallMRows = 16;  // rows of a small-M block

// The division of rows: warps share the rows of a small-M block, each warp owns rows of a large-M block, and each
// warpgroup owns rows of a WGMMA block (Hopper).
enum class BlockKind { kSmallM, kLargeM, kWgmma };

// The shape of a forward block for these channels.
template <DType kOf, int kDepth, int kValueDepth, BlockKind kKind = BlockKind::kLargeM>
struct ForwardShape {
  static constexpr bool kIsSmallM = kKind == BlockKind::kSmallM, kUsesWgmma = kKind == BlockKind::kWgmma;
  static constexpr DType kDType = kOf;
  using Element = heed::cuda::Element<kDType>;
  static constexpr int kChannels = kDepth, kValueChannels = kValueDepth;
  static constexpr int kRowBytes = kDepth * static_cast<int>(sizeof(Element));
  // An m-fragment is 16 rows. Two of them share each load of keys and values, without which shared memory bandwidth is
  // the bound, where registers hold them.
  static constexpr int kMFragments =
      kKind == BlockKind::kLargeM && kValueDepth <= (kOf == DType::kF32 ? 64 : 128) ? 2 : 1;
  // With 64 channels the softmax takes as long as the products, so a third warpgroup fills the gaps.
  static constexpr int kWarps = kUsesWgmma && kDepth <= 64                         ? 12
                                : kMFragments == 2 || kRowBytes > 512 || kIsSmallM ? 4
                                                                                   : 8;
  static constexpr int kNWarps = kIsSmallM ? kWarps : 1;  // warps that share rows
  static constexpr int kThreads = kWarps * heed::cuda::kWarp;
  // Blocks per SM, which limits registers; for f32 shared memory limits it.
  static constexpr int kBlocks = !kIsSmallM ? 1 : kRowBytes <= 256 ? 3 : kRowBytes <= 512 ? 2 : 1;
  static constexpr int kRows = kIsSmallM ? cuda::kSmallMRows : kWarps * kMFragments * 16;
  // Stages of tiles in flight: small-M blocks wait for memory, and WGMMA reads two tiles at once.
  static constexpr int kStages = kUsesWgmma || (kIsSmallM && kRowBytes <= 256) ? 2 : 1;
  static constexpr int kLogitsPitch = kTileKeys + 8;  // of shared logits, padded against bank conflicts
  using Queries = SharedTile<kRows, kDepth, Element>;
  using Keys = SharedTile<kTileKeys, kDepth, Element>;
  using Values = SharedTile<kTileKeys, kValueDepth, Element>;
  // Offsets in shared memory.
  static constexpr int kKeysAt = Queries::kBytes, kValuesAt = kKeysAt + kStages * Keys::kBytes,
                       kLogitsAt = kValuesAt + kStages * Values::kBytes,
                       kMarksAt = kLogitsAt + (kIsSmallM ? kRows * kLogitsPitch * 4 : 0),
                       kMbarrierAt = kMarksAt + kTileKeys, kSharedBytes = kMbarrierAt + (kUsesWgmma ? 8 : 0);
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BLOCK_SHAPE_H_
