// NPY: round trips, NumPy's own bytes, and every rejection with its message.
#include "heed/io/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using std::string_literals::operator""s;

// A file with exactly this header, and `data`.
std::string File(const std::string& header, const std::string& data, int major = 1) {
  std::string bytes = "\x93NUMPY"s;
  bytes += static_cast<char>(major);
  bytes += '\0';
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) {
    bytes += static_cast<char>(header.size() >> (8 * i) & 255);
  }
  return bytes + header + data;
}

std::string Dict(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

class NpyTest : public FileTest {};

TEST_F(NpyTest, EveryDTypeAndShapeComesBack) {
  const std::vector<int64_t> shapes[] = {{}, {0}, {1}, {7}, {3, 5}, {2, 0, 3}, {1, 2, 3, 4, 5}};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kI64, DType::kI32, DType::kBool}) {
    const std::vector<uint8_t> data = SomeElements(dtype, 120);
    for (const auto& shape : shapes) {
      const ConstTensorView in(data.data(), dtype, std::span(shape));
      WriteNpy(Path("x.npy"), in);
      EXPECT_EQ(NumFiles(), 1);
      const NpyFile file(Path("x.npy"));
      EXPECT_EQ(file.tensor().dtype(), dtype);
      EXPECT_EQ(file.tensor().rank(), in.rank());
      EXPECT_EQ(file.tensor().ShapeString(), in.ShapeString());
      EXPECT_EQ(RowMajorBytes(file.tensor()), RowMajorBytes(in));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor().data()) % 64, 0u);
    }
  }
}

TEST_F(NpyTest, StridedViewsComeBackContiguous) {
  const std::vector<uint8_t> data = SomeElements(DType::kF32, 24);
  const ConstTensorView in(data.data() + 23 * 4, DType::kF32, {4, 3, 2}, {-1, -8, -4});
  WriteNpy(Path("x"), in);
  EXPECT_EQ(NpyFile(Path("x")).tensor().stride(0), 6);
  EXPECT_EQ(RowMajorBytes(NpyFile(Path("x")).tensor()), RowMajorBytes(in));
}

// The bytes that numpy.save of NumPy 2.4 writes for the same array.
TEST_F(NpyTest, BytesAreThoseOfNumpy) {
  const float data[] = {1, 2, 3, 4, 5, 6};
  WriteNpy(Path("x"), {data, DType::kF32, {2, 3}});
  const std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  EXPECT_EQ(ReadBytes(Path("x")), "\x93NUMPY\x01\0\x76\0"s + dict + std::string(117 - dict.size(), ' ') + "\n" +
                                      std::string(reinterpret_cast<const char*>(data), 24));
  WriteNpy(Path("x"), {data, DType::kI32, {6}});
  EXPECT_THAT(ReadBytes(Path("x")), HasSubstr("'<i4', 'fortran_order': False, "
                                              "'shape': (6,), }"));
  WriteNpy(Path("x"), {data, DType::kBool, std::span<const int64_t>()});
  EXPECT_THAT(ReadBytes(Path("x")), HasSubstr("'|b1', 'fortran_order': False, 'shape': (), }"));
}

TEST_F(NpyTest, FortranOrderReversesTheStrides) {
  const std::string data = "abcdefghijklmnopqrstuvwx"s + std::string(24, 'z') + std::string(48, 'y');
  const std::string bytes = File(Dict("'<f4'", "True", "(2, 3, 4)"), data);
  const NpyFile file("f", AsBytes(bytes));
  EXPECT_EQ(file.tensor().stride(0), 1);
  EXPECT_EQ(file.tensor().stride(1), 2);
  EXPECT_EQ(file.tensor().stride(2), 6);
  EXPECT_EQ(RowMajorBytes(file.tensor().Slice(0, 1, 2).Slice(1, 1, 2).Slice(2, 0, 1)), "mnop");
}

