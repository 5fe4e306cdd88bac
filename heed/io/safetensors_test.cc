// safetensors: round trips, the reference writer's bytes, and every rejection
// with its message.
#include "heed/io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"

namespace heed {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::StartsWith;
using testing::ThrowsMessage;
using std::string_literals::operator""s;

// A file with exactly this header, and `data_bytes` of zeros.
std::string File(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + std::string(data_bytes, '\0');
}

std::string Tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

class SafetensorsTest : public FileTest {};

TEST_F(SafetensorsTest, EveryDTypeAndShapeComesBack) {
  constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16,
                               DType::kI64, DType::kI32, DType::kBool};
  const std::vector<int64_t> shapes[] = {{}, {0}, {1}, {7}, {3, 5}, {2, 0, 3}, {1, 2, 3, 4, 5}};
  std::vector<std::vector<uint8_t>> data;
  std::vector<NamedTensor> tensors;
  for (const DType dtype : kDTypes) {
    for (const auto& shape : shapes) {
      data.push_back(SomeElements(dtype, 120));
      const ConstTensorView view(data.back().data(), dtype, std::span(shape));
      tensors.push_back({std::string(Name(dtype)) + view.ShapeString(), view});
    }
  }
  const std::string path = Path("all.safetensors");
  WriteSafetensors(path, tensors);
  EXPECT_EQ(NumFiles(), 1);
  const SafetensorsFile file(path);
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_TRUE(file.metadata().empty());
  for (const NamedTensor& t : tensors) {
    ASSERT_TRUE(file.Contains(t.name));
    const ConstTensorView view = file.tensor(t.name);
    EXPECT_EQ(view.dtype(), t.tensor.dtype());
    EXPECT_EQ(view.rank(), t.tensor.rank());
    EXPECT_EQ(view.ShapeString(), t.tensor.ShapeString());
    EXPECT_EQ(RowMajorBytes(view), RowMajorBytes(t.tensor));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data()) % SizeOf(view.dtype()), 0u);
  }
}

TEST_F(SafetensorsTest, StridedViewsComeBackContiguous) {
  const std::vector<uint8_t> data = SomeElements(DType::kF16, 24);
  const ConstTensorView view(data.data(), DType::kF16, {4, 3, 2}, {1, 8, 4});
  WriteSafetensors(Path("x"), std::vector<NamedTensor>{{"x", view}});
  const SafetensorsFile file(Path("x"));
  EXPECT_EQ(file.tensor("x").stride(0), 6);
  EXPECT_EQ(RowMajorBytes(file.tensor("x")), RowMajorBytes(view));
}

