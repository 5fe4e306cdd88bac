// Everything heed asks of the operating system and the CPU, in one file: memory
// maps, affinity, names, floating-point control. A port is a second os.cc.
#ifndef HEED_CORE_OS_H_
#define HEED_CORE_OS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "heed/core/export.h"

namespace heed::os {

// CPUs that this process may run on, at least 1.
HEED_API int NumUsableCpus();

// "AMD EPYC 9B14", or "unknown CPU".
HEED_API std::string CpuName();

// True if this CPU has matrix tiles of bf16 and the system lets this process use them,
// which is asked once. Else WhyNoAmx() says what is missing.
HEED_API bool HasAmx();
HEED_API std::string WhyNoAmx();

HEED_API int64_t ProcessId();

// From now on, fork() calls these: `before` in the thread that forks, then the others in the
// two processes.
HEED_API void AtFork(void (*before)(), void (*in_parent)(), void (*in_child)());

// Seconds of CPU time of the calling thread.
HEED_API double ThreadCpuSeconds();

// Times that the process was descheduled against its will.
HEED_API int64_t InvoluntaryContextSwitches();

// Peak resident memory of the process in bytes.
HEED_API int64_t PeakResidentBytes();

// Pins the calling thread to the index-th usable CPU; false where impossible.
HEED_API bool PinThisThread(int index);

// A whole file, read-only. Throws FileError.
class HEED_API MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  const uint8_t* data_ = nullptr;
  size_t num_bytes_ = 0;
};

// The address of a symbol of a shared library, which is loaded and stays: of the file of this name beside the one that
// holds this function, else where the system's loader finds it. Null, and why, if there is none.
HEED_API void* LoadSymbol(const char* file, const char* symbol, std::string* why_not);

// Moves a finished temporary file onto its name. Throws FileError.
HEED_API void ReplaceFile(const std::string& from, const std::string& to);

// `num_bytes` of zeroed memory between two inaccessible pages: the first byte
// follows a guard if `at_end` is false, else the last byte precedes one. Any
// access outside faults at once, which no sanitizer sees for masked loads.
class HEED_API GuardedMemory {
 public:
  GuardedMemory(size_t num_bytes, bool at_end);
  ~GuardedMemory();
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory& operator=(GuardedMemory&& other) noexcept;

  uint8_t* data() const { return data_; }

 private:
  void* base_ = nullptr;
  size_t map_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

// Aligned memory, on huge pages where it is large and the system offers them.
// Throws std::bad_alloc. Free with FreeAligned.
HEED_API void* AllocateAligned(size_t num_bytes);
HEED_API void FreeAligned(void* memory);

// While alive: round to nearest, no traps, subnormal results flushed to zero,
// whatever the calling thread had set. Bits must not depend on the host.
class HEED_API ScopedFloatControl {
 public:
  ScopedFloatControl();
  ~ScopedFloatControl();
  ScopedFloatControl(const ScopedFloatControl&) = delete;
  ScopedFloatControl& operator=(const ScopedFloatControl&) = delete;

 private:
  uint32_t saved_ = 0;
};

}  // namespace heed::os

#endif  // HEED_CORE_OS_H_
