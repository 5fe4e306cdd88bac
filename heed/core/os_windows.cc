// The operating system: Windows. Its calls take UTF-16; errors are those of GetLastError().
#include "heed/core/os.h"

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
// After windows.h:
#include <psapi.h>
#include <shellapi.h>
#undef ReplaceFile

#include <fcntl.h>
#include <io.h>
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"

namespace heed::os {
namespace {

// Bytes that are not UTF-8 become U+FFFD, which no file has in its name.
std::wstring Wide(const std::string& text) {
  const int bytes = static_cast<int>(text.size());
  std::wstring wide(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, text.data(), bytes, nullptr, 0)), L'\0');
  MultiByteToWideChar(CP_UTF8, 0, text.data(), bytes, wide.data(), static_cast<int>(wide.size()));
  return wide;
}

std::string Utf8(const wchar_t* wide) {
  const int bytes = WideCharToMultiByte(CP_UTF8, 0, wide, -1, nullptr, 0, nullptr, nullptr);  // and a final 0
  if (bytes <= 0) return "";
  std::string text(static_cast<size_t>(bytes), '\0');
  WideCharToMultiByte(CP_UTF8, 0, wide, -1, text.data(), bytes, nullptr, nullptr);
  text.pop_back();
  return text;
}

// "File not found.", in the system's words but without their end of line.
std::string ErrorText(DWORD error) {
  wchar_t* wide = nullptr;
  constexpr DWORD kFlags = FORMAT_MESSAGE_ALLOCATE_BUFFER | FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS;
  const DWORD size = FormatMessageW(kFlags, nullptr, error, 0, reinterpret_cast<wchar_t*>(&wide), 0, nullptr);
  std::string text = size == 0 ? "" : Utf8(wide);
  LocalFree(wide);
  text.erase(text.find_last_not_of(" .\r\n") + 1);
  return text.empty() ? "error " + std::to_string(error) : text;
}

[[noreturn]] void ThrowLastError(const std::string& path, const char* doing) {
  throw FileError(path + ": cannot " + doing + ": " + ErrorText(GetLastError()));
}

size_t PageBytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

struct Group {
  WORD index;
  KAFFINITY cpus;
};

// The CPUs that this process may run on, by processor group (at most 64 CPUs each). A process in several groups may
// run on all CPUs of each.
std::vector<Group> UsableGroups() {
  USHORT count = 0;
  GetProcessGroupAffinity(GetCurrentProcess(), &count, nullptr);
  std::vector<USHORT> indices(count);
  // Wine has no processor groups: all CPUs are in the first.
  if (count == 0 || GetProcessGroupAffinity(GetCurrentProcess(), &count, indices.data()) == 0) indices = {0};
  std::vector<Group> groups;
  for (const USHORT index : indices) {
    const DWORD cpus = GetActiveProcessorCount(index);
    groups.push_back({index, cpus >= 64 ? ~KAFFINITY{0} : (KAFFINITY{1} << cpus) - 1});
  }
  DWORD_PTR process = 0, system = 0;
  if (groups.size() == 1 && GetProcessAffinityMask(GetCurrentProcess(), &process, &system) != 0 && process != 0) {
    groups[0].cpus = process;
  }
  return groups;
}

}  // namespace

int NumUsableCpus() {
  int count = 0;
  for (const Group& group : UsableGroups()) count += __builtin_popcountll(group.cpus);
  return count > 0 ? count : 1;
}

void AtFork(void (*)(), void (*)(), void (*)()) {}

int64_t ProcessId() { return static_cast<int64_t>(GetCurrentProcessId()); }

double ThreadCpuSeconds() {
  FILETIME created, ended, kernel, user;
  if (GetThreadTimes(GetCurrentThread(), &created, &ended, &kernel, &user) == 0) return 0;
  const auto ticks = [](const FILETIME& t) {
    return static_cast<double>(t.dwHighDateTime) * 4294967296.0 + t.dwLowDateTime;
  };
  return 1e-7 * (ticks(kernel) + ticks(user));
}

int64_t InvoluntaryContextSwitches() { return 0; }

int64_t PeakResidentBytes() {
  PROCESS_MEMORY_COUNTERS counters;
  if (K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters)) == 0) return 0;
  return static_cast<int64_t>(counters.PeakWorkingSetSize);
}

bool PinThisThread(int index) {
  if (index < 0) return false;
  for (const Group& group : UsableGroups()) {
    for (int cpu = 0; cpu < 64; ++cpu) {
      const KAFFINITY bit = KAFFINITY{1} << cpu;
      if ((group.cpus & bit) == 0 || index-- != 0) continue;
      GROUP_AFFINITY one = {};
      one.Mask = bit;
      one.Group = group.index;
      return SetThreadGroupAffinity(GetCurrentThread(), &one, nullptr) != 0;
    }
  }
  return false;
}

