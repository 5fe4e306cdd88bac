# heed.parallax_attention: against its definition in NumPy, known limits, gradients, decoding, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=4, Hkv=2, D=6, Dv=5, dtype=np.float64, seed=0, rows=None):
    """q, r, k, v."""
    rng = np.random.default_rng(seed)
    rows = T if rows is None else rows
    return [rng.standard_normal((B, tokens, heads, C)).astype(dtype)
            for tokens, heads, C in ((rows, H, D), (rows, H, D), (T, Hkv, D), (T, Hkv, Dv))]


def exact(q, r, k, v, scale=None, window=None):
    """o, m, a and lse by the formula of the paper, m (1 + a) - E[t v]."""
    q, r, k, v = (x.astype(np.float64) for x in (q, r, k, v))
    (Tq, H, D), Tk = q.shape[1:], k.shape[1]
    k, v = (np.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * (D**-0.5 if scale is None else scale)
    t = np.einsum("bihd,bjhd->bhij", r, k)
    distance = np.arange(Tk - Tq, Tk)[:, None] - np.arange(Tk)
    s = np.where((distance < 0) | (distance >= (Tk if window is None else window)), -np.inf, s)
    if s.size == 0:
        return np.zeros((*q.shape[:3], v.shape[3])), np.zeros((*q.shape[:3], v.shape[3])), s.sum(-1), s.sum(-1)
    lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    P = np.exp(s - lse[..., None])
    m, a = np.einsum("bhij,bjhd->bihd", P, v), (P * t).sum(-1)
    return m * (1 + a.transpose(0, 2, 1)[..., None]) - np.einsum("bhij,bjhd->bihd", P * t, v), m, a, lse


def forward(*given, **options):
    return heed.parallax_attention(*given, **options, return_means=True, return_lse=True)


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 3e-5), (np.float16, 2e-2)])
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 200])
def test_it_is_the_definition(T, dtype, atol):
    given = inputs(T=T, dtype=dtype)
    for options in ({}, {"scale": 1.5}, {"window": 17}, {"window": 1}):
        results, wide = forward(*given, **options), np.float64 if dtype == np.float64 else np.float32
        assert [x.dtype for x in results] == [dtype, wide, wide, wide]
        for x, expected, tolerance in zip(results, exact(*given, **options), (atol, *3 * (min(atol, 3e-5),))):
            np.testing.assert_allclose(x, expected, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(heed.parallax_attention(*given, **options), results[0])
        o, lse = heed.parallax_attention(*given, **options, return_lse=True)
        np.testing.assert_array_equal(lse, results[3])
        assert len(heed.parallax_attention(*given, **options, return_means=True)) == 3


@pytest.mark.parametrize("D, Dv, heads", [(1, 1, (1, 1)), (64, 64, (2, 1)), (128, 40, (2, 2)), (17, 33, (12, 2)),
                                          (9, 8, (3, 3))])
def test_sizes(D, Dv, heads):
    given = inputs(B=1, T=140, H=heads[0], Hkv=heads[1], D=D, Dv=Dv)
    np.testing.assert_allclose(heed.parallax_attention(*given), exact(*given)[0], rtol=0, atol=1e-11)


def test_it_is_attention_minus_its_derivative():
    """With respect to q, in the direction r / scale."""
    q, r, k, v = inputs()
    step, scale = 1e-5, q.shape[-1] ** -0.5
    sides = [heed.attention(q + sign * step * r / scale, k, v, causal=True) for sign in (1, -1)]
    o, m, _ = heed.parallax_attention(q, r, k, v, return_means=True)
    np.testing.assert_allclose(m, heed.attention(q, k, v, causal=True), rtol=0, atol=1e-13)
    np.testing.assert_allclose(o, m - (sides[0] - sides[1]) / (2 * step), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [1, 7, 64, 90])
def test_rows_are_the_last_tokens(rows, window):
    q, r, k, v = inputs(T=150, dtype=np.float32)
    whole = forward(q, r, k, v, window=window)
    last = forward(q[:, -rows:], r[:, -rows:], k, v, window=window)
    np.testing.assert_array_equal(last[0], whole[0][:, -rows:])
    np.testing.assert_array_equal(last[1], whole[1][:, -rows:])
    np.testing.assert_array_equal(last[2], whole[2][..., -rows:])
    np.testing.assert_array_equal(last[3], whole[3][..., -rows:])


def test_packed_sequences_and_padding():
    given = inputs(B=1, T=200)
    o, lse = heed.parallax_attention(*given, cu_seqlens=[0, 90, 90, 200], return_lse=True)
    for begin, end in [(0, 90), (90, 200)]:
        part, part_lse = heed.parallax_attention(*(x[:, begin:end] for x in given), return_lse=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(lse[..., begin:end], part_lse)
    given = inputs()
    o, lse = heed.parallax_attention(*given, starts=[5, 0], lengths=[60, 30], return_lse=True)
    np.testing.assert_array_equal(o[:1, 5:60], heed.parallax_attention(*(x[:1, 5:60] for x in given)))
    assert not o[0, :5].any() and not o[0, 60:].any() and not o[1, 30:].any()
    assert np.isneginf(lse[1, :, 30:]).all() and np.isneginf(lse[0, :, :5]).all()
    q, r, k, v = given  # one token of sequences that begin at different tokens
    newest = heed.parallax_attention(q[:, -1:], r[:, -1:], k, v, starts=[5, 69])
    np.testing.assert_array_equal(newest[:1], heed.parallax_attention(*(x[:1, 5:] for x in given))[:, -1:])
    np.testing.assert_allclose(newest[1, 0], np.repeat(v[1, -1], 2, axis=0), rtol=0, atol=1e-15)  # of its own value


def test_strided_arrays_and_threads():
    given = inputs(T=130, dtype=np.float32)
    o = heed.parallax_attention(*given, threads=1)
    turned = [np.asfortranarray(x) for x in given]
    np.testing.assert_array_equal(heed.parallax_attention(*turned, threads=3), o)


@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "window": 3}, {"rows": 3}], ids=str)
def test_gradients_agree_with_finite_differences(options):
    options = dict(options)
    rng, rows = np.random.default_rng(1), options.pop("rows", 5)
    given = inputs(B=2, T=5, H=2, Hkv=1, D=3, Dv=2, rows=rows)
    do, dlse = rng.standard_normal((2, rows, 2, 2)), rng.standard_normal((2, 2, rows))

    def loss():
        o, _, _, lse = exact(*given, **options)
        return (o * do).sum() + (lse * dlse).sum()

    gradients = heed.parallax_attention_backward(do, *given, *forward(*given, **options), dlse=dlse, **options)
    assert type(gradients) is heed.ParallaxAttentionGradients
    for x, gradient in zip(given, gradients):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=5e-8)


