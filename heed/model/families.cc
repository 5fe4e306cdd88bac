// The families that are known.
#include <string>

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

}  // namespace heed::model
