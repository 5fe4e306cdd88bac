# heed.explain: the kernel that would run and its cost, from shapes or arrays.
import json

import forms
import numpy as np
import pytest
import scans
from mechanisms import CONSTANT, NAMES, arguments

import heed

KEYS = ["kernel", "target", "why", "flops", "bytes", "workspace_bytes", "visited_pairs", "invariant", "copies"]
SHAPES = {"q": (2, 512, 8, 64), "k": (2, 512, 4, 64), "v": (2, 512, 4, 32)}


def test_keys_and_types():
    report = heed.explain("attention", **SHAPES)
    assert list(report) == KEYS
    types = {key: type(value) for key, value in report.items()}
    assert types == {"kernel": str, "target": str, "why": str, "flops": int, "bytes": int, "workspace_bytes": int,
                     "visited_pairs": int, "invariant": bool, "copies": list}
    json.dumps(report)
    assert report["kernel"] and report["target"] and report["why"] and report["copies"] == []


def test_counts():
    report = heed.explain("attention", **SHAPES)
    pairs = 2 * 8 * 512 * 512
    assert report["visited_pairs"] == pairs
    assert report["flops"] == 2 * (64 + 32) * pairs
    assert report["bytes"] == 4 * sum(np.prod(shape) for shape in [*SHAPES.values(), (2, 512, 8, 32)])
    doubles = heed.explain("attention", dtype="f64", **SHAPES)
    assert doubles["bytes"] == 2 * report["bytes"]


def test_masked_pairs_are_not_visited():
    full = heed.explain("attention", **SHAPES)["visited_pairs"]
    causal = heed.explain("attention", causal=True, **SHAPES)
    kept = 2 * 8 * 512 * 513 // 2
    assert kept <= causal["visited_pairs"] < 0.7 * full
    assert causal["flops"] == 2 * (64 + 32) * kept
    window = heed.explain("attention", causal=True, window=(15, 0), **SHAPES)
    assert 2 * 8 * 512 * 16 > window["flops"] / (2 * 96) > 0
    assert window["visited_pairs"] < 0.4 * full
    lengths = heed.explain("attention", key_lengths=[512, 0], **SHAPES)
    assert lengths["flops"] == 2 * (64 + 32) * full // 2


def test_q_alone_is_self_attention():
    q = (1, 512, 8, 64)
    assert heed.explain("attention", q=q) == heed.explain("attention", q=q, k=q, v=q)


def test_arrays_and_shapes_say_the_same():
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert heed.explain("attention", causal=True, **arrays) == heed.explain("attention", causal=True, **SHAPES)
    mixed = {**arrays, "k": SHAPES["k"]}
    assert heed.explain("attention", **mixed) == heed.explain("attention", **SHAPES)


def test_every_option_of_attention_is_one_of_explain():
    report = heed.explain(
        "attention", **SHAPES, scale=1.0, causal=True, align="top_left", window=(100, 0), sink_tokens=4, prefix=(2,),
        chunk=256, segments=((2, 512), (2, 512)), key_lengths=(2,), key_starts=(2,), query_lengths=(2,),
        mask=(1, 1, 512, 512), bias=(8, 1, 512), alibi=(8,), softcap=5.0, sinks=(8,), log_decay=(2, 512, 8),
        relative_bias=(8, 100), dropout=0.1, seed=1, dropout_offset=2, precision="high", invariant=True,
        return_lse=True, out=(2, 512, 8, 32), threads=2)
    assert report["invariant"]
    assert heed.explain("attention", q=(2, 9, 1, 4), segments=(2, 9))["visited_pairs"] > 0
    assert heed.explain("attention", q=(9, 1, 4), cu_seqlens_q=[0, 4, 9])["flops"] == 2 * 8 * (16 + 25)


def test_copies_are_named():
    q = np.zeros((1, 8, 16, 4), np.float32)
    turned = q.swapaxes(2, 3)
    report = heed.explain("attention", q=turned, k=turned.copy(), v=turned, key_lengths=np.array([8, 0])[::2],
                          bias=np.zeros((8, 8)).T)
    assert report["copies"] == ["q", "v", "bias"]
    moved = q.transpose(0, 2, 1, 3)
    assert heed.explain("attention", q=moved)["copies"] == []
    mask = np.broadcast_to(np.ones((8, 1), bool), (8, 8))
    assert heed.explain("attention", q=q, mask=mask)["copies"] == []


