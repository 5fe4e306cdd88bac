# heed.wall_attention: against its definition in NumPy, known limits, gradients, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=4, Hg=4, Hkv=2, D=6, Dv=5, dtype=np.float64, seed=0, decay=0.1):
    """q, k, v, log_decay, log_forget."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, heads, C)) for heads, C in ((H, D), (Hkv, D), (Hkv, Dv)))
    return [x.astype(dtype) for x in (q, k, v, -rng.exponential(decay, (B, T, Hg, D)),
                                      -rng.exponential(0.1, (B, T, H)))]


def exact(q, k, v, log_decay, log_forget=None, scale=None):
    """o and lse, by keys that decay by one token after the other."""
    q, k, v, log_decay = (x.astype(np.float64) for x in (q, k, v, log_decay))
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    o, lse = np.zeros((B, T, H, v.shape[3])), np.zeros((B, H, T))
    for b, h in np.ndindex(B, H):
        kv, gate = h * k.shape[2] // H, h * log_decay.shape[2] // H
        keys, F = np.zeros((0, D)), np.zeros(0)
        for i in range(T):
            keys = np.vstack([keys * np.exp(log_decay[b, i, gate]), k[b, i, kv]])
            F = np.append(F + (0 if log_forget is None else float(log_forget[b, i, h])), 0)
            s = scale * keys @ q[b, i, h] + F
            lse[b, h, i] = s.max() + np.log(np.exp(s - s.max()).sum())
            o[b, i, h] = np.exp(s - lse[b, h, i]) @ v[b, :i + 1, kv]
    return o, lse


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 4e-3)])
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 200])
def test_it_is_the_definition(T, dtype, atol):
    *given, g = inputs(T=T, dtype=dtype)
    for options in ({}, {"log_forget": g}, {"log_forget": g, "scale": 1.5}):
        o, lse = heed.wall_attention(*given, **options, return_lse=True)
        expected, expected_lse = exact(*given, **options)
        assert o.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(o, expected, rtol=0, atol=atol)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=min(atol * 5, 1e-3))
        np.testing.assert_array_equal(heed.wall_attention(*given, **options), o)


@pytest.mark.parametrize("D, Dv, heads", [(1, 1, (1, 1, 1)), (64, 64, (2, 2, 1)), (128, 40, (2, 2, 2)),
                                          (17, 33, (12, 4, 2)), (9, 8, (6, 2, 2))])
def test_sizes(D, Dv, heads):
    given = inputs(B=1, T=140, H=heads[0], Hg=heads[1], Hkv=heads[2], D=D, Dv=Dv)
    np.testing.assert_allclose(heed.wall_attention(*given), exact(*given)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [1e-4, 3, 100])
def test_decays_of_any_strength(decay):
    for dtype, atol in ((np.float64, 1e-12), (np.float32, 2e-5)):
        given = inputs(B=1, T=300, decay=decay, dtype=dtype)
        np.testing.assert_allclose(heed.wall_attention(*given), exact(*given)[0], rtol=0, atol=atol)


def test_without_decays_it_is_attention():
    q, k, v, log_decay, g = inputs(T=150)
    none = np.zeros_like(log_decay)
    o, lse = heed.wall_attention(q, k, v, none, return_lse=True)
    expected, expected_lse = heed.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-13)
    np.testing.assert_allclose(heed.wall_attention(q, k, v, none, g),
                               heed.attention(q, k, v, causal=True, log_decay=g), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_decoding_is_the_sequence(dtype, atol):
    q, k, v, log_decay, g = inputs(T=90, Hg=2, dtype=dtype)
    o = heed.wall_attention(q, k, v, log_decay, g)
    keys = k.copy()
    heed.wall_attention_keys(keys[:, :70], log_decay[:, :70])
    for t in range(70, 90):
        now = slice(t, t + 1)
        heed.wall_attention_keys(keys[:, :t + 1], log_decay[:, now])
        o_t = heed.attention(q[:, now], keys[:, :t + 1], v[:, :t + 1], causal=True, log_decay=g[:, :t + 1])
        np.testing.assert_allclose(o_t, o[:, now], rtol=0, atol=atol)


def test_packed_sequences_and_padding():
    given = inputs(B=1, T=200)
    o, lse = heed.wall_attention(*given, cu_seqlens=[0, 90, 90, 200], return_lse=True)
    for begin, end in [(0, 90), (90, 200)]:
        part, part_lse = heed.wall_attention(*(x[:, begin:end] for x in given), return_lse=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(lse[..., begin:end], part_lse)
    given = inputs()
    o, lse = heed.wall_attention(*given, starts=[5, 0], lengths=[60, 30], return_lse=True)
    np.testing.assert_array_equal(o[:1, 5:60], heed.wall_attention(*(x[:1, 5:60] for x in given)))
    assert not o[0, :5].any() and not o[0, 60:].any() and not o[1, 30:].any()
    assert np.isneginf(lse[1, :, 30:]).all() and np.isneginf(lse[0, :, :5]).all()


def test_strided_arrays_and_threads():
    given = inputs(T=130, dtype=np.float32)
    o = heed.wall_attention(*given, threads=1)
    turned = [np.asfortranarray(x) for x in given]
    np.testing.assert_array_equal(heed.wall_attention(*turned, threads=3), o)


@pytest.mark.parametrize("scale, gated", [(None, True), (0.7, False)])
def test_gradients_agree_with_finite_differences(scale, gated):
    rng = np.random.default_rng(1)
    given = inputs(B=2, T=5, H=2, Hg=2, Hkv=1, D=3, Dv=2)[:5 if gated else 4]
    do, dlse = rng.standard_normal((2, 5, 2, 2)), rng.standard_normal((2, 2, 5))

    def loss():
        o, lse = exact(*given, scale=scale)
        return (o * do).sum() + (lse * dlse).sum()

    o, lse = heed.wall_attention(*given, scale=scale, return_lse=True)
    gradients = heed.wall_attention_backward(do, *given[:4], o, lse, *given[4:], dlse=dlse, scale=scale)
    assert type(gradients) is heed.WallAttentionGradients
    assert gated or gradients.dlog_forget is None
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
    given = inputs(B=1, T=300, H=2, Hg=2, Hkv=1, D=32, Dv=32)
    do = np.random.default_rng(2).standard_normal((1, 300, 2, 32))
    results = []
    for dtype in (np.float64, np.float32):
        x = [a.astype(dtype) for a in given]
        o, lse = heed.wall_attention(*x, return_lse=True)
        results.append(heed.wall_attention_backward(do.astype(dtype), *x[:4], o, lse, x[4]))
    for wide, narrow in zip(*results):
        assert np.abs(narrow - wide).max() < 2e-5 * np.abs(wide).max()


def test_errors():
    q, k, v, a, g = inputs(T=9)
    o, lse = heed.wall_attention(q, k, v, a, return_lse=True)
    for call, message in [
        (lambda: heed.wall_attention(q[0], k, v, a), r"q has shape \[9,4,6\], expected \[B, T, H, D\]"),
        (lambda: heed.wall_attention(q, k[:, 1:], v, a), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.wall_attention(q[:, :, :3], k, v, a), "q has 3 heads, expected a multiple of the 2 of k"),
        (lambda: heed.wall_attention(q, k, v, a[..., :3]), r"log_decay has shape \[2,9,4,3\], expected \[2,9,4,6\]"),
        (lambda: heed.wall_attention(q, k, v, a[:, :, :1]), "log_decay has 1 heads, expected a multiple of the 2 of k"),
        (lambda: heed.wall_attention(q, k, v, a[..., 0]), r"log_decay has shape \[2,9,4\], expected \[B, T, Hg, D\]"),
        (lambda: heed.wall_attention(q, k, v, a.astype(np.float32)), "log_decay has dtype f32, expected f64"),
        (lambda: heed.wall_attention(q, k, v, a, g[..., :1]), "log_forget has shape"),
        (lambda: heed.wall_attention(q, k, v, a, scale=np.nan), "scale is nan, expected a finite number"),
        (lambda: heed.wall_attention(q, k, v, a, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.wall_attention(q, k, v, a, return_lse=1), "return_lse is 1, expected"),
        (lambda: heed.wall_attention_backward(o[:1], q, k, v, a, o, lse), "do has shape"),
        (lambda: heed.wall_attention_backward(o, q, k, v, a, q, lse), "o has shape"),
        (lambda: heed.wall_attention_backward(o, q, k, v, a, o, lse[:1]), "lse has shape"),
        (lambda: heed.wall_attention_keys(k, a), r"keys has shape \[2,9,2,6\], expected \[2,9,4,6\]"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()
    a[1, 2, 3, 4] = np.nan
    heed.set_checks(True)
    try:
        with pytest.raises(heed.InvalidArgument, match="log_decay has an element nan, expected <= 0 everywhere"):
            heed.wall_attention(q, k, v, a, g)
    finally:
        heed.set_checks(False)


class TestTorch:
    torch = pytest.importorskip("torch")

    def given(self, **sizes):
        return [self.torch.from_numpy(x).requires_grad_() for x in inputs(**sizes)]

    def exact(self, q, k, v, log_decay, log_forget):
        """o and lse in PyTorch: each key decays by each later token."""
        torch, (T, H, D) = self.torch, q.shape[1:]
        k, v, log_decay = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v, log_decay))
        rows, sums, keys, F = [], [], None, None
        for i in range(T):
            new, zero = k[:, i:i + 1], torch.zeros_like(log_forget[:, :1])
            keys = new if keys is None else torch.cat([keys * log_decay[:, i, None].exp(), new], 1)
            F = zero if F is None else torch.cat([F + log_forget[:, i, None], zero], 1)
            s = (keys * q[:, i, None]).sum(-1) * D**-0.5 + F  # [B, i + 1, H]
            sums.append(s.logsumexp(1))
            rows.append((s.softmax(1)[..., None] * v[:, :i + 1]).sum(1))
        return torch.stack(rows, 1), torch.stack(sums, -1)

    @pytest.mark.parametrize("Hg", [2, 4])
    @pytest.mark.parametrize("T", [2, 64, 150])
    def test_values_and_gradients_are_those_of_autograd(self, T, Hg):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(T=T, Hg=Hg)
            o, lse = heed.torch.wall_attention(*given, return_lse=True) if ours else self.exact(*given)
            ((o * o).sum() + lse.sin().sum()).backward()
            results.append([o.detach(), lse.detach(), *(x.grad for x in given)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    def test_gradcheck_and_opcheck(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=4, H=2, Hg=2, Hkv=1, D=2, Dv=3)
        assert torch.autograd.gradcheck(lambda *x: heed.torch.wall_attention(*x, return_lse=True), given)
        torch.library.opcheck(torch.ops.heed.wall_attention.default, (*given, None, None, None, None, None))

    @pytest.mark.parametrize("options", [
        {}, {"gate": False, "scale": 0.4}, {"lengths": [3, 1], "starts": [0, 1]},
        {"cu_seqlens": [0, 1, 1, 3]}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch, options = self.torch, dict(options)
        given = self.given(B=1 if "cu_seqlens" in options else 2, T=3, H=2, Hg=1, Hkv=1, D=2, Dv=2)
        given = given if options.pop("gate", True) else given[:4]

        def function(*x):
            o, lse = heed.torch.wall_attention(*x, **options, return_lse=True)
            return o, lse.exp()  # 0 for excluded tokens

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_second_derivatives_are_those_of_autograd(self):
        import heed.torch

        torch, results = self.torch, []
        for ours in (True, False):
            given = self.given(B=1, T=40)
            o, lse = heed.torch.wall_attention(*given, return_lse=True) if ours else self.exact(*given)
            gradients = torch.autograd.grad((o * o).sum() + lse.sin().sum(), given, create_graph=True)
            sum(x.square().sum() for x in gradients).backward()
            results.append([x.grad for x in given])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))

    def test_it_compiles(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=20)
        expected = heed.torch.wall_attention(*given)
        compiled = torch.compile(heed.torch.wall_attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given), expected, rtol=0, atol=0)

    def test_second_derivatives_with_hidden_channels_are_finite(self):
        import heed.torch

        torch, given = self.torch, self.given(B=1, T=70)
        with torch.no_grad():
            given[3][0, 40, :, 2] = -torch.inf
        o = heed.torch.wall_attention(*given)
        gradients = torch.autograd.grad(o.square().sum(), given, create_graph=True)
        sum(x.square().sum() for x in gradients).backward()
        assert all(x.grad.isfinite().all() for x in given)
        assert not given[3].grad[0, 40, :, 2].any()

    def test_the_function_of_flash_linear_attention(self):
        from heed.compat.fla import parallel_wall_attn

        import heed.torch

        torch = self.torch
        q, k, v, a, g = (x.detach() for x in self.given(T=70))
        o, lse = heed.torch.wall_attention(q, k, v, a, g, scale=0.25, return_lse=True)
        torch.testing.assert_close(parallel_wall_attn(q, k, v, a, g_scalar=g, scale=0.25), o)
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=q.dtype)
        factor = (lse - torch.logaddexp(lse, sinks[:, None])).exp().transpose(1, 2)[..., None]
        torch.testing.assert_close(parallel_wall_attn(q, k, v, a, g_scalar=g, sink_bias=sinks, scale=0.25), o * factor)
        # Without decays, sinks are those of attention.
        torch.testing.assert_close(parallel_wall_attn(q, k, v, 0 * a, sink_bias=sinks),
                                   heed.torch.attention(q, k, v, causal=True, sinks=sinks))
        with pytest.raises(heed.Unsupported, match="window_size"):
            parallel_wall_attn(q, k, v, a, window_size=8)
        with pytest.raises(heed.InvalidArgument, match="sink_bias has shape"):
            parallel_wall_attn(q, k, v, a, sink_bias=sinks[:2])
        with pytest.raises(heed.InvalidArgument, match="parallel_wall_attn: g has shape"):
            parallel_wall_attn(q, k, v, a[..., :3])
