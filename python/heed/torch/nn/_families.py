# The families of Transformers' configurations that each layer of heed.torch.nn takes, with their fields.
"""A Schema for each layer with from_config. Defaults are those of Transformers 5.23."""

from __future__ import annotations

from typing import Any

from heed.torch.nn._config import REQUIRED, Schema, Family, Fields

# Fields that no layer depends on: about a whole model, its heads and experts, tokens, files, training and generation.
_MODEL = frozenset("""
    add_cross_attention architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classifier_dropout cls_token_id cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_factor initializer_range intermediate_size is_decoder is_encoder_decoder label2id
    length_penalty mask_token_id max_length max_new_tokens min_length name_or_path no_repeat_ngram_size
    num_beam_groups num_beams num_hidden_layers num_labels num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads quantization_config
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_return_dict vocab_size
""".split())
_FEED_FORWARD = frozenset("""
    aux_loss_alpha decoder_sparse_step enable_moe_fp32_combine ep_size first_k_dense_replace hidden_act
    hidden_activation mlp_bias mlp_layer_types mlp_only_layers moe_intermediate_size moe_layer_freq moe_num_experts
    moe_num_shared_experts moe_topk n_group n_routed_experts n_shared_experts norm_topk_prob num_experts
    num_experts_per_tok num_local_experts num_mtp_layers num_nextn_predict_layers num_shared_experts
    output_router_logits routed_scaling_factor router_aux_loss_coef router_jitter_noise router_scaling_factor
    scoring_func seq_aux shared_expert_intermediate_size shared_intermediate_size topk_group topk_method
""".split())

_HEADS = {"hidden_size": REQUIRED, "num_attention_heads": REQUIRED, "attention_dropout": 0.0, "is_causal": True}


def _rope(base: float = 10000.0, length: int = 2048) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": None, "rope_theta": base, "partial_rotary_factor": None,
            "max_position_embeddings": length, "original_max_position_embeddings": None}


def _grouped(length: int = 2048, kv_heads: int | None = None, head_dim: int | None = None, base: float = 10000.0,
             **fields: Any) -> dict[str, Any]:
    return {**_HEADS, "num_key_value_heads": kv_heads, "head_dim": head_dim, **_rope(base, length), **fields}


def _without(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in fields.items() if key != name}


def _late(fields: Fields, layer: int) -> bool:
    return layer >= fields["max_window_layers"]


def _qwen2_moe(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0 and layer < fields["max_window_layers"]


_BIASED: dict[str, Any] = {"attention_bias": False}
_WINDOWED: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
                             "layer_types": None}
_GRANITE = Family(_grouped(**_BIASED, attention_multiplier=1.0))
_GRANITE_MOE = Family({**_GRANITE.fields, "position_embedding_type": "rope"})
_QKV_BIAS = {"bias": True, "out_bias": False}

GROUPED_QUERY = Schema("GroupedQueryAttention", {
    "": Family(_grouped(**_BIASED, sliding_window=None, layer_types=None)),
    "arcee": Family(_grouped(4096, **_BIASED)),
    "aria_text": Family(_grouped(**_BIASED)),
    "cohere": Family(_grouped(8192, base=5e5, **_BIASED, use_qk_norm=False), {"interleaved": True}),
    "dots1": Family(_grouped(2048, 32, **_BIASED, rms_norm_eps=1e-6, sliding_window=4096, max_window_layers=62,
                             layer_types=None), {"qk_norm": True}, _late),
    "emu3_text_model": Family(_grouped(9216, 8, base=1e6, attention_dropout=0.1)),
    "ernie4_5": Family(_without("attention_dropout", _grouped(131072, 2, 128, 5e5, use_bias=False)),
                       {"interleaved": True}),
    "gemma": Family(_grouped(8192, 16, 256, **_BIASED, use_bidirectional_attention=None)),
    "gemma2": Family(_grouped(8192, 4, 256, **_BIASED, use_bidirectional_attention=None, query_pre_attn_scalar=256,
                              attn_logit_softcapping=50.0, sliding_window=4096, layer_types=None),
                     windowed=lambda fields, layer: layer % 2 == 0),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "helium": Family(_grouped(4096, 20, 128, 1e5, **_BIASED), {"interleaved": True, "out_bias": False}),
    "hy_v3": Family(_grouped(131072, 8, 128, 11158840.0, **_BIASED, rms_norm_eps=1e-5), {"qk_norm": True}),
    "hyperclovax": Family(_grouped(**_BIASED, attention_multiplier=None)),
    "jais2": Family(_grouped(8192, attention_bias=True)),
    "llama": Family(_grouped(**_BIASED)),
    "ministral": Family(_grouped(131072, 8, sliding_window=4096, layer_types=None)),
    "mistral": Family(_grouped(131072, 8, sliding_window=4096)),
    "mixtral": Family(_grouped(131072, 8, base=1e6, sliding_window=None)),
    "olmo": Family(_grouped(**_BIASED, clip_qkv=None)),
    "qwen2": Family(_grouped(32768, 32, **_WINDOWED), _QKV_BIAS, _late),
    "qwen2_moe": Family(_grouped(32768, 16, **_WINDOWED, qkv_bias=True), {"out_bias": False}, _qwen2_moe),
    "qwen3": Family(_grouped(32768, 32, 128, **_BIASED, **_WINDOWED, rms_norm_eps=1e-6), {"qk_norm": True}, _late),
    "qwen3_moe": Family(_grouped(32768, 4, **_BIASED, rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=4096),
                        {"qk_norm": True}),
    "smollm3": Family(_grouped(32768, 4, base=2e6, **_BIASED, use_sliding_window=False, sliding_window=None,
                               layer_types=None, no_rope_layers=None, no_rope_layer_interval=4),
                      windowed=lambda fields, layer: False),
    "starcoder2": Family(_grouped(4096, 2, sliding_window=None, use_bias=True, residual_dropout=0.0)),
}, _MODEL | _FEED_FORWARD | {
    "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "embedding_dropout", "embedding_multiplier", "logits_scaling",
    "residual_multiplier", "logit_scale", "final_logit_softcapping", "use_mrope", "cache_implementation",
    "use_post_norm",
})


