# Exporters that give no strides, and arrays without memory: every array argument of every function.
import array
import ctypes
import functools
import multiprocessing

import numpy as np
import producers
import pytest
import scans
from mechanisms import DESCRIPTIONS, CONSTANT, NAMES, WITH_STATE, arguments, at_tokens, state_shape

import heed

RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


Q, K, V = normal(2, 6, 4, 8), normal(2, 6, 2, 8), normal(2, 6, 2, 4)
QKV = {"q": Q, "k": K, "v": V}
PACKED = {"q": Q[:1], "k": K[:1], "v": V[:1]}
PAIR, BOUNDS = np.array([3, 6]), np.array([0, 2, 6])
PER_SEQUENCE = {"key_lengths": PAIR, "key_starts": np.array([0, 1]), "query_lengths": PAIR, "prefix": np.array([1, 2])}
TOKENS = {"lengths": PAIR, "starts": np.array([0, 1])}
O, LSE = heed.attention(**QKV, return_lse=True)
X, WEIGHT = normal(2, 8, 6), normal(8, 4)
LINEAR = {"q": Q, "k": normal(2, 6, 4, 8), "v": normal(2, 6, 4, 8), "e": normal(3, 6), "f": normal(3, 6)}


def new_cache(kind):
    if kind == "latent":
        return heed.LatentKVCache(2, 8, 0)
    if kind == "ring":
        return heed.RingKVCache(2, 2, 8, 4, window=9)
    options = {"int8": {"quantize": "int8"}, "rotary": {"rotary": {"interleaved": False}}}
    return heed.KVCache(2, 2, 8, 4, **options.get(kind, {}))


def with_cache(kind, method, rows=True):
    """A method of a new cache, which has rows: what it returns, and what the cache is like after it."""
    def call(**keywords):
        cache = new_cache(kind)
        if rows:
            cache.append(*(K[:, :, 0],) if kind == "latent" else (K, V))
        result = getattr(cache, method)(**keywords)
        return result, cache.lengths, cache.attend(Q[:, :1], scale=1.0)
    return call


def of_states(name, suffix="", key="initial_state", **given):
    """A call of a scan where each array of a state is an argument of its own."""
    state = scans.state_of(name, np.float32)
    fields = getattr(state, "_fields", (key,))

    def call(**keywords):
        arrays = iter([keywords.pop(field) for field in fields])
        return scans.call(name, keywords, suffix=suffix, **{key: scans.of_each(lambda _: next(arrays), state)})

    return name + suffix, given | dict(zip(fields, scans.arrays_of(state))), call


def recurrences():
    for name in NAMES:
        values = arguments(name, B=2, T=6)
        of_values = next(x.shape for key, x in values.items() if key in ("v", "i", "x"))
        several_reads = ", R, " in DESCRIPTIONS[name]["axes"].get("k", "")
        shape = (2, 6, *of_values[2 if DESCRIPTIONS[name]["channels"] or several_reads else -2 :])
        do = RNG.standard_normal(shape)
        yield name, {**values, **TOKENS}
        yield name, {**values, "out": np.zeros(shape)}
        packed = {key: x if len(x) != 2 or key in CONSTANT else x[:1] for key, x in values.items()}
        yield name, {**packed, "cu_seqlens": BOUNDS}
        yield name + "_backward", {"do": do, **values}
        if name in WITH_STATE and name not in ("linear_attention", "based"):
            state = RNG.standard_normal(state_shape(name))
            yield name, {**values, "initial_state": state}
            yield name + "_step", {**at_tokens(values, 0), "state": state}


