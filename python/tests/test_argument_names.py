# Each argument of each function is made invalid by itself: the message names function and argument as signatures do.
"""Calls that work come from the table of mechanisms that the module exports, and for other functions from CALLS. In
each, one argument after the other gets another type, rank, dtype or size."""

import inspect
import re

import numpy as np
import pytest
import torch

import heed
import heed.torch
from heed import _core

P = heed.patterns
ERRORS = (heed.InvalidArgument, heed.Unsupported)
# Functions without arguments to test, and functions that take tensors of any rank.
WITHOUT, ANY_RANK = {"get_num_threads", "provider_stats", "replace_sdpa"}, {"scaled_dot_product_attention"}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*shape):
    return np.zeros(shape, np.int64)


# --- calls that work -------------------------------------------------------------------------------------------------

SIZES = {"T": 5, "H": 2, "HV": 4, "K": 3, "V": 6, "C": 8, "D": 8, "G": 2, "N": 4, "L": 3, "W": 4, "M": 7, "n": 3,
         "d": 4, "2": 2, "R": 2, "P": 1}


def calls_of(name):
    """{function: calls} of a mechanism and its passes."""
    of = _core._mechanisms[name]
    settings = {"causal": True} if "causal" in of["settings"] else {}

    def inputs(batch, left_out=""):
        shapes = {x: [a for a in of["axes"][x].split("|")[0].split(", ") if a != left_out] for x in of["inputs"]}
        return {x: np.full([SIZES.get(a, batch) for a in shape], x in of["masks"],
                           bool if x in of["masks"] else np.float32) for x, shape in shapes.items()}

    def outputs(values):
        given = getattr(heed, name)(**values, **settings, **({"return_state": True} if of["states"] else {}))
        return given if of["states"] else (given, None)

    padded, packed = inputs(2), {**inputs(1), "cu_seqlens": [0, 2, 5]}
    (o, state), (packed_o, _) = outputs(padded), outputs(packed)
    padded |= {"lengths": [5, 4], "starts": [0, 1]} | ({"initial_state": state} if of["states"] else {})
    calls = {name: [{**padded, "out": o}, packed],
             f"{name}_backward": [{"do": o, **padded}, {"do": packed_o, **packed}]}
    if of["states"]:
        has_gradient = [x[2] for x in of["states"]]
        d_state = (state._make(x if of_x else None for x, of_x in zip(state, has_gradient)) if len(has_gradient) > 1
                   else state)
        calls[f"{name}_backward"][0]["dstate"] = d_state
        token = o.take(0, of["output_axes"].split(", ").index("T"))
        calls[f"{name}_step"] = [{**inputs(2, left_out="T"), "state": state, "out": token}]
    return {function: [{**call, **settings} for call in of_function] for function, of_function in calls.items()}


QKV = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 9, 2, 8), "v": zeros(2, 9, 2, 5)}
MASKS = {"align": [3, 2], "prefix": [1, 1], "segments": (ints(2, 6), ints(2, 9)), "key_lengths": [9, 8],
         "key_starts": [0, 1], "query_lengths": [6, 5], "mask": np.ones((6, 9), bool), "bias": zeros(6, 9),
         "alibi": zeros(4), "relative_bias": zeros(4, 3), "sinks": zeros(4), "log_decay": zeros(2, 9, 4),
         "causal": True}
DROPOUT = {"dropout": 0.5, "seed": 3}
PACKED = {"q": zeros(6, 4, 8), "k": zeros(9, 2, 8), "v": zeros(9, 2, 5), "cu_seqlens_q": [0, 2, 6],
          "cu_seqlens_k": [0, 4, 9]}
O, LSE = zeros(2, 6, 4, 5), zeros(2, 4, 6)
SELF = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5)}
LONG = SELF | {"qg": SELF["q"], "kg": SELF["k"], "vg": SELF["v"], "window": 2, "tokens": [[0], [1]],
               "key_lengths": [6, 5], "key_starts": [0, 0], "query_lengths": [6, 6]}
GATED = SELF | {"gates": zeros(2, 6, 4, 3), "block": 2, "compressed": (zeros(2, 3, 2, 8), zeros(2, 3, 2, 5)),
                "window": 2, "count": 3}
