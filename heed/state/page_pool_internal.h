// PagePool: pages of one shape, cut from slabs, with counts of owners, and used again when released.
#ifndef HEED_STATE_PAGE_POOL_INTERNAL_H_
#define HEED_STATE_PAGE_POOL_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "heed/core/fork_safe_mutex.h"
#include "heed/io/bytes_internal.h"

namespace heed {

// A page is one unit of memory in each lane of its slab, [lane][page][unit]. Memory reaches full speed in long runs
// only, and therefore the units of neighbouring pages are contiguous in a lane.
struct PageShape {
  int64_t lanes = 1;
  int64_t unit_bytes = 64;  // a multiple of 64
  int64_t slab_pages = 1;

  int64_t page_bytes() const { return lanes * unit_bytes; }
  int64_t lane_bytes() const { return slab_pages * unit_bytes; }
};

// A page is identified by the address of its unit in lane 0; its unit in lane l is l lane_bytes() further on. Units
// begin at a multiple of 64 bytes and never move. Their content is indeterminate when the page is taken. Several
// threads may call all functions at once. Slabs return to the system with the pool.
class PagePool {
 public:
  // Slabs must have at most 2^61 bytes.
  explicit PagePool(const PageShape& shape);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Bytes that a page occupies.
  int64_t footprint() const { return shape_.page_bytes(); }

  // Takes the free page of the lowest address and gives it one owner: pages that are taken consecutively are mostly
  // contiguous, also where they were used before. Throws std::bad_alloc.
  std::byte* Take();

  // Keep() adds an owner and Drop() removes one. The page is free after the last Drop().
  void Keep(std::byte* page);
  void Drop(std::byte* page) noexcept;

  // True if the page has other owners too. A caller that gets false may write, and stays the only owner until it calls
  // Keep() itself.
  bool IsShared(std::byte* page) const;

  int64_t pages_in_use() const;

  // Take() fails beyond this number of pages in use. Tests use it to run out of memory.
  void LimitPages(int64_t most);

 private:
  struct Slab {
    AlignedBytes memory;
    std::unique_ptr<int64_t[]> owners;  // owners of each page
  };

  size_t SlabsUpTo(const std::byte* address) const;
  int64_t& OwnersOf(const std::byte* page) const;
  void AddSlab();

  const PageShape shape_;
  mutable ForkSafeMutex mutex_;   // protects the members below
  std::vector<Slab> slabs_;       // in order of addresses
  std::vector<std::byte*> free_;  // a heap, the lowest address first; has room for all pages
  int64_t in_use_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
};

}  // namespace heed

#endif  // HEED_STATE_PAGE_POOL_INTERNAL_H_
