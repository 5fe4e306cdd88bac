// A sketch of keys: int8 rows with a bound of their error, and statistics of every 64 of them.
#ifndef HEED_STATE_SKETCH_INTERNAL_H_
#define HEED_STATE_SKETCH_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/state/kv_view.h"

namespace heed {

// The offsets in a block of keys of `dim` channels, and its size `block_stride`, a multiple of 64.
SketchBlocks SketchLayout(int64_t dim);

// Writes blocks of keys of `dim` channels, f32, bf16 or f16. The caller has set ScopedFloatControl.
class SketchWriter {
 public:
  SketchWriter(DType dtype, int64_t dim);

  // Writes the row of a key in its block.
  void WriteRow(const std::byte* key, int64_t in_block, std::byte* block);

  // Writes min, max and mean of 64 keys, `token_stride` bytes apart.
  void WriteStatistics(const std::byte* keys, int64_t token_stride, std::byte* block);

 private:
  DType dtype_;
  int64_t dim_;
  SketchBlocks layout_;
  std::vector<float> row_;
  std::vector<int8_t> quantized_;
  std::vector<double> sums_;
};

}  // namespace heed

#endif  // HEED_STATE_SKETCH_INTERNAL_H_
