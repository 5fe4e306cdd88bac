// Configurations of folders: fields that are not read, tied heads, end tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/model/model.h"
#include "heed/model/model_case.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;
using testing::ThrowsMessage;

class ConfigurationTest : public testing::TestWithParam<Tiny> {
 protected:
  void Opens(const std::string& fields) const {
    folder_.WriteConfig(folder_.ConfigWith(fields));
    EXPECT_NO_THROW(Model::Open(folder_.path())) << fields;
  }
  template <class Error>
  void Refuses(const std::string& fields, const std::string& message) const {
    folder_.WriteConfig(folder_.ConfigWith(fields));
    EXPECT_THAT([&] { Model::Open(folder_.path()); },
                ThrowsMessage<Error>(AllOf(StartsWith(folder_.path() + "/config.json: "), HasSubstr(message))))
        << fields;
  }

  TinyFolder folder_{GetParam()};
};

TEST_P(ConfigurationTest, UnreadFieldsAreRejectedUnlessTheyAreNull) {
  for (const char* field : {"clip_qkv", "attention_multiplier", "per_layer_config", "quantization_config"}) {
    Refuses<Unsupported>(
        "\"" + std::string(field) + "\": 8.5",
        "'" + std::string(field) + "' is '8.5', expected no such field: " + GetParam().family + " here has none");
    Opens("\"" + std::string(field) + "\": null");
  }
  Refuses<FileError>(R"("is_decoder": true)", "'is_decoder' is 'true', expected false");
  Refuses<FileError>(R"("pruned_heads": {"0": [1]})", "expected none");
  Refuses<FileError>(R"("dtype": "int8")", "'dtype' is '\"int8\"', expected float32, bfloat16");
  Refuses<FileError>(R"("tie_word_embeddings": null)", "'tie_word_embeddings' is 'null', expected true or false");
  Opens(R"("is_decoder": false, "pruned_heads": {}, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
           "use_cache": false, "id2label": {"0": "a"}, "temperature": 0.5, "bos_token_id": 1)");
}

// Transformers 5.23 has this rule: files may have either tensor of a tied head, and if they have both, both are used.
TEST_P(ConfigurationTest, TiedHeadsAreWhatFilesHave) {
  folder_.WriteConfig(folder_.ConfigWith(R"("tie_word_embeddings": true)"));
  const model::Configuration read(model::Fields("config", model::ParseJson("config", folder_.config())));
  if (!read.headed) return;
  const std::string table = read.plan.prefix + read.plan.tokens + ".weight", head = read.plan.head + ".weight";
  const std::vector<int64_t> ids = RandomIds(7, 3);
  const auto logits = [&](const char* tied) {
    folder_.WriteConfig(folder_.ConfigWith("\"tie_word_embeddings\": " + std::string(tied)));
    folder_.WriteTensors();
    Context ctx(1);
    const Buffer y(DType::kF32, {1, 7, kVocabulary}), expected(DType::kF64, {1, 7, kVocabulary});
    Model::Open(folder_.path()).Forward(ctx, View(ids, {1, 7}), {}, nullptr, y.view());
    Model::Reference(folder_.path(), View(ids, {1, 7}), {}, expected.view());
    // Layer norms that see little variance amplify rounding: 200 sequences of rwkv6 err by 1e-6, one by 2.4e-5.
    EXPECT_LT(layers::Error(y.view(), expected.view()), 1e-4);
    return y;
  };
  auto& tensors = folder_.tensors();
  const Buffer other = Buffer(DType::kF32, {kVocabulary, read.plan.width}).FillNormal(8);
  const ConstTensorView own = tensors.at(table);

  tensors[head] = other.view();
  const Buffer both = logits("false");
  EXPECT_TRUE(SameBits(logits("true").view(), both.view()));

  tensors[head] = own;
  const Buffer equal = logits("false");
  EXPECT_FALSE(SameBits(equal.view(), both.view()));
  EXPECT_TRUE(SameBits(logits("true").view(), equal.view()));
  tensors.erase(table);
  EXPECT_TRUE(SameBits(logits("true").view(), equal.view()));
  tensors[table] = own;
  tensors.erase(head);
  EXPECT_TRUE(SameBits(logits("true").view(), equal.view()));

  EXPECT_THAT([&] { logits("false"); }, ThrowsMessage<FileError>(HasSubstr(head + " is missing")));
  tensors[head] = own;
  tensors.erase(table);
  EXPECT_THAT([&] { logits("false"); }, ThrowsMessage<FileError>(HasSubstr(table + " is missing")));
  tensors.erase(head);
  EXPECT_THAT([&] { logits("true"); }, ThrowsMessage<FileError>(HasSubstr(table + " is missing")));
}

INSTANTIATE_TEST_SUITE_P(Families, ConfigurationTest, testing::ValuesIn(Tinies()),
                         [](const auto& of) { return of.param.name(); });

TEST(EndTokensTest, ThoseOfTheGenerationConfigurationWin) {
  const TinyFolder folder(Tinies()[0]);
  const auto of_config = [&](const std::string& config) {
    folder.WriteConfig(folder.ConfigWith("\"eos_token_id\": " + config));
    const Model model = Model::Open(folder.path());
    return std::vector<int64_t>(model.end_tokens().begin(), model.end_tokens().end());
  };
  const auto ends = [&](const std::string& config, const std::string& generation) {
    std::ofstream(folder.path() + "/generation_config.json") << generation;
    return of_config(config);
  };
  EXPECT_THAT(of_config("[7, 8]"), ElementsAre(7, 8));
  EXPECT_THAT(of_config("null"), IsEmpty());
  EXPECT_THAT(ends("7", R"({"eos_token_id": 9})"), ElementsAre(9));
  EXPECT_THAT(ends("null", R"({"eos_token_id": [9, 2], "temperature": 0.6})"), ElementsAre(9, 2));
  EXPECT_THAT(ends("7", R"({"eos_token_id": null})"), IsEmpty());
  EXPECT_THAT(ends("7", R"({"do_sample": true})"), IsEmpty());
  const auto refuses = [&](const std::string& generation, const std::string& message) {
    EXPECT_THAT([&] { ends("7", generation); },
                ThrowsMessage<FileError>(StartsWith(folder.path() + "/generation_config.json: " + message)))
        << generation;
  };
  for (const char* value : {"-1", "1.5", "\"a\"", "true", "[[1]]", "[1, -2]", "{}", "1e30", "18446744073709551615"})
    refuses("{\"eos_token_id\": " + std::string(value) + "}", "'eos_token_id' is '");
  for (const char* text : {"", "{", "nonsense", "{}{}"}) refuses(text, "is no JSON");
  refuses("[]", "holds no object");
  refuses("{\"a\":" + std::string(99, '[') + std::string(99, ']') + "}", "is nested deeper");
}

}  // namespace
}  // namespace heed
