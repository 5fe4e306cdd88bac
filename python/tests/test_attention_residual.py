# heed.attention_residual: against plain NumPy and finite differences, in PyTorch, and fla's name for it.
import numpy as np
import pytest

import heed

RNG = np.random.default_rng(0)


def inputs(L=4, shape=(2, 3), D=5, dtype=np.float64):
    """query, residuals, weight."""
    return tuple(RNG.standard_normal(x).astype(dtype) for x in ((D,), (L, *shape, D), (D,)))


def naive(query, residuals, weight=None, eps=1e-6, scale=1.0):
    v = residuals.astype(np.float64)
    k = v / np.sqrt(np.mean(v * v, -1, keepdims=True) + eps) * (1 if weight is None else weight)
    e = np.exp(scale * (k @ query.astype(np.float64)))
    p = e / e.sum(0)
    return (p[..., None] * v).sum(0), p


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-14), (np.float32, 2e-6), (np.float16, 3e-3)])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 1, 2, 3), (0, 4)])
def test_it_is_the_formula(dtype, atol, shape):
    query, residuals, weight = inputs(shape=shape, dtype=dtype)
    for given, more in (((query, residuals), {}), ((query, residuals, weight), {"eps": 0.1, "scale": -0.7})):
        o, p = heed.attention_residual(*given, **more, return_weights=True)
        expected, probabilities = naive(*given, **more)
        assert o.dtype == dtype and p.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(o, expected, rtol=0, atol=atol)
        np.testing.assert_allclose(p, probabilities, rtol=0, atol=min(atol, 2e-6))
        np.testing.assert_array_equal(heed.attention_residual(*given, **more, threads=1), o)


def test_a_constant_factor_of_a_layer_changes_values_but_no_probabilities():
    query, residuals, _ = inputs()
    p = heed.attention_residual(query, residuals, eps=0, return_weights=True)[1]
    scaled = residuals * np.array([1, 1e3, 1e-3, 7]).reshape(4, 1, 1, 1)
    np.testing.assert_allclose(heed.attention_residual(query, scaled, eps=0, return_weights=True)[1], p, atol=1e-14)


def test_no_square_overflows_in_float32():
    query, residuals, weight = inputs(dtype=np.float32)
    query /= 10
    o, p = heed.attention_residual(query, residuals, weight, eps=0, return_weights=True)
    for factor in (np.float32(2.0**100), np.float32(2.0**-100)):
        scaled, same = heed.attention_residual(query, residuals * factor, weight, eps=0, return_weights=True)
        np.testing.assert_allclose(scaled / factor, o, atol=1e-5)
        np.testing.assert_allclose(same, p, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_agree_with_finite_differences(weighted):
    given = list(inputs(L=3, shape=(2, 2), D=3))[:3 if weighted else 2]
    do = RNG.standard_normal((2, 2, 3))
    call = lambda: heed.attention_residual(*given, eps=0.1, scale=1.3)  # noqa: E731
    g = heed.attention_residual_backward(do, *given, eps=0.1, scale=1.3)
    assert type(g) is heed.AttentionResidualGradients and g._fields == ("dquery", "dresiduals", "dweight")
    assert (g.dweight is None) == (not weighted)
    for x, gradient in zip(given, g):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append((call() * do).sum())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=2e-8)


