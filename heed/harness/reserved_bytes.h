// The memory that a Context holds, for tests of what operations say to reserve.
#ifndef HEED_HARNESS_RESERVED_BYTES_H_
#define HEED_HARNESS_RESERVED_BYTES_H_

#include <cstdint>

#include "heed/core/context.h"

namespace heed {

// Bytes that calls have reserved in `ctx`, for all threads together.
int64_t ReservedBytes(const Context& ctx);

}  // namespace heed

#endif  // HEED_HARNESS_RESERVED_BYTES_H_
