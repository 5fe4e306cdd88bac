// PagePool: pages of one shape, cut from slabs, counted and used again.
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

// A page is one unit of memory in each lane of its slab, [lane][page][unit]: memory is read
// at full speed in long runs only, and so the units of a lane of neighbouring pages are one.
struct PageShape {
  int64_t lanes = 1;
  int64_t unit_bytes = 64;  // a multiple of 64
  int64_t slab_pages = 1;

  int64_t page_bytes() const { return lanes * unit_bytes; }
  int64_t lane_bytes() const { return slab_pages * unit_bytes; }
};

// A page is known by the address of its unit in lane 0, and that in lane l is l lane_bytes()
// further on. Units begin at a multiple of 64 bytes and never move. What they hold is
// indeterminate when their page is taken. All functions may be called by several threads at
// once. Slabs go back to the system with the pool.
class PagePool {
 public:
  // Slabs of at most 2^61 bytes.
  explicit PagePool(const PageShape& shape);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // What a page occupies.
  int64_t footprint() const { return shape_.page_bytes(); }

  // A page of one owner, of all free ones that of the lowest address: what is taken in a row
  // lies in a row, also where it was used before. Throws std::bad_alloc.
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
  struct Slab {
    AlignedBytes memory;
    std::unique_ptr<int64_t[]> owners;  // of each page
  };

  size_t SlabsUpTo(const std::byte* address) const;
  int64_t& OwnersOf(const std::byte* page) const;
  void AddSlab();

  const PageShape shape_;
  mutable ForkSafeMutex mutex_;   // of what follows
  std::vector<Slab> slabs_;       // by address
  std::vector<std::byte*> free_;  // a heap, the lowest address first; has room for all pages
  int64_t in_use_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
};

}  // namespace heed

#endif  // HEED_STATE_PAGE_POOL_INTERNAL_H_
