// heed generate: the tokens that a language model of a folder puts behind a prompt.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/model/model.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "FOLDER is as Transformers saves it: config.json and model.safetensors, or shards and their index. Families: "
    "llama,\n"
    "mistral, qwen2, qwen3, gpt2, mamba, mamba2, rwkv, rwkv6. One line per prompt: the ids of the tokens behind it. "
    "The\n"
    "likeliest token is taken unless there is a temperature. A sequence ends with the eos_token_id of config.json. "
    "Models\n"
    "that fill in masked tokens (bert, roberta, xlm-roberta, distilbert) have logits too: --tokens 0 --logits OUT.\n\n"
    "Example:\n  heed generate FOLDER --prompt-ids 1,2,3 --tokens 16";

struct GenerateCall {
  std::string folder, prompts, tokens, temperature, top_k, top_p, seed, logits;
  bool ignore_end = false, json = false;
  MachineOptions machine;
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

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of every token of the prompts: [B, T, vocabulary], zeros beyond their ends.
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

void Generate(const GenerateCall& call) {
  GenerateOptions options = Parse(call);
  const Sequences prompts = ParseIds("--prompt-ids", call.prompts);
  CheckOut("--logits", call.logits);
  Context ctx(call.machine.Threads());
  call.machine.Apply(ctx);
  Progress("reading " + call.folder);
  const Model model = Model::Open(call.folder);
  if (!model.has_head())
    throw InvalidArgument(call.folder + ": is a " + model.family() +
                          " without a language model's head, expected one that generates");
  if (!model.causal() && options.tokens > 0)
    throw InvalidArgument(call.folder + ": is a " + model.family() +
                          ", which continues no text, expected --tokens 0 with it");
  int64_t count = 0;
  options.on_tokens = [&](std::span<const int64_t>) {
    Progress(Format("{} of {} tokens", ++count, options.tokens));
    return true;
  };
  Progress("prompt");
  const auto start = std::chrono::steady_clock::now();
  const Sequences made = options.tokens > 0 ? model.Generate(ctx, prompts, options) : Sequences(prompts.size());
  const double seconds = SecondsSince(start);
  Progress("");
  const Json logits = call.logits.empty() ? Json(nullptr) : WriteLogits(ctx, model, prompts, call.logits);
  if (call.json) {
    return PrintJson(Json{{"folder", call.folder},
                          {"family", model.family()},
                          {"prompts", prompts},
                          {"tokens", made},
                          {"seconds", seconds},
                          {"logits", logits}});
  }
  std::string text;
  for (const auto& tokens : made) text += Format("{}\n", fmt::join(tokens, ","));
  Print(text);
}

}  // namespace

void AddGenerate(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "generate", "tokens that a language model of a folder puts behind a prompt", kFooter);
  const auto call = std::make_shared<GenerateCall>();
  AddText(verb, "FOLDER", call->folder, "a model as Transformers saves it", "", Need::kRequired);
  AddText(verb, "--prompt-ids", call->prompts, "token ids; ';' between prompts", "1,2,3", Need::kRequired);
  AddText(verb, "--tokens", call->tokens, "of each sequence, at most; default 32", "N");
  AddText(verb, "--temperature", call->temperature, "draws tokens; 0 takes the likeliest", "X");
  AddText(verb, "--top-k", call->top_k, "draws among the K likeliest", "K");
  AddText(verb, "--top-p", call->top_p, "draws among the likeliest that have this probability together", "P");
  AddText(verb, "--seed", call->seed, "of draws; default 0", "N");
  AddFlag(verb, "--ignore-end", call->ignore_end, "go on behind a token that ends a sequence");
  AddText(verb, "--logits", call->logits, "writes the logits of the prompts' tokens (.safetensors or .npy)", "OUT");
  call->machine.Register(verb);
  AddFlag(verb, "--json", call->json, "one JSON document");
  OnChosen(verb, [call] { Generate(*call); });
}

}  // namespace heed::cli
