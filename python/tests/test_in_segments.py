# Mechanisms whose sequences are computed in segments: heed and heed.torch against calls without segments.
import numpy as np
import pytest

import heed
import mechanisms
import scans

TOKENS = 150
NAMES = [*mechanisms.WITH_STATE, *(name for name in scans.DESCRIPTIONS if name in ("selective_scan", "hgrn", "s4d"))]
OPTIONS = {"linear_attention": {"normalize": True}, "performer": {"causal": True}}


def arguments(name, dtype):
    module = mechanisms if name in mechanisms.NAMES else scans
    return module.arguments(name, T=TOKENS, dtype=dtype)


def error(got, expected):
    return np.abs(got - expected).max(initial=0) / (np.abs(expected).max(initial=0) + 1e-30)


@pytest.mark.parametrize("name", NAMES)
def test_segments_have_the_results_of_the_whole(name):
    values, options = arguments(name, np.float64), OPTIONS.get(name, {})
    forward, backward = getattr(heed, name), getattr(heed, f"{name}_backward")
    o, state = forward(**values, **options, return_state=True)
    got, after = forward(**values, **options, segment=64, return_state=True, threads=3)
    assert error(got, o) < 1e-11
    for a, b in zip(after if isinstance(after, tuple) else (after,), state if isinstance(state, tuple) else (state,)):
        assert error(a, b) < 1e-11
    do = np.random.default_rng(0).standard_normal(o.shape)
    gradients = backward(do, **values, **options)._asdict()
    for key, x in backward(do, **values, **options, segment=64)._asdict().items():
        assert (x is None) == (gradients[key] is None)
        assert x is None or error(x, gradients[key]) < 1e-10, key


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "ssd", "selective_scan"])
def test_tensors_have_the_bits_of_arrays(name):
    torch = pytest.importorskip("torch", reason="optional: PyTorch")
    import heed.torch

    values = arguments(name, np.float32)
    tensors = {key: torch.from_numpy(x).requires_grad_() for key, x in values.items()}
    o = getattr(heed.torch, name)(**tensors, segment=64)
    np.testing.assert_array_equal(o.detach().numpy(), getattr(heed, name)(**values, segment=64))
    with pytest.raises(heed.InvalidArgument, match=f"^{name}: segment is 100, expected 0 or a multiple of 64"):
        getattr(heed.torch, name)(**tensors, segment=100)
    do = np.random.default_rng(1).standard_normal(o.shape).astype(np.float32)
    o.backward(torch.from_numpy(do))
    expected = getattr(heed, f"{name}_backward")(do, **values, segment=64)._asdict()
    for key, x in tensors.items():
        np.testing.assert_array_equal(x.grad.numpy(), expected[f"d{key}"])
    assert heed.torch.gla.__signature__.parameters["segment"].default is None


def test_what_has_no_segments_says_so():
    values = arguments("gla", np.float32)
    for segment in (100, 63):
        with pytest.raises(heed.InvalidArgument, match=f"^gla: segment is {segment}, expected 0 or a multiple of 64"):
            heed.gla(**values, segment=segment)
    with pytest.raises(heed.InvalidArgument, match="segment"):
        heed.gla(**values, segment=-64)
    for nothing in (0, None):
        np.testing.assert_array_equal(heed.gla(**values, segment=nothing), heed.gla(**values))
    with pytest.raises(heed.Unsupported, match="^linear_attention: segment is 64, expected 0 where all tokens see"):
        heed.linear_attention(*(values[key] for key in "qkv"), causal=False, segment=64)
    with pytest.raises(heed.Unsupported, match="^h3: segment is 64"):
        heed.h3(**scans.arguments("h3", T=TOKENS), segment=64)


def test_explain_says_what_segments_cost():
    shape = (1, 65536, 1, 64)
    call = {"q": shape, "k": shape, "v": shape, "log_decay": shape, "threads": 8}
    assert ", in segments of 4096 tokens: 1.6 times the work" in heed.explain("gla", **call, segment=4096)["why"]
    assert "segment=4096 would be by count" in heed.explain("gla", **call)["why"]
