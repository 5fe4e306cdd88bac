# Helpers for tests of the program `heed`: they run it, read its output and compute the expected one.
"""The program is $HEED_BIN, else build/release/bin/heed. Without it its tests are skipped."""

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
HEED = Path(os.environ.get("HEED_BIN", ROOT / "build/release/bin/heed")).resolve()
SHIPPED = ROOT / "data/minilm_alice.safetensors"
VERBS = {"list": [], "info": [], "run": ["attention"], "compare": [], "advise": [],
         "view": ["--html", "/missing/view.html"], "verify": [], "bench": [],
         # Both verbs take --json as well.
         "generate": ["/missing/model", "--prompt-ids", "1"], "embed": ["/missing/model", "--ids", "/missing/ids"]}

needs_program = pytest.mark.skipif(not HEED.exists(), reason=f"no program at {HEED}")

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "I64": np.int64}


def heed(*args, env=None, **kwargs):
    """The finished process."""
    return subprocess.run([HEED, *map(str, args)], check=False, capture_output=True, timeout=300, text=True,
                          env={**os.environ, **(env or {})}, **kwargs)


def document(*args, **kwargs):
    """The JSON of a run that must succeed; standard output holds it and nothing else, standard error nothing."""
    done = heed(*args, "--json", **kwargs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def refused(status, *args, **kwargs):
    """The line of a run that must fail: one line on standard error, nothing on standard output."""
    done = heed(*args, **kwargs)
    assert done.returncode == status, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("heed: ") and done.stderr.endswith("\n")
    assert done.stderr.count("\n") == 1
    return done.stderr


def save(path, tensors, metadata=None):
    """A .safetensors file of {name: (dtype, array)}."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array.astype(DTYPES[dtype])).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def load(path):
    """{name: array} of a .safetensors file, and its metadata."""
    raw = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + n])
    metadata = header.pop("__metadata__", {})
    return {name: np.frombuffer(raw[8 + n:][slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
            for name, t in header.items()}, metadata


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def qkv(B=1, T=19, H=4, Hkv=2, D=8, dtype="F32", prefix="", Tk=None, Dv=None):
    Tk, Dv = Tk or T, Dv or D
    return {prefix + "q": (dtype, random(B, T, H, D, seed=1)), prefix + "k": (dtype, random(B, Tk, Hkv, D, seed=2)),
            prefix + "v": (dtype, random(B, Tk, Hkv, Dv, seed=3))}


def attention(q, k, v, causal=False, scale=None, softcap=0, window=(-1, -1), pattern=None):
    """Exact attention in float64, [B, T, H, D]."""
    G = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), G, axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    Tq, Tk = s.shape[-2:]
    i, j = np.arange(Tq)[:, None] + Tk - Tq, np.arange(Tk)[None]
    keep = (j <= i) if causal else np.ones((Tq, Tk), bool)
    keep = keep if pattern is None else keep & pattern(i, j)
    keep = keep & ((window[0] < 0) | (j >= i - window[0])) & ((window[1] < 0) | (j <= i + window[1]))
    p = np.where(keep, np.exp(s - s.max(-1, keepdims=True)), 0)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhij,bjhd->bihd", p, v)
