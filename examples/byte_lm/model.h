// The byte-level model of byte_lm.py, loaded from its file: all but the mechanism, which a program adds, because only
// the mechanism mixes bytes.
#ifndef HEED_EXAMPLES_BYTE_LM_MODEL_H_
#define HEED_EXAMPLES_BYTE_LM_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "heed/heed.h"
#include "mechanisms.h"

inline constexpr int64_t kBytes = 256;

// The architecture that a file describes: the mechanism, its sizes, and the number of layers.
struct Architecture {
  explicit Architecture(const ModelFile& file)
      : mechanism(&Find(file, Mechanisms())), shape(ShapeOf(file, mechanism->inputs)), layers(file.Layers()) {
    shape.window = file.Integer("window", 65536);
  }

  const Mechanism* mechanism;
  Shape shape;
  int layers;
};

// One byte of a text, and the information about other bytes that layers use without a mechanism.
struct Token {
  unsigned char byte;
  unsigned char before;  // at position - 1, if that is not negative
  int64_t position;
};

class ByteModel {
 public:
  ByteModel(const ModelFile& file, const Architecture& a)
      : width_(file.Size("byte.weight", 1)), byte_(file.Read("byte.weight", {kBytes, width_})),
        byte_before_(file.Read("byte_before.weight", {kBytes, width_})), norm_(file.Read("norm.weight", {width_})),
        head_(file, "head", kBytes, width_) {
    for (int i = 0; i < a.layers; ++i) {
      layers_.emplace_back(file, ModelFile::Prefix(i), width_, a.mechanism->inputs, a.shape);
    }
  }

  // Logits [N, 256] of the successor of each of N tokens. Layers process each token alone, except for their mechanisms
  // mixes[layer], which know the sequences of the tokens and their earlier tokens.
  Vector Logits(heed::Context& ctx, std::span<const Token> tokens, std::span<const Mix> mixes) const {
    Vector x;
    std::vector<int64_t> positions;
    for (const Token& token : tokens) {
      Vector row = Row(byte_, token.byte);
      if (token.position > 0) Add(row, Row(byte_before_, token.before));
      x.insert(x.end(), row.begin(), row.end());
      positions.push_back(token.position);
    }
    for (size_t i = 0; i < layers_.size(); ++i) layers_[i](ctx, x, positions, mixes[i]);
    return head_(ctx, Norm(std::move(x), norm_));
  }

 private:
  Vector Row(const Vector& table, unsigned char byte) const {
    return Vector(table.begin() + byte * width_, table.begin() + (byte + 1) * width_);
  }

  int64_t width_;
  Vector byte_, byte_before_, norm_;
  Linear head_;
  std::vector<Layer> layers_;
};

// A byte sampled from the probabilities of logits [256], sharpened by a temperature.
inline constexpr double kTemperature = 0.7;

inline unsigned char Sample(std::span<const float> logits, std::mt19937_64& random) {
  const double largest = *std::ranges::max_element(logits);
  std::vector<double> sums;
  double sum = 0;
  for (const float x : logits) sums.push_back(sum += std::exp((x - largest) / kTemperature));
  const double drawn = std::ldexp(static_cast<double>(random() >> 11), -53) * sum;
  const auto at = std::ranges::upper_bound(sums, drawn) - sums.begin();
  return static_cast<unsigned char>(std::min<int64_t>(at, kBytes - 1));
}

#endif  // HEED_EXAMPLES_BYTE_LM_MODEL_H_
