// The call of an operation with transitions as its files share it, checked, and the size of its blocks.
//
// Transitions are linear maps of a token between key and query, as in PaTH and in Wall attention:
// s_ij = scale q_i^T A_i ... A_{j+1} k_j.
#ifndef HEED_OPS_EXACT_COMMON_TRANSITIONS_CALL_H_
#define HEED_OPS_EXACT_COMMON_TRANSITIONS_CALL_H_

#include <cstdint>
#include <vector>

#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/token_blocks_internal.h"

namespace heed::transitions {

using token_blocks::kBlock;

struct Call {
  std::vector<mechanism::TokenRange> sequences;
  int64_t B = 0, T = 0, H = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t heads = 0;  // heads of the transitions: a multiple of Hkv that divides H
  double scale = 1;

  int64_t group() const { return H / heads; }        // query heads of a head of transitions
  int64_t key_group() const { return heads / Hkv; }  // heads of transitions of a key head
};

}  // namespace heed::transitions

#endif  // HEED_OPS_EXACT_COMMON_TRANSITIONS_CALL_H_
