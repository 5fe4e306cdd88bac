# from_config of heed.torch.nn: each field of each family's configuration gives Transformers' numbers or is refused.
import copy
import functools
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

import heed  # noqa: E402
import heed.torch.nn as layers  # noqa: E402
from heed.torch.nn import _families  # noqa: E402
from heed.torch.nn._config import REQUIRED  # noqa: E402

from config_families import (  # noqa: E402
    CONFIG_MAPPING, FAMILIES, KINDS, as_object, changed, error, fields_of, made, original, spelled, tiny, unrelated,
)
from torch_nn_checks import randomise, rows  # noqa: E402

MISSING = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
ROPES = [
    {"rope_type": "default", "rope_theta": 100.0}, {"rope_theta": 100.0}, {"rope_type": "linear", "factor": 3.0},
    YARN, LLAMA3, {**YARN, "rope_type": None}, {**YARN, "factor": None}, {**LLAMA3, "rope_theta": 50.0},
    {"type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 1.1, "beta_fast": 8.0, "truncate": False},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}, {"rope_type": "linear"},
    {"rope_type": "mrope"}, {"rope_type": "proportional"}, {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "sections": [1, 1]},
]
ROTARY = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
          "max_position_embeddings"}
BY_LAYER = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "no_rope_layers",
            "attention_window"}
TYPES = [["sliding_attention", "full_attention"], ["full_attention"] * 2, ["chunked_attention"] * 2, None]
# Values of fields that a layer reads or fixes to one value; other fields take a value unlike the tiny configuration's.
VALUES = {
    "num_key_value_heads": [1, None], "head_dim": [12, None], "attention_bias": [True, None], "use_bias": [True, False],
    "is_causal": [False, None, True], "sliding_window": [5, None, 0],
    "use_sliding_window": [True], "max_window_layers": [1, 0], "layer_types": TYPES, "rope_parameters": ROPES,
    "rope_scaling": [YARN, None, {}], "rope_theta": [100.0, None], "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8], "no_rope_layers": [[0, 1], [1, 1]], "no_rope_layer_interval": [2, 1],
    "attn_logit_softcapping": [2.0, None], "clip_qkv": [0.1], "use_bidirectional_attention": [True],
    "attention_multiplier": [0.3], "query_pre_attn_scalar": [7], "residual_multiplier": [0.3], "q_lora_rank": [None],
    "expand": [3], "intermediate_size": [24], "time_step_limit": [(0.9, 1.2)],
    "time_step_rank": ["auto", 2], "pruned_heads": [{}], "encoder_attention_heads": [2],
    "decoder_attention_heads": [2], "attention_window": [[4, 8], 4], "is_decoder": [True],
    "position_embedding_type": ["relative_key", "absolute"], "hidden_act": ["relu"], "attention_chunk_size": [4, None],
}
# Families that are read in different ways; HEED_TEST_FAMILIES=all takes every family with every rotary encoding.
ALL = os.environ.get("HEED_TEST_FAMILIES") == "all"
SOME = {"llama", "mistral",
        "qwen2", "qwen3_moe", "cohere", "gemma2", "granite", "smollm3", "olmo", "deepseek_v2", "deepseek_v3",
        "bert", "bart", "whisper", "clip_text_model", "mamba", "mamba2", "qwen3_next", "rwkv", "longformer", "big_bird"}
TAKEN = [pytest.param(*x, id=f"{x[0].layer.__name__}-{x[1]}") for x in FAMILIES if ALL or x[1] in SOME]


def outcome(kind, config, index=0):
    """The layer, or the message of its refusal."""
    try:
        return made(kind, config, index)
    except (heed.Unsupported, heed.InvalidArgument) as refused:
        return str(refused)


@functools.lru_cache(maxsize=64)
def told(kind, text, index):
    """Transformers' result with the fields of a config.json, None where it fails."""
    fields = json.loads(text)
    try:
        return original(kind, CONFIG_MAPPING[fields["model_type"]](**fields), index)
    except Exception:  # Transformers raises many types
        return None


def check(kind, family, fields, name, index=0):
    """Every spelling of a configuration agrees with Transformers' model or is refused with the name of the field."""
    spellings, text = [fields, as_object(fields)], None
    try:
        spellings.append(CONFIG_MAPPING[family](**copy.deepcopy(fields)))
        text = json.dumps(spelled(spellings[-1]), sort_keys=True)
    except Exception:
        pass
    for config in spellings:
        layer = outcome(kind, config, index)
        if isinstance(layer, str):
            about = ROTARY if name in ROTARY else {name}
            is_size = kind.schema.families[family].fields.get(name) is REQUIRED
            assert is_size or any(x in layer
                                  for x in about) or layer.startswith(f"{kind.layer.__name__}: "), (name, layer)
            continue
        theirs = text and told(kind, text, index)
        if theirs:
            assert error(layer, *theirs) <= 1e-5, (name, fields.get(name), type(config).__name__, index)


@pytest.mark.parametrize("kind, family", TAKEN)
@pytest.mark.filterwarnings("ignore")
def test_each_field_is_read_or_refused(kind, family):
    of_family = kind.schema.families[family].fields
    base, old = (spelled(tiny(kind, family), old) for old in (False, True))
    assert told(kind, json.dumps(base, sort_keys=True), 0)
    known = {*of_family, "is_causal", "attention_chunk_size"} | set(VALUES) & set(base)
    for name in sorted(known):
        values = [MISSING, *VALUES.get(name, [changed(base.get(name))])]
        if name == "rope_parameters" and not ALL and family not in ("llama", "deepseek_v2"):
            values = values[:2]  # all schemas have one reader
        for fields, value in itertools.product([base, old] if name in ROTARY & set(of_family) else [base], values):
            other = {key: x for key, x in fields.items() if key != name} | ({} if value is MISSING else {name: value})
            if value is MISSING and of_family.get(name) is REQUIRED:
                assert f"without {name}, expected" in outcome(kind, other)
                continue
            for index in (0, 1) if name in BY_LAYER and BY_LAYER & set(of_family) else (0,):
                check(kind, family, other, name, index)


