# Code that bypasses PyTorch's dispatcher handles tangents, lazy signs, version counters and default devices itself.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mechanisms  # noqa: E402
import scans  # noqa: E402
from mechanisms import DESCRIPTIONS, NAMES, OPTIONAL, WITH_STATE, state_shape  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402


def normal(*shape, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def filled(dtype=torch.float32):
    cache = heed.torch.KVCache(1, 2, 4, dtype=dtype)
    cache.append(normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=2))
    return cache


def step(name):
    """A function of the query of one token, with a state that it leaves as it was."""
    values = {key: torch.from_numpy(x) for key, x in mechanisms.arguments(name, B=1, T=1, H=1, HV=1, K=4, V=4).items()}
    token = {key: x.float().contiguous() if x.is_floating_point() else x
             for key, x in mechanisms.at_tokens(values, 0).items()}
    query = DESCRIPTIONS[name]["query"]

    def function(q):
        own = token | {query: q}
        state = torch.zeros(state_shape(name, 1, 1, 4, 4))
        positional = [x for key, x in own.items() if key not in OPTIONAL[name]]
        keywords = {key: own[key] for key in OPTIONAL[name] if key in own}
        settings = {"normalize": False} if "normalize" in DESCRIPTIONS[name]["settings"] else {}
        return getattr(heed.torch, name + "_step")(*positional, state, **keywords, **settings)

    return function, token[query]


def scan_step(name):
    """The step of a scan as a function of its first input."""
    values = {key: torch.from_numpy(x).float() for key, x in scans.arguments(name).items()}
    token = scans.at_tokens(name, values, 0)
    first = next(iter(token))

    def function(x):
        state = scans.of_each(lambda x: torch.from_numpy(x).float(), scans.state_of(name))
        return getattr(heed.torch, name + "_step")(**token | {first: x}, state=state)

    return function, token[first]


def parts(x):
    return [(x, normal(1, 2, 3, seed=4)), (normal(1, 3, 2, 4, seed=5), normal(1, 2, 3, seed=6))]


Q = normal(1, 3, 2, 4)
PLAIN = {  # functions of one tensor that are no operators
    "attention_weights": (lambda x: heed.torch.attention_weights(x, Q), Q),
    "attention_map": (lambda x: heed.torch.attention_map(x, Q, size=(2, 2)), Q),
    "merge_attention": (lambda x: heed.torch.merge_attention(parts(x))[0], Q),
    "attention(out=)": (lambda x: heed.torch.attention(x, Q, Q, out=torch.zeros_like(Q)), Q),
    "KVCache.attend": (lambda x, cache=filled(): cache.attend(x), Q),
    "KVCache.append": (lambda x: heed.torch.KVCache(1, 2, 4).append(x, Q), Q),
    "causal_conv1d_step": (
        lambda x: heed.torch.causal_conv1d_step(x, normal(3, 4), None, torch.zeros(2, 3, 3)), normal(2, 3),
    ),
    **{f"{name}_step": step(name) for name in WITH_STATE if name != "performer"},
    **{f"{name}_step": scan_step(name) for name in scans.NAMES},
}


