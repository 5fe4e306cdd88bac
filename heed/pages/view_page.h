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
  std::string title, file, model;  // plain text; those that are empty are not said
  size_t num_layers = 1;
  std::function<ViewLayer(size_t index)> layer;  // called for each, twice or three times
};

struct ViewPage {
  std::string html;
  std::string kind;                              // "exact", or "pooled into 512 x 512"
  int64_t heads = 0, all_heads = 0, tokens = 0;  // the most heads of a layer, those of all, the most tokens
  std::vector<std::string> notes;                // sentences that stand on the page
  double density = 0;  // the share of pairs that patterns which lie over the maps keep; 0 where there is none
};

// The whole page, of at most 6 MB; an empty one if there are too many heads for it.
//
// Up to 2048 tokens it computes every probability itself, from q and k rounded to f16, if these fit and the options say
// it (ComputedInPage); a pattern lies over the maps then, which are of attention without it. With other options, a
// pattern being one of them, it holds maps of what attention gives, a cell for each pair or pooled where that would be
// too much.
//
// Throws as attention::Forward, and what `layer` throws.
ViewPage ComposeView(Context& ctx, const ViewSubject& subject);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_PAGE_H_
