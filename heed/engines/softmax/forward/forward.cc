// The order of the tasks of a forward pass, shared by all dtypes and targets.
#include "heed/engines/softmax/forward/forward.h"

#include <algorithm>
#include <numeric>

#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

int AmxProducts(const Problem& problem) {
  if (problem.dtype == DType::kBF16) return 1;
  if (problem.dtype == DType::kF16) return 4;
  return problem.high_precision ? 3 : 6;
}

BlockQueue::BlockQueue(const Problem& problem, int64_t lanes)
    : order_(problem.sequences.size()), key_heads_(problem.key_heads) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
    const auto cost = [&](int64_t i) {
      const Sequence& s = problem.sequences[static_cast<size_t>(i)];
      return static_cast<double>(s.num_queries) * static_cast<double>(s.key_end - s.key_begin);
    };
    return cost(a) > cost(b);
  });
  places_.resize(order_.size());
  for (size_t i = 0; i < order_.size(); ++i) {
    places_[static_cast<size_t>(order_[i])] = static_cast<int64_t>(i);
  }
  begins_.push_back(0);
  for (const int64_t i : order_) {
    const Sequence& s = problem.sequences[static_cast<size_t>(i)];
    blocks_.push_back(BlockGrid(problem, s, lanes).blocks);
    begins_.push_back(begins_.back() + blocks_.back() * key_heads_);
  }
}

BlockQueue::Task BlockQueue::At(int64_t index) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), index);
  const size_t place = static_cast<size_t>(after - begins_.begin()) - 1;
  const int64_t rest = index - begins_[place];
  return {order_[place], rest / blocks_[place], blocks_[place] - 1 - rest % blocks_[place]};
}

int64_t BlockQueue::most_blocks() const {
  return blocks_.empty() ? 0 : *std::max_element(blocks_.begin(), blocks_.end());
}

int64_t BlockQueue::IndexOf(const Task& task) const {
  const auto place = static_cast<size_t>(places_[static_cast<size_t>(task.sequence)]);
  return begins_[place] + task.key_head * blocks_[place] + blocks_[place] - 1 - task.block;
}

}  // namespace heed::softmax
