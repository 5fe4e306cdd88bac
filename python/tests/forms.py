# Inputs of mechanisms that no table describes, by name.
import numpy as np

import heed

B, T, H, K, V = 2, 70, 4, 8, 5
STATES = ("log_linear_attention", "mesa", "ttt_linear", "titans")
COUNTED = ("log_linear_attention", "ttt_linear", "titans")  # a step takes the number of tokens
SOFTMAX = ("path_attention", "wall_attention", "deltaformer", "parallax_attention")
NAMES = (*STATES, *SOFTMAX, "attention_residual")
OPTIONAL = {"log_linear_attention": {"log_decay"}, "mesa": {"log_decay"}, "ttt_linear": {"lr"},
            "path_attention": {"log_forget"}, "wall_attention": {"log_forget"}, "deltaformer": {"beta", "w"},
            "attention_residual": {"weight"}}


def arrays(name, dtype=np.float64, T=T, optional=True):
    """{argument: array} of a mechanism."""
    rng = np.random.default_rng(0)
    rows, keys, values, gates = (B, T, H, K), (B, T, 2, K), (B, T, 2, V), (B, T, 2)

    def unit(*shape):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def decay(*shape):
        return -0.1 * abs(rng.standard_normal(shape))

    of_states = {"q": unit(*rows), "k": unit(*rows), "v": rng.standard_normal((B, T, H, V))}
    norm = {**of_states, "v": unit(*rows), "weight": 0.5 + rng.random((H, K)), "bias": 0.1 * unit(H, K)}
    grouped = {"q": rng.standard_normal(rows), "k": rng.standard_normal(keys), "v": rng.standard_normal(values)}
    given = {
        "log_linear_attention": {**of_states, "level_scales": rng.standard_normal((B, T, H, 8)),
                                 "log_decay": decay(B, T, H)},
        "mesa": {**of_states, "beta": rng.random((B, T, H)), "lamb": 0.5 + rng.random((H, K)),
                 "log_decay": decay(B, T, H)},
        "ttt_linear": {**norm, "eta": 0.01 * rng.random((B, T, H)), "lr": rng.random((B, T, H))},
        "titans": {**norm, "theta": 0.01 * rng.random((B, T, H)), "alpha": 0.1 * rng.random((B, T, H)),
                   "eta": rng.random((B, T, H))},
        "path_attention": {**grouped, "w": unit(*keys), "beta": 2 * rng.random(gates), "log_forget": decay(B, T, H)},
        "wall_attention": {**grouped, "log_decay": decay(*rows), "log_forget": decay(B, T, H)},
        "deltaformer": {**grouped, "beta": rng.random(gates), "w": rng.standard_normal(keys)},
        "parallax_attention": {"q": grouped["q"], "r": rng.standard_normal(rows), "k": grouped["k"], "v": grouped["v"]},
        "attention_residual": {"query": rng.standard_normal(K), "residuals": rng.standard_normal((5, B, T, K)),
                               "weight": rng.random(K)},
    }
    left_out = set() if optional else OPTIONAL.get(name, set())
    return {key: x.astype(dtype) for key, x in given[name].items() if key not in left_out}


def results(name, given):
    """{tensor of the file that heed run writes: array}, as Python computes it."""
    call = getattr(heed, name)
    if name in STATES:
        o, state = call(**given, return_state=True)
        counted = {"state_positions": np.full(B, T)} if name in COUNTED else {}
        return {"o": o, "state": state, **counted}
    return dict(zip("ou", call(**given, return_u=True))) if name == "deltaformer" else {"o": call(**given)}
