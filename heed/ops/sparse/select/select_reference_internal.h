// The scores that the references of selectors use, for tests of how close a selection was.
#ifndef HEED_OPS_SPARSE_SELECT_SELECT_REFERENCE_INTERNAL_H_
#define HEED_OPS_SPARSE_SELECT_SELECT_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "heed/ops/sparse/select/select.h"

namespace heed::select {

// The blocks that a row of a selecting head always keeps, and the scores of its other candidates: blocks or keys, by
// index.
struct RowScores {
  std::set<int64_t> kept;
  bool has_own = false;  // true if the row's own block is in `kept`
  std::map<int64_t, double> others;
};
RowScores ScoresOfRow(const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options, int64_t b,
                      int64_t row, int64_t head);

// Weights of the pooled softmax instead of scores. The weights of `kept` are summed in `held`.
struct RowWeights : RowScores {
  double held = 0;
};
RowWeights WeightsOfRow(const ConstTensorView& q, const ConstTensorView& k, const CumulativeOptions& options, int64_t b,
                        int64_t row, int64_t head);

// sum_h w_h relu(<q_h, k>) for the keys that a row may keep.
std::map<int64_t, double> IndexerScores(const ConstTensorView& q, const ConstTensorView& k,
                                        const ConstTensorView& weights, const IndexerOptions& options, int64_t b,
                                        int64_t row);

// Sums of the probabilities of the last queries, by key and by distance, each [Tk].
struct HeadSums {
  std::vector<double> by_key, by_distance;
};
HeadSums SumsOfHead(const ConstTensorView& q, const ConstTensorView& k, const VerticalSlashOptions& options, int64_t b,
                    int64_t head);

}  // namespace heed::select

#endif  // HEED_OPS_SPARSE_SELECT_SELECT_REFERENCE_INTERNAL_H_
