// Embedding: rows of a table, by index.
#ifndef HEED_LAYERS_EMBEDDING_H_
#define HEED_LAYERS_EMBEDDING_H_

#include <cstdint>
#include <memory>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Embedding {
 public:
  struct Config {
    int64_t count = 0, width = 0;
  };

  // Takes "weight" [count, width] and keeps a copy, in bf16 if the weight is bf16, else in f32.
  Embedding(const Config& config, const Weights& weights);

  const Config& config() const { return config_; }

  // y[i] = table[ids[i]], or y[i] += table[ids[i]] if `add`: ids [rows], i32 or i64, y [rows, width] f32, row-major.
  // Throws InvalidArgument for an id outside [0, count) and for other shapes and dtypes, before anything is written.
  void Forward(Context& ctx, const ConstTensorView& ids, const TensorView& y, bool add = false) const;

 private:
  Config config_;
  std::shared_ptr<const void> table_;
  DType dtype_ = DType::kF32;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_EMBEDDING_H_
