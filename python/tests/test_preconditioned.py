# precond_delta_rule and precond_kda against a loop over tokens in float64 with PyTorch's autograd.
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402
from heed.compat import fla  # noqa: E402

NAMES = ["precond_delta_rule", "precond_kda"]
B, T, H, HV, K, V = 2, 11, 2, 4, 5, 3


def inputs(name, seed=0, batch=B, tokens=T, value_heads=HV, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    decays = (batch, tokens, value_heads, *([K] if name == "precond_kda" else []))
    tensors = {
        "q": normal(batch, tokens, H, K),
        "k": F.normalize(normal(batch, tokens, H, K), dim=-1),
        "v": normal(batch, tokens, value_heads, V),
        "log_decay": F.logsigmoid(normal(*decays)),
        "beta": torch.sigmoid(normal(batch, tokens, value_heads)),
        "log_decay_A": F.logsigmoid(normal(batch, tokens, H) + 2),
        "beta_A": torch.sigmoid(normal(batch, tokens, H)),
        "center": normal(H),
    }
    tensors = {key: x.to(dtype) for key, x in tensors.items()}
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return tensors, (normal(batch, value_heads, K, V).to(state), normal(batch, H, K).abs().to(state))


def loop(t, S, A, bound=1.5, eps=1e-6, scale=K**-0.5, reverse=False):
    """The definition: rows, and the last states."""
    rows, group = {}, t["v"].shape[2] // t["k"].shape[2]
    center = -0.2 if t.get("center") is None else t["center"][:, None]
    for i in range(t["q"].shape[1])[:: -1 if reverse else 1]:
        k = t["k"][:, i]
        A = t["log_decay_A"][:, i, :, None].exp() * A + t["beta_A"][:, i, :, None] * k**2
        r = torch.log(A + eps) - center
        w = k * bound ** (-r / (1 + r.abs()))
        q, k, w = (x.repeat_interleave(group, 1) for x in (t["q"][:, i], k, w))
        g = t["log_decay"][:, i]
        S = S * (g[..., None, None] if g.dim() == 2 else g[..., None]).exp()
        e = t["beta"][:, i, :, None] * (t["v"][:, i] - torch.einsum("bhkv,bhk->bhv", S, k))
        S = S + w[..., None] * e[..., None, :]
        rows[i] = scale * torch.einsum("bhkv,bhk->bhv", S, q)
    return torch.stack([rows[i] for i in range(len(rows))], 1), S, A


def call(name, t, states, **options):
    o, (S, A) = getattr(heed.torch, name)(**t, initial_state=states, return_state=True, **options)
    return o, S, A


def close(got, expected, tolerance=1e-11):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"bound": 3.0, "eps": 0.1, "scale": 0.7}, {"bound": 1.0}], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_states_and_gradients_are_those_of_the_definition(name, options, reverse):
    t, states = inputs(name)
    leaves = [x.requires_grad_() for x in (*t.values(), *states)]
    results = []
    for function in (lambda: call(name, t, states, reverse=reverse, **options),
                     lambda: loop(t, *states, reverse=reverse, **options)):
        found = function()
        weights = [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) for x in found]
        results.append((found, torch.autograd.grad(sum((x * w).sum() for x, w in zip(found, weights)), leaves)))
    (got, gradients), (expected, wanted) = results
    close(got, expected)
    close(gradients, wanted, 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_center_and_absent_states(name):
    t, (S, A) = inputs(name)
    del t["center"]
    close(call(name, t, None), loop(t, torch.zeros_like(S), torch.zeros_like(A)))
    close(call(name, t, (None, A)), loop(t, torch.zeros_like(S), A))
    o = getattr(heed, name)(*(x.numpy() for x in t.values()))
    close([torch.from_numpy(o)], [loop(t, torch.zeros_like(S), torch.zeros_like(A))[0]])


@pytest.mark.parametrize("name", NAMES)
def test_with_a_bound_of_one_the_rule_is_the_plain_one(name):
    t, (S, A) = inputs(name)
    plain = heed.torch.kda if name == "precond_kda" else heed.torch.gated_delta_rule
    o, last = plain(*list(t.values())[:5], initial_state=S, return_state=True)
    close(call(name, t, (S, A), bound=1.0)[:2], (o, last))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_parts_and_packing_have_the_bits_of_one_call(name, dtype):
    t, states = inputs(name, tokens=70, dtype=dtype)
    over_tokens = [key for key in t if key != "center"]
    o, S, A = call(name, t, states)
    before, parts = states, []
    for begin, end in ((0, 1), (1, 66), (66, 70)):
        piece = {key: x[:, begin:end] if key in over_tokens else x for key, x in t.items()}
        part, *before = call(name, piece, tuple(before))
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), o) and torch.equal(before[0], S) and torch.equal(before[1], A)
    state = heed.torch.__dict__[name + "_step"]
    running = type(getattr(heed.torch, name)(**t, return_state=True)[1])(*(x.clone() for x in states))
    for i in range(70):
        token = {key: t[key][:, i] for key in over_tokens}
        row = state(token["q"], token["k"], token["v"], token["log_decay"], token["beta"], token["log_decay_A"],
                    token["beta_A"], running, center=t["center"])
        assert torch.equal(row, o[:, i])
    assert torch.equal(running.S, S) and torch.equal(running.A, A)
    packed = {key: torch.cat([x[0, :40], x[1, :30]])[None] if key in over_tokens else x for key, x in t.items()}
    bounds = torch.tensor([0, 40, 70])
    together = call(name, packed, states, cu_seqlens=bounds)
    padded = call(name, t, states, lengths=torch.tensor([40, 30]))
    assert torch.equal(together[0][0, :40], padded[0][0, :40]) and torch.equal(together[0][0, 40:], padded[0][1, :30])
    assert torch.equal(together[1], padded[1]) and torch.equal(together[2], padded[2])
    assert not padded[0][1, 30:].any()


