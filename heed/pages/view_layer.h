// What the page of attention shows of one layer, and what is asked of it: which options the page can compute with
// itself.
#ifndef HEED_PAGES_VIEW_LAYER_H_
#define HEED_PAGES_VIEW_LAYER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/pages/json.h"

namespace heed::pages {

// The first sequence of some tensors.
struct ViewLayer {
  std::string name;                             // "layers.0", or empty
  ConstTensorView q, k;                         // [B, T, H, D]: at least one head, query and key
  attention::Options options;                   // of padded sequences
  Json labels;                                  // of the keys, as Labels() makes them; null: positions
  std::vector<int64_t> heads;                   // the numbers of q's heads
  std::vector<std::string> notes;               // sentences that stand below the maps
  std::shared_ptr<const void> owner = nullptr;  // of what is viewed
};

// Tokens as the page has them: what is longer than 200 bytes is cut. What is not UTF-8 stays so: InertJson() replaces
// it.
Json Labels(std::span<const std::string> tokens);

// At most `max_bytes` of UTF-8 and an ellipsis, cut between characters.
std::string Shorten(const std::string& text, size_t max_bytes);

// Whether q, k and lse say all weights to the page, which knows scale, soft cap, causal masks, windows and where query
// 0 stands. Patterns do not count: they lie over the map.
bool ComputedInPage(const attention::Options& options);

// Whether some pairs are dropped by other options than those.
bool MasksPairs(const attention::Options& options);

// The options without those of other sequences, for a call of q and k of the first alone. They are ComputedInPage().
attention::Options OfFirstSequence(const attention::Options& options);

// The position of query 0 of each sequence.
std::vector<int64_t> Starts(const ViewLayer& layer);

// [B, Hq, Tq], f64 for f64, else f32. Throws as attention::Forward.
Buffer LogSumExp(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const attention::Options& options);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_LAYER_H_
