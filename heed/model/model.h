// Model: a whole model from a folder in Transformers' format: config.json and safetensors files, in shards or not.
//
//   const heed::Model model = heed::Model::Open("folder");
//   heed::Context ctx;
//   const auto tokens = model.Generate(ctx, {{1, 2, 3}}, {.tokens = 16});
//
// Families, by `model_type`: llama, mistral, qwen2, qwen3, gpt2, bert (also MiniLM and other sentence encoders),
// roberta, xlm-roberta, distilbert, mamba, mamba2, rwkv, rwkv6, heed_byte_lm (examples/byte_lm). Tokens are numbers:
// tokenizers are left to the caller.
#ifndef HEED_MODEL_MODEL_H_
#define HEED_MODEL_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/layers/layer.h"

namespace heed {

// The state of a model after the tokens of a batch of sequences: one layers::State per layer. One thread at a time uses
// it, and it may outlive the model that made it.
class HEED_API ModelState {
 public:
  int64_t batch() const { return static_cast<int64_t>(pending_.size()); }

  // The number of tokens of each sequence so far, [batch].
  std::span<const int64_t> lengths() const { return lengths_; }

  // The token of each sequence that Generate() gave last and that the model has not processed yet, [batch]; -1: none.
  // The next Generate() begins with it.
  std::span<const int64_t> pending() const { return pending_; }

  // Sequence b becomes a copy of the former sequence indices[b]. Throws InvalidArgument as layers::State::Reorder()
  // does.
  void Reorder(std::span<const int64_t> indices);

  // A state with equal content; pages of caches are shared until one of the two writes.
  ModelState Fork() const;

  int64_t nbytes() const;

  // Writes a safetensors file that Model::LoadState() of the same model reads. Metadata: `heed_state`, the family;
  // `version`; `model`, a hexadecimal number computed from configuration and weights; `vocabulary`, `width`, `layers`,
  // `batch`, `capacity`, `page`. `lengths`, `pending` and `last`, the last processed token or -1, are I64 [batch]. Each
  // tensor of the layers::State of layer i is stored as "layers.i.NAME" F32 [batch, ...], and keys and values as
  // KVCacheBase::Save() writes them, under "layers.i.keys.". Needs as much additional memory as the rows of caches
  // have.
  //
  // Throws FileError if writing fails: the file appears when it is complete, or not at all.
  void Save(const std::string& path) const;

 private:
  friend class Model;
  ModelState() = default;

  std::shared_ptr<const void> model_;
  int64_t capacity_ = -1, page_ = 64;
  std::vector<int64_t> lengths_, pending_, last_;
  std::vector<layers::State> layers_;
};

struct GenerateOptions {
  int64_t tokens = 32;     // maximal number for each sequence; at least 0
  double temperature = 0;  // 0: the likeliest token, the first of equal ones
  int64_t top_k = 0;       // samples among the k likeliest; 0: all
  // Samples among the likeliest that together have this probability, 0 < top_p <= 1, after top_k.
  double top_p = 1;
  uint64_t seed = 0;  // of Philox: a sample depends on it, on the sequence's index and on the token's position
  std::optional<std::vector<int64_t>> end = {};  // tokens that end a sequence; default: Model::end_tokens()

  // Receives the next token of each sequence, [batch], -1 if it has ended; returning false stops generation.
  std::function<bool(std::span<const int64_t> tokens)> on_tokens = {};
};

class HEED_API Model {
 public:
  // Throws FileError, "PATH: got, expected", for files that are missing, hostile or contradictory: missing fields and
  // tensors, tensors that no layer takes, wrong shapes, NaN or infinities, shards outside of the folder. Throws
  // Unsupported for unknown families and options, among them every field of config.json that is neither read nor known
  // to have no effect, unless it is null. Weights are copied: the files may be removed afterwards.
  //
  // The model is that of Transformers 5.23, whose defaults apply to missing fields, in f32 whatever `dtype` says. With
  // `tie_word_embeddings` the head is the table of tokens, or the table is the head if files have the head alone; if
  // they have both, neither replaces the other. `is_causal: false` makes attention of llama, mistral, qwen2, qwen3 and
  // gpt2 bidirectional, for Embed(); `rope_scaling` takes precedence over `rope_parameters`.
  static Model Open(const std::string& folder);

