# Tiny configurations of every family that heed.torch.nn's from_config takes, and the outputs of Transformers' models.
"""FAMILIES, `original` and `compare`: a layer made of a configuration beside the module inside of Transformers' model.

HEED_TEST_FAMILIES=all makes tests take every family, one field at a time: minutes. Otherwise they take one of each
kind.
"""
import copy
import dataclasses
import json
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import heed.torch.nn as layers
from heed.torch.nn import _families

from torch_nn_checks import randomise, relative, rows

TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "sep_token_id": 1}
MIXTURE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
           "moe_intermediate_size": 8, "n_routed_experts": 2, "shared_expert_intermediate_size": 8, "n_group": 1,
           "topk_group": 1, "first_k_dense_replace": 9, "mlp_only_layers": [0, 1], "moe_num_experts": 2, "moe_topk": 1,
           "shared_intermediate_size": 8, "mlp_layer_types": ["dense", "dense"]}
DECODER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
           "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 19, "max_position_embeddings": 64,
           "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, **TOKENS, **MIXTURE}
LATENT = {**DECODER, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 6}
BERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 19,
        "max_position_embeddings": 64, "type_vocab_size": 1, "embedding_size": 32, "input_embedding_size": 32,
        "image_size": 16, "patch_size": 4, **TOKENS}
BART = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 19,
        "max_position_embeddings": 64, "num_mel_bins": 4, "max_source_positions": 12, "max_target_positions": 64,
        "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **TOKENS}
MAMBA = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 19, "time_step_rank": 3,
         "num_heads": 8, "head_dim": 8, "n_groups": 2, **TOKENS}
LINEAR = {**DECODER, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"]}
RWKV = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 19, "context_length": 64,
        **TOKENS}
LONGFORMER = {**BERT, "attention_window": [8, 4]}
BIG_BIRD = {**BERT, "block_size": 4, "num_random_blocks": 1}


class Kind(NamedTuple):
    """A layer, the schema that it reads, where its module is in a model (with the layer's number for {}), and sizes."""

    layer: type
    schema: object
    path: str
    sizes: dict
    options: dict = {}

    __hash__ = object.__hash__


KINDS = [
    Kind(layers.GroupedQueryAttention, _families.GROUPED_QUERY, "layers.{}.self_attn", DECODER),
    Kind(layers.LatentAttention, _families.LATENT, "layers.{}.self_attn", LATENT),
    Kind(layers.MultiheadAttention, _families.MULTIHEAD, "encoder.layer.{}.attention", BERT),
    Kind(layers.Mamba, _families.MAMBA, "layers.{}.mixer", MAMBA),
    Kind(layers.Mamba2, _families.MAMBA2, "layers.{}.mixer", MAMBA),
    Kind(layers.GatedDeltaNet, _families.GATED_DELTA, "layers.{}.linear_attn", LINEAR),
    Kind(layers.Rwkv4, _families.RWKV4, "blocks.{}.attention", RWKV),
    Kind(layers.LongformerAttention, _families.LONGFORMER, "encoder.layer.{}.attention.self", LONGFORMER),
    Kind(layers.BigBirdAttention, _families.BIG_BIRD, "encoder.layer.{}.attention.self", BIG_BIRD),
]
_CLIP = {"clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"}


def kind_of(kind, family):
    """The kind as this family has it: of multi-head attention there are three sorts of models."""
    if "d_model" in kind.schema.families[family].fields:
        return kind._replace(path="encoder.layers.{}.self_attn", sizes=BART)
    return kind._replace(path="encoder.layers.{}.self_attn") if family in _CLIP else kind


FAMILIES = [(kind_of(kind, family), family) for kind in KINDS
            for family in kind.schema.families if family in CONFIG_MAPPING]


def fields_of(family):
    """{field: default} that a class of configurations declares."""
    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[family])
            if not field.name.startswith("_")}


