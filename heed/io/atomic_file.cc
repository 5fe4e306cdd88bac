// AtomicFile: a temporary file in the same folder, then a rename.
#include "heed/io/atomic_file_internal.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/path.h"

namespace heed {
namespace {

namespace fs = std::filesystem;

// The name is unique among all threads of all live processes.
std::string TemporaryName() {
  static std::atomic<uint64_t> count{0};
  return ".heed-" + std::to_string(os::ProcessId()) + "-" + std::to_string(count.fetch_add(1)) + ".tmp";
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  std::error_code ignored;
  const fs::path given = ToPath(path);
  const fs::file_status status = fs::status(given, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw FileError(path + ": not a regular file");
  }
  if (fs::is_symlink(fs::symlink_status(given, ignored))) {
    const fs::path resolved =
        fs::exists(status) ? fs::canonical(given, ignored) : given.parent_path() / fs::read_symlink(given, ignored);
    if (resolved.has_filename()) target_ = ToUtf8(resolved);
  }
  constexpr int kTries = 100;  // a crashed process may have left its file
  for (int i = 0; file_ == nullptr && i < kTries; ++i) {
    temporary_ = ToUtf8(ToPath(target_).parent_path() / TemporaryName());
    file_ = os::CreateNewFile(temporary_);
    if (file_ == nullptr && errno != EEXIST) break;
  }
  if (file_ == nullptr) Fail();
}

AtomicFile::~AtomicFile() {
  if (file_ != nullptr) std::fclose(file_);
  if (!committed_) os::RemoveFile(temporary_);
}

void AtomicFile::Fail() const {
  const int reason = errno;
  throw FileError(path_ + ": cannot write: " + std::strerror(reason));
}

void AtomicFile::Write(std::string_view bytes) {
  if (bytes.empty()) return;
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) Fail();
}

void AtomicFile::WriteBools(std::string_view bytes) {
  constexpr size_t kChunk = 1 << 16;
  std::string bools;
  for (; !bytes.empty(); bytes.remove_prefix(bools.size())) {
    bools = bytes.substr(0, kChunk);
    for (char& b : bools) b = b != 0;
    Write(bools);
  }
}

void AtomicFile::WriteRowMajor(const ConstTensorView& tensor) {
  if (tensor.num_elements() == 0) return;
  const int64_t element = static_cast<int64_t>(SizeOf(tensor.dtype()));
  const char* const data = static_cast<const char*>(tensor.data());

  int outer_axes = tensor.rank();  // the other axes are one contiguous run
  int64_t run = 1;
  while (outer_axes > 0 && (tensor.size(outer_axes - 1) == 1 || tensor.stride(outer_axes - 1) == run)) {
    run *= tensor.size(--outer_axes);
  }

  int64_t index[kMaxRank] = {};
  int64_t offset = 0;
  for (;;) {
    const std::string_view bytes(data + offset * element, static_cast<size_t>(run * element));
    if (tensor.dtype() == DType::kBool) {
      WriteBools(bytes);
    } else {
      Write(bytes);
    }
    int axis = outer_axes - 1;
    for (; axis >= 0; --axis) {
      if (++index[axis] < tensor.size(axis)) break;
      offset -= tensor.stride(axis) * (tensor.size(axis) - 1);
      index[axis] = 0;
    }
    if (axis < 0) return;
    offset += tensor.stride(axis);
  }
}

void AtomicFile::Commit() {
  std::FILE* const file = file_;
  file_ = nullptr;
  if (std::fclose(file) != 0) Fail();
  os::ReplaceFile(temporary_, target_);
  committed_ = true;
}

}  // namespace heed
