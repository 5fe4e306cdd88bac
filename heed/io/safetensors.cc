// SafetensorsFile and WriteSafetensors: the data behind the header.
#include "heed/io/safetensors.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "heed/core/error.h"
#include "heed/core/fork_safe_mutex.h"
#include "heed/core/os.h"
#include "heed/io/atomic_file_internal.h"
#include "heed/io/bytes_internal.h"
#include "heed/io/safetensors_header_internal.h"

namespace heed {
namespace {

// The order is that of the reference implementation's enumeration, by which its writer sorts.
constexpr std::pair<const char*, DType> kDTypes[] = {
    {"BOOL", DType::kBool}, {"F16", DType::kF16}, {"BF16", DType::kBF16}, {"I32", DType::kI32},
    {"F32", DType::kF32},   {"F64", DType::kF64}, {"I64", DType::kI64},
};

size_t IndexOf(DType dtype) {
  size_t i = 0;
  while (kDTypes[i].second != dtype) ++i;
  return i;
}

// "one of 'q', 'k', 'v'", or the beginning of a long list.
std::string ListNames(const std::vector<SafetensorsFile::Entry>& entries) {
  constexpr size_t kMost = 8;
  if (entries.empty()) return "none: the file is empty";
  std::string list = "one of ";
  for (size_t i = 0; i < std::min(entries.size(), kMost); ++i) {
    list += (i == 0 ? "" : ", ") + Quote(entries[i].name);
  }
  if (entries.size() > kMost) {
    list += " and " + std::to_string(entries.size() - kMost) + " more";
  }
  return list;
}

}  // namespace

struct SafetensorsFile::Impl {
  Impl(const std::string& p, std::span<const uint8_t> b, std::unique_ptr<os::MappedFile> m = nullptr)
      : map(std::move(m)), path(p), bytes(b), header(ParseSafetensorsHeader(p, b)) {
    by_name.resize(header.entries.size());
    std::iota(by_name.begin(), by_name.end(), size_t{0});
    std::sort(by_name.begin(), by_name.end(),
              [&](size_t i, size_t j) { return header.entries[i].name < header.entries[j].name; });
  }

  const Entry* Find(std::string_view name) const {
    const auto it = std::lower_bound(by_name.begin(), by_name.end(), name,
                                     [&](size_t i, std::string_view n) { return header.entries[i].name < n; });
    if (it == by_name.end() || header.entries[*it].name != name) return nullptr;
    return &header.entries[*it];
  }

  std::unique_ptr<os::MappedFile> map;  // the map of `bytes`, if they are a file's
  std::string path;
  std::span<const uint8_t> bytes;
  SafetensorsHeader header;
  std::vector<size_t> by_name;

  ForkSafeMutex mutex;  // protects the members below
  std::unordered_map<const Entry*, AlignedBytes> copies;
};

SafetensorsFile::SafetensorsFile(const std::string& path, std::span<const uint8_t> bytes)
    : impl_(std::make_unique<Impl>(path, bytes)) {}

SafetensorsFile::SafetensorsFile(const std::string& path) {
  auto map = std::make_unique<os::MappedFile>(path);
  const std::span<const uint8_t> bytes(map->data(), map->num_bytes());
  impl_ = std::make_unique<Impl>(path, bytes, std::move(map));
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::vector<SafetensorsFile::Entry>& SafetensorsFile::entries() const { return impl_->header.entries; }

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) names.push_back(entry.name);
  return names;
}

bool SafetensorsFile::Contains(std::string_view name) const { return impl_->Find(name) != nullptr; }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->header.metadata; }

ConstTensorView SafetensorsFile::tensor(std::string_view name) const {
  const Entry* const entry = impl_->Find(name);
  const std::string what = impl_->path + ": tensor " + Quote(name);
  if (entry == nullptr) {
    throw FileError(what + " is not there, expected " + ListNames(entries()));
  }
  const auto dtype =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& d) { return d.first == entry->dtype; });
  if (dtype == std::end(kDTypes)) {
    throw FileError(what + " has dtype " + entry->dtype + ", expected F64, F32, BF16, F16, I64, I32 or BOOL");
  }
  if (entry->sizes.size() > static_cast<size_t>(kMaxRank)) {
    throw FileError(what + " has rank " + std::to_string(entry->sizes.size()) + ", expected at most " +
                    std::to_string(kMaxRank));
  }
  const size_t num_bytes = static_cast<size_t>(entry->num_bytes);
  const void* data = impl_->bytes.data() + impl_->header.data_begin + static_cast<size_t>(entry->begin_bytes);
  if (dtype->second == DType::kBool) CheckBools(what, data, num_bytes);
  if (!IsAligned(data, dtype->second)) {
    std::lock_guard lock(impl_->mutex);
    AlignedBytes& copy = impl_->copies[entry];
    if (copy == nullptr) copy = CopyAligned(data, num_bytes);
    data = copy.get();
  }
  return ConstTensorView(data, dtype->second, std::span(entry->sizes));
}

void WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> sorted;
  for (const NamedTensor& named : tensors) {
    const std::string what = "WriteSafetensors: tensor " + Quote(named.name);
    if (!named.tensor.present()) {
      throw InvalidArgument(what + " is absent, expected one with data");
    }
    if (named.tensor.device().type != DeviceType::kCpu) {
      throw InvalidArgument(what + " is on a device, expected CPU memory");
    }
    sorted.push_back(&named);
  }
  std::sort(sorted.begin(), sorted.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const size_t i = IndexOf(a->tensor.dtype());
    const size_t j = IndexOf(b->tensor.dtype());
    return i != j ? i > j : a->name < b->name;
  });
  std::vector<SafetensorsFile::Entry> entries;
  std::set<std::string_view> names;
  int64_t end = 0;
  for (const NamedTensor* named : sorted) {
    const ConstTensorView& tensor = named->tensor;
    SafetensorsFile::Entry entry;
    entry.name = named->name;
    entry.dtype = kDTypes[IndexOf(tensor.dtype())].first;
    entry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    entry.begin_bytes = end;
    entry.num_bytes = tensor.num_elements() * static_cast<int64_t>(SizeOf(tensor.dtype()));
    const std::string what = "WriteSafetensors: tensor " + Quote(entry.name);
    if (!names.insert(named->name).second) {
      throw InvalidArgument(what + " is there twice, expected once");
    }
    if (__builtin_add_overflow(end, entry.num_bytes, &end)) {
      throw InvalidArgument(what + " ends beyond 2^63 bytes, expected less");
    }
    entries.push_back(std::move(entry));
  }
  const std::string header = MakeSafetensorsHeader(entries, metadata);
  AtomicFile file(path);
  file.Write(header);
  for (const NamedTensor* named : sorted) file.WriteRowMajor(named->tensor);
  file.Commit();
}

}  // namespace heed
