# Tests of the program `heed` on files that are wrong or cannot be written, and on its standard streams.
import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_program import HEED, VERBS, document, load, needs_program, qkv, random, refused, save

pytestmark = needs_program


@pytest.fixture
def file(tmp_path):
    return save(tmp_path / "x.safetensors", qkv())


# Files that are wrong.

@pytest.mark.parametrize("change, expected", [
    ({"k": ("F32", random(1, 19, 3, 8))}, "v has shape"),
    ({"k": ("F32", random(1, 19, 3, 8)), "v": ("F32", random(1, 19, 3, 8))},
     "q has shape [1,19,4,8], expected a multiple"),
    ({"k": ("F32", random(1, 19, 2, 9))}, "k has shape [1,19,2,9], expected a last axis of 8"),
    ({"v": ("F32", random(1, 18, 2, 8))}, "v has shape [1,18,2,8], expected 19 tokens and 2 heads"),
    ({"v": ("F32", random(2, 19, 2, 8))}, "v has shape [2,19,2,8], expected a batch of 1"),
    ({"v": ("F64", random(1, 19, 2, 8))}, "v has dtype f64, expected f32"),
    ({"v": ("F32", random(19, 2, 8))}, "v has shape [19,2,8], expected rank 4"),
    ({"q": ("F32", random(19, 8))}, "q has shape [19,8], expected [B,T,H,D] or [T,H,D]"),
    ({"q": ("F32", random(1, 1, 19, 4, 8))}, "expected [B,T,H,D] or [T,H,D]"),
    ({"q": ("I32", random(1, 19, 4, 8))}, "q has dtype i32, expected f64, f32, bf16 or f16"),
    ({"q": ("F32", random(1, 19, 4, 0)), "k": ("F32", random(1, 19, 2, 0))}, "q has shape [1,19,4,0], expected"),
    ({"q": None}, "holds k, v, expected q, k and v, or layers such as layers.0.q"),
    ({"q": None, "k": None, "v": None}, "holds no tensors, expected"),
])
@pytest.mark.parametrize("verb", ["run", "compare", "view"])
def test_wrong_tensors(tmp_path, verb, change, expected):
    tensors = {name: x for name, x in (qkv() | change).items() if x is not None}
    file = save(tmp_path / "x.safetensors", tensors)
    line = refused(1, verb, *VERBS[verb], file)
    assert line.startswith(f"heed: {file}: ") and expected in line


@pytest.mark.parametrize("verb", ["run", "compare", "view"])
def test_a_text_file_is_called_what_it_is_not(tmp_path, verb):
    (tmp_path / "x.safetensors").write_text("a file of words, a few lines long\n" * 9)
    line = refused(1, verb, *VERBS[verb], tmp_path / "x.safetensors")
    assert line == f"heed: {tmp_path}/x.safetensors: not a safetensors or npy file, expected a safetensors file\n"
    np.save(tmp_path / "q.npy", random(1, 19, 4, 8))
    assert "q.npy: is an npy file, expected a safetensors file" in refused(1, verb, *VERBS[verb], tmp_path / "q.npy")


def hostile(good):
    """{name: bytes}: what a file must not be."""
    (n,) = struct.unpack("<Q", good[:8])
    head, data = good[8:8 + n], good[8 + n:]

    def with_header(text):
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        return struct.pack("<Q", len(text)) + text + data

    header = json.loads(head)
    q = header["q"]
    huge = 2 ** 62
    return {
        "empty": b"", "short": good[:7], "no_header": good[:8], "half": good[:len(good) // 2], "cut": good[:-1],
        "longer": good + b"x", "huge_header": struct.pack("<Q", 2 ** 63) + good[8:],
        "header_beyond": struct.pack("<Q", len(good)) + good[8:], "not_json": with_header(b"{" * 16),
        "deep": with_header(b"[" * 100000), "array": with_header([]), "not_utf8": with_header(b'{"\xff": 1}'),
        "negative": with_header(header | {"q": q | {"shape": [-1, 19, 4, 8]}}),
        "overflow": with_header(header | {"q": q | {"shape": [huge, huge, 4, 8]}}),
        "outside": with_header(header | {"q": q | {"data_offsets": [0, huge]}}),
        "backwards": with_header(header | {"q": q | {"data_offsets": [8, 0]}}),
        "wrong_size": with_header(header | {"q": q | {"shape": [1, 19, 4, 7]}}),
        "no_dtype": with_header(header | {"q": {"shape": [1], "data_offsets": [0, 4]}}),
        "odd_dtype": with_header(header | {"q": q | {"dtype": "F3"}}),
        "metadata": with_header(header | {"__metadata__": {"scale": 1}}),
        "text": b"once upon a time" * 10, "zeros": bytes(4096),
    }


@pytest.mark.parametrize("verb", ["run", "compare", "view"])
def test_hostile_safetensors(tmp_path, verb, file):
    for name, data in hostile(Path(file).read_bytes()).items():
        bad = tmp_path / f"{name}.safetensors"
        bad.write_bytes(data)
        line = refused(1, verb, *VERBS[verb], bad)
        assert line.startswith(f"heed: {bad}: "), name
        assert len(line) < 600, name


def test_hostile_npy(tmp_path):
    np.save(tmp_path / "good.npy", random(1, 5, 2, 4).astype(np.float32))
    good = (tmp_path / "good.npy").read_bytes()
    args = ["--q", tmp_path / "bad.npy", "--k", tmp_path / "good.npy", "--v", tmp_path / "good.npy"]
    for data in (b"", good[:5], good[:60], good[:-1], good + b"x", b"PK" + good[2:], good.replace(b"<f4", b">f4"),
                 good.replace(b"<f4", b"|O8"), good.replace(b"(1, 5,", b"(9, 5,"), good.replace(b"(1, 5,", b"(-1,5,")):
        (tmp_path / "bad.npy").write_bytes(data)
        assert refused(1, "run", "attention", *args).startswith(f"heed: {tmp_path / 'bad.npy'}: ")


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path, tmp_path / "x" / "y.safetensors"):
        assert refused(1, "run", "attention", path).startswith(f"heed: {path}: ")
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in refused(1, "run", "attention", tmp_path / "fifo")


