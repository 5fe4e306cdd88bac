// Choosing a SIMD target per call, from a cap that belongs to the Context.
//
// Highway's own choice is one per process; ours is a mask of allowed targets, so
// that two Contexts can differ and a test can walk through all of them.
#ifndef HEED_CORE_DISPATCH_H_
#define HEED_CORE_DISPATCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/export.h"

namespace heed {

inline constexpr int64_t kAllTargets = ~int64_t{0};

// Names of the targets that kernels for `dtype` are compiled for and that run on
// this CPU, best first. "tiles" stands for all of SIMD and matrix tiles.
HEED_API std::vector<std::string> AvailableTargets(DType dtype = DType::kF32);

// The mask that allows `name` and everything below it. "tiles" allows everything, on CPUs
// without matrix tiles too. Throws InvalidArgument for a name that is
// not a target, Unsupported for one that this build or CPU lacks.
HEED_API int64_t TargetsUpTo(std::string_view name);

// The best available target in the mask.
HEED_API const char* TargetName(int64_t allowed);

// True if this CPU multiplies pairs of bf16 faster than f32, and may here.
bool HasBF16Pairs(int64_t allowed);

// What multiplies matrix tiles here: nothing, where they are missing or may not be used.
enum class AmxUnit { kNone, kHardware, kEmulated };
AmxUnit AmxOf(int64_t allowed);

// While alive, tiles are emulated wherever they are allowed, for tests. The bits are the
// same.
class EmulateAmx {
 public:
  EmulateAmx();
  ~EmulateAmx();
  EmulateAmx(const EmulateAmx&) = delete;
  EmulateAmx& operator=(const EmulateAmx&) = delete;
};

// True if this CPU multiplies and adds up four bytes at once, and may here.
bool HasByteProducts(int64_t allowed);

// The best target among `allowed`, as an index into a HWY_EXPORT table.
size_t TargetIndex(int64_t allowed);

}  // namespace heed

#endif  // HEED_CORE_DISPATCH_H_
