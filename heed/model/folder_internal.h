// Folder: the open files of a model.
#ifndef HEED_MODEL_FOLDER_INTERNAL_H_
#define HEED_MODEL_FOLDER_INTERNAL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/io/safetensors.h"
#include "heed/layers/weights.h"
#include "heed/model/json_internal.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

inline constexpr int64_t kMostConfigBytes = int64_t{1} << 24, kMostIndexBytes = int64_t{1} << 26;

enum class Pooling { kMean, kFirst };

// The reduction of a sequence to one vector.
struct Embedding {
  Pooling pooling = Pooling::kMean;
  bool unit = false;
};

// Parses the text of model.safetensors.index.json into {tensor: shard}. Throws FileError.
std::map<std::string, std::string> ReadIndex(const std::string& path, std::string_view text);

class Folder {
 public:
  // Reads configurations and the headers of tensors. Throws FileError, and Unsupported for unknown families and
  // options.
  explicit Folder(const std::string& path);
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const Family& family() const { return *family_; }
  const Plan& plan() const { return plan_; }
  // The names of the head among weights(). As in Transformers 5.23, a tied head is the table of tokens if files have no
  // other head, and the table is the head if they have the head alone: where they have both, both are used. Empty if
  // the model has no head.
  std::optional<HeadNames> head() const;
  // eos_token_id of generation_config.json, or of config.json where that file is missing.
  const std::vector<int64_t>& end_tokens() const { return end_; }
  const Embedding& embedding() const { return embedding_; }

  // A hexadecimal number that distinguishes models. It depends on the configuration, and on name, dtype, shape and
  // first bytes of each tensor that has been requested.
  std::string Fingerprint() const;

  // All tensors. Each is checked when it is requested: its values must be finite, and they are multiplied as the plan
  // says. The Folder must outlive them.
  layers::Weights weights();
  // The tensors under the plan's prefix.
  layers::Weights body() { return weights().At(prefix_); }

  // Throws FileError for the first tensor that was never requested and that the plan does not ignore.
  void CheckAllTaken() const;

  // Throws "PATH: what", for an error from the constructor of a layer.
  [[noreturn]] void Fail(const std::string& what) const;

 private:
  using Owners = std::map<std::string, size_t, std::less<>>;

  void OpenFiles();
  bool Has(const std::string& name) const { return owner_.contains(name); }
  // Finds a tensor by its name, by the name that old files have for it, or by that of the head that it is tied to.
  Owners::const_iterator Owner(const std::string& name) const;
  void ReadModules();
  ConstTensorView Find(const std::string& asked);

  std::string configuration_;
  std::string path_, where_;  // where_: the folder of the model itself, which modules.json may place elsewhere
  const Family* family_ = nullptr;
  Plan plan_;
  bool headed_ = false;
  std::string prefix_;
  std::pair<std::string, std::string> tied_;  // the table of tokens and the head, if the configuration ties them
  std::vector<int64_t> end_;
  Embedding embedding_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::string> names_;  // names of files
  Owners owner_;                    // the file of each tensor
  std::set<std::string> taken_;
  std::map<std::string, std::vector<std::byte>> multiplied_;
};

}  // namespace heed::model

#endif  // HEED_MODEL_FOLDER_INTERNAL_H_