MappedFile::MappedFile(const std::string& path) {
  const std::wstring wide = Wide(path);
  const DWORD attributes = GetFileAttributesW(wide.c_str());
  if (attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0) {
    throw FileError(path + ": not a regular file");
  }
  constexpr DWORD kOthersMay = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
  const HANDLE file =
      CreateFileW(wide.c_str(), GENERIC_READ, kOthersMay, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE) ThrowLastError(path, "open");
  LARGE_INTEGER size;
  if (GetFileType(file) != FILE_TYPE_DISK || GetFileSizeEx(file, &size) == 0) {
    CloseHandle(file);
    throw FileError(path + ": not a regular file");
  }
  num_bytes_ = static_cast<size_t>(size.QuadPart);
  if (num_bytes_ > 0) {
    // A view keeps its mapping alive, and a mapping its file.
    const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
    if (mapping != nullptr)
      data_ = static_cast<const uint8_t*>(MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, num_bytes_));
    const DWORD error = GetLastError();
    if (mapping != nullptr) CloseHandle(mapping);
    CloseHandle(file);
    SetLastError(error);
    if (data_ == nullptr) ThrowLastError(path, "map");
    return;
  }
  CloseHandle(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) UnmapViewOfFile(data_);
}

void* LoadSymbol(const char* file, const char* symbol, std::string* why_not) {
  std::string reasons;
  const auto open = [&](const std::wstring& path, DWORD flags) {
    const HMODULE library = LoadLibraryExW(path.c_str(), nullptr, flags);
    if (library == nullptr) {
      const std::string reason = ErrorText(GetLastError());
      reasons += (reasons.empty() ? "" : "; ") + Utf8(path.c_str()) + ": cannot open: " + reason;
    }
    return library;
  };
  HMODULE here = nullptr, library = nullptr;
  constexpr DWORD kOfAddress = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
  if (GetModuleHandleExW(kOfAddress, reinterpret_cast<const wchar_t*>(&LoadSymbol), &here) != 0) {
    wchar_t path[32768];  // the most that a path has
    const DWORD size = GetModuleFileNameW(here, path, 32768);
    const std::wstring folder(path, size);
    const size_t slash = folder.find_last_of(L"\\/");
    if (slash != std::wstring::npos) {
      library = open(folder.substr(0, slash + 1) + Wide(file), LOAD_WITH_ALTERED_SEARCH_PATH);
    }
  }
  if (library == nullptr) library = open(Wide(file), LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
  void* const address = library == nullptr ? nullptr : reinterpret_cast<void*>(GetProcAddress(library, symbol));
  if (address == nullptr) *why_not = library == nullptr ? reasons : std::string(file) + " has no " + symbol;
  return address;
}

std::FILE* CreateNewFile(const std::string& path) {
  const int file = _wopen(Wide(path).c_str(), _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, 0600);
  return file < 0 ? nullptr : _fdopen(file, "wb");
}

void RemoveFile(const std::string& path) { _wremove(Wide(path).c_str()); }

void ReplaceFile(const std::string& from, const std::string& to) {
  const std::wstring wide_from = Wide(from), wide_to = Wide(to);
  if (MoveFileExW(wide_from.c_str(), wide_to.c_str(), MOVEFILE_REPLACE_EXISTING) == 0) ThrowLastError(to, "write");
}

std::string UserCacheFolder(std::string* why_not) {
  const wchar_t* const folder = _wgetenv(L"LOCALAPPDATA");
  if (folder != nullptr && folder[0] != L'\0') return Utf8(folder);
  *why_not = "LOCALAPPDATA is not set";
  return "";
}

void PrepareStandardStreams() {
  for (int file = 0; file < 3; ++file) {
    if (_get_osfhandle(file) < 0) (void)_wopen(L"NUL", _O_RDONLY);
    _setmode(file, _O_BINARY);
  }
  SetConsoleOutputCP(CP_UTF8);
}

std::vector<std::string> Arguments(int argc, const char* const* argv) {
  int count = 0;
  wchar_t** const wide = CommandLineToArgvW(GetCommandLineW(), &count);
  if (wide == nullptr) return {argv, argv + argc};
  std::vector<std::string> arguments;
  for (int i = 0; i < count; ++i) arguments.push_back(Utf8(wide[i]));
  LocalFree(wide);
  return arguments;
}

GuardedMemory::GuardedMemory(size_t num_bytes, bool at_end) {
  const size_t page = PageBytes();
  const size_t usable = (num_bytes + page - 1) / page * page;
  map_bytes_ = usable + 2 * page;
  base_ = VirtualAlloc(nullptr, map_bytes_, MEM_RESERVE, PAGE_NOACCESS);
  if (base_ == nullptr) throw std::bad_alloc();
  uint8_t* first = static_cast<uint8_t*>(base_) + page;
  if (usable > 0 && VirtualAlloc(first, usable, MEM_COMMIT, PAGE_READWRITE) == nullptr) {
    VirtualFree(base_, 0, MEM_RELEASE);
    throw std::bad_alloc();
  }
  data_ = at_end ? first + usable - num_bytes : first;
}

GuardedMemory::~GuardedMemory() {
  if (base_ != nullptr) VirtualFree(base_, 0, MEM_RELEASE);
}

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

void* AllocateAligned(int64_t num_bytes) {
  constexpr int64_t kLine = 128, kPage = 4096;
  if (num_bytes < 0 || num_bytes > PTRDIFF_MAX - kPage) throw std::bad_alloc();
  void* const memory = _aligned_malloc(static_cast<size_t>(num_bytes == 0 ? kLine : num_bytes),
                                       static_cast<size_t>(num_bytes >= (1 << 18) ? kPage : kLine));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void FreeAligned(void* memory) { _aligned_free(memory); }

}  // namespace heed::os
