// Choice of a SIMD target per call, from a cap that belongs to the Context.
//
// Highway chooses once per process. heed keeps a mask of allowed targets, so that two Contexts can differ and a test
// can run every target in turn.
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

// Names of the targets that kernels for `dtype` are compiled for and that run on this CPU, best first. "tiles" means
// every SIMD target and AMX tiles.
HEED_API std::vector<std::string> AvailableTargets(DType dtype = DType::kF32);

// The value of CMake's option HEED_TARGETS, "all" or "native", and the names of the targets that kernels of this build
// are compiled for, best first, whether this CPU runs them or not.
const char* TargetsOption();
std::vector<std::string> CompiledTargets();

// Throws Unsupported if this CPU runs none of the targets, which a build for another machine's target meets.
void CheckCpuHasTarget();

// The mask that allows `name` and every target below it. "tiles" allows everything, also on CPUs without AMX. Throws
// InvalidArgument for a name that is not a target, Unsupported for a target that this build or CPU lacks.
HEED_API int64_t TargetsUpTo(std::string_view name);

// The best available target in the mask.
HEED_API const char* TargetName(int64_t allowed);

// True if this CPU has a bf16 dot product (VDPBF16PS, BFDOT) that is faster than f32 FMA, and `allowed` includes it.
bool HasBF16Pairs(int64_t allowed);

// The unit that multiplies tiles: AMX, its emulation, or none where AMX is missing or not allowed.
enum class AmxUnit { kNone, kHardware, kEmulated };
AmxUnit AmxOf(int64_t allowed);

// While alive, AMX tiles are emulated wherever they are allowed, for tests. The results have the same bits.
class EmulateAmx {
 public:
  EmulateAmx();
  ~EmulateAmx();
  EmulateAmx(const EmulateAmx&) = delete;
  EmulateAmx& operator=(const EmulateAmx&) = delete;
};

// True if this CPU has a dot product of four bytes (VPDPBUSD), and `allowed` includes it.
bool HasByteProducts(int64_t allowed);

// The best target among `allowed`, as an index into a HWY_EXPORT table.
size_t TargetIndex(int64_t allowed);

}  // namespace heed

#endif  // HEED_CORE_DISPATCH_H_