// The bytes that safetensors 0.8.0 (Python) writes for the same tensors.
TEST_F(SafetensorsTest, BytesAreThoseOfTheReferenceWriter) {
  const float zeros[6] = {};
  const int32_t i32[] = {1, 1};
  const F16 f16[] = {{0x3C00}};
  const BF16 bf16[] = {{0x3F80}};
  const int64_t i64[] = {1};
  const double f64[] = {1};
  const uint8_t bools[] = {1, 1, 1};
  const std::string odd = "\xC3\xA9\"\n\x7F\x01"s;
  WriteSafetensors(Path("x"),
                   std::vector<NamedTensor>{{"b", {zeros, DType::kF32, {2, 3}}},
                                            {"a", {zeros, DType::kF32, std::span<const int64_t>()}},
                                            {"c", {bools, DType::kBool, {3}}},
                                            {"i", {i32, DType::kI32, {2}}},
                                            {"h", {f16, DType::kF16, {1}}},
                                            {"g", {bf16, DType::kBF16, {1}}},
                                            {"l", {i64, DType::kI64, {1}}},
                                            {"d", {f64, DType::kF64, {1}}},
                                            {odd, {zeros, DType::kF32, {0}}}},
                   {{"z", "1"}, {"a", "\xC3\xA9\"/\xE2\x80\xA8"}});
  std::string header = "{\"__metadata__\":{\"a\":\"\xC3\xA9\\\"/\xE2\x80\xA8\",\"z\":\"1\"}," +
                       Tensor("l", "I64", "[1]", "[0,8]") + "," + Tensor("d", "F64", "[1]", "[8,16]") + "," +
                       Tensor("a", "F32", "[]", "[16,20]") + "," + Tensor("b", "F32", "[2,3]", "[20,44]") + "," +
                       Tensor("\xC3\xA9\\\"\\n\x7F\\u0001", "F32", "[0]", "[44,44]") + "," +
                       Tensor("i", "I32", "[2]", "[44,52]") + "," + Tensor("g", "BF16", "[1]", "[52,54]") + "," +
                       Tensor("h", "F16", "[1]", "[54,56]") + "," + Tensor("c", "BOOL", "[3]", "[56,59]") + "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string expected = File(header, 0);
  expected += "\1\0\0\0\0\0\0\0"s + "\0\0\0\0\0\0\xF0\x3F"s + std::string(28, '\0') + "\1\0\0\0\1\0\0\0"s +
              "\x80\x3F"s + "\0\x3C"s + "\1\1\1"s;
  EXPECT_EQ(ReadBytes(Path("x")), expected);
  const SafetensorsFile file(Path("x"));
  EXPECT_THAT(file.names(), ElementsAre("l", "d", "a", "b", odd, "i", "g", "h", "c"));
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("a", "\xC3\xA9\"/\xE2\x80\xA8"), Pair("z", "1")));
}

TEST_F(SafetensorsTest, AnEmptyFileIsAFile) {
  WriteSafetensors(Path("x"), {});
  EXPECT_EQ(ReadBytes(Path("x")), "\x08\0\0\0\0\0\0\0{}      "s);
  const SafetensorsFile file(Path("x"));
  EXPECT_TRUE(file.names().empty());
  EXPECT_THAT([&] { file.tensor("q"); },
              ThrowsMessage<FileError>(Path("x") + ": tensor 'q' is not there, expected none: the "
                                                   "file is empty"));
}

TEST_F(SafetensorsTest, AFileMayBeReplacedByViewsIntoItself) {
  const std::string path = Path("x");
  const std::vector<uint8_t> data = SomeElements(DType::kF32, 5000);
  WriteSafetensors(path, std::vector<NamedTensor>{{"x", {data.data(), DType::kF32, {50, 100}}}});
  const SafetensorsFile old(path);
  const ConstTensorView view = old.tensor("x");
  const auto replace = [&] {
    WriteSafetensors(path, std::vector<NamedTensor>{{"y", {view.data(), DType::kF32, {100, 50}, {1, 100}}}});
  };
#if defined(_WIN32)  // which replaces no file that is mapped
  EXPECT_THAT(replace, ThrowsMessage<FileError>(StartsWith(path + ": cannot write: ")));
  EXPECT_EQ(NumFiles(), 1);
#else
  replace();
  EXPECT_EQ(RowMajorBytes(SafetensorsFile(path).tensor("y")).substr(4, 4),
            std::string(data.begin() + 400, data.begin() + 404));
#endif
  EXPECT_EQ(RowMajorBytes(view), std::string(data.begin(), data.end()));
}

TEST_F(SafetensorsTest, ViewsSurviveAMove) {
  const std::string bytes = File("{" + Tensor("x", "F32", "[1]", "[0,4]") + "}", 4);
  WriteBytes(Path("x"), bytes);
  SafetensorsFile a(Path("x"));
  const void* const data = a.tensor("x").data();
  SafetensorsFile b(std::move(a));
  EXPECT_EQ(b.tensor("x").data(), data);
  SafetensorsFile c("memory", AsBytes(bytes));
  c = std::move(b);
  EXPECT_EQ(c.tensor("x").data(), data);
}

