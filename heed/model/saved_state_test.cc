// States of whole models in files: loaded content, the check of the model, and that no file does harm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"
#include "heed/model/model.h"
#include "heed/model/model_case.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

using Ids = std::vector<std::vector<int64_t>>;

std::vector<Tiny> CausalTinies() {
  std::vector<Tiny> tinies = Tinies();
  std::erase_if(tinies, [](const Tiny& tiny) {
    return tiny.family.find("bert") != std::string::npos || tiny.config.find("is_causal") != std::string::npos;
  });
  return tinies;
}

class SavedStateTest : public FileTest, public testing::WithParamInterface<Tiny> {
 protected:
  std::string path() const { return Path("state.safetensors"); }

  // Two sequences of 5 and 3 tokens; the second call is a step.
  ModelState SomeState(const layers::StateOptions& options = {.batch = 2}) const {
    ModelState state = model_.MakeState(options);
    const std::vector<int64_t> lengths = {4, 2};
    Call(RandomIds(8, 1), state, View(lengths));
    Call(RandomIds(2, 2), state);
    return state;
  }

  Buffer Call(const std::vector<int64_t>& ids, ModelState& state, const ConstTensorView& lengths = {}) const {
    Context ctx(2);
    const int64_t B = state.batch(), T = std::ssize(ids) / B;
    const Buffer y(DType::kF32, {B, T, model_.outputs()});
    model_.Forward(ctx, View(ids, {B, T}), lengths, &state, y.view());
    return y;
  }

  void Refuses(const std::string& message, int64_t max_bytes = -1) const {
    EXPECT_THAT([&] { model_.LoadState(path(), max_bytes); },
                ThrowsMessage<FileError>(AllOf(StartsWith(path() + ": "), HasSubstr(message))));
  }

  TinyFolder folder_{GetParam()};
  Model model_ = Model::Open(folder_.path());
};

TEST_P(SavedStateTest, WhatFollowsHasTheBitsOfNoBreak) {
  ModelState state = SomeState({.batch = 2, .capacity = 19, .page = 3});
  state.Save(path());
  ModelState loaded = model_.LoadState(path());
  EXPECT_THAT(loaded.lengths(), ElementsAre(5, 3));
  EXPECT_THAT(loaded.pending(), ElementsAre(-1, -1));
  EXPECT_EQ(loaded.nbytes(), state.nbytes());
  for (const int64_t T : {1, 4, 1}) {
    const std::vector<int64_t> ids = RandomIds(2 * T, 7);
    EXPECT_TRUE(SameBits(Call(ids, loaded).view(), Call(ids, state).view())) << T;
  }
  const std::vector<int64_t> many = RandomIds(2 * 11, 1);
  EXPECT_THAT([&] { Call(many, loaded); }, ThrowsMessage<InvalidArgument>(HasSubstr("at most 19")));  // the capacity
  // Saving a loaded state gives the same file.
  const std::string bytes = (state.Save(path()), ReadBytes(path()));
  model_.LoadState(path()).Save(path());
  EXPECT_EQ(ReadBytes(path()), bytes);
  EXPECT_EQ(NumFiles(), 1);
}

TEST_P(SavedStateTest, GenerationGoesOn) {
  Context ctx(1);
  GenerateOptions options = {.tokens = 4, .temperature = 1.5, .seed = 3};
  ModelState whole = model_.MakeState({.batch = 2});
  const Ids prompts = {{1, 2, 3}, {7}}, more = {{}, {5, 6}};
  model_.Generate(ctx, prompts, options, &whole);
  whole.Save(path());
  ModelState resumed = model_.LoadState(path());
  EXPECT_THAT(resumed.pending(), ElementsAre(whole.pending()[0], whole.pending()[1]));
  EXPECT_EQ(model_.Generate(ctx, more, options, &resumed), model_.Generate(ctx, more, options, &whole));
}

TEST_P(SavedStateTest, AStateThatHasSeenNothingComesBack) {
  model_.MakeState({.batch = 3}).Save(path());
  ModelState loaded = model_.LoadState(path());
  EXPECT_THAT(loaded.lengths(), ElementsAre(0, 0, 0));
  ModelState fresh = model_.MakeState({.batch = 3});
  const std::vector<int64_t> ids = RandomIds(12, 3);
  EXPECT_TRUE(SameBits(Call(ids, loaded).view(), Call(ids, fresh).view()));
}

TEST_P(SavedStateTest, AModelThatIsOpenedAgainIsTheSame) {
  SomeState().Save(path());
  EXPECT_THAT(Model::Open(folder_.path()).LoadState(path()).lengths(), ElementsAre(5, 3));
}

