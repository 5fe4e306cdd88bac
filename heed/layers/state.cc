// State: tensors and caches of a layer, together.
#include "heed/layers/state.h"

#include <algorithm>
#include <utility>

#include "heed/core/error.h"

namespace heed::layers {

State::State(std::string layer, int64_t batch) : layer_(std::move(layer)), batch_(batch) {
  if (batch < 1) throw InvalidArgument("layers::State: batch is " + std::to_string(batch) + ", expected at least 1");
  lengths_.assign(static_cast<size_t>(batch), 0);
}

void State::Add(std::string name, std::vector<int64_t> sizes, float value) {
  size_t count = 1;
  for (const int64_t size : sizes) count *= static_cast<size_t>(size);
  tensors_.push_back({std::move(name), std::move(sizes), std::vector<float>(count, value)});
}

void State::Advance(std::span<const int64_t> tokens) {
  for (size_t b = 0; b < lengths_.size(); ++b) lengths_[b] += tokens[b];
}

void State::Reorder(std::span<const int64_t> indices) {
  if (std::ssize(indices) != batch_) {
    throw InvalidArgument("layers::State::Reorder: there are " + std::to_string(indices.size()) +
                          " indices, expected " + std::to_string(batch_));
  }
  for (const int64_t index : indices) {
    if (index < 0 || index >= batch_) {
      throw InvalidArgument("layers::State::Reorder: an index is " + std::to_string(index) + ", expected 0 to " +
                            std::to_string(batch_ - 1));
    }
  }
  if (keys) keys->Reorder(indices);
  if (memory) memory->Reorder(indices);
  if (latents) latents->Reorder(indices);
  std::vector<int64_t> lengths;
  for (const int64_t index : indices) lengths.push_back(lengths_[static_cast<size_t>(index)]);
  lengths_ = std::move(lengths);
  for (StateTensor& tensor : tensors_) {
    const size_t size = tensor.values.size() / static_cast<size_t>(batch_);
    std::vector<float> values;
    values.reserve(tensor.values.size());
    for (const int64_t index : indices) {
      const auto from = tensor.values.begin() + index * static_cast<int64_t>(size);
      values.insert(values.end(), from, from + static_cast<int64_t>(size));
    }
    tensor.values = std::move(values);
  }
}

State State::Fork() const {
  State fork(layer_, batch_);
  fork.lengths_ = lengths_;
  fork.tensors_ = tensors_;
  if (keys) fork.keys = keys->Fork();
  if (memory) fork.memory = memory->Fork();
  if (latents) fork.latents = latents->Fork();
  return fork;
}

int64_t State::nbytes() const {
  int64_t bytes = (keys ? keys->nbytes() : 0) + (memory ? memory->nbytes() : 0) + (latents ? latents->nbytes() : 0);
  for (const StateTensor& tensor : tensors_) bytes += static_cast<int64_t>(tensor.values.size() * sizeof(float));
  return bytes;
}

}  // namespace heed::layers
