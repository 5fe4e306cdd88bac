// The numbers of one layer on the page of attention: small problems as q, k and lse, from which the page computes every
// probability itself, others as maps.
#ifndef HEED_PAGES_VIEW_NUMBERS_H_
#define HEED_PAGES_VIEW_NUMBERS_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/pages/json.h"
#include "heed/pages/view_layer.h"

namespace heed::pages {

// Members of the layer's header, and the elements that they speak of.
struct Numbers {
  Json header;
  std::vector<std::pair<std::string, std::string>> blobs;  // id, base64
};

// Base64 characters of an exact layer's blobs.
int64_t ExactBytes(const ViewLayer& layer);

// The first sequence's q and k as f16 [H, T, D], little-endian, and lse as f32
// [Hq, Tq]: logits are q.k times header.factors[head], q and k themselves what is
// in the page times header.qFactors and keyFactors. lse is that of the
// rounded q and k, so that what the page computes sums to 1. Every head is
// scaled by a power of two so that f16 can hold it; factors undo it.
// header.structure says of every head how much there is to see. `options` are the layer's, without a pattern. Throws as
// attention::Forward.
Numbers ExactNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index);

// What the page needs to compute the weights that linear mechanisms imply for
// q and k of an exact layer, whose heads have these numbers: ImpliedWeights of
// each, log decays by head. Empty where there are other queries than keys.
Json ImpliedList(const ViewLayer& layer);

// Rows and columns of maps.
struct Bins {
  int64_t rows = 0, columns = 0;
};

// Base64 characters of a map layer's blobs, `with_kept` those of what a pattern keeps, and with those of what is seen.
int64_t MapBytes(const ViewLayer& layer, Bins bins, bool with_kept);

// The first sequence's probabilities over bins: query i is in row i rows / Tq rounded down, and keys likewise. Their
// mean, and where a bin holds several pairs their maximum, masked ones counting as 0, each as f16 [Hq, rows, columns]
// times header.meanFactors or maxFactors[head]. Where options drop pairs that a page does not know of, header.seen says
// of which bins a pair is left: a bit each, from the lowest of a byte on, for header.seen.heads heads, 1 where all have
// the same; each head's begin at a whole byte. header.rowWords and colWords are the tokens with which bins begin.
// `options` are the layer's, with a pattern or without. Throws as attention::Forward.
Numbers MapNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index, Bins bins);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_NUMBERS_H_
