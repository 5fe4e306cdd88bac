# Inputs of mechanisms on the scan engine by name, from the extension module's descriptions, and their definitions.
import numpy as np

import heed
from heed import _core


def _described(of):
    """With a letter for each axis: w for W - 1."""
    def letters(axes):
        return axes.replace("W - 1", "w").replace(", ", "")

    return of | {"axes": {key: letters(axes) for key, axes in of["axes"].items()},
                 "state_axes": [letters(x[1]) for x in of["states"]]}


# Mechanisms whose queries have no scale; the short convolution has tests of its own.
DESCRIPTIONS = {name: _described(of) for name, of in _core._mechanisms.items()
                if not of["scale"] and name != "causal_conv1d"}
NAMES = sorted(name for name in DESCRIPTIONS if DESCRIPTIONS[name]["state_axes"])
STATELESS = sorted(set(DESCRIPTIONS) - set(NAMES))
SIZES = {"B": 2, "D": 6, "T": 21, "N": 5, "G": 2, "L": 6, "H": 2, "d": 3, "W": 4, "2": 2}


def sizes_of(name, **sizes):
    """The sizes that the letters of axes stand for."""
    sizes = SIZES | sizes
    sizes["L"], sizes["w"] = min(sizes["L"], sizes["T"]), sizes["W"] - 1
    if "H" in DESCRIPTIONS[name]["axes"][DESCRIPTIONS[name]["inputs"][0]]:
        sizes["D"] = sizes["H"] * sizes["d"]
    return sizes


def axes_of(name, argument, rank=None):
    """The axes of an argument in its form with this rank, or in its first form."""
    forms = DESCRIPTIONS[name]["axes"][argument].split("|")
    return next(form for form in forms if rank is None or len(form) == rank)


def arguments(name, dtype=np.float64, seed=5, rank=None, **sizes):
    """Inputs of a mechanism by name, all of them; `rank` is that of tensors that have several forms."""
    rng = np.random.default_rng(seed)
    sizes = sizes_of(name, **sizes)
    result = {}
    for argument in DESCRIPTIONS[name]["inputs"]:
        several = "|" in DESCRIPTIONS[name]["axes"][argument]
        shape = [sizes[axis] for axis in axes_of(name, argument, rank if several else None)]
        x = rng.standard_normal(shape)
        if argument == "A":
            x = -np.exp(x)
        elif argument in ("delta", "delta_bias"):
            x = 0.3 * np.exp(0.5 * x)
        elif argument == "log_decay":
            x = -0.3 * np.exp(x)
        elif argument in ("a", "log_dt"):
            x = x - 1
        result[argument] = x.astype(dtype)
    return result


def state_of(name, dtype=np.float64, seed=6, **sizes):
    """An array, or a named tuple of them."""
    sizes, state_type = sizes_of(name, **sizes), DESCRIPTIONS[name]["state_type"]
    rng = np.random.default_rng(seed)
    dtype = np.float64 if dtype == np.float64 else np.float32
    states = [rng.standard_normal([sizes[axis] for axis in axes]).astype(dtype)
              for axes in DESCRIPTIONS[name]["state_axes"]]
    return state_type(*states) if state_type else states[0]


def arrays_of(state):
    return state if isinstance(state, tuple) else (state,)


def of_each(f, state):
    """The state of which each array is f of what it was."""
    return type(state)(*map(f, state)) if isinstance(state, tuple) else f(state)


def time_axis(name, argument, x):
    """The axis of tokens, or None."""
    axes = axes_of(name, argument, len(x.shape))
    return axes.index("T") if "T" in axes else None


def at_tokens(name, values, tokens):
    """The inputs of some tokens, or of one if `tokens` is an int."""
    def part(argument, x):
        axis = time_axis(name, argument, x)
        return x if axis is None else x[(slice(None),) * axis + (tokens,)]

    return {argument: part(argument, x) for argument, x in values.items()}


def close_enough(name):
    """The tolerance where a sequence is split: 0 compares bits."""
    return {"s4d": {"rtol": 2e-5, "atol": 2e-5}, "h3": {"rtol": 5e-5, "atol": 5e-5}}.get(name, {"rtol": 0, "atol": 0})


def output_at(name, o, tokens):
    return at_tokens(name, {DESCRIPTIONS[name]["inputs"][0]: o}, tokens).popitem()[1]


