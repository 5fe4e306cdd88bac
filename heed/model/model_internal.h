// The members of Model, for the files that define its functions.
#ifndef HEED_MODEL_MODEL_INTERNAL_H_
#define HEED_MODEL_MODEL_INTERNAL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heed/layers/activation.h"
#include "heed/layers/embedding.h"
#include "heed/layers/linear.h"
#include "heed/layers/norm.h"
#include "heed/model/folder_internal.h"
#include "heed/model/model.h"

namespace heed {

struct Model::Impl {
  std::string family, fingerprint;
  int64_t vocabulary = 0, width = 0, most_positions = 0;
  bool causal = true;
  std::vector<int64_t> end;
  model::Embedding embedding;
  std::optional<layers::Embedding> tokens, before, positions;
  std::vector<float> type;  // added to every row; empty: none
  std::optional<layers::Norm> embedding_norm, final_norm;
  std::vector<std::unique_ptr<const layers::Layer>> layers;
  std::vector<float> factors;      // factors of the layers' outputs
  std::optional<int64_t> padding;  // for learned positions: Plan::padding

  // The transform of models for masked tokens before the head: norm(activation(dense(x))).
  layers::Linear dense;
  layers::Activation activation = layers::Activation::kNone;
  std::optional<layers::Norm> head_norm;
  layers::Linear head;
};

// The tokens of a call, after their checks.
struct Model::Batch {
  int64_t B = 0, T = 0;
  std::vector<int64_t> lengths;  // [B]
  bool padded = false;           // some differ from T
  bool packed = false;           // padding is not computed: sequences are contiguous rows
  std::vector<int64_t> begins;   // [B + 1]: the first row of each sequence, and the number of rows
  std::vector<int64_t> ids;      // per row, 0 for padding

  int64_t rows() const { return begins.back(); }
  int64_t begin(int64_t b) const { return begins[static_cast<size_t>(b)]; }
  int64_t length(int64_t b) const { return lengths[static_cast<size_t>(b)]; }

  // Computes begins, and sets ids to 0.
  void Lay() {
    begins.assign(1, 0);
    for (int64_t b = 0; b < B; ++b) begins.push_back(begins.back() + (packed ? length(b) : T));
    ids.assign(static_cast<size_t>(rows()), 0);
  }
};

}  // namespace heed

#endif  // HEED_MODEL_MODEL_INTERNAL_H_
