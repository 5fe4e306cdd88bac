// The kernels of rows_internal.h: each processes rows [begin, end) of a call.
#ifndef HEED_LAYERS_ROWS_KERNELS_INTERNAL_H_
#define HEED_LAYERS_ROWS_KERNELS_INTERNAL_H_

#include <cstddef>

#include "heed/layers/rows_internal.h"

namespace heed::layers {

struct RowKernels {
  void (*scale)(const ScaleRows&, size_t begin, size_t end);
  void (*activate)(const ActivateRows&, size_t begin, size_t end);
  void (*add)(const AddRows&, size_t begin, size_t end);
  void (*mix)(const MixRows&, size_t begin, size_t end);
  void (*decay)(const DecayRows&, size_t begin, size_t end);
};

// The kernels for the best SIMD target that `ctx` allows.
RowKernels RowKernelsFor(const Context& ctx);

}  // namespace heed::layers

#endif  // HEED_LAYERS_ROWS_KERNELS_INTERNAL_H_
