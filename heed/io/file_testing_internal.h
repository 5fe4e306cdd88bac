// Common code of the tests of file formats: a folder, tensors of every dtype, bytes between guard pages, and damage.
#ifndef HEED_IO_FILE_TESTING_INTERNAL_H_
#define HEED_IO_FILE_TESTING_INTERNAL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/core/tensor.h"
#include "heed/io/safetensors.h"

namespace heed {

// Each test has a folder of its own.
class FileTest : public testing::Test {
 protected:
  FileTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = info->name();
    std::ranges::replace(name, '/', '_');  // precedes a parameter
    folder_ = testing::TempDir() + "heed_" + std::to_string(os::ProcessId()) + "_" + name;
    std::filesystem::create_directories(folder_);
  }
  ~FileTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  int NumFiles() const { return static_cast<int>(std::distance(std::filesystem::directory_iterator(folder_), {})); }

 private:
  std::string folder_;
};

inline std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The elements of a view in row-major order.
inline std::string RowMajorBytes(const ConstTensorView& view) {
  std::string bytes;
  const int64_t element = static_cast<int64_t>(SizeOf(view.dtype()));
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    int64_t rest = i, at = 0;
    for (int axis = view.rank() - 1; axis >= 0; --axis) {
      at += rest % view.size(axis) * view.stride(axis);
      rest /= view.size(axis);
    }
    bytes.append(view.as<char>() + at * element, static_cast<size_t>(element));
  }
  return bytes;
}

// The parts of a safetensors file, one of which a test damages.
struct FileParts {
  std::map<std::string, std::string> metadata;
  std::map<std::string, std::pair<ConstTensorView, std::string>> tensors;

  explicit FileParts(const std::string& path) {
    const SafetensorsFile file(path);
    metadata = file.metadata();
    for (const std::string& name : file.names()) {
      tensors[name] = {file.tensor(name), RowMajorBytes(file.tensor(name))};
    }
  }
  void Write(const std::string& path) const {
    std::vector<NamedTensor> list;
    for (auto& [name, tensor] : tensors) {
      const auto& [view, bytes] = tensor;
      list.push_back({name, {bytes.data(), view.dtype(), view.sizes()}});
    }
    WriteSafetensors(path, list, metadata);
  }
  void Set(const std::string& name, size_t i, int64_t value) {
    std::memcpy(tensors[name].second.data() + i * 8, &value, 8);
  }
  void Reshape(const std::string& name, DType dtype, const std::vector<int64_t>& sizes) {
    auto& [view, bytes] = tensors[name];
    view = ConstTensorView(nullptr, dtype, sizes);
    bytes.resize(static_cast<size_t>(view.num_elements()) * SizeOf(dtype));
  }
};

// Elements of any dtype with distinct bytes; bools are 0 and 1.
inline std::vector<uint8_t> SomeElements(DType dtype, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * SizeOf(dtype));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(dtype == DType::kBool ? i % 3 == 1 : i * 37 + 11);
  }
  return bytes;
}

// A copy that begins (or ends) at an inaccessible page.
class Guarded {
 public:
  Guarded(const std::string& bytes, bool at_end) : memory_(bytes.size(), at_end), num_bytes_(bytes.size()) {
    if (!bytes.empty()) std::memcpy(memory_.data(), bytes.data(), bytes.size());
  }
  std::span<const uint8_t> bytes() const { return {memory_.data(), num_bytes_}; }

 private:
  os::GuardedMemory memory_;
  size_t num_bytes_;
};

// Damages `bytes` a little, mostly in [0, header_end), and moves header_end accordingly.
inline void Damage(std::mt19937& random, std::string& bytes, size_t& header_end) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  constexpr char kBytes[] = "{}[]()\",:'-+.eE0123456789TFnb \\\n\x7f";
  const char* const numbers[] = {"0",
                                 "1",
                                 "2",
                                 "3",
                                 "8",
                                 "16",
                                 "255",
                                 "4294967296",
                                 "9223372036854775807",
                                 "9223372036854775808",
                                 "18446744073709551615",
                                 "99999999999999999999",
                                 "-1",
                                 "1.5",
                                 "1e3",
                                 "",
                                 "2305843009213693952"};
  const size_t at = below(10) != 0 ? below(std::min(header_end, bytes.size())) : below(bytes.size());
  const size_t before = bytes.size();
  const char byte = below(3) != 0 ? kBytes[below(sizeof(kBytes) - 1)] : static_cast<char>(below(256));
  const size_t kind = bytes.empty() ? 2 : below(9);
  switch (kind) {
    case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8))); break;
    case 1: bytes[at] = byte; break;
    case 2: bytes.insert(at, below(8) == 0 ? 1 + below(70) : 1, byte); break;
    case 3: bytes.erase(at, 1 + below(4)); break;
    case 4: bytes.resize(below(2) != 0 ? at : bytes.size() - 1); break;
    case 5: bytes.append(1 + below(9), byte); break;
    case 6: {  // inserts a copy of a substring somewhere
      const std::string piece = bytes.substr(below(header_end), 1 + below(60));
      bytes.insert(at, piece);
      break;
    }
    default: {  // another number
      const size_t digit = bytes.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const size_t end = bytes.find_first_not_of("0123456789", digit);
      bytes.replace(digit, std::min(end, bytes.size()) - digit, numbers[below(std::size(numbers))]);
    }
  }
  if (at < header_end && kind != 5) header_end += bytes.size() - before;
  header_end = std::min(header_end, bytes.size());
}

}  // namespace heed

#endif  // HEED_IO_FILE_TESTING_INTERNAL_H_
