// The CPU: its name, its AMX tiles, its dot products of bytes, its floating-point control.
#include "heed/core/os.h"

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

namespace heed::os {

std::string CpuName() {
#if defined(__x86_64__)
  uint32_t r[12] = {};
  if (__get_cpuid_max(0x80000000u, nullptr) >= 0x80000004u) {
    for (uint32_t i = 0; i < 3; ++i) {
      __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
    }
    char text[sizeof(r) + 1] = {};
    std::memcpy(text, r, sizeof(r));
    std::string name(text);
    name.erase(0, name.find_first_not_of(' '));
    name.erase(name.find_last_not_of(' ') + 1);
    uint32_t a = 0, b = 0, c = 0, d = 0;
    __get_cpuid(1, &a, &b, &c, &d);
    uint32_t family = (a >> 8) & 15, model = (a >> 4) & 15;
    if (family == 15) family += (a >> 20) & 255;
    if (family >= 6) model += ((a >> 16) & 15) << 4;
    return name + " (family " + std::to_string(family) + " model " + std::to_string(model) + ")";
  }
#elif defined(__APPLE__)
  char text[128] = {};
  size_t size = sizeof(text) - 1;
  if (sysctlbyname("machdep.cpu.brand_string", text, &size, nullptr, 0) == 0) return text;
#elif defined(__aarch64__)
  // Linux has no name for it, but the numbers of Arm's main ID register, which tools such as lscpu know names for.
  std::ifstream file("/proc/cpuinfo");
  std::string line, implementer, part;
  while (std::getline(file, line) && (implementer.empty() || part.empty())) {
    const std::string name = line.substr(0, line.find('\t')), value = line.substr(line.rfind(' ') + 1);
    if (name == "CPU implementer") implementer = value;
    if (name == "CPU part") part = value;
  }
  if (!part.empty()) return "ARM CPU (implementer " + implementer + " part " + part + ")";
#elif defined(__wasm__)
  return "WebAssembly";
#endif
  return "unknown CPU";
}

namespace {

// Returns an empty text if AMX can be used. The 8 KiB of tile registers per thread are not part of a process until it
// requests them, so that other processes do not pay for saving them.
std::string RequestAmx() {
#if defined(__x86_64__) && defined(__GNUC__)
  constexpr uint32_t kTileBits = 1u << 24 | 1u << 22 | 1u << 25;  // tiles, their products of bf16 and of bytes
  uint32_t a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  if ((d & kTileBits) != kTileBits) return "this CPU has none";
  __get_cpuid(1, &a, &b, &c, &d);
  uint32_t saved = 0, unused = 0;  // features that the system saves, if CPUID reports that XGETBV exists
  if ((c & 1u << 27) != 0) asm volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
  constexpr uint32_t kTileStates = 1u << 17 | 1u << 18;
  if ((saved & kTileStates) != kTileStates) return "the system does not save them";
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return std::string("the system refuses them: ") + std::strerror(errno);
  }
  return "";
#else
  return "this system has no call that requests them";
#endif
#else
  return "this CPU has none";
#endif
}

const std::string& AmxRefusal() {
  static const std::string refusal = RequestAmx();
  return refusal;
}

}  // namespace

bool HasAmx() { return AmxRefusal().empty(); }

std::string WhyNoAmx() { return AmxRefusal(); }

bool HasDotProducts() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBoth = HWCAP_ASIMDDP | HWCAP_AES;
  return (getauxval(AT_HWCAP) & kBoth) == kBoth;
#elif defined(__APPLE__)
  const auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return has("hw.optional.arm.FEAT_DotProd") && has("hw.optional.arm.FEAT_AES");
#else
  return false;
#endif
}

#if defined(__x86_64__)
ScopedFloatControl::ScopedFloatControl() : saved_(_mm_getcsr()) {
  constexpr uint32_t kMaskAllTraps = 0x1F80, kFlushToZero = 0x8000;
  _mm_setcsr(kMaskAllTraps | kFlushToZero);
}
ScopedFloatControl::~ScopedFloatControl() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
// Zeros are the defaults: to nearest, no traps, gradual underflow. The bit that flushes results would flush inputs too.
ScopedFloatControl::ScopedFloatControl() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, xzr");
}
ScopedFloatControl::~ScopedFloatControl() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
ScopedFloatControl::ScopedFloatControl() = default;
ScopedFloatControl::~ScopedFloatControl() { (void)saved_; }
#endif

}  // namespace heed::os
