// Many continuations of one prompt from paged caches: best of n, and beam search.
//
// The model processes the prompt once. Its keys and values are then in pages that all continuations share, and each
// continuation owns only the pages that it writes:
//
//   prompt, 1 text     [p0][p1][p2.]
//   Share(3)           [p0][p1][p2.]            three lists of the same pages
//   each writes        [p0][p1][a2 ][a3.]       the partly filled page is copied by the
//                              [b2 ][b3.]       first continuation that writes to it,
//                              [c2 ][c3.]       full pages never
//   Reorder({0, 0, 2}) one beam continues as two, another ends: again lists of pages
#ifndef HEED_EXAMPLES_BYTE_LM_SERVE_H_
#define HEED_EXAMPLES_BYTE_LM_SERVE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "heed/heed.h"
#include "mechanisms.h"
#include "model.h"

// Texts of one model with `attention`, all equally long, that grow side by side.
class Texts {
 public:
  // One empty text.
  Texts(const ByteModel& model, const Architecture& a, int64_t page = 16)
      : model_(&model), window_(a.shape.window), before_(1) {
    if (a.mechanism != &Mechanisms().at("attention")) {
      throw std::runtime_error("the file's mechanism has no keys and values, expected attention");
    }
    heed::KVCache::Options options;
    options.heads = a.shape.heads;
    options.dim = a.shape.key;
    options.value_dim = a.shape.value;
    options.page = page;
    for (int i = 0; i < a.layers; ++i) caches_.emplace_back(options);
  }

  int64_t size() const { return static_cast<int64_t>(before_.size()); }
  int64_t length() const { return length_; }

  // The logits of the byte that follows text i, [256]; call Append() first.
  std::span<const float> Logits(int64_t i) const {
    return std::span(logits_).subspan(static_cast<size_t>(i * kBytes), kBytes);
  }

  // Appends T bytes of `bytes`, [size, T], to each text. Returns the logits after each of them, [size, T, 256].
  Vector Append(heed::Context& ctx, std::span<const unsigned char> bytes) {
    const int64_t B = size(), T = static_cast<int64_t>(bytes.size()) / B;
    std::vector<Token> tokens;
    for (size_t i = 0; i < bytes.size(); ++i) {
      const int64_t b = static_cast<int64_t>(i) / T, t = static_cast<int64_t>(i) % T;
      unsigned char& before = before_[static_cast<size_t>(b)];
      tokens.push_back({bytes[i], before, length_ + t});
      before = bytes[i];
    }
    std::vector<Mix> mixes;
    for (heed::KVCache& cache : caches_) mixes.push_back(AttentionTo(cache, T));
    Vector all = model_->Logits(ctx, tokens, mixes);
    length_ += T;
    logits_.clear();  // logits after the last byte of each text
    for (int64_t b = 0; b < B; ++b) {
      const auto last = all.begin() + ((b + 1) * T - 1) * kBytes;
      logits_.insert(logits_.end(), last, last + kBytes);
    }
    return all;
  }

  // n texts that all begin with this one. No key and no value is copied.
  Texts Share(int64_t n) const {
    Texts shared(*this, n);
    for (const heed::KVCache& cache : caches_) {
      shared.caches_.push_back(heed::KVCache::Share(cache, n));
    }
    return shared;
  }

  // Text i becomes a copy of the former text parents[i]: a beam may continue as several, or end.
  void Reorder(std::span<const int64_t> parents) {
    for (heed::KVCache& cache : caches_) cache.Reorder(parents);
    const auto before = std::exchange(before_, {});
    for (const int64_t i : parents) before_.push_back(before[static_cast<size_t>(i)]);
    const Vector logits = std::exchange(logits_, {});
    for (const int64_t i : parents) {
      const auto first = logits.begin() + i * kBytes;
      logits_.insert(logits_.end(), first, first + kBytes);
    }
  }

  // Bytes of the pages of all layers, each counted once however many texts share it.
  int64_t num_bytes() const {
    int64_t sum = 0;
    for (const heed::KVCache& cache : caches_) sum += cache.nbytes();
    return sum;
  }

 private:
  Texts(const Texts& one, int64_t n)
      : model_(one.model_), window_(one.window_), length_(one.length_),
        before_(static_cast<size_t>(n), one.before_.at(0)) {
    for (int64_t i = 0; i < n; ++i) {
      logits_.insert(logits_.end(), one.logits_.begin(), one.logits_.end());
    }
  }

