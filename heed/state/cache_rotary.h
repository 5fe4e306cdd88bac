// CacheRotary: options of a cache that applies rotary encoding to its keys.
#ifndef HEED_STATE_CACHE_ROTARY_H_
#define HEED_STATE_CACHE_ROTARY_H_

#include "heed/ops/positions/rotary.h"

namespace heed {

// Rotary encoding of ops/positions/rotary.h, applied by a cache and by attention::Attend(). The caller passes keys and
// queries without rotary encoding. Values are never rotated.
struct CacheRotary {
  RotaryPairs pairs;  // no default: the wrong convention gives plausible but wrong results

  // By default dim is that of keys, and it is at most 65536. `inverse` must be false. The scaling must not be dynamic
  // or longrope: their frequencies change with the length, so that keys in the cache would not match later ones.
  RotaryOptions options = {};

  bool operator==(const CacheRotary&) const = default;
};

}  // namespace heed

#endif  // HEED_STATE_CACHE_ROTARY_H_
