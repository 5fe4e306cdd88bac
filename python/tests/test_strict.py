# heed.set_strict(True): slow calls are refused by name, and all others run as before.
import numpy as np
import pytest
import scans
from mechanisms import DESCRIPTIONS, NAMES, arguments, call

import heed

torch = pytest.importorskip("torch")
import heed.torch  # noqa: E402

RNG = np.random.default_rng(3)


def strided(x):
    """The numbers of x as every other element of a longer last axis."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("name", ["attention", *NAMES])
def test_an_array_that_would_be_copied_is_refused_by_name(name):
    values = dict(zip("qkv", RNG.standard_normal((3, 1, 8, 2, 4)))) if name == "attention" else arguments(name, T=8)
    key = "q" if name == "attention" else DESCRIPTIONS[name]["query"]
    run = heed.attention if name == "attention" else lambda **x: call(getattr(heed, name), x)
    expected = run(**values)
    heed.set_strict(True)
    assert np.array_equal(run(**values), expected)
    slow = values | {key: strided(values[key])}
    with pytest.raises(heed.Unsupported,
                       match=f"{name}: {key}: its last axis is not contiguous, so that it would be copied"):
        run(**slow)
    assert heed.explain(name, **slow)["copies"] == [key]  # as it says without calling
    heed.set_strict(False)
    assert np.array_equal(run(**slow), expected)


def test_an_array_that_is_not_aligned_is_refused():
    q, k, v = RNG.standard_normal((3, 1, 8, 2, 4))
    memory = np.zeros(q.nbytes + 1, np.uint8)
    shifted = memory[1:].view(np.float64).reshape(q.shape)
    shifted[:] = q
    heed.set_strict(True)
    with pytest.raises(heed.Unsupported, match="attention: q: is not aligned to its elements"):
        heed.attention(shifted, k, v)


def test_a_convolution_does_not_gather():
    x, weight = RNG.standard_normal((2, 8, 12)), RNG.standard_normal((8, 4))
    gathered = np.repeat(np.repeat(x, 2, 2), 2, 1)[:, ::2, ::2]
    heed.set_strict(True)
    expected = heed.causal_conv1d(x, weight)
    assert np.array_equal(heed.causal_conv1d(x[..., ::-1].copy()[..., ::-1], weight), expected)
    for function in (heed.causal_conv1d, lambda x, w: heed.causal_conv1d_backward(x, x, w)):
        with pytest.raises(heed.Unsupported, match="x: neither tokens nor channels are contiguous"):
            function(gathered, weight)
    heed.set_strict(False)
    assert np.array_equal(heed.causal_conv1d(gathered, weight), expected)


@pytest.mark.parametrize("name", scans.DESCRIPTIONS)
def test_a_scan_does_not_gather(name):
    values = scans.arguments(name, T=8)
    first = next(iter(values))
    x = values[first]
    gathered = np.repeat(np.repeat(x, 2, -1), 2, 1)[:, ::2, ..., ::2]
    heed.set_strict(True)
    expected = scans.call(name, values)
    for lies in (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2), x[..., ::-1].copy()[..., ::-1]):
        assert np.array_equal(scans.call(name, values | {first: lies}), expected)
    refused = "neither tokens nor channels are contiguous"
    with pytest.raises(heed.Unsupported, match=f"{name}: {first}: {refused}"):
        scans.call(name, values | {first: gathered})
    with pytest.raises(heed.Unsupported, match=f"{name}_backward: do: {refused}"):
        scans.call(name, values, gathered, suffix="_backward")
    if name in scans.NAMES:
        scans.call(name, scans.at_tokens(name, values | {first: gathered}, 0), suffix="_step",
                   state=scans.state_of(name))
    heed.set_strict(False)
    assert np.array_equal(scans.call(name, values | {first: gathered}), expected)


def test_tensors_are_refused_too():
    values = {key: torch.from_numpy(x) for key, x in arguments("gla", T=8).items()}
    heed.set_strict(True)
    heed.torch.gla(**values)
    with pytest.raises(heed.Unsupported, match="gla: k: its last axis is not contiguous"):
        heed.torch.gla(**values | {"k": torch.from_numpy(strided(values["k"].numpy()))})


def with_pairs(**options):
    """Arguments of attention and its backward pass, and of a cache with the same keys."""
    q, k, v, do = RNG.standard_normal((4, 1, 6, 2, 4))
    o, lse = heed.attention(q, k, v, return_lse=True, **options)
    cache = heed.KVCache(1, 2, 4, dtype="f64")
    cache.append(k, v)
    return {"attention": lambda: heed.attention(q, k, v, **options),
            "attention_backward": lambda: heed.attention_backward(do, q, k, v, o, lse, **options),
            "attention_weights": lambda: heed.attention_weights(q, k, **options),
            "KVCache.attend": lambda: cache.attend(q, causal=False, **options)}, {
            "attention": lambda: heed.explain("attention", q=q, k=k, v=v, **options),
            "attend": lambda: heed.explain("attend", cache=cache, q=q, causal=False, **options)}


@pytest.mark.parametrize("options, why", [
    ({"bias": np.zeros((6, 6), np.float32)}, "bias: it is f32 beside f64"),
    ({"bias": np.zeros((6, 1))}, "bias: its keys are not contiguous"),
    ({"mask": np.ones((6, 1), bool)}, "mask: its keys are not contiguous")])
def test_pairs_are_not_read_one_by_one(options, why):
    """In the words of explain, which refuses nothing."""
    calls, explanations = with_pairs(**options)
    heed.set_strict(True)
    for name, call_it in calls.items():
        with pytest.raises(heed.Unsupported, match=f"{name}: {why}, so that pairs are read one by one, which"):
            call_it()
    for explain in explanations.values():
        assert explain()["why"].endswith(f"; {why}, so that pairs are read one by one")
    heed.set_strict(False)
    for call_it in calls.values():
        call_it()


@pytest.mark.parametrize("options",
                         [{"bias": np.zeros((6, 6))}, {"mask": np.ones((6, 6), bool)}, {"alibi": [0.5, 0.25]}])
def test_pairs_that_are_read_in_runs_are_not_refused(options):
    calls, explanations = with_pairs(**options)
    heed.set_strict(True)
    for call_it in calls.values():
        call_it()
    for explain in explanations.values():
        assert "one by one" not in explain()["why"]


def test_queries_and_gradients_that_would_be_copied_are_refused():
    q, k, v, do = RNG.standard_normal((4, 1, 6, 2, 4))
    o, lse = heed.attention(q, k, v, return_lse=True)
    cache = heed.KVCache(1, 2, 4, dtype="f64")
    cache.append(k, v)
    heed.set_strict(True)
    with pytest.raises(heed.Unsupported, match="attention_backward: do: its last axis is not contiguous"):
        heed.attention_backward(strided(do), q, k, v, o, lse)
    with pytest.raises(heed.Unsupported, match="KVCache.attend: q: its last axis is not contiguous"):
        cache.attend(strided(q))
    assert heed.explain("attend", cache=cache, q=strided(q))["copies"] == ["q"]


def test_tensors_meet_the_same_refusals():
    q, k, v = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(6, 6, dtype=torch.float64)
    heed.torch.attention(q, k, v, bias=bias).sum()
    heed.set_strict(True)
    o = heed.torch.attention(q, k, v, bias=bias)
    with pytest.raises(heed.Unsupported, match="attention: bias: its keys are not contiguous"):
        heed.torch.attention(q, k, v, bias=bias[:, :1])
    with pytest.raises(heed.Unsupported, match="the gradient of o: its last axis is not contiguous"):
        o.backward(torch.ones(1, 6, 2, 8, dtype=torch.float64)[..., ::2])