def call(name, values, *more, suffix="", **options):
    return getattr(heed, name + suffix)(*more, **values, **options)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive(name, values, initial=None, **settings):
    """o and the final state, by the definition, token by token."""
    return {"selective_scan": _selective_scan, "rg_lru": _rg_lru, "hgrn": _hgrn, "s4d": _s4d,
            "h3": _h3}[name](values, initial, **settings)


def _selective_scan(values, initial, delta_softplus=False):
    u, delta, A = values["u"], values["delta"], values["A"]
    batch, channels, T = u.shape
    h = np.zeros((batch, *A.shape)) if initial is None else initial.astype(np.float64)
    step = delta + (values["delta_bias"][:, None] if "delta_bias" in values else 0)
    step = np.log1p(np.exp(step)) if delta_softplus else step

    def weights(x, t):  # for all channels
        if len(x.shape) == 2:
            return x
        x = x[:, None, :, t] if len(x.shape) == 3 else x[..., t]
        return np.repeat(x, channels // x.shape[1], axis=1)

    o = np.empty_like(u)
    for t in range(T):
        s = step[:, :, t, None]
        h = np.exp(s * A) * h + s * u[:, :, t, None] * weights(values["B"], t)
        o[:, :, t] = (weights(values["C"], t) * h).sum(-1)
    if "D" in values:
        o = o + values["D"][:, None] * u
    if "z" in values:
        o = o * values["z"] * sigmoid(values["z"])
    return o, h


def _hgrn(values, initial):
    x, g = values["x"], values["log_decay"]
    h = np.zeros((x.shape[0], x.shape[2])) if initial is None else initial.astype(np.float64)
    o = np.empty_like(x)
    for t in range(x.shape[1]):
        h = np.exp(g[:, t]) * h + x[:, t]
        o[:, t] = h
    return o, h


def _rg_lru(values, initial, c=8.0):
    x = values["x"]
    log_a = -c * sigmoid(values["recurrence_gate"]) * np.log1p(np.exp(values["a"]))
    root = np.sqrt(-np.expm1(2 * log_a))
    if initial is None:
        root[:, :1] = 1
    return _hgrn({"x": root * sigmoid(values["input_gate"]) * x, "log_decay": log_a}, initial)


def s4d_modes(values, discretization="zoh"):
    """a, b and C: [D, N], complex."""
    dt = np.exp(values["log_dt"])[:, None]
    z = dt * (-np.exp(values["log_A_real"]) + 1j * values["A_imag"])
    a, b = (np.exp(z), dt * np.expm1(z) / z) if discretization == "zoh" else ((1 + z / 2) / (1 - z / 2),
                                                                              dt / (1 - z / 2))
    return a, b, values["C"][..., 0] + 1j * values["C"][..., 1]


def _s4d(values, initial, discretization="zoh", method=None):
    u = values["u"]
    a, b, C = s4d_modes(values, discretization)
    h = np.zeros((u.shape[0], *a.shape), complex) if initial is None else initial[..., 0] + 1j * initial[..., 1]
    o = np.empty_like(u)
    for t in range(u.shape[2]):
        h = a * h + b * u[:, :, t, None]
        o[:, :, t] = 2 * (C * h).sum(-1).real
    if "D" in values:
        o = o + values["D"][:, None] * u
    return o, np.stack([h.real, h.imag], -1)


def _h3(values, initial, method=None):
    q, k, v = values["q"], values["k"], values["v"]
    B, T, H, d = q.shape
    a, b, C = s4d_modes(values)
    shift = values["shift"].reshape(H, d, -1).copy()
    W = shift.shape[-1]
    tail = np.zeros((B, W - 1, H, d)) if initial is None else initial.tail
    S = np.zeros((B, H, d, d, a.shape[1]), complex) if initial is None else initial.S[..., 0] + 1j * initial.S[..., 1]
    if "shift_D" in values:
        shift[..., 0] += values["shift_D"].reshape(H, d)
    keys = np.concatenate([tail, k], 1)
    o = np.empty_like(q)
    for t in range(T):
        shifted = np.einsum("bwhi,hiw->bhi", keys[:, t : t + W], shift[..., ::-1])
        product = shifted[..., :, None] * v[:, t, :, None, :]
        S = a[:, None, None] * S + b[:, None, None] * product[..., None]
        Y = 2 * np.einsum("hn,bhijn->bhij", C, S).real
        if "D" in values:
            Y = Y + values["D"][:, None, None] * product
        o[:, t] = np.einsum("bhi,bhij->bhj", q[:, t], Y)
    return o, DESCRIPTIONS["h3"]["state_type"](keys[:, T:], np.stack([S.real, S.imag], -1))
