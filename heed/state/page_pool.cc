// PagePool: slabs, the free list and the counts behind every page.
#include "heed/state/page_pool_internal.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "heed/core/os.h"

namespace heed {
namespace {

constexpr int64_t kLine = 64, kSystemPage = 4096;
constexpr int64_t kFirstSlab = int64_t{1} << 18, kLargestSlab = int64_t{1} << 23;

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

}  // namespace

// At the end of the page, where the rows' alignment is not disturbed.
struct PagePool::Trailer {
  std::atomic<int64_t> owners{0};
  std::byte* next_free = nullptr;
};

PagePool::PagePool(int64_t page_bytes)
    : footprint_(Footprint(page_bytes)), slab_bytes_(kFirstSlab) {}

int64_t PagePool::Footprint(int64_t page_bytes) {
  const bool large = page_bytes >= 16 * kSystemPage;
  return RoundUp(page_bytes + kLine, large ? kSystemPage : kLine);
}

PagePool::Trailer* PagePool::TrailerOf(std::byte* page) const {
  static_assert(sizeof(Trailer) <= kLine);
  return std::launder(reinterpret_cast<Trailer*>(page + footprint_ - kLine));
}

std::byte* PagePool::Take() {
  const std::lock_guard lock(mutex_);
  if (in_use_ >= limit_) throw std::bad_alloc();
  std::byte* page = free_;
  if (page != nullptr) {
    free_ = TrailerOf(page)->next_free;
  } else {
    if (num_uncut_ == 0) {
      const int64_t pages = std::max<int64_t>(slab_bytes_ / footprint_, 1);
      slabs_.reserve(slabs_.size() + 1);
      // Only slabs of 4 MiB and more begin at a system page by themselves.
      AlignedBytes slab(
          os::AllocateAligned(static_cast<size_t>(pages * footprint_ + kSystemPage)));
      const auto address = reinterpret_cast<uintptr_t>(slab.get());
      uncut_ = static_cast<std::byte*>(slab.get()) + (0 - address) % kSystemPage;
      num_uncut_ = pages;
      slabs_.push_back(std::move(slab));
      slab_bytes_ = std::min(2 * slab_bytes_, kLargestSlab);
    }
    page = uncut_;
    new (page + footprint_ - kLine) Trailer;
    --num_uncut_;
    uncut_ += footprint_;
  }
  ++in_use_;
  TrailerOf(page)->owners.store(1, std::memory_order_relaxed);
  return page;
}

void PagePool::Keep(std::byte* page) {
  TrailerOf(page)->owners.fetch_add(1, std::memory_order_relaxed);
}

void PagePool::Drop(std::byte* page) noexcept {
  Trailer* const trailer = TrailerOf(page);
  // What an owner has read happens before whoever is left alone writes.
  if (trailer->owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::lock_guard lock(mutex_);
  trailer->next_free = free_;
  free_ = page;
  --in_use_;
}

bool PagePool::IsShared(std::byte* page) const {
  return TrailerOf(page)->owners.load(std::memory_order_acquire) != 1;
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
