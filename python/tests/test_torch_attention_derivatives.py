# Second derivatives and forward mode of attention: numerical checks in float64, and against PyTorch's math path.
import os

import pytest

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402
from heed.torch import _attention_derivatives  # noqa: E402

DIFFERENTIABLE = ("bias", "sinks", "alibi", "log_decay", "relative_bias")
RANDOM_CALLS = int(os.environ.get("HEED_TEST_CALLS", 5))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decays(*shape):
    return -normal(*shape, seed=9).abs() - 0.01


def case(options, heads_first=False, packed=False):
    """(attention as a function of its differentiable tensors, these): o and lse, where a row sees a key."""
    shapes = [(2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 2)]
    if packed:
        shapes = [shape[1:] for shape in shapes]
    tensors = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    names = [name for name in DIFFERENTIABLE if name in options]

    def function(q, k, v, *numbers):
        o, lse = heed.torch.attention(q, k, v, return_lse=True, **options | dict(zip(names, numbers)))
        return o, lse.masked_fill(lse.isinf(), 0)

    return function, [x.requires_grad_() for x in (*tensors, *(options[name].clone() for name in names))]


def check(function, tensors):
    """First derivatives in forward mode; second ones in reverse mode twice, and in forward mode of reverse mode."""
    tolerance = {"atol": 1e-6, "rtol": 1e-4, "fast_mode": True}
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False, **tolerance)
    assert torch.autograd.gradgradcheck(function, tensors, **tolerance)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, check_rev_over_rev=False,
                                        check_undefined_grad=False, **tolerance)


OPTIONS = {
    "none": {}, "causal": {"causal": True}, "softcap": {"softcap": 0.7, "causal": True}, "scale": {"scale": -0.4},
    "window": {"window": (2, 1)}, "window, sink tokens": {"window": (1, 0), "sink_tokens": 2},
    "chunk": {"chunk": 3, "causal": True},
    "segments": {"segments": ([[0, 0, 1, 1, 1]] * 2, [[0, 0, 1, 1, 1, 2, 2]] * 2)},
    "lengths": {"key_lengths": [4, 7], "query_lengths": [5, 3], "causal": True, "align": "top_left"},
    "starts": {"key_starts": [2, 0], "align": [3, 1], "causal": True, "prefix": [1, 4]},
    "mask": {"mask": normal(2, 1, 5, 7) > -0.4}, "pattern": {"pattern": heed.patterns.dilated(2, 3)},
    "dropout": {"dropout": 0.3, "seed": 5, "dropout_offset": 2}, "sinks": {"sinks": normal(4)},
    "dropout, sinks": {"dropout": 0.4, "seed": 7, "sinks": normal(4)},
    "a sink that takes all": {"sinks": torch.tensor([0.0, 1.0, torch.inf, -torch.inf])},
    "alibi": {"alibi": normal(4)}, "alibi by sequence": {"alibi": normal(2, 4), "causal": True},
    "bias": {"bias": normal(2, 4, 5, 7)}, "bias by head and key": {"bias": normal(4, 1, 7), "dropout": 0.2, "seed": 3},
    "bias by pair, softcap": {"bias": normal(5, 7), "softcap": 1.0},
    "relative_bias": {"relative_bias": normal(4, 3)},
    "relative_bias, softcap": {"relative_bias": normal(4, 9), "softcap": 1.0, "causal": True, "align": [4, 1]},
    "log_decay": {"log_decay": decays(2, 7, 4), "causal": True},
    "log_decay, prefix": {"log_decay": decays(2, 7, 4), "causal": True, "prefix": [3, 6], "align": "top_left",
                          "key_starts": [0, 1], "key_lengths": [7, 5]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, monkeypatch):
    if name in ("window, sink tokens", "dropout, sinks", "alibi by sequence", "bias by pair, softcap",
                "relative_bias, softcap", "log_decay, prefix"):  # several tiles
        monkeypatch.setattr(_attention_derivatives, "_TILE", 8)
        monkeypatch.setattr(_attention_derivatives, "_ROWS", 2)
    options = OPTIONS[name]
    if name == "a sink that takes all":  # no numerical derivative of an infinite sink
        function, tensors = case({**options, "sinks": options["sinks"].clamp(-30, 30)})
        infinite = case(options)[0]
        expected, got = (torch.func.jvp(lambda q: f(q, *rest)[0], (tensors[0].detach(),), (normal(2, 5, 4, 3),))[1]
                         for f, rest in ((function, tensors[1:]), (infinite, [*tensors[1:3], options["sinks"]])))
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    else:
        check(*case(options))


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"dropout": 0.4, "seed": 3}, {"alibi": normal(3, 4), "align": "top_left", "causal": True},
    {"log_decay": decays(7, 4), "causal": True}, {"relative_bias": normal(4, 3)}], ids=lambda x: ", ".join(x) or "none")
def test_packed_sequences(options):
    check(*case({**options, "cu_seqlens_q": [0, 2, 2, 5], "cu_seqlens_k": [0, 3, 4, 7]}, packed=True))