def calls():
    """(name, keyword arguments) of functions of heed; another function is third."""
    yield "attention", {**QKV, **PER_SEQUENCE, "align": np.array([0, 1]), "bias": normal(4, 6, 6),
                        "mask": RNG.random((2, 1, 6, 6)) < 0.8, "alibi": normal(4), "sinks": normal(4)}
    yield "attention", {**QKV, "segments": np.array([[0] * 6, [0, 0, 0, 1, 1, 1]]), "out": np.zeros_like(O)}
    yield "attention", {**PACKED, "cu_seqlens_q": BOUNDS, "cu_seqlens_k": np.array([0, 3, 6])}
    yield "attention_backward", {"do": normal(*O.shape), **QKV, "o": O, "lse": LSE, "dlse": normal(*LSE.shape)}
    yield "attention_weights", {"q": Q, "k": K, "lse": LSE, "rows": np.array([1]), "heads": np.array([2])}
    yield "attention_map", {"q": Q, "k": K}
    yield ("merge_attention", {"o": O, "lse": LSE, "sinks": normal(4)},
           lambda o, lse, sinks: heed.merge_attention([(o, lse), (O, LSE)], sinks=sinks))
    yield "causal_conv1d", {"x": X, "weight": WEIGHT, "bias": normal(8), "initial_state": normal(2, 8, 3), **TOKENS}
    yield "causal_conv1d", {"x": X[:1], "weight": WEIGHT, "cu_seqlens": BOUNDS, "out": np.zeros_like(X[:1])}
    yield "causal_conv1d_backward", {"do": X, "x": X, "weight": WEIGHT, "bias": normal(8)}
    yield "causal_conv1d_step", {"x": X[..., 0], "weight": WEIGHT, "bias": normal(8), "state": normal(2, 8, 3)}
    for name in scans.NAMES:
        values = scans.arguments(name, T=6, dtype=np.float32)
        do = np.ones_like(next(iter(values.values())))
        yield of_states(name, **values, **TOKENS)
        yield name + "_backward", {"do": do, **values}
        yield of_states(name, "_step", "state", **scans.at_tokens(name, values, 0))
    for name in scans.STATELESS:
        values = scans.arguments(name, T=6, dtype=np.float32)
        yield name, {**values, **TOKENS}
        yield name + "_backward", {"do": np.ones_like(next(iter(values.values()))), **values}
    yield "linformer", {**LINEAR, **TOKENS}
    yield "linformer", {key: x[:1] if x.ndim == 4 else x for key, x in LINEAR.items()} | {"cu_seqlens": BOUNDS}
    yield "linformer_backward", {"do": normal(2, 6, 4, 8), **LINEAR}
    own = {name: normal(*x.shape) for name, x in zip(("qg", "kg", "vg"), QKV.values())}
    yield ("longformer", {**QKV, **own, "tokens": np.array([[0], [4]]), "key_lengths": PAIR,
                          "key_starts": np.array([0, 1]), "query_lengths": PAIR, "out": np.zeros_like(O)},
           functools.partial(heed.longformer, window=2))
    yield ("longformer", {**PACKED, "tokens": np.array([1]), "cu_seqlens_q": BOUNDS},
           functools.partial(heed.longformer, window=2))
    yield "longformer_backward", {"do": normal(*O.shape), **QKV, **own, "tokens": np.array([0])}, functools.partial(
        heed.longformer_backward, window=2)
    yield "merge_linear", {"o": O, "lse": LSE, "num": normal(*O.shape), "den": np.ones(O.shape[:3], np.float32),
                           "gate": normal(4)}
    levels = {"q": normal(2, 6, 2, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 4, 8),
              "level_scales": normal(2, 6, 4, 5)}
    yield "log_linear_attention", levels
    yield "log_linear_attention_backward", {"do": normal(2, 6, 4, 8), **levels}
    mesa = {"q": normal(2, 6, 2, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 5), "beta": np.abs(normal(2, 6, 2)),
            "lamb": np.ones((2, 8), np.float32)}
    yield "mesa", mesa
    yield "mesa_backward", {"do": normal(2, 6, 2, 5), **mesa}
    ttt = {"q": normal(2, 6, 2, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 8),
           "weight": np.ones((2, 8), np.float32), "bias": normal(2, 8), "eta": np.abs(normal(2, 6, 2)),
           "lr": np.abs(normal(2, 6, 2))}
    yield "ttt_linear", ttt
    yield "ttt_linear_backward", {"do": normal(2, 6, 2, 8), **ttt}
    titans = {name: ttt[name] for name in ("q", "k", "v", "weight", "bias")}
    titans |= {name: np.abs(normal(2, 6, 2)) for name in ("theta", "alpha", "eta")}
    yield "titans", titans
    yield "titans_backward", {"do": normal(2, 6, 2, 8), **titans}
    path = {"q": normal(2, 6, 4, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 5), "w": normal(2, 6, 2, 8),
            "beta": np.abs(normal(2, 6, 2)), "log_forget": -np.abs(normal(2, 6, 4))}
    yield "path_attention", path
    yield "path_attention_backward", {"do": normal(2, 6, 4, 5), **path, "o": normal(2, 6, 4, 5),
                                      "lse": normal(2, 4, 6)}
    wall = {"q": normal(2, 6, 4, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 5),
            "log_decay": -np.abs(normal(2, 6, 4, 8)), "log_forget": -np.abs(normal(2, 6, 4))}
    yield "wall_attention", wall
    yield "wall_attention_backward", {"do": normal(2, 6, 4, 5), **wall, "o": normal(2, 6, 4, 5),
                                      "lse": normal(2, 4, 6)}
    deltaformer = {"q": normal(2, 6, 4, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 5),
                   "beta": np.abs(normal(2, 6, 2)), "w": normal(2, 6, 2, 8)}
    yield "deltaformer", deltaformer
    yield "deltaformer_backward", {"do": normal(2, 6, 4, 5), **deltaformer, "o": normal(2, 6, 4, 5),
                                   "u": normal(2, 6, 2, 5), "lse": normal(2, 4, 6)}
    parallax = {"q": normal(2, 6, 4, 8), "r": normal(2, 6, 4, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 5)}
    yield "parallax_attention", parallax
    yield "parallax_attention_backward", {"do": normal(2, 6, 4, 5), **parallax, "o": normal(2, 6, 4, 5),
                                          "m": normal(2, 6, 4, 5), "a": normal(2, 4, 6), "lse": normal(2, 4, 6)}
    residuals = {"query": normal(8), "residuals": normal(3, 2, 6, 8), "weight": normal(8)}
    yield "attention_residual", residuals
    yield "attention_residual_backward", {"do": normal(2, 6, 8), **residuals}
    yield "merge_linear_backward", {"do": O, "o": O, "lse": LSE, "num": O, "den": np.ones(O.shape[:3], np.float32)}
    compressed = {**QKV, "k_cmp": normal(2, 3, 2, 8), "v_cmp": normal(2, 3, 2, 4), "sinks": normal(4),
                  "chosen": np.full((2, 6, 2), -1), **TOKENS}
    yield ("compressed_attention", {**compressed, "out": np.zeros_like(O)},
           functools.partial(heed.compressed_attention, ratio=2, window=2))
    yield ("compressed_attention_backward", {"do": normal(*O.shape), **compressed},
           functools.partial(heed.compressed_attention_backward, ratio=2, window=2))
    nsa = functools.partial(heed.nsa, block=2, count=3, window=2)
    compressed = {"k_cmp": normal(2, 3, 2, 8), "v_cmp": normal(2, 3, 2, 4)}
    yield "nsa", {**QKV, "gates": normal(2, 6, 4, 3), "out": np.zeros_like(O)}, nsa
    yield ("nsa", {**QKV, "gates": normal(2, 6, 4, 3), **compressed},
           lambda k_cmp, v_cmp, **arrays: nsa(**arrays, compressed=(k_cmp, v_cmp)))
    yield ("nsa_backward", {"do": normal(*O.shape), **QKV, "gates": normal(2, 6, 4, 3), **compressed},
           lambda k_cmp, v_cmp, **arrays: heed.nsa_backward(**arrays, block=2, count=3, window=2,
                                                            compressed=(k_cmp, v_cmp)))
    yield "rotary", {"x": Q, "positions": np.arange(6)}, functools.partial(heed.rotary, interleaved=True)
    bias = {"Tq": 3, "Tk": 4, "bidirectional": True}
    yield "t5_bias", {"table": normal(32, 2)}, functools.partial(heed.t5_bias, **bias)
    yield "t5_bias_backward", {"dbias": normal(2, 3, 4)}, functools.partial(heed.t5_bias_backward, buckets=32, **bias)
    yield from recurrences()
    for kind in ("kv", "int8", "rotary", "ring", "latent"):
        rows = {"rows": K[:, :, 0]} if kind == "latent" else {"k": K, "v": V}
        yield f"append to {kind}", {**rows, "lengths": PAIR}, with_cache(kind, "append", rows=False)
        yield f"trim {kind}", {"lengths": PAIR}, with_cache(kind, "trim")
        yield f"reorder {kind}", {"indices": np.array([1, 0])}, with_cache(kind, "reorder")
        attend = functools.partial(with_cache(kind, "attend"), scale=1.0)
        out = np.zeros((2, 6, 4, 8 if kind == "latent" else 4), np.float32)
        yield f"attend to {kind}", {"q": Q, "sinks": normal(4), "out": out}, attend
        if kind in ("kv", "int8", "latent"):
            yield f"attend to {kind}", {"q": Q, "tree": np.arange(6) - 1}, attend
    tables = {"indptr": BOUNDS // 2, "indices": np.array([1, 0, 1]), "last_page_len": PAIR}
    yield ("import_pages", {"k_pool": K, "v_pool": V, **tables},
           lambda **tables: heed.KVCache.import_pages(**tables).attend(Q))


CASES = [pytest.param(*function or [getattr(heed, name)], keywords, argument, id=f"{i}: {name}({argument})")
         for i, (name, keywords, *function) in enumerate(calls()) for argument in keywords]


def flat(result):
    """The arrays of a result."""
    if isinstance(result, tuple):
        return [x for part in result for x in flat(part)]
    return [] if result is None else [result]


@pytest.mark.parametrize(("function", "keywords", "argument"), CASES)
def test_strides_may_be_left_out(function, keywords, argument):
    plain = {key: np.array(x) for key, x in keywords.items()}
    expected = [np.array(x) for x in flat(function(**plain))]
    given = {key: np.array(x) for key, x in keywords.items()}
    given[argument] = np.ctypeslib.as_ctypes(given[argument].copy())
    for x, y in zip(flat(function(**given)), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).reshape(y.shape), y)


