// The operating system's services: guard pages that fault, whole files, memory, and floating-point control that is
// restored.
#include "heed/core/os.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/stat.h>
#endif

#include <cfenv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "heed/core/error.h"
#include "heed/core/path.h"

namespace heed::os {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::string Path(const std::string& name) {
  return testing::TempDir() + "heed_os_test_" + std::to_string(ProcessId()) + "_" + name;
}

volatile uint8_t sink;

class GuardedMemoryDeathTest : public testing::Test {
 protected:
  GuardedMemoryDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(GuardedMemoryDeathTest, OneByteOutsideFaults) {
  for (const size_t num_bytes : {size_t{1}, size_t{100}, size_t{4096}}) {
    GuardedMemory front(num_bytes, /*at_end=*/false);
    GuardedMemory back(num_bytes, /*at_end=*/true);
    EXPECT_DEATH(sink = front.data()[-1], "");
    EXPECT_DEATH(front.data()[-1] = 1, "");
    EXPECT_DEATH(sink = back.data()[num_bytes], "");
    EXPECT_DEATH(back.data()[num_bytes] = 1, "");
  }
}

TEST_F(GuardedMemoryDeathTest, EmptyMemoryHasNoByteAtAll) {
  GuardedMemory memory(0, true);
  EXPECT_DEATH(sink = memory.data()[0], "");
  EXPECT_DEATH(sink = memory.data()[-1], "");
}

TEST(GuardedMemoryTest, AllBytesInsideAreZeroAndWritable) {
  for (const bool at_end : {false, true}) {
    for (const size_t num_bytes : {1, 7, 4095, 4096, 4097, 100000}) {
      GuardedMemory memory(num_bytes, at_end);
      for (size_t i = 0; i < num_bytes; ++i) {
        ASSERT_EQ(memory.data()[i], 0);
        memory.data()[i] = 0xAB;
      }
    }
  }
}

TEST(GuardedMemoryTest, MovesItsPages) {
  GuardedMemory a(10, true);
  a.data()[0] = 1;
  uint8_t* const data = a.data();
  GuardedMemory b(std::move(a));
  EXPECT_EQ(b.data(), data);
  GuardedMemory c(20, false);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.data()[0], 1);
}

TEST(MappedFileTest, HasTheBytesOfTheFile) {
  const std::string path = Path("bytes");
  std::ofstream(path, std::ios::binary) << std::string("a\0b\xFF", 4);
  const MappedFile file(path);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()), file.num_bytes()), std::string("a\0b\xFF", 4));
  std::filesystem::remove(path);
}

TEST(MappedFileTest, AnEmptyFileIsFine) {
  const std::string path = Path("empty");
  std::ofstream(path, std::ios::binary).flush();
  EXPECT_EQ(MappedFile(path).num_bytes(), 0u);
  std::filesystem::remove(path);
}

#if defined(_WIN32)
TEST(MappedFileTest, WhatIsNotAFileIsRejectedAtOnce) {
  EXPECT_THAT([] { MappedFile("C:\\nonexistent\\x"); },
              ThrowsMessage<FileError>(HasSubstr("C:\\nonexistent\\x: cannot open: ")));
  EXPECT_THAT([] { MappedFile("C:\\"); }, ThrowsMessage<FileError>("C:\\: not a regular file"));
  EXPECT_THAT([] { MappedFile("NUL"); }, ThrowsMessage<FileError>(HasSubstr("NUL: ")));
}
#else
TEST(MappedFileTest, WhatIsNotAFileIsRejectedAtOnce) {
  EXPECT_THAT([] { MappedFile("/nonexistent/x"); },
              ThrowsMessage<FileError>("/nonexistent/x: cannot open: No such file or directory"));
  EXPECT_THAT([] { MappedFile("/"); }, ThrowsMessage<FileError>("/: not a regular file"));
  EXPECT_THAT([] { MappedFile("/dev/null"); }, ThrowsMessage<FileError>("/dev/null: not a regular file"));
  const std::string pipe = Path("pipe");  // without a writer: opening must not block
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT([&] { MappedFile file(pipe); }, ThrowsMessage<FileError>(pipe + ": not a regular file"));
  std::filesystem::remove(pipe);
}
#endif

TEST(MappedFileTest, NamesAreUtf8) {
  const std::string path = Path("\u00e9\u6ce8\u610f");
  std::FILE* const file = CreateNewFile(path);
  ASSERT_NE(file, nullptr);
  std::fputs("abc", file);
  std::fclose(file);
  EXPECT_EQ(MappedFile(path).num_bytes(), 3u);
  EXPECT_TRUE(std::filesystem::exists(ToPath(path)));
  EXPECT_EQ(ToUtf8(ToPath(path)), path);
  EXPECT_EQ(CreateNewFile(path), nullptr);  // it exists
  RemoveFile(path);
  EXPECT_FALSE(std::filesystem::exists(ToPath(path)));
}