def test_a_name_with_a_line_break_stays_one_line(tmp_path):
    refused(1, "run", "attention", tmp_path / "a\nb\x1b[31m")


def test_a_name_that_is_not_utf8(file):
    bad = os.fsencode(file.parent) + b"/\xff.safetensors"
    Path(os.fsdecode(bad)).write_bytes(Path(file).read_bytes())
    done = subprocess.run([HEED, "run", "attention", bad, "--json"], check=False, capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout.decode())["file"].endswith(".safetensors")


# Output files.

@pytest.mark.parametrize("out", ["o.txt", "o", "o.safetensors.bak"])
def test_output_name(file, tmp_path, out):
    assert "-o is" in refused(2, "run", "attention", file, "-o", tmp_path / out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


def test_output_over_the_input(file, tmp_path):
    before = file.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(file)
    for out in (file, tmp_path / "." / "x.safetensors", tmp_path / "link.safetensors"):
        assert "expected another file than the input" in refused(2, "run", "attention", file, "-o", out)
    assert file.read_bytes() == before


def test_no_partial_output(file, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "d.npy").mkdir()
    (folder / "old.npy").write_bytes(b"old")
    for out in (folder / "missing" / "o.npy", folder / "d.npy"):
        assert refused(1, "run", "attention", file, "-o", out).startswith(f"heed: {out}: ")
    refused(1, "run", "attention", tmp_path / "missing.safetensors", "-o", folder / "old.npy")
    refused(2, "run", "attention", file, "-o", folder / "old.npy", "--threads", 0)
    assert sorted(p.name for p in folder.iterdir()) == ["d.npy", "old.npy"]
    assert (folder / "old.npy").read_bytes() == b"old"
    assert list((folder / "d.npy").iterdir()) == []


def test_no_partial_output_on_a_full_disk(file, tmp_path):
    import resource

    def small_files():
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    out = tmp_path / "o.safetensors"
    assert refused(1, "run", "attention", file, "-o", out, preexec_fn=small_files).startswith(f"heed: {out}: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


def test_output_replaces_an_old_file(file, tmp_path):
    out = tmp_path / "o.npy"
    out.write_bytes(b"old")
    document("run", "attention", file, "-o", out)
    assert np.load(out).shape == (1, 19, 4, 8)


# Standard streams.

def test_closed_and_full_standard_output(file, tmp_path):
    out = tmp_path / "o.safetensors"
    for redirect in (">&-", "> /dev/full"):
        done = subprocess.run(["bash", "-c", f'"$0" run attention "$1" -o "$2" {redirect}', HEED, file, out],
                              check=False, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("heed: stdout: cannot write") and done.stderr.count("\n") == 1
        assert set(load(out)[0]) == {"o", "lse"}  # and not the report


def test_a_reader_that_leaves(file):
    read, write = os.pipe()
    os.close(read)
    for verb in (["list"], ["run", "attention", file]):
        done = subprocess.run([HEED, *verb], check=False, stdout=write, stderr=subprocess.PIPE, text=True)
        assert done.returncode in (1, -13) and done.stderr.count("\n") <= 1
    os.close(write)
