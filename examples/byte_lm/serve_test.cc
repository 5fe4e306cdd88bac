// The program serve: paged, shared and reordered caches give the results of the model without caches.
#include "serve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "../tasks/command.h"
#include "heed/heed.h"
#include "model.h"

namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kLayers = 2, kHeads = 3, kKey = 16, kValue = 20, kWindow = 50;
constexpr char kPrompt[] = "Alice was beginning to get very tired of sitting by her sister";

// A model with random weights in a file of the form that train.py writes.
std::string WriteModel(const std::string& mechanism) {
  const int64_t width = kHeads * kValue;
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  std::vector<std::pair<std::string, Sizes>> shapes = {{"byte.weight", {kBytes, width}},
                                                       {"byte_before.weight", {kBytes, width}},
                                                       {"norm.weight", {width}},
                                                       {"head.weight", {kBytes, width}}};
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::map<std::string, Sizes> of_layer = {{"norm1", {width}},
                                                   {"norm2", {width}},
                                                   {"gate", {width, width}},
                                                   {"out", {width, width}},
                                                   {"up", {2 * width, width}},
                                                   {"down", {width, 2 * width}},
                                                   {"inputs.q", {kHeads * kKey, width}},
                                                   {"inputs.k", {kHeads * kKey, width}},
                                                   {"inputs.v", {width, width}}};
    for (const auto& [name, sizes] : of_layer) {
      shapes.emplace_back("layers." + std::to_string(i) + "." + name + ".weight", sizes);
    }
  }
  std::vector<Vector> memory;
  for (const auto& [name, sizes] : shapes) {
    Vector& x = memory.emplace_back();
    const int64_t columns = sizes.size() == 2 ? sizes[1] : 1;
    for (int64_t i = 0; i < sizes[0] * columns; ++i) {
      x.push_back((columns == 1 ? 1 : 0) + normal(random) / std::sqrt(float{60}));
    }
    for (float& w : x) w *= name == "head.weight" ? 3 : 1;
  }
  std::vector<heed::NamedTensor> tensors;
  for (size_t i = 0; i < memory.size(); ++i) {
    tensors.push_back({shapes[i].first, View(memory[i], shapes[i].second)});
  }
  const std::string path = testing::TempDir() + "byte_lm_" + mechanism + ".safetensors";
  heed::WriteSafetensors(
      path, tensors,
      {{"mechanism", mechanism}, {"heads", std::to_string(kHeads)}, {"window", std::to_string(kWindow)}});
  return path;
}

class ServeTest : public testing::Test {
 protected:
  static inline const ModelFile file_{WriteModel("attention")};
  static inline const Architecture architecture_{file_};
  static inline const ByteModel model_{file_, architecture_};
  heed::Context ctx_{1};

  Texts Prompted() {
    Texts text(model_, architecture_);
    text.Append(ctx_, Bytes(kPrompt));
    return text;
  }

  // Logits [T, 256] of a whole text by attention over all of its keys, without a cache.
  Vector Whole(const std::string& text) {
    std::vector<Token> tokens;
    for (size_t i = 0; i < text.size(); ++i) {
      tokens.push_back({Bytes(text)[i], i == 0 ? Bytes(text)[0] : Bytes(text)[i - 1], static_cast<int64_t>(i)});
    }
    const Mix forward = [](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
      const auto one = [](const heed::TensorView& x) {
        return heed::TensorView(x.data(), x.dtype(), {1, x.size(0), x.size(1), x.size(2)});
      };
      heed::attention::Options options;
      options.causal = true;
      options.window = {kWindow - 1, 0};
      options.invariant = true;  // sums in the order of a cache's, in every layer
      heed::attention::Forward(ctx, {one(in.at("q")), one(in.at("k")), one(in.at("v"))}, options, {one(o), {}});
    };
    return model_.Logits(ctx_, tokens, std::vector<Mix>(kLayers, forward));
  }

  // The log probability of `text` after the prompt, in the model.
  double LogProbability(const std::string& text) {
    const Vector logits = Whole(kPrompt + text);
    double sum = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const size_t at = sizeof(kPrompt) - 1 + i - 1;
      sum += LogProbabilities(std::span(logits).subspan(at * kBytes, kBytes))[Bytes(text)[i]];
    }
    return sum;
  }
};

double MaxDifference(std::span<const float> a, std::span<const float> b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(a[i] - b[i]));
  }
  return largest;
}

