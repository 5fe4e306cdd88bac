// KVCacheBase forwards to Pages, which keeps third-party and internal types out of the public headers.
#include "heed/state/kv_cache_base.h"

#include <utility>

#include "heed/state/pages_internal.h"

namespace heed {

KVCacheBase::KVCacheBase(std::unique_ptr<Pages> pages) : pages_(std::move(pages)) {}
KVCacheBase::~KVCacheBase() = default;
KVCacheBase::KVCacheBase(KVCacheBase&&) noexcept = default;
KVCacheBase& KVCacheBase::operator=(KVCacheBase&&) noexcept = default;

CacheKind KVCacheBase::kind() const { return pages_->options().kind; }
int64_t KVCacheBase::batch() const { return pages_->options().batch; }
std::span<const int64_t> KVCacheBase::lengths() const { return pages_->lengths(); }
std::span<const int64_t> KVCacheBase::appended() const { return pages_->appended(); }
KVView KVCacheBase::view() const { return pages_->view(); }
int64_t KVCacheBase::nbytes() const { return pages_->num_bytes(); }

void KVCacheBase::Trim(std::span<const int64_t> lengths) { pages_->Trim(lengths); }

void KVCacheBase::Reorder(std::span<const int64_t> indices) { pages_->Reorder(indices); }

void KVCacheBase::Save(const std::string& path) const { SavePages(*pages_, path); }

}  // namespace heed
