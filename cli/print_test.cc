// Tables and numbers as the command line prints them.
#include "cli/print.h"

#include <limits>

#include "gtest/gtest.h"

namespace heed::cli {
namespace {

TEST(PrintTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table({"<name", "time"});
  table.Add({"a", "1.00 ms"});
  table.Add({"longer", "12 s"});
  EXPECT_EQ(table.ToString(),
            "name       time\n"
            "a       1.00 ms\n"
            "longer     12 s\n");
}

TEST(PrintTest, ARowMayEndEarlyAndLinesHaveNoTrailingSpace) {
  Table table({"<a", "<b"});
  table.Add({"x"});
  EXPECT_EQ(table.ToString(), "a  b\nx\n");
}

TEST(PrintTest, WidthCountsCharactersNotBytes) {
  Table table({"<name", "<b"});
  table.Add({"\xC3\xA9", "x"});
  EXPECT_EQ(table.ToString(), "name  b\n\xC3\xA9     x\n");
}

TEST(PrintTest, WhatIsLeftIsRoundedToWhatAnybodyWaitsFor) {
  EXPECT_EQ(RoughTime(0.2), "1 s");
  EXPECT_EQ(RoughTime(37.6), "38 s");
  EXPECT_EQ(RoughTime(89.4), "89 s");
  EXPECT_EQ(RoughTime(230), "4 min");
}

TEST(PrintTest, NumbersHaveThreeDigitsAndAUnit) {
  EXPECT_EQ(Seconds(1.2345e-6), "1.23 us");
  EXPECT_EQ(Seconds(0.012345), "12.3 ms");
  EXPECT_EQ(Seconds(0.99951), "1000 ms");
  EXPECT_EQ(Seconds(123.4), "123 s");
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1536), "1.50 KiB");
  EXPECT_EQ(Bytes(3e12), "2.73 TiB");
  EXPECT_EQ(Rate(117.4e9, "FLOP/s"), "117 GFLOP/s");
  EXPECT_EQ(Rate(2.551e12, "FLOP/s"), "2.55 TFLOP/s");
  EXPECT_EQ(Rate(5e6, "B/s"), "5.00 MB/s");
  EXPECT_EQ(Percent(0.873), "87.3 %");
  EXPECT_EQ(ErrorSize(0), "0");
  EXPECT_EQ(ErrorSize(std::numeric_limits<double>::quiet_NaN()), "-");
  EXPECT_EQ(ErrorSize(1.26e-7), "1.3e-07");
}

TEST(PrintTest, WhatWasNotMeasuredIsADash) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Seconds(nan), "-");
  EXPECT_EQ(Rate(nan, "B/s"), "-");
  EXPECT_EQ(Percent(nan), "-");
}

}  // namespace
}  // namespace heed::cli
