# Tests of heed's models with one field of config.json at a time missing, null or with another value.
"""One state dict per family; only config.json changes. Expected are Transformers' logits or an error with the field."""

import json
import re
import shutil

import numpy as np
import pytest
from cli_program import document, heed, needs_program
from test_model_transformers import LLAMA3, MASKED, PROMPT, VOCABULARY, YARN, error, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = needs_program

# These fields have no effect on logits: all of them get other values at once.
IGNORED = {"attention_dropout": 0.3,
           "attention_probs_dropout_prob": 0.3, "attn_pdrop": 0.3, "auto_map": {"AutoModel": "a.B"}, "bos_token_id": 3,
           "classifier_dropout": 0.3, "dropout": 0.3, "dtype": "bfloat16", "embd_pdrop": 0.3, "eos_token_id": [4, 5],
           "hidden_dropout_prob": 0.3, "id2label": {"0": "x"}, "initializer_range": 0.5, "output_attentions": False,
           "pretraining_tp": 2, "qa_dropout": 0.3, "rescale_prenorm_residual": True, "residual_in_fp32": False,
           "resid_pdrop": 0.3, "seq_classif_dropout": 0.3, "summary_activation": "tanh",
           "summary_first_dropout": 0.3, "summary_proj_to_labels": False, "summary_type": "mean",
           "summary_use_proj": False, "temperature": 0.3, "time_step_floor": 0.3, "time_step_init_scheme": "constant",
           "time_step_max": 0.5, "time_step_min": 0.2, "time_step_scale": 2.0, "torch_dtype": "float16",
           "transformers_version": "4.0.0", "use_associative_scan": False, "use_cache": False, "use_mambapy": True,
           "chunk_size": 3, "context_length": 5, "reorder_and_upcast_attn": True, "sinusoidal_pos_embds": True}
OF_FAMILY = {"llama": ["pretraining_tp"], "gpt2": ["reorder_and_upcast_attn"], "distilbert": ["sinusoidal_pos_embds"],
             "mamba2": ["chunk_size"], "rwkv": ["context_length"]}
