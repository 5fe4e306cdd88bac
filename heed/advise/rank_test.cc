// Ranking: order, frontier, reasons, and the message if nothing fits.
#include "heed/advise/rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "heed/core/error.h"

namespace heed::advise {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kMiB = 1 << 20;

Row RowOf(const std::string& mechanism, double seconds, double error, double mebibytes) {
  Row row;
  row.mechanism = mechanism;
  row.options = "causal";
  row.seconds = seconds;
  row.error = {2 * error, error};
  row.memory = {mebibytes * kMiB / 2, mebibytes * kMiB / 4, mebibytes * kMiB / 4};
  row.is_causal = true;
  return row;
}

// exact: slow and exact. near: faster, with an error of a thousandth. far: fastest, with a large error. waste: slower
// than near, with a larger error.
std::vector<Row> Rows() {
  return {RowOf("exact", 8e-3, 1e-7, 64), RowOf("waste", 6e-3, 0.5, 48), RowOf("near", 4e-3, 1e-3, 32),
          RowOf("far", 1e-3, 0.4, 16)};
}

std::vector<std::string> Names(const std::vector<Row>& rows) {
  std::vector<std::string> names;
  for (const Row& row : rows) names.push_back(row.mechanism);
  return names;
}

std::vector<std::string> Reasons(const std::vector<Row>& rows) {
  std::vector<std::string> reasons;
  for (const Row& row : rows) reasons.push_back(row.reason);
  return reasons;
}

TEST(RankTest, WithoutABudgetTimeDecides) {
  std::vector<Row> rows = Rows();
  Rank({}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("far", "near", "waste", "exact"));
  EXPECT_THAT(Reasons(rows), ElementsAre("fastest", "4 times the time of rank 1; nothing faster is as close",
                                         "6 times the time of rank 1; rank 1 is as close and faster",
                                         "8 times the time of rank 1; nothing faster is as close"));
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].rank, static_cast<int64_t>(i) + 1);
    EXPECT_TRUE(rows[i].within);
    EXPECT_EQ(rows[i].frontier, rows[i].mechanism != "waste");
  }
}

TEST(RankTest, AnErrorBudgetPutsTheOthersBehindByHowFarTheyAre) {
  std::vector<Row> rows = Rows();
  Rank({.memory_bytes = {}, .relative_error = 0.01}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("near", "exact", "far", "waste"));
  EXPECT_THAT(Reasons(rows),
              ElementsAre("fastest within the error of 0.01", "2 times the time of rank 1; nothing faster is as close",
                          "error 0.4, 40 times the budget", "error 0.5, 50 times the budget"));
  EXPECT_TRUE(rows[1].within);
  EXPECT_FALSE(rows[2].within);
}

TEST(RankTest, AMemoryBudgetDoesTheSame) {
  std::vector<Row> rows = Rows();
  Rank({.memory_bytes = 40 * kMiB, .relative_error = {}}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("far", "near", "waste", "exact"));
  EXPECT_EQ(rows[0].reason, "fastest within the memory of 40 MiB");
  EXPECT_EQ(rows[2].reason, "memory 48 MiB, 1.2 times the budget");
}

TEST(RankTest, BothBudgetsCount) {
  std::vector<Row> rows = Rows();
  Rank({.memory_bytes = 40 * kMiB, .relative_error = 0.01}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("near", "exact", "far", "waste"));
  EXPECT_EQ(rows[0].reason, "fastest within the error of 0.01 and the memory of 40 MiB");
  EXPECT_EQ(rows[1].reason, "memory 64 MiB, 1.6 times the budget");
  EXPECT_EQ(rows[3].reason, "error 0.5, 50 times the budget; memory 48 MiB, 1.2 times the budget");
}

TEST(RankTest, TheBudgetItselfIsWithinIt) {
  std::vector<Row> rows = Rows();
  Rank({.memory_bytes = 32 * kMiB, .relative_error = 1e-3}, true, rows);
  EXPECT_EQ(rows[0].mechanism, "near");
  EXPECT_TRUE(rows[0].within);
}

TEST(RankTest, LessMemoryIsAReason) {
  std::vector<Row> rows = {RowOf("small", 3e-3, 0.3, 1), RowOf("fast", 1e-3, 0.2, 64)};
  Rank({}, true, rows);
  EXPECT_EQ(rows[1].reason, "3 times the time of rank 1; nothing faster needs as little memory");
  EXPECT_FALSE(rows[1].frontier);
}

