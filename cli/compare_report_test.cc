// The report of `heed compare`: which section a row is in, and what a brief report leaves to --all.
#include "cli/compare_report.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heed::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

CompareRow RowOf(Kind kind, const std::string& mechanism, DType dtype, double error) {
  attention::Options options;
  options.causal = kind == Kind::kOther;
  return {kind, mechanism, options, {}, {}, dtype, 1e-3, 4e9, 1e13, 2048, 1024, {error, error}, 25, 100};
}

CompareReport Report() {
  CompareReport report;
  report.file = "x.safetensors";
  report.machine = "a CPU, AVX2, 2 threads";
  report.problem = "f32 in the file";
  report.reference = "attention in float64";
  report.dtypes = {DType::kF64, DType::kF32};
  const auto add = [&](Kind kind, const std::string& mechanism, double error) {
    for (const DType dtype : report.dtypes) report.rows.push_back(RowOf(kind, mechanism, dtype, error));
  };
  add(Kind::kExact, "attention", 1.1e-7);
  add(Kind::kOther, "retention", 2.9e2);
  add(Kind::kApproximate, "longformer", 3.3e-2);
  report.skipped = {{"ssd", "no x"}, {"rwkv7", "no w"}, {"h3", "no x"}};
  return report;
}

TEST(CompareReportTest, SectionsGoFromRoundingToWhatOnlyTrainingMakesComparable) {
  const std::string text = ToText(Report());
  const size_t exact = text.find("\nExact: "), approximate = text.find("\nApproximations: "),
               other = text.find("\nOther functions: only training makes their outputs comparable");
  ASSERT_NE(other, text.npos);
  EXPECT_LT(exact, text.find("\nattention "));
  EXPECT_LT(text.rfind("\nattention "), approximate);
  EXPECT_LT(approximate, text.find("\nlongformer "));
  EXPECT_LT(text.rfind("\nlongformer "), other);
  EXPECT_LT(other, text.find("\nretention "));
}

TEST(CompareReportTest, ASectionWithoutRowsIsNotPrinted) {
  CompareReport report = Report();
  std::erase_if(report.rows, [](const CompareRow& row) { return row.kind != Kind::kOther; });
  EXPECT_THAT(ToText(report), Not(HasSubstr("Exact: ")));
  EXPECT_THAT(ToText(report), Not(HasSubstr("Approximations: ")));
  EXPECT_THAT(ToText(report), HasSubstr("Other functions: "));
}

TEST(CompareReportTest, ErrorsOfOtherFunctionsArePrintedInAFullReportAlone) {
  CompareReport report = Report();
  EXPECT_THAT(ToText(report), Not(HasSubstr("2.9e+02")));
  EXPECT_THAT(ToText(report), HasSubstr("untrained, errors mean nothing"));
  report.full = true;
  EXPECT_THAT(ToText(report), HasSubstr("2.9e+02"));
}

TEST(CompareReportTest, ErrorsOfTheOthersArePrintedInAnyReport) {
  for (const bool full : {false, true}) {
    CompareReport report = Report();
    report.full = full;
    EXPECT_THAT(ToText(report), HasSubstr("1.1e-07"));
    EXPECT_THAT(ToText(report), HasSubstr("3.3e-02"));
    EXPECT_THAT(ToText(report), HasSubstr("25.0 %"));
  }
}

TEST(CompareReportTest, SpeedIsPrintedAsAShareOfTheRoof) {
  EXPECT_THAT(ToText(Report()), HasSubstr("40.0 %  4.00 TFLOP/s  10.0 TFLOP/s\n"));
}

TEST(CompareReportTest, LeftOutMechanismsAreOneLineWithACount) {
  CompareReport report = Report();
  EXPECT_THAT(ToText(report), testing::EndsWith("\n\nleft out: 3 mechanisms that do not take these tensors; --all "
                                                "prints which and why\n"));
  report.full = true;
  EXPECT_THAT(ToText(report), testing::EndsWith("\n\nleft out: rwkv7: no w\nleft out: ssd, h3: no x\n"));
  report.full = false;
  report.skipped.resize(1);
  EXPECT_THAT(ToText(report), HasSubstr("left out: 1 mechanism that does not take"));
  report.skipped.clear();
  EXPECT_THAT(ToText(report), Not(HasSubstr("left out")));
}

TEST(CompareReportTest, TheDocumentHasEveryRowWithItsKindAndEveryReason) {
  const Json json = ToJson(Report());
  ASSERT_EQ(json["rows"].size(), 6u);
  EXPECT_EQ(json["rows"][0]["kind"], "exact");
  EXPECT_EQ(json["rows"][2]["kind"], "other");
  EXPECT_EQ(json["rows"][4]["kind"], "approximate");
  EXPECT_EQ(json["rows"][2]["relative_error"], 2.9e2);
  EXPECT_DOUBLE_EQ(json["rows"][0]["flops_per_second"].get<double>(), 4e12);
  EXPECT_EQ(json["rows"][0]["roof"], 1e13);
  EXPECT_EQ(json["skipped"].size(), 3u);
}

}  // namespace
}  // namespace heed::cli