ANY = ["auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "output_attentions",
       "temperature", "torch_dtype", "transformers_version", "use_cache"]

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0]}
ROPE = [{"rope_theta": 100.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": {"rope_theta": 100.0}}, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 100.0},
        {"rope_parameters": None, "rope_theta": 100.0}, {"rope_parameters": {}},
        {"rope_parameters": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {"rope_scaling": {}}, {"rope_scaling": None},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_scaling": YARN}, {"rope_scaling": LLAMA3}, {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 5},
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        {"rope_scaling": {"rope_type": "yarn", "factor": None}, "rope_theta": 100.0},
        {"rope_scaling": YARN | {"beta_fast": 0, "beta_slow": 0}}, {"rope_scaling": YARN | {"mscale": 0.5}},
        {"rope_scaling": YARN | {"attention_factor": None}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16},
        {"rope_scaling": LONGROPE | {"factor": 4.0}, "max_position_embeddings": 32,
         "original_max_position_embeddings": 16}, {"rope_scaling": LONGROPE, "original_max_position_embeddings": 6}]
REFUSED_ROPE = [
    {"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_theta": None}}, {"rope_parameters": {"rope_type": None}},
    {"rope_parameters": 7}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_parameters": None, "rope_theta": None}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}},
    {"rope_scaling": {"type": "su", "factor": 2.0}}, {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": YARN | {"truncate": None}}, {"original_max_position_embeddings": None, "rope_scaling": YARN},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}]
DECODERS = [{"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}},
            {"hidden_act": "gelu"}, {"hidden_act": "relu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.1},
            {"is_causal": False}, {"is_causal": True}, {"max_position_embeddings": 5}]
REFUSED_DECODERS = [{"hidden_act": "quick_gelu"}, {"is_causal": None}, {"is_causal": 0}, {"attention_multiplier": 2.0},
                    {"clip_qkv": 1.0}]
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = [{"sliding_window": 3}, {"sliding_window": 3, "is_causal": False}, {"layer_types": [FULL, SLIDING]},
           {"layer_types": [SLIDING, FULL]}, {"layer_types": [FULL, FULL]}, {"layer_types": [SLIDING, SLIDING]},
           {"layer_types": [SLIDING, FULL], "is_causal": False}]
REFUSED_WINDOWS = [{"layer_types": ["chunked_attention", FULL]}, {"layer_types": [FULL]}, {"layer_types": []},
                   {"sliding_window": None, "layer_types": [FULL, SLIDING]}]
QWEN = [{"use_sliding_window": False, "layer_types": None}, {"use_sliding_window": False, "layer_types": [FULL, FULL]},
        {"layer_types": None, "max_window_layers": 0}, {"layer_types": None, "max_window_layers": 2},
        {"layer_types": None, "sliding_window": None}]
ENCODERS = [{"directionality": "bidi", "pooler_type": "first_token_transform", "output_past": True},
            {"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"layer_norm_eps": 0.1}, {"is_decoder": False},
            {"position_embedding_type": "absolute"}]
REFUSED_ENCODERS = [{"is_decoder": True}, {"position_embedding_type": "relative_key"}, {"is_causal": True},
                    {"add_cross_attention": True}]

# Values that heed computes, and values that it refuses.
CASES = {
    "llama": ([*ROPE, *DECODERS],
              [*REFUSED_ROPE, *REFUSED_DECODERS, {"sliding_window": 3}, {"layer_types": [FULL, FULL]}]),
    "mistral": ([{"is_causal": False}, *WINDOWS, {"sliding_window": None}, {"layer_types": None}, *ROPE[:5]],
                [*REFUSED_WINDOWS, {"is_causal": None}, {"attention_bias": True}]),
    "qwen2": ([{"is_causal": False}, *WINDOWS, *QWEN, *ROPE[:5]],
              [*REFUSED_WINDOWS, {"use_sliding_window": False}, {"is_causal": None}, {"use_mrope": True}]),
    "qwen3": ([{"is_causal": False}, {"sliding_window": 3}, {"max_window_layers": 0, "layer_types": None},
               {"rms_norm_eps": 0.1}, *ROPE[:5]],
              [{"head_dim": None}, {"is_causal": None}]),
    "gpt2": ([{"activation_function": "relu"}, {"layer_norm_epsilon": 0.1}, {"scale_attn_weights": False},
              {"scale_attn_by_inverse_layer_idx": True}, {"is_causal": False},
              {"hidden_size": 32, "num_attention_heads": 2}, {"num_attention_heads": 8}, {"n_ctx": 9},
              {"n_inner": 128}],
             [{"add_cross_attention": True}, {"is_causal": None}, {"num_attention_heads": None}, {"hidden_act": "relu"},
              {"rms_norm_eps": 0.1}]),
    "bert": (ENCODERS, REFUSED_ENCODERS),
    "roberta": ([*ENCODERS, {"pad_token_id": 5}], [*REFUSED_ENCODERS, {"pad_token_id": -1}]),
    "distilbert": ([{"activation": "relu"}, {"num_attention_heads": 8}, {"tie_weights_": False}],
                   [{"activation": "quick_gelu"}, {"is_causal": True}, {"position_embedding_type": "relative_key"}]),
    "mamba": ([{"layer_norm_epsilon": 0.1}, {"hidden_act": "swish"},
               {"rms_norm": True, "d_model": 7, "fused_add_norm": True, "ssm_cfg": {}}, {"time_step_rank": "auto"}],
              [{"hidden_act": "gelu"}, {"is_causal": False}, {"time_step_limit": [0.0, 0.1]}, {"mixer_rms_eps": 1e-6}]),
    "mamba2": ([{"layer_norm_epsilon": 0.1}, {"time_step_limit": [0.0, 0.02]},
                {"time_step_limit": [0.5, {"__float__": "Infinity"}]}],
               [{"hidden_act": "gelu"}, {"is_causal": False}, {"time_step_limit": None}, {"time_step_limit": []}]),
    "rwkv": ([{"layer_norm_epsilon": 0.1}, {"rescale_every": 0}, {"rescale_every": -1}, {"rescale_every": 1},
              {"max_position_embeddings": 3}],
             [{"hidden_act": "gelu"}, {"is_causal": False}, {"head_size": 8}]),
}
# Sizes without a default in heed: a file without them is refused, as Transformers' default contradicts the tensors.
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "n_embd",
         "n_layer", "n_head", "dim", "hidden_dim", "n_layers", "n_heads", "state_size", "num_heads"}


class Family:
    """A folder whose config.json changes, and the two sides' logits of it."""

    def __init__(self, name, folder):
        save(name, folder)
        self.folder, self.masked = folder, name in MASKED
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = safetensors_torch.load_file(folder / "model.safetensors")

    def write(self, config):
        (self.folder / "config.json").write_text(json.dumps(config))

    def expected(self):
        """Transformers' logits, or None where it refuses."""
        auto = transformers.AutoModelForMaskedLM if self.masked else transformers.AutoModelForCausalLM
        try:
            config = transformers.AutoConfig.from_pretrained(self.folder)
            config.dtype = torch.float32
            model = auto.from_config(config).eval()
            missing, unexpected = model.load_state_dict(self.tensors, strict=False)
            assert not unexpected and set(missing) <= model.all_tied_weights_keys.keys()
            model.tie_weights()
            with torch.no_grad():
                return model(torch.tensor([PROMPT])).logits[0].numpy()
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
            return None
        except Exception as wrong:
            if "Strict" in type(wrong).__name__:
                return None
            raise

    def got(self):
        """heed's logits, or the line that it refuses with."""
        out = self.folder / "logits.npy"
        done = heed("generate", self.folder, "--prompt-ids", ",".join(map(str, PROMPT)), "--tokens", 0, "--logits", out)
        assert done.returncode in (0, 1) and done.stderr.count("\n") == done.returncode, done.stderr
        return np.load(out)[0] if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp(name))
        made[name].write(made[name].config)
        return made[name]

    return make


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def names_of(change):
    return [*change, *(inner for value in change.values() if isinstance(value, dict) for inner in value),
            "rotary: scaling."]


@pytest.mark.parametrize("name", CASES)
def test_other_values_of_a_field(family, name):
    of = family(name)
    computed, refused = CASES[name]
    wrong = []
    for change in computed:
        of.write(of.config | change)
        got, want = of.got(), of.expected()
        if isinstance(got, str) or want is None or not error(got, want) < 1e-4:
            wrong.append((change, got if isinstance(got, str) else "computed",
                          want if want is None else "expected" if isinstance(got, str) else error(got, want)))
    for change in refused:
        of.write(of.config | change)
        got = of.got()
        if not isinstance(got, str) or not any(field in got for field in names_of(change)):
            wrong.append((change, got if isinstance(got, str) else "computed", "a refusal that names the field"))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", CASES)
def test_fields_that_are_missing_or_null(family, name):
    of = family(name)
    wrong, base = [], of.got()
    for field in of.config.keys() - IGNORED.keys() - {"model_type", "architectures",
                                                      *(["time_step_rank"] if name == "mamba2" else [])}:
        for config in ({k: v for k, v in of.config.items() if k != field}, of.config | {field: None}):
            of.write(config)
            got = of.got()
            want = None if isinstance(got, str) and field in SIZES else of.expected()
            if isinstance(got, str):
                good = want is None and (f"'{field}'" in got or "has shape" in got or "expected" in got)
            else:
                good = want is not None and error(got, want) < 1e-4
            if not good:
                wrong.append((field, field in config, got if isinstance(got, str) else "computed", want is None))
    assert not isinstance(base, str) and not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", CASES)
def test_fields_that_have_no_effect(family, name):
    of = family(name)
    base = of.got()
    mine = of.config.keys() & IGNORED.keys() | set(ANY) | set(OF_FAMILY.get(name, []))
    of.write(of.config | {field: IGNORED[field] for field in mine})
    got = of.got()
    assert not isinstance(got, str), got
    assert np.array_equal(got, base) and error(got, of.expected()) < 1e-4
    of.write({k: v for k, v in of.config.items() if k not in mine} | dict.fromkeys(
        ["id2label", "dtype", "attention_dropout"]))
    assert np.array_equal(of.got(), base)


def test_embeddings_of_a_bidirectional_decoder(family, tmp_path):
    (tmp_path / "ids.txt").write_text("\n".join(" ".join(map(str, ids)) for ids in (PROMPT, PROMPT[:3])))
    for name in ("llama", "mistral", "qwen2", "qwen3", "gpt2"):
        of = family(name)
        of.write(of.config | {"is_causal": False})
        got = np.array(document("embed", of.folder, "--ids", tmp_path / "ids.txt")["embeddings"])
        model = transformers.AutoModel.from_pretrained(of.folder).eval()
        for row, ids in zip(got, (PROMPT, PROMPT[:3])):
            with torch.no_grad():
                assert error(row, model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()) < 1e-5, name
        assert "continues no text" in heed("generate", of.folder, "--prompt-ids", "1").stderr


TIED = {"llama": "lm_head",
        "qwen2": "lm_head", "gpt2": "lm_head", "mamba": "lm_head", "mamba2": "lm_head", "rwkv": "head",
        "bert": "cls.predictions.decoder", "roberta": "lm_head.decoder", "distilbert": "vocab_projector"}


@pytest.mark.parametrize("name", TIED)
def test_tied_heads_are_those_of_transformers(tmp_path, name):
    """A head beside a table of other values, a head of equal ones, the head alone; in one file, in shards of bf16."""
    of = Family(name, tmp_path)
    head = TIED[name] + ".weight"
    table = next(key for key in of.tensors
                 if re.search(r"(embed_tokens|wte|word_embeddings|(rwkv|backbone)\.embeddings)\.weight$", key))
    rows, other = of.tensors[table], torch.randn_like(of.tensors[table])
    auto = transformers.AutoModelForMaskedLM if of.masked else transformers.AutoModelForCausalLM
    config = of.config | {"tie_word_embeddings": True}
    plain = {key: x for key, x in of.tensors.items() if key not in (head, table)}
    cases = [{table: rows, head: other}, {table: rows, head: rows.clone()}, {head: rows}, {table: rows}]
    bias = TIED[name] + ".bias"
    if bias not in of.tensors and of.masked:
        cases.append({table: rows, bias: torch.randn(VOCABULARY)})
    for sharded, changes in [(False, cases), (True, [cases[0], cases[2]])]:
        for change in changes:
            for file in tmp_path.glob("model*"):
                file.unlink()
            of.write(config | ({"dtype": "bfloat16"} if sharded else {}))
            tensors = plain | change
            if sharded:
                tensors = {key: x.bfloat16() for key, x in tensors.items()}
                halves = {"model-00001-of-00002.safetensors": sorted(tensors)[::2],
                          "model-00002-of-00002.safetensors": sorted(tensors)[1::2]}
                for file, keys in halves.items():
                    safetensors_torch.save_file({key: tensors[key] for key in keys}, tmp_path / file, {"format": "pt"})
                index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
                (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
            else:
                safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
            model = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
            got = of.got()
            assert not isinstance(got, str), got
            with torch.no_grad():
                assert error(got, model(torch.tensor([PROMPT])).logits[0].numpy()) < 1e-4, change.keys()


def test_generation_ends_where_transformers_ends(family, tmp_path):
    of = family("llama")
    folder = tmp_path / "m"
    shutil.copytree(of.folder, folder)
    free = document("generate", folder, "--prompt-ids", "1,2,3", "--tokens", 9, "--ignore-end")["tokens"][0]
    first, later = free[1], free[4]
    for config, generation in [
        ({"eos_token_id": [90, later]}, None), ({"eos_token_id": None}, {"eos_token_id": [later, first]}),
        ({"eos_token_id": first}, {"eos_token_id": later}), ({"eos_token_id": first}, {"eos_token_id": None}),
        ({"eos_token_id": first}, {"do_sample": False}), ({}, None)]:
        (folder / "config.json").write_text(json.dumps(of.config | config))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, do_sample=False,
                                  pad_token_id=0)[0, 3:].tolist()
        assert document("generate", folder, "--prompt-ids", "1,2,3", "--tokens",
                        9)["tokens"][0] == expected, (config, generation)
    for text, expected in [("{", "is no JSON"), ("[1]", "holds no object"),
                           ('{"eos_token_id": "a"}', "'eos_token_id' is"), ('{"eos_token_id": [-1]}', "at least 0")]:
        (folder / "generation_config.json").write_text(text)
        line = heed("generate", folder, "--prompt-ids", "1").stderr
        assert line.startswith(f"heed: {folder}/generation_config.json: ") and expected in line
