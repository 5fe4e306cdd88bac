// PagePool: pages of one size, cut from slabs, counted and used again.
#ifndef HEED_STATE_PAGE_POOL_INTERNAL_H_
#define HEED_STATE_PAGE_POOL_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "heed/io/bytes_internal.h"

namespace heed {

// A page begins at a multiple of 64 bytes, of 4096 if it has at least 64 KiB, and never
// moves. What it holds is indeterminate when it is taken. All functions may be called by
// several threads at once. Slabs go back to the system with the pool.
class PagePool {
 public:
  // At most 2^61 bytes.
  explicit PagePool(int64_t page_bytes);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // What a page occupies: its bytes and its count of owners, rounded up.
  static int64_t Footprint(int64_t page_bytes);
  int64_t footprint() const { return footprint_; }

  // A page of one owner. Throws std::bad_alloc.
  std::byte* Take();

  // One owner more, one less. The last one's Drop makes the page free.
  void Keep(std::byte* page);
  void Drop(std::byte* page) noexcept;

  // Whether others own it too: who is told no may write, and stays alone until it calls
  // Keep() itself.
  bool IsShared(std::byte* page) const;

  int64_t pages_in_use() const;

  // Take() fails beyond so many pages in use: how tests run out of memory.
  void LimitPages(int64_t most);

 private:
  struct Trailer;
  Trailer* TrailerOf(std::byte* page) const;

  const int64_t footprint_;
  mutable std::mutex mutex_;  // of what follows
  std::vector<AlignedBytes> slabs_;
  std::byte* uncut_ = nullptr;  // of the last slab
  int64_t num_uncut_ = 0;       // pages
  int64_t slab_bytes_;          // of the next one
  std::byte* free_ = nullptr;   // linked through the trailers
  int64_t in_use_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
};

}  // namespace heed

#endif  // HEED_STATE_PAGE_POOL_INTERNAL_H_
