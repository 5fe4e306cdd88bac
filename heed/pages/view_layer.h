// One layer on the page of attention, and the options that the page can compute itself.
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
  Json labels;                                  // of the keys, from Labels(); null: positions
  std::vector<int64_t> heads;                   // the numbers of q's heads
  std::vector<std::string> notes;               // sentences below the maps
  std::shared_ptr<const void> owner = nullptr;  // owner of the viewed tensors
};

// Labels of tokens for the page, with a limit of 200 bytes each. Invalid UTF-8 is unchanged: InertJson() replaces it.
Json Labels(std::span<const std::string> tokens);

// At most `max_bytes` of UTF-8 plus an ellipsis, cut between characters.
std::string Shorten(const std::string& text, size_t max_bytes);

// True if q, k and lse determine all probabilities on the page, which supports scale, soft cap, causal masks, windows
// and the position of query 0. Patterns do not matter: they are an overlay of the map.
bool ComputedInPage(const attention::Options& options);

// True if options other than those mask pairs.
bool MasksPairs(const attention::Options& options);

// The options without those of other sequences, for a call with q and k of the first sequence only. They are
// ComputedInPage().
attention::Options OfFirstSequence(const attention::Options& options);

// The position of query 0 of each sequence.
std::vector<int64_t> Starts(const ViewLayer& layer);

// [B, Hq, Tq], f64 for f64, else f32. Throws as attention::Forward.
Buffer LogSumExp(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const attention::Options& options);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_LAYER_H_
