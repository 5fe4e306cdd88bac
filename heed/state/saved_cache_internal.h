// SavedCache: caches in files that hold more than one.
#ifndef HEED_STATE_SAVED_CACHE_INTERNAL_H_
#define HEED_STATE_SAVED_CACHE_INTERNAL_H_

#include <cstdint>

#include "heed/io/sections_internal.h"
#include "heed/state/kv_cache_base.h"

namespace heed {

struct SavedCache {
  // Adds what KVCacheBase::Save() writes to a file. The cache must live until the file is written.
  static void Write(const KVCacheBase& cache, const SectionWriter& to);

  // Gives an empty cache the rows that one with the same options has written. Throws FileError for any other content,
  // and if more than max_bytes would be needed, one page included; the cache is then unchanged.
  static void Read(const SectionReader& from, int64_t max_bytes, KVCacheBase& cache);
};

}  // namespace heed

#endif  // HEED_STATE_SAVED_CACHE_INTERNAL_H_
