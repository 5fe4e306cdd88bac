# Inputs of recurrent mechanisms by name, from the extension module's description of each.
import numpy as np

import heed
from heed import _core


def _described(of):
    """With what follows from it: inputs that are keywords, the query, whether a state is [..., V, K]."""
    state, output = (x.split(", ")[-1] for x in (of["states"][0][1] if of["states"] else "V", of["output_axes"]))
    given, keywords = of["inputs"][: of["positional"]], of["inputs"][of["positional"]:]
    return of | {"optional": keywords, "nullable": [x for x in given if x in of["optional"]],
                 "has_state": bool(of["states"]), "state": [x[0] for x in of["states"]],
                 "query": next(x for x in "qrCk" if x in of["inputs"]),
                 "several_writes": ", n, " in of["axes"].get("k", ""),
                 "channels": output == "C", "value_first": state != output, "features": of["features"] or (lambda K: K)}


# Mechanisms whose queries have a scale; linformer, which sees all tokens at once, has tests of its own.
DESCRIPTIONS = {name: _described(of) for name, of in _core._mechanisms.items() if of["scale"] and name != "linformer"}
NAMES = sorted(DESCRIPTIONS)
INPUTS = {name: DESCRIPTIONS[name]["inputs"] for name in NAMES}
OPTIONAL = {name: DESCRIPTIONS[name]["optional"] for name in NAMES}
# Calls of these have one state; mechanisms with several have tests of their own.
WITH_STATE = [name for name, of in sorted(DESCRIPTIONS.items())
              if len(of["state"]) == 1 or (len(of["state"]) == 2 and "normalize" in of["settings"])]
CONSTANT = ("A", "D", "dt_bias", "u", "center", "q_bias", "k_bias")  # per head, not per token
ROWS = 20  # rows of projections
FRACTIONS = ("beta", "beta_A", "erase", "write")
DELTA = {"beta", "erase", "a"}  # keys of delta rules are of norm 1
STEPS = 2  # steps per token, where it takes several


def arguments(name, B=2, T=70, H=2, HV=4, K=12, V=10, dtype=np.float64, seed=5):
    """Inputs of a mechanism by name, in order."""
    rng = np.random.default_rng(seed)
    keys, values = (B, T, H, K), (B, T, HV, V)
    q, gates = keys, (B, T, HV)
    if DESCRIPTIONS[name]["several_writes"]:
        keys, values, gates = ((*shape[:2], STEPS, *shape[2:]) for shape in (keys, values, gates))
    if ", R, " in DESCRIPTIONS[name]["axes"].get("k", ""):  # as many reads as writes
        q = keys = (B, T, STEPS, H, K)
        values = (B, T, STEPS, HV, V)
    shapes = {"projection": (ROWS, K), "u": (HV, K), "q": q, "r": keys, "k": keys, "B": keys, "C": keys, "v": values,
              "i": values, "x": values, "z": values, "center": (H,), "trap": gates, "theta": (B, T, HV, max(1, K // 4)),
              "q_bias": (HV, STEPS, K), "k_bias": (HV, STEPS, K)}
    result = {}
    for argument in INPUTS[name]:
        if DESCRIPTIONS[name]["channels"]:
            x = rng.standard_normal(HV * V if argument in ("log_decay", "u") else (B, T, HV * V))
            result[argument] = -0.2 * np.exp(x) if argument == "log_decay" else x
        elif argument == "log_decay":
            by_key, constant = (B, T, HV, K), (HV,)
            shapes_of_decays = {"gla": by_key, "hgrn2": by_key, "rwkv6": by_key, "rwkv7": by_key, "kda": by_key,
                                "gdn2": by_key, "precond_kda": by_key, "rwkv5": (HV, K),
                                "retention": constant, "lightning": constant}
            shape = shapes_of_decays.get(name, (B, T, HV))
            result[argument] = -0.2 * rng.exponential(size=shape)
        elif argument == "log_decay_A":
            result[argument] = -0.2 * rng.exponential(size=(B, T, H))
        elif argument == "log_decay_v":
            result[argument] = -0.2 * rng.exponential(size=values)
        elif "f" in INPUTS[name] and argument in "if":  # before their exponential and sigmoid
            result[argument] = rng.standard_normal(gates) * (2 if argument == "f" else 1) + (
                3 if argument == "f" else 0)
        elif argument in ("dt", "dt_bias"):
            result[argument] = rng.uniform(0.05, 0.2, size=(B, T, HV) if argument == "dt" else HV)
        elif argument == "kv_mask":
            result[argument] = rng.random((B, T)) < 0.8
            result[argument][:, 0] = True
        elif argument in FRACTIONS:
            shape = {"beta": gates, "beta_A": (B, T, H), "erase": (B, T, HV, K), "write": values}[argument]
            result[argument] = rng.uniform(0.1, 1, size=shape)
        elif argument in ("p", "b"):  # nearly the key, so that states stay what they are
            result[argument] = 0.9 * result["k"] + 0.02 * rng.standard_normal(keys)
        elif argument == "a":
            result[argument] = -result["k"]
        elif argument == "k" and DELTA & set(INPUTS[name]):
            k = rng.standard_normal(keys)
            result[argument] = k / np.linalg.norm(k, axis=-1, keepdims=True)
        elif argument == "A":
            result[argument] = -rng.uniform(0.5, 2, size=HV)
        else:
            result[argument] = rng.standard_normal((HV, V) if argument == "D" else shapes[argument])
    return {key: x if x.dtype == bool else x.astype(dtype) for key, x in result.items()}


def at_tokens(values, tokens):
    """The inputs of some tokens, or of one; constants as they are."""
    return {key: x if key in CONSTANT or x.ndim < 3 else x[:, tokens] for key, x in values.items()}


def call(function, values, *more, **options):
    """Positional but for what may be left out; states without a normaliser."""
    name = function.__name__.removesuffix("_step")
    options |= {key: x for key, x in values.items() if key in OPTIONAL[name]}
    if "normalize" in DESCRIPTIONS[name]["settings"]:
        options.setdefault("normalize", False)
    return function(*(x for key, x in values.items() if key not in OPTIONAL[name]), *more, **options)


def backward(name, do, values, **options):
    options |= {key: x for key, x in values.items() if key in OPTIONAL[name]}
    function = getattr(heed, name + "_backward")
    return function(do, *(x for key, x in values.items() if key not in OPTIONAL[name]), **options)


def features(name, K=12):
    """Rows of the state of K key channels."""
    return ROWS if "projection" in INPUTS[name] else DESCRIPTIONS[name]["features"](K)


def state_shape(name, sequences=2, HV=4, K=12, V=10):
    K = features(name, K)
    return (sequences, HV, V, K) if DESCRIPTIONS[name]["value_first"] else (sequences, HV, K, V)