TEST_F(NpyTest, AllThreeVersionsAndLegalOddities) {
  const std::string zeros(24, '\0');
  const std::string dict = Dict("'<f4'", "False", "(2, 3)");
  const std::string files[] = {File(dict, zeros, 1),
                               File(dict, zeros, 2),
                               File(dict, zeros, 3),
                               File("{\"shape\":(2,3),\"descr\":\"<f4\",\"fortran_order\":True}  \n", zeros),
                               File(" { 'shape' : ( 2 ,3 , ) ,\n'fortran_order':False,'descr':'<f4' } \n", zeros),
                               File(Dict("'<f8'", "False", "(3,)"), zeros),
                               File(Dict("'<i4'", "True", "(1, 1, 6, 1, 1)"), zeros),
                               File(Dict("'|b1'", "False", "()"), "\1"),
                               File(Dict("'<f4'", "True", "(0, 1000000, 1000000)"), "")};
  for (const std::string& bytes : files) {
    EXPECT_NO_THROW(NpyFile("f", AsBytes(bytes))) << bytes;
  }
}

TEST_F(NpyTest, MisplacedDataIsCopied) {
  const double values[] = {1.5, -2.5};
  for (int pad = 0; pad < 8; ++pad) {
    const std::string bytes = File(std::string(static_cast<size_t>(pad), ' ') + Dict("'<f8'", "False", "(2,)"),
                                   std::string(reinterpret_cast<const char*>(values), 16));
    WriteBytes(Path("x"), bytes);
    NpyFile file(Path("x"));
    NpyFile moved(std::move(file));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(moved.tensor().data()) % 8, 0u);
    EXPECT_EQ(moved.tensor().as<double>()[0], 1.5);
    EXPECT_EQ(moved.tensor().as<double>()[1], -2.5);
  }
}

struct Hostile {
  std::string bytes;
  std::string message;
};