def tiny(kind, family, **changes):
    """A configuration of the family, small; `changes` are arguments of its class."""
    known = fields_of(family)
    sizes = {name: copy.deepcopy(x) for name, x in kind.sizes.items() if name in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[family](**{**sizes, "attn_implementation": "eager", **changes})


def _model(config):
    name = type(config).__name__.removesuffix("Config") + ("Encoder" if config.model_type == "bert-generation"
                                                           else "Model")
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()


def _run(model, side, index):
    """Runs a model, or the encoder or decoder of one with both, on rows, tokens or pixels, whichever it takes."""
    name = type(model).__name__
    length = 32 if name == "BigBirdModel" else 16 if side == "encoder" else 12
    if name == "WhisperModel":
        model.encoder.layers[index](rows(2, 12, 32), None)
    elif hasattr(model, "decoder"):
        getattr(model, side)(inputs_embeds=rows(2, length, 32))
    elif "Vision" in name:
        model(pixel_values=rows(2, 3, 16, 16))
    elif "TextModel" in name:
        model(input_ids=torch.arange(2 * length).view(2, -1) % 17 + 2)
    else:
        model(inputs_embeds=rows(2, length, 32))


@torch.no_grad()
def original(kind, config, index=0):
    """(Transformers' module with weights that matter, the rows that its model gives it, what it makes of them)."""
    model, seen = _model(config), []
    module = randomise(model.get_submodule(kind.path.format(index)))

    def hook(module, args, kwargs, output):
        x = args[0] if args else kwargs["hidden_states"]
        seen.append((x, output[0] if isinstance(output, tuple) else output))

    with module.register_forward_hook(hook, with_kwargs=True):
        _run(model, kind.path.partition(".")[0], index)
    return module, *seen[0]


def made(kind, config, index=0):
    """The layer of heed.torch.nn."""
    of_layer = {"layer": index} if "layer" in kind.layer.from_config.__code__.co_varnames[:3] else {}
    return kind.layer.from_config(config, **of_layer, **kind.options)


@torch.no_grad()
def error(layer, module, x, expected):
    """The difference between the layer with the module's weights and the module's results."""
    layer.load_state_dict(module.state_dict())
    return relative(layer.eval()(x), expected)


def spelled(config, old=False):
    """The fields as config.json has them; `old` as Transformers 4 wrote them."""
    fields = config._decode_special_floats(json.loads(config.to_json_string(use_diff=False)))
    if old:
        fields["torch_dtype"] = fields.pop("dtype", None)
        rope = fields.pop("rope_parameters", None)
        if rope is not None:
            fields["rope_theta"] = rope.pop("rope_theta")
            fields["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return fields


def as_object(fields):
    """A configuration object of Transformers 4: attributes and to_dict."""
    return SimpleNamespace(**fields, to_dict=lambda: copy.deepcopy(fields))


def changed(value):
    """Another value than this one, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 or type(value)(1)
    if isinstance(value, str):
        return "relu" if value != "relu" else "gelu"
    return None


# Fields that say how large or how long the rest of a model is, which a changed copy must leave as they are.
_WHOLE = {*TOKENS, *"""
    add_cross_attention architectures context_length decoder_layers dtype embedding_size encoder_layers hidden_size
    id2label image_size input_embedding_size is_encoder_decoder label2id layer_types mask_time_length
    max_source_positions mlp_layer_types mlp_only_layers n_shared_experts num_channels num_experts_per_tok
    num_hidden_layers num_mel_bins patch_size problem_type subs_pad_id tag_pad_id topk_method transformers_version
    type_vocab_size vocab_size
""".split()}


def unrelated(kind, family):
    """{field: another value} of the fields of the family that the schema says cannot matter."""
    config, of_family = tiny(kind, family), kind.schema.families[family].fields
    names = [x for x in fields_of(family) if x in kind.schema.unrelated and x not in of_family and x not in _WHOLE]
    return {x: value for x in names if (value := changed(getattr(config, x, None))) is not None}
