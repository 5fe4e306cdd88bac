// Whole models of tiny random folders: references in double, splits and steps, padding, batches, states, generation,
// errors.
#include "heed/model/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/layers/layer_case.h"
#include "heed/model/model_case.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

using layers::Error;

class ModelTest : public testing::TestWithParam<Tiny> {
 protected:
  static constexpr int64_t kT = 11;

  Buffer Result(const std::vector<int64_t>& ids, int64_t B, const ConstTensorView& lengths = {},
                ModelState* state = nullptr, int threads = 2) const {
    Context ctx(threads);
    const int64_t T = std::ssize(ids) / B;
    const Buffer y(DType::kF32, {B, T, model_.outputs()});
    model_.Forward(ctx, View(ids, {B, T}), lengths, state, y.view());
    return y;
  }

  TinyFolder folder_{GetParam()};
  Model model_ = Model::Open(folder_.path());
};

TEST_P(ModelTest, AgreesWithItsReference) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const TinyFolder folder(GetParam(), dtype, 9);
    const Model model = Model::Open(folder.path());
    EXPECT_EQ(model.family(), GetParam().family);
    const std::vector<int64_t> ids = RandomIds(2 * kT, 1), lengths = {kT, kT};
    const Buffer expected(DType::kF64, {2, kT, model.outputs()}), got(DType::kF32, {2, kT, model.outputs()});
    Model::Reference(folder.path(), View(ids, {2, kT}), {}, expected.view());
    Context ctx(2);
    model.Forward(ctx, View(ids, {2, kT}), {}, nullptr, got.view());
    EXPECT_LT(Error(got.view(), expected.view()), 2e-5) << Name(dtype);
  }
}

TEST_P(ModelTest, AnySplitIntoCallsAndStepsGivesTheWhole) {
  if (!model_.causal()) return;
  const std::vector<int64_t> ids = RandomIds(2 * kT, 3);
  const Buffer whole = Result(ids, 2);
  ModelState state = model_.MakeState({.batch = 2});
  const std::vector<int64_t> bounds = {0, 4, 5, 6, 9, kT};
  Context ctx(2);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const int64_t begin = bounds[i], count = bounds[i + 1] - begin;
    const ConstTensorView part = View(ids, {2, kT}).Slice(1, begin, begin + count);
    const Buffer y(DType::kF32, {2, count, model_.outputs()});
    if (count == 1) {
      model_.Step(ctx, ConstTensorView(ids.data() + begin, DType::kI64, {2}, {kT}), state,
                  y.As(TensorView(y.view().data(), DType::kF32, {2, model_.outputs()})).view());
    } else {
      model_.Forward(ctx, part, {}, &state, y.view());
    }
    EXPECT_LT(Error(y.view(), whole.view().Slice(1, begin, begin + count)), 1e-5) << begin;
  }
  EXPECT_THAT(state.lengths(), testing::ElementsAre(kT, kT));
}

TEST_P(ModelTest, ASequenceHasItsBitsAloneAndPaddedAndOnAnyThreads) {
  std::vector<int64_t> ids = RandomIds(4 * kT, 4);
  const std::vector<int64_t> lengths = {kT, 3, 0, 7};
  for (int64_t b = 0; b < 4; ++b) {
    for (int64_t t = lengths[static_cast<size_t>(b)]; t < kT; ++t)
      ids[static_cast<size_t>(b * kT + t)] = -7;  // must not be read
  }
  const Buffer together = Result(ids, 4, View(lengths), nullptr, 3);
  for (int64_t b = 0; b < 4; ++b) {
    const int64_t count = lengths[static_cast<size_t>(b)];
    if (count == 0) continue;
    const std::vector<int64_t> own(ids.begin() + b * kT, ids.begin() + b * kT + count);
    EXPECT_TRUE(SameBits(together.view().Slice(0, b, b + 1).Slice(1, 0, count), Result(own, 1, {}, nullptr, 1).view()))
        << b;
  }
}

