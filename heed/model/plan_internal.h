// Plan: what a configuration says that a model is made of. One function per family writes it; models and references
// read it.
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
  // Both take the weights under the model's prefix.
  std::function<std::unique_ptr<const layers::Layer>(const layers::Weights&)> make;
  std::function<void(const layers::Weights&, const ConstTensorView& x, const layers::Call&, const TensorView& y)>
      reference;
  double factor = 1;  // by which its outputs are multiplied
};

// Residual(L) whose names begin with `at`, and those of L itself with `inner` after that.
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

// What a model that fills in masked tokens has before its head: norm(activation(dense(x))). Names are whole ones,
// without the model's prefix.
struct HeadTransform {
  std::string dense;
  layers::Activation activation = layers::Activation::kGelu;
  NamedNorm norm;
};

// A head's matrix [vocabulary, width], and what is added to its products; empty: nothing. Whole names.
struct HeadNames {
  std::string weight, bias;
};

struct Plan {
  int64_t vocabulary = 0, width = 0;
  std::string prefix;          // of all names but the head's, where a file has it: "model."
  std::string tokens;          // tables [count, width] of embeddings: "embed_tokens"
  std::string before;          // of the token before each, added to its own; empty: none
  std::string positions;       // learned ones; empty: none
  int64_t most_positions = 0;  // rows of that table
  // RoBERTa's: tokens stand at the positions behind this token's number, and the token itself stands at its number.
  std::optional<int64_t> padding = {};
  std::string types;  // of BERT's token types, whose first is that of every token; empty: none
  int64_t type_count = 0;
  std::optional<NamedNorm> embedding_norm, final_norm;
  std::vector<Block> blocks;
  bool causal = true;  // else there are no states
  std::string head = "lm_head";
  bool tied = false;      // the default of `tie_word_embeddings`: the head is the table of tokens
  std::string head_bias;  // of a tied head, and of one that has none of its own; empty: none
  std::optional<HeadTransform> transform = {};
  std::vector<std::pair<std::string, std::string>> renamed = {};  // ends of names, and how old files call them
  std::vector<std::string> ignored = {};                          // ends of names that files may have besides
  std::function<double(const std::string& name)> factor = {};     // by which a tensor is multiplied
};

// A row of the table: adding a family is one file and one row.
struct Family {
  const char* type;    // model_type
  const char* headed;  // of architectures: with the head
  const char* plain;   // without
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

// The row that a configuration names. Throws Unsupported that lists the known ones.
const Family& FamilyOf(const Fields& config);

// A configuration as it was read. A family's function asks for the fields that it reads, by the defaults that
// Transformers has for the family, and declares those that have no effect on inference; so do these for what families
// have in common.
struct Configuration {
  explicit Configuration(const Fields& config);  // Throws FileError, and Unsupported for a field that nobody asks for.

  const Family* family;
  Plan plan;
  bool headed, tied;
  std::vector<int64_t> end;
};

// The activation that a field names.
layers::Activation ActivationOf(const Fields& config, const char* name, const char* fallback);

// The most that a size in a configuration may be, and the most layers.
inline constexpr int64_t kMostSize = int64_t{1} << 24, kMostLayers = 4096;

// What a model computes, in double, from its plan and the weights themselves, `body` those under the prefix: final
// hidden states, or logits where there is a head. ids [B, T] i64, row-major, y [B, T, width or vocabulary].
void Reference(const Plan& plan, const layers::Weights& weights, const layers::Weights& body,
               const std::optional<HeadNames>& head, const ConstTensorView& ids, const layers::Call& call,
               const TensorView& y);

}  // namespace heed::model

#endif  // HEED_MODEL_PLAN_INTERNAL_H_
