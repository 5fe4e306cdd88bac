// ALiBi slopes.
//
//   m_h = 2^(-8 (h + 1) / n)        for h < n = 2^floor(log2 H)
//   m_h = 2^(-4 (2 (h - n) + 1) / n)  for the heads that remain
//
// Source: Press, Smith, Lewis, "Train short, test long", arXiv:2108.12409, with
// the authors' rule for numbers of heads that are not powers of two.
#ifndef HEED_OPS_POSITIONS_ALIBI_H_
#define HEED_OPS_POSITIONS_ALIBI_H_

#include <cstdint>
#include <vector>

#include "heed/core/export.h"

namespace heed {

// The slopes of `heads` heads. Throws InvalidArgument below 1.
HEED_API std::vector<double> AlibiSlopes(int64_t heads);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_ALIBI_H_