COMPRESSED = SELF | {"k_cmp": zeros(2, 3, 2, 8), "v_cmp": zeros(2, 3, 2, 5), "ratio": 2, "window": 2,
                     "chosen": np.full((2, 6, 1), -1), "sinks": zeros(4), "start": 0, "lengths": [6, 5],
                     "starts": [0, 1]}
MODES = {"log_dt": zeros(4), "log_A_real": zeros(4, 3), "A_imag": zeros(4, 3), "C": zeros(4, 3, 2)}
LINEAR = {"o": O, "lse": LSE, "num": O, "den": zeros(2, 6, 4), "gate": [0.5] * 4}
LEVELS = {"q": zeros(2, 6, 2, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 4, 5), "level_scales": zeros(2, 6, 4, 5),
          "log_decay": zeros(2, 6, 4), "initial_state": zeros(2, 4, 5, 8, 5), "positions": [1, 2]}
MESA = {"q": zeros(2, 6, 2, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5), "beta": zeros(2, 6, 2),
        "lamb": zeros(2, 8), "log_decay": zeros(2, 6, 2), "iterations": 3, "eps": 0.1,
        "initial_state": zeros(2, 2, 8, 13)}
TTT = {"q": zeros(2, 6, 2, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 8), "weight": zeros(2, 8),
       "bias": zeros(2, 8), "eta": zeros(2, 6, 2), "lr": zeros(2, 6, 2), "mini_batch": 3, "eps": 0.1, "scale": 0.5,
       "residual": "output", "positions": [1, 2], "initial_state": zeros(2, 2, 2, 9, 8)}
TITANS = {name: TTT[name] for name in ("q", "k", "v", "weight", "bias", "mini_batch", "eps", "scale", "positions")} | {
    "theta": zeros(2, 6, 2), "alpha": zeros(2, 6, 2), "eta": zeros(2, 6, 2), "initial_state": zeros(2, 2, 3, 8, 8)}
PATH = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5), "w": zeros(2, 6, 2, 8),
        "beta": zeros(2, 6, 2), "log_forget": zeros(2, 6, 4), "scale": 0.5}
WALL = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5), "log_decay": zeros(2, 6, 4, 8),
        "log_forget": zeros(2, 6, 4), "scale": 0.5}
DELTAFORMER = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5), "beta": zeros(2, 6, 2),
               "w": zeros(2, 6, 2, 8), "scale": 0.5}
PARALLAX = {"q": zeros(2, 6, 4, 8), "r": zeros(2, 6, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 5),
            "scale": 0.5, "window": 3}