TEST_P(SavedStateTest, StatesOfOtherModelsAreRefused) {
  const auto refuses = [&](const Model& other, const std::string& message) {
    SomeState().Save(path());
    EXPECT_THAT([&] { other.LoadState(path()); },
                ThrowsMessage<FileError>(
                    AllOf(StartsWith(path() + ": "), HasSubstr(message), HasSubstr("the state is of another model"))));
  };
  for (const Tiny& tiny : CausalTinies()) {
    if (tiny.family == GetParam().family) continue;
    refuses(Model::Open(TinyFolder(tiny).path()),
            "metadata 'heed_state' is '" + GetParam().family + "', expected " + tiny.family);
  }
  // Models with other weights, and with another configuration of equal sizes.
  refuses(Model::Open(TinyFolder(GetParam(), DType::kF32, 6).path()), "metadata 'model' is '");
  const std::string eps =
      GetParam().config.find("num_attention_heads") == std::string::npos ? "layer_norm_epsilon" : "rms_norm_eps";
  folder_.WriteConfig(folder_.ConfigWith("\"" + eps + "\": 0.001"));
  refuses(Model::Open(folder_.path()), "metadata 'model' is '");
}

TEST_P(SavedStateTest, WhatIsNoStateIsAFileError) {
  SomeState().Save(path());
  const FileParts good(path());
  const auto expect = [&](const std::function<void(FileParts&)>& spoil, const std::string& message) {
    FileParts parts = good;
    spoil(parts);
    parts.Write(path());
    Refuses(message);
  };
  using P = FileParts;
  for (const auto& [key, value] : good.metadata) {
    if (key.find("rotary_") != std::string::npos) continue;
    expect([&](P& p) { p.metadata.erase(key); }, "metadata has no '" + key + "'");
    expect([&](P& p) { p.metadata[key] = "wrong"; }, "metadata '" + key + "' is 'wrong', expected ");
  }
  for (const auto& [name, tensor] : good.tensors) {
    expect([&](P& p) { p.tensors.erase(name); }, "tensor '" + name + "' is not there");
    expect([&](P& p) { p.Reshape(name, DType::kF16, {2}); }, "tensor '" + name + "' has dtype f16, expected ");
    std::vector<int64_t> sizes(tensor.first.sizes().begin(), tensor.first.sizes().end());
    ++sizes[0];
    expect([&](P& p) { p.Reshape(name, tensor.first.dtype(), sizes); }, "tensor '" + name + "' has shape ");
  }
  const auto meta = [&](const char* key, const char* value, const std::string& message) {
    expect([&](P& p) { p.metadata[key] = value; }, message);
  };
  meta("version", "2", "metadata 'version' is '2', expected 1");
  meta("vocabulary", "24", "metadata 'vocabulary' is '24', expected 23: the state is of another model");
  meta("layers", "1", "metadata 'layers' is '1', expected ");
  meta("batch", "0", "metadata 'batch' is 0, expected at least 1");
  meta("batch", "1000000000000", "tensor 'lengths' has shape [2], expected [1000000000000]");
  meta("capacity", "4", "tensor 'lengths' has an element 5, expected 0 to 4");
  for (const auto& [name, bad, message] : std::vector<std::tuple<std::string, int64_t, std::string>>{
           {"lengths", -1, "has an element -1, expected 0 to "},
           {"lengths", INT64_MAX, "has an element 9223372036854775807, expected 0 to "},
           {"pending", -2, "has an element -2, expected -1 to 22"},
           {"pending", 23, "has an element 23, expected -1 to 22"},
           {"last", 23, "has an element 23, expected -1 to 22"},
           {"last", -1, "has an element -1, expected a token: sequence 1 has 3"}}) {
    expect([&](P& p) { p.Set(name, 1, bad); }, "tensor '" + name + "' " + message);
  }
  WriteSafetensors(path(), std::vector<NamedTensor>{});
  Refuses("metadata has no 'heed_state'");
  WriteBytes(path(), "no state");
  Refuses("expected");
}