@pytest.mark.parametrize("name", NAMES)
def test_numpy_has_gradients_and_steps(name):
    t, states = inputs(name)
    arrays, given = {key: x.numpy() for key, x in t.items()}, tuple(x.numpy() for x in states)
    o, final = getattr(heed, name)(**arrays, initial_state=given, return_state=True)
    for x in (*t.values(), *states):
        x.requires_grad_()
    rows, S, A = loop(t, *states)
    close([torch.from_numpy(x) for x in (o, final.S, final.A)], (rows, S, A))
    d_o = np.random.default_rng(1).normal(size=o.shape)
    found = getattr(heed, name + "_backward")(d_o, **arrays, initial_state=given)
    wanted = torch.autograd.grad((rows * torch.from_numpy(d_o)).sum(), [*t.values(), *states])
    names = ["d" + key for key in t]
    close([torch.from_numpy(getattr(found, key)) for key in names], wanted[:len(names)], 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name):
    t, states = inputs(name, batch=1, tokens=3, value_heads=2)
    tensors = [x.requires_grad_() for x in (*t.values(), *states)]

    def function(*tensors):
        return call(name, dict(zip(t, tensors)), tensors[len(t):])

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(name):
    t, states = inputs(name)
    function = getattr(heed.torch, name)
    for options, error, text in (
        ({"bound": 0.5}, heed.InvalidArgument, "bound is 0.5, expected a finite number >= 1"),
        ({"eps": 0.0}, heed.InvalidArgument, "eps is 0, expected a finite number >= 1.17549e-38"),
        ({"segment": 64}, heed.Unsupported, "segment is 64, expected 0 as what a segment writes depends on A"),
        ({"beta_A": t["beta_A"][..., :1]}, heed.InvalidArgument, r"beta_A has shape \[2,11,1\], expected \[2,11,2\]"),
        ({"initial_state": (states[0], states[1][:, :1])}, heed.InvalidArgument, "initial_state.A has shape"),
    ):
        with pytest.raises(error, match=text):
            function(**{**t, **options})