TEST_P(ModelTest, StatesForkAndReorder) {
  if (!model_.causal()) return;
  ModelState state = model_.MakeState({.batch = 2});
  Result(RandomIds(10, 5), 2, {}, &state);
  ModelState fork = state.Fork();
  const std::vector<int64_t> same = {4, 4};
  const Buffer first = Result(same, 2, {}, &state);
  fork.Reorder(std::vector<int64_t>{1, 1});
  const Buffer second = Result(same, 2, {}, &fork);
  for (int64_t b = 0; b < 2; ++b) EXPECT_TRUE(SameBits(second.view().Slice(0, b, b + 1), first.view().Slice(0, 1, 2)));
  EXPECT_GT(state.nbytes(), 0);
  EXPECT_THAT([&] { state.Reorder(std::vector<int64_t>{0}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("indices has 1 of them, expected 2")));
  EXPECT_THAT([&] { state.Reorder(std::vector<int64_t>{0, 2}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("an element 2, expected 0 to 1")));
}

TEST_P(ModelTest, GreedyTokensAreTheLikeliestOfWholeCalls) {
  if (!model_.causal()) return;
  Context ctx(2);
  const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3, 4}, {9}};
  const auto made = model_.Generate(ctx, prompts, {.tokens = 6});
  ASSERT_EQ(made.size(), 2u);
  for (size_t b = 0; b < 2; ++b) {
    std::vector<int64_t> ids = prompts[b];
    ASSERT_EQ(made[b].size(), 6u);
    EXPECT_EQ(model_.Generate(ctx, {prompts[b]}, {.tokens = 6})[0], made[b]);
    for (const int64_t token : made[b]) {
      const Buffer y = Result(ids, 1);
      const float* last = y.as<float>() + (std::ssize(ids) - 1) * kVocabulary;
      EXPECT_GE(last[token], *std::max_element(last, last + kVocabulary) - 1e-4f);
      ids.push_back(token);
    }
  }
}

TEST_P(ModelTest, GenerationGoesOnFromAState) {
  if (!model_.causal()) return;
  Context ctx(1);
  for (const double temperature : {0., 1.5}) {
    const GenerateOptions all = {.tokens = 9, .temperature = temperature, .seed = 3};
    GenerateOptions part = all;
    const auto whole = model_.Generate(ctx, {{1, 2, 3}, {7, 8}}, all);
    ModelState state = model_.MakeState({.batch = 2});
    part.tokens = 4;
    auto made = model_.Generate(ctx, {{1, 2, 3}, {7, 8}}, part, &state);
    EXPECT_THAT(state.pending(), testing::ElementsAre(made[0].back(), made[1].back()));
    EXPECT_THAT([&] { Result({1, 1}, 2, {}, &state); },
                ThrowsMessage<InvalidArgument>(HasSubstr("state has a token of Generate() pending")));
    part.tokens = 5;
    const auto more = model_.Generate(ctx, {{}, {}}, part, &state);
    for (size_t b = 0; b < 2; ++b) {
      made[b].insert(made[b].end(), more[b].begin(), more[b].end());
      EXPECT_EQ(made[b], whole[b]);
    }
  }
}

