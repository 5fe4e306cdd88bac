# The example byte_lm: every mechanism gives the same logits at once, byte by byte, and in C++; training beats counting.
import argparse
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import fresh
import numpy as np
import pytest
from cli_program import HEED, document, load, refused, save

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

FOLDER = Path(__file__).resolve().parents[2] / "examples/byte_lm"
sys.path.insert(0, str(FOLDER))

import byte_lm  # noqa: E402
import train  # noqa: E402

PROGRAM = HEED.with_name("example_byte_lm")
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason=f"no program at {PROGRAM}")
TEXT = train.BOOK.read_bytes()
END = len(TEXT) * 9 // 10


@pytest.fixture
def one_thread():
    """A single byte is too little work to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generate(*args):
    return subprocess.run([PROGRAM, *map(os.fsencode, map(str, args))], capture_output=True, timeout=60, check=False)


def small_model(mechanism, path):
    """An untrained model through its file; no parameter is 0 or 1, which could hide that a program omits it."""
    torch.manual_seed(3)
    model = byte_lm.ByteModel(mechanism, layers=2, width=48, heads=3)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    model.save(path)
    return byte_lm.load(path)


@needs_program
@pytest.mark.parametrize("mechanism", byte_lm.MECHANISMS)
def test_logits_of_all_bytes_at_once_of_one_by_one_and_of_cpp(mechanism, tmp_path, one_thread):
    model = small_model(mechanism, tmp_path / "model.safetensors")
    # More than two blocks of 64; of attention more than twice its window, where both drop what they had kept.
    prompt = TEXT[7000 : 7000 + (2 * byte_lm.WINDOW + 40 if mechanism == "attention" else 150)]
    bytes_ = torch.tensor(list(prompt))
    with torch.no_grad():
        whole = model(bytes_[None])[0]
    state = model.start()
    one_by_one = torch.cat([model.step(byte[None], state) for byte in bytes_])
    done = generate(tmp_path / "model.safetensors", "--prompt", prompt.decode(), "--logits", tmp_path / "logits.npy")
    assert done.returncode == 0 and done.stdout == b"", done.stderr
    cpp = np.load(tmp_path / "logits.npy")
    # float32 through two layers, summed in another order: logits of up to 6 differ by 1e-5. The documents promise 1e-4.
    assert whole.abs().max() > 2 and cpp.shape == whole.shape and cpp.dtype == np.float32
    assert (whole - one_by_one).abs().max() < 1e-4
    assert np.abs(whole.numpy() - cpp).max() < 1e-4
    # Later tokens do not change earlier logits.
    with torch.no_grad():
        assert torch.allclose(model(bytes_[None, :70])[0], whole[:70], atol=1e-4)


SCANS = {"selective_scan", "s4d", "h3", "rg_lru", "ssd"}


@needs_program
@pytest.mark.parametrize("mechanism", sorted(set(byte_lm.MECHANISMS) - SCANS))
def test_logits_of_a_folder_that_heed_opens(mechanism, tmp_path, one_thread):
    model = small_model(mechanism, tmp_path / "model.safetensors")
    model.save_folder(tmp_path / "m")
    prompt = list(TEXT[9000 : 9000 + (byte_lm.WINDOW + 40 if mechanism == "attention" else 150)])
    with torch.no_grad():
        whole = model(torch.tensor([prompt]))[0].numpy()
    done = document("generate", tmp_path / "m", "--prompt-ids", ",".join(map(str, prompt)), "--tokens", 12, "--logits",
                    tmp_path / "l.npy")
    logits = np.load(tmp_path / "l.npy")[0]
    assert done["family"] == "heed_byte_lm" and np.abs(whole).max() > 2
    assert np.abs(logits - whole).max() < 1e-4 * np.abs(whole).max()
    # Bytes that are written one by one are the likeliest of Python's whole texts.
    with torch.no_grad():
        all_logits = model(torch.tensor([prompt + done["tokens"][0]]))[0, len(prompt) - 1 : -1].numpy()
    for row, byte in zip(all_logits, done["tokens"][0]):
        assert row[byte] > row.max() - 1e-4 * np.abs(row).max()
    # With a break between them.
    cache = tmp_path / "cache.safetensors"
    first = document("generate", tmp_path / "m", "--prompt-ids", ",".join(map(str, prompt)), "--tokens", 5, "--cache",
                     cache)
    then = document("generate", tmp_path / "m", "--tokens", 7, "--cache", cache)
    assert first["tokens"][0] + then["tokens"][0] == done["tokens"][0]


@needs_program
@pytest.mark.parametrize("mechanism", sorted(SCANS))
def test_scans_are_no_layers_of_a_model(mechanism, tmp_path):
    byte_lm.ByteModel(mechanism, layers=1, width=16, heads=2).save_folder(tmp_path)
    assert f"config.mechanism is '{mechanism}', expected one of" in refused(
        1, "generate", tmp_path, "--prompt-ids", "1")


def test_counts_are_probabilities():
    counts = train.CountModel(b"abracadabra")
    for before in (b"", b"a", b"br", b"zz", b"ra", b"dab"):
        assert sum(counts.probability(before, byte) for byte in range(256)) == pytest.approx(1)
    # 11 bytes of 5 kinds; after a: b c d b, of 3 kinds; after ra: c alone.
    zero = (5 + 5 / 256) / 16
    assert counts.probability(b"", ord("a")) == pytest.approx(zero)
    one = (1 + 3 * (1 + 5 / 256) / 16) / 7
    assert counts.probability(b"a", ord("c")) == pytest.approx(one)
    assert counts.probability(b"ra", ord("c")) == pytest.approx((1 + one) / 2)
    assert 2.6 < train.CountModel(TEXT[:END]).bits(TEXT, END) < 2.8


def test_a_mechanism_beats_counting_and_no_mechanism_does_not():
    bar = train.CountModel(TEXT[:END]).bits(TEXT, END)

    def trained(mechanism):
        torch.manual_seed(0)
        model = byte_lm.ByteModel(mechanism, layers=2, width=96, heads=3, dropout=0)
        return train.train(model, TEXT, END, steps=120, batch=8)

    assert trained("hgrn2") < bar - 0.1  # seen: 2.52 of 2.69
    assert trained("none") > bar


@needs_program
def test_training_writes_a_file_from_which_the_program_writes_text(tmp_path):
    path = tmp_path / "m/model.safetensors"
    done = fresh.python(FOLDER / "train.py", "--mechanism", "simple_gla", "--steps", "3", "--out", path.parent)
    assert done.returncode == 1, done.stderr  # three steps are not enough, and it says so
    bits = [float(x) for x in re.findall(r"^step +\d+ .* held out (\S+) bits/byte +\d+ bytes/s", done.stdout, re.M)]
    assert len(bits) == 2 and bits[1] < bits[0] < 10
    assert re.search(r"^\d+ bytes/s, one at a time$", done.stdout, re.M)
    assert re.search(rf"^simple_gla: held out {bits[1]:.3f} bits/byte.*NOT below the bar\n\Z", done.stdout, re.M)

    first, again, other = (generate(path, "--prompt", "Why", "--bytes", 50, "--seed", seed) for seed in (1, 1, 2))
    assert first.returncode == 0 and len(first.stdout) == 3 + 50 + 1 and first.stdout.startswith(b"Why")
    assert re.fullmatch(rb"\d+ bytes/s, one at a time\n", first.stderr)
    assert first.stdout == again.stdout != other.stdout
    assert len(document("generate", path.parent, "--prompt-ids", "87,104,121", "--tokens", 9)["tokens"][0]) == 9


def test_the_state_is_what_the_next_byte_needs(one_thread):
    def bytes_of(mechanism):
        return train.state_bytes(byte_lm.ByteModel(mechanism, layers=2, width=48, heads=3).eval())

    assert bytes_of("none") == 0
    assert bytes_of("attention") == 2 * 4 * 3 * byte_lm.WINDOW * (32 + 16)  # keys and values of the window
    assert bytes_of("gla") == 2 * 4 * 3 * 32 * 16
    assert bytes_of("selective_scan") == 2 * 4 * 48 * (16 + 3)  # and the tail of the convolution


@needs_program
def test_a_row_of_the_table_has_what_training_and_cpp_came_to(tmp_path):
    options = argparse.Namespace(seed=0, steps=2, untimed=False)
    row = train.row_of("simple_gla", TEXT[:40000], 39000, options, tmp_path / "model.safetensors")
    assert row["mechanism"] == "simple_gla" and 4 < row["bits"] < 9 and row["state_bytes"] == 3 * 4 * 4 * 32 * 32
    assert row["weights"] == sum(x.size for x in load(tmp_path / "model.safetensors")[0].values())
    assert min(row["train_seconds"], row["train_per_second"], row["cpp_per_second"], row["threads"]) > 0 and row["cpu"]
    times = ("train_seconds", "train_per_second", "cpp_per_second", "cpu", "threads")
    untimed = train.row_of("simple_gla", TEXT[:40000], 39000, argparse.Namespace(seed=0, steps=2, untimed=True),
                           tmp_path / "m.safetensors")
    assert {untimed[key] for key in times} == {None} and untimed["bits"] == pytest.approx(row["bits"], abs=0.01)


@needs_program
def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    small_model("gla", path)
    good, metadata = load(path)

    def refused(message, change=None, **text):
        tensors = {name: ("F32", x) for name, x in good.items()}
        tensors.update(change or {})
        save(path, {name: x for name, x in tensors.items() if x is not None}, {**metadata, **text} if metadata else {})
        done = generate(path, "--bytes", 1)
        assert done.returncode == 1 and done.stdout == b""
        assert re.fullmatch(rf"example_byte_lm: [^\n]*{message}[^\n]*\n", done.stderr.decode()), done.stderr

    def filled(*shape):
        return "F32", np.zeros(shape)

    gate = "layers.1.inputs.log_decay.bias"
    refused("no such mechanism", mechanism="softmax")
    refused("heads is '0', expected 1 to 1024", heads="0")
    refused("heads is '3 ', expected 1 to 1024", heads="3 ")
    refused("window is '99999999999999999999'", window="99999999999999999999")
    refused(r"gate\.weight is f32\[48,48\], expected f32\[45,48\]", heads="5")
    refused("log_decay", {gate: None})
    refused(r"log_decay\.bias is f32\[95\], expected f32\[96\]", {gate: filled(95)})
    refused(r"log_decay\.bias is f16\[96\], expected f32\[96\]", {gate: ("F16", np.zeros(96))})
    refused(r"byte\.weight has shape \[256\], expected a matrix", {"byte.weight": filled(256)})
    refused(r"byte\.weight has shape \[256,0\], expected a matrix", {"byte.weight": filled(256, 0)})
    refused(r"byte\.weight is f32\[255,48\], expected f32\[256,48\]", {"byte.weight": filled(255, 48)})
    refused("channels per head", {"layers.0.gate.weight": filled(2, 48)})
    # A file of a megabyte that asks for a state of many.
    wide = {f"layers.0.inputs.{name}.weight": filled(3 * 2000, 48) for name in "qk"}
    refused("larger than 4 MiB", wide, mechanism="based")
    metadata = {}
    refused("no metadata 'mechanism'")
    path.write_bytes(struct.pack("<Q", 2**40) + json.dumps({}).encode())
    assert generate(path).returncode == 1

    for arguments in ([], [path, "--bytes"], [path, "--nonsense", "1"], [path, "--bytes", "-1"],
                      [path, "--prompt", ""]):
        done = generate(*arguments)
        assert done.returncode == 1 and done.stdout == b"" and done.stderr.count(b"\n") == 1
