# heed.transformers.register: its effects, the models that it cannot reach, and their list in the documentation.
import importlib.util
import pickle
import subprocess
import sys
import types
from pathlib import Path

import fresh
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")

import tiny_models  # noqa: E402
from tiny_models import SIZES, VOCABULARY  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402

import heed  # noqa: E402
import heed.transformers  # noqa: E402
from heed.transformers import _families, _masks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
heed.transformers.register()


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_heed_alone_imports_neither_package():
    assert python("import heed, sys; print({'torch', 'transformers'} & set(sys.modules))") == "set()\n"
    assert python("import heed.torch, sys; print('transformers' in sys.modules)") == "False\n"


def test_importing_registers_nothing():
    done = fresh.python("import heed.transformers; from transformers import AttentionInterface, AttentionMaskInterface;"
                        "print('heed' in AttentionInterface(), 'heed' in AttentionMaskInterface())",
                        packages=["transformers"])
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr


MODEL = """import pickle, sys, torch
model = pickle.load(open(sys.argv[1], "rb"))
with torch.no_grad():
    print(model(torch.arange(4, 15)[None]).logits.double().sum().item(), "heed" in sys.modules)
"""


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_process_that_is_sent_a_model_has_heed_registered(name, tmp_path):
    model, file = tiny_models.build(name, "heed"), tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps(model))
    done = fresh.python(MODEL, file, packages=["transformers"])
    with torch.no_grad():
        expected = model(torch.arange(4, 15)[None]).logits.double().sum().item()
    assert done.returncode == 0 and done.stdout.split()[1] == "True", done.stderr
    assert abs(float(done.stdout.split()[0]) - expected) < 1e-3


def test_a_configuration_brings_the_kind_of_its_masks(monkeypatch):
    pickled = {name: pickle.dumps(tiny_models.build(name, "heed").config) for name in ("gemma2", "llama")}
    monkeypatch.setattr(_families, "_mask_kinds", {})  # as in a process that has made no model
    kinds = {name: _families.mask_dtype(pickle.loads(config), torch.float32) for name, config in pickled.items()}
    assert kinds == {"gemma2": torch.float32, "llama": torch.bool}


def test_registering_twice_is_registering_once():
    before = PreTrainedModel.get_correct_attn_implementation
    heed.transformers.register()
    assert PreTrainedModel.get_correct_attn_implementation is before
    assert "heed" in AttentionInterface() and "heed" in AttentionMaskInterface()


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(heed.Unsupported, match=r"register: transformers has version \S+, expected 5.23 or one with"):
        heed.transformers.register()


def test_a_loaded_model_switches():
    model = tiny_models.build("llama", "eager")
    inputs = tiny_models.inputs("llama")
    expected = model(**inputs).logits
    model.set_attn_implementation("heed")
    found = model(**inputs).logits
    assert model.config._attn_implementation == "heed" and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


GPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
       "eos_token_id": 2}