RESIDUALS = {"query": zeros(8), "residuals": zeros(3, 2, 5, 8), "weight": zeros(8)}
CALLS = {
    "advise": [{**SELF, "mechanisms": ["attention"], "dtypes": ["f32"]}],
    "alibi_slopes": [{"heads": 4}],
    "attention": [QKV | MASKS | DROPOUT | {"out": O}, PACKED],
    "attention_backward": [{"do": O, **QKV, "o": O, "lse": LSE, "dlse": LSE, **MASKS, **DROPOUT}],
    "attention_map": [{"q": QKV["q"], "k": QKV["k"], **MASKS}],
    "attention_residual": [RESIDUALS | {"return_weights": True}],
    "attention_residual_backward": [{"do": zeros(2, 5, 8), **RESIDUALS}],
    "attention_weights": [{"q": QKV["q"], "k": QKV["k"], "lse": LSE, "rows": [0, 5], "heads": [3], **MASKS}],
    "certified_attention": [QKV | {"align": [3, 2], "key_lengths": [9, 8], "query_lengths": [6, 5], "out": O}],
    "compress": [{"values": zeros(2, 6, 8), "gates": zeros(2, 6, 8), "bias": zeros(2, 8), "ratio": 2}],
    "compressed_attention": [COMPRESSED | {"out": O}],
    "compressed_attention_backward": [{"do": O, **COMPRESSED, "o": O, "lse": LSE, "dlse": LSE}],
    "deltaformer": [DELTAFORMER | {"lengths": [6, 5], "starts": [0, 1], "return_u": True, "return_lse": True}],
    "deltaformer_backward": [{"do": zeros(2, 6, 4, 5), **DELTAFORMER, "o": zeros(2, 6, 4, 5), "u": zeros(2, 6, 2, 5),
                              "lse": zeros(2, 4, 6), "du": zeros(2, 6, 2, 5), "dlse": zeros(2, 4, 6)}],
    "deltaformer_values": [{"u": zeros(2, 6, 2, 5), "k": zeros(2, 6, 2, 8), "v": zeros(2, 1, 2, 5),
                            "beta": zeros(2, 1, 2), "w": zeros(2, 1, 2, 8), "scale": 0.5}],
    "explain": [{"name": "attention", **QKV}],
    "load_cache": [{"path": __file__}],
    "log_linear_attention": [LEVELS | {"lengths": [6, 5], "starts": [0, 1], "return_state": True}],
    "log_linear_attention_backward": [{"do": zeros(2, 6, 4, 5), **LEVELS, "dstate": zeros(2, 4, 5, 8, 5)}],
    "log_linear_attention_step": [{"q": zeros(2, 2, 8), "k": zeros(2, 2, 8), "v": zeros(2, 4, 5),
                                   "level_scales": zeros(2, 4, 5), "state": zeros(2, 4, 5, 8, 5),
                                   "log_decay": zeros(2, 4), "positions": [1, 2]}],
    "longformer": [LONG | DROPOUT | {"out": O}],
    "longformer_backward": [{"do": O, **LONG, "o": O, "lse": LSE, "dlse": LSE}],
    "mesa": [MESA | {"lengths": [6, 5], "starts": [0, 1], "return_state": True, "return_solution": True}],
    "mesa_backward": [{"do": zeros(2, 6, 2, 5), **MESA, "dstate": zeros(2, 2, 8, 13), "solution": zeros(2, 6, 2, 8)}],
    "mesa_step": [{"q": zeros(2, 2, 8), "k": zeros(2, 2, 8), "v": zeros(2, 2, 5), "beta": zeros(2, 2),
                   "lamb": zeros(2, 8), "state": zeros(2, 2, 8, 13), "log_decay": zeros(2, 2), "iterations": 3,
                   "eps": 0.1}],
    "parallax_attention": [PARALLAX | {"lengths": [6, 5], "starts": [0, 1], "return_means": True, "return_lse": True}],
    "parallax_attention_backward": [{"do": zeros(2, 6, 4, 5), **PARALLAX, "o": zeros(2, 6, 4, 5),
                                     "m": zeros(2, 6, 4, 5), "a": zeros(2, 4, 6), "lse": zeros(2, 4, 6),
                                     "dlse": zeros(2, 4, 6)}],
    "path_attention": [PATH | {"lengths": [6, 5], "starts": [0, 1], "return_lse": True}],
    "path_attention_backward": [{"do": zeros(2, 6, 4, 5), **PATH, "o": zeros(2, 6, 4, 5), "lse": zeros(2, 4, 6),
                                 "dlse": zeros(2, 4, 6)}],
    "path_attention_keys": [{"keys": zeros(2, 6, 2, 8), "w": zeros(2, 1, 2, 8), "beta": zeros(2, 1, 2)}],
    "wall_attention": [WALL | {"lengths": [6, 5], "starts": [0, 1], "return_lse": True}],
    "wall_attention_backward": [{"do": zeros(2, 6, 4, 5), **WALL, "o": zeros(2, 6, 4, 5), "lse": zeros(2, 4, 6),
                                 "dlse": zeros(2, 4, 6)}],
    "wall_attention_keys": [{"keys": zeros(2, 6, 4, 8), "log_decay": zeros(2, 1, 4, 8)}],
    "merge_attention": [{"parts": [(O, LSE), (O, LSE)], "sinks": zeros(4)}],
    "merge_linear": [LINEAR],
    "merge_linear_backward": [{"do": O, **LINEAR}],
    "nsa": [GATED | {"out": O}],
    "nsa_backward": [{"do": O, **GATED}],
    "orthogonal_features": [{"m": 2, "d": 2, "seed": 0}],
    "pattern_from_block_mask": [{"block_mask": 0}],
    "rotary": [{"x": zeros(2, 5, 2, 8), "positions": ints(2, 5), "interleaved": True}],
    "s4d_kernel": [MODES | {"length": 5}],
    "s4d_kernel_backward": [{"dkernel": zeros(4, 5), **MODES}],
    "scaled_dot_product_attention": [
        {"query": zeros(2, 4, 6, 8), "key": zeros(2, 4, 9, 8), "value": zeros(2, 4, 9, 5),
         "attn_mask": np.ones((6, 9), bool)}],
    "set_checks": [{"on": False}],
    "set_num_threads": [{"threads": None}],
    "set_strict": [{"on": False}],
    "sinusoidal": [{"T": 3, "D": 4}],
    "t5_bias": [{"table": zeros(8, 4), "Tq": 3, "Tk": 4, "bidirectional": True}],
    "t5_bias_backward": [{"dbias": zeros(4, 3, 4), "Tq": 3, "Tk": 4, "buckets": 8, "bidirectional": True}],
    "titans": [TITANS | {"lengths": [6, 5], "starts": [0, 1], "return_state": True}],
    "titans_backward": [{"do": zeros(2, 6, 2, 8), **TITANS, "dstate": zeros(2, 2, 3, 8, 8)}],
    "titans_step": [{key: x[:, 0] if key in ("q", "k", "v", "theta", "alpha", "eta") else x
                     for key, x in TITANS.items() if key != "initial_state"} | {"state": zeros(2, 2, 3, 8, 8)}],
    "ttt_linear": [TTT | {"lengths": [6, 5], "starts": [0, 1], "return_state": True}],
    "ttt_linear_backward": [{"do": zeros(2, 6, 2, 8), **TTT, "dstate": zeros(2, 2, 2, 9, 8)}],
    "ttt_linear_step": [{key: x[:, 0] if key in ("q", "k", "v", "eta", "lr") else x for key, x in TTT.items()
                         if key != "initial_state"} | {"state": zeros(2, 2, 2, 9, 8)}],
    "view": [{"q": QKV["q"], "k": QKV["k"], "tokens": list("aheedpage"), **MASKS}],
}
for _name in _core._mechanisms:
    CALLS |= calls_of(_name)

