// Folder: config.json, modules.json and the index of shards, and tensors on request.
#include "heed/model/folder_internal.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/path.h"
#include "heed/io/bytes_internal.h"

namespace heed::model {
namespace {

constexpr size_t kMostShards = 4096;

bool IsFile(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(ToPath(path), ignored);
}

template <class T>
bool AllFinite(const void* data, int64_t count, T exponent) {
  const auto* words = static_cast<const T*>(data);
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= (words[i] & exponent) != exponent;
  return finite;
}

// True if no exponent of a row-major tensor has all of its bits set.
bool AllFinite(const ConstTensorView& x) {
  const int64_t count = x.num_elements();
  switch (x.dtype()) {
    case DType::kF64: return AllFinite<uint64_t>(x.data(), count, 0x7ff0000000000000);
    case DType::kF32: return AllFinite<uint32_t>(x.data(), count, 0x7f800000);
    case DType::kBF16: return AllFinite<uint16_t>(x.data(), count, 0x7f80);
    case DType::kF16: return AllFinite<uint16_t>(x.data(), count, 0x7c00);
    default: return true;
  }
}

// The last word of "sentence_transformers.models.Pooling".
std::string LastWord(const std::string& type) { return type.substr(type.rfind('.') + 1); }

Pooling ReadPooling(const Fields& fields) {
  std::string mode = fields.Text("pooling_mode", "");
  if (mode.empty()) {
    for (const auto& [key, name] : {std::pair<const char*, const char*>{"pooling_mode_cls_token", "cls"},
                                    {"pooling_mode_mean_tokens", "mean"},
                                    {"pooling_mode_max_tokens", "max"},
                                    {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"},
                                    {"pooling_mode_weightedmean_tokens", "weightedmean"},
                                    {"pooling_mode_lasttoken", "lasttoken"}}) {
      if (!fields.Bool(key, false)) continue;
      if (!mode.empty()) mode += '+';
      mode += name;
    }
  }
  fields.Ignore({"embedding_dimension", "include_prompt", "word_embedding_dimension"});
  fields.CheckAllAsked("a pooling");
  if (mode == "mean") return Pooling::kMean;
  if (mode == "cls") return Pooling::kFirst;
  throw Unsupported(fields.path() + ": the pooling is " + Quote(mode) + ", expected mean or cls");
}

// Checks that a module of sentence-transformers gives hidden states of the model as its configuration describes it.
// Settings of texts are ignored, because the caller passes token ids.
void CheckTransformer(const Fields& fields) {
  const auto expect = [](const Fields& of, const char* name, const std::string& value) {
    if (of.Text(name, value) != value) of.Fail(name, Quote(value));
  };
  expect(fields, "transformer_task", "feature-extraction");
  expect(fields, "module_output_name", "token_embeddings");
  if (fields.Has("modality_config")) {
    const Fields text = fields.Object("modality_config").Object("text");
    expect(text, "method", "forward");
    expect(text, "method_output_name", "last_hidden_state");
    text.CheckAllAsked("a module of texts");
  }
  for (const char* name : {"config_args", "config_kwargs", "model_args", "model_kwargs"}) {
    if (!fields.Has(name)) continue;
    const Fields more = fields.Object(name);
    more.Ignore({"add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype",
                 "trust_remote_code", "use_cache", "use_safetensors"});
    more.CheckAllAsked(name);
  }
  fields.Ignore({"do_lower_case", "max_seq_length", "processing_kwargs", "processor_kwargs", "tokenizer_args",
                 "tokenizer_name_or_path", "unpad_inputs"});
  fields.CheckAllAsked("a module of hidden states");
}

}  // namespace

std::map<std::string, std::string> ReadIndex(const std::string& path, std::string_view text) {
  const Fields index(path, ParseJson(path, text));
  const Fields map = index.Object("weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : index.Find("weight_map")->items()) {
    if (!shard.is_string())
      throw FileError(path + ": the shard of tensor " + Quote(name) + " is no text, expected a file's name");
    const std::string file = shard.get<std::string>();
    CheckName(path, "the shard of tensor " + Quote(name), file);
    shards[name] = file;
  }
  if (shards.empty()) throw FileError(path + ": 'weight_map' is empty, expected tensors");
  return shards;
}

Folder::Folder(const std::string& path) : path_(path), where_(path) {
  ReadModules();
  const std::string config_path = where_ + "/config.json";
  const Fields config(config_path, ReadJson(config_path, kMostConfigBytes));
  configuration_ = config.Dump();
  Configuration read(config);
  family_ = read.family;
  plan_ = std::move(read.plan);
  headed_ = read.headed;
  end_ = std::move(read.end);
  const std::string generation = where_ + "/generation_config.json";
  if (headed_ && plan_.causal && IsFile(generation))
    end_ = Fields(generation, ReadJson(generation, kMostConfigBytes)).Integers("eos_token_id");
  OpenFiles();
  const auto first = owner_.lower_bound(plan_.prefix);  // the first name with the prefix, if there is one
  if (first != owner_.end() && first->first.starts_with(plan_.prefix)) prefix_ = plan_.prefix;
  if (read.tied) tied_ = {prefix_ + plan_.tokens + ".weight", plan_.head + ".weight"};
}

std::optional<HeadNames> Folder::head() const {
  if (!headed_) return {};
  const std::string weight = plan_.head + ".weight", bias = plan_.head + ".bias";
  return HeadNames{Has(weight) || tied_.first.empty() ? weight : tied_.first,
                   Has(bias) && !plan_.head_bias.empty() ? bias : plan_.head_bias};
}

Folder::Owners::const_iterator Folder::Owner(const std::string& name) const {
  auto found = owner_.find(name);
  for (const auto& [end, old] : plan_.renamed) {
    if (found != owner_.end() || !name.ends_with(end)) continue;
    found = owner_.find(name.substr(0, name.size() - end.size()) + old);
  }
  return found == owner_.end() && name == tied_.first ? owner_.find(tied_.second) : found;
}

void Folder::Fail(const std::string& what) const { throw FileError(where_ + ": " + what); }

void Folder::ReadModules() {
  const std::string path = path_ + "/modules.json";
  if (!IsFile(path)) return;
  const nlohmann::json modules = ReadJson(path, kMostConfigBytes);
  if (!modules.is_array() || modules.empty()) throw FileError(path + ": holds no list, expected one of modules");
  for (size_t i = 0; i < modules.size(); ++i) {
    const Fields module(path, modules[i]);
    const std::string type = LastWord(module.Text("type")), inside = module.Text("path", "");
    if (!inside.empty()) CheckName(path, "'path'", inside);
    const std::string folder = inside.empty() ? path_ : path_ + "/" + inside;
    if (type == "Transformer" && i == 0) {
      where_ = folder;
      for (const char* name : {"bert", "roberta", "distilbert", "xlm-roberta"}) {  // older names but the first
        const std::string own = folder + "/sentence_" + name + "_config.json";
        if (!IsFile(own)) continue;
        CheckTransformer(Fields(own, ReadJson(own, kMostConfigBytes)));
        break;
      }
    } else if (type == "Pooling" && i == 1) {
      embedding_.pooling =
          ReadPooling(Fields(folder + "/config.json", ReadJson(folder + "/config.json", kMostConfigBytes)));
    } else if (type == "Normalize" && i == 2) {
      embedding_.unit = true;
    } else {
      throw Unsupported(path + ": module " + std::to_string(i) + " is " + Quote(type) +
                        ", expected Transformer, Pooling and Normalize in this order");
    }
  }
}

void Folder::OpenFiles() {
  const std::string one = where_ + "/model.safetensors", index = one + ".index.json";
  const auto add = [&](const std::string& path) {
    files_.push_back(std::make_unique<SafetensorsFile>(path));
    names_.push_back(path);
    for (const std::string& name : files_.back()->names()) {
      if (!owner_.emplace(name, files_.size() - 1).second)
        throw FileError(path + ": tensor " + Quote(name) + " is in another shard too, expected it once");
    }
  };
  if (IsFile(one)) return add(one);
  if (!IsFile(index))
    throw FileError(where_ + ": has neither model.safetensors nor model.safetensors.index.json, expected one");
  const os::MappedFile file(index);
  if (std::cmp_greater(file.num_bytes(), kMostIndexBytes))
    throw FileError(index + ": has " + std::to_string(file.num_bytes()) + " bytes, expected at most " +
                    std::to_string(kMostIndexBytes));
  const auto shard_of = ReadIndex(index, {reinterpret_cast<const char*>(file.data()), file.num_bytes()});
  std::set<std::string> shards;
  for (const auto& [name, shard] : shard_of) shards.insert(shard);
  if (shards.size() > kMostShards)
    throw FileError(index + ": names " + std::to_string(shards.size()) + " shards, expected at most " +
                    std::to_string(kMostShards));
  for (const std::string& shard : shards) add(where_ + "/" + shard);
  for (const auto& [name, shard] : shard_of) {
    const auto found = owner_.find(name);
    if (found == owner_.end() || names_[found->second] != where_ + "/" + shard) {
      throw FileError(where_ + "/" + shard + ": has no tensor " + Quote(name) + ", expected it as the index says");
    }
  }
}

ConstTensorView Folder::Find(const std::string& asked) {
  const auto found = Owner(asked);
  if (found == owner_.end()) return {};
  const std::string& name = found->first;
  const ConstTensorView tensor = files_[found->second]->tensor(name);
  if (const auto product = multiplied_.find(name); product != multiplied_.end()) {
    return ConstTensorView(product->second.data(), tensor.dtype(), tensor.sizes());
  }
  if (!taken_.insert(name).second) return tensor;
  if (!AllFinite(tensor))
    throw FileError(names_[found->second] + ": tensor " + Quote(name) +
                    " has NaN or infinities, expected finite weights");
  const double factor = plan_.factor && name.starts_with(prefix_) ? plan_.factor(name.substr(prefix_.size())) : 1;
  if (factor == 1 || !IsFloat(tensor.dtype())) return tensor;
  std::vector<std::byte>& memory = multiplied_[name];
  memory.resize(static_cast<size_t>(tensor.num_elements()) * SizeOf(tensor.dtype()));
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    StoreDouble(tensor.dtype(), memory.data(), i, factor * LoadAsDouble(tensor.dtype(), tensor.data(), i));
  }
  return ConstTensorView(memory.data(), tensor.dtype(), tensor.sizes());
}

std::string Folder::Fingerprint() const {
  constexpr size_t kMostBytes = 1024;  // bytes of a tensor
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](const void* data, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; ++i) {
      hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
    }
  };
  const auto add_text = [&](const std::string& text) { add(text.c_str(), text.size() + 1); };
  add_text(configuration_);
  for (const std::string& name : taken_) {
    const ConstTensorView tensor = files_[owner_.find(name)->second]->tensor(name);
    add_text(name + " " + Name(tensor.dtype()) + tensor.ShapeString());
    add(tensor.data(), std::min(kMostBytes, static_cast<size_t>(tensor.num_elements()) * SizeOf(tensor.dtype())));
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[hash >> shift & 15];
  return text;
}

layers::Weights Folder::weights() {
  return layers::Weights([this](const std::string& name) { return Find(name); });
}

void Folder::CheckAllTaken() const {
  for (const auto& [name, file] : owner_) {
    if (taken_.contains(name)) continue;
    if (headed_ && name == plan_.head_bias) continue;  // ignored if the head has a bias of its own
    const auto ends = [&, &name = name](const std::string& end) { return name.ends_with(end); };
    if (std::ranges::any_of(plan_.ignored, ends)) continue;
    throw FileError(names_[file] + ": tensor " + Quote(name) + " is none of this " + family_->type +
                    "'s, expected those that config.json implies");
  }
}

}  // namespace heed::model
