// Choice of a SIMD target. This is the only file that reads the list of targets from Highway.
#include "heed/core/targets.h"
// After targets.h:
#include "hwy/highway.h"

#include <atomic>
#include <utility>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"

namespace heed {
namespace {

// The targets are cached: CPUID traps in a virtual machine and then takes 40 us per call.
int64_t Supported() {
  static const int64_t targets = hwy::SupportedTargets() & ~(os::HasDotProducts() ? 0 : HWY_NEON);
  return targets;
}

// Kernels for bf16 are compiled for one more target (targets.h).
constexpr int64_t kPairTargets = HEED_EXTRA_TARGETS & (HWY_AVX3_ZEN4 | HWY_NEON_BF16);
int64_t Available(DType dtype) { return Supported() & (HWY_TARGETS | (dtype == DType::kBF16 ? kPairTargets : 0)); }

// Kernels for int8 keys are compiled for these too.
constexpr int64_t kByteTargets = HEED_EXTRA_TARGETS & (HWY_AVX3_DL | HWY_NEON);
int64_t Available() { return Available(DType::kBF16) | (Supported() & kByteTargets); }

// AMX is not a Highway target here. Highway reserves the lowest bits, so this one is free.
constexpr int64_t kAmx = 1;
static_assert((HWY_TARGETS & kAmx) == 0);

std::atomic<int> emulations{0};

#if defined(HEED_NATIVE_TARGET)
constexpr char kBuiltWith[] = "native", kOfThisBuild[] = " (built with HEED_TARGETS=native)";
#elif defined(HEED_ONE_TARGET)
constexpr char kBuiltWith[] = "avx2", kOfThisBuild[] = " (built with HEED_TARGETS=avx2)";
#else
constexpr char kBuiltWith[] = "all", kOfThisBuild[] = "";
#endif

// Highway's name, but on ARM: of its targets heed has the baseline, NEON for what DotProd adds, and NEON_BF16
// (targets.h).
const char* NameOf(int64_t target) {
  if (target == HWY_NEON_WITHOUT_AES) return "NEON";
  return target == HWY_NEON ? "NEON_DOTPROD" : hwy::TargetName(target);
}

// Targets of every processor, by the names that compilers and people use.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"avx512", "AVX3"}, {"avx2", "AVX2"}, {"sse2", "SSE2"}, {"neon", "NEON"}};

// Better targets have lower bits.
int64_t Best(int64_t targets) { return targets & -targets; }

int64_t BestAllowed(int64_t allowed) {
  const int64_t usable = Available(DType::kF32) & allowed;
  return Best(usable != 0 ? usable : HWY_STATIC_TARGET);
}

std::vector<std::string> Names(int64_t targets) {
  std::vector<std::string> names;
  for (; targets != 0; targets &= targets - 1) names.emplace_back(NameOf(Best(targets)));
  return names;
}

}  // namespace

const char* TargetsOption() { return kBuiltWith; }

std::vector<std::string> CompiledTargets() {
  return Names(HWY_TARGETS | (HWY_ARCH_X86 || HWY_ARCH_ARM_A64 ? HEED_EXTRA_TARGETS : 0));
}

void CheckCpuHasTarget() {
  if (Available(DType::kF32) != 0) return;
  throw Unsupported(std::string("heed was built with HEED_TARGETS=") + kBuiltWith + ", for " +
                    NameOf(HWY_STATIC_TARGET) + ", which this CPU lacks");
}

std::vector<std::string> AvailableTargets(DType dtype) {
  std::vector<std::string> names;
  if (dtype != DType::kF64 && AmxOf(kAllTargets) != AmxUnit::kNone) {
    names.emplace_back("tiles");
  }
  for (std::string& name : Names(Available(dtype))) names.push_back(std::move(name));
  return names;
}

int64_t TargetsUpTo(std::string_view given) {
  if (given == "tiles") return kAllTargets;
  std::string_view name = given;
  bool exists = false;
  for (const auto& [other_name, target] : kOtherNames) {
    if (given == other_name) name = target;
    exists |= name == target;
  }
  std::string available;
  for (int64_t rest = Available(); rest != 0; rest &= rest - 1) {
    if (name == NameOf(Best(rest))) return -Best(rest);
    available += std::string(NameOf(Best(rest))) + " ";
  }
  const std::string_view no_target = NameOf(0);
  for (int bit = 0; bit < 63; ++bit) exists |= name != no_target && name == NameOf(int64_t{1} << bit);
  if (exists) {
    throw Unsupported("isa is '" + std::string(given) + "', available here: " + available + "tiles" + kOfThisBuild);
  }
  throw InvalidArgument("isa is '" + std::string(given) + "', expected one of: " + available + "tiles");
}

const char* TargetName(int64_t allowed) { return NameOf(BestAllowed(allowed)); }

AmxUnit AmxOf(int64_t allowed) {
  if ((allowed & kAmx) == 0) return AmxUnit::kNone;
  if (emulations.load(std::memory_order_relaxed) > 0) return AmxUnit::kEmulated;
  return os::HasAmx() ? AmxUnit::kHardware : AmxUnit::kNone;
}

EmulateAmx::EmulateAmx() { ++emulations; }
EmulateAmx::~EmulateAmx() { --emulations; }

bool HasBF16Pairs(int64_t allowed) { return (Supported() & allowed & kPairTargets) != 0; }

bool HasByteProducts(int64_t allowed) { return (Supported() & allowed & kByteTargets) != 0; }

size_t TargetIndex(int64_t allowed) {
  if constexpr ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) return 0;  // tables of one target have one entry
  hwy::ChosenTarget chosen;
  chosen.Update(BestAllowed(allowed));
  return chosen.GetIndex();
}

}  // namespace heed
