// Tasks and row numbers of the backward pass, shared by dtypes and targets.
#include "heed/engines/softmax/backward/backward.h"

#include <algorithm>
#include <numeric>

#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

GroupQueue::GroupQueue(const Problem& p, const Gradients& g, int64_t group_keys) : order_(p.sequences.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
    const auto cost = [&](int64_t i) {
      const Sequence& s = p.sequences[static_cast<size_t>(i)];
      return static_cast<double>(s.num_queries) * static_cast<double>(s.key_end - s.key_begin);
    };
    // The gradient of a relative bias is a sum over sequences in ascending order.
    return g.drelative_bias == nullptr && cost(a) > cost(b);
  });
  const bool by_pair = g.dbias.data != nullptr && !BiasByRows(p, g);
  all_sequences_ = by_pair && g.dbias_sizes[0] == 1 && p.sequences.size() > 1;
  all_heads_ = by_pair && g.dbias_sizes[1] == 1;
  all_groups_ = false;
  heads_ = all_heads_ ? 1 : p.key_heads;
  begins_.push_back(0);
  if (all_sequences_) {
    // Groups are counted from the first valid key of each sequence, but a bias is indexed from key 0: unless all
    // sequences begin at the same key, their groups share elements of the bias, and one task takes all of them. So it
    // does with the gradient of a relative bias, which takes the groups of each sequence before those of the next.
    all_groups_ = g.drelative_bias != nullptr;
    int64_t groups = 0;
    for (const Sequence& s : p.sequences) {
      all_groups_ = all_groups_ || s.key_begin != p.sequences[0].key_begin;
      groups = std::max(groups, NumGroups(s, group_keys));
    }
    order_.assign(1, kAll);
    begins_.push_back(heads_ * (all_groups_ ? 1 : groups));
    return;
  }
  for (const int64_t i : order_) {
    begins_.push_back(begins_.back() + heads_ * NumGroups(p.sequences[static_cast<size_t>(i)], group_keys));
  }
}

GroupQueue::Task GroupQueue::At(int64_t index) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), index);
  const size_t place = static_cast<size_t>(after - begins_.begin()) - 1;
  const int64_t rest = index - begins_[place];
  return {order_[place], all_heads_ ? kAll : rest % heads_, all_groups_ ? kAll : rest / heads_};
}

RowIndex::RowIndex(const Problem& p, int64_t lanes, bool fuse_heads) : first_row{0}, first_ticket{0} {
  for (const Sequence& s : p.sequences) {
    first_row.push_back(first_row.back() + s.num_queries * p.query_heads);
    first_ticket.push_back(first_ticket.back() + BlockGrid(p, s, lanes, fuse_heads).blocks * p.key_heads);
  }
}

}  // namespace heed::softmax