std::vector<Hostile> HostileFiles() {
  const std::string dtypes = ", expected <f8, <f4, <f2, <i8, <i4 or |b1";
  const std::string keys = ", expected descr, fortran_order and shape";
  const auto shape = [](const std::string& text) { return File(Dict("'<f4'", "False", text), std::string(24, '\0')); };
  const auto descr = [](const std::string& text) { return File(Dict(text, "False", "(2, 3)"), std::string(24, '\0')); };
  std::vector<Hostile> files = {
      {"", "does not begin with \\x93NUMPY, expected an NPY file"},
      {"\x93NUMP", "does not begin with \\x93NUMPY, expected an NPY file"},
      {"PK\3\4 an npz", "does not begin with \\x93NUMPY, expected an NPY file"},
      {"\x93NUMPY\1\0\5"s, "has 9 bytes, expected at least 10 for an NPY header"},
      {"\x93NUMPY\2\0\5\0\0"s, "has 11 bytes, expected at least 12 for an NPY header"},
      {"\x93NUMPY\4\0\5\0\0\0{}"s, "has NPY version 4.0, expected 1.0, 2.0 or 3.0"},
      {"\x93NUMPY\1\1\5\0\0\0{}"s, "has NPY version 1.1, expected 1.0, 2.0 or 3.0"},
      {"\x93NUMPY\1\0\3\0{}"s, "header has 3 bytes, expected at most 2, the rest of the file"},
      {"\x93NUMPY\2\0\xFF\xFF\xFF\xFF{}"s, "header has 4294967295 bytes, expected at most 2, the rest of the file"},
      {File(std::string(70000, ' '), "", 2), "header has 70000 bytes, expected at most 65536"},
      {File("", ""), "header does not end with a new line, expected one"},
      {File("{}", ""), "header does not end with a new line, expected one"},
      {File("\n", ""), "header has its end at its byte 2, expected '{'"},
      {File("[]\n", ""), "header has '[' at its byte 1, expected '{'"},
      {File("{}\n", ""), "header has no descr" + keys},
      {File("{'descr': '<f4'}\n", ""), "header has no fortran_order" + keys},
      {File("{'descr': '<f4', 'fortran_order': True}\n", ""), "header has no shape" + keys},
      {File("{'x': 1}\n", ""), "header has the key 'x'" + keys},
      {File("{'descr': '<f4', 'descr': '<f4'}\n", ""), "header has the key 'descr' twice" + keys},
      {File("{,}\n", ""), "header has ',' at its byte 2, expected a quoted key or '}'"},
      {File("{descr}\n", ""), "header has 'd' at its byte 2, expected a quoted key or '}'"},
      {File("{'descr\n", ""),
       "header has its end at its byte 9, expected the end "
       "of a string"},
      {File("{'descr' '<f4'}\n", ""), "header has ''' at its byte 10, expected ':'"},
      {File("{'descr': '<f4' 'shape': ()}\n", ""), "header has ''' at its byte 17, expected '}'"},
      {File("{'descr':\n", ""), "header has its end at its byte 11, expected a quoted dtype"},
      {File("{'descr': '<f4',\0}\n"s, ""), "header has '\\x00' at its byte 17, expected a quoted key or '}'"},
      {File(Dict("'<f4'", "0", "()"), "1234"), "header has '0' at its byte 35, expected True or False"},
      {File(Dict("'<f4'", "Tru", "()"), "1234"), "header has 'T' at its byte 35, expected True or False"},
      {File("{'descr': '<f4', 'fortran_order': Falsehood, 'shape': ()}\n", "1234"),
       "header has 'h' at its byte 40, expected '}'"},
      {File("{'descr': '<f4', 'fortran_order': True, 'shape': ()} x\n", "1234"),
       "header has 'x' at its byte 54, expected only spaces after the dict"},
      {File("{'descr': '<f4', 'fortran_order': True, 'shape': ()} \0\n"s, "1234"),
       "header has '\\x00' at its byte 54, expected only spaces after the "
       "dict"},
      {descr("'>f4'"), "has dtype '>f4' (big-endian)" + dtypes},
      {descr("'|O'"), "has dtype '|O' (Python objects)" + dtypes},
      {descr("'<c8'"), "has dtype '<c8'" + dtypes},
      {descr("'f4'"), "has dtype 'f4'" + dtypes},
      {descr("'<f4\n'"), "has dtype '<f4\\x0a'" + dtypes},
      {descr("'|V2'"), "has dtype '|V2' (if it is bf16, use safetensors)" + dtypes},
      {descr("'<u2'"), "has dtype '<u2' (if it is bf16, use safetensors)" + dtypes},
      {descr("[('a', '<f4')]"), "has a structured dtype" + dtypes},
      {descr("5"), "header has '5' at its byte 11, expected a quoted dtype"},
      {shape("(6)"),
       "header has a number in brackets for shape, expected a tuple "
       "such as (3,)"},
      {shape("6"), "header has '6' at its byte 51, expected '('"},
      {shape("[2, 3]"), "header has '[' at its byte 51, expected '('"},
      {shape("(,)"), "header has ',' at its byte 52, expected a size >= 0"},
      {shape("(2 3)"), "header has '3' at its byte 54, expected ',' or ')'"},
      {shape("(2,, 3)"), "header has ',' at its byte 54, expected a size >= 0"},
      {shape("(-2, 3)"), "header has '-' at its byte 52, expected a size >= 0"},
      {shape("(2.0, 3)"), "header has '.' at its byte 53, expected ',' or ')'"},
      {shape("(2, 3"), "header has '}' at its byte 58, expected a size >= 0"},
      {shape("(9223372036854775808,)"), "shape has a size above 2^63 - 1, expected less"},
      {shape("(1, 1, 1, 1, 1, 2, 3)"), "has a rank above 6, expected at most 6"},
      {shape("(4294967296, 4294967296)"), "has shape [4294967296,4294967296], expected fewer than 2^63 bytes"},
      {shape("(4611686018427387904, )"), "has shape [4611686018427387904], expected fewer than 2^63 bytes"},
      {shape("(0, 4294967296, 4294967296)"), "has shape [0,4294967296,4294967296], expected fewer than 2^63 bytes"},
      {shape("(2, 2)"), "has 24 bytes of data, expected 16 for f32 [2,2]"},
      {shape("()"), "has 24 bytes of data, expected 4 for f32 []"},
      {shape("(0,)"), "has 24 bytes of data, expected 0 for f32 [0]"},
      {shape("(2, 4)"),
       "has 24 bytes of data, expected 32 for f32 [2,4]: the file "
       "is cut short"},
      {File(Dict("'|b1'", "False", "(3,)"), "\1\0\2"s), "has 2 for a bool at element 2, expected 0 or 1"},
  };
  std::string deep = "(";
  for (int i = 0; i < 10000; ++i) deep += "(";
  files.push_back({shape(deep), "header has '(' at its byte 52, expected a size >= 0"});
  return files;
}

