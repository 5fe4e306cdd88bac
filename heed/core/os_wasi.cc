// The operating system: WASI, for WebAssembly with 32-bit addresses. It has one thread and no processes, and neither
// maps files nor protects memory.
#include "heed/core/os.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "heed/core/error.h"

namespace heed::os {
namespace {

constexpr size_t kLine = 128, kPage = 4096;

// Memory has 4 GiB, and no object may have more than half of it.
constexpr off_t kMostFileBytes = off_t{1} << 31;

[[noreturn]] void ThrowErrno(const std::string& path, const char* doing) {
  const int reason = errno;
  throw FileError(path + ": cannot " + doing + ": " + std::strerror(reason));
}

void* Allocate(int64_t num_bytes, size_t alignment) {
  if (num_bytes < 0 || num_bytes > PTRDIFF_MAX - static_cast<int64_t>(alignment)) throw std::bad_alloc();
  const size_t rounded = std::max(static_cast<size_t>(num_bytes) + alignment - 1, alignment) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

int NumUsableCpus() { return 1; }

void AtFork(void (*)(), void (*)(), void (*)()) {}

int64_t ProcessId() { return 1; }

// WASI has no clock of the CPU's time. Its one thread waits for nothing but files.
double ThreadCpuSeconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

int64_t InvoluntaryContextSwitches() { return 0; }

// WebAssembly's memory never shrinks.
int64_t PeakResidentBytes() { return int64_t{65536} * static_cast<int64_t>(__builtin_wasm_memory_size(0)); }

bool PinThisThread(int) { return false; }

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  if (file < 0) ThrowErrno(path, "open");
  struct Closes {
    int file;
    ~Closes() { close(file); }
  } const closes{file};
  struct stat info;
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) throw FileError(path + ": not a regular file");
  if (info.st_size >= kMostFileBytes) {
    throw FileError(path + ": has " + std::to_string(info.st_size) + " bytes, expected fewer than " +
                    std::to_string(kMostFileBytes) + " in WebAssembly, whose memory has 32-bit addresses");
  }
  const size_t num_bytes = static_cast<size_t>(info.st_size);
  if (num_bytes == 0) return;
  uint8_t* const data = static_cast<uint8_t*>(Allocate(num_bytes, kPage));
  for (size_t done = 0; done < num_bytes;) {
    const ssize_t count = read(file, data + done, std::min(num_bytes - done, size_t{1} << 26));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int reason = count < 0 ? errno : EIO;  // the file became shorter
      std::free(data);
      errno = reason;
      ThrowErrno(path, "read");
    }
    done += static_cast<size_t>(count);
  }
  data_ = data;
  num_bytes_ = num_bytes;
}

MappedFile::~MappedFile() { std::free(const_cast<uint8_t*>(data_)); }

void* LoadSymbol(const char* file, const char*, std::string* why_not) {
  *why_not = std::string(file) + ": WebAssembly loads no libraries";
  return nullptr;
}

std::FILE* CreateNewFile(const std::string& path) { return std::fopen(path.c_str(), "wbx"); }

void RemoveFile(const std::string& path) { std::remove(path.c_str()); }

void ReplaceFile(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) ThrowErrno(to, "write");
}

std::string UserCacheFolder(std::string* why_not) {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr && cache[0] == '/') return cache;
  if (home != nullptr && home[0] != '\0') return std::string(home) + "/.cache";
  *why_not = "neither XDG_CACHE_HOME nor HOME is set";
  return "";
}

void PrepareStandardStreams() {}

std::vector<std::string> Arguments(int argc, const char* const* argv) { return {argv, argv + argc}; }

// Nothing faults here: an access outside reads or writes the same allocation.
GuardedMemory::GuardedMemory(size_t num_bytes, bool at_end) {
  const size_t usable = (num_bytes + kPage - 1) / kPage * kPage;
  map_bytes_ = usable + 2 * kPage;
  base_ = Allocate(map_bytes_, kPage);
  std::memset(base_, 0, map_bytes_);
  uint8_t* const first = static_cast<uint8_t*>(base_) + kPage;
  data_ = at_end ? first + usable - num_bytes : first;
}

GuardedMemory::~GuardedMemory() { std::free(base_); }

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

void* AllocateAligned(int64_t num_bytes) { return Allocate(num_bytes, kLine); }

void FreeAligned(void* memory) { std::free(memory); }

}  // namespace heed::os
