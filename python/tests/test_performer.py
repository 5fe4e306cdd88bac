# heed.performer and heed.torch's: its definition, causality, states of three parts, gradients.
import mechanisms
import numpy as np
import pytest

import heed

B, T, H, HV, K, V, M = 2, 70, 2, 4, 12, 10, mechanisms.ROWS


def values(**sizes):
    return mechanisms.arguments("performer", **sizes)


def features(x, W, kernel, largest, eps):
    y = x * x.shape[-1] ** -0.25
    products = y @ W.T
    if kernel == "relu":
        return np.maximum(products, 0) + 1e-3
    shift = products.max(axis=-1, keepdims=True) if largest is None else largest
    return (np.exp(products - (y * y).sum(axis=-1, keepdims=True) / 2 - shift) + eps) / np.sqrt(len(W))


def naive(q, k, v, projection, causal=False, kernel="softmax", eps=1e-4):
    q, k = (np.repeat(x, HV // H, axis=2) for x in (q, k))
    largest = (k * K**-0.25 @ projection.T).max(axis=(1, 3), keepdims=True)
    phi_q, phi_k = (features(x, projection, kernel, y, 0 if causal else eps) for x, y in ((q, None), (k, largest)))
    weights = np.einsum("bthm,bshm->bhts", phi_q, phi_k)
    if causal:
        weights = np.tril(weights)
    return np.einsum("bhts,bshv->bthv", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_outputs_are_those_of_the_definition(causal, kernel):
    arrays = values()
    o = heed.performer(*arrays.values(), causal=causal, kernel=kernel)
    np.testing.assert_allclose(o, naive(*arrays.values(), causal=causal, kernel=kernel), rtol=0, atol=1e-12)


def test_the_default_is_not_causal_with_eps():
    arrays = list(values().values())
    assert np.array_equal(heed.performer(*arrays), heed.performer(*arrays, causal=False, kernel="softmax", eps=1e-4))
    assert not np.array_equal(heed.performer(*arrays), heed.performer(*arrays, eps=1e-3))
    with pytest.raises(heed.InvalidArgument, match="performer: initial_state|final_state"):
        heed.performer(*arrays, return_state=True)


def test_states_have_three_parts_and_steps_continue_them():
    arrays = values()
    whole, last = heed.performer(*arrays.values(), causal=True, return_state=True)
    assert last._fields == ("S", "z", "m") and [x.shape for x in last] == [(B, HV, M, V), (B, HV, M), (B, HV)]
    largest = (arrays["k"] * K**-0.25 @ arrays["projection"].T).max(axis=(1, 3))
    np.testing.assert_allclose(last.m, np.repeat(largest, HV // H, axis=1), rtol=1e-12)

    W = arrays.pop("projection")
    first, state = heed.performer(*(x[:, :60] for x in arrays.values()), W, causal=True, return_state=True)
    o, again = heed.performer(
        *(x[:, 60:] for x in arrays.values()), W, causal=True, initial_state=state, return_state=True
    )
    np.testing.assert_allclose(np.concatenate([first, o], axis=1), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(again.S * np.exp(again.m)[..., None, None], last.S * np.exp(last.m)[..., None, None])
    for t in range(60, 70):
        o = heed.performer_step(*(x[:, t] for x in arrays.values()), W, state, causal=True)
        np.testing.assert_allclose(o, whole[:, t], rtol=0, atol=1e-12)
    for x, y in zip(state, last):
        np.testing.assert_allclose(x, y, rtol=1e-11)
    with pytest.raises(heed.InvalidArgument, match="initial_state.m is absent"):
        heed.performer(*arrays.values(), W, causal=True, initial_state=tuple(state[:2]))


@pytest.mark.parametrize("options",
                         [{"eps": 0.0}, {"kernel": "relu"}, {"causal": True}, {"causal": True, "reverse": True}])
def test_gradients_are_differences(options):
    arrays = values(T=20)
    rng = np.random.default_rng(3)
    do = rng.standard_normal((B, 20, HV, V))
    gradients = heed.performer_backward(do, *arrays.values(), **options)
    assert gradients._fields == ("dq", "dk", "dv", "dprojection", "dinitial_state") and gradients[-1] is None
    # Maxima count as constants: where nothing is added to exponentials they cancel.
    for name, gradient in zip(arrays, gradients):
        x = arrays[name]
        for _ in range(4):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append((heed.performer(*arrays.values(), **options) * do).sum())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_bad_input():
    arrays = values(T=5)
    bad = {"projection": arrays["projection"][:, :-1]}
    with pytest.raises(heed.InvalidArgument, match=r"projection has shape \[20,11\], expected \[M, K = 12\], M >= 1"):
        heed.performer(*(arrays | bad).values())
    with pytest.raises(heed.InvalidArgument, match="kernel"):
        heed.performer(*arrays.values(), kernel="elu")
    with pytest.raises(heed.InvalidArgument, match="eps"):
        heed.performer(*arrays.values(), eps=-1.0)
    with pytest.raises(heed.InvalidArgument, match="performer_step: causal|performer_step: state"):
        heed.performer_step(*(x[:, 0] if x.ndim == 4 else x for x in arrays.values()), np.zeros((B, HV, M, V)))


def test_torch_states_and_gradients():
    torch = pytest.importorskip("torch")
    import heed.torch

    arrays = {key: torch.from_numpy(x) for key, x in values(T=9, H=1, HV=2, K=3, V=4).items()}
    o, state = heed.torch.performer(*arrays.values(), causal=True, return_state=True)
    expected, last = heed.performer(*(x.numpy() for x in arrays.values()), causal=True, return_state=True)
    assert np.array_equal(o.numpy(), expected) and len(state) == 3
    assert all(np.array_equal(x.numpy(), y) for x, y in zip(state, last))

    tensors = [x.clone().requires_grad_() for x in (*arrays.values(), *state[:2])]

    def function(kernel):
        def call(q, k, v, projection, S, z):
            o, (S, z, m) = heed.torch.performer(
                q, k, v, projection, causal=True, kernel=kernel, initial_state=(S, z, state[2]), return_state=True
            )
            scale = m.detach().exp()  # S and z are relative to this scale: their products do not depend on it
            return o, S * scale[..., None, None], z * scale[..., None]

        return call

    for kernel in ("softmax", "relu"):
        assert torch.autograd.gradcheck(function(kernel), tensors, atol=1e-6, rtol=1e-4)
    torch.library.opcheck(torch.ops.heed.performer.default, tuple(tensors[:4]))