TEST_F(SafetensorsTest, MisplacedDataIsCopiedOnceAndAligned) {
  std::string header = "{" + Tensor("m", "BOOL", "[1]", "[0,1]") + "," + Tensor("x", "F64", "[2]", "[1,17]") + "}";
  std::string bytes = File(header, 17);
  const double values[] = {1.5, -2.5};
  std::memcpy(bytes.data() + 8 + header.size() + 1, values, sizeof(values));
  WriteBytes(Path("x"), bytes);
  const SafetensorsFile file(Path("x"));
  std::vector<std::thread> readers;
  std::vector<ConstTensorView> views(4);
  for (ConstTensorView& view : views) {
    readers.emplace_back([&] { view = file.tensor("x"); });
  }
  for (std::thread& reader : readers) reader.join();
  for (const ConstTensorView& view : views) {
    EXPECT_EQ(view.data(), views[0].data());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data()) % 8, 0u);
    EXPECT_EQ(view.as<double>()[0], 1.5);
    EXPECT_EQ(view.as<double>()[1], -2.5);
  }
}

TEST_F(SafetensorsTest, WhatHeedCannotViewIsListedAndRejectedWhenAskedFor) {
  const std::string bytes =
      File("{" + Tensor("u", "U8", "[3]", "[0,3]") + "," + Tensor("r7", "F32", "[1,1,1,1,1,1,1]", "[3,7]") + "," +
               Tensor("f4", "F4", "[2,3]", "[7,10]") + "," + Tensor("b", "BOOL", "[2]", "[10,12]") + "," +
               Tensor("ok", "F32", "[1]", "[12,16]") + "}",
           16);
  std::string bad_bool = bytes;
  bad_bool[bytes.size() - 5] = 7;
  const SafetensorsFile file("f", AsBytes(bad_bool));
  EXPECT_THAT(file.names(), ElementsAre("u", "r7", "f4", "b", "ok"));
  EXPECT_EQ(file.entries()[1].sizes.size(), 7u);
  EXPECT_EQ(file.entries()[2].dtype, "F4");
  EXPECT_EQ(file.entries()[2].num_bytes, 3);
  EXPECT_EQ(file.tensor("ok").num_elements(), 1);
  const auto rejects = [&](const char* name, const std::string& message) {
    EXPECT_THAT([&] { file.tensor(name); }, ThrowsMessage<FileError>(message));
  };
  rejects("u",
          "f: tensor 'u' has dtype U8, expected F64, F32, BF16, F16, I64, "
          "I32 or BOOL");
  rejects("r7", "f: tensor 'r7' has rank 7, expected at most 6");
  rejects("b", "f: tensor 'b' has 7 for a bool at element 1, expected 0 or 1");
  rejects("k\n",
          "f: tensor 'k\\x0a' is not there, expected one of 'u', 'r7', "
          "'f4', 'b', 'ok'");
}

TEST_F(SafetensorsTest, LegalOddities) {
  const std::string headers[] = {"{}", "{}      \n", "{ \"__metadata__\" : { } }",
                                 // The order of the tensors differs from that of their data, and there are empty ones
                                 // between.
                                 "{" + Tensor("a", "F32", "[1]", "[4,8]") + "," + Tensor("b", "F32", "[1]", "[0,4]") +
                                     "," + Tensor("c", "I64", "[0,5]", "[4,4]") + "}",
                                 "{\"a\":{\"data_offsets\":[0,8],\"shape\":[8],\"dtype\":\"I8\"}}",
                                 "{" + Tensor("", "F64", "[1,1,1]", "[0,8]") + "}",
                                 "{" + Tensor("\\u00e9", "C64", "[]", "[0,8]") + "}"};
  for (const std::string& header : headers) {
    const std::string bytes = File(header, header.find("data_offsets") == std::string::npos ? 0 : 8);
    EXPECT_NO_THROW(SafetensorsFile("f", AsBytes(bytes))) << header;
  }
}

struct Hostile {
  std::string bytes;
  std::string message;
};