  // The mechanism of a layer: the new keys and values are appended to the cache, then the queries of the same bytes
  // attend to all its rows up to their own positions.
  Mix AttentionTo(heed::KVCache& cache, int64_t T) const {
    return [this, &cache, T](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
      const auto by_text = [&](const heed::TensorView& x) {  // [N, H, D] is [B, T, H, D]
        return heed::TensorView(x.data(), x.dtype(), {size(), T, x.size(1), x.size(2)});
      };
      cache.Append(by_text(in.at("k")), by_text(in.at("v")));
      heed::attention::Options options;
      options.causal = true;
      options.window = {window_ - 1, 0};
      heed::attention::Attend(ctx, cache.view(), by_text(in.at("q")), options, {by_text(o), {}});
    };
  }

  const ByteModel* model_;
  int64_t window_, length_ = 0;
  std::vector<heed::KVCache> caches_;  // one per layer
  std::vector<unsigned char> before_;  // the last byte of each text
  Vector logits_;                      // [size, 256]
};

// Natural logarithms of the probabilities of logits [256].
inline std::vector<double> LogProbabilities(std::span<const float> logits) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - largest);
  std::vector<double> result;
  for (const float x : logits) result.push_back(x - largest - std::log(sum));
  return result;
}

struct Continuation {
  std::string text;
  double log_probability = 0;  // of the text, given the prompt: the sum over its bytes

  double mean() const { return log_probability / static_cast<double>(text.size()); }
};

inline std::span<const unsigned char> Bytes(const std::string& text) {
  return {reinterpret_cast<const unsigned char*>(text.data()), text.size()};
}

// The reference of serving, and its memory: prompt and continuation are processed at once, in caches that nothing is
// shared with.
struct Alone {
  double log_probability;
  int64_t num_bytes;
};

inline Alone InOnePass(heed::Context& ctx, Texts empty, const std::string& prompt, const std::string& text) {
  const Vector logits = empty.Append(ctx, Bytes(prompt + text));
  Alone result = {0, empty.num_bytes()};
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t before = prompt.size() + i - 1;  // its logits are those of text[i]
    const auto next = std::span(logits).subspan(before * kBytes, kBytes);
    result.log_probability += LogProbabilities(next)[static_cast<unsigned char>(text[i])];
  }
  return result;
}

// Continues each text by `count` bytes, text i sampled with seed + i.
inline std::vector<Continuation> Sampled(heed::Context& ctx, Texts& texts, int64_t count, uint64_t seed) {
  std::vector<Continuation> all(static_cast<size_t>(texts.size()));
  std::vector<std::mt19937_64> random;
  for (size_t i = 0; i < all.size(); ++i) random.emplace_back(seed + i);
  for (int64_t step = 0; step < count; ++step) {
    std::vector<unsigned char> next;
    for (size_t i = 0; i < all.size(); ++i) {
      const std::span<const float> logits = texts.Logits(static_cast<int64_t>(i));
      next.push_back(Sample(logits, random[i]));
      all[i].text.push_back(static_cast<char>(next.back()));
      all[i].log_probability += LogProbabilities(logits)[next.back()];
    }
    texts.Append(ctx, next);
  }
  return all;
}

// Sorts best first: by the probability in the model, whatever temperature they were sampled at.
inline void Rank(std::vector<Continuation>& all) {
  std::ranges::stable_sort(all, std::ranges::greater{}, &Continuation::log_probability);
}

// Continues equal texts by `count` bytes. In each step the most probable of all their continuations by one byte are
// kept, as many as there are texts. Returns them best first.
inline std::vector<Continuation> BeamSearch(heed::Context& ctx, Texts& texts, int64_t count) {
  struct Candidate {
    int64_t parent;
    unsigned char byte;
    double log_probability;
  };
  const size_t width = static_cast<size_t>(texts.size());
  std::vector<Continuation> beams(1);  // one, as long as all texts are equal
  for (int64_t step = 0; step < count; ++step) {
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < beams.size(); ++i) {
      const int64_t parent = static_cast<int64_t>(i);
      const std::vector<double> next = LogProbabilities(texts.Logits(parent));
      for (size_t byte = 0; byte < next.size(); ++byte) {
        candidates.push_back({parent, static_cast<unsigned char>(byte), beams[i].log_probability + next[byte]});
      }
    }
    std::ranges::stable_sort(candidates, std::ranges::greater{}, &Candidate::log_probability);
    candidates.resize(width);

    std::vector<Continuation> children;
    std::vector<int64_t> parents;
    std::vector<unsigned char> bytes;
    for (const auto& [parent, byte, log_probability] : candidates) {
      const std::string& before = beams[static_cast<size_t>(parent)].text;
      children.push_back({before + static_cast<char>(byte), log_probability});
      parents.push_back(parent);
      bytes.push_back(byte);
    }
    beams = std::move(children);
    texts.Reorder(parents);
    texts.Append(ctx, bytes);
  }
  return beams;
}

#endif  // HEED_EXAMPLES_BYTE_LM_SERVE_H_