@pytest.mark.parametrize("kind, family", TAKEN)
def test_fields_that_are_called_unrelated_do_not_matter(kind, family):
    others = unrelated(kind, family)
    for changes in [{name: value} for name, value in others.items()] if ALL else [others]:
        config = tiny(kind, family, **changes)
        assert error(made(kind, config), *original(kind, config)) <= 1e-5, changes


@pytest.mark.parametrize("kind, family", FAMILIES, ids=lambda x: getattr(x, "schema", SimpleNamespace(layer=x)).layer)
def test_each_field_of_transformers_is_known_with_its_default(kind, family):
    of_family, theirs = kind.schema.families[family].fields, fields_of(family)
    assert set(theirs) <= {*of_family, *kind.schema.unrelated}
    for name in {*of_family} & {*theirs} - {"attention_window"}:
        assert of_family[name] in (REQUIRED, theirs[name]), name
    assert of_family.get("rope_theta", CONFIG_MAPPING[family].default_theta) == CONFIG_MAPPING[family].default_theta
    assert "is_causal" not in theirs


def test_other_families_are_refused_by_name():
    for kind in KINDS:
        for family in CONFIG_MAPPING:
            if family not in kind.schema.families:
                for config in ({"model_type": family}, SimpleNamespace(model_type=family)):
                    assert outcome(kind, config).startswith(f"{kind.schema.layer}.from_config: "
                                                            f"model_type is '{family}', expected one of '")
    grouped, latent, multihead, mamba = KINDS[:4]
    for kind, name in ((grouped, "StableLm"), (grouped, "Nemotron"), (grouped, "NanoChat"), (latent, "MiniCPM3"),
                       (latent, "KimiLinear"), (multihead, "RoFormer"), (multihead, "Yoso"), (multihead, "Mra"),
                       (mamba, "FalconMamba"), (mamba, "Llama")):
        config = getattr(transformers, f"{name}Config")()
        assert outcome(kind, config).startswith(f"{kind.schema.layer}.from_config: "
                                                f"model_type is '{config.model_type}', expected")


def test_configurations_without_a_family():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5,
             "attention_bias": True}
    kind, x = KINDS[0], rows(2, 9, 32)
    expected = randomise(layers.GroupedQueryAttention(32, 4, 2, bias=True, window=5))
    for config in (sizes, SimpleNamespace(**sizes), type("Config", (), sizes)()):
        layer = kind.layer.from_config(config)
        layer.load_state_dict(expected.state_dict())
        assert torch.equal(layer(x), expected(x))
    for field, value in (("attention_multiplier", 0.5), ("model_type", ["llama"]), ("rope_theta", "10"),
                         ("layer_types", [1]), ("attention_bias", 1)):
        assert outcome(kind, {**sizes, field: value}).startswith("GroupedQueryAttention.from_config: "
                                                                 f"{field} is {value!r}, expected")
    with pytest.raises(heed.InvalidArgument, match="config is a NoneType without hidden_size"):
        kind.layer.from_config(None)
    for number in (-1, 1.0):
        with pytest.raises(heed.InvalidArgument, match=f"layer is {number}, expected an int of at least 0"):
            kind.layer.from_config(sizes, number)


def test_a_later_field_is_taken_with_the_default_of_its_class():
    class LlamaConfig(transformers.LlamaConfig):
        later: float = 1.0

    LlamaConfig.__module__ = "transformers.models.llama.configuration_llama"
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    assert not isinstance(outcome(KINDS[0], LlamaConfig(**sizes)), str)
    assert ("from_config: later is 2.0, expected none: "
            "the layer does not read it" in outcome(KINDS[0], LlamaConfig(**sizes, later=2.0)))
    LlamaConfig.__module__ = "mine"
    assert "later is 1.0" in outcome(KINDS[0], LlamaConfig(**sizes))


def test_infinity_as_config_json_has_it():
    fields = json.loads(transformers.Mamba2Config().to_json_string(use_diff=False))
    assert fields["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert layers.Mamba2.from_config(fields, device="meta").time_step_limit == (0.0, float("inf"))


def test_the_heads_of_a_decoder_are_its_own():
    config = transformers.BartConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=2)
    for options, heads in (({}, 4), ({"causal": True}, 2), ({"memory_size": 32}, 2)):
        assert layers.MultiheadAttention.from_config(config, **options).num_heads == heads
    assert layers.MultiheadAttention.from_config(transformers.BertConfig(is_decoder=True)).causal
    assert not layers.MultiheadAttention.from_config(transformers.BertConfig(is_decoder=True), memory_size=768).causal


def test_documents_name_the_families():
    page = ((Path(__file__).parents[2] / "docs/pytorch.md").read_text().partition("### Configurations")[2]
            .partition("```python")[0])
    listed = {x for line in page.splitlines() if line.startswith("| `")
              for x in re.split("[,;] ", line.split("|")[2].strip())}
    schemas = [*(kind.schema for kind in KINDS), _families.RWKV6]
    assert listed == {family for schema in schemas for family in schema.families if family}
    for schema in schemas:
        words = set(re.findall(r"[\w-]+", getattr(layers, schema.layer).from_config.__doc__))
        assert words >= {family for family in schema.families if family}, schema.layer
