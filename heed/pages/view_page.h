// The page of attention, which `heed view` writes and heed.view shows: every head of every layer as a map.
#ifndef HEED_PAGES_VIEW_PAGE_H_
#define HEED_PAGES_VIEW_PAGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/pages/view_layer.h"

namespace heed::pages {

struct ViewSubject {
  std::string title, file, model;  // plain text; empty ones are omitted
  size_t num_layers = 1;
  std::function<ViewLayer(size_t index)> layer;  // called two or three times for each layer
};

struct ViewPage {
  std::string html;
  std::string kind;                              // "exact", or "pooled into 512 x 512"
  int64_t heads = 0, all_heads = 0, tokens = 0;  // largest number of heads of a layer, heads of all layers, largest
                                                 // number of tokens
  std::vector<std::string> notes;                // sentences on the page
  double density = 0;  // fraction of pairs kept by patterns over the maps; 0 without a pattern
};

// The whole page, of at most 6 MB; an empty one if there are too many heads for it.
//
// Up to 2048 tokens it computes every probability itself, from q and k rounded to f16, if these fit and the options
// allow it (ComputedInPage); a pattern is then an overlay of the maps, which show attention without it. With other
// options, including a pattern, it holds maps of attention's probabilities, a cell for each pair, or pooled if that
// would be too large.
//
// Throws as attention::Forward, and as `layer`.
ViewPage ComposeView(Context& ctx, const ViewSubject& subject);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_PAGE_H_
