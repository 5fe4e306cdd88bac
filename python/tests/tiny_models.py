# Tiny random models of Transformers, one per family, and inputs for them: nothing is downloaded.
"""Each family is a class of model, the options of its configuration and what a call takes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import transformers

transformers.logging.set_verbosity_error()

VOCABULARY = 99
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None}
DECODER = {**SIZES, "num_key_value_heads": 2}
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                   "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                   "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
                   "decoder_start_token_id": 2}
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


@dataclass
class Family:
    model: str  # class of Transformers
    config: dict
    inputs: str = "text"  # text, image, both, image in text, sound, sequences
    pads: tuple[str, ...] = ("left", "right")
    generates: bool = True
    config_class: str = ""


def encoder(model: str, **config) -> Family:
    return Family(model, {**SIZES, **config}, generates=False)


def decoder(model: str, **config) -> Family:
    return Family(model, {**DECODER, **config})


FAMILIES = {
    "llama": decoder("LlamaForCausalLM"),
    "mistral": decoder("MistralForCausalLM", sliding_window=5),
    "mixtral": decoder("MixtralForCausalLM", sliding_window=None, **EXPERTS),
    "gemma2": decoder("Gemma2ForCausalLM", sliding_window=5, head_dim=8, layer_types=LAYERS, attn_logit_softcapping=2.0,
                      query_pre_attn_scalar=4),
    "gemma3": decoder("Gemma3ForCausalLM", sliding_window=5, head_dim=8, layer_types=LAYERS),
    "gpt_oss": decoder("GptOssForCausalLM", sliding_window=5, head_dim=8, layer_types=LAYERS, **EXPERTS),
    "qwen2": decoder("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=5, layer_types=LAYERS),
    "qwen3": decoder("Qwen3ForCausalLM", head_dim=8),
    "phi3": decoder("Phi3ForCausalLM", sliding_window=5),
    "olmo2": decoder("Olmo2ForCausalLM"),
    "cohere2": decoder("Cohere2ForCausalLM", sliding_window=5, layer_types=LAYERS),
    "smollm3": decoder("SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    "granite": decoder("GraniteForCausalLM", attention_multiplier=0.3),
    "gpt2": Family("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "scale_attn_by_inverse_layer_idx": True}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", {
        **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}),
    "llama4": Family("Llama4ForCausalLM", {
        **DECODER, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 6, "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
        config_class="Llama4TextConfig"),
    "bert": encoder("BertForMaskedLM"),
    "roberta": encoder("RobertaForMaskedLM"),
    "modernbert": encoder("ModernBertForMaskedLM", local_attention=6, global_attn_every_n_layers=2, cls_token_id=1,
                          sep_token_id=2),
    "vit": Family("ViTForImageClassification", {
        **{key: value for key, value in SIZES.items() if "token" not in key}, "image_size": 12, "patch_size": 4},
        "image", (), False),
    "clip": Family("CLIPModel", {
        "text_config": {**SIZES, "eos_token_id": 3}, "vision_config": {**SIZES, "image_size": 12, "patch_size": 4},
        "projection_dim": 16}, "both", ("right",), False),
    "whisper": Family("WhisperForConditionalGeneration", {
        **ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64,
        "suppress_tokens": None, "begin_suppress_tokens": None}, "sound", ()),
    "bart": Family("BartForConditionalGeneration", {**ENCODER_DECODER, "max_position_embeddings": 64,
                                                    "forced_eos_token_id": None}, "sequences"),
    "paligemma": Family("PaliGemmaForConditionalGeneration", {
        "text_config": {**DECODER, "model_type": "gemma", "head_dim": 8}, "image_token_index": 97, "projection_dim": 32,
        "vision_config": {**SIZES, "model_type": "siglip_vision_model", "image_size": 12, "patch_size": 4}},
        "image in text", ()),
    "gemma3_vision": Family("Gemma3ForConditionalGeneration", {
        "text_config": {**DECODER, "head_dim": 8, "sliding_window": 5, "layer_types": LAYERS}, "image_token_index": 97,
        "vision_config": {**SIZES, "image_size": 12, "patch_size": 4}, "mm_tokens_per_image": 9, "boi_token_index": 95,
        "eoi_token_index": 96}, "image in text", (), config_class="Gemma3Config"),
    "t5": Family("T5ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}, "sequences"),
}
DECODERS = [name for name, family in FAMILIES.items() if family.generates and family.inputs == "text"]
GENERATORS = [name for name, family in FAMILIES.items() if family.generates]


def build(name: str, attention: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A model of the family in float32 and eval(), with weights that the seed alone decides."""
    family = FAMILIES[name]
    return make(family.model, {**family.config, **changes}, attention, family.config_class, seed)


def make(model: str, config: dict, attention: str, config_class: str = "",
         seed: int = 0) -> transformers.PreTrainedModel:
    """A model of a class of Transformers, as `build` has them."""
    model_class = getattr(transformers, model)
    config = (getattr(transformers, config_class) if config_class else model_class.config_class)(**config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = model_class._from_config(config, attn_implementation=attention)
        # Initial weights are so small that attention is nearly uniform; sinks begin as they were in memory.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
            elif "sinks" in name:
                torch.nn.init.normal_(parameter)
    return model.eval()


def pair(name: str, **changes) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """Two copies of a model, with "eager" and with "heed"."""
    eager, heed = build(name, "eager", **changes), build(name, "heed", **changes)
    heed.load_state_dict(eager.state_dict())
    return eager, heed


def padding(side: str | None, batch: int = 2, length: int = 11, gone: int = 4) -> torch.Tensor:
    """A mask [B, T] whose row 1 has `gone` tokens of padding on this side; None: no padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[1, :gone] = 0
    elif side == "right":
        mask[1, -gone:] = 0
    return mask


def inputs(name: str, side: str | None = None, seed: int = 1) -> dict[str, torch.Tensor]:
    """Arguments of a forward call, without labels."""
    kind = FAMILIES[name].inputs
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 95, (2, 11), generator=generator)
    text = {"input_ids": tokens} if side is None else {"input_ids": tokens, "attention_mask": padding(side)}
    if kind == "text":
        return text
    image = {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    if kind == "image":
        return image
    if kind == "both":
        tokens[:, 6] = 3  # the end of the text, before any padding
        return {**text, **image}
    if kind == "image in text":
        begin = 0 if name == "paligemma" else 2
        tokens[:, begin:begin + 9] = 97
        types = torch.zeros_like(tokens)
        if name == "paligemma":
            types[:, 10:] = 1  # generated tokens; the rest is a prefix
        else:
            types[:, begin:begin + 9] = 1  # the image
        return {"input_ids": tokens, "attention_mask": padding(None), "token_type_ids": types, **image}
    target = {"decoder_input_ids": torch.randint(4, VOCABULARY, (2, 7), generator=generator)}
    if kind == "sound":
        return {"input_features": torch.randn(2, 8, 20, generator=generator), **target}
    return {**text, **target}


def outputs(result) -> list[torch.Tensor]:
    """Floating-point results that a loss may be made of."""
    if "logits" in result:
        return [result.logits]
    return [result.logits_per_text, result.text_embeds, result.image_embeds]
