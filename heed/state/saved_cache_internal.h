// SavedCache: caches in files that hold more than one.
#ifndef HEED_STATE_SAVED_CACHE_INTERNAL_H_
#define HEED_STATE_SAVED_CACHE_INTERNAL_H_

#include <cstdint>

#include "heed/io/sections_internal.h"
#include "heed/state/kv_cache_base.h"

namespace heed {

struct SavedCache {
  // What KVCacheBase::Save() writes. The cache must live until the file is written.
  static void Write(const KVCacheBase& cache, const SectionWriter& to);

  // Gives an empty cache the rows that one with the same options has written. Throws FileError for everything else, and
  // for what would take more than max_bytes, one page included; the cache is as it was then.
  static void Read(const SectionReader& from, int64_t max_bytes, KVCacheBase& cache);
};

}  // namespace heed

#endif  // HEED_STATE_SAVED_CACHE_INTERNAL_H_