TEST(RankTest, RatiosReadAsTheyShould) {
  std::vector<Row> rows = {RowOf("a", 1e-3, 0.1, 2), RowOf("b", 1.04e-3, 0.1, 2), RowOf("c", 1.06e-3, 0.1, 2),
                           RowOf("d", 1, 0.01, 2), RowOf("e", 100, 0.1, 2)};
  Rank({}, true, rows);
  EXPECT_THAT(rows[1].reason, testing::StartsWith("about the time of rank 1;"));
  EXPECT_THAT(rows[2].reason, testing::StartsWith("1.1 times the time of rank 1;"));
  EXPECT_THAT(rows[3].reason, testing::StartsWith("1000 times the time of rank 1;"));
  EXPECT_THAT(rows[4].reason, testing::StartsWith("1e+05 times the time of rank 1;"));
}

TEST(RankTest, EqualRowsKeepTheirOrderAndShareTheFrontier) {
  std::vector<Row> rows = {RowOf("a", 1e-3, 0.1, 2), RowOf("b", 1e-3, 0.1, 2)};
  Rank({}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("a", "b"));
  EXPECT_TRUE(rows[0].frontier && rows[1].frontier);
}

TEST(RankTest, ReasonsSayWhatAReaderHasToKnow) {
  std::vector<Row> rows = {RowOf("linear", 1e-3, 0.9, 1), RowOf("longformer", 2e-3, 0.5, 1)};
  rows[0].is_softmax = false;
  rows[1].is_causal = false;
  Rank({}, true, rows);
  EXPECT_EQ(rows[0].reason, "fastest; another function than softmax attention, untrained here");
  EXPECT_THAT(rows[1].reason, HasSubstr("; sees later tokens"));
  Rank({}, false, rows);
  EXPECT_THAT(rows[0].reason, HasSubstr("; sees no later token"));
}

TEST(RankTest, AnUnknownErrorIsNotWithinABudget) {
  std::vector<Row> rows = {RowOf("broken", 1e-3, kUnknown, 1), RowOf("exact", 2e-3, 1e-7, 1)};
  Rank({}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("broken", "exact"));
  EXPECT_FALSE(rows[0].frontier);
  Rank({.memory_bytes = {}, .relative_error = 0.5}, true, rows);
  EXPECT_THAT(Names(rows), ElementsAre("exact", "broken"));
  EXPECT_EQ(rows[1].reason, "its error is no number");
}

TEST(RankTest, WhereNothingFitsTheSentenceSaysWhatWould) {
  std::vector<Row> rows = Rows();
  EXPECT_THAT([&] { Rank({.memory_bytes = {}, .relative_error = 1e-9}, true, rows); },
              ThrowsMessage<InvalidArgument>("error is 1e-09, expected 1e-07 or more: exact causal in f32 is closest"));
  EXPECT_THAT([&] { Rank({.memory_bytes = 5 * kMiB, .relative_error = {}}, true, rows); },
              ThrowsMessage<InvalidArgument>(
                  "memory is 5 MiB, expected 16 MiB or more: far causal in f32 takes least at this length"));
  EXPECT_THAT([&] { Rank({.memory_bytes = 20 * kMiB, .relative_error = 0.01}, true, rows); },
              ThrowsMessage<InvalidArgument>(
                  "error 0.01 and memory 20 MiB are met by no candidate together: raise the memory to 32 MiB for near "
                  "causal in f32, or the error to 0.4 for far causal in f32"));
  std::vector<Row> broken = {RowOf("broken", 1e-3, kUnknown, 1)};
  EXPECT_THAT(
      [&] { Rank({.memory_bytes = {}, .relative_error = 0.5}, true, broken); },
      ThrowsMessage<InvalidArgument>("error is 0.5, expected none: no candidate has an error that is a number"));
}

TEST(RankTest, WhatWouldFitDoes) {
  // The remedy in the message works: with the budget that it names, there is a first rank.
  for (const auto& [memory, error] : {std::pair{5 * kMiB, 1e-9}, {20 * kMiB, 0.01}}) {
    std::vector<Row> rows = Rows();
    EXPECT_THROW(Rank({memory, error}, true, rows), InvalidArgument);
  }
  std::vector<Row> rows = Rows();
  EXPECT_NO_THROW(Rank({32 * kMiB, 0.01}, true, rows));
  EXPECT_NO_THROW(Rank({20 * kMiB, 0.4}, true, rows));
}

TEST(RankTest, BytesForPeople) {
  EXPECT_EQ(BytesText(512), "512 B");
  EXPECT_EQ(BytesText(1536), "1.5 KiB");
  EXPECT_EQ(BytesText(200 * kMiB), "200 MiB");
  EXPECT_EQ(BytesText(3.25 * 1024 * kMiB), "3.25 GiB");
}

}  // namespace
}  // namespace heed::advise