TEST_F(ServeTest, LogitsAreThoseOfAWholeForwardAtEveryPosition) {
  std::mt19937_64 random(1);
  Texts texts = Prompted().Share(3);
  std::array<std::string, 3> written;
  written.fill(kPrompt);
  std::vector<Vector> logits(3);
  for (const size_t T : {1, 1, 5, 1, 40, 1, 17}) {  // three times the window at the end
    std::vector<unsigned char> bytes;
    for (std::string& text : written) {
      for (size_t t = 0; t < T; ++t) text.push_back(static_cast<char>(random() % 256));
      bytes.insert(bytes.end(), text.end() - static_cast<int64_t>(T), text.end());
    }
    const Vector all = texts.Append(ctx_, bytes);
    for (size_t i = 0; i < 3; ++i) {
      const auto begin = all.begin() + static_cast<int64_t>(i * T) * kBytes;
      logits[i].insert(logits[i].end(), begin, begin + static_cast<int64_t>(T) * kBytes);
    }
  }
  const Vector prompt = Texts(model_, architecture_).Append(ctx_, Bytes(kPrompt));
  for (size_t i = 0; i < 3; ++i) {
    Vector served = prompt;
    served.insert(served.end(), logits[i].begin(), logits[i].end());
    const Vector whole = Whole(written[i]);
    ASSERT_EQ(served.size(), whole.size());
    EXPECT_GT(*std::ranges::max_element(whole), 1);
    EXPECT_LT(MaxDifference(served, whole), 1e-5);
    EXPECT_EQ(MaxDifference(texts.Logits(static_cast<int64_t>(i)), std::span(served).last(kBytes)), 0);
  }
}

TEST_F(ServeTest, OneBeamIsGreedyDecoding) {
  // Like generate.cc: one byte at a time, with a state of its own.
  std::vector<Mix> memory;
  for (int64_t i = 0; i < kLayers; ++i) memory.push_back(Attention(architecture_.shape));
  std::string text = kPrompt;
  for (int64_t i = 0; i < static_cast<int64_t>(sizeof(kPrompt) - 1) + 80; ++i) {
    const size_t at = static_cast<size_t>(i);
    const Token token = {Bytes(text)[at], Bytes(text)[at == 0 ? 0 : at - 1], i};
    const Vector logits = model_.Logits(ctx_, {&token, 1}, memory);
    if (at + 1 < text.size()) continue;
    text.push_back(static_cast<char>(std::ranges::max_element(logits) - logits.begin()));
  }
  text = text.substr(sizeof(kPrompt) - 1, 80);

  Texts one = Prompted();
  const std::vector<Continuation> beams = BeamSearch(ctx_, one, 80);
  ASSERT_EQ(beams.size(), 1u);
  EXPECT_EQ(beams[0].text, text);
  EXPECT_NEAR(beams[0].log_probability, LogProbability(text), 1e-3);
}

TEST_F(ServeTest, BeamsHaveTheirOwnLogProbabilitiesAndAreRanked) {
  Texts texts = Prompted().Share(5);
  const std::vector<Continuation> beams = BeamSearch(ctx_, texts, 40);
  ASSERT_EQ(beams.size(), 5u);
  std::set<std::string> different;
  for (size_t i = 0; i < beams.size(); ++i) {
    different.insert(beams[i].text);
    EXPECT_EQ(beams[i].text.size(), 40u);
    EXPECT_NEAR(beams[i].log_probability, LogProbability(beams[i].text), 1e-3);
    EXPECT_LE(beams[i].log_probability, beams[i == 0 ? 0 : i - 1].log_probability);
    // The caches are those of this very beam.
    const Vector whole = Whole(kPrompt + beams[i].text);
    EXPECT_LT(MaxDifference(texts.Logits(static_cast<int64_t>(i)), std::span(whole).last(kBytes)), 1e-5);
  }
  EXPECT_EQ(different.size(), 5u);
}