TEST_F(NpyTest, HostileFilesAreRejectedInOneLine) {
  for (const Hostile& hostile : HostileFiles()) {
    for (const bool at_end : {false, true}) {
      const Guarded bytes(hostile.bytes, at_end);
      try {
        NpyFile file("f.npy", bytes.bytes());
        ADD_FAILURE() << "accepted, expected: " << hostile.message;
      } catch (const FileError& e) {
        const std::string what = e.what();
        EXPECT_EQ(what.find('\n'), std::string::npos);
        EXPECT_EQ(what, "f.npy: " + hostile.message);
      }
    }
  }
}

TEST_F(NpyTest, FromAFileTheSameErrorNamesThePath) {
  WriteBytes(Path("x"), "not one");
  EXPECT_THAT([&] { NpyFile file(Path("x")); },
              ThrowsMessage<FileError>(Path("x") + ": does not begin with \\x93NUMPY, expected an NPY "
                                                   "file"));
  WriteBytes(Path("empty"), "");
  EXPECT_THROW(NpyFile(Path("empty")), FileError);
  EXPECT_THROW(NpyFile(Path("none")), FileError);
}

TEST_F(NpyTest, DamagedFilesParseOrThrowAndNeverReadOutside) {
  const std::vector<uint8_t> data = SomeElements(DType::kF64, 12);
  std::vector<std::string> valid;
  WriteNpy(Path("x"), {data.data(), DType::kF32, {2, 3}});
  valid.push_back(ReadBytes(Path("x")));
  valid.push_back(File(Dict("'<f8'", "True", "(3, 4)"), std::string(data.begin(), data.end())));
  valid.push_back(File(Dict("'|b1'", "False", "(2, 1, 2)"), "\1\0\1\1"s, 2));
  valid.push_back(File(Dict("'<i8'", "False", "()"), "12345678", 3));
  std::mt19937 random(20241);
  int accepted = 0, rejected = 0;
  for (int i = 0; i < 40000; ++i) {
    std::string bytes = valid[static_cast<size_t>(i) % valid.size()];
    const size_t begin = bytes[6] == 1 ? 10 : 12;
    size_t header_end = bytes.find('\n') + 1;
    const int damages = 1 + i % 3;
    for (int d = 0; d < damages; ++d) Damage(random, bytes, header_end);
    if (i % 4 != 0 && header_end >= begin && bytes.size() >= begin) {
      const size_t length = header_end - begin;
      bytes[8] = static_cast<char>(length & 255);
      bytes[9] = static_cast<char>(length >> 8);
    }
    const Guarded guarded(bytes, i % 2 == 0);
    try {
      const NpyFile file("f", guarded.bytes());
      ASSERT_LT(RowMajorBytes(file.tensor()).size(), bytes.size());
      ++accepted;
    } catch (const FileError& e) {
      const std::string what = e.what();
      ASSERT_EQ(what.rfind("f: ", 0), 0u);
      ASSERT_EQ(what.find('\n'), std::string::npos);
      ++rejected;
    }
  }
  EXPECT_GT(accepted, 300);
  EXPECT_GT(rejected, 10000);
}

TEST_F(NpyTest, TheWriterRejectsWhatTheFormatLacks) {
  const BF16 x = {0};
  EXPECT_THAT([&] { WriteNpy(Path("x"), {&x, DType::kBF16, {1}}); },
              ThrowsMessage<InvalidArgument>("WriteNpy: tensor has dtype bf16, expected f64, f32, f16, i64, "
                                             "i32 or bool; a .safetensors file holds bf16"));
  EXPECT_THAT([&] { WriteNpy(Path("x"), {}); },
              ThrowsMessage<InvalidArgument>("WriteNpy: tensor is absent, expected one with data"));
  EXPECT_THAT([&] { WriteNpy(Path("x"), {&x, DType::kF16, {1}, Device{DeviceType::kCuda, 0}}); },
              ThrowsMessage<InvalidArgument>("WriteNpy: tensor is on a device, expected CPU memory"));
  EXPECT_EQ(NumFiles(), 0);
  EXPECT_THROW(WriteNpy(Path("none/x"), {&x, DType::kF16, {1}}), FileError);
}

}  // namespace
}  // namespace heed
