// AtomicFile: the file is complete or absent, and no temporary file remains.
#include "heed/io/atomic_file_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/resource.h>
#endif

#include <csignal>
#include <filesystem>
#include <string>
#include <system_error>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"

namespace heed {
namespace {

using testing::StartsWith;
using testing::ThrowsMessage;
namespace fs = std::filesystem;

class AtomicFileTest : public FileTest {};

TEST_F(AtomicFileTest, AppearsAtCommit) {
  const std::string path = Path("out");
  AtomicFile file(path);
  file.Write("ab");
  file.Write("");
  file.Write("cd");
  EXPECT_FALSE(fs::exists(path));
  file.Commit();
  EXPECT_EQ(ReadBytes(path), "abcd");
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(AtomicFileTest, WithoutCommitTheOldFileStays) {
  const std::string path = Path("out");
  WriteBytes(path, "old");
  {
    AtomicFile file(path);
    file.Write("new");
    EXPECT_EQ(NumFiles(), 2);
  }
  EXPECT_EQ(ReadBytes(path), "old");
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(AtomicFileTest, TwoWritersOfOnePathDoNotMix) {
  const std::string path = Path("out");
  AtomicFile a(path), b(path);
  a.Write("aaa");
  b.Write("b");
  b.Commit();
  EXPECT_EQ(ReadBytes(path), "b");
  a.Commit();
  EXPECT_EQ(ReadBytes(path), "aaa");
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(AtomicFileTest, AFolderThatIsNotThereIsNamed) {
  const std::string path = Path("none/out");
  EXPECT_THAT([&] { AtomicFile file(path); },
              ThrowsMessage<FileError>(path + ": cannot write: No such file or directory"));
}

TEST_F(AtomicFileTest, NothingButAFileIsReplaced) {
  const std::string path = Path("folder");
  fs::create_directory(path);
  EXPECT_THAT([&] { AtomicFile file(path); }, ThrowsMessage<FileError>(path + ": not a regular file"));
  EXPECT_EQ(NumFiles(), 1);
}

#if !defined(_WIN32)  // which has devices in no folder
TEST_F(AtomicFileTest, ADeviceIsNotReplaced) {
  EXPECT_THAT([] { AtomicFile file("/dev/null"); }, ThrowsMessage<FileError>("/dev/null: not a regular file"));
  EXPECT_FALSE(fs::is_regular_file("/dev/null"));
}
#endif

TEST_F(AtomicFileTest, ALinkIsFollowed) {
  fs::create_directory(Path("folder"));
  WriteBytes(Path("folder/real"), "old");
  std::error_code error;
  fs::create_symlink("folder/real", Path("link"), error);
#if defined(_WIN32)
  if (error) GTEST_SKIP() << "Windows has symbolic links for administrators and developers alone: " << error.message();
#endif
  ASSERT_FALSE(error) << error.message();
  fs::create_symlink("folder/new", Path("dangling"));
  for (const char* name : {"link", "dangling"}) {
    AtomicFile file(Path(name));
    file.Write(name);
    file.Commit();
    EXPECT_TRUE(fs::is_symlink(Path(name)));
  }
  EXPECT_EQ(ReadBytes(Path("folder/real")), "link");
  EXPECT_EQ(ReadBytes(Path("folder/new")), "dangling");
}

TEST_F(AtomicFileTest, AFailedRenameLeavesNothing) {
  const std::string path = Path("out");
  {
    AtomicFile file(path);
    file.Write("x");
    fs::create_directory(path);
    EXPECT_THAT([&] { file.Commit(); }, ThrowsMessage<FileError>(StartsWith(path + ": cannot write: ")));
  }
  EXPECT_EQ(NumFiles(), 1);
}

#if !defined(_WIN32)
TEST_F(AtomicFileTest, AFullDiskLeavesNothing) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string early, late;
  try {
    AtomicFile file(Path("early"));
    file.Write(std::string(1 << 20, 'x'));
  } catch (const FileError& e) {
    early = e.what();
  }
  try {
    AtomicFile file(Path("late"));  // still in the buffer of the stream
    file.Write(std::string(1001, 'x'));
    file.Commit();
  } catch (const FileError& e) {
    late = e.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(early, Path("early") + ": cannot write: File too large");
  EXPECT_EQ(late, Path("late") + ": cannot write: File too large");
  EXPECT_EQ(NumFiles(), 0);
}
#endif

TEST_F(AtomicFileTest, ViewsOfAnyStridesAreWrittenRowMajor) {
  const std::vector<uint8_t> data = SomeElements(DType::kF32, 120);
  const uint8_t* const d = data.data();
  const ConstTensorView views[] = {
      {d, DType::kF32, {2, 3, 4, 5}},
      {d, DType::kF32, {2, 3, 4, 5}, {60, 5, 15, 1}},  // [B,H,T,D] of [B,T,H,D]
      {d, DType::kF32, {5, 4, 3, 2}, {1, 5, 20, 60}},  // Fortran order
      {d + 119 * 4, DType::kF32, {6, 20}, {-20, -1}},  // backwards
      {d, DType::kF32, {3, 4, 5}, {0, 5, 1}},          // expanded
      {d, DType::kF32, {4, 1, 5}, {10, 77, 2}},        // gaps
      {d, DType::kF32, {1, 1, 1, 1, 1}, {9, 9, 9, 9, 9}},
      {d, DType::kF32, {3, 0, 5}, {99, 1, 1}},
      {d, DType::kF32, std::span<const int64_t>()},
  };
  for (const ConstTensorView& view : views) {
    {
      AtomicFile file(Path("out"));
      file.WriteRowMajor(view);
      file.Commit();
    }
    EXPECT_EQ(ReadBytes(Path("out")), RowMajorBytes(view)) << view.ShapeString();
  }
}

TEST_F(AtomicFileTest, BoolsAreWrittenAsZeroAndOne) {
  std::vector<uint8_t> data(200000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i % 5);
  AtomicFile file(Path("out"));
  file.WriteRowMajor({data.data(), DType::kBool, {200000}});
  file.Commit();
  const std::string bytes = ReadBytes(Path("out"));
  ASSERT_EQ(bytes.size(), data.size());
  for (size_t i = 0; i < data.size(); ++i) ASSERT_EQ(bytes[i], i % 5 != 0);
}

}  // namespace
}  // namespace heed
