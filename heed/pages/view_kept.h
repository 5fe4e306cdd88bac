// What a pattern keeps of a layer, for the page of attention: the maps are of attention without
// the pattern, and the set lies over them.
#ifndef HEED_PAGES_VIEW_KEPT_H_
#define HEED_PAGES_VIEW_KEPT_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/common/pattern.h"
#include "heed/pages/json.h"
#include "heed/pages/view_layer.h"

namespace heed::pages {

struct KeptSet {
  Json header;
  std::vector<uint8_t> cells;
};

// The set of the first sequence over rows x columns cells: query i is in row i rows / Tq rounded down,
// keys likewise. Each cell has the share of the pairs that `options`, which have no pattern themselves,
// let attention see, which are ComputedInPage(): a bit where a cell is one pair, from the lowest of a byte on, else a
// byte, 255 for all. Heads that keep the same share their cells; those of others begin at whole bytes.
//
//   bits       1 or 8 of a cell
//   heads      1, or all query heads
//   pairs      of each query head, the share of the pairs that attention sees without the pattern
//   attention  of each query head, the share of a row's attention that lies on them, on average over
//              rows; null where one is not finite
//
// Throws as attention::Forward. The pattern fits the tensors.
KeptSet KeptCells(Context& ctx, const ViewLayer& layer, const attention::Options& options, const Pattern& pattern,
                  int64_t rows, int64_t columns);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_KEPT_H_