BLOCKS = {"q": zeros(2, 6, 4, 8), "k": zeros(2, 9, 2, 8), "align": [3, 2], "key_lengths": [9, 8], "key_starts": [0, 1]}
CHOSEN = {
    "certified": [{"q": QKV["q"], "k": QKV["k"], "align": [3, 2], "key_lengths": [9, 8], "query_lengths": [6, 5]}],
    "cumulative": [BLOCKS],
    "indexer": [{"q_index": zeros(2, 6, 4, 8), "k_index": zeros(2, 9, 8), "weights": zeros(2, 6, 4)}],
    "top_blocks": [BLOCKS | {"count": 2}],
    "vertical_slash": [{"q": QKV["q"], "k": QKV["k"]}],
}
BUILT = {
    "atrous": [{"step": 2}], "bigbird": [{}], "blocks": [{"keep": np.ones((2, 3), bool)}],
    "csr": [{"row_ptr": [0, 1], "columns": [0]}],
    "dilated": [{"reach": 1, "step": 2}], "fixed": [{"block": 2, "summary": 1}], "global_tokens": [{"tokens": [0]}],
    "keys": [{"index": ints(1, 2, 1)}], "longformer": [{"window": 2, "tokens": [0]}],
    "neighborhood": [{"window": 2}], "parse": [{"expression": "atrous(2)"}], "per_head": [{"heads": [P.atrous(2)]}],
    "random_blocks": [{"count": 1}], "row_blocks": [{"index": ints(1, 2, 1)}], "sliding_window": [{"left": 1}],
    "streaming": [{"sinks": 1, "window": 2}], "strided": [{"step": 2}],
}


