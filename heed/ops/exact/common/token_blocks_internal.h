// Blocks of 64 tokens of the key heads of a call, and which of them are in memory at the same time.
#ifndef HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INTERNAL_H_
#define HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INTERNAL_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heed/mechanism/tokens_internal.h"

namespace heed::token_blocks {

inline constexpr int64_t kBlock = 64;  // tokens of a block, which begins at a multiple of 64 of its sequence

// One key head of one sequence, whose blocks are kept from the index `first` on.
struct Unit {
  mechanism::TokenRange tokens;
  int64_t key_head, first, blocks;
  int64_t count(int64_t block) const { return std::min(kBlock, tokens.end - tokens.begin - block * kBlock); }
};

// Units whose blocks are kept at the same time: at most 64 MiB, or one unit.
inline std::vector<std::vector<Unit>> Waves(const std::vector<mechanism::TokenRange>& sequences, int64_t key_heads,
                                            int64_t block_bytes) {
  std::vector<std::vector<Unit>> waves;
  int64_t kept = 0;
  for (const mechanism::TokenRange& s : sequences) {
    const int64_t blocks = (s.end - s.begin + kBlock - 1) / kBlock;
    for (int64_t h = 0; h < key_heads && blocks > 0; ++h) {
      if (waves.empty() || (kept + blocks) * block_bytes > (int64_t{64} << 20)) {
        waves.emplace_back();
        kept = 0;
      }
      waves.back().push_back({s, h, kept, blocks});
      kept += blocks;
    }
  }
  return waves;
}
inline int64_t NumBlocks(const std::vector<Unit>& wave) {
  return wave.empty() ? 0 : wave.back().first + wave.back().blocks;
}
// The most blocks of a wave, and of a unit.
inline int64_t MostBlocks(const std::vector<std::vector<Unit>>& waves) {
  int64_t most = 0;
  for (const std::vector<Unit>& wave : waves) most = std::max(most, NumBlocks(wave));
  return most;
}
inline int64_t LongestUnit(const std::vector<std::vector<Unit>>& waves) {
  int64_t longest = 0;
  for (const std::vector<Unit>& wave : waves) {
    for (const Unit& u : wave) longest = std::max(longest, u.blocks);
  }
  return longest;
}

// Pairs of a head that blocks of rows compute, each of which sees its own block as a whole.
inline double VisitedPairs(const std::vector<mechanism::TokenRange>& sequences) {
  double pairs = 0;
  for (const mechanism::TokenRange& s : sequences) {
    for (int64_t begin = 0, n = s.end - s.begin; begin < n; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, n);
      pairs += static_cast<double>((end - begin) * end);
    }
  }
  return pairs;
}

// A block of rows of one query head, or with head 0, of a key head.
struct Task {
  const Unit* unit;
  int64_t head, block;  // head: within its group
};

}  // namespace heed::token_blocks

#endif  // HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INTERNAL_H_