@pytest.mark.parametrize("name", PLAIN)
def test_tangents_and_transforms_are_refused(name):
    function, x = PLAIN[name]
    function(x)
    public = name.removesuffix("(out=)")
    with torch.autograd.forward_ad.dual_level():
        function(x)  # which has no tangent
        with pytest.raises(heed.Unsupported, match=f"{public}: a forward derivative"):
            function(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(heed.Unsupported, match=f"{public}: a forward derivative"):
        torch.func.jvp(function, (x,), (x,))
    with pytest.raises(heed.Unsupported, match=f"{public}: .* is inside a transform of torch.func"):
        torch.vmap(function)(x[None])


def negated(x):
    """x as a view whose sign is not applied yet."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", PLAIN)
def test_signs_that_a_view_has_not_applied_are(name):
    function, x = PLAIN[name]
    ours, theirs = function(negated(x)), function(x)
    assert ours is None or torch.equal(ours, theirs)


def test_the_doors_of_numpy_refuse_them():
    x = negated(Q)
    cache = heed.KVCache(1, 2, 4)
    for call in (
        lambda: heed.attention(x, Q, Q), lambda: heed.attention(Q, Q, x), lambda: heed.attention(Q, Q, Q, out=x),
        lambda: heed.retention(x, Q, Q),
        lambda: cache.append(x, Q), lambda: heed.rotary(x, [0, 1, 2], interleaved=True),
        lambda: heed.attention_weights(x, Q), lambda: heed.attention(Q, Q, Q, bias=negated(normal(3, 3))),
    ):
        with pytest.raises(heed.InvalidArgument, match="is a negated view, expected resolve_neg"):
            call()


@pytest.mark.parametrize("name", [*NAMES, "attention"])
def test_operators_see_signs(name):
    if name == "attention":
        assert torch.equal(heed.torch.attention(negated(Q), negated(Q), negated(Q)), heed.torch.attention(Q, Q, Q))
        return
    values = {key: torch.from_numpy(x) for key, x in mechanisms.arguments(name, B=1, T=3, H=1, HV=1, K=4, V=4).items()}

    def run(values):
        positional = [x for key, x in values.items() if key not in OPTIONAL[name]]
        return getattr(heed.torch, name)(*positional, **{key: values[key] for key in OPTIONAL[name] if key in values})

    views = {key: negated(x) if x.is_floating_point() else x for key, x in values.items()}
    assert torch.equal(run(views), run(values))


def test_nobody_writes_into_a_view_with_other_signs():
    out, state = negated(torch.ones(1, 3, 2, 4)), negated(torch.ones(1, 2, 4, 4))
    token = normal(1, 2, 4)
    for call in (
        lambda: heed.torch.attention(Q, Q, Q, out=out),
        lambda: filled().attend(Q, out=out),
        lambda: heed.torch.retention_step(token, token, token, state),
    ):
        with pytest.raises(heed.InvalidArgument, match="other signs"):
            call()
    assert torch.equal(out, torch.ones(1, 3, 2, 4)) and torch.equal(state, torch.ones(1, 2, 4, 4))


def test_autograd_learns_what_was_written():
    """A backward pass that needs what was there before fails."""
    token = normal(1, 2, 4)
    calls = {
        "attention": (torch.ones(1, 3, 2, 4), lambda x: heed.torch.attention(Q, Q, Q, out=x)),
        "attend": (torch.ones(1, 3, 2, 4), lambda x: filled().attend(Q, out=x)),
        "step": (torch.ones(1, 2, 4, 4), lambda x: heed.torch.retention_step(token, token, token, x)),
        "state by name": (torch.ones(1, 2, 4, 4), lambda x: heed.torch.retention_step(token, token, token, state=x)),
        "out of a step": (torch.ones(1, 2, 4), lambda x: heed.torch.retention_step(
            token, token, token, torch.zeros(1, 2, 4, 4), out=x)),
        "convolution": (torch.ones(2, 3, 3),
                        lambda x: heed.torch.causal_conv1d_step(normal(2, 3), normal(3, 4), None, x)),
    }
    for name, (x, call) in calls.items():
        factor = torch.ones_like(x, requires_grad=True)
        y = (factor * x).sum()
        with torch.no_grad():
            call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
            pytest.fail(name)


def test_lists_do_not_follow_the_default_device():
    x, cache = normal(1, 3, 1, 4), filled()
    with torch.device("meta"):
        heed.torch.attention(x, x, x, key_lengths=[2], alibi=[0.5], dropout=0.5)
        heed.torch.attention(x, x, x, dropout=0.5, seed=7)
        heed.torch.retention(x, x, x, lengths=[2], starts=[1])
        heed.torch.linformer(x, x, x, normal(2, 3), normal(2, 3), lengths=[2])
        heed.torch.longformer(x, x, x, window=2, tokens=[1], key_lengths=[2], dropout=0.5)
        heed.torch.merge_linear(x, normal(1, 1, 3), x, normal(1, 3, 1), gate=[0.5])
        heed.torch.compressed_attention(x, x, x, x, x, ratio=1, window=2, sinks=[0.5], starts=[1])
        heed.torch.attention_residual(normal(4), [normal(1, 3, 4), normal(1, 3, 4)], normal(4))
        heed.torch.causal_conv1d(normal(1, 2, 5), normal(2, 3), lengths=[3])
        heed.torch.rotary(x, [0, 1, 2], interleaved=True)
        cache.append(normal(1, 1, 2, 4), normal(1, 1, 2, 4))
        module = heed.torch.MultiheadAttention(4, 2, batch_first=True, device="cpu")
        hidden = normal(1, 3, 4)
        module(hidden, hidden, hidden, key_padding_mask=normal(1, 3) > 9, attn_mask=normal(3, 3) > 9,
               need_weights=False)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_is_an_invalid_argument(name):
    values = {key: torch.from_numpy(x) for key, x in mechanisms.arguments(name, B=1, T=3, H=1, HV=1, K=4, V=4).items()}
    for key in values:
        if key in OPTIONAL[name]:
            continue
        for wrong in (None, "x", values[key].numpy()):
            if wrong is None and key in DESCRIPTIONS[name]["nullable"]:
                continue
            own = values | {key: wrong}
            with pytest.raises(heed.InvalidArgument, match=f"{name}: {key} is of type"):
                getattr(heed.torch, name)(*(x for of, x in own.items() if of not in OPTIONAL[name]))
    positional = [x for key, x in values.items() if key not in OPTIONAL[name]]
    with pytest.raises(heed.InvalidArgument, match="cu_seqlens has shape"):
        getattr(heed.torch, name)(*positional, cu_seqlens=[])
    if "causal" in DESCRIPTIONS[name]["settings"]:
        with pytest.raises(heed.InvalidArgument, match="return_state is True"):
            getattr(heed.torch, name)(*positional, causal=False, return_state=True)


def test_what_is_no_tensor_elsewhere():
    for call in (
        lambda: heed.torch.attention(None, Q, Q),
        lambda: heed.torch.attention(Q, Q, "v"),
        lambda: heed.torch.linformer(Q, Q, None, Q, Q),
        lambda: heed.torch.longformer(Q, Q, Q, "qg", window=2, tokens=[0]),
        lambda: heed.torch.nsa(Q, Q, Q, None),
        lambda: heed.torch.nsa(Q, Q, Q, Q, compressed=(Q, "v")),
        lambda: heed.torch.merge_linear(Q, Q, None, Q),
        lambda: heed.torch.compressed_attention(Q, Q, Q, None, Q, ratio=1, window=2),
        lambda: heed.torch.compressed_attention(Q, Q, Q, Q, Q, ratio=1, window=2, chosen=[[0]]),
        lambda: heed.torch.attention_residual(Q, [Q, None]),
        lambda: heed.torch.causal_conv1d(None, Q),
        lambda: heed.torch.rotary(None, [0], interleaved=True),
        lambda: heed.torch.t5_bias(None, 3, 3, bidirectional=True),
        lambda: heed.torch.causal_conv1d(normal(1, 2, 5), normal(2, 3), cu_seqlens=[]),
    ):
        with pytest.raises(heed.InvalidArgument):
            call()


def test_states_are_named_tuples():
    x = normal(1, 3, 1, 4).abs()
    _, state = heed.torch.linear_attention(x, x, x, return_state=True)
    _, expected = heed.linear_attention(x.numpy(), x.numpy(), x.numpy(), return_state=True)
    assert type(state) is type(expected) and state._fields == ("S", "z")
    token = x[:, 0].contiguous()
    o = heed.torch.linear_attention_step(token, token, token, state)
    assert np.array_equal(o.numpy(), heed.linear_attention_step(*[token.numpy()] * 3, expected))
    assert np.array_equal(state.S.numpy(), expected.S)
    whole, _ = heed.torch.linear_attention(x, x, x, initial_state=state, return_state=True)
    assert whole.shape == x.shape