# --- the functions of fla.ops -----------------------------------------------------------------------------------------

FLA = {
    "chunk_precond_gated_delta_rule": NAMES[0], "fused_recurrent_precond_gated_delta_rule": NAMES[0],
    "fused_recurrent_precond_gated_delta_rule, of channels": NAMES[1],
    "chunk_precond_kda": NAMES[1], "fused_recurrent_precond_kda": NAMES[1],
}


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("label", FLA)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_functions_of_fla(label, packed, turned):
    name, channels = label.partition(",")[0], ", of" in label
    t, states = inputs(FLA[label], seed=3, value_heads=H)
    t["q"], t["k"] = 2 * t["q"], 3 * t["k"]
    if packed:
        t = {key: x if key == "center" else x.flatten(0, 1)[None] for key, x in t.items()}
    leaves = [x.requires_grad_() for x in (*t.values(), *states)]
    given = {"q": t["q"], "k": t["k"], "v": t["v"], "gk" if channels else "g": t["log_decay"], "beta": t["beta"],
             "g_atk": t["log_decay_A"], "beta_atk": t["beta_A"], "log_atk_scale": t["center"]}
    S, A = states
    o, last, last_A = getattr(fla, name)(
        **given, initial_state=S.transpose(2, 3) if turned else S, initial_A_state=A, output_final_state=True, x=2.0,
        eps=1e-3, transpose_state_layout=turned, cu_seqlens=torch.tensor([0, T, 2 * T]) if packed else None)
    rows = {**t, "q": unit(t["q"]), "k": unit(t["k"])}
    if packed:
        rows = {key: x if key == "center" else x[0].unflatten(0, (B, T)) for key, x in rows.items()}
    expected, last_expected, A_expected = loop(rows, S, A, bound=2.0, eps=1e-3)
    got = (o.unflatten(1, (B, T))[0] if packed else o, last.transpose(2, 3) if turned else last, last_A)
    close(got, (expected, last_expected, A_expected))
    sums = [sum(x.square().sum() for x in found) for found in (got, (expected, last_expected, A_expected))]
    close(*(torch.autograd.grad(x, leaves) for x in sums), 1e-8)
    assert getattr(fla, name)(**given)[1:] == (None, None) or packed


def test_what_fla_has_beside_it():
    t, _ = inputs("precond_kda", value_heads=H)
    q, k, v, g, beta, g_atk, beta_atk, _ = t.values()
    raw, rate, bias = torch.randn_like(g), torch.randn(H, dtype=g.dtype), torch.randn(H * K, dtype=g.dtype)
    gate = -rate.exp()[:, None] * F.softplus(raw + bias.reshape(H, K))
    for function, own in itertools.product((fla.chunk_precond_kda, fla.fused_recurrent_precond_kda), (None, -0.5)):
        expected = function(q, k, v, gate, g_atk, beta_atk, beta, log_atk_scale=own)[0]
        got = function(q, k, v, raw, g_atk, beta_atk, beta, use_gate_in_kernel=True, A_log=rate, dt_bias=bias,
                       log_atk_scale=own)[0]
        close([got], [expected])
    with pytest.raises(heed.Unsupported, match="chunk_precond_kda: cp_context is given as object, expected None"):
        fla.chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta, cp_context=object())
    with pytest.raises(heed.Unsupported, match="gv is given"):
        fla.fused_recurrent_precond_gated_delta_rule(q, k, v, g[..., 0], None, v, beta, g_atk, beta_atk)
    with pytest.raises(heed.InvalidArgument, match="chunk_precond_kda: x is 0.5, expected a finite number >= 1"):
        fla.chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta, x=0.5)
    same = fla.fused_recurrent_precond_kda(q, k, v, g, g_atk, beta_atk, beta, use_qk_l2norm_in_kernel=False)[0]
    close([same], [heed.torch.precond_kda(q, k, v, g, beta, g_atk, beta_atk)])
