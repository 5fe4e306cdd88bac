// Files of cost models: they round-trip, and any other content is refused.
#include "heed/advise/cost_model_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"

namespace heed::advise {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

CostModel SomeModel() {
  CostModel model;
  model.cpu = "AMD EPYC 9B14 (Genoa)";
  model.version = "0.1.0";
  model.target = "AVX3_ZEN4";
  model.threads = 2;
  model.seconds = 83.25;
  model.errors = {0.05, 0.125, 0.31};
  model.fits[{"attention prefill", DType::kF32, 2}] = {{"call", 3e-6}, {"flop", 1.25e-11}, {"pair", 0}};
  model.fits[{"attention prefill", DType::kBF16, 1}] = {};
  model.fits[{"gla decode", DType::kF32, 2}] = {{"state_byte", 2.5e-11}};
  return model;
}

class CostModelFileTest : public FileTest {};

TEST_F(CostModelFileTest, WhatIsWrittenComesBack) {
  const std::string path = Path("some/folders/model.json");  // the folders are created
  const CostModel model = SomeModel();
  SaveModel(path, model);
  const CostModel read = LoadModel(path);
  EXPECT_EQ(read.cpu, model.cpu);
  EXPECT_EQ(read.version, model.version);
  EXPECT_EQ(read.target, model.target);
  EXPECT_EQ(read.threads, model.threads);
  EXPECT_EQ(read.seconds, model.seconds);
  EXPECT_EQ(read.errors, model.errors);
  EXPECT_EQ(read.fits, model.fits);
}

TEST_F(CostModelFileTest, AFolderThatCannotBeMadeIsAnError) {
  WriteBytes(Path("file"), "x");
  EXPECT_THROW(SaveModel(Path("file/model.json"), SomeModel()), FileError);
  EXPECT_EQ(ReadBytes(Path("file")), "x");
}

TEST_F(CostModelFileTest, AModelOfAnotherMachineDoesNotFit) {
  const CostModel model = SomeModel();
  EXPECT_NO_THROW(CheckFits("F", model, model.cpu, model.target, 2, "0.1.0"));
  const std::string got = "F: was measured on AMD EPYC 9B14 (Genoa), AVX3_ZEN4, 2 threads, heed 0.1.0, expected ";
  EXPECT_THAT([&] { CheckFits("F", model, "Other", model.target, 2, "0.1.0"); },
              ThrowsMessage<FileError>(got + "Other, AVX3_ZEN4, 2 threads, heed 0.1.0: calibrate again"));
  EXPECT_THAT([&] { CheckFits("F", model, model.cpu, "AVX2", 2, "0.1.0"); },
              ThrowsMessage<FileError>(HasSubstr("expected AMD EPYC 9B14 (Genoa), AVX2")));
  EXPECT_THAT([&] { CheckFits("F", model, model.cpu, model.target, 1, "0.1.0"); },
              ThrowsMessage<FileError>(HasSubstr("AVX3_ZEN4, 1 thread, heed")));
  EXPECT_THAT([&] { CheckFits("F", model, model.cpu, model.target, 2, "0.2.0"); },
              ThrowsMessage<FileError>(HasSubstr("heed 0.2.0")));
}

TEST_F(CostModelFileTest, NamesOfFilesAreNamesEverywhere) {
  EXPECT_EQ(ModelFileName("Intel(R) Xeon(R) @ 2.0GHz/../x", "AVX2", 4, "0.1.0"),
            "cost-Intel_R__Xeon_R____2.0GHz_.._x-AVX2-4-0.1.0.json");
  EXPECT_NE(ModelFileName("a", "AVX2", 1, "0.1.0"), ModelFileName("a", "AVX2", 2, "0.1.0"));
}

// A document with one field replaced, or removed for an empty text.
std::string With(const std::string& field, const std::string& value) {
  std::vector<std::pair<std::string, std::string>> fields = {
      {"heed_cost_model", "1"},
      {"cpu", "\"c\""},
      {"version", "\"v\""},
      {"target", "\"t\""},
      {"threads", "2"},
      {"seconds", "1.5"},
      {"errors", "[0.1]"},
      {"fits", R"([{"work": "w", "dtype": "f32", "threads": 1, "seconds": {"call": 1e-6}}])"}};
  std::string text;
  for (const auto& [name, usual] : fields) {
    const std::string& shown = name == field ? value : usual;
    if (!shown.empty()) text += (text.empty() ? "{" : ", ") + ("\"" + name + "\": " + shown);
  }
  return text + "}";
}

std::string Fit(const std::string& work, const std::string& dtype, const std::string& threads,
                const std::string& seconds) {
  return R"([{"work": )" + work + R"(, "dtype": )" + dtype + R"(, "threads": )" + threads + R"(, "seconds": )" +
         seconds + "}]";
}

TEST_F(CostModelFileTest, TheUsualDocumentIsRead) {
  const CostModel model = ParseModel("F", With("", ""));
  EXPECT_EQ(model.fits.at({"w", DType::kF32, 1}).at("call"), 1e-6);
}

TEST_F(CostModelFileTest, AnythingElseIsRefusedByItsField) {
  const std::string long_text = "\"" + std::string(201, 'x') + "\"";
  const std::pair<std::string, std::string> wrong[] = {{"heed_cost_model", ""},
                                                       {"heed_cost_model", "2"},
                                                       {"heed_cost_model", "true"},
                                                       {"cpu", ""},
                                                       {"cpu", "7"},
                                                       {"cpu", "\"\""},
                                                       {"cpu", "\"a\\nb\""},
                                                       {"cpu", "\"caf\\u00e9\""},
                                                       {"cpu", long_text},
                                                       {"version", "null"},
                                                       {"target", "[]"},
                                                       {"threads", "0"},
                                                       {"threads", "4097"},
                                                       {"threads", "1.5"},
                                                       {"threads", "18446744073709551615"},
                                                       {"seconds", "-1"},
                                                       {"seconds", "\"1\""},
                                                       {"seconds", "1e300"},
                                                       {"errors", ""},
                                                       {"errors", "{}"},
                                                       {"errors", "[-0.1]"},
                                                       {"errors", "[\"x\"]"},
                                                       {"errors", "[null]"},
                                                       {"errors", "[[0.1]]"},
                                                       {"fits", ""},
                                                       {"fits", "{}"},
                                                       {"fits", "[1]"},
                                                       {"fits", "[[]]"},
                                                       {"fits", Fit("1", "\"f32\"", "1", "{}")},
                                                       {"fits", Fit("\"w\"", "\"i32\"", "1", "{}")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "-1", "{}")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "1", "[]")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "1", "{\"call\": -1}")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "1", "{\"a\\nb\": 1}")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "1", "{\"call\": null}")},
                                                       {"fits", Fit("\"w\"", "\"f32\"", "1", "{\"call\": 1e10}")}};
  for (const auto& [field, value] : wrong) {
    EXPECT_THAT([&] { ParseModel("F", With(field, value)); }, ThrowsMessage<FileError>(StartsWith("F: ")))
        << field << " " << value;
  }
  for (const char* text : {"", "{", "[]", "null", "7", "\xff\xfe", "{\"heed_cost_model\": 1"}) {
    EXPECT_THROW(ParseModel("F", text), FileError) << text;
  }
  EXPECT_THROW(ParseModel("F", With("fits", std::string(100, '[') + std::string(100, ']'))), FileError);
}