def test_gradients_in_float32_are_those_in_float64():
    given = inputs(B=1, T=300, H=2, Hkv=1, D=32, Dv=32)
    do = np.random.default_rng(2).standard_normal((1, 300, 2, 32))
    results = []
    for dtype in (np.float64, np.float32):
        x = [a.astype(dtype) for a in given]
        results.append(heed.parallax_attention_backward(do.astype(dtype), *x, *forward(*x)))
    for wide, narrow in zip(*results):
        assert np.abs(narrow - wide).max() < 2e-5 * np.abs(wide).max()


def test_errors():
    q, r, k, v = inputs(T=9)
    o, m, a, lse = forward(q, r, k, v)
    for call, message in [
        (lambda: heed.parallax_attention(q[0], r, k, v), r"q has shape \[9,4,6\], expected \[B, Tq, H, D\]"),
        (lambda: heed.parallax_attention(q, r[:, 1:], k, v), r"r has shape \[2,8,4,6\], expected \[2,9,4,6\]"),
        (lambda: heed.parallax_attention(q, r, k[:, 1:], v[:, 1:]), "q has 9 tokens, expected at most the 8 of k"),
        (lambda: heed.parallax_attention(q, r, k, v[:, 1:]), r"v has shape \[2,8,2,5\], expected \[2,9,2,5\]"),
        (lambda: heed.parallax_attention(q[:, :, :3], r[:, :, :3], k, v), "q has 3 heads, expected a multiple of"),
        (lambda: heed.parallax_attention(q, r.astype(np.float32), k, v), "r has dtype f32, expected f64"),
        (lambda: heed.parallax_attention(q, r, k, v, scale=np.nan), "scale is nan, expected a finite number"),
        (lambda: heed.parallax_attention(q, r, k, v, window=0), "window is 0, expected"),
        (lambda: heed.parallax_attention(q, r, k, v, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.parallax_attention(q[:1, 1:], r[:1, 1:], k[:1], v[:1], cu_seqlens=[0, 9]),
         "q has 8 tokens, expected the 9 of k"),
        (lambda: heed.parallax_attention(q, r, k, v, return_lse=1), "return_lse is 1, expected"),
        (lambda: heed.parallax_attention_backward(o[:1], q, r, k, v, o, m, a, lse), "do has shape"),
        (lambda: heed.parallax_attention_backward(o, q, r, k, v, q, m, a, lse), "o has shape"),
        (lambda: heed.parallax_attention_backward(o, q, r, k, v, o, q, a, lse), "m has shape"),
        (lambda: heed.parallax_attention_backward(o, q, r, k, v, o, m, a[:1], lse), "a has shape"),
        (lambda: heed.parallax_attention_backward(o, q, r, k, v, o, m, a, lse[:1]), "lse has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def given(self, **sizes):
        return [self.torch.from_numpy(x).requires_grad_() for x in inputs(**sizes)]

    def exact(self, q, r, k, v, window=None):
        """o and lse in PyTorch."""
        torch, (Tq, H, D), Tk = self.torch, q.shape[1:], k.shape[1]
        q, r, k, v = (x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2) for x in (q, r, k, v))
        distance = torch.arange(Tk - Tq, Tk)[:, None] - torch.arange(Tk)
        hidden = (distance < 0) | (distance >= (Tk if window is None else window))
        s = (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf)
        P, t = s.softmax(-1), r @ k.mT
        return ((P @ v) * (1 + (P * t).sum(-1, keepdim=True)) - (P * t) @ v).transpose(1, 2), s.logsumexp(-1)

    @pytest.mark.parametrize("rows, window", [(None, None), (None, 20), (50, None)])
    @pytest.mark.parametrize("T", [64, 150])
    def test_values_and_gradients_are_those_of_autograd(self, T, rows, window):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(T=T, rows=rows)
            o, lse = (heed.torch.parallax_attention(*given, window=window, return_lse=True) if ours else
                      self.exact(*given, window=window))
            ((o * o).sum() + lse.sin().sum()).backward()
            results.append([o.detach(), lse.detach(), *(x.grad for x in given)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    def test_gradcheck_and_opcheck(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=4, H=2, Hkv=1, D=2, Dv=3)
        assert torch.autograd.gradcheck(lambda *x: heed.torch.parallax_attention(*x, return_lse=True), given)
        torch.library.opcheck(torch.ops.heed.parallax_attention.default, (*given, None, 3, None, None, None, None))
        o, m, a = heed.torch.parallax_attention(*given, return_means=True)
        assert o.requires_grad and not m.requires_grad and not a.requires_grad
        torch.testing.assert_close(m, heed.torch.attention(given[0], *given[2:], causal=True).detach())

    @pytest.mark.parametrize("options", [
        {}, {"scale": 0.4, "window": 2}, {"lengths": [3, 1], "starts": [0, 1]}, {"cu_seqlens": [0, 1, 1, 3]},
        {"rows": 2, "starts": [0, 2]}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch, options = self.torch, dict(options)
        given = self.given(B=1 if "cu_seqlens" in options else 2, T=3, H=2, Hkv=1, D=2, Dv=2,
                           rows=options.pop("rows", 3))

        def function(*x):
            o, lse = heed.torch.parallax_attention(*x, **options, return_lse=True)
            return o, lse.exp()  # 0 for excluded tokens

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_second_derivatives_are_those_of_autograd(self):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(B=1, T=40)
            o, lse = heed.torch.parallax_attention(*given, return_lse=True) if ours else self.exact(*given)
            gradients = torch.autograd.grad((o * o).sum() + lse.sin().sum(), given, create_graph=True)
            sum(x.square().sum() for x in gradients).backward()
            results.append([x.grad for x in given])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))

    def test_it_compiles(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=20)
        expected = heed.torch.parallax_attention(*given)
        compiled = torch.compile(heed.torch.parallax_attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given), expected, rtol=0, atol=0)

    def test_the_functions_of_flash_linear_attention(self):
        from heed.compat.fla import parallax_decode, parallax_decode_one_step, parallel_parallax

        torch = self.torch
        q, r, k, v = (x.detach() for x in self.given(T=70))
        for window in (None, 8):
            o = parallel_parallax(q, r, k, v, window_size=window)
            torch.testing.assert_close(o, self.exact(q, r, k, v, window)[0])
            torch.testing.assert_close(parallax_decode(q[:, 40:], r[:, 40:], k, v, window_size=window), o[:, 40:])
            one = parallax_decode_one_step(q[:, 69:], r[:, 69:], k, v, window_size=window,
                                           cache_start=torch.tensor([23, 0]))
            expected = parallel_parallax(*(x[:1, 23:] for x in (q, r, k, v)), window_size=window)[:, -1:]
            torch.testing.assert_close(one, torch.cat([expected, o[1:, 69:]]))
        packed = parallel_parallax(*(x[:1] for x in (q, r, k, v)), cu_seqlens=torch.tensor([0, 30, 70]))
        torch.testing.assert_close(packed[:, 30:], parallel_parallax(*(x[:1, 30:] for x in (q, r, k, v))))
        with pytest.raises(heed.InvalidArgument, match="q has shape"):
            parallax_decode_one_step(q, r, k, v)
        with pytest.raises(heed.InvalidArgument, match="parallel_parallax: window_size is 0"):
            parallel_parallax(q, r, k, v, window_size=0)
        with pytest.raises(heed.InvalidArgument, match=r"parallax_decode: cache_start\[0\] is 71"):
            parallax_decode(q, r, k, v, cache_start=[71, 0])
