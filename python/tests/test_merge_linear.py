# heed.merge_linear: against plain NumPy, as attention over a union of keys, and in PyTorch.
import numpy as np
import pytest

import heed

RNG = np.random.default_rng(0)


def inputs(B=2, T=7, H=3, D=5, dtype=np.float64):
    """o, lse, num, den, gate."""
    o, num = RNG.standard_normal((2, B, T, H, D)).astype(dtype)
    lse, den = RNG.standard_normal((B, H, T)).astype(dtype), RNG.random((B, T, H)).astype(dtype)
    return o, lse, num, den, RNG.random(H).astype(dtype)


def naive(o, lse, num, den, gate=1.0):
    e = (gate * np.exp(lse).transpose(0, 2, 1))[..., None]
    return (e * o + num) / (e + den[..., None])


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-14), (np.float32, 1e-6), (np.float16, 5e-3)])
def test_it_is_the_formula(dtype, atol):
    o, lse, num, den, gate = inputs(dtype=dtype)
    lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
    wide = [x.astype(np.float64) for x in (o, lse, num, den, gate)]
    for more, more_wide in (({}, ()), ({"gate": gate}, wide[4:])):
        result = heed.merge_linear(o, lse, num, den, **more)
        np.testing.assert_allclose(result, naive(*wide[:4], *more_wide), rtol=0, atol=atol)
    result = heed.merge_linear(o, lse, num, den, gate=gate.tolist())
    np.testing.assert_allclose(result, naive(*wide), rtol=0, atol=atol)


def test_exponentials_as_features_are_attention_over_the_union():
    q, k, v = RNG.standard_normal((3, 1, 30, 2, 4))
    o, lse = heed.attention(q, k[:, :10], v[:, :10], return_lse=True)
    s = np.einsum("bihd,bjhd->bihj", q, k[:, 10:]) / 2
    num, den = np.einsum("bihj,bjhd->bihd", np.exp(s), v[:, 10:]), np.exp(s).sum(-1)
    np.testing.assert_allclose(heed.merge_linear(o, lse, num, den), heed.attention(q, k, v), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_edges(dtype):
    o, lse, num, den, gate = inputs(dtype=dtype)
    for large in (100.0, 800.0, 1e6):
        np.testing.assert_allclose(heed.merge_linear(o, lse + dtype(large), num, den, gate=gate), o, rtol=1e-6)
        result = heed.merge_linear(o, lse - dtype(large), num, den, gate=gate)
        np.testing.assert_allclose(result, num / den[..., None], rtol=1e-5)
    none = np.full_like(lse, -np.inf)
    np.testing.assert_allclose(heed.merge_linear(o, none, num, den), num / den[..., None], rtol=1e-6)
    assert not heed.merge_linear(o, none, 0 * num, 0 * den).any()
    np.testing.assert_allclose(heed.merge_linear(o, lse - dtype(3000), 0 * num, 0 * den), o, rtol=1e-6)
    assert not any(x.any() for x in heed.merge_linear_backward(o, o, none, 0 * num, 0 * den, gate=gate))


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_agree_with_finite_differences(gated):
    given = list(inputs(B=1, T=3, H=2, D=2))[:5 if gated else 4]
    do = RNG.standard_normal(given[0].shape)
    call = lambda: heed.merge_linear(*given[:4], gate=given[4] if gated else None)  # noqa: E731
    g = heed.merge_linear_backward(do, *given[:4], gate=given[4] if gated else None)
    assert type(g) is heed.MergeLinearGradients and g._fields == ("dexact", "dlse", "dnum", "dden", "dgate")
    assert (g.dgate is None) == (not gated)
    for x, gradient in zip(given, g):
        for at in range(x.size):
            flat, sides = x.reshape(-1), []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append((call() * do).sum())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=1e-7)


def test_errors():
    o, lse, num, den, gate = inputs()
    for call, message in [
        (lambda: heed.merge_linear(o[0], lse, num, den), r"merge_linear: o has shape \[7,3,5\], expected \[B, T, H"),
        (lambda: heed.merge_linear(o, den, num, den), r"merge_linear: lse has shape \[2,7,3\], expected \[2,3,7\]"),
        (lambda: heed.merge_linear(o, lse, num[..., :4], den), r"merge_linear: num has shape \[2,7,3,4\], expected \["),
        (lambda: heed.merge_linear(o, lse, num.astype(np.float32), den),
         "merge_linear: num has dtype f32, expected f64 as o"),
        (lambda: heed.merge_linear(o, lse, num, lse), r"merge_linear: den has shape \[2,3,7\], expected \[2,7,3\]"),
        (lambda: heed.merge_linear(o, lse, num, den, gate=[1.0]),
         r"merge_linear: gate has shape \[1\], expected \[3\]"),
        (lambda: heed.merge_linear_backward(lse, o, lse, num, den), "merge_linear_backward: do has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match="^" + message):
            call()
    with pytest.raises(TypeError, match="den"):
        heed.merge_linear(o, lse, num)


def test_in_torch():
    torch = pytest.importorskip("torch")
    import heed.torch

    given = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=4, H=2, D=3)]
    function = lambda o, lse, num, den, gate: heed.torch.merge_linear(o, lse, num, den, gate=gate)  # noqa: E731
    *arrays, gate = (x.detach().numpy() for x in given)
    np.testing.assert_array_equal(function(*given).detach().numpy(), heed.merge_linear(*arrays, gate=gate))
    assert torch.autograd.gradcheck(function, given)
    torch.library.opcheck(torch.ops.heed.merge_linear.default, tuple(given))
    torch.library.opcheck(torch.ops.heed.merge_linear.default, (*given[:4], None))
    with pytest.raises(heed.InvalidArgument, match="^merge_linear: lse is of type int, expected a tensor"):
        heed.torch.merge_linear(given[0], 3, given[2], given[3])


@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_and_forward_mode_in_torch(gated):
    torch = pytest.importorskip("torch")
    import heed.torch

    given = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=4, H=2, D=3)]
    given = given if gated else given[:4]

    def function(o, lse, num, den, gate=None):
        return heed.torch.merge_linear(o, lse, num, den, gate=gate)

    assert torch.autograd.gradgradcheck(function, given)
    assert torch.autograd.gradcheck(function, given, check_forward_ad=True, check_backward_ad=False)
    with torch.no_grad():  # rows without one of the parts, or both, and a large lse
        given[1][0, :, :2] = -torch.inf
        given[0][0, :2] = torch.nan
        given[3][0, 1:3] = 0
        given[2][0, 1:3] = 0
        given[1][0, :, 3] = 800
    primals = [x.detach() for x in given]
    o, along = torch.func.jvp(function, tuple(primals), tuple(torch.ones_like(x) for x in primals))
    torch.testing.assert_close(o, function(*primals))
    incoming = torch.ones_like(o)
    gradients = torch.autograd.grad(function(*given), given, incoming)
    assert torch.isclose(along.sum(), sum(x.sum() for x in gradients))
    first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), given)
    assert all(x.isfinite().all() for x in second)
