# heed.deltaformer: against its definition in NumPy, known limits, decoding, gradients, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=4, Hkv=2, D=6, Dv=5, dtype=np.float64, seed=0):
    """q, k, v, beta, w."""
    rng = np.random.default_rng(seed)
    q, k, v, w = (rng.standard_normal((B, T, heads, C)) for heads, C in ((H, D), (Hkv, D), (Hkv, Dv), (Hkv, D)))
    return [x.astype(dtype) for x in (q, k, v, rng.random((B, T, Hkv)), w)]


def softmax(logits):
    """The probabilities and the log-sum-exp."""
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    return np.exp(logits - lse), lse


def exact(q, k, v, beta=None, w=None, scale=None):
    """o, u and lse, token by token."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    w = k if w is None else w.astype(np.float64)
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    o, u, lse = np.zeros((B, T, H, v.shape[3])), v.copy(), np.zeros((B, H, T))
    for b, i in np.ndindex(B, T):
        for h in range(k.shape[2]):
            if i > 0:
                p, _ = softmax(scale * k[b, :i, h] @ w[b, i, h])
                u[b, i, h] -= (1 if beta is None else float(beta[b, i, h])) * (p @ u[b, :i, h])
        for h in range(H):
            kv = h * k.shape[2] // H
            p, lse[b, h, i] = softmax(scale * k[b, :i + 1, kv] @ q[b, i, h])
            o[b, i, h] = p @ u[b, :i + 1, kv]
    return o, u, lse


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 2e-2)])
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 200])
def test_it_is_the_definition(T, dtype, atol):
    q, k, v, beta, w = inputs(T=T, dtype=dtype)
    for given, options in [((), {}), ((beta,), {}), ((beta, w), {}), ((None, w), {"scale": 0.7})]:
        results = heed.deltaformer(q, k, v, *given, **options, return_u=True, return_lse=True)
        assert [x.dtype for x in results] == [dtype, dtype, np.float64 if dtype == np.float64 else np.float32]
        for result, expected in zip(results, exact(q, k, v, *given, **options)):
            np.testing.assert_allclose(result, expected, rtol=0, atol=atol)
        o, u, lse = results
        np.testing.assert_array_equal(heed.deltaformer(q, k, v, *given, **options), o)
        np.testing.assert_array_equal(heed.deltaformer(q, k, v, *given, **options, return_u=True)[1], u)
        np.testing.assert_array_equal(heed.deltaformer(q, k, v, *given, **options, return_lse=True)[1], lse)
        np.testing.assert_array_equal(o, heed.attention(q, k, u, causal=True, scale=options.get("scale")))


@pytest.mark.parametrize("D, Dv, heads", [(1, 1, (1, 1)), (64, 64, (2, 1)), (128, 40, (2, 2)), (17, 33, (6, 2))])
def test_sizes(D, Dv, heads):
    given = inputs(B=1, T=140, H=heads[0], Hkv=heads[1], D=D, Dv=Dv)
    np.testing.assert_allclose(heed.deltaformer(*given), exact(*given)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_decoding_is_the_sequence(dtype):
    q, k, v, beta, w = inputs(T=90, dtype=dtype)
    o, expected = heed.deltaformer(q, k, v, beta, w, return_u=True)
    u = np.full_like(v, np.nan)
    heed.deltaformer_values(u[:, :70], k[:, :70], v[:, :70], beta[:, :70], w[:, :70])
    for t in range(70, 90):
        now = slice(t, t + 1)
        heed.deltaformer_values(u[:, :t + 1], k[:, :t + 1], v[:, now], beta[:, now], w[:, now])
        o_t = heed.attention(q[:, now], k[:, :t + 1], u[:, :t + 1])
        np.testing.assert_allclose(o_t, o[:, now], rtol=0, atol={8: 1e-12, 4: 2e-6, 2: 4e-3}[u.itemsize])
    np.testing.assert_array_equal(u, expected)
    whole = np.full_like(v, np.nan)
    heed.deltaformer_values(whole, k, v, scale=0.3)
    np.testing.assert_array_equal(whole, heed.deltaformer(q, k, v, scale=0.3, return_u=True)[1])


def test_packed_sequences_and_padding():
    given = inputs(B=1, T=200)
    results = heed.deltaformer(*given, cu_seqlens=[0, 90, 90, 200], return_u=True, return_lse=True)
    for begin, end in [(0, 90), (90, 200)]:
        part = heed.deltaformer(*(x[:, begin:end] for x in given), return_u=True, return_lse=True)
        for result, expected in zip((*(x[:, begin:end] for x in results[:2]), results[2][..., begin:end]), part):
            np.testing.assert_array_equal(result, expected)
    given = inputs()
    o, u, lse = heed.deltaformer(*given, starts=[5, 0], lengths=[60, 30], return_u=True, return_lse=True)
    alone = heed.deltaformer(*(x[:1, 5:60] for x in given), return_u=True)
    np.testing.assert_array_equal(o[:1, 5:60], alone[0])
    np.testing.assert_array_equal(u[:1, 5:60], alone[1])
    for x in (o, u):
        assert not x[0, :5].any() and not x[0, 60:].any() and not x[1, 30:].any()
    assert np.isneginf(lse[1, :, 30:]).all() and np.isneginf(lse[0, :, :5]).all()


def test_strided_arrays_and_threads():
    given = inputs(T=330, dtype=np.float32)
    o = heed.deltaformer(*given, threads=1)
    turned = [np.asfortranarray(x) for x in given]
    np.testing.assert_array_equal(heed.deltaformer(*turned, threads=3), o)


@pytest.mark.parametrize("scale, present", [(None, 5), (0.7, 4), (None, 3)])
def test_gradients_agree_with_finite_differences(scale, present):
    rng = np.random.default_rng(1)
    given = inputs(B=2, T=5, H=2, Hkv=1, D=3, Dv=2)[:present]
    do, du, dlse = (rng.standard_normal(s) for s in ((2, 5, 2, 2), (2, 5, 1, 2), (2, 2, 5)))

    def loss():
        o, u, lse = exact(*given, scale=scale)
        return (o * do).sum() + (u * du).sum() + (lse * dlse).sum()

    results = heed.deltaformer(*given, scale=scale, return_u=True, return_lse=True)
    gradients = heed.deltaformer_backward(do, *given[:3], *results, *given[3:], du=du, dlse=dlse, scale=scale)
    assert type(gradients) is heed.DeltaformerGradients
    assert all(x is None for x in gradients[present:])
    for x, gradient in zip(given, gradients):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=2e-8)


def test_gradients_in_float32_are_those_in_float64():
    given = inputs(B=1, T=300, H=2, Hkv=1, D=32, Dv=32)
    do = np.random.default_rng(2).standard_normal((1, 300, 2, 32))
    results = []
    for dtype in (np.float64, np.float32):
        x = [a.astype(dtype) for a in given]
        o, u, lse = heed.deltaformer(*x, return_u=True, return_lse=True)
        results.append(heed.deltaformer_backward(do.astype(dtype), *x[:3], o, u, lse, *x[3:]))
    for wide, narrow in zip(*results):
        assert np.abs(narrow - wide).max() < 2e-5 * np.abs(wide).max()


def test_errors():
    q, k, v, beta, w = inputs(T=9)
    o, u, lse = heed.deltaformer(q, k, v, beta, w, return_u=True, return_lse=True)
    for call, message in [
        (lambda: heed.deltaformer(q[0], k, v), r"q has shape \[9,4,6\], expected \[B, T, H, D\]"),
        (lambda: heed.deltaformer(q, k[:, 1:], v), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.deltaformer(q[:, :, :3], k, v), "q has 3 heads, expected a multiple of the 2 of k"),
        (lambda: heed.deltaformer(q, k, v, beta, w[..., :3]), r"w has shape \[2,9,2,3\], expected \[2,9,2,6\]"),
        (lambda: heed.deltaformer(q, k, v, beta, w.astype(np.float32)), "w has dtype f32, expected f64"),
        (lambda: heed.deltaformer(q, k, v, beta[:, 1:]), "beta has shape"),
        (lambda: heed.deltaformer(q, k, v, scale=np.nan), "scale is nan, expected a finite number"),
        (lambda: heed.deltaformer(q, k, v, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.deltaformer(q, k, v, return_u=1), "return_u is 1, expected"),
        (lambda: heed.deltaformer_backward(o[:1], q, k, v, o, u, lse), "do has shape"),
        (lambda: heed.deltaformer_backward(o, q, k, v, q, u, lse), "o has shape"),
        (lambda: heed.deltaformer_backward(o, q, k, v, o, u[:1], lse), "u has shape"),
        (lambda: heed.deltaformer_backward(o, q, k, v, o, u, lse[:1]), "lse has shape"),
        (lambda: heed.deltaformer_backward(o, q, k, v, o, u, lse, du=u[:1]), "du has shape"),
        (lambda: heed.deltaformer_values(u, k[:, :1], v), "deltaformer_values: v has 9 tokens, expected at most the 1"),
        (lambda: heed.deltaformer_values(u[:, 1:], k, v), r"u has shape \[2,8,2,5\], expected \[2,9,2,5\]"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def given(self, **sizes):
        return [self.torch.from_numpy(x).requires_grad_() for x in inputs(**sizes)]

    def exact(self, q, k, v, beta=None, w=None, scale=None):
        """o, u and lse in PyTorch, token by token."""
        torch, (T, H, D) = self.torch, q.shape[1:]
        w, scale, group = k if w is None else w, D**-0.5 if scale is None else scale, H // k.shape[2]
        u = [v[:, 0]]
        for i in range(1, T):
            p = (scale * (k[:, :i] * w[:, i, None]).sum(-1)).softmax(1)
            read = (p[..., None] * torch.stack(u, 1)).sum(1)
            u.append(v[:, i] - (read if beta is None else beta[:, i, :, None] * read))
        u = torch.stack(u, 1)
        keys, values = (x.repeat_interleave(group, 2) for x in (k, u))
        rows, sums = [], []
        for i in range(T):
            s = scale * (keys[:, :i + 1] * q[:, i, None]).sum(-1)
            sums.append(s.logsumexp(1))
            rows.append((s.softmax(1)[..., None] * values[:, :i + 1]).sum(1))
        return torch.stack(rows, 1), u, torch.stack(sums, -1)

    @pytest.mark.parametrize("T, present", [(2, 5), (64, 4), (150, 5), (150, 3)])
    def test_values_and_gradients_are_those_of_autograd(self, T, present):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(T=T)[:present]
            o, u, lse = (heed.torch.deltaformer(*given, return_u=True, return_lse=True) if ours
                         else self.exact(*given))
            ((o * o).sum() + u.cos().sum() + lse.sin().sum()).backward()
            results.append([o.detach(), u.detach(), lse.detach(), *(x.grad for x in given)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    def test_gradcheck_and_opcheck(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=4, H=2, Hkv=1, D=2, Dv=3)
        assert torch.autograd.gradcheck(
            lambda *x: heed.torch.deltaformer(*x, return_u=True, return_lse=True), given)
        torch.library.opcheck(torch.ops.heed.deltaformer.default, (*given, None, None, None, None, None))

    @pytest.mark.parametrize("options", [
        {}, {"present": 4, "scale": 0.4}, {"present": 3}, {"lengths": [3, 1], "starts": [0, 1]},
        {"cu_seqlens": [0, 1, 1, 3]}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch, options = self.torch, dict(options)
        given = self.given(B=1 if "cu_seqlens" in options else 2, T=3, H=2, Hkv=1, D=2, Dv=2)
        given = given[:options.pop("present", 5)]

        def function(*x):
            o, u, lse = heed.torch.deltaformer(*x, **options, return_u=True, return_lse=True)
            return o, u, lse.exp()  # 0 for excluded tokens

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_second_derivatives_are_those_of_autograd(self):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(B=1, T=40)
            o, u, lse = (heed.torch.deltaformer(*given, return_u=True, return_lse=True) if ours
                         else self.exact(*given))
            gradients = torch.autograd.grad((o * o).sum() + u.cos().sum() + lse.sin().sum(), given, create_graph=True)
            sum(x.square().sum() for x in gradients).backward()
            results.append([x.grad for x in given])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))

    def test_it_compiles(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=20)
        expected = heed.torch.deltaformer(*given)
        compiled = torch.compile(heed.torch.deltaformer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given), expected, rtol=0, atol=0)

    def test_values_in_place(self):
        import heed.torch

        torch = self.torch
        q, k, v, beta, w = (x.detach() for x in self.given(T=20))
        u, expected = torch.zeros_like(v), heed.torch.deltaformer(q, k, v, beta, w, return_u=True)[1]
        version = u._version
        heed.torch.deltaformer_values(u, k, v, beta, w)
        torch.testing.assert_close(u, expected, rtol=0, atol=0)
        assert u._version > version
        with pytest.raises(heed.InvalidArgument, match="u requires a gradient"):
            heed.torch.deltaformer_values(u.requires_grad_(), k, v)

    def test_the_function_of_flash_linear_attention(self):
        from heed.compat.fla import deltaformer_attn

        torch = self.torch
        q, k, v, beta, _ = (x.detach() for x in self.given(T=70))
        o, u, _ = self.exact(q, k, v, beta)
        torch.testing.assert_close(deltaformer_attn(q, k, v, beta, C=32), o, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(deltaformer_attn(q, k, v), self.exact(q, k, v)[0], rtol=1e-10, atol=1e-10)
        packed = deltaformer_attn(*(x[:1] for x in (q, k, v, beta)), cu_seqlens=[0, 30, 70])
        alone = self.exact(*(x[:1, 30:] for x in (q, k, v, beta)))[0]
        torch.testing.assert_close(packed[:, 30:], alone, rtol=1e-10, atol=1e-10)
        # The original leaves padding out of the second softmax alone.
        mask = torch.ones(2, 70, dtype=torch.int64)
        mask[0, :9], mask[1, 60:] = 0, 0
        masked = deltaformer_attn(q, k, v, beta, mask)
        import torch.nn.functional as F
        for b, valid in ((0, slice(9, 70)), (1, slice(0, 60))):
            query, key, value = (x[b, valid].transpose(0, 1) for x in (q, k, u))
            key, value = (x.repeat_interleave(2, 0) for x in (key, value))
            expected = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)
            torch.testing.assert_close(masked[b, valid], expected, rtol=1e-10, atol=1e-10)
        assert not masked[0, :9].any() and not masked[1, 60:].any()
        with pytest.raises(heed.Unsupported, match="cu_seqlens"):
            deltaformer_attn(q[:1], k[:1], v[:1], beta[:1], mask[:1], [0, 70])