TEST_P(SavedStateTest, DamagedFilesDoNoHarm) {
  SomeState().Save(path());
  const std::string good = ReadBytes(path());
  std::mt19937 damage(5);
  const auto load = [&](const std::string& bytes) {
    std::filesystem::remove(path());  // some systems wait for the disk when a file is truncated
    WriteBytes(path(), bytes);
    try {
      ModelState state = model_.LoadState(path(), 1 << 22);
      if (state.pending()[0] < 0 && state.pending()[1] < 0) Call(RandomIds(2 * state.batch(), 1), state);
      return true;
    } catch (const FileError& error) {
      EXPECT_THAT(error.what(), StartsWith(path() + ": "));
    } catch (const InvalidArgument&) {  // a capacity or a position limit is reached
    }
    return false;
  };
  ASSERT_TRUE(load(good));
  for (size_t length = 0; length < good.size(); length += 1 + good.size() / 300)
    EXPECT_FALSE(load(good.substr(0, length)));
  int passed = 0;
  for (int i = 0; i < 400; ++i) {
    std::string bad = good;
    size_t header_end = good.rfind('}');
    Damage(damage, bad, header_end);
    passed += load(bad);
  }
  EXPECT_GT(passed, 0);  // for example changed bits of rows
}

TEST_P(SavedStateTest, AFileThatCannotBeWrittenIsAFileError) {
  EXPECT_THROW(model_.MakeState().Save(Path("no/such/folder")), FileError);
  EXPECT_THROW(model_.LoadState(Path("none")), FileError);
}

INSTANTIATE_TEST_SUITE_P(Families, SavedStateTest, testing::ValuesIn(CausalTinies()),
                         [](const auto& of) { return of.param.name(); });

using SavedCachesOfModelsTest = FileTest;

TEST_F(SavedCachesOfModelsTest, CachesAreThoseThatTheModelWouldMakeAndWithinTheLimit) {
  const TinyFolder folder(Tinies()[0]);
  const Model model = Model::Open(folder.path());
  Context ctx(1);
  ModelState state = model.MakeState();
  const Buffer y(DType::kF32, {1, 6, kVocabulary});
  model.Forward(ctx, View(RandomIds(6, 1), {1, 6}), {}, &state, y.view());
  const std::string path = Path("state.safetensors");
  state.Save(path);
  const FileParts good(path);
  const auto expect = [&](const std::string& key, const char* value, const std::string& message) {
    FileParts parts = good;
    parts.metadata[key] = value;
    parts.Write(path);
    EXPECT_THAT([&] { model.LoadState(path); }, ThrowsMessage<FileError>(HasSubstr(message))) << key;
  };
  expect("layers.0.keys.heads", "2", "metadata 'layers.0.keys.heads' is 2, expected 1");
  expect("layers.2.keys.page", "32", "metadata 'layers.2.keys.page' is 32, expected 64");
  expect("layers.2.keys.capacity", "7", "metadata 'layers.2.keys.capacity' is 7, expected -1");
  expect("layers.0.keys.rotary_pairs", "interleaved", "'layers.0.keys.heed_cache' does not match this cache's options");
  expect("layers.0.keys.dtype", "bf16", "'layers.0.keys.heed_cache' does not match this cache's options");
  expect("layers.4.keys.heed_cache", "ring", "expected");
  expect("page", "-1", "KVCache: page is -1");
  expect("page", "0", "KVCache: page is 0");
  expect("capacity", "0", "expected");
  FileParts parts = good;
  const std::string name = "layers.2.keys.lengths";
  parts.Set("layers.2.keys.appended", 0, 0);
  parts.Set(name, 0, 5);
  for (const char* row : {"layers.2.keys.k.0", "layers.2.keys.v.0"}) parts.Reshape(row, DType::kF32, {5, 1, 10});
  parts.Write(path);
  EXPECT_THAT([&] { model.LoadState(path); },
              ThrowsMessage<FileError>(HasSubstr("tensor '" + name + "' has an element 5, expected 6, the tokens of")));
  good.Write(path);
  EXPECT_THAT([&] { model.LoadState(path, state.nbytes() / 2); }, ThrowsMessage<FileError>(HasSubstr("max_bytes")));
  EXPECT_THAT([&] { model.LoadState(path, 9); },
              ThrowsMessage<FileError>(HasSubstr("bytes, expected at most max_bytes, 9")));
  EXPECT_EQ(model.LoadState(path, 2 * state.nbytes()).nbytes(), state.nbytes());
}

TEST_F(SavedCachesOfModelsTest, EncodersHaveNone) {
  const TinyFolder folder(
      {"bert", R"("vocab_size": 23, "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
                                      "intermediate_size": 26)"});
  EXPECT_THAT([&] { Model::Open(folder.path()).LoadState(Path("any")); },
              ThrowsMessage<InvalidArgument>(HasSubstr("the model is a bert, expected one that is causal")));
}

}  // namespace
}  // namespace heed
