// ReservedBytes, by the private sizes of a Context. Explicit instantiations may name private members, so that the class
// needs no function for tests alone.
#include "heed/harness/reserved_bytes.h"

namespace heed {
namespace {

struct Scratch {};
struct Shared {};
struct Staging {};
struct Tables {};
int64_t Get(const Context& ctx, Scratch);
int64_t Get(const Context& ctx, Shared);
int64_t Get(const Context& ctx, Staging);
int64_t Get(const Context& ctx, Tables);

template <class Kind, int64_t Context::* kSize>
struct Sized {
  friend int64_t Get(const Context& ctx, Kind) { return ctx.*kSize; }
};
template struct Sized<Scratch, &Context::scratch_bytes_>;
template struct Sized<Shared, &Context::shared_bytes_>;
template struct Sized<Staging, &Context::staging_bytes_>;
template struct Sized<Tables, &Context::tables_bytes_>;

}  // namespace

int64_t ReservedBytes(const Context& ctx) {
  return ctx.num_threads() * Get(ctx, Scratch()) + Get(ctx, Shared()) + Get(ctx, Staging()) + Get(ctx, Tables());
}

}  // namespace heed