@pytest.mark.parametrize(("function", "keywords", "argument"), CASES)
def test_an_array_without_memory_is_refused(function, keywords, argument):
    given = {key: np.array(x) for key, x in keywords.items()}
    given[argument] = producers.Versioned(keywords[argument], null=True)
    with pytest.raises(heed.InvalidArgument, match="has no data"):
        function(**given)


def test_memory_that_processes_share():
    raw = multiprocessing.RawArray(ctypes.c_float, 4)
    raw[:] = [1, 2, 3, 4]
    np.testing.assert_array_equal(heed.attention(**QKV, sinks=raw), heed.attention(**QKV, sinks=array.array("f", raw)))


def test_zeros_of_torch_without_memory_are_refused():
    torch = pytest.importorskip("torch", reason="optional: interoperation with PyTorch")
    zeros = torch._efficientzerotensor(3, 6, 4, 8)
    heed_torch = pytest.importorskip("heed.torch")
    caches = [heed.KVCache(2, 4, 8), heed_torch.KVCache(2, 4, 8)]
    for x in (zeros[:2], zeros[1:]):  # the address of the second is its offset
        with pytest.raises(heed.InvalidArgument, match="attention: q has no data"):
            heed.attention(x, Q, Q)
        for cache in caches:
            with pytest.raises(heed.InvalidArgument, match="append: k has no data"):
                cache.append(x, torch.from_numpy(Q))
            assert cache.lengths.tolist() == [0, 0]
