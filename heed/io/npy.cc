// NPY: a bounded parser, written by hand, for the one dict literal that the format needs.
#include "heed/io/npy.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/io/atomic_file_internal.h"
#include "heed/io/bytes_internal.h"

namespace heed {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kMagic = "\x93NUMPY"sv;
constexpr size_t kMaxHeaderBytes = 65536;
constexpr char kExpectedDTypes[] = "<f8, <f4, <f2, <i8, <i4 or |b1";

constexpr std::pair<const char*, DType> kDTypes[] = {
    {"<f8", DType::kF64}, {"<f4", DType::kF32}, {"<f2", DType::kF16},
    {"<i8", DType::kI64}, {"<i4", DType::kI32}, {"|b1", DType::kBool},
};

[[noreturn]] void Fail(const std::string& path, const std::string& what) { throw FileError(path + ": " + what); }

struct Header {
  DType dtype = DType::kF32;
  bool fortran_order = false;
  std::vector<int64_t> sizes;
  size_t data_begin = 0;  // offset in the file
};

// Reads "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }".
class DictReader {
 public:
  DictReader(const std::string& path, std::string_view text, Header& header)
      : path_(path), text_(text), header_(header) {}

  void Read() {
    bool has_descr = false, has_order = false, has_shape = false;
    Expect('{');
    while (!Skip('}')) {
      const std::string_view key = String("a quoted key or '}'");
      bool* const seen = key == "descr"           ? &has_descr
                         : key == "fortran_order" ? &has_order
                         : key == "shape"         ? &has_shape
                                                  : nullptr;
      if (seen == nullptr || *seen) {
        Fail(path_, "header has the key " + Quote(key) + (seen == nullptr ? "" : " twice") +
                        ", expected descr, fortran_order and shape");
      }
      *seen = true;
      Expect(':');
      if (key == "descr") {
        Descr();
      } else if (key == "fortran_order") {
        FortranOrder();
      } else {
        Shape();
      }
      if (!Skip(',')) {
        Expect('}');
        break;
      }
    }
    if (!has_descr || !has_order || !has_shape) {
      Fail(path_, std::string("header has no ") +
                      (!has_descr   ? "descr"
                       : !has_order ? "fortran_order"
                                    : "shape") +
                      ", expected descr, fortran_order and shape");
    }
    if (text_.find_first_not_of(" \t\r\n", at_) != std::string_view::npos) {
      Unexpected("only spaces after the dict");
    }
  }

 private:
  [[noreturn]] void Unexpected(const std::string& expected) {
    Blanks();
    Fail(path_, "header has " + (at_ < text_.size() ? Quote(text_.substr(at_, 1)) : std::string("its end")) +
                    " at its byte " + std::to_string(at_ + 1) + ", expected " + expected);
  }

  void Blanks() {
    while (at_ < text_.size() && " \t\r\n"sv.find(text_[at_]) != std::string_view::npos) {
      ++at_;
    }
  }

  char Peek() {
    Blanks();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Skip(char c) {
    if (Peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }

  void Expect(char c) {
    if (!Skip(c)) Unexpected(std::string("'") + c + "'");
  }

  // Reads the content of a quoted string. Escapes are refused, because no expected string has one.
  std::string_view String(const char* expected) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') Unexpected(expected);
    const size_t begin = ++at_;
    at_ = std::min(text_.find(quote, begin), text_.size());
    if (at_ == text_.size()) Unexpected("the end of a string");
    return text_.substr(begin, at_++ - begin);
  }

  void Descr() {
    if (Peek() == '[') {
      Fail(path_, std::string("has a structured dtype, expected ") + kExpectedDTypes);
    }
    const std::string_view descr = String("a quoted dtype");
    for (const auto& [name, dtype] : kDTypes) {
      if (descr == name) {
        header_.dtype = dtype;
        return;
      }
    }
    const auto has = [&](std::string_view what) { return descr.find(what) != std::string_view::npos; };
    const char* hint = "";
    if (descr.starts_with('>')) {
      hint = " (big-endian)";
    } else if (has("O")) {
      hint = " (Python objects)";
    } else if (has("V2") || has("u2")) {
      hint = " (if it is bf16, use safetensors)";
    }
    Fail(path_, "has dtype " + Quote(descr) + hint + ", expected " + kExpectedDTypes);
  }

  void FortranOrder() {
    Blanks();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        header_.fortran_order = value;
        return;
      }
    }
    Unexpected("True or False");
  }

  void Shape() {
    Expect('(');
    bool comma = true;  // between the last size and here
    while (!Skip(')')) {
      if (!comma) Unexpected("',' or ')'");
      if (header_.sizes.size() == static_cast<size_t>(kMaxRank)) {
        Fail(path_, "has a rank above " + std::to_string(kMaxRank) + ", expected at most " + std::to_string(kMaxRank));
      }
      header_.sizes.push_back(Size());
      comma = Skip(',');
    }
    if (header_.sizes.size() == 1 && !comma) {
      Fail(path_,
           "header has a number in brackets for shape, expected a tuple "
           "such as (3,)");
    }
  }

  int64_t Size() {
    Blanks();
    const size_t begin = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value)) {
        Fail(path_, "shape has a size above 2^63 - 1, expected less");
      }
    }
    if (at_ == begin) Unexpected("a size >= 0");
    return value;
  }

  const std::string& path_;
  const std::string_view text_;
  Header& header_;
  size_t at_ = 0;
};