def test_random_options():
    """Options in combination, with the sizes of one call."""
    names = [name for name in OPTIONS if name not in ("none", "a sink that takes all")]
    draws = torch.Generator().manual_seed(0)
    for _ in range(RANDOM_CALLS):
        chosen = [names[i] for i in torch.randperm(len(names), generator=draws)[:3].tolist()]
        options = {key: value for name in chosen for key, value in OPTIONS[name].items()}
        try:
            heed.torch.attention(*(normal(*x) for x in ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 2))), **options)
        except (heed.InvalidArgument, heed.Unsupported):
            continue  # options that exclude each other
        check(*case(options))


def reference(q, k, v, causal=True):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


def second_derivatives(function, tensors, seeds):
    tensors = [x.clone().requires_grad_() for x in tensors]
    o = function(*tensors)
    do = normal(*o.shape, seed=seeds, dtype=o.dtype).requires_grad_()
    first = torch.autograd.grad(o, tensors, do, create_graph=True)
    along = [normal(*x.shape, seed=seeds + i, dtype=x.dtype) for i, x in enumerate(first, 1)]
    return torch.autograd.grad(first, [do, *tensors], along)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 4e-2),
                                              (torch.float16, 6e-3)], ids=str)
def test_many_tiles_agree_with_the_math_path(dtype, tolerance):
    tensors = [normal(2, 300, 3, 16, seed=i).to(dtype) for i in range(3)]
    found = second_derivatives(lambda *x: heed.torch.attention(*x, causal=True), tensors, 10)
    expected = second_derivatives(reference, [x.double() for x in tensors], 10)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max()


def test_hessian_and_mixed_modes():
    q, k, v = normal(1, 3, 2, 2), normal(1, 3, 2, 2, seed=1), normal(1, 3, 2, 2, seed=2)

    def loss(attention, x):
        return attention(x, k, v).pow(2).sum()

    def ours(x, k, v):
        return heed.torch.attention(x, k, v, causal=True)

    expected = torch.autograd.functional.hessian(lambda x: loss(reference, x), q)
    torch.testing.assert_close(torch.func.hessian(lambda x: loss(ours, x))(q), expected)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(lambda x: loss(ours, x)))(q), expected)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(lambda x: loss(ours, x)))(q), expected)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: ours(x, k, v))(q), torch.func.jacrev(
        lambda x: reference(x, k, v))(q))


def test_scaled_dot_product_attention():
    tensors = [normal(2, 2, 5, 3, seed=i).requires_grad_() for i in range(3)]
    mask = normal(5, 5, seed=7).requires_grad_()
    check(heed.torch.scaled_dot_product_attention, [*tensors, mask])


def test_the_operator_is_one_for_tracers():
    q, k, v = (normal(1, 6, 2, 4, seed=i) for i in range(3))
    results = torch.ops.heed.attention(q, k, v)
    do, needed = normal(1, 6, 2, 4, seed=5), [True] * 3 + [False] * 5
    arguments = (q, None, v, *(None,) * 5, do, None, q, k, v, *results, needed)
    torch.library.opcheck(torch.ops.heed.attention_derivatives, arguments,
                          test_utils=("test_schema", "test_faketensor"))


def test_keys_that_no_row_sees_reach_nothing():
    q, k, v = normal(1, 4, 1, 2), normal(1, 6, 1, 2, seed=1), normal(1, 6, 1, 2, seed=2)
    options = {"key_lengths": [4], "causal": True, "align": "top_left"}

    def run(k, v, along):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        o = heed.torch.attention(*tensors, **options)
        first = torch.autograd.grad(o, tensors, torch.ones_like(o), create_graph=True)
        return torch.autograd.grad(first, tensors, [torch.ones_like(q), along, along])

    bad = torch.cat([k[:, :4], torch.full((1, 2, 1, 2), torch.nan)], 1)
    expected = run(torch.cat([k[:, :4], torch.zeros(1, 2, 1, 2)], 1), v, torch.ones_like(k))
    infinite = torch.cat([v[:, :4], torch.full((1, 2, 1, 2), torch.inf)], 1)
    along = torch.where(torch.arange(6)[None, :, None, None] < 4, 1.0, torch.nan).double().expand_as(k)
    for found in (run(bad, infinite, torch.ones_like(k)), run(k, v, along)):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_third_derivatives_are_refused():
    q, k, v = (normal(1, 3, 1, 2, seed=i).requires_grad_() for i in range(3))
    (first,) = torch.autograd.grad(heed.torch.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q, create_graph=True)
    with pytest.raises(heed.Unsupported, match="attention: a third derivative"):
        second.sum().backward()

    def along(function):
        return lambda x: torch.func.jvp(function, (x,), (x,))[1]

    with pytest.raises(heed.Unsupported, match="attention: a second forward derivative"):
        along(along(lambda x: heed.torch.attention(x, k.detach(), v.detach())))(q.detach())


def test_memory_is_linear_in_the_number_of_tokens():
    def allocated(tokens):
        tensors = [normal(1, tokens, 2, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
        o = heed.torch.attention(*tensors)
        first = torch.autograd.grad(o, tensors, torch.ones_like(o), create_graph=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch.autograd.grad(first, tensors, [torch.ones_like(x) for x in tensors])
        live = peak = 0
        for event in sorted((x for x in profile.events() if x.name == "[memory]"), key=lambda x: x.time_range.start):
            live += event.cpu_memory_usage
            peak = max(peak, live)
        return peak

    assert allocated(4096) <= 4.5 * allocated(1024) < 2 ** 26