std::vector<Hostile> HostileFiles() {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return File("{" + Tensor("x", dtype, shape, offsets) + "}", 8);
  };
  const std::string fields = ", expected dtype, shape and data_offsets";
  const std::string many(50, '[');
  std::vector<Hostile> files = {
      {"", "has 0 bytes, expected at least 10 for a safetensors header"},
      {"\x08\0\0\0\0\0\0\0{"s, "has 9 bytes, expected at least 10 for a safetensors header"},
      {"\x03\0\0\0\0\0\0\0{}"s, "safetensors header has 3 bytes, expected 2 to 2, the rest of the file"},
      {"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}"s,
       "safetensors header has 18446744073709551615 bytes, expected 2 to 2, "
       "the "
       "rest of the file"},
      {"\0\0\0\0\0\0\0\0{}"s, "safetensors header has 0 bytes, expected 2 to 2, the rest of the file"},
      {"q k v\n1 2 3\n", "not a safetensors or npy file, expected a safetensors file"},
      {"\x93NUMPY\x01\0v\0{'descr': '<f4'"s, "is an npy file, expected a safetensors file"},
      {File("[1]", 0), "safetensors header begins with '[', expected '{'"},
      {File(" {}", 0), "safetensors header begins with ' ', expected '{'"},
      {File("\xEF\xBB\xBF{}", 0), "safetensors header begins with '\\xef', expected '{'"},
      {File("{}\0{}"s, 0), "header has a NUL at its byte 3, expected text"},
      {File("{} x", 0), "header is not JSON at its byte 4, expected one object in UTF-8"},
      {File("{ ", 0), ""},
      {File("{,}", 0), "header is not JSON at its byte 2, expected one object in UTF-8"},
      {File("{\"a\":01}", 0),
       "tensor 'a' is 0, expected an object with dtype, shape and "
       "data_offsets"},
      {File("{\"a\xFF\":1}", 0), "header is not JSON at its byte 4, expected one object in UTF-8"},
      {File("{\"a\":1e999}", 0), ""},
      {File("{/**/}", 0), ""},
      {File("{\"a\":" + many, 0),
       "tensor 'a' is an array, expected an object with dtype, shape and "
       "data_offsets"},
      {File("{\"a\":{\"shape\":" + many, 0),
       "tensor 'a' has an array in its shape, expected integers from 0 to 2^63 "
       "- 1"},
      {File("{\"a\":{\"b\":", 0), "tensor 'a' has the field 'b'" + fields},
      {File("{\"a\":{\"dtype\":{", 0), "tensor 'a' has dtype an object, expected a string"},
      {File("{\"a\":{\"dtype\":[", 0), "tensor 'a' has dtype an array, expected a string"},
      {File("{\"a\":{\"dtype\":null", 0), "tensor 'a' has dtype null, expected a string"},
      {File("{\"a\":{\"shape\":5", 0), "tensor 'a' has shape 5, expected an array of integers"},
      {File("{\"a\":{\"data_offsets\":\"5\"", 0), "tensor 'a' has data_offsets '5', expected an array of integers"},
      {File("{\"a\":true}", 0),
       "tensor 'a' is true, expected an object with dtype, shape and "
       "data_offsets"},
      {File("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0), "tensor 'a' has the field 'dtype' twice" + fields},
      {File("{\"a\":{}}", 0), "tensor 'a' has no dtype" + fields},
      {File("{\"a\":{\"dtype\":\"F32\"}}", 0), "tensor 'a' has no shape" + fields},
      {File("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 0), "tensor 'a' has no data_offsets" + fields},
      {File("{\"__metadata__\":[]}", 0), "__metadata__ is an array, expected an object"},
      {File("{\"__metadata__\":{\"a\":1}}", 0), "metadata 'a' is 1, expected a string"},
      {File("{\"__metadata__\":{\"a\":{}}}", 0), "metadata 'a' is an object, expected a string"},
      {File("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0), "metadata has the key 'a' twice, expected once"},
      {File("{\"__metadata__\":{},\"__metadata__\":{}}", 0), "header has __metadata__ twice, expected once"},
      {File("{" + Tensor("a", "F32", "[1]", "[0,4]") + "," + Tensor("a", "F32", "[1]", "[4,8]") + "}", 8),
       "tensor 'a' is there twice, expected once"},
      {File("{\"a\\u0000b\":{}}", 0), "header has the name 'a\\x00b', expected no NUL in it"},
      {File("{\"" + std::string(4097, 'n') + "\":{}}", 0), "header has a name of 4097 bytes, expected at most 4096"},
      {one("f32", "[2]", "[0,8]"),
       "tensor 'x' has dtype 'f32', expected one of the format, such as F32 or "
       "BF16"},
      {one("F32", "[-2]", "[0,8]"), "tensor 'x' has -2 in its shape, expected integers from 0 to 2^63 - 1"},
      {one("F32", "[2.0]", "[0,8]"),
       "tensor 'x' has '2.0' in its shape, expected integers from 0 to 2^63 - "
       "1"},
      {one("F32", "[9223372036854775808]", "[0,8]"),
       "tensor 'x' has 9223372036854775808 in its shape, expected integers "
       "from 0 "
       "to 2^63 - 1"},
      {one("F32", "[99999999999999999999]", "[0,8]"),
       "tensor 'x' has '99999999999999999999' in its shape, expected integers "
       "from 0 to 2^63 - 1"},
      {one("F32", "[2]", "[0,-8]"),
       "tensor 'x' has -8 in its data_offsets, expected integers from 0 to "
       "2^63 - 1"},
      {one("F32", "[4611686018427387904,4]", "[0,8]"),
       "tensor 'x' has shape [4611686018427387904,4], expected fewer than 2^63 "
       "bits"},
      {one("F32", "[0,4611686018427387904,4]", "[0,0]"),
       "tensor 'x' has shape [0,4611686018427387904,4], expected fewer than "
       "2^63 "
       "bits"},
      {one("F32", "[1152921504606846976]", "[0,8]"),
       "tensor 'x' has shape [1152921504606846976], expected fewer than 2^63 "
       "bits"},
      {one("F32", "[3]", "[0,8]"), "tensor 'x' has 8 bytes, expected 12 for F32 [3]"},
      {one("F32", "[0]", "[0,8]"), "tensor 'x' has 8 bytes, expected 0 for F32 [0]"},
      {one("F4", "[3]", "[0,1]"), "tensor 'x' has 1 bytes, expected 1 and a fraction for F4 [3]"},
      {one("F32", "[2]", "[8,0]"), "tensor 'x' has data_offsets [8,0], expected [begin,end]"},
      {one("F32", "[2]", "[8]"), "tensor 'x' has data_offsets [8], expected [begin,end]"},
      {one("F32", "[2]", "[0,8,9]"),
       "tensor 'x' has data_offsets of more than 2 numbers, expected at most "
       "that"},
      {one("F32", "[2]", "[4,12]"),
       "tensor 'x' begins at byte 4 of the data, expected 0, where the tensor "
       "before it ends"},
      {one("F32", "[1]", "[0,4]"), "has 8 bytes of data, expected 4, the end of the last tensor"},
      {one("F32", "[4]", "[0,16]"), "has 8 bytes of data, expected 16: the file is cut short"},
      {File("{}", 1), "has 1 bytes of data, expected 0, the end of the last tensor"},
      {File("{" + Tensor("a", "F32", "[1]", "[0,4]") + "," + Tensor("b", "F32", "[1]", "[0,4]") + "}", 8),
       "tensor 'b' begins at byte 0 of the data, expected 4, where the tensor "
       "before it ends"},
      {File("{" +
                Tensor("a", "I64", "[]",
                       "[9223372036854775799,"
                       "9223372036854775807]") +
                "}",
            8),
       "tensor 'a' begins at byte 9223372036854775799 of the data, expected 0, "
       "where the tensor before it ends"},
  };
  std::string ranks = "[1";
  for (int i = 0; i < 64; ++i) ranks += ",1";
  files.push_back({one("F64", ranks + "]", "[0,8]"),
                   "tensor 'x' has shape of more than 64 numbers, expected at "
                   "most that"});
  return files;
}

TEST_F(SafetensorsTest, HostileFilesAreRejectedInOneLine) {
  for (const Hostile& hostile : HostileFiles()) {
    for (const bool at_end : {false, true}) {
      const Guarded bytes(hostile.bytes, at_end);
      try {
        SafetensorsFile file("f.safetensors", bytes.bytes());
        ADD_FAILURE() << "accepted, expected: " << hostile.message;
      } catch (const FileError& e) {
        const std::string what = e.what();
        EXPECT_EQ(what.find('\n'), std::string::npos);
        EXPECT_THAT(what, HasSubstr(", expected "));
        if (hostile.message.empty()) {
          EXPECT_THAT(what, HasSubstr("f.safetensors: header is not JSON at its "));
        } else {
          EXPECT_EQ(what, "f.safetensors: " + hostile.message);
        }
      }
    }
  }
}

TEST_F(SafetensorsTest, FromAFileTheSameErrorNamesThePath) {
  WriteBytes(Path("x"), File("{}", 1));
  EXPECT_THAT([&] { SafetensorsFile file(Path("x")); },
              ThrowsMessage<FileError>(HasSubstr(Path("x") + ": has 1 bytes")));
  WriteBytes(Path("empty"), "");
  EXPECT_THAT([&] { SafetensorsFile file(Path("empty")); },
              ThrowsMessage<FileError>(HasSubstr(": has 0 bytes, expected")));
  EXPECT_THROW(SafetensorsFile(Path("none")), FileError);
}

TEST_F(SafetensorsTest, AHeaderAboveTheLimitIsRejectedUnread) {
  std::string bytes = "\x01\xE1\xF5\x05\0\0\0\0{"s;  // 100,000,001
  bytes.resize(100000010, ' ');
  EXPECT_THAT([&] { SafetensorsFile file("f", AsBytes(bytes)); },
              ThrowsMessage<FileError>("f: safetensors header has 100000001 bytes, expected 2 to "
                                       "100000000"));
}

TEST_F(SafetensorsTest, DeepNestingCostsNothing) {
  const std::string deep(5'000'000, '[');
  EXPECT_THROW(SafetensorsFile("f", AsBytes(File("{\"a\":" + deep, 0))), FileError);
  std::string objects = "{";
  for (int i = 0; i < 100000; ++i) objects += "\"a\":{";
  EXPECT_THROW(SafetensorsFile("f", AsBytes(File(objects, 0))), FileError);
}

TEST_F(SafetensorsTest, DamagedFilesParseOrThrowAndNeverReadOutside) {
  const std::vector<uint8_t> data = SomeElements(DType::kF64, 10);
  const uint8_t bools[] = {0, 1, 1};
  std::vector<std::string> valid;
  WriteSafetensors(Path("x"),
                   std::vector<NamedTensor>{{"q", {data.data(), DType::kF32, {2, 3}}},
                                            {"k.0", {data.data(), DType::kF64, {1, 2, 1, 2}}},
                                            {"m", {bools, DType::kBool, {3}}},
                                            {"e", {data.data(), DType::kI64, {0, 4}}}},
                   {{"tokens", "[\"a\", \"\\u00e9\"]"}, {"n", "3"}});
  valid.push_back(ReadBytes(Path("x")));
  WriteSafetensors(Path("x"), std::vector<NamedTensor>{{"x", {data.data(), DType::kBF16, {8}}}});
  valid.push_back(ReadBytes(Path("x")));
  valid.push_back(File("{" + Tensor("a", "U8", "[3]", "[0,3]") + "," + Tensor("b", "F64", "[1]", "[3,11]") + "}", 11));
  std::mt19937 random(20240);
  int accepted = 0, rejected = 0;
  for (int i = 0; i < 40000; ++i) {
    std::string bytes = valid[static_cast<size_t>(i) % valid.size()];
    uint64_t length;
    std::memcpy(&length, bytes.data(), sizeof(length));
    size_t header_end = 8 + length;
    const int damages = 1 + i % 3;
    for (int d = 0; d < damages; ++d) Damage(random, bytes, header_end);
    if (i % 4 != 0 && header_end >= 8 && bytes.size() >= 8) {
      length = header_end - 8;  // a valid length, so that the JSON parser meets the damage
      std::memcpy(bytes.data(), &length, sizeof(length));
    }
    const Guarded guarded(bytes, i % 2 == 0);
    try {
      const SafetensorsFile file("f", guarded.bytes());
      size_t total = 0;
      for (const SafetensorsFile::Entry& entry : file.entries()) {
        total += static_cast<size_t>(entry.num_bytes);
        try {
          RowMajorBytes(file.tensor(entry.name));
        } catch (const FileError&) {
          continue;
        }
      }
      ASSERT_LT(total, bytes.size());
      ++accepted;
    } catch (const FileError& e) {
      const std::string what = e.what();
      ASSERT_EQ(what.rfind("f: ", 0), 0u);
      ASSERT_EQ(what.find('\n'), std::string::npos);
      ++rejected;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(rejected, 10000);
}

TEST_F(SafetensorsTest, TheWriterChecksEverythingBeforeItWrites) {
  float x = 0;
  const ConstTensorView view(&x, DType::kF32, {1});
  const auto rejects = [&](const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata,
                           const std::string& message) {
    EXPECT_THAT([&] { WriteSafetensors(Path("x"), tensors, metadata); },
                ThrowsMessage<InvalidArgument>(HasSubstr("WriteSafetensors: " + message)));
    EXPECT_EQ(NumFiles(), 0);
  };
  rejects({{"a", {}}}, {}, "tensor 'a' is absent, expected one with data");
  rejects({{"a", {&x, DType::kF32, {1}, Device{DeviceType::kCuda, 0}}}}, {},
          "tensor 'a' is on a device, expected CPU memory");
  rejects({{"a", view}, {"a", view}}, {}, "tensor 'a' is there twice, expected once");
  rejects({{"a", view}, {"a", {&x, DType::kBool, {1}}}}, {}, "tensor 'a' is there twice");
  rejects({{"__metadata__", view}}, {}, "tensor is named '__metadata__'");
  rejects({{"a\0b"s, view}}, {}, "tensor name 'a\\x00b' has a NUL, expected none");
  rejects({{"a\xFF", view}}, {}, "tensor name 'a\\xff' is not UTF-8");
  rejects({{std::string(4097, 'a'), view}}, {}, "tensor name 'aaa");
  rejects({}, {{"k\0"s, ""}}, "metadata key 'k\\x00' has a NUL, expected none");
  rejects({}, {{"k", "\xC3"}}, "metadata value '\\xc3' is not UTF-8");
  const int64_t huge = int64_t{1} << 60;
  rejects({{"a", {&x, DType::kF32, {huge}, {0}}}, {"b", {&x, DType::kF32, {huge}, {0}}}}, {},
          "tensor 'b' ends beyond 2^63 bytes");
}

TEST_F(SafetensorsTest, MetadataValuesMayBeAnyText) {
  const std::map<std::string, std::string> metadata = {
      {"nul", "a\0b"s}, {"long", std::string(100000, 'x')}, {"", "\n\t\"\\"}};
  WriteSafetensors(Path("x"), {}, metadata);
  EXPECT_EQ(SafetensorsFile(Path("x")).metadata(), metadata);
}

TEST_F(SafetensorsTest, AFailedWriteLeavesTheOldFile) {
  EXPECT_THROW(WriteSafetensors(Path("none/x"), {}), FileError);
  EXPECT_EQ(NumFiles(), 0);
}

}  // namespace
}  // namespace heed
