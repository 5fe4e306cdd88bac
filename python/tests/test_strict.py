# heed.set_strict(True): what is slow is refused, by name, and what is not runs as before.
import numpy as np
import pytest
import scans
from mechanisms import DESCRIPTIONS, NAMES, arguments, call

import heed

torch = pytest.importorskip("torch")
import heed.torch  # noqa: E402

RNG = np.random.default_rng(3)


def strided(x):
    """The same numbers, every other of a longer last axis."""
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
    with pytest.raises(heed.Unsupported, match=f"{name}: {key}: its last axis is not contiguous, so that it would be copied"):
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
        scans.call(name, scans.at_tokens(name, values | {first: gathered}, 0), suffix="_step", state=scans.state_of(name))
    heed.set_strict(False)
    assert np.array_equal(scans.call(name, values | {first: gathered}), expected)


def test_tensors_are_refused_too():
    values = {key: torch.from_numpy(x) for key, x in arguments("gla", T=8).items()}
    heed.set_strict(True)
    heed.torch.gla(**values)
    with pytest.raises(heed.Unsupported, match="gla: k: its last axis is not contiguous"):
        heed.torch.gla(**values | {"k": torch.from_numpy(strided(values["k"].numpy()))})