Header ParseHeader(const std::string& path, std::span<const uint8_t> file) {
  const std::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
  if (!bytes.starts_with(kMagic)) {
    Fail(path, "does not begin with \\x93NUMPY, expected an NPY file");
  }
  if (bytes.size() < kMagic.size() + 4) {
    Fail(path, "has " + std::to_string(bytes.size()) + " bytes, expected at least 10 for an NPY header");
  }
  const int major = file[6], minor = file[7];
  if (major < 1 || major > 3 || minor != 0) {
    Fail(path, "has NPY version " + std::to_string(major) + "." + std::to_string(minor) + ", expected 1.0, 2.0 or 3.0");
  }
  const size_t begin = major == 1 ? 10 : 12;
  if (bytes.size() < begin) {
    Fail(path, "has " + std::to_string(bytes.size()) + " bytes, expected at least 12 for an NPY header");
  }
  size_t length = 0;
  for (size_t i = begin; i-- > 8;) length = length << 8 | file[i];
  const size_t limit = std::min(bytes.size() - begin, kMaxHeaderBytes);
  if (length > limit) {
    Fail(path, "header has " + std::to_string(length) + " bytes, expected at most " + std::to_string(limit) +
                   (limit < kMaxHeaderBytes ? ", the rest of the file" : ""));
  }
  const std::string_view text = bytes.substr(begin, length);
  if (!text.ends_with('\n')) {
    Fail(path, "header does not end with a new line, expected one");
  }
  Header header;
  header.data_begin = begin + length;
  DictReader(path, text, header).Read();
  return header;
}

}  // namespace

struct NpyFile::Impl {
  Impl(const std::string& path, std::span<const uint8_t> bytes, std::unique_ptr<os::MappedFile> m = nullptr)
      : map(std::move(m)) {
    const Header header = ParseHeader(path, bytes);
    const std::vector<int64_t>& sizes = header.sizes;
    const int64_t element = static_cast<int64_t>(SizeOf(header.dtype));

    // Row-major strides of the shape or of the reversed shape. Zeros count as ones, so that strides cannot overflow
    // either.
    std::vector<int64_t> strides(sizes.size());
    int64_t count = 1, num_bytes = 0;
    bool fits = true;
    for (size_t n = 0; n < sizes.size(); ++n) {
      const size_t axis = header.fortran_order ? n : sizes.size() - 1 - n;
      strides[axis] = count;
      fits = fits && !__builtin_mul_overflow(count, std::max<int64_t>(sizes[axis], 1), &count);
    }
    if (!fits || __builtin_mul_overflow(count, element, &num_bytes)) {
      Fail(path, "has shape " + ShapeString(sizes) + ", expected fewer than 2^63 bytes");
    }
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) num_bytes = 0;
    const size_t rest = bytes.size() - header.data_begin;
    if (rest != static_cast<size_t>(num_bytes)) {
      Fail(path, "has " + std::to_string(rest) + " bytes of data, expected " + std::to_string(num_bytes) + " for " +
                     Name(header.dtype) + " " + ShapeString(sizes) +
                     (rest < static_cast<size_t>(num_bytes) ? ": the file is cut short" : ""));
    }
    const void* data = bytes.data() + header.data_begin;
    if (header.dtype == DType::kBool) CheckBools(path + ":", data, rest);
    if (!IsAligned(data, header.dtype)) {
      copy = CopyAligned(data, rest);
      data = copy.get();
    }
    view = ConstTensorView(data, header.dtype, std::span(sizes), std::span(std::as_const(strides)));
  }

  std::unique_ptr<os::MappedFile> map;
  AlignedBytes copy;
  ConstTensorView view;
};

NpyFile::NpyFile(const std::string& path, std::span<const uint8_t> bytes)
    : impl_(std::make_unique<Impl>(path, bytes)) {}

NpyFile::NpyFile(const std::string& path) {
  auto map = std::make_unique<os::MappedFile>(path);
  const std::span<const uint8_t> bytes(map->data(), map->num_bytes());
  impl_ = std::make_unique<Impl>(path, bytes, std::move(map));
}

NpyFile::~NpyFile() = default;
NpyFile::NpyFile(NpyFile&&) noexcept = default;
NpyFile& NpyFile::operator=(NpyFile&&) noexcept = default;

ConstTensorView NpyFile::tensor() const { return impl_->view; }

void WriteNpy(const std::string& path, const ConstTensorView& tensor) {
  if (!tensor.present()) {
    throw InvalidArgument("WriteNpy: tensor is absent, expected one with data");
  }
  if (tensor.device().type != DeviceType::kCpu) {
    throw InvalidArgument("WriteNpy: tensor is on a device, expected CPU memory");
  }
  const auto dtype =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& d) { return d.second == tensor.dtype(); });
  if (dtype == std::end(kDTypes)) {
    throw InvalidArgument(std::string("WriteNpy: tensor has dtype ") + Name(tensor.dtype()) +
                          ", expected f64, f32, f16, i64, i32 or bool; a "
                          ".safetensors file holds bf16");
  }
  std::string text = std::string("{'descr': '") + dtype->first + "', 'fortran_order': False, 'shape': (";
  for (int i = 0; i < tensor.rank(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  }
  text += tensor.rank() == 1 ? ",), }" : "), }";
  // NumPy leaves space so that the first size can grow in place to 21 digits.
  constexpr size_t kGrowthDigits = 21, kAlignment = 64, kPrefix = 10;
  if (tensor.rank() > 0) {
    text.append(kGrowthDigits - std::to_string(tensor.size(0)).size(), ' ');
  }
  text.append(kAlignment - (kPrefix + text.size() + 1) % kAlignment, ' ');
  text += '\n';

  AtomicFile file(path);
  file.Write(kMagic);
  file.Write("\x01\x00"sv);
  file.Write(std::string{static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)});
  file.Write(text);
  file.WriteRowMajor(tensor);
  file.Commit();
}

}  // namespace heed
