# Recurrent mechanisms from NumPy: agreement with their definition, states, options, gradients, errors.
import numpy as np
import pytest
from mechanisms import (STEPS, DESCRIPTIONS, INPUTS, NAMES, WITH_STATE, arguments, at_tokens, backward, call, features,
                        state_shape)

import heed

GATED = [name for name in NAMES if "k" in INPUTS[name] and not DESCRIPTIONS[name]["channels"]
         and {"log_decay", "beta"} & set(INPUTS[name]) and not {"beta_A", "theta"} & set(INPUTS[name])]
DELTA = [name for name in NAMES if {"beta", "erase", "a"} & set(INPUTS[name])]
rng = np.random.default_rng(5)


def naive(values, scale, S=None):
    """o and the last state, token by token."""
    if values["k"].ndim == 5:  # a token takes several steps
        return steps_of_tokens(values, scale, S)
    q, k, v = (values[name] for name in ("r" if "r" in values else "q", "k", "v"))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    g = values.get("log_decay", np.zeros((B, T, HV)))
    q, k = (np.repeat(x, HV // H, axis=2) for x in (q, k))
    of_key = {name: np.repeat(values[name], HV // H, axis=2) for name in ("p", "a", "b") if name in values}
    g = np.broadcast_to(g if g.ndim in (2, 4) else g[..., None], (B, T, HV, K))
    S = np.zeros((B, HV, K, V)) if S is None else S.astype(np.float64)
    o = np.empty((B, T, HV, V))
    for t in range(T):
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        columns = np.exp(values["log_decay_v"][:, t, :, None]) if "log_decay_v" in values else 1
        before, S = S, np.exp(g[:, t])[..., None] * S * columns
        if "a" in values:
            found = np.einsum("bhkv,bhk->bhv", before, of_key["a"][:, t])
            written += of_key["b"][:, t, :, :, None] * found[:, :, None, :]
        elif {"beta", "erase"} & set(values):
            found = np.einsum("bhkv,bhk->bhv", S,
                              of_key.get("p", k)[:, t] * (values["erase"][:, t] if "erase" in values else 1))
            error = v[:, t] * (values["write"][:, t] if "write" in values else 1) - found
            error *= values["beta"][:, t, :, None] if "beta" in values else 1
            written = k[:, t, :, :, None] * error[:, :, None, :]
        S = S + written
        seen = before + values["u"][..., None] * written if "u" in values else S
        o[:, t] = scale * np.einsum("bhkv,bhk->bhv", seen, q[:, t])
    return o, S


def steps_of_tokens(values, scale, S):
    """The recurrence over the steps of tokens: a token's decay is before its first step, its query after its last."""
    n = values["k"].shape[2]

    def spread(x, at):
        x = np.expand_dims(x, 2)
        return np.concatenate([x if i == at else np.zeros_like(x) for i in range(n)], 2)

    several = {"q": spread(values["q"], n - 1), "log_decay": spread(values["log_decay"], 0)}
    several = {key: x.reshape(len(x), -1, *x.shape[3:]) for key, x in (values | several).items()}
    o, S = naive(several, scale, S)
    return o[:, n - 1 :: n], S


@pytest.mark.parametrize("name", GATED)
def test_outputs_and_states_are_those_of_the_definition(name):
    values = arguments(name)
    initial = rng.standard_normal(state_shape(name))
    o, state = call(getattr(heed, name), values, initial_state=initial, return_state=True)
    expected, last = naive(values, 1 if "r" in values else 12**-0.5, initial)
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-12)
    assert np.array_equal(call(getattr(heed, name), values, initial_state=initial), o)


@pytest.mark.parametrize("name", WITH_STATE)
def test_dtypes(name):
    for dtype, state_dtype in ((np.float32, np.float32), (np.float16, np.float32), (np.float64, np.float64)):
        o, state = call(getattr(heed, name), arguments(name, dtype=dtype), return_state=True)
        assert o.dtype == dtype and state.dtype == state_dtype


@pytest.mark.parametrize("name", WITH_STATE)
def test_steps_continue_a_sequence(name):
    values = arguments(name, dtype=np.float32)
    whole, last = call(getattr(heed, name), values, return_state=True)
    _, state = call(getattr(heed, name), at_tokens(values, slice(60)), return_state=True)
    for t in range(60, 70):
        o = call(getattr(heed, name + "_step"), at_tokens(values, t), state)
        np.testing.assert_allclose(o, whole[:, t], rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, last, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", WITH_STATE)
def test_gradients_are_differences(name):
    values = arguments(name, T=20)
    shape = state_shape(name)
    options = {"initial_state": rng.standard_normal(shape), "reverse": True}
    do, dstate = rng.standard_normal((2, 20, 4, 10)), rng.standard_normal(shape)
    function = getattr(heed, name)

    def loss():
        o, state = call(function, values, return_state=True, **options)
        return (o * do).sum() + (state * dstate).sum()

    keywords = dict(options, dstate=dstate)
    if "normalize" in DESCRIPTIONS[name]["settings"]:
        keywords["normalize"] = False
    gradients = backward(name, do, values, **keywords)
    assert gradients._fields == (*(f"d{key}" for key in values), "dinitial_state")
    for gradient, x in zip(gradients, [*values.values(), options["initial_state"]], strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        for _ in range(4):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append(loss())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITH_STATE)
def test_packed_sequences_and_lengths(name):
    values = arguments(name, B=1, T=50)
    packed, states = call(getattr(heed, name), values, cu_seqlens=[0, 20, 20, 45], return_state=True)
    assert states.shape == state_shape(name, 3) and not packed[:, 45:].any() and not states[1].any()
    o, state = call(getattr(heed, name), at_tokens(values, slice(20, 45)), return_state=True)
    assert np.array_equal(packed[:, 20:45], o) and np.array_equal(states[2:], state)
    padded = call(getattr(heed, name), values, starts=[20], lengths=[45])
    assert np.array_equal(padded[:, 20:45], o) and not padded[:, :20].any()


def test_retention_has_decays_of_its_own():
    values = arguments("retention")
    decays = np.log1p(-np.exp2(-5.0 - np.arange(4)))
    q, k, v = (values[name] for name in "qkv")
    assert np.array_equal(heed.retention(q, k, v), heed.retention(q, k, v, log_decay=decays))
    assert np.array_equal(heed.retention(q, k, v), heed.retention(q, k, v, log_decay=list(decays)))
    assert heed.retention_backward(v, q, k, v).dlog_decay is None


@pytest.mark.parametrize("name", NAMES)
def test_explain_and_out(name):
    values = arguments(name, dtype=np.float32)
    report = heed.explain(name, **values)
    channels = 10 + (12 if "projection" in values else 0)
    products = 4 if name not in DELTA else 8 if "a" in values else 6
    several_reads = ", R, " in DESCRIPTIONS[name]["axes"].get("k", "")
    products *= STEPS if DESCRIPTIONS[name]["several_writes"] or several_reads else 1
    of_channels = DESCRIPTIONS[name]["channels"]
    assert report["kernel"] == ("recurrence_channels" if of_channels else "delta_f32" if name in DELTA
                                else "recurrence_f32")
    assert report["flops"] == (60 * 2 * 70 * 40 if of_channels else products * 2 * 70 * 4 * features(name) * channels)
    assert report["visited_pairs"] == 0 and report["copies"] == []
    out = np.empty((2, 70, 40) if of_channels else (2, 70, *([STEPS] if several_reads else []), 4, 10), np.float32)
    assert call(getattr(heed, name), values, out=out) is out
    assert np.array_equal(out, call(getattr(heed, name), values))


@pytest.mark.parametrize("name", WITH_STATE)
def test_errors_name_the_argument(name):
    values = arguments(name)
    function = getattr(heed, name)
    with pytest.raises(heed.InvalidArgument, match=rf"{name}: lengths\[1\] is 71, expected 0 to T = 70"):
        call(function, values, lengths=[70, 71])
    with pytest.raises(heed.InvalidArgument, match=f"{name}: initial_state has shape"):
        call(function, values, initial_state=np.zeros((2, 4, 12, 11)))
    with pytest.raises(heed.InvalidArgument, match=f"{name}: initial_state has dtype f32, expected f64"):
        call(function, values, initial_state=np.zeros(state_shape(name), np.float32))
    query = DESCRIPTIONS[name]["query"]
    with pytest.raises(heed.InvalidArgument, match=f"{name}: {query} has shape .*expected"):
        call(function, values | {query: values[query][0]})
    with pytest.raises(TypeError, match=f"{name}.*nonsense"):
        call(function, values, nonsense=1)
    with pytest.raises(heed.InvalidArgument, match=f"{name}_step: state"):
        call(getattr(heed, name + "_step"), at_tokens(values, 0), np.zeros((2, 4, 12, 11)))


@pytest.mark.parametrize("name", [name for name in GATED if "log_decay" in INPUTS[name]])
def test_checks(name):
    values = arguments(name)
    values["log_decay"][-1] = 0.5
    call(getattr(heed, name), values)
    heed.set_checks(True)
    try:
        with pytest.raises(heed.InvalidArgument, match=f"{name}: log_decay has an element 0.5, expected <= 0"):
            call(getattr(heed, name), values)
    finally:
        heed.set_checks(False)


FEATURES = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_sq": lambda x: np.maximum(x, 0) ** 2,
    "exp": np.exp,
    "identity": lambda x: x,
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention_is_a_mean_with_weights_of_features(feature, causal, normalize):
    q, k, v = arguments("linear_attention", H=4).values()
    weights = np.einsum("bthk,bshk->bhts", FEATURES[feature](q), FEATURES[feature](k))
    if causal:
        weights = np.tril(weights)
    expected = np.einsum("bhts,bshv->bthv", weights, v)
    if normalize:
        expected /= weights.sum(-1).transpose(0, 2, 1)[..., None] + 1e-6
    o = heed.linear_attention(q, k, v, feature_map=feature, causal=causal, normalize=normalize)
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_a_normalised_state_is_a_named_tuple_that_continues_and_has_gradients():
    q, k, v = arguments("linear_attention").values()
    o, state = heed.linear_attention(q, k, v, return_state=True)
    assert type(state).__name__ == "LinearAttentionState" and state._fields == ("S", "z")
    first, half = heed.linear_attention(q[:, :33], k[:, :33], v[:, :33], return_state=True)
    rest, last = heed.linear_attention(q[:, 33:], k[:, 33:], v[:, 33:], initial_state=half, return_state=True)
    assert np.array_equal(np.concatenate([first, rest], 1), o)
    assert all(map(np.array_equal, last, state))
    heed.linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state)
    assert not np.array_equal(state.z, last.z)
    gradients = heed.linear_attention_backward(v[:, 33:], q[:, 33:], k[:, 33:], v[:, 33:], initial_state=half,
                                               dstate=half)
    assert gradients.dinitial_state._fields == ("S", "z") and gradients.dinitial_state.z.any()
    with pytest.raises(heed.InvalidArgument, match="linear_attention: final_state is asked for"):
        heed.linear_attention(q, k, v, causal=False, return_state=True)
    with pytest.raises(heed.InvalidArgument, match="feature_map is 'elu', expected one of 'elu1', 'relu'"):
        heed.linear_attention(q, k, v, feature_map="elu")
    with pytest.raises(heed.InvalidArgument, match="linear_attention: eps is -1, expected"):
        heed.linear_attention(q, k, v, eps=-1.0)


def test_a_product_without_decays_is_that_of_decays_of_one():
    values = arguments("delta_product")
    q, k, v, log_decay, beta = values.values()
    o = heed.delta_product(q, k, v, None, beta)
    np.testing.assert_allclose(o, heed.delta_product(q, k, v, np.zeros_like(log_decay), beta), rtol=0, atol=1e-14)
    gradients = heed.delta_product_backward(o, q, k, v, None, beta)
    assert gradients.dlog_decay is None and gradients.dk.shape == k.shape
    with pytest.raises(heed.InvalidArgument,
                       match=r"delta_product: v has shape \[2,70,4,10\], expected rank 5: \[B, T, n, HV, V\]"):
        heed.delta_product(q, k, v[:, :, 0], log_decay, beta)
    with pytest.raises(heed.InvalidArgument,
                       match=r"delta_product: beta has shape \[2,70,1,4\], expected \[2,70,2,4\]"):
        heed.delta_product(q, k, v, log_decay, beta[:, :, :1])
    with pytest.raises(heed.InvalidArgument, match=r"delta_product: v has shape \[2,70,0,4,10\], expected n >= 1"):
        heed.delta_product(q, k[:, :, :0], v[:, :, :0], log_decay, beta[:, :, :0])


def mlstm(q, k, v, i, f, eps=1e-6):
    """o and the state (S, z, m), token by token."""
    HV, K = v.shape[2], q.shape[3]
    q, k = (np.repeat(x, HV // q.shape[2], axis=2) for x in (q, k))
    S, z, m = np.zeros((len(q), HV, K, v.shape[3])), np.zeros((len(q), HV, K)), np.zeros((len(q), HV))
    o = np.empty(v.shape)
    for t in range(q.shape[1]):
        kept = m - np.log1p(np.exp(-f[:, t]))
        m = np.maximum(kept, i[:, t])
        decay, key = np.exp(kept - m)[..., None], np.exp(i[:, t] - m)[..., None] * k[:, t]
        S, z = decay[..., None] * S + key[..., None] * v[:, t, :, None], decay * z + key
        query = q[:, t] * K**-0.5
        n = np.einsum("bhk,bhk->bh", z, query)
        o[:, t] = np.einsum("bhkv,bhk->bhv", S, query) / (np.maximum(abs(n), np.exp(-m)) + eps)[..., None]
    return o, (S, z, m)


def test_mlstm_is_that_of_its_definition_and_goes_on_from_its_state():
    values = arguments("mlstm")
    for eps in (1e-6, 0.3):
        o, state = heed.mlstm(*values.values(), eps=eps, return_state=True)
        expected, last = mlstm(**values, eps=eps)
        np.testing.assert_allclose(o, expected, rtol=0, atol=1e-10 * abs(expected).max())
        for part, of_last in zip(state, last, strict=True):
            np.testing.assert_allclose(part, of_last, rtol=0, atol=1e-12)
    assert type(state).__name__ == "MlstmState" and state._fields == ("S", "z", "m")
    o, state = heed.mlstm(*values.values(), return_state=True)
    first, half = heed.mlstm(*at_tokens(values, slice(64)).values(), return_state=True)
    rest, end = heed.mlstm(*at_tokens(values, slice(64, 70)).values(), initial_state=half, return_state=True)
    assert np.array_equal(np.concatenate([first, rest], 1), o) and all(map(np.array_equal, end, state))
    for t in range(64, 70):
        one = heed.mlstm_step(*(x[:, t] for x in values.values()), half)
        np.testing.assert_allclose(one, o[:, t], rtol=1e-11, atol=1e-11)
    for part, of_whole in zip(half, state, strict=True):
        np.testing.assert_allclose(part, of_whole, rtol=0, atol=1e-12)
    with pytest.raises(heed.InvalidArgument, match="mlstm: initial_state.m is absent"):
        heed.mlstm(*values.values(), initial_state=(state.S, state.z))
    with pytest.raises(heed.InvalidArgument, match="mlstm: eps is -1, expected"):
        heed.mlstm(*values.values(), eps=-1.0)


def test_mlstm_gradients_are_differences():
    values = arguments("mlstm", T=20)
    _, before = heed.mlstm(*arguments("mlstm", T=5, seed=6).values(), return_state=True)
    do, options = rng.standard_normal((2, 20, 4, 10)), {"eps": 0.0, "reverse": True}
    gradients = heed.mlstm_backward(do, *values.values(), initial_state=before, **options)
    assert gradients._fields == ("dq", "dk", "dv", "di", "df", "dinitial_state") and gradients.dinitial_state.m is None
    pairs = [*zip(gradients, values.values(), strict=False),
             *zip(gradients.dinitial_state[:2], before[:2], strict=True)]
    for gradient, x in pairs:
        for _ in range(6):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append((heed.mlstm(*values.values(), initial_state=before, **options) * do).sum())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=2e-5, atol=1e-6)


def rwkv4(k, v, w, u, num=0, den=0, largest=-1e38):
    """o and the state, token by token, as it is defined."""
    o = np.empty(v.shape)
    for t in range(k.shape[1]):
        m = np.maximum(largest, u + k[:, t])
        of_state, of_token = np.exp(largest - m), np.exp(u + k[:, t] - m)
        o[:, t] = (of_state * num + of_token * v[:, t]) / (of_state * den + of_token)
        m = np.maximum(largest + w, k[:, t])
        kept, written = np.exp(largest + w - m), np.exp(k[:, t] - m)
        num, den, largest = kept * num + written * v[:, t], kept * den + written, m
    return o, (num, den, largest)


def test_rwkv4_is_that_of_its_definition_and_goes_on_from_its_state():
    values = arguments("rwkv4")
    o, state = heed.rwkv4(*values.values(), return_state=True)
    expected, last = rwkv4(*values.values())
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-13)
    for part, of_last in zip(state, last, strict=True):
        np.testing.assert_allclose(part, of_last, rtol=0, atol=1e-12)
    assert type(state).__name__ == "Rwkv4State" and state._fields == ("num", "den", "max")
    k, v, w, u = values.values()
    first, half = heed.rwkv4(k[:, :31], v[:, :31], w, u, return_state=True)
    rest, end = heed.rwkv4(k[:, 31:], v[:, 31:], w, u, initial_state=half, return_state=True)
    assert np.array_equal(np.concatenate([first, rest], 1), o) and all(map(np.array_equal, end, state))
    steps = [heed.rwkv4_step(k[:, t], v[:, t], w, u, half) for t in range(31, 70)]
    assert np.array_equal(np.stack(steps, 1), o[:, 31:]) and all(map(np.array_equal, half, state))
    with pytest.raises(heed.InvalidArgument, match=r"rwkv4: initial_state.max is absent"):
        heed.rwkv4(k, v, w, u, initial_state=state[:2])
    with pytest.raises(heed.InvalidArgument, match=r"rwkv4: k has shape \[2,70,39\], expected \[2,70,40\]"):
        heed.rwkv4(k[..., :39], v, w, u)
    with pytest.raises(heed.InvalidArgument, match="rwkv4: scale is given, expected none"):
        heed.rwkv4(k, v, w, u, scale=1.0)


def test_rwkv4_gradients_are_differences():
    values = arguments("rwkv4", T=70)
    _, before = heed.rwkv4(*arguments("rwkv4", T=5, seed=6).values(), return_state=True)
    do, options = rng.standard_normal((2, 70, 40)), {"reverse": True, "lengths": [70, 41]}
    gradients = heed.rwkv4_backward(do, *values.values(), initial_state=before, **options)
    assert gradients._fields == ("dk", "dv", "dlog_decay", "du",
                                 "dinitial_state") and gradients.dinitial_state.max is None
    pairs = [*zip(gradients, values.values(), strict=False),
             *zip(gradients.dinitial_state[:2], before[:2], strict=True)]
    for gradient, x in pairs:
        for _ in range(6):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append((heed.rwkv4(*values.values(), initial_state=before, **options) * do).sum())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def softplus(x):
    return np.log1p(np.exp(x))


def test_ssd_is_what_mamba_computes():
    values = arguments("ssd")
    x, dt, A, B, C, D, z, bias = values.values()
    dt = dt - 2
    delta = np.clip(softplus(dt + bias), 0.1, 0.2)
    B, C = (np.repeat(t, 2, axis=2) for t in (B, C))
    S, o = rng.standard_normal((2, 4, 10, 12)), np.empty_like(x)
    initial = S.copy()
    for t in range(70):
        S = np.exp(delta[:, t] * A)[..., None, None] * S + np.einsum("bh,bhp,bhn->bhpn", delta[:, t], x[:, t], B[:, t])
        y = np.einsum("bhpn,bhn->bhp", S, C[:, t]) + D * x[:, t]
        o[:, t] = y * z[:, t] / (1 + np.exp(-z[:, t]))
    options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 0.2), "initial_state": initial,
               "return_state": True}
    ours, state = heed.ssd(x, dt, A, values["B"], values["C"], D=D, z=z, **options)
    np.testing.assert_allclose(ours, o, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, S, rtol=0, atol=1e-12)
    by_head = heed.ssd(x, dt, A, values["B"], values["C"], D=D[:, 0])
    assert np.array_equal(by_head, heed.ssd(x, dt, A, values["B"], values["C"], D=np.repeat(D[:, :1], 10, 1)))
    with pytest.raises(heed.InvalidArgument, match=r"ssd: dt_limit begins with 0.2|ssd: dt_limit ends with 0.1"):
        heed.ssd(x, dt, A, values["B"], values["C"], dt_limit=(0.2, 0.1))
    with pytest.raises(heed.InvalidArgument, match=r"ssd: A has shape \[3\], expected \[4\]"):
        heed.ssd(x, dt, A[:3], values["B"], values["C"])
    heed.set_checks(True)
    with pytest.raises(heed.InvalidArgument, match="ssd: dt gives a log decay delta A of"):
        heed.ssd(x, abs(dt), -A, values["B"], values["C"])


def test_ssd_gradients_through_softplus_and_limits_are_differences():
    values = arguments("ssd", T=30)
    values["dt"] = 3 * rng.standard_normal(values["dt"].shape)
    do = rng.standard_normal((2, 30, 4, 10))
    options = {"dt_softplus": True, "dt_limit": (0.05, 2.0)}
    gradients = backward("ssd", do, values, **options)
    assert (gradients.ddt == 0).any() and (gradients.ddt != 0).any()
    for gradient, (key, x) in zip(gradients, values.items(), strict=False):
        for _ in range(5):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append((call(heed.ssd, values, **options) * do).sum())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6, err_msg=key)


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def test_efficient_attention_is_two_softmaxes():
    q, k, v, mask = arguments("efficient_attention").values()
    keys = np.repeat(softmax(np.where(mask[..., None, None], k, -np.inf), 1), 2, axis=2)
    queries = np.repeat(softmax(q, -1), 2, axis=2) * 12**-0.5
    values = np.where(mask[..., None, None], v, 0)
    expected = np.einsum("bthk,bshk,bshv->bthv", queries, keys, values)
    k[~mask], v[~mask] = np.nan, np.nan  # nothing looks at them
    np.testing.assert_allclose(heed.efficient_attention(q, k, v, kv_mask=mask), expected, rtol=0, atol=1e-13)
    nothing = heed.efficient_attention(q, k, v, kv_mask=np.zeros_like(mask))
    assert not nothing.any()
    with pytest.raises(heed.InvalidArgument,
                       match=r"efficient_attention: kv_mask has shape \[2,69\], expected \[2,70\]"):
        heed.efficient_attention(q, k, v, kv_mask=mask[:, 1:])
    with pytest.raises(TypeError, match="return_state"):
        heed.efficient_attention(q, k, v, return_state=True)
    assert not hasattr(heed, "efficient_attention_step")


def test_efficient_attention_gradients_are_differences():
    values = arguments("efficient_attention", T=20)
    do = rng.standard_normal((2, 20, 4, 10))
    for options in ({}, {"lengths": [20, 11], "starts": [3, 0]}):
        gradients = backward("efficient_attention", do, values, **options)
        assert gradients._fields == ("dq", "dk", "dv") and not gradients.dk[~values["kv_mask"]].any()
        for gradient, x in zip(gradients, values.values(), strict=False):
            for _ in range(5):
                at = tuple(rng.integers(size) for size in x.shape)
                kept, sides = x[at], []
                for h in (1e-6, -1e-6):
                    x[at] = kept + h
                    sides.append((call(heed.efficient_attention, values, **options) * do).sum())
                x[at] = kept
                np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-8)
