// CacheRotary: that a cache turns its keys by their positions, and how.
#ifndef HEED_STATE_CACHE_ROTARY_H_
#define HEED_STATE_CACHE_ROTARY_H_

#include "heed/ops/positions/rotary.h"

namespace heed {

// Rotary encoding of ops/positions/rotary.h, done by a cache and by attention::Attend: keys and
// queries are given as they come out of their projections. Values are never turned.
struct CacheRotary {
  RotaryPairs pairs;  // no default: the wrong convention gives plausible nonsense

  // dim is that of keys by default and at most 65536, `inverse` must be false, and the scaling must not be
  // dynamic or longrope: their frequencies change with the length, and keys that are in the
  // cache would not fit those that come later.
  RotaryOptions options = {};

  bool operator==(const CacheRotary&) const = default;
};

}  // namespace heed

#endif  // HEED_STATE_CACHE_ROTARY_H_
