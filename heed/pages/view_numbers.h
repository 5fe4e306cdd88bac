// The data of one layer on the page of attention: small problems as q, k and lse, from which the page computes every
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

// Members of the layer's header, and the elements that they refer to.
struct Numbers {
  Json header;
  std::vector<std::pair<std::string, std::string>> blobs;  // id, base64
};

// Base64 characters of an exact layer's blobs.
int64_t ExactBytes(const ViewLayer& layer);

// The first sequence's q and k as f16 [H, T, D], little-endian, and lse as f32 [Hq, Tq]: logits are q.k times
// header.factors[head], and q and k are the values in the page times header.qFactors and keyFactors. lse is that of the
// rounded q and k, so that the probabilities of the page sum to 1. Every head is scaled by a power of two to fit f16;
// factors undo it. header.structure measures the structure of each head's map. `options` are the layer's, without a
// pattern. Throws as attention::Forward.
Numbers ExactNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index);

// Data for the probabilities that linear mechanisms imply for q and k of an exact layer with these head numbers:
// ImpliedWeights of each, log decays by head. Empty if the numbers of queries and keys differ.
Json ImpliedList(const ViewLayer& layer);

// Rows and columns of maps.
struct Bins {
  int64_t rows = 0, columns = 0;
};

// Base64 characters of a map layer's blobs, including `with_kept` those of a pattern's pairs and of visible bins.
int64_t MapBytes(const ViewLayer& layer, Bins bins, bool with_kept);

// The first sequence's probabilities over bins: query i is in row i rows / Tq rounded down, and key j in column j
// columns / Tk. Their mean and, if bins hold several pairs, their maximum, with 0 for masked pairs, each as f16 [Hq,
// rows, columns] times header.meanFactors or maxFactors[head]. If options that the page does not support mask pairs,
// header.seen marks the bins with a visible pair: a bit each, from the lowest of a byte on, for header.seen.heads
// heads, 1 if all are equal; each head begins at a whole byte. header.rowWords and colWords are the tokens at which
// bins begin. `options` are the layer's, with a pattern or without. Throws as attention::Forward.
Numbers MapNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index, Bins bins);

}  // namespace heed::pages

#endif  // HEED_PAGES_VIEW_NUMBERS_H_