  const std::string& family() const;  // "llama"
  int64_t vocabulary() const;
  int64_t width() const;
  bool causal() const;    // true if the model has states
  bool has_head() const;  // true if it gives logits; else it gives hidden states
  int64_t outputs() const { return has_head() ? vocabulary() : width(); }
  int64_t most_positions() const;  // number of learned positions; 0: no bound

  // The eos_token_id, one or several, of generation_config.json, or of config.json if that file is missing. As in
  // Transformers 5.23, a generation_config.json without one means that no token ends a sequence.
  std::span<const int64_t> end_tokens() const;

  // An empty state. Throws InvalidArgument for encoders, and as layers::Layer::MakeState() does.
  ModelState MakeState(const layers::StateOptions& options = {}) const;

  // Reads a file of ModelState::Save(): batch, capacity, lengths, pending tokens, and the bits of every layer's state,
  // so that later results have the bits that they would have had without saving. Pages that forks shared are no longer
  // shared.
  //
  // Throws FileError, "PATH: got, expected", for a state of another model, recognised by family, sizes, configuration
  // and the first bytes of each tensor, and for any other file, however hostile, and if it would occupy more than
  // `max_bytes`, by default 64 GiB or 8 times the file's tensors, whichever is more. Throws InvalidArgument for
  // encoders.
  ModelState LoadState(const std::string& path, int64_t max_bytes = -1) const;

  // y = logits, or the hidden states after the last norm if the model has no head. Logits of a model for masked tokens,
  // such as BertForMaskedLM, are of the token itself, those of a causal model of the next token.
  //
  //   ids      [B, T]  i32 or i64, in [0, vocabulary()); ids beyond lengths are not read
  //   lengths  [B]     tokens of each sequence; absent: T. Without a state, padding is not computed
  //   state            continues after the tokens that it has processed; null: each sequence begins
  //   y        [B, T, outputs()]  f32, row-major; rows beyond lengths are indeterminate
  //
  // The bits of a sequence depend neither on threads nor on the other sequences. Throws InvalidArgument that names the
  // argument, before anything is written; any other exception (std::bad_alloc) leaves the state undefined.
  void Forward(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, ModelState* state,
               const TensorView& y) const;

  // Processes one token of each sequence: ids [B], y [B, outputs()].
  void Step(Context& ctx, const ConstTensorView& ids, ModelState& state, const TensorView& y) const;

  // Returns the tokens that follow each prompt; each prompt is one sequence of the batch. An end token is the last of
  // its sequence. A prompt has at least one token, unless `state` has one pending. Throws InvalidArgument for wrong
  // prompts and options, and by models that are not causal or have no head.
  std::vector<std::vector<int64_t>> Generate(Context& ctx, const std::vector<std::vector<int64_t>>& prompts,
                                             const GenerateOptions& options = {}, ModelState* state = nullptr) const;

  // y [B, width()] f32: one vector per sequence, as modules.json of sentence-transformers says: the mean of its tokens'
  // hidden states, or the first of them, normalised to unit length or not. Without modules.json it is the mean, not
  // normalised. Sequences have at least one token.
  void Embed(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, const TensorView& y) const;

  // Computes Forward() without a state in double, by the layers' references on the files' tensors, for tests. y is f64.
  static void Reference(const std::string& folder, const ConstTensorView& ids, const ConstTensorView& lengths,
                        const TensorView& y);

 private:
  friend class ModelState;
  struct Impl;
  struct Batch;

  explicit Model(std::shared_ptr<const Impl> impl);
  Batch Check(const char* op, const ConstTensorView& ids, const ConstTensorView& lengths,
              const ModelState* state) const;
  void Hidden(Context& ctx, const Batch& batch, ModelState* state, float* x) const;
  void Logits(Context& ctx, const float* x, int64_t rows, float* y) const;

  std::shared_ptr<const Impl> impl_;
};

}  // namespace heed

#endif  // HEED_MODEL_MODEL_H_