def _latent(length: int, kv_heads: int | None, q_lora_rank: int | None, **fields: Any) -> dict[str, Any]:
    sizes = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), REQUIRED)
    return {**_HEADS, **sizes, "num_key_value_heads": kv_heads, "q_lora_rank": q_lora_rank, "attention_bias": False,
            "head_dim": None, **_rope(length=length), **fields}


LATENT = Schema("LatentAttention", {
    "": Family(_latent(2048, None, None, rope_interleave=True)),
    "axk1": Family(_latent(32768, 64, 1536, rope_interleave=True)),
    "deepseek_v2": Family(_latent(2048, None, 1536)),
    "deepseek_v3": Family(_latent(4096, 128, 1536, rope_interleave=True)),
    "glm4_moe_lite": Family(_latent(202752, 20, 768, rope_interleave=True)),
    "youtu": Family(_latent(131072, 16, 1536, rope_interleave=True)),
}, _MODEL | _FEED_FORWARD | {"rms_norm_eps", "qk_head_dim", "embedding_initializer_range"})

_BERT = {"hidden_size": REQUIRED, "num_attention_heads": REQUIRED, "attention_probs_dropout_prob": 0.1,
         "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "pruned_heads": {},
         "is_causal": True}
_DECODING_BERT = {**_BERT, "is_decoder": False}
_BART = {"d_model": REQUIRED, "encoder_attention_heads": REQUIRED, "decoder_attention_heads": REQUIRED,
         "attention_dropout": 0.0, "is_causal": True}

