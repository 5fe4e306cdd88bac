// PagePool: slabs, the heap of free pages and the counts of owners.
#include "heed/state/page_pool_internal.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <new>
#include <utility>

#include "heed/core/os.h"

namespace heed {
namespace {

// Orders a heap so that the lowest address is at its top.
constexpr std::greater<std::byte*> kHigher{};

std::byte* Begin(const AlignedBytes& memory) { return static_cast<std::byte*>(memory.get()); }

}  // namespace

PagePool::PagePool(const PageShape& shape) : shape_(shape) {}

// The number of slabs that begin at this address or before it.
size_t PagePool::SlabsUpTo(const std::byte* address) const {
  const auto end = std::upper_bound(slabs_.begin(), slabs_.end(), address, [](const std::byte* x, const Slab& slab) {
    return std::less<const std::byte*>()(x, Begin(slab.memory));
  });
  return static_cast<size_t>(end - slabs_.begin());
}

// Counts are stored apart from the pages: between them they would break every run of rows.
int64_t& PagePool::OwnersOf(const std::byte* page) const {
  const Slab& slab = slabs_[SlabsUpTo(page) - 1];
  return slab.owners[static_cast<size_t>((page - Begin(slab.memory)) / shape_.unit_bytes)];
}

// Called when no page is free.
void PagePool::AddSlab() {
  const size_t pages = static_cast<size_t>(shape_.slab_pages);
  Slab slab;
  slab.owners = std::make_unique<int64_t[]>(pages);
  slab.memory.reset(os::AllocateAligned(shape_.slab_pages * shape_.page_bytes()));
  std::byte* const begin = Begin(slab.memory);
  free_.reserve((slabs_.size() + 1) * pages);
  slabs_.insert(slabs_.begin() + static_cast<ptrdiff_t>(SlabsUpTo(begin)), std::move(slab));
  for (int64_t page = 0; page < shape_.slab_pages; ++page) {
    free_.push_back(begin + page * shape_.unit_bytes);  // ascending order is a heap
  }
}

std::byte* PagePool::Take() {
  const std::lock_guard lock(mutex_);
  if (in_use_ >= limit_) throw std::bad_alloc();
  if (free_.empty()) AddSlab();
  std::pop_heap(free_.begin(), free_.end(), kHigher);
  std::byte* const page = free_.back();
  free_.pop_back();
  ++in_use_;
  OwnersOf(page) = 1;
  return page;
}

void PagePool::Keep(std::byte* page) {
  const std::lock_guard lock(mutex_);
  ++OwnersOf(page);
}

void PagePool::Drop(std::byte* page) noexcept {
  const std::lock_guard lock(mutex_);
  if (--OwnersOf(page) != 0) return;
  free_.push_back(page);
  std::push_heap(free_.begin(), free_.end(), kHigher);
  --in_use_;
}

bool PagePool::IsShared(std::byte* page) const {
  const std::lock_guard lock(mutex_);
  return OwnersOf(page) != 1;
}

int64_t PagePool::pages_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

void PagePool::LimitPages(int64_t most) {
  const std::lock_guard lock(mutex_);
  limit_ = most;
}

}  // namespace heed