def test_threads_and_dtype_are_told_apart():
    assert heed.explain("attention", threads=3, **SHAPES)["workspace_bytes"] >= heed.explain(
        "attention", threads=1, **SHAPES)["workspace_bytes"]


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("attentoin", SHAPES, "explain: name is 'attentoin', expected one of .*attention"),
    (3, SHAPES, "explain: name is 3, expected"),
    ("attention", {**SHAPES, "dtype": "i32"}, "explain: dtype is 'i32', expected f64, f32, bf16 or f16"),
    ("attention", {**SHAPES, "dtype": np.float32}, "explain: dtype is .*, expected f64, f32, bf16 or f16"),
    ("attention", {**SHAPES, "threads": 0}, "explain: threads is 0, expected an int from 1 to 4096"),
    ("attention", {**SHAPES, "k": (2, 512, 3, 64)}, r"attention: v has shape \[2,512,4,32\], expected \[2,512,3,32\]"),
    ("attention", {**SHAPES, "q": (2, 512, 64)}, r"attention: q has shape \[2,512,64\], expected \[B, T, Hq, D\]"),
    ("attention", {**SHAPES, "q": (2, -1, 8, 64)}, "attention: q is -1, expected an int of at least 0"),
    ("attention", {**SHAPES, "q": (2, 1.5, 8, 64)}, "attention: q is 1.5, expected an int of at least 0"),
    ("attention", {**SHAPES, "q": (2**31, 2**31, 8, 64)}, r"attention: q .*, expected fewer than 2\^63 bytes"),
    ("attention", {**SHAPES, "q": (1,) * 7}, "attention: q has rank 7, expected at most 6"),
    ("attention", {**SHAPES, "window": (-3, 0)}, r"attention: window\[0\] is -3"),
])
def test_errors(name, arguments, message):
    with pytest.raises(heed.InvalidArgument, match=f"^{message}"):
        heed.explain(name, **arguments)


def test_wrong_calls_are_type_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causl'"):
        heed.explain("attention", causl=True, **SHAPES)
    with pytest.raises(TypeError, match="missing required argument: 'q'"):
        heed.explain("attention")
    with pytest.raises(TypeError):
        heed.explain("attention", "f32", **SHAPES)


LENGTHS = {"lengths": ((2,), [6, 6]), "starts": ((2,), [0, 0]), "cu_seqlens": ((4,), [0, 2, 4, 6])}


def recurrent_calls():
    for name in NAMES:
        yield name, arguments(name, T=6, dtype=np.float32)
    for name in scans.DESCRIPTIONS:
        yield name, scans.arguments(name, T=6, dtype=np.float32)
    x = np.zeros((2, 3, 6), np.float32)
    yield "causal_conv1d", {"x": x, "weight": np.zeros((3, 4), np.float32)}
    q, e = np.zeros((2, 6, 4, 8), np.float32), np.zeros((3, 6), np.float32)
    yield "linformer", {"q": q, "k": q, "v": q, "e": e, "f": e}
    for name in forms.NAMES:
        if name != "attention_residual":  # has no lengths
            yield name, forms.arrays(name, np.float32, T=6)


@pytest.mark.parametrize(("name", "given"), [pytest.param(*call, id=call[0]) for call in recurrent_calls()])
@pytest.mark.parametrize("option", LENGTHS)
def test_lengths_may_be_shapes(name, given, option):
    """Shapes have no values: nothing is skipped, and the sequences of cu_seqlens have equal lengths."""
    shape, numbers = LENGTHS[option]
    if option == "cu_seqlens":
        constant = [key for key, x in given.items() if key in CONSTANT and x.ndim < 3]
        if name in scans.DESCRIPTIONS:
            constant = [key for key, x in given.items() if scans.time_axis(name, key, x) is None]
        given = {key: x[:1] if len(x) == 2 and key not in constant else x for key, x in given.items()}
    for inputs in (given, {key: x.shape for key, x in given.items()}):
        assert heed.explain(name, **inputs, **{option: shape}) == heed.explain(name, **inputs, **{option: numbers})
    with pytest.raises(heed.InvalidArgument, match=f"{option} has shape"):
        heed.explain(name, **given, **{option: (*shape, 1)})


@pytest.mark.parametrize("name, more",
                         [("attention", {}), ("longformer", {"window": 4, "tokens": [0]}), ("attend", {})])
def test_a_precision_without_a_faster_kernel_says_so(name, more):
    q = np.zeros((1, 6, 2, 8), np.float32)
    if name == "attend":
        cache = heed.KVCache(1, 2, 8)
        cache.append(q, q)
        more = {"cache": cache}
    else:
        more = {"k": q, "v": q, **more}
    says = "; precision: 'high' has no faster kernel here"
    assert says not in heed.explain(name, q=q, **more)["why"]
    high = heed.explain(name, q=q, precision="high", **more)
    assert (says in high["why"]) == ("softmax_tiles" not in high["kernel"])
