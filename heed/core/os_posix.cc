// The operating system: Linux, with the POSIX subset that macOS shares. os_windows.cc is its other half.
#include "heed/core/os.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

std::FILE* CreateNewFile(const std::string& path) { return std::fopen(path.c_str(), "wbx"); }

void RemoveFile(const std::string& path) { std::remove(path.c_str()); }

std::string UserCacheFolder(std::string* why_not) {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr && cache[0] == '/') return cache;
  if (home != nullptr && home[0] != '\0') return std::string(home) + "/.cache";
  *why_not = "neither XDG_CACHE_HOME nor HOME is set";
  return "";
}

void PrepareStandardStreams() {
  for (int file = 0; file < 3; ++file) {
    if (fcntl(file, F_GETFD) < 0) (void)open("/dev/null", O_RDONLY);
  }
}

std::vector<std::string> Arguments(int argc, const char* const* argv) { return {argv, argv + argc}; }

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

void* AllocateAligned(int64_t num_bytes) {
  constexpr int64_t kLine = 128, kHuge = int64_t{1} << 21;
  if (num_bytes < 0 || num_bytes > PTRDIFF_MAX - kHuge) throw std::bad_alloc();
  const auto alignment = static_cast<size_t>(num_bytes >= kHuge / 8 ? kHuge : kLine);
  const size_t rounded = (static_cast<size_t>(num_bytes) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  return memory;
}

void FreeAligned(void* memory) { std::free(memory); }

}  // namespace heed::os