TEST_P(ModelTest, WrongArgumentsAreNamed) {
  const std::vector<int64_t> ids = {1, 2, 3, 4}, wrong = {1, kVocabulary}, long_lengths = {3, 1};
  Context ctx(1);
  const Buffer y(DType::kF32, {2, 2, model_.outputs()}), untouched(DType::kF32, {2, 2, model_.outputs()});
  const auto refuses = [&](const ConstTensorView& in, const ConstTensorView& lengths, ModelState* state,
                           const TensorView& out, const std::string& what) {
    EXPECT_THAT([&] { model_.Forward(ctx, in, lengths, state, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(what)))
        << what;
    EXPECT_TRUE(SameBits(y.view(), untouched.view()));
  };
  const ConstTensorView good = View(ids, {2, 2});
  refuses(View(wrong, {1, 2}), {}, nullptr, y.view().Slice(0, 0, 1), "ids has an element 23, expected 0 to 22");
  refuses(View(ids), {}, nullptr, y.view(), "ids has shape [4], expected [B, T]");
  refuses(Buffer(DType::kF32, {2, 2}).view(), {}, nullptr, y.view(), "ids has dtype f32, expected i32 or i64");
  refuses(good, View(long_lengths), nullptr, y.view(), "lengths has an element 3, expected 0 to 2");
  refuses(good, View(ids), nullptr, y.view(), "lengths has shape [4], expected [2]");
  refuses(good, {}, nullptr, y.view().Slice(1, 0, 1), "y has shape");
  const Buffer wide(DType::kF32, {2, 2, model_.outputs() + 1});
  refuses(good, {}, nullptr, wide.view().Slice(2, 0, model_.outputs()), "y has stride");
  std::vector<int64_t> shared(static_cast<size_t>(2 * model_.outputs() + 4), 1);
  refuses(View(shared, {2, 2}), {}, nullptr, TensorView(shared.data(), DType::kF32, {2, 2, model_.outputs()}),
          "y overlaps ids");
  const Buffer vectors(DType::kF32, {2, model_.width()});
  const std::vector<int64_t> empty = {0, 1};
  EXPECT_THAT([&] { model_.Embed(ctx, good, View(empty), vectors.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("lengths has an element 0, expected at least 1")));
  if (model_.most_positions() > 0) {
    const std::vector<int64_t> many = RandomIds(model_.most_positions() + 1, 1);
    EXPECT_THAT([&] { Result(many, 1); },
                ThrowsMessage<InvalidArgument>(
                    HasSubstr("would make sequence 0 " + std::to_string(many.size()) + " tokens long")));
  }
  if (!model_.causal()) {
    EXPECT_THAT([&] { model_.MakeState(); }, ThrowsMessage<InvalidArgument>(HasSubstr("expected one that is causal")));
    EXPECT_THAT([&] { model_.Generate(ctx, {{1}}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("continues no text, expected a causal one with a head")));
    return;
  }
  ModelState three = model_.MakeState({.batch = 3}), full = model_.MakeState({.batch = 2, .capacity = 1});
  refuses(good, {}, &three, y.view(), "state has a batch of 3, expected 2");
  refuses(good, {}, &full, y.view(), "would make sequence 0 2 tokens long, expected at most 1");
  ModelState other = Model::Open(folder_.path()).MakeState({.batch = 2});
  refuses(good, {}, &other, y.view(), "state is of another model");
  const auto refuses_options = [&](const GenerateOptions& options, const std::string& what) {
    EXPECT_THAT([&] { model_.Generate(ctx, {{1}}, options); }, ThrowsMessage<InvalidArgument>(HasSubstr(what)));
  };
  refuses_options({.tokens = -1}, "tokens is -1, expected at least 0");
  refuses_options({.temperature = NAN}, "temperature is nan");
  refuses_options({.top_k = -1}, "top_k is -1");
  refuses_options({.top_p = 0}, "top_p is 0");
  EXPECT_THAT([&] { model_.Generate(ctx, {{1}, {}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("prompts has an empty one")));
  EXPECT_THAT([&] { model_.Generate(ctx, {{kVocabulary}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("ids has an element 23")));
}

TEST_P(ModelTest, EveryMissingOrForeignTensorIsNamed) {
  const auto refuses = [&](const std::string& what) {
    folder_.WriteTensors();
    EXPECT_THAT([&] { Model::Open(folder_.path()); },
                ThrowsMessage<FileError>(testing::AllOf(HasSubstr(folder_.path()), HasSubstr(what))))
        << what;
  };
  const auto good = folder_.tensors();
  for (const auto& [name, tensor] : good) {
    folder_.tensors().erase(name);
    refuses(name + " is missing");
    const Buffer nan = Buffer(DType::kF32, tensor.sizes()).FillConstant(1);
    nan.view().as<float>()[0] = NAN;
    folder_.tensors()[name] = nan.view();
    refuses("tensor '" + name + "' has NaN or infinities");
    folder_.tensors()[name] = tensor;
  }
  folder_.tensors()["more"] = good.begin()->second;
  refuses("tensor 'more' is none of this " + GetParam().family + "'s");
}

INSTANTIATE_TEST_SUITE_P(Families, ModelTest, testing::ValuesIn(Tinies()),
                         [](const auto& of) { return of.param.name(); });

// Files of 2018 have other names for the weights of BERT's norms. A bias of the head itself takes precedence.
TEST(MaskedModelTest, OldNamesAndBothBiasesOfAHeadAreRead) {
  const std::vector<int64_t> ids = RandomIds(7, 2);
  const auto logits = [&](const TinyFolder& folder) {
    Context ctx(1);
    const Buffer y(DType::kF32, {1, 7, kVocabulary});
    Model::Open(folder.path()).Forward(ctx, View(ids, {1, 7}), {}, nullptr, y.view());
    return y;
  };
  const auto of_family = [](const char* family) {
    const auto tinies = Tinies();
    return *std::ranges::find(tinies, family, &Tiny::family);
  };
  const TinyFolder now(of_family("bert"));
  TinyFolder old(of_family("bert"));
  auto& tensors = old.tensors();
  using Names = std::pair<std::string, std::string>;
  for (const auto& [end, before] :
       {Names{"LayerNorm.weight", "LayerNorm.gamma"}, Names{"LayerNorm.bias", "LayerNorm.beta"}}) {
    const auto named = tensors;
    for (const auto& [name, tensor] : named) {
      if (!name.ends_with(end)) continue;
      tensors.erase(name);
      tensors[name.substr(0, name.size() - end.size()) + before] = tensor;
    }
  }
  EXPECT_FALSE(tensors.contains("bert.embeddings.LayerNorm.weight"));
  tensors["cls.predictions.decoder.bias"] = tensors.at("cls.predictions.bias");  // a copy
  old.WriteTensors();
  EXPECT_TRUE(SameBits(logits(old).view(), logits(now).view()));

  const Buffer other = Buffer(DType::kF32, {kVocabulary}).FillNormal(9);
  const TinyFolder without(of_family("xlm-roberta"));
  TinyFolder own(of_family("xlm-roberta"));
  const ConstTensorView shared = own.tensors().at("lm_head.bias");
  own.tensors()["lm_head.decoder.bias"] = other.view();
  own.WriteTensors();
  const Buffer changed = logits(own), before = logits(without);
  for (int64_t i = 0; i < kVocabulary; ++i) {
    EXPECT_NEAR(changed.Get({0, 3, i}) - before.Get({0, 3, i}), other.Get({i}) - shared.as<float>()[i], 1e-5);
  }
}

TEST(ModelGenerateTest, DrawsFollowTheSoftmaxWithinTopKAndTopP) {
  const TinyFolder folder({"gpt2", R"("vocab_size": 23, "n_embd": 20, "n_layer": 1, "n_head": 2, "n_positions": 19)"});
  const Model model = Model::Open(folder.path());
  Context ctx(1);
  const Buffer y(DType::kF32, {1, 1, kVocabulary});
  const std::vector<int64_t> ids = {3};
  model.Forward(ctx, View(ids, {1, 1}), {}, nullptr, y.view());
  std::vector<std::pair<double, int64_t>> likely;
  for (int64_t i = 0; i < kVocabulary; ++i) likely.emplace_back(-std::exp(y.Get({0, 0, i}) / 2), i);
  std::ranges::sort(likely);
  constexpr int kDraws = 4000;
  const auto counts = [&](const GenerateOptions& base) {
    std::map<int64_t, int> count;
    for (int i = 0; i < kDraws; ++i) {
      GenerateOptions options = base;
      options.seed = static_cast<uint64_t>(i);
      ++count[model.Generate(ctx, {{3}}, options)[0][0]];
    }
    return count;
  };
  for (const int64_t kept : {kVocabulary, int64_t{3}}) {
    auto count = counts({.tokens = 1, .temperature = 2, .top_k = kept});
    double sum = 0;
    for (int64_t i = 0; i < kept; ++i) sum -= likely[static_cast<size_t>(i)].first;
    for (int64_t i = 0; i < kVocabulary; ++i) {
      const double p = i < kept ? -likely[static_cast<size_t>(i)].first / sum : 0;
      EXPECT_NEAR(count[likely[static_cast<size_t>(i)].second] / double{kDraws}, p,
                  5 * std::sqrt(p * (1 - p) / kDraws));
    }
  }
  double all = 0;
  for (const auto& [weight, id] : likely) all -= weight;
  const double two = -(likely[0].first + likely[1].first) / all;
  auto count = counts({.tokens = 1, .temperature = 2, .top_p = two - 1e-6});
  EXPECT_EQ(count.size(), 2u);
  EXPECT_EQ(counts({.tokens = 1, .temperature = 2, .top_p = two + 1e-6}).size(), 3u);
}

TEST(ModelGenerateTest, LogitsThatAreNoNumbersGiveTokensAllTheSame) {
  // The products of this head overflow: finite weights give logits that are infinite or NaN.
  TinyFolder folder({"gpt2", R"("vocab_size": 23, "n_embd": 20, "n_layer": 1, "n_head": 2, "n_positions": 19,
                                "tie_word_embeddings": false)"});
  const Buffer huge = Buffer(DType::kF32, {kVocabulary, 20}).FillNormal(3, 1e38);
  for (int64_t i = 0; i < 20 * kVocabulary; ++i) huge.as<float>()[i] = std::clamp(huge.as<float>()[i], -3e38f, 3e38f);
  folder.tensors()["lm_head.weight"] = huge.view();
  folder.WriteTensors();
  const Model model = Model::Open(folder.path());
  Context ctx(1);
  const Buffer y(DType::kF32, {1, 1, kVocabulary});
  const std::vector<int64_t> ids = {3};
  model.Forward(ctx, View(ids, {1, 1}), {}, nullptr, y.view());
  EXPECT_TRUE(std::any_of(y.as<float>(), y.as<float>() + kVocabulary, [](float x) { return !std::isfinite(x); }));
  for (const GenerateOptions& options : {GenerateOptions{.tokens = 9}, GenerateOptions{.tokens = 9, .temperature = 1},
                                         GenerateOptions{.tokens = 9, .temperature = 1, .top_p = .5},
                                         GenerateOptions{.tokens = 9, .temperature = 1, .top_k = 3, .top_p = .5}}) {
    const std::vector<std::vector<int64_t>> made = model.Generate(ctx, {{3}}, options);
    for (const int64_t token : made[0]) EXPECT_TRUE(token >= 0 && token < kVocabulary);
  }
}

TEST(ModelGenerateTest, StopsAtEndTokensAndReportsEachToken) {
  const TinyFolder folder(Tinies()[0]);
  const Model model = Model::Open(folder.path());
  Context ctx(1);
  const std::vector<std::vector<int64_t>> prompts = {{1, 2}, {3}};
  const auto free = model.Generate(ctx, prompts, {.tokens = 8});
  std::vector<std::vector<int64_t>> told(2);
  int calls = 0;
  GenerateOptions options = {.tokens = 8};
  options.end = {free[0][2]};
  options.on_tokens = [&](std::span<const int64_t> tokens) {
    ++calls;
    for (size_t b = 0; b < 2; ++b) {
      if (tokens[b] >= 0) told[b].push_back(tokens[b]);
    }
    return true;
  };
  const auto made = model.Generate(ctx, prompts, options);
  EXPECT_EQ(told, made);
  for (size_t b = 0; b < 2; ++b) {
    std::vector<int64_t> expected = free[b];
    if (const auto end = std::ranges::find(expected, free[0][2]); end != expected.end())
      expected.erase(end + 1, expected.end());
    EXPECT_EQ(made[b], expected);
  }
  options.end.reset();
  options.on_tokens = [&](std::span<const int64_t>) { return false; };
  EXPECT_EQ(model.Generate(ctx, prompts, options)[1], std::vector<int64_t>{free[1][0]});
  EXPECT_EQ(model.Generate(ctx, prompts, {.tokens = 0}), std::vector<std::vector<int64_t>>(2));
  EXPECT_TRUE(model.Generate(ctx, {}, {}).empty());
}

}  // namespace
}  // namespace heed
