// The pairs that a pattern keeps in a layer, for the page of attention: maps show attention without the pattern, with
// the pattern as an overlay.
#ifndef HEED_PAGES_VIEW_KEPT_H_
#define HEED_PAGES_VIEW_KEPT_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern.h"
#include "heed/pages/json.h"
#include "heed/pages/view_layer.h"

namespace heed::pages {

struct KeptSet {
  Json header;
  std::vector<uint8_t> cells;
};

// The set of the first sequence over rows x columns cells: query i is in row i rows / Tq rounded down, and key j in
// column j columns / Tk. Each cell has the fraction of the pairs visible under `options`, which have no pattern and are
// ComputedInPage(): a bit if a cell is one pair, from the lowest of a byte on, else a byte, 255 for all. Heads with the
// same pairs share their cells; cells of other heads begin at whole bytes.
//
//   bits       1 or 8 of a cell
//   heads      1, or all query heads
//   pairs      of each query head, the fraction of the pairs that attention sees without the pattern
//   attention  of each query head, the mean over rows of the probability on these pairs; null if one is not finite
//
// Throws as attention::Forward. The pattern must fit the tensors.
KeptSet KeptCells(Context& ctx, const ViewLayer& layer, const attention::Options& options, const Pattern& pattern,
                  int64_t rows, int64_t columns);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_KEPT_H_
