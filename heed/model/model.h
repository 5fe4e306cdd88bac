// Model: a whole model from a folder as Transformers saves it: config.json and safetensors files, in shards or not.
//
//   const heed::Model model = heed::Model::Open("folder");
//   heed::Context ctx;
//   const auto tokens = model.Generate(ctx, {{1, 2, 3}}, {.tokens = 16});
//
// Families, by `model_type`: llama, mistral, qwen2, qwen3, gpt2, bert (MiniLM and other sentence encoders with it),
// roberta, xlm-roberta, distilbert, mamba, mamba2, rwkv, rwkv6, heed_byte_lm (examples/byte_lm). Tokens are numbers: a
// tokenizer is the caller's.
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

// What a model remembers of the tokens that it has seen: of a batch of sequences, one layers::State per layer. It is
// used by one thread at a time, and outlives the model that made it.
class HEED_API ModelState {
 public:
  int64_t batch() const { return static_cast<int64_t>(pending_.size()); }

  // Tokens of each sequence so far, [batch].
  std::span<const int64_t> lengths() const { return lengths_; }

  // The token of each sequence that Generate() gave last and that has not been seen yet, [batch]; -1: none. The next
  // Generate() begins with it.
  std::span<const int64_t> pending() const { return pending_; }

  // Sequence b becomes what sequence indices[b] was. Throws InvalidArgument as layers::State::Reorder().
  void Reorder(std::span<const int64_t> indices);

  // A state with equal content; pages of caches are shared until one of the two writes.
  ModelState Fork() const;

  int64_t nbytes() const;

  // Writes a safetensors file that Model::LoadState() of the same model reads. Metadata: `heed_state`, the family;
  // `version`; `model`, a number in hexadecimal that configuration and weights give; `vocabulary`, `width`, `layers`,
  // `batch`, `capacity`, `page`. `lengths`, `pending` and `last`, the token that was seen last or -1, are I64 [batch].
  // Of layer i a tensor "layers.i.NAME" F32 [batch, ...] is there for each that layers::State has, and keys and values
  // as KVCacheBase::Save() writes them, under "layers.i.keys.". Needs as much memory again as the rows of caches.
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
  int64_t tokens = 32;     // of each sequence, at most; at least 0
  double temperature = 0;  // 0: the likeliest token, the first of equals
  int64_t top_k = 0;       // draws among the k likeliest; 0: all
  double top_p = 1;        // draws among the likeliest that together have this probability, 0 < top_p <= 1, after top_k
  uint64_t seed = 0;       // of Philox: a draw depends on it, the sequence's number and the token's place in it
  std::optional<std::vector<int64_t>> end = {};  // tokens that end a sequence; default: Model::end_tokens()

  // Receives each sequence's next token, [batch], -1 where it has ended; false stops.
  std::function<bool(std::span<const int64_t> tokens)> on_tokens = {};
};

class HEED_API Model {
 public:
  // Throws FileError, "PATH: got, expected", for files that are missing, hostile or contradict each other: fields and
  // tensors that are missing, tensors that no layer takes, of other shapes, with NaN or infinities, shards outside of
  // the folder. Throws Unsupported for families and options that are not known, among them every field of config.json
  // that is neither read nor known to have no effect, unless it is null. Weights are copied: the files may go.
  //
  // The model is that of Transformers 5.23, whose defaults missing fields have, in f32 whatever `dtype` says. With
  // `tie_word_embeddings` the head is the table of tokens, or the table is the head where files have the head alone;
  // where they have both, neither replaces the other. `is_causal: false` makes attention of llama, mistral, qwen2,
  // qwen3 and gpt2 bidirectional, for Embed(); `rope_scaling` wins over `rope_parameters`.
  static Model Open(const std::string& folder);

  const std::string& family() const;  // "llama"
  int64_t vocabulary() const;
  int64_t width() const;
  bool causal() const;    // has states
  bool has_head() const;  // gives logits, else hidden states
  int64_t outputs() const { return has_head() ? vocabulary() : width(); }
  int64_t most_positions() const;  // of learned ones; 0: no bound

  // The eos_token_id, one or several, of generation_config.json, or of config.json where that file is missing. As in
  // Transformers 5.23, a generation_config.json without one means none.
  std::span<const int64_t> end_tokens() const;

  // An empty state. Throws InvalidArgument for encoders and as layers::Layer::MakeState().
  ModelState MakeState(const layers::StateOptions& options = {}) const;

  // Reads what ModelState::Save() wrote: batch, capacity, lengths, pending tokens, and the bits of every layer's state,
  // so that what follows has the bits that it would have had without the break. Pages that forks shared are no longer
  // shared.
  //
  // Throws FileError, "PATH: got, expected", for a state of another model, told by family, sizes, configuration and
  // the beginning of each tensor, and for anything else, however hostile: also if it would occupy more than
  // `max_bytes`, by default 64 GiB or 8 times the file's tensors, whichever is more. Throws InvalidArgument for
  // encoders.
  ModelState LoadState(const std::string& path, int64_t max_bytes = -1) const;

  // y = logits, or hidden states behind the last norm where there is no head. Those of a model that fills in masked
  // tokens, as BertForMaskedLM, are of the token itself, those of a causal one of the token behind it.
  //
  //   ids      [B, T]  i32 or i64, in [0, vocabulary()); those beyond lengths are not read
  //   lengths  [B]     tokens of each sequence; absent: T. Without a state nobody computes padding
  //   state            goes on from the tokens that it has seen; null: each sequence begins
  //   y        [B, T, outputs()]  f32, row-major; rows beyond lengths hold anything
  //
  // Bits of a sequence depend neither on threads nor on the sequences beside it. Throws InvalidArgument that names the
  // argument, before anything is written; what else throws (std::bad_alloc) leaves the state undefined.
  void Forward(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, ModelState* state,
               const TensorView& y) const;

  // One token of each sequence: ids [B], y [B, outputs()].
  void Step(Context& ctx, const ConstTensorView& ids, ModelState& state, const TensorView& y) const;

  // The tokens that follow each prompt, one sequence of the batch each. An end token is the last of its sequence. A
  // prompt has at least one token, unless `state` has one pending. Throws InvalidArgument for wrong prompts and
  // options, and by models that are not causal or have no head.
  std::vector<std::vector<int64_t>> Generate(Context& ctx, const std::vector<std::vector<int64_t>>& prompts,
                                             const GenerateOptions& options = {}, ModelState* state = nullptr) const;

  // y [B, width()] f32: one vector per sequence, as modules.json of sentence-transformers says: the mean of its tokens'
  // hidden states, or the first, of unit length or not. Without modules.json the mean as it is. Sequences have at least
  // one token.
  void Embed(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, const TensorView& y) const;

  // What Forward() computes without a state, by the layers' references from the files themselves, in double: for tests.
  // y is f64.
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
