# Tiny random models of Transformers whose layers accelerate() replaces: nothing is downloaded.
"""Each family is a class of model and the options of its configuration, and which of heed's functions run in it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import NamedTuple

import torch
import transformers

transformers.logging.set_verbosity_error()

VOCABULARY = 99
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
HYBRID = {**SIZES, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
GDN = {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
       "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = ("causal_conv1d", "causal_conv1d_step")
SSD = (*CONVOLUTION, "ssd", "ssd_step")
SCAN = (*CONVOLUTION, "selective_scan", "selective_scan_step")
DELTA = (*CONVOLUTION, "gated_delta_rule", "gated_delta_rule_step")


class Family(NamedTuple):
    model: str  # class of Transformers
    config: dict
    by: tuple[str, ...]  # heed's functions


FAMILIES = {
    "mamba": Family("MambaForCausalLM", {**SIZES, "state_size": 8, "time_step_rank": 4}, SCAN),
    "falcon_mamba": Family("FalconMambaForCausalLM", {**SIZES, "state_size": 8, "time_step_rank": 4}, SCAN),
    "jamba": Family("JambaForCausalLM", {
        **HYBRID, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4}, SCAN),
    "zamba": Family("ZambaForCausalLM", {
        **HYBRID, "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}, SCAN),
    "recurrent_gemma": Family("RecurrentGemmaForCausalLM", {
        **HYBRID, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64}, ("rg_lru",)),
    "mamba2": Family("Mamba2ForCausalLM", {
        **SIZES, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16}, SSD),
    "bamba": Family("BambaForCausalLM", {**HYBRID, **MAMBA2, "attn_layer_indices": [1]}, SSD),
    "falcon_h1": Family("FalconH1ForCausalLM", {**HYBRID, **MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}, SSD),
    "granite_hybrid": Family("GraniteMoeHybridForCausalLM", {
        **HYBRID, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
        "num_local_experts": 0}, SSD),
    "qwen3_next": Family("Qwen3NextForCausalLM", {
        **HYBRID, **GDN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}, DELTA),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", {**HYBRID, **GDN, "linear_num_key_heads": 4},
                          DELTA),
    "kimi_linear": Family("KimiLinearForCausalLM", {
        **HYBRID, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]}, (*CONVOLUTION, "kda", "kda_step")),
    "rwkv": Family("RwkvForCausalLM", {**SIZES, "context_length": 64}, ("rwkv4",)),
    "xlstm": Family("xLSTMForCausalLM", {
        **SIZES, "hidden_size": 64, "embedding_dim": 64, "num_blocks": 2, "num_heads": 4, "chunk_size": 16,
        "qk_dim_factor": 1.0, "autocast_kernel_dtype": "float32"}, ("mlstm",)),
    "minimax": Family("MiniMaxForCausalLM", {
        **HYBRID, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"]}, ("lightning",)),
    "lfm2": Family("Lfm2ForCausalLM", {**HYBRID, "layer_types": ["conv", "full_attention"]}, CONVOLUTION),
    "nemotron_h": Family("NemotronHForCausalLM", {
        **HYBRID, "layers_block_type": ["linear_attention", "full_attention"], "head_dim": 8, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16}, SSD),
    "zamba2": Family("Zamba2ForCausalLM", {
        **HYBRID, "num_key_value_heads": 4, "num_hidden_layers": 3, "mamba_d_state": 16, "mamba_ngroups": 2,
        "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}, SSD),
    "qwen3_5": Family("Qwen3_5ForCausalLM", {**HYBRID, **GDN}, DELTA),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", {
        **HYBRID, **GDN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}, DELTA),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", {
        **SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "o_groups": 2,
        "o_lora_rank": 8, "sliding_window": 6, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2,
        "max_position_embeddings": 128}, ("compressed_attention",)),
}
# Names of the number of taps in configurations.
TAPS = ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache")


def build(name: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A model of the family in float32 and eval(), with weights that the seed alone decides."""
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**{**family.config, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # parameters that begin as ones or zeros differ from channel to channel
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def copies(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model by each way in which a copy is made; processes are sent pickles."""
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]


def attributes(model: torch.nn.Module) -> dict[str, set[str]]:
    """Names of what each layer of a model has of its own."""
    return {path: set(layer.__dict__) for path, layer in model.named_modules()}


def tokens(length: int = 37, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
