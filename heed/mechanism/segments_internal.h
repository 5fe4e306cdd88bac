// Facts of tables and segments that heed_distributed, a library of its own, needs to know.
#ifndef HEED_MECHANISM_SEGMENTS_INTERNAL_H_
#define HEED_MECHANISM_SEGMENTS_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// Returns the axis of a tensor that has this letter in the table; -1 if the tensor is absent, or has none.
HEED_API int AxisOf(const Tensor& tensor, const ConstTensorView& t, char letter);

// Returns the shape of the transition of state i, which has the shape of `state`; empty if it has none.
HEED_API std::vector<int64_t> TransitionShape(const Table& table, const Arguments& in, size_t i,
                                              const ConstTensorView& state);

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_SEGMENTS_INTERNAL_H_