TEST_F(ServeTest, AsManyBeamsAsBytesFindTheBestPairsOfAll) {
  Texts texts = Prompted().Share(kBytes), firsts = Prompted().Share(kBytes);
  const std::vector<Continuation> beams = BeamSearch(ctx_, texts, 2);
  const std::vector<double> first = LogProbabilities(firsts.Logits(0));
  std::vector<unsigned char> bytes;
  for (int64_t i = 0; i < kBytes; ++i) bytes.push_back(static_cast<unsigned char>(i));
  firsts.Append(ctx_, bytes);
  std::vector<Continuation> all;
  for (int64_t i = 0; i < kBytes; ++i) {
    const std::vector<double> second = LogProbabilities(firsts.Logits(i));
    for (size_t j = 0; j < second.size(); ++j) {
      all.push_back({{static_cast<char>(i), static_cast<char>(j)}, first[static_cast<size_t>(i)] + second[j]});
    }
  }
  Rank(all);
  for (size_t i = 0; i < beams.size(); ++i) EXPECT_EQ(beams[i].text, all[i].text);
}

TEST_F(ServeTest, SharingChangesNoSampleAndTakesLessMemory) {
  constexpr int64_t kSamples = 6, kCount = 70;
  Texts prompt = Prompted(), shared = prompt.Share(kSamples);
  EXPECT_EQ(shared.num_bytes(), prompt.num_bytes());
  const std::vector<Continuation> together = Sampled(ctx_, shared, kCount, 100);
  int64_t num_bytes = 0;
  for (uint64_t i = 0; i < kSamples; ++i) {
    Texts own = Prompted();
    const std::vector<Continuation> one = Sampled(ctx_, own, kCount, 100 + i);
    EXPECT_EQ(together[i].text, one[0].text);
    EXPECT_EQ(together[i].log_probability, one[0].log_probability);
    EXPECT_NEAR(together[i].log_probability, LogProbability(one[0].text), 1e-3);
    const Alone alone = InOnePass(ctx_, Texts(model_, architecture_), kPrompt, one[0].text);
    EXPECT_EQ(alone.num_bytes, own.num_bytes());
    EXPECT_NEAR(alone.log_probability, LogProbability(one[0].text), 1e-3);
    num_bytes += own.num_bytes();
  }
  // 61 bytes of prompt fill 3 pages of 16, which all texts share; 131 bytes need 9.
  EXPECT_EQ(shared.num_bytes() * (9 * kSamples), num_bytes * (3 + (9 - 3) * kSamples));
  EXPECT_EQ(Prompted().Logits(0).size(), prompt.Logits(0).size());
  EXPECT_EQ(MaxDifference(Prompted().Logits(0), prompt.Logits(0)), 0);
}

TEST_F(ServeTest, AnotherMechanismIsRefused) {
  const ModelFile file(WriteModel("linear_attention"));
  const Architecture architecture(file);
  const ByteModel model(file, architecture);
  EXPECT_THAT([&] { Texts(model, architecture); }, ThrowsMessage<std::runtime_error>(HasSubstr("expected attention")));
}

// Standard output and standard error of the program.
std::string Output(const std::string& arguments) {
  std::FILE* const pipe = popen((SERVE_PROGRAM " " + arguments + " 2>&1").c_str(), "r");
  std::string text;
  for (int c; (c = std::fgetc(pipe)) != EOF;) text.push_back(static_cast<char>(c));
  pclose(pipe);
  return text;
}

TEST_F(ServeTest, TheProgramPrintsWhatItHasFound) {
  const std::string path = WriteModel("attention");
  const std::string text = Output(path + " --prompt '" + kPrompt + "' --bytes 20 --samples 3 --beams 2 --seed 4");
  Texts drawn = Prompted().Share(3), searched = Prompted().Share(2);
  std::vector<Continuation> samples = Sampled(ctx_, drawn, 20, 4);
  Rank(samples);
  const std::vector<Continuation> beams = BeamSearch(ctx_, searched, 20);
  size_t at = 0;
  for (const auto& all : {samples, beams}) {
    for (const Continuation& one : all) {
      char score[32];
      std::snprintf(score, sizeof(score), "\n%8.3f  \"", one.mean());
      at = text.find(score, at);
      ASSERT_NE(at, std::string::npos) << score << text;
    }
    at = text.find("\ncaches: ", at);
    ASSERT_NE(at, std::string::npos) << text;
  }
  EXPECT_EQ(std::ranges::count(text, '\n'), 1 + 2 * 4 + 3 + 2) << text;
  EXPECT_EQ(Output(path + " --beams 0"), "example_byte_lm_serve: --beams is '0', expected 1 to 256\n");
  EXPECT_THAT(Output(path + " --nonsense 1"), HasSubstr("example_byte_lm_serve: expected FILE"));
  EXPECT_THAT(Output(WriteModel("linear_attention")), HasSubstr("expected attention\n"));
}

}  // namespace
