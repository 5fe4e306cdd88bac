// ModelState::Save and Model::LoadState: states of whole models in files, which may be hostile.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/sections_internal.h"
#include "heed/layers/saved_state_internal.h"
#include "heed/model/model_internal.h"

namespace heed {
namespace {

constexpr char kFamily[] = "heed_state", kVersionKey[] = "version", kVersion[] = "1", kFingerprint[] = "model";
constexpr char kOther[] = ": the state is of another model";

// Sizes of a model by their names in the metadata.
std::vector<std::pair<const char*, int64_t>> SizesOf(const Model& model, size_t layers) {
  return {{"vocabulary", model.vocabulary()}, {"width", model.width()}, {"layers", static_cast<int64_t>(layers)}};
}

std::string SectionOf(size_t layer) { return "layers." + std::to_string(layer) + "."; }

// Integers of each sequence, such as "lengths", in [least, most].
std::vector<int64_t> ReadIntegers(const SectionReader& from, const char* name, int64_t batch, int64_t least,
                                  int64_t most) {
  std::vector<int64_t> list = from.Integers(name, batch);
  for (const int64_t value : list) {
    if (value >= least && value <= most) continue;
    from.Fail(from.Name(name) + " has an element " + std::to_string(value) + ", expected " + std::to_string(least) +
              " to " + std::to_string(most));
  }
  return list;
}

}  // namespace

void ModelState::Save(const std::string& path) const {
  const Model model(std::static_pointer_cast<const Model::Impl>(model_));
  const SectionWriter file;
  file.Set(kFamily, model.family());
  file.Set(kVersionKey, kVersion);
  file.Set(kFingerprint, model.impl_->fingerprint);
  for (const auto& [name, size] : SizesOf(model, layers_.size())) file.Set(name, size);
  file.Set("batch", batch());
  file.Set("capacity", capacity_);
  file.Set("page", page_);
  file.Add("lengths", lengths_);
  file.Add("pending", pending_);
  file.Add("last", last_);
  for (size_t i = 0; i < layers_.size(); ++i) layers::WriteState(layers_[i], file.At(SectionOf(i)));
  file.Write(path);
}

ModelState Model::LoadState(const std::string& path, int64_t max_bytes) const {
  if (!causal()) {
    throw InvalidArgument("Model::LoadState: the model is a " + family() +
                          ", expected one that is causal: others have no states");
  }
  const SectionReader file(path);
  file.Expect(kFamily, family(), kOther);
  file.Expect(kVersionKey, kVersion);
  for (const auto& [name, size] : SizesOf(*this, impl_->layers.size())) {
    file.Expect(name, std::to_string(size), kOther);
  }
  file.Expect(kFingerprint, impl_->fingerprint, kOther);
  if (max_bytes < 0) max_bytes = file.DefaultMaxBytes();

  layers::StateOptions options;
  options.batch = file.Number("batch");
  options.capacity = file.Number("capacity");
  options.page = file.Number("page");
  if (options.batch < 1)
    file.Fail(file.Key("batch") + " is " + std::to_string(options.batch) + ", expected at least 1");
  constexpr int64_t kMostTokens = int64_t{1} << 53;
  const int64_t most = std::min(most_positions() > 0 ? most_positions() : kMostTokens,
                                options.capacity < 0 ? kMostTokens : options.capacity);
  const std::vector<int64_t> lengths = ReadIntegers(file, "lengths", options.batch, 0, most),
                             pending = ReadIntegers(file, "pending", options.batch, -1, vocabulary() - 1),
                             last = ReadIntegers(file, "last", options.batch, -1, vocabulary() - 1);
  for (size_t b = 0; b < lengths.size(); ++b) {
    if ((lengths[b] == 0) == (last[b] == -1)) continue;
    file.Fail(file.Name("last") + " has an element " + std::to_string(last[b]) + ", expected " +
              (lengths[b] == 0 ? "-1: sequence " : "a token: sequence ") + std::to_string(b) + " has " +
              std::to_string(lengths[b]));
  }
  const auto make = [&](int64_t batch) {
    try {
      layers::StateOptions of = options;
      of.batch = batch;
      return MakeState(of);
    } catch (const InvalidArgument& error) {  // from a cache
      file.Fail(error.what());
    }
  };
  const ModelState one = make(1);
  for (size_t i = 0; i < one.layers_.size(); ++i) {
    layers::CheckSavedTensors(file.At(SectionOf(i)), one.layers_[i], options.batch);
  }
  ModelState state = make(options.batch);
  state.lengths_ = lengths;
  state.pending_ = pending;
  state.last_ = last;
  for (size_t i = 0; i < state.layers_.size(); ++i) {
    layers::ReadState(file.At(SectionOf(i)), lengths, max_bytes, state.layers_[i]);
    max_bytes -= state.layers_[i].nbytes();
  }
  return state;
}

}  // namespace heed