def of_caches(module, name):
    """The sizes of a new cache, and (cache, {method: call}) of some."""
    kind = getattr(module, name)
    k, v, q, out = zeros(2, 3, 2, 8), zeros(2, 3, 2, 6), zeros(2, 3, 4, 8), zeros(2, 3, 4, 6)
    both, of_all = {"k": k, "v": v, "lengths": [3, 2]}, {"trim": {"lengths": [1, 0]}, "reorder": {"indices": [1, 0]},
                                                         "save": {"path": 0}}
    attends = {"q": q, "key_starts": [0, 0], "alibi": zeros(4), "sinks": zeros(4), "out": out}
    sizes = {"batch": 2, "heads": 2, "dim": 8, "value_dim": 6}
    if name == "KVCache":
        pools = {"k_pool": zeros(2, 4, 2, 8), "v_pool": zeros(2, 4, 2, 6), "indptr": [0, 1, 2], "indices": [0, 1],
                 "last_page_len": [1, 2]}
        made = {"share": {"prefix_cache": kind(1, 2, 8), "batch": 2}, "import_pages": pools}
        return sizes, [
            (kind(2, 2, 8, 6, log_decay_heads=4), of_all | made | {
                "append": both | {"log_decay": zeros(2, 3, 4)}, "attend": attends}),
            (kind(2, 2, 8, 6, quantize="int8"), {"append": both, "quantization_bound": {"q": q}}),
            (kind(2, 2, 8, 6, sketch="int8"),
             {"append": both, "attend": {"q": q, "epsilon": 0.1, "level": "skip", "return_bound": False}}),
        ]
    if name == "RingKVCache":
        return sizes | {"window": 3}, [(kind(2, 2, 8, 6, window=3), of_all | {"append": both, "attend": attends})]
    if name == "LatentKVCache":
        calls = {"append": {"rows": k[:, :, 0], "lengths": [3, 2]}, "attend": {"q": q, "scale": 0.5, "out": out},
                 "share": {"prefix_cache": kind(1, 6, 2), "batch": 2}}
        return {"batch": 2, "latent": 6, "rope": 2}, [(kind(2, 6, 2), of_all | calls)]
    windows = (k, v)  # one for each of its tokens
    calls = {"trim": of_all["trim"], "append": both | {"compressed": windows},
             "attend": {"q": q, "gates": zeros(2, 3, 4, 3), "out": out}}
    return sizes, [(kind(2, 2, 8, 6, block=1), calls)]


# --- what is wrong ----------------------------------------------------------------------------------------------------


def wrong_arrays(x):
    """(what, array): another dtype, rank and size; sizes may be those of another call that works."""
    array = np.asarray(x)
    yield "dtype", array.astype(np.complex64)
    yield "dtype", array.astype(np.float32 if array.dtype.kind in "iu" else np.int32)
    yield "rank", array[(None,) * (7 - array.ndim)]
    for axis in range(array.ndim):
        for size in (array.shape[axis] + 1, array.shape[axis] - 1):
            if size >= 0:
                yield "size", np.zeros([size if i == axis else n for i, n in enumerate(array.shape)], array.dtype)


def wrong_values(annotation, value):
    """(where inside, what, value) of an argument with this annotation that has this value in a call that works."""
    yield "", "type", object()
    if "None" not in annotation:
        yield "", "type", None
    if isinstance(value, (tuple, list)) and any(isinstance(x, (np.ndarray, tuple)) for x in value):
        for i, x in enumerate(value):
            inside = f".{value._fields[i]}" if hasattr(value, "_fields") else ""
            for deeper, what, other in wrong_values("None", x):
                parts = [other if j == i else y for j, y in enumerate(value)]
                yield inside + deeper, what, value._make(parts) if inside else type(value)(parts)
    elif isinstance(value, np.ndarray) or annotation and re.search("Array|Ints|Floats|Align|Positions",
                                                                   annotation) and value is not None:
        yield from (("", *other) for other in wrong_arrays(value))
        yield "", "type", "text"
    elif re.search("Array|Ints|Floats|State|Positions", annotation):
        yield from (("", "type", x) for x in (np.zeros(2, np.complex64), np.zeros((1,) * 7), "text"))
    if re.search(r"\b(float|int|tuple)\b", annotation):
        yield from (("", "type", x) for x in ("text", 1j))
    if re.search(r"\bfloat\b", annotation):
        yield "", "type", float("nan")
    if re.search(r"\bint\b", annotation):
        yield from (("", "type", x) for x in (1.5, -(2**70)))
    if re.search(r"\bbool\b", annotation):
        yield from (("", "type", x) for x in (1, "yes"))
    if "Literal" in annotation:
        yield from (("", "type", x) for x in ("nonsense", 3))


