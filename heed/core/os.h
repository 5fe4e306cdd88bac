// All services of the operating system and the CPU that heed uses: memory maps, affinity, names, floating-point
// control. os_posix.cc and os_windows.cc implement those of the system, cpu.cc those of the CPU. Paths are UTF-8.
#ifndef HEED_CORE_OS_H_
#define HEED_CORE_OS_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "heed/core/export.h"

namespace heed::os {

// The number of CPUs that this process may run on, at least 1.
HEED_API int NumUsableCpus();

// "AMD EPYC 9B14", or "unknown CPU".
HEED_API std::string CpuName();

// True if this CPU has AMX with bf16 and the system lets this process use it. The system is queried once. If false,
// WhyNoAmx() says what is missing.
HEED_API bool HasAmx();
HEED_API std::string WhyNoAmx();

// True if this CPU is ARM's with DotProd, the dot product of four bytes, and AES, which files for it assume too.
HEED_API bool HasDotProducts();

HEED_API int64_t ProcessId();

// Registers functions that fork() calls from now on: `before` in the thread that forks, then the others in the parent
// and in the child. Windows has no fork(), and nothing is registered there.
HEED_API void AtFork(void (*before)(), void (*in_parent)(), void (*in_child)());

// CPU time of the calling thread in seconds.
HEED_API double ThreadCpuSeconds();

// The number of times that the process was preempted (involuntary context switches); 0 on Windows, which does not
// count them.
HEED_API int64_t InvoluntaryContextSwitches();

// Peak resident memory of the process in bytes.
HEED_API int64_t PeakResidentBytes();

// Pins the calling thread to the index-th usable CPU; false where impossible.
HEED_API bool PinThisThread(int index);

// A whole file, mapped read-only. Throws FileError.
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

// The address of a symbol in a shared library, which is loaded and never unloaded. The file of this name is looked for
// beside the file that contains this function, then by the system's loader. Returns null, and the reason in `why_not`,
// if the library or the symbol is missing.
HEED_API void* LoadSymbol(const char* file, const char* symbol, std::string* why_not);

// Opens a file that does not exist yet, for writing. Returns null and sets errno where that fails.
HEED_API std::FILE* CreateNewFile(const std::string& path);

HEED_API void RemoveFile(const std::string& path);

// Renames a finished temporary file to its final name. Throws FileError.
HEED_API void ReplaceFile(const std::string& from, const std::string& to);

// The user's folder for files that can be made again: $XDG_CACHE_HOME or ~/.cache, on Windows %LOCALAPPDATA%. Returns
// an empty text, and in `why_not` which variables are not set, where there is none.
HEED_API std::string UserCacheFolder(std::string* why_not);

// For main(), first: the descriptors 0, 1 and 2 are open, so that no file that is opened later gets one of them, and
// what is written to them is not translated. Writing to a standard output that was closed stays an error.
HEED_API void PrepareStandardStreams();

// The arguments of main() in UTF-8, the program's name among them.
HEED_API std::vector<std::string> Arguments(int argc, const char* const* argv);

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

// Aligned memory, on huge pages if it is large and the system offers them. Throws std::bad_alloc, also for more bytes
// than a pointer can address and for a negative number. Free it with FreeAligned.
HEED_API void* AllocateAligned(int64_t num_bytes);
HEED_API void FreeAligned(void* memory);

// Results of arithmetic on x86-64 are flushed to zero if they are subnormal, which takes it 100 cycles and more
// otherwise; ARM computes them as fast as others, and cannot flush results without flushing inputs.
#if defined(__x86_64__)
inline constexpr bool kFlushesSubnormalResults = true;
#else
inline constexpr bool kFlushesSubnormalResults = false;
#endif

// While alive, the thread rounds to nearest, does not trap, and treats subnormal results as above, whatever its mode
// was before. Results must not depend on the host's mode.
class HEED_API ScopedFloatControl {
 public:
  ScopedFloatControl();
  ~ScopedFloatControl();
  ScopedFloatControl(const ScopedFloatControl&) = delete;
  ScopedFloatControl& operator=(const ScopedFloatControl&) = delete;

 private:
  uint64_t saved_ = 0;
};

}  // namespace heed::os

#endif  // HEED_CORE_OS_H_