TEST(ReplaceFileTest, ReplacesAndReportsTheTarget) {
  const std::string from = Path("from"), to = Path("to");
  std::ofstream(from) << "new";
  std::ofstream(to) << "old";
  ReplaceFile(from, to);
  EXPECT_FALSE(std::filesystem::exists(from));
  EXPECT_EQ(MappedFile(to).num_bytes(), 3u);
  EXPECT_THAT([&] { ReplaceFile(from, to); }, ThrowsMessage<FileError>(HasSubstr(to + ": cannot write: ")));
  std::filesystem::remove(to);
}

TEST(AllocateAlignedTest, IsAlignedAndWritableAtEverySize) {
  for (const int64_t num_bytes : {0, 1, 127, 128, 129, 5 << 20}) {
    void* const memory = AllocateAligned(num_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 128, 0u);
    std::memset(memory, 1, static_cast<size_t>(num_bytes));
    FreeAligned(memory);
  }
  EXPECT_THROW(AllocateAligned(INT64_MAX), std::bad_alloc);
  EXPECT_THROW(AllocateAligned(PTRDIFF_MAX), std::bad_alloc);
  EXPECT_THROW(AllocateAligned(-1), std::bad_alloc);
}

TEST(ScopedFloatControlTest, SetsNearestAndFlushAndPutsTheHostBack) {
  volatile float tiny = std::numeric_limits<float>::min(), one = 1.0f;
  volatile float sum = 0.0f, half = 1.0f;
  std::fesetround(FE_UPWARD);
  {
    const ScopedFloatControl control;
    sum = one + tiny;
    half = tiny / 2;
  }
  EXPECT_EQ(sum, 1.0f);
  EXPECT_EQ(half == 0.0f, kFlushesSubnormalResults);
  sum = one + tiny;
  half = tiny / 2;
  std::fesetround(FE_TONEAREST);
  EXPECT_GT(sum, 1.0f);
  EXPECT_GT(half, 0.0f);
}

TEST(OsTest, SaysSomethingSensibleOfTheMachine) {
  EXPECT_GE(NumUsableCpus(), 1);
  EXPECT_FALSE(CpuName().empty());
  EXPECT_GT(PeakResidentBytes(), 1 << 20);
  EXPECT_GE(InvoluntaryContextSwitches(), 0);
  const double before = ThreadCpuSeconds();
  volatile int work = 0;
  while (ThreadCpuSeconds() - before < 1e-3) work = work + 1;
  SUCCEED();
}

// On Windows in all processor groups.
TEST(OsTest, PinsThreadsToTheCpusThatExist) {
  const int cpus = NumUsableCpus();
  for (const int index : {-1, cpus, 1 << 20}) {
    std::thread([&] { EXPECT_FALSE(PinThisThread(index)) << index; }).join();
  }
#if defined(__linux__) || defined(_WIN32)
  for (int index = 0; index < cpus; ++index) {
    std::thread([&] {
      EXPECT_TRUE(PinThisThread(index)) << index;
#if defined(__linux__)
      EXPECT_EQ(NumUsableCpus(), 1);
#endif
    }).join();
  }
#endif
}

#if defined(__linux__) && defined(__x86_64__)
TEST(OsTest, FamilyAndModelAreThoseThatTheSystemTells) {
  std::ifstream file("/proc/cpuinfo");
  std::string line, family, model;
  while (std::getline(file, line) && (family.empty() || model.empty())) {
    const std::string name = line.substr(0, line.find('\t')), value = line.substr(line.rfind(' ') + 1);
    if (name == "cpu family") family = value;
    if (name == "model") model = value;
  }
  if (family.empty() || model.empty()) GTEST_SKIP() << "/proc/cpuinfo has no family and model";
  EXPECT_THAT(CpuName(), HasSubstr(" (family " + family + " model " + model + ")"));
}
#endif

#if defined(__linux__)
TEST(OsTest, SymbolsOfLibrariesAreFoundOrTheErrorNamesTheSearchedPlaces) {
  std::string why_not;
  EXPECT_NE(os::LoadSymbol("libm.so.6", "cos", &why_not), nullptr) << why_not;
  EXPECT_EQ(os::LoadSymbol("libm.so.6", "no_such_symbol", &why_not), nullptr);
  EXPECT_EQ(why_not, "libm.so.6 has no no_such_symbol");
  EXPECT_EQ(os::LoadSymbol("libno_such_library.so", "cos", &why_not), nullptr);
  const std::string name = "libno_such_library.so", both = name + ": cannot open";
  EXPECT_NE(why_not.find("/" + both), std::string::npos) << why_not;   // beside the program
  EXPECT_NE(why_not.find("; " + both), std::string::npos) << why_not;  // on the loader's path
}
#endif  // __linux__

}  // namespace
}  // namespace heed::os