TEST_F(CostModelFileTest, AFileThatIsTooLargeOrMissingIsRefused) {
  WriteBytes(Path("large"), std::string((size_t{4} << 20) + 1, ' '));
  EXPECT_THAT([&] { LoadModel(Path("large")); },
              ThrowsMessage<FileError>(HasSubstr("has 4194305 bytes, expected at most 4194304")));
  EXPECT_THROW(LoadModel(Path("missing")), FileError);
}

TEST_F(CostModelFileTest, DamageGivesAnErrorOrNumbersWithinBounds) {
  SaveModel(Path("model"), SomeModel());
  const std::string whole = ReadBytes(Path("model"));
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = whole;
    size_t end = bytes.size();
    for (int k = 0; k < 1 + i % 3; ++k) Damage(random, bytes, end);
    try {
      const CostModel model = ParseModel("F", bytes);
      for (const auto& [work, coefficients] : model.fits) {
        for (const auto& [unit, seconds] : coefficients) ASSERT_TRUE(seconds >= 0 && std::isfinite(seconds));
      }
      for (const double error : model.errors) ASSERT_TRUE(error >= 0 && std::isfinite(error));
      ASSERT_TRUE(model.threads >= 1 && model.threads <= 4096);
    } catch (const FileError& e) {
      ASSERT_THAT(e.what(), StartsWith("F: "));
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace heed::advise
