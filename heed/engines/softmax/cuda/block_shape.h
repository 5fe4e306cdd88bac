// What blocks of attention forward have, by dtype, channels and kind.
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
inline constexpr int kSmallM = 16;  // of a block of few rows

// Rows that warps share, or have each, or have by groups of four, which have products of their own on Hopper.
enum class BlockKind { kSmallM, kLargeM, kWgmma };

// What a block of a kernel for these channels has.
template <DType kOf, int kDepth, int kValueDepth, BlockKind kKind = BlockKind::kLargeM>
struct ForwardShape {
  static constexpr bool kIsSmallM = kKind == BlockKind::kSmallM, kUsesWgmma = kKind == BlockKind::kWgmma;
  static constexpr DType kDType = kOf;
  using Element = heed::cuda::Element<kDType>;
  static constexpr int kChannels = kDepth, kValueChannels = kValueDepth;
  static constexpr int kRowBytes = kDepth * static_cast<int>(sizeof(Element));
  // A strip is 16 rows. Two share what a warp loads of keys and values, which shared memory is the bound of otherwise,
  // but have to fit its registers.
  static constexpr int kMFragments =
      kKind == BlockKind::kLargeM && kValueDepth <= (kOf == DType::kF32 ? 64 : 128) ? 2 : 1;
  // With 64 channels groups weigh as long as they multiply, and a third one has something to do meanwhile.
  static constexpr int kWarps = kUsesWgmma && kDepth <= 64                         ? 12
                                : kMFragments == 2 || kRowBytes > 512 || kIsSmallM ? 4
                                                                                   : 8;
  static constexpr int kNWarps = kIsSmallM ? kWarps : 1;  // of the same rows
  static constexpr int kThreads = kWarps * heed::cuda::kWarp;
  // Of a SM that registers are to suffice for, and of f32 those that memory does.
  static constexpr int kBlocks = !kIsSmallM ? 1 : kRowBytes <= 256 ? 3 : kRowBytes <= 512 ? 2 : 1;
  static constexpr int kRows = kIsSmallM ? cuda::kSmallM : kWarps * kMFragments * 16;
  // Tiles under way at once: memory is what few rows wait for, and groups have two tiles in their products.
  static constexpr int kStages = kUsesWgmma || (kIsSmallM && kRowBytes <= 256) ? 2 : 1;
  static constexpr int kLogitsPitch = kTileKeys + 8;  // of rows of logits that warps share, in different banks
  using Queries = SharedTile<kRows, kDepth, Element>;
  using Keys = SharedTile<kTileKeys, kDepth, Element>;
  using Values = SharedTile<kTileKeys, kValueDepth, Element>;
  // In shared memory, one behind the other.
  static constexpr int kKeysAt = Queries::kBytes, kValuesAt = kKeysAt + kStages * Keys::kBytes,
                       kLogitsAt = kValuesAt + kStages * Values::kBytes,
                       kMarksAt = kLogitsAt + (kIsSmallM ? kRows * kLogitsPitch * 4 : 0),
                       kMbarrierAt = kMarksAt + kTileKeys, kSharedBytes = kMbarrierAt + (kUsesWgmma ? 8 : 0);
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BLOCK_SHAPE_H_
