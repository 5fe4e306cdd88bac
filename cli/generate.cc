// heed generate: continues a prompt of tokens with a language model from a folder.
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/model_call.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/core/path.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "FOLDER has Transformers' format: config.json and model.safetensors, or shards and their index. Families: llama,\n"
    "mistral, qwen2, qwen3, gpt2, mamba, mamba2, rwkv, rwkv6, heed_byte_lm. One line per prompt: the ids of the tokens "
    "that\n"
    "follow it. The likeliest token is taken unless there is a temperature. A sequence ends with an eos_token_id of\n"
    "generation_config.json, or of config.json if that file is missing.\n"
    "Models that fill in masked tokens (bert, roberta, xlm-roberta, distilbert) have logits too: --tokens 0 --logits "
    "OUT.\n\n"
    "With --cache the state of the model is saved in F, a safetensors file. If F exists, prompts are appended to its "
    "sequences,\n"
    "one for each; a prompt may be empty, and without --prompt-ids all are. Two runs generate the tokens of a single "
    "one.\n\n"
    "Example:\n  heed generate FOLDER --prompt-ids 1,2,3 --tokens 16\n"
    "  heed generate FOLDER --prompt-ids 1,2,3 --tokens 16 --cache chat.safetensors\n"
    "  heed generate FOLDER --tokens 16 --cache chat.safetensors";

struct GenerateCall : ModelCall {
  std::string prompts, tokens, temperature, top_k, top_p, seed, logits, cache;
  bool ignore_end = false;
};

GenerateOptions Parse(const GenerateCall& call) {
  GenerateOptions options;
  options.tokens = ParseInteger("--tokens", call.tokens, 0, int64_t{1} << 31, 32);
  options.temperature = ParseReal("--temperature", call.temperature, 0, 1e6, 0);
  options.top_k = ParseInteger("--top-k", call.top_k, 1, int64_t{1} << 31, 0);
  options.top_p = ParseReal("--top-p", call.top_p, 1e-9, 1, 1);
  options.seed = static_cast<uint64_t>(ParseInteger("--seed", call.seed, 0, INT64_MAX, 0));
  if (call.ignore_end) options.end.emplace();
  return options;
}

// Writes the logits of every token of the prompts: [B, T, vocabulary], zeros beyond their ends.
Json WriteLogits(Context& ctx, const Model& model, const Sequences& prompts, const std::string& out) {
  const Padded padded(prompts);
  const int64_t B = padded.ids.size(0), T = padded.ids.size(1), row = model.vocabulary();
  std::vector<float> logits(static_cast<size_t>(B * T * row));
  const TensorView y(logits.data(), DType::kF32, {B, T, row});
  model.Forward(ctx, padded.ids, padded.lengths, nullptr, y);
  for (int64_t b = 0; b < B; ++b) {
    std::fill(logits.begin() + (b * T + padded.counts[static_cast<size_t>(b)]) * row,
              logits.begin() + (b + 1) * T * row, 0.f);
  }
  return WriteOut(out, "logits", y);
}

// Parses --prompt-ids; empty if a cache continues without a prompt.
Sequences ParsePrompts(const GenerateCall& call, bool resumed) {
  if (!call.prompts.empty()) return ParseIds("--prompt-ids", call.prompts, resumed);
  if (resumed) return {};
  throw UsageError("--prompt-ids is missing, expected token ids" +
                   (call.cache.empty() ? "" : ": there is no file " + call.cache + " to continue from"));
}

// The state that generation continues from and saves, if there is a cache. Sets empty `prompts` if the state continues
// without any.
std::optional<ModelState> StateOf(const GenerateCall& call, const Model& model, bool resumed, Sequences& prompts) {
  if (call.cache.empty()) return std::nullopt;
  if (!resumed) return model.MakeState({.batch = std::ssize(prompts)});
  ModelState state = model.LoadState(call.cache);
  if (call.prompts.empty()) prompts.resize(static_cast<size_t>(state.batch()));
  if (std::ssize(prompts) != state.batch()) {
    throw InvalidArgument(call.cache + ": has " + std::to_string(state.batch()) + " sequences, expected " +
                          std::to_string(prompts.size()) + ", one for each prompt");
  }
  return state;
}

void Generate(const GenerateCall& call) {
  GenerateOptions options = Parse(call);
  std::error_code none;
  const bool resumed = !call.cache.empty() && std::filesystem::exists(ToPath(call.cache), none);
  Sequences prompts = ParsePrompts(call, resumed);
  CheckOut("--logits", call.logits);
  if (!call.logits.empty() && !call.cache.empty()) throw UsageError("both --logits and --cache, expected one of them");
  Context ctx(call.machine.Threads());
  call.machine.Apply(ctx);
  const Model model = call.Open();
  if (!model.has_head())
    throw InvalidArgument(call.folder + ": is a " + model.family() +
                          " without a language model's head, expected one that generates");
  if (!model.causal() && options.tokens > 0)
    throw InvalidArgument(call.folder + ": is a bidirectional " + model.family() +
                          ", which continues no text, expected --tokens 0 with it");
  std::optional<ModelState> state = StateOf(call, model, resumed, prompts);
  int64_t count = 0;
  options.on_tokens = [&](std::span<const int64_t>) {
    Progress(Format("{} of {} tokens", ++count, options.tokens));
    return true;
  };
  Progress("prompt");
  const auto start = std::chrono::steady_clock::now();
  Sequences made(prompts.size());
  if (options.tokens > 0 || state) made = model.Generate(ctx, prompts, options, state ? &*state : nullptr);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Progress("");
  Json own = {{"prompts", prompts}, {"tokens", made}, {"logits", nullptr}, {"cache", nullptr}};
  if (!call.logits.empty()) own["logits"] = WriteLogits(ctx, model, prompts, call.logits);
  if (state) {
    state->Save(call.cache);
    const std::span<const int64_t> lengths = state->lengths();
    own["cache"] = {
        {"path", call.cache}, {"resumed", resumed}, {"lengths", std::vector<int64_t>(lengths.begin(), lengths.end())}};
  }
  call.Print(model, seconds, own, Lines(made, ","));
}

}  // namespace

void AddGenerate(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "generate", "continue prompts with a language model from a folder", kFooter);
  const auto call = std::make_shared<GenerateCall>();
  call->RegisterFolder(verb);
  AddText(verb, "--prompt-ids", call->prompts, "token ids; ';' between prompts", "1,2,3");
  AddText(verb, "--tokens", call->tokens, "at most this many per sequence; default 32", "N");
  AddText(verb, "--temperature", call->temperature, "samples tokens; 0 takes the likeliest", "X");
  AddText(verb, "--top-k", call->top_k, "samples among the K likeliest", "K");
  AddText(verb, "--top-p", call->top_p, "samples among the likeliest that together have this probability", "P");
  AddText(verb, "--seed", call->seed, "of draws; default 0", "N");
  AddFlag(verb, "--ignore-end", call->ignore_end, "continue after an end token");
  AddText(verb, "--logits", call->logits, "writes the logits of the prompts' tokens (.safetensors or .npy)", "OUT");
  AddText(verb, "--cache", call->cache, "continues from the state in this file if it exists, and writes it", "F");
  call->RegisterRest(verb);
  OnChosen(verb, [call] { Generate(*call); });
}

}  // namespace heed::cli
