// The known families, and the common parts of their configurations.
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"
#include "heed/model/plan_internal.h"

namespace heed::model {
namespace {

constexpr Family kFamilies[] = {
    {"llama", "LlamaForCausalLM", "LlamaModel", &PlanLlama},
    {"mistral", "MistralForCausalLM", "MistralModel", &PlanMistral},
    {"qwen2", "Qwen2ForCausalLM", "Qwen2Model", &PlanQwen2},
    {"qwen3", "Qwen3ForCausalLM", "Qwen3Model", &PlanQwen3},
    {"gpt2", "GPT2LMHeadModel", "GPT2Model", &PlanGpt2},
    {"bert", "BertForMaskedLM", "BertModel", &PlanBert},
    {"roberta", "RobertaForMaskedLM", "RobertaModel", &PlanRoberta},
    {"xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaModel", &PlanRoberta},
    {"distilbert", "DistilBertForMaskedLM", "DistilBertModel", &PlanDistilbert},
    {"mamba", "MambaForCausalLM", "MambaModel", &PlanMamba},
    {"mamba2", "Mamba2ForCausalLM", "Mamba2Model", &PlanMamba2},
    {"rwkv", "RwkvForCausalLM", "RwkvModel", &PlanRwkv},
    {"rwkv6", "Rwkv6ForCausalLM", "Rwkv6Model", &PlanRwkv6},
    {"heed_byte_lm", "ByteModel", "ByteModel", &PlanByteLm},
};

// Options of Transformers that change results and that no family here supports, except where it reads them itself. Each
// may be present with its default.
void CheckDefaults(const Fields& config) {
  for (const char* name : {"add_cross_attention", "is_decoder", "is_encoder_decoder", "rope_interleaved",
                           "tie_encoder_decoder", "use_mrope"}) {
    if (config.Bool(name, false)) config.Fail(name, "false");
  }
  if (!config.WasAsked("is_causal") && !config.Bool("is_causal", true)) config.Fail("is_causal", "true");
  if (const auto* heads = config.Find("pruned_heads"); heads != nullptr && !heads->empty())
    config.Fail("pruned_heads", "none");
}

// The dtype to which Transformers converts weights. Here weights have the dtype of the file, and everything is computed
// in f32.
void CheckDtypes(const Fields& config) {
  constexpr std::string_view kDtypes[] = {"float32", "bfloat16", "float16", "float64"};
  for (const char* name : {"dtype", "torch_dtype"}) {
    if (config.Has(name) && std::ranges::find(kDtypes, config.Text(name)) == std::end(kDtypes))
      config.Fail(name, "float32, bfloat16, float16 or float64");
  }
}

// Fields that any configuration may have and that have no effect on inference: origin, settings of Transformers'
// runtime, training, tokenizers and classifiers, and sampling, which callers choose here.
void IgnoreCommon(const Fields& config) {
  config.Ignore({"_attn_implementation_autoset",
                 "_commit_hash",
                 "_name_or_path",
                 "_num_labels",
                 "attn_implementation",
                 "auto_map",
                 "bos_token_id",
                 "chunk_size_feed_forward",
                 "classifier_dropout",
                 "cls_token_id",
                 "custom_pipelines",
                 "decoder_start_token_id",
                 "finetuning_task",
                 "gradient_checkpointing",
                 "id2label",
                 "initializer_range",
                 "label2id",
                 "mask_token_id",
                 "model_max_length",
                 "name_or_path",
                 "num_labels",
                 "output_attentions",
                 "output_hidden_states",
                 "output_past",
                 "pad_token_id",
                 "prefix",
                 "problem_type",
                 "return_dict",
                 "sep_token_id",
                 "task_specific_params",
                 "tf_legacy_loss",
                 "tokenizer_class",
                 "torchscript",
                 "transformers.js_config",
                 "transformers_version",
                 "unk_token_id",
                 "unsloth_fixed",
                 "unsloth_version",
                 "use_bfloat16",
                 "use_cache"});
  config.Ignore({"bad_words_ids",
                 "begin_suppress_tokens",
                 "diversity_penalty",
                 "do_sample",
                 "early_stopping",
                 "encoder_no_repeat_ngram_size",
                 "exponential_decay_length_penalty",
                 "forced_bos_token_id",
                 "forced_eos_token_id",
                 "length_penalty",
                 "max_length",
                 "max_new_tokens",
                 "min_length",
                 "no_repeat_ngram_size",
                 "num_beam_groups",
                 "num_beams",
                 "num_return_sequences",
                 "output_scores",
                 "remove_invalid_values",
                 "repetition_penalty",
                 "return_dict_in_generate",
                 "suppress_tokens",
                 "temperature",
                 "top_k",
                 "top_p",
                 "typical_p"});
}

}  // namespace

std::span<const Family> Families() { return kFamilies; }

const Family& FamilyOf(const Fields& config) {
  const std::string type = config.Text("model_type");
  std::string known;
  for (const Family& family : kFamilies) {
    if (type == family.type) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.type);
  }
  throw Unsupported(config.path() + ": 'model_type' is " + Quote(type) + ", expected one of " + known);
}

layers::Activation ActivationOf(const Fields& config, const char* name, const char* fallback) {
  try {
    return layers::ActivationFromName(config.Text(name, fallback));
  } catch (const InvalidArgument& error) {
    const std::string_view text = error.what(), expected = "expected ";
    config.Fail(name, std::string(text.substr(text.find(expected) + expected.size())));
  }
}

Configuration::Configuration(const Fields& config) : family(&FamilyOf(config)) {
  const std::vector<std::string> architectures = config.Texts("architectures");
  const std::string architecture = architectures.empty() ? family->plain : architectures[0];
  headed = architecture == family->headed;
  if (!headed && architecture != family->plain) {
    throw Unsupported(config.path() + ": 'architectures' has " + Quote(architecture) + ", expected " + family->headed +
                      " or " + family->plain);
  }
  plan = family->plan(config);
  const bool tie = config.Bool("tie_word_embeddings", plan.tied);
  tied = headed && tie;
  end = config.Integers("eos_token_id");
  CheckDefaults(config);
  CheckDtypes(config);
  IgnoreCommon(config);
  config.CheckAllAsked(family->type);
}

}  // namespace heed::model