def walk(title, calls, parameters, convert=lambda x: x):
    """Lists the wrong messages of a function that is called as `title`: each argument is tried in the (function, call)s
    that have it, else in the first."""
    used, found = {key for _, call in calls for key in call}, []
    for i, (function, call) in enumerate(calls):
        for name, parameter in parameters.items():
            is_any = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if is_any or (name not in call and (name in used or i > 0)):
                continue
            for inside, what, value in wrong_values(str(parameter.annotation), call.get(name)):
                shown = f"{title}({name}{inside}) of another {what}"
                at = [name + inside] if what != "size" else sorted(parameters, key=len, reverse=True)
                try:
                    function(**{key: convert(x) for key, x in (call | {name: value}).items()})
                except ERRORS as error:
                    if not re.match(rf"{re.escape(title)}: ({'|'.join(map(re.escape, at))})(?!\w)", str(error)):
                        found.append(f"{shown}: {error}")
                except Exception as error:
                    found.append(f"{shown}: {type(error).__name__}: {error}")
                else:
                    if what == "size" or (what == "rank" and title in ANY_RANK):
                        continue
                    found.append(f"{shown}: accepted")
    return found


def tensors(x):
    """x with its arrays as tensors of PyTorch."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    if isinstance(x, (tuple, list)) and any(isinstance(y, (np.ndarray, tuple)) for y in x):
        return x._make(map(tensors, x)) if hasattr(x, "_make") else type(x)(map(tensors, x))
    return x


def is_function(thing):
    return callable(thing) and not isinstance(thing, type)


def names_in(module):
    return [name for name in module.__all__ if is_function(getattr(module, name)) and name not in WITHOUT]


WALKED = [(module, calls, name) for module, calls in ((heed, CALLS), (heed.torch, CALLS), (heed.select, CHOSEN),
                                                      (P, BUILT)) for name in names_in(module)]


@pytest.mark.parametrize(("module", "calls", "name"), WALKED,
                         ids=[f"{module.__name__}.{name}" for module, _, name in WALKED])
def test_messages_name_function_and_argument(module, calls, name):
    function = getattr(module, name)
    assert name in calls, f"CALLS has no call of {name} that works"
    parameters = inspect.signature(function).parameters
    own = [(function, {key: x for key, x in call.items() if key in parameters or name == "explain"})
           for call in calls[name]]
    found = walk(name, own, parameters, tensors if module is heed.torch else lambda x: x)
    assert not found, "\n".join(found)


CACHES = [(module, name) for module in (heed, heed.torch)
          for name in ("KVCache", "RingKVCache", "LatentKVCache", "NSACache")]


@pytest.mark.parametrize(("module", "name"), CACHES, ids=[f"{module.__name__}.{name}" for module, name in CACHES])
def test_messages_of_caches_name_method_and_argument(module, name):
    convert, kind = tensors if module is heed.torch else lambda x: x, getattr(module, name)
    sizes, caches = of_caches(module, name)
    found = walk(name, [(kind, sizes)], inspect.signature(kind).parameters)
    for cache, calls in caches:
        cache.append(**{key: convert(x) for key, x in calls["append"].items()})
    for of in dir(kind):
        if of.startswith("_") or not is_function(getattr(kind, of)):
            continue
        parameters = {key: x for key, x in inspect.signature(getattr(kind, of)).parameters.items()
                      if key not in ("self", "memo")}
        own = [(getattr(cache, of), calls[of]) for cache, calls in caches if of in calls]
        assert own or not parameters, f"{name}.{of} has no call that works"
        found += walk(f"{name}.{of}", own, parameters, convert)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["mask", "density"])
def test_messages_of_patterns_name_method_and_argument(name):
    method = getattr(P.atrous(2), name)
    found = walk(name, [(method, {"Tq": 2, "Tk": 3, "align": [1]})], inspect.signature(method).parameters)
    assert not found, "\n".join(found)
