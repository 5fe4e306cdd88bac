// The operating system: Linux, with the POSIX subset that macOS shares.
#include "heed/core/os.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

#include "heed/core/error.h"

namespace heed::os {
namespace {

[[noreturn]] void ThrowErrno(const std::string& path, const char* doing) {
  const int reason = errno;
  throw FileError(path + ": cannot " + doing + ": " + std::strerror(reason));
}

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

int NumUsableCpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

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
#else
  return false;
#endif
}

void AtFork(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  if (pthread_atfork(before, in_parent, in_child) != 0) throw std::bad_alloc();
}

int64_t ProcessId() { return static_cast<int64_t>(getpid()); }

double ThreadCpuSeconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

int64_t InvoluntaryContextSwitches() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nivcsw;
}

int64_t PeakResidentBytes() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
#if defined(__APPLE__)
  return usage.ru_maxrss;
#else
  return int64_t{1024} * usage.ru_maxrss;
#endif
}

bool PinThisThread(int index) {
#if defined(__linux__)
  cpu_set_t set, one;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return false;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set) || index-- != 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof(one), &one) == 0;
  }
#else
  (void)index;
#endif
  return false;
}

MappedFile::MappedFile(const std::string& path) {
  // Opening does not block: a pipe is refused below instead of waited for.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) ThrowErrno(path, "open");
  struct stat info;
  const bool regular = fstat(file, &info) == 0 && S_ISREG(info.st_mode);
  if (!regular) {
    close(file);
    throw FileError(path + ": not a regular file");
  }
  num_bytes_ = static_cast<size_t>(info.st_size);
  if (num_bytes_ > 0) {
    void* map = mmap(nullptr, num_bytes_, PROT_READ, MAP_PRIVATE, file, 0);
    if (map == MAP_FAILED) {
      const int reason = errno;
      close(file);
      errno = reason;
      ThrowErrno(path, "map");
    }
    data_ = static_cast<const uint8_t*>(map);
  }
  close(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), num_bytes_);
}

void* LoadSymbol(const char* file, const char* symbol, std::string* why_not) {
  std::string reasons;
  const auto open = [&](const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) reasons += (reasons.empty() ? "" : "; ") + std::string(dlerror());
    return library;
  };
  Dl_info here;
  void* library = nullptr;
  if (dladdr(reinterpret_cast<void*>(&LoadSymbol), &here) != 0 && here.dli_fname != nullptr) {
    const std::string path = here.dli_fname;
    const size_t slash = path.rfind('/');
    if (slash != std::string::npos) library = open(path.substr(0, slash + 1) + file);
  }
  if (library == nullptr) library = open(file);
  void* address = library == nullptr ? nullptr : dlsym(library, symbol);
  if (address == nullptr) *why_not = library == nullptr ? reasons : std::string(file) + " has no " + symbol;
  return address;
}

void ReplaceFile(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) ThrowErrno(to, "write");
}

GuardedMemory::GuardedMemory(size_t num_bytes, bool at_end) {
  const size_t page = PageBytes();
  const size_t usable = (num_bytes + page - 1) / page * page;
  map_bytes_ = usable + 2 * page;
  base_ = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw std::bad_alloc();
  }
  uint8_t* first = static_cast<uint8_t*>(base_) + page;
  if (usable > 0 && mprotect(first, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(base_, map_bytes_);
    throw std::bad_alloc();
  }
  data_ = at_end ? first + usable - num_bytes : first;
}

GuardedMemory::~GuardedMemory() {
  if (base_ != nullptr) munmap(base_, map_bytes_);
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

void* AllocateAligned(size_t num_bytes) {
  constexpr size_t kLine = 128, kHuge = size_t{1} << 21;
  const size_t alignment = num_bytes >= kHuge / 8 ? kHuge : kLine;
  if (num_bytes > SIZE_MAX - alignment) throw std::bad_alloc();
  const size_t rounded = (num_bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? kLine : rounded);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  return memory;
}

void FreeAligned(void* memory) { std::free(memory); }

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
