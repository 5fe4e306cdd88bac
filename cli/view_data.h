// What the page of `heed view` holds: small problems as q, k and lse, from
// which it computes every probability itself, large ones as pooled maps.
#ifndef CLI_VIEW_DATA_H_
#define CLI_VIEW_DATA_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/print.h"
#include "heed/core/context.h"
#include "heed/harness/tensor_file.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::cli {

// Description and numbers of one layer.
struct ViewLayer {
  Json header;
  std::vector<std::pair<std::string, std::string>> blobs;  // id, base64
};

// Base64 characters of an exact layer's blobs.
int64_t ExactBytes(const TensorSet& tensors);

// The first sequence's q and k as f16 [H, T, D], little-endian, and lse as f32
// [Hq, Tq]: logits are q.k times header.factors[head], q and k themselves what is
// in the page times header.qFactors and keyFactors. lse is that of the
// rounded q and k, so that what the page computes sums to 1. Every head is
// scaled by a power of two so that f16 can hold it; factors undo it.
// header.structure says of every head how much there is to see. Throws as
// attention::Forward.
ViewLayer ExactLayer(Context& ctx, const TensorSet& tensors,
                     const attention::Options& options, int64_t index);

// What the page needs to compute the weights that linear mechanisms imply for
// q and k of an exact layer, whose heads have these numbers: ImpliedWeights of
// each, log decays by head. Empty where there are other queries than keys.
Json ImpliedList(const TensorSet& tensors, std::span<const int64_t> heads);

// The largest maps, at most 512 x 512, of which so many heads fit into so many
// bytes, with what a pattern keeps of each or without; 0 if not even 24 x 24 do.
int64_t PooledSize(int64_t num_heads, bool with_kept, int64_t max_bytes);

// The first sequence's probabilities over at most size x size bins: their mean
// and their maximum, masked ones counting as 0, each as f16 [Hq, r, c] times
// header.meanFactors or maxFactors[head]. Query i is in row i r / Tq rounded
// down, r = min(size, Tq), and keys likewise. header.rowWords and colWords are
// the tokens with which bins begin. Throws as attention::Forward.
ViewLayer PooledLayer(Context& ctx, const TensorSet& tensors,
                      const attention::Options& options, int64_t index,
                      const Json& labels, int64_t size);

// Labels of a layer's keys: the metadata key `tokens`, each at most 64
// characters long, invisible ones in pictures. Null where the file has no
// tokens or not one per key; then `notes` says so. Throws FileError if they are
// not a JSON list of strings.
Json TokenLabels(const TensorSet& tensors, std::vector<std::string>& notes);

}  // namespace heed::cli

#endif  // CLI_VIEW_DATA_H_
