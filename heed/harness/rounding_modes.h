// The rounding modes that tests set: WebAssembly has one, other machines have four.
#ifndef HEED_HARNESS_ROUNDING_MODES_H_
#define HEED_HARNESS_ROUNDING_MODES_H_

#include <cfenv>

namespace heed {

#if defined(FE_UPWARD)
inline constexpr int kRoundingModes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
#else
inline constexpr int kRoundingModes[] = {FE_TONEAREST};
#endif

}  // namespace heed

#endif  // HEED_HARNESS_ROUNDING_MODES_H_