OWN = {
    "gptj": ("GPTJForCausalLM", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "falcon": ("FalconForCausalLM", GPT),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "gpt_neo": ("GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                      "attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "xglm": ("XGLMForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
                                 "attention_heads": 4}),
    "deberta_v2": ("DebertaV2ForMaskedLM", {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": ("MPNetForMaskedLM", SIZES),
    "megatron_bert": ("MegatronBertForMaskedLM", SIZES),
    # Attention classes in a table by name: "heed" would be a KeyError.
    "git": ("GitForCausalLM", {**SIZES, "vision_config": {**SIZES, "image_size": 12, "patch_size": 4}}),
}


def own_code(family, attention):
    model, config = OWN[family]
    model = getattr(transformers, model)
    torch.manual_seed(0)
    return model._from_config(model.config_class(**config), attn_implementation=attention).eval()


def about_heed(recwarn):
    return [str(warning.message) for warning in recwarn if "heed" in str(warning.message)]


@pytest.mark.parametrize("family", OWN)
def test_families_that_never_call_the_interface_say_so_and_stay_right(family, recwarn):
    _families._warn.cache_clear()
    eager, ours = own_code(family, "eager"), own_code(family, "heed")
    own_code(family, "heed")
    ours.load_state_dict(eager.state_dict())
    inputs = tiny_models.inputs("llama", "right")
    real = inputs["attention_mask"].bool()
    expected = eager(**inputs).logits[:, -11:][real]
    torch.testing.assert_close(ours(**inputs).logits[:, -11:][real], expected, rtol=0, atol=1e-5)
    assert ours.config._attn_implementation in ("eager", "sdpa")
    warned = about_heed(recwarn)
    assert len(warned) == 1 and f'"{family}" has attention that does not call' in warned[0]

    # The name put in by force, past Transformers' checks: still the masks that the model's own code expects.
    ours.config._attn_implementation = "heed"
    torch.testing.assert_close(ours(**inputs).logits[:, -11:][real], expected, rtol=0, atol=1e-5)


MAMBA2 = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8,
          "state_size": 8, "n_groups": 1}


def test_a_model_without_attention_says_that_nothing_of_it_runs_on_heed(recwarn):
    def build(attention):
        model = transformers.Mamba2ForCausalLM
        return model._from_config(model.config_class(**MAMBA2), attn_implementation=attention)

    _families._warn.cache_clear()
    loaded = build("eager")
    assert about_heed(recwarn) == []
    build("heed")
    build("heed")
    assert len(said := about_heed(recwarn)) == 1
    assert '"mamba2" has no layer that asks Transformers for attention, so nothing of it runs on heed' in said[0]
    _families._warn.cache_clear()
    loaded.set_attn_implementation("heed")
    assert about_heed(recwarn) == said * 2


def test_models_with_attention_anywhere_have_no_such_warning(recwarn):
    _families._warn.cache_clear()
    tiny_models.build("llama", "eager").set_attn_implementation("heed")
    tiny_models.build("llama", "heed")
    config = transformers.LlamaConfig(**SIZES)

    class Made(PreTrainedModel):  # derived from another model, in a file without attention
        _supports_sdpa = True

        def __init__(self, config):
            super().__init__(config)
            self.inner = transformers.LlamaModel(config)
            self.post_init()

    Made._from_config(config, attn_implementation="heed")
    assert about_heed(recwarn) == []


def test_models_that_extend_a_model_count_as_that():
    base = transformers.GPTJForCausalLM
    assert not _families.calls_interface(types.new_class("Mine", (base,)))
    assert _families.calls_interface(types.new_class("Mine", (transformers.LlamaForCausalLM,)))
    assert _families.calls_interface(transformers.LlavaForConditionalGeneration)  # no attention but that of its parts


def test_models_that_were_only_given_numbers_find_numbers():
    """Gemma 2 does not support PyTorch's attention: its code was never run with masks of bool."""
    build = {"gemma2": torch.float32, "llama": torch.bool}
    for name, dtype in build.items():
        config = tiny_models.build(name, "heed").config
        mask = _masks.mask(2, 5, 5, config=config)
        dense = AttentionMaskInterface()["eager" if dtype.is_floating_point else "sdpa"]
        assert mask.dtype is dtype and mask.structure.causal
        assert torch.equal(mask * 1, dense(2, 5, 5, allow_is_causal_skip=False) * 1)
        own = _masks.mask(2, 5, 5, mask_function=lambda b, h, q, k: q != k, config=config)
        assert own.dtype is dtype and type(own) is torch.Tensor


def test_compressed_keys_behind_a_mask_of_numbers():
    """DeepSeek V4 appends a bias for compressed keys to the mask; as a bool that would mean its opposite."""
    config = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
              "num_experts_per_tok": 2, "q_lora_rank": 12, "qk_rope_head_dim": 4, "sliding_window": 5}
    models = []
    for attention in ("eager", "heed"):
        torch.manual_seed(0)
        model = transformers.DeepseekV4ForCausalLM
        models.append(model._from_config(model.config_class(**config), attn_implementation=attention).eval())
        for parameter in models[-1].parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    models[1].load_state_dict(models[0].state_dict())
    inputs = tiny_models.inputs("llama", "left")
    eager, ours = (model(**inputs).logits[inputs["attention_mask"].bool()] for model in models)
    torch.testing.assert_close(ours, eager, rtol=0, atol=2e-5 * eager.abs().max().item())


def tool():
    spec = importlib.util.spec_from_file_location("transformers_families", ROOT / "tools/transformers_families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_families_is_what_the_tool_writes(tmp_path, monkeypatch):
    families, page = tool(), (ROOT / "docs/transformers.md").read_text()
    if f"Transformers {transformers.__version__}:" not in page:
        pytest.skip("the table is of another version of Transformers")
    copy = tmp_path / "page.md"
    copy.write_text(page.replace("| yes |", "| no |"))
    monkeypatch.setattr(sys, "argv", ["transformers_families.py", str(copy)])
    families.main()
    assert copy.read_text() == page
    for row in ("| llama | yes |", "| gpt_oss | yes | sinks;", "| t5 | yes | position bias |", "| falcon | no |"):
        assert row in page
    for family in OWN:
        assert f"| {family} | no |" in page
    copy.write_text("no place for a table")
    with pytest.raises(SystemExit, match="expected one"):
        families.main()


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs/transformers.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(code, "docs/transformers.md", "exec"), names)
    assert names["model"].config._attn_implementation == "heed"