def test_errors():
    query, residuals, weight = inputs()
    narrow = [x.astype(np.float32) for x in (query, residuals, weight)]
    for call, message in [
        (lambda: heed.attention_residual(query, residuals[0, 0]),
         r"attention_residual: residuals has shape \[3,5\], expected \[L, ..., D\] with 1 to 4 axes of tokens"),
        (lambda: heed.attention_residual(query, residuals[:0]), "residuals has shape .*, expected at least one layer"),
        (lambda: heed.attention_residual(query[:0], residuals[..., :0]), "residuals has .*, expected at least one ch"),
        (lambda: heed.attention_residual(query[1:], residuals), r"query has shape \[4\], expected \[5\]"),
        (lambda: heed.attention_residual(query, residuals, weight[None]), r"weight has shape \[1,5\], expected \[5\]"),
        (lambda: heed.attention_residual(query, *narrow[1:]), "query has dtype f64, expected f32, bf16 or f16"),
        (lambda: heed.attention_residual(query, residuals, eps=-1e-6), "eps is -1e-06, expected a number >= 0"),
        (lambda: heed.attention_residual(query, residuals, scale=np.inf), "scale is inf, expected a finite number"),
        (lambda: heed.attention_residual_backward(residuals, query, residuals), "do has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()
    with pytest.raises(TypeError, match="residuals"):
        heed.attention_residual(query)


class TestTorch:
    torch = pytest.importorskip("torch")

    def given(self, **more):
        return [self.torch.from_numpy(x).requires_grad_() for x in inputs(**more)]

    def test_values_and_gradients(self):
        import heed.torch

        torch, given = self.torch, self.given()
        arrays = [x.detach().numpy() for x in given]
        o, p = heed.torch.attention_residual(*given, return_weights=True)
        np.testing.assert_array_equal(o.detach().numpy(), heed.attention_residual(*arrays))
        assert not p.requires_grad
        function = lambda *x: heed.torch.attention_residual(*x, eps=0.1, scale=0.5)  # noqa: E731
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradcheck(function, given[:2])
        torch.library.opcheck(torch.ops.heed.attention_residual.default, (*given, 1e-6, 1.0, None))

    @pytest.mark.parametrize("weighted", [False, True])
    def test_second_derivatives_and_forward_mode(self, weighted):
        import heed.torch

        torch, given = self.torch, self.given()[: 3 if weighted else 2]
        function = lambda *x: heed.torch.attention_residual(*x, eps=0.1, scale=0.5)  # noqa: E731
        assert torch.autograd.gradgradcheck(function, given)
        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, check_backward_ad=False)
        with torch.no_grad():
            given[1][0, 0] = 0  # a row of zeros
            given[1][1] *= 1e30
        (first,) = torch.autograd.grad(function(*given).square().sum(), given[:1], create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), given[:1])
        assert second.isfinite().all()
        tangents = [torch.ones_like(x) for x in given]
        (o, p), _ = torch.func.jvp(lambda *x: heed.torch.attention_residual(*x, return_weights=True), tuple(
            x.detach() for x in given), tuple(tangents))
        for ours, kernel in zip((o, p), heed.torch.attention_residual(*given, return_weights=True)):
            torch.testing.assert_close(ours, kernel)

    def test_second_derivatives_keep_memory_linear_in_layers_and_tokens(self):
        import heed.torch

        torch, sizes = self.torch, []
        for tokens in (32, 64):
            query, residuals = torch.zeros(8, requires_grad=True), torch.randn(5, tokens, 8, requires_grad=True)
            largest = 0
            with torch.profiler.profile(profile_memory=True) as profile:
                (first,) = torch.autograd.grad(heed.torch.attention_residual(query, residuals).square().sum(), query,
                                               create_graph=True)
                first.sum().backward()
            for event in profile.events():
                largest += max(event.cpu_memory_usage, 0) if hasattr(event, "cpu_memory_usage") else 0
            sizes.append(largest)
        assert sizes[1] < 2.2 * sizes[0]

    def test_layers_in_a_list(self):
        import heed.torch

        query, residuals, weight = self.given()
        layers = [x.detach().requires_grad_() for x in residuals]
        heed.torch.attention_residual(query, layers, weight).square().sum().backward()
        heed.torch.attention_residual(query, residuals, weight).square().sum().backward()
        assert self.torch.equal(self.torch.stack([x.grad for x in layers]), residuals.grad)
        with pytest.raises(heed.InvalidArgument, match="residuals is empty"):
            heed.torch.attention_residual(query, [])
        with pytest.raises(heed.InvalidArgument, match=r"residuals\[1\] is of type int, expected a tensor"):
            heed.torch.attention_residual(query, [layers[0], 3])

    @pytest.mark.parametrize("listed", [False, True])
    def test_as_fla_calls_it(self, listed):
        from heed.compat import fla

        torch = self.torch
        query, residuals, weight = self.given(shape=(2, 3))
        k = torch.nn.functional.rms_norm(residuals, (5,), weight, 1e-5)
        expected_p = (k @ query * 0.3).softmax(0)
        expected = (expected_p[..., None] * residuals).sum(0)
        sources = list(residuals.detach().clone().requires_grad_()) if listed else residuals
        o, p, stacked = fla.fused_attnres(query[:, None], sources, weight, 1e-5, 0.3, return_weights=True,
                                          return_residuals=True)
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(p, expected_p, rtol=0, atol=1e-14)
        assert tuple(stacked.shape) == ((4, 6, 5) if listed else (4, 2, 3, 5))
        assert torch.equal(fla.fused_attnres(query, sources, weight, 1e-5, 0.3), o)
        do = torch.randn_like(o)
        gradients, wanted = (torch.autograd.grad(x, (query, weight), do) for x in (o, expected))
        for x, y in zip(gradients, wanted):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
        with pytest.raises(heed.InvalidArgument, match=r"fused_attnres: rms_weight has shape \[4\]"):
            fla.fused_attnres(query, sources, weight[1:])
