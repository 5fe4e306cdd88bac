// Plan: the structure of a model, derived from its configuration. One function per family writes it; models and
// references read it.
#ifndef HEED_MODEL_PLAN_INTERNAL_H_
#define HEED_MODEL_PLAN_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/layers/activation.h"
#include "heed/layers/layer.h"
#include "heed/layers/norm.h"
#include "heed/layers/residual.h"
#include "heed/layers/weights.h"
#include "heed/model/json_internal.h"

namespace heed::model {

// One residual layer.
struct Block {
  // Both functions take the weights under the model's prefix.
  std::function<std::unique_ptr<const layers::Layer>(const layers::Weights&)> make;
  std::function<void(const layers::Weights&, const ConstTensorView& x, const layers::Call&, const TensorView& y)>
      reference;
  double factor = 1;  // factor of its outputs
};

// Residual(L): its names begin with `at`, and those of L itself have `inner` after that.
template <class L>
Block BlockOf(const std::string& at, const std::string& inner, const layers::Residual::Config& residual,
              const typename L::Config& config) {
  Block block;
  block.make = [=](const layers::Weights& weights) {
    const layers::Weights own = weights.At(at);
    return std::make_unique<layers::Residual>(residual, own, std::make_unique<const L>(config, own.At(inner)));
  };
  block.reference = [=](const layers::Weights& weights, const ConstTensorView& x, const layers::Call& call,
                        const TensorView& y) {
    const layers::Weights own = weights.At(at);
    layers::Residual::Reference(
        residual, own, x,
        [&](const layers::Weights&, const ConstTensorView& in, const TensorView& out) {
          L::Reference(config, own.At(inner), in, call, out);
        },
        y);
  };
  return block;
}

struct NamedNorm {
  std::string name;
  layers::Norm::Config config;
};

// The transform of a model for masked tokens before its head: norm(activation(dense(x))). Names are complete, without
// the model's prefix.
struct HeadTransform {
  std::string dense;
  layers::Activation activation = layers::Activation::kGelu;
  NamedNorm norm;
};

// The head's matrix [vocabulary, width] and bias; empty: none. Names are complete.
struct HeadNames {
  std::string weight, bias;
};

struct Plan {
  int64_t vocabulary = 0, width = 0;
  std::string prefix;          // prefix of all names but the head's, if a file has it: "model."
  std::string tokens;          // tables [count, width] of embeddings: "embed_tokens"
  std::string before;          // embeddings of the previous token, which are added; empty: none
  std::string positions;       // learned positions; empty: none
  int64_t most_positions = 0;  // rows of that table
  // RoBERTa's padding token: tokens have the positions that follow this token's number, and the token itself has its
  // number as position.
  std::optional<int64_t> padding = {};
  std::string types;  // BERT's token types, the first of which every token has; empty: none
  int64_t type_count = 0;
  std::optional<NamedNorm> embedding_norm, final_norm;
  std::vector<Block> blocks;
  bool causal = true;  // false: the model has no states
  std::string head = "lm_head";
  bool tied = false;      // the default of `tie_word_embeddings`: the head is the table of tokens
  std::string head_bias;  // bias of a tied head, or of one without its own bias; empty: none
  std::optional<HeadTransform> transform = {};
  std::vector<std::pair<std::string, std::string>> renamed = {};  // ends of names, and their form in old files
  // Ends of names that files may have and that are not read.
  std::vector<std::string> ignored = {};
  std::function<double(const std::string& name)> factor = {};  // factor of a tensor
};

// A row of the table of families: adding a family means one file and one row.
struct Family {
  const char* type;    // model_type
  const char* headed;  // in `architectures`: with the head
  const char* plain;   // without the head
  Plan (*plan)(const Fields& config);
};

Plan PlanLlama(const Fields& config);
Plan PlanMistral(const Fields& config);
Plan PlanQwen2(const Fields& config);
Plan PlanQwen3(const Fields& config);
Plan PlanGpt2(const Fields& config);
Plan PlanBert(const Fields& config);
Plan PlanRoberta(const Fields& config);
Plan PlanDistilbert(const Fields& config);
Plan PlanMamba(const Fields& config);
Plan PlanMamba2(const Fields& config);
Plan PlanRwkv(const Fields& config);
Plan PlanRwkv6(const Fields& config);
Plan PlanByteLm(const Fields& config);

std::span<const Family> Families();

// The row of a configuration's family. Throws Unsupported that lists the known families.
const Family& FamilyOf(const Fields& config);

// A configuration after it was read. A family's function requests the fields that it reads, with the defaults that
// Transformers has for the family, and declares those that have no effect on inference. This struct does the same for
// the common fields.
struct Configuration {
  // Throws FileError, and Unsupported for a field that is never requested.
  explicit Configuration(const Fields& config);

  const Family* family;
  Plan plan;
  bool headed, tied;
  std::vector<int64_t> end;
};

// The activation that a field names.
layers::Activation ActivationOf(const Fields& config, const char* name, const char* fallback);

// Upper bounds of any size in a configuration, and of the number of layers.
inline constexpr int64_t kMostSize = int64_t{1} << 24, kMostLayers = 4096;

// Computes a model in double from its plan and the weights themselves, `body` being those under the prefix: final
// hidden states, or logits if it has a head. ids are [B, T] i64, row-major, y is [B, T, width or vocabulary].
void Reference(const Plan& plan, const layers::Weights& weights, const layers::Weights& body,
               const std::optional<HeadNames>& head, const ConstTensorView& ids, const layers::Call& call,
               const TensorView& y);

}  // namespace heed::model

#endif  // HEED_MODEL_PLAN_INTERNAL_H_