MULTIHEAD = Schema("MultiheadAttention", {
    "": Family({**_HEADS, "is_decoder": False}),
    "align_text_model": Family(_BERT),
    "bart": Family(_BART),
    "bert": Family(_DECODING_BERT),
    "bert-generation": Family(_DECODING_BERT),
    "blenderbot": Family(_BART),
    "blenderbot-small": Family(_BART),
    "camembert": Family(_DECODING_BERT),
    "chinese_clip_text_model": Family(_BERT),
    "clap_text_model": Family(_BERT),
    "clip_text_model": Family(_HEADS, {"causal": True}),
    "clip_vision_model": Family(_HEADS),
    "data2vec-text": Family(_DECODING_BERT),
    "electra": Family(_DECODING_BERT),
    "ernie": Family(_DECODING_BERT),
    "layoutlm": Family(_BERT),
    "m2m_100": Family({**_BART, "attention_dropout": 0.1}),
    "marian": Family(_BART),
    "markuplm": Family(_BERT),
    "mbart": Family(_BART),
    "pegasus": Family(_BART),
    "plbart": Family({**_BART, "attention_dropout": 0.1}),
    "rembert": Family({**_DECODING_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "roberta": Family(_DECODING_BERT),
    "roc_bert": Family(_DECODING_BERT),
    "siglip_text_model": Family(_HEADS),
    "siglip_vision_model": Family(_HEADS),
    "splinter": Family(_BERT),
    "whisper": Family(_BART, {"key_bias": False}),
    "xlm-roberta": Family(_DECODING_BERT),
}, _MODEL | _FEED_FORWARD | frozenset("""
    activation_dropout activation_function add_bias_logits add_final_layer_norm apply_spec_augment classif_dropout
    classifier_dropout classifier_dropout_prob classifier_proj_size concat_input decoder_ffn_dim decoder_layerdrop
    decoder_layers decoder_vocab_size dropout embedding_size enable_pronunciation enable_shape encoder_ffn_dim
    encoder_layerdrop encoder_layers extra_pos_embeddings force_bos_token_to_be_generated image_size init_std
    input_embedding_size layer_norm_eps mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length
    mask_time_min_masks mask_time_prob max_2d_position_embeddings max_depth max_position_embeddings
    max_source_positions max_target_positions max_xpath_subs_unit_embeddings max_xpath_tag_unit_embeddings
    median_filter_width model_max_length normalize_before normalize_embedding num_channels num_mel_bins
    output_embedding_size patch_size project_dim projection_dim projection_hidden_act projection_size
    pronunciation_embed_dim pronunciation_vocab_size question_token_id scale_embedding shape_embed_dim
    shape_vocab_size share_encoder_decoder_embeddings static_position_embeddings subs_pad_id summary_activation
    summary_first_dropout summary_last_dropout summary_type summary_use_proj tag_pad_id task_type_vocab_size
    type_vocab_size use_task_id use_weighted_layer_sum vision_use_head xpath_unit_hidden_size
""".split()))

_TIME_STEPS = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}
_MAMBA = {"hidden_size": REQUIRED, "state_size": REQUIRED, "conv_kernel": REQUIRED, "expand": 2, "use_bias": False,
          "use_conv_bias": True, "hidden_act": "silu", **_TIME_STEPS}
_OF_BLOCKS = {"layer_norm_epsilon", "rescale_prenorm_residual", "residual_in_fp32"}

_MAMBA1 = Family({**_MAMBA, "intermediate_size": None, "time_step_rank": "auto"})
MAMBA = Schema("Mamba", {"": _MAMBA1, "mamba": _MAMBA1}, _MODEL | _OF_BLOCKS | {
    "time_step_scale", "time_step_init_scheme", "use_associative_scan", "use_mambapy"})

_MAMBA2 = Family({**_MAMBA, "num_heads": REQUIRED, "head_dim": REQUIRED, "n_groups": 8, "layer_norm_epsilon": 1e-5,
                  "time_step_limit": (0.0, float("inf")), "rms_norm": True, "norm_before_gate": False})
MAMBA2 = Schema("Mamba2", {"": _MAMBA2, "mamba2": _MAMBA2},
              _MODEL | _OF_BLOCKS | {"chunk_size", "time_step_rank", "time_step_init_scheme", "time_step_scale"})

_LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                         "linear_value_head_dim", "linear_conv_kernel_dim"), REQUIRED)
_QWEN3_NEXT = Family({"hidden_size": REQUIRED, **_LINEAR, "rms_norm_eps": 1e-6, "hidden_act": "silu"})
GATED_DELTA = Schema("GatedDeltaNet", {"": _QWEN3_NEXT, "qwen3_next": _QWEN3_NEXT}, _MODEL | _FEED_FORWARD | {
    "attention_bias", "attention_dropout", "full_attention_interval", "head_dim", "layer_types", "num_attention_heads",
    "num_key_value_heads", *_rope()})

_RWKV = {"hidden_size": REQUIRED, "attention_hidden_size": None}
_OF_RWKV = _MODEL | {"context_length", "layer_norm_epsilon", "rescale_every"}
RWKV4 = Schema("Rwkv4", {"": Family(_RWKV), "rwkv": Family(_RWKV)}, _OF_RWKV)
_RWKV6 = Family({**_RWKV, "head_size": REQUIRED, "head_size_divisor": REQUIRED})
RWKV6 = Schema("Rwkv6", {"": _RWKV6, "rwkv6": _RWKV6}, _OF_RWKV | {"model_version", "num_attention_heads"})

_LONGFORMER = Family({"hidden_size": REQUIRED, "num_attention_heads": REQUIRED, "attention_window": None,
                      "attention_probs_dropout_prob": 0.1, "position_embedding_type": "absolute"})
_OF_BERT = frozenset({"hidden_dropout_prob", "layer_norm_eps", "max_position_embeddings", "type_vocab_size"})
LONGFORMER = Schema("LongformerAttention", {"": _LONGFORMER, "longformer": _LONGFORMER},
                    _MODEL | _FEED_FORWARD | _OF_BERT
                    | {"attention_mode", "ignore_attention_mask", "onnx_export"})

_BIG_BIRD = Family({"hidden_size": REQUIRED, "num_attention_heads": REQUIRED, "block_size": 64, "num_random_blocks": 3,
                    "use_bias": True, "attention_type": "block_sparse", "is_decoder": False,
                    "position_embedding_type": "absolute"})
BIG_BIRD = Schema("BigBirdAttention", {"": _BIG_BIRD, "big_bird": _BIG_BIRD}, _MODEL | _FEED_FORWARD | _OF_BERT | {
    "attention_probs_dropout_prob", "rescale_embeddings"})
