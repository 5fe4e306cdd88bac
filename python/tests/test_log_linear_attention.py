# heed.log_linear_attention: against a plain recurrence over a Fenwick tree, its states and steps, gradients, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=150, H=2, HV=4, K=6, V=5, L=10, dtype=np.float64, seed=0):
    """q, k, v, level_scales, log_decay."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(x) for x in ((B, T, H, K), (B, T, H, K), (B, T, HV, V)))
    return [x.astype(dtype) for x in (q, k, v, rng.standard_normal((B, T, HV, L)), -rng.exponential(0.1, (B, T, HV)))]


def naive(q, k, v, level_scales, log_decay=None, scale=1.0):
    """The tree itself: before token t > 0 the lowest states become one, then the token is a state of its own."""
    B, T, HV, L = level_scales.shape
    group = HV // q.shape[2]
    q, k = (np.repeat(x.astype(np.float64), group, 2) for x in (q, k))
    o, S = np.zeros(v.shape), np.zeros((L + 1, B, HV, q.shape[3], v.shape[3]))
    for t in range(T):
        if log_decay is not None:
            S *= np.exp(log_decay[:, t])[..., None, None]
        if t > 0:
            low = (t & -t).bit_length() - 1
            S[low + 1] += S[: low + 1].sum(0)
            S[: low + 1] = 0
        S[0] += k[:, t, :, :, None] * v[:, t, :, None, :]
        levels = np.moveaxis(level_scales[:, t].astype(np.float64), -1, 0)
        o[:, t] = scale * np.einsum("lbh,lbhkv,bhk->bhv", levels, S[:L], q[:, t])
    return o


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-4), (np.float16, 0.3)])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 63, 64, 65, 200])
def test_it_is_the_tree(T, dtype, atol):
    *given, g = inputs(T=T, dtype=dtype)
    for options in ({}, {"log_decay": g, "scale": 0.4}):
        expected = naive(*given, **options)
        np.testing.assert_allclose(heed.log_linear_attention(*given, **options), expected, rtol=0, atol=atol)


def test_levels_that_all_count_alike_are_simple_gla():
    q, k, v, scales, g = inputs(T=300)
    o = heed.log_linear_attention(q, k, v, np.ones_like(scales), log_decay=g)
    np.testing.assert_allclose(o, heed.simple_gla(q, k, v, g, scale=1), rtol=0, atol=1e-11)


def test_a_level_of_its_own_sees_its_run_alone():
    q, k, v, scales, g = inputs(T=40)
    scales[:] = 0
    scales[..., 3] = 1
    other = v.copy()
    other[:, [0, 1, 2, 3, 4, 5, 6, 7, 12]] = np.nan
    o, same = (heed.log_linear_attention(q, k, x, scales, log_decay=g)[:, 12] for x in (v, v))
    np.testing.assert_array_equal(o, same)
    changed = v.copy()
    changed[:, 8:12] += 1  # token 12 sees tokens 8 to 11 at level 3
    assert not np.allclose(heed.log_linear_attention(q, k, changed, scales, log_decay=g)[:, 12], o)
    changed = v.copy()
    changed[:, [*range(8), *range(12, 40)]] += 1
    np.testing.assert_allclose(heed.log_linear_attention(q, k, changed, scales, log_decay=g)[:, 12], o, atol=1e-14)


@pytest.mark.parametrize("cuts", [(64, 128), (1, 2), (37, 101), (63, 149)])
def test_parts_with_states_are_the_whole(cuts):
    *given, g = inputs()
    whole, last = heed.log_linear_attention(*given, log_decay=g, return_state=True)
    state, parts = None, []
    for begin, end in zip((0, *cuts), (*cuts, 150)):
        o, state = heed.log_linear_attention(*(x[:, begin:end] for x in given), log_decay=g[:, begin:end],
                                             initial_state=state, positions=[begin] * 2, return_state=True)
        parts.append(o)
    if cuts == (64, 128):
        np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
        np.testing.assert_array_equal(state, last)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-12)
    assert [bool(last[:, :, j].any()) for j in range(10)] == [bool(150 >> j & 1) for j in range(10)]


@pytest.mark.parametrize("decays", [False, True])
def test_steps_are_the_sequence(decays):
    *given, g = inputs(T=70)
    more = {"log_decay": g} if decays else {}
    o, last = heed.log_linear_attention(*given, **more, return_state=True)
    state = np.zeros_like(last)
    for t in range(70):
        o_t = heed.log_linear_attention_step(*(x[:, t] for x in given), state, positions=[t, t],
                                             **{key: x[:, t] for key, x in more.items()})
        np.testing.assert_allclose(o_t, o[:, t], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-12)


def test_packed_sequences_and_padding():
    *given, g = inputs(B=1)
    o, states = heed.log_linear_attention(*given, log_decay=g, cu_seqlens=[0, 70, 70, 150], return_state=True)
    for i, (begin, end) in enumerate([(0, 70), (70, 70), (70, 150)]):
        part, state = heed.log_linear_attention(*(x[:, begin:end] for x in given), log_decay=g[:, begin:end],
                                                return_state=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(states[i: i + 1], state)
    *given, g = inputs()
    o = heed.log_linear_attention(*given, log_decay=g, starts=[5, 0], lengths=[100, 60])
    np.testing.assert_array_equal(o[:1, 5:100], heed.log_linear_attention(*(x[:1, 5:100] for x in given),
                                                                          log_decay=g[:1, 5:100]))
    assert not o[0, :5].any() and not o[0, 100:].any() and not o[1, 60:].any()


def test_later_tokens_and_what_a_decay_of_0_clears_do_not_matter():
    *given, g = inputs(T=100)
    q, k, v, scales = given
    o = heed.log_linear_attention(*given, log_decay=g)
    bad = v.copy()
    bad[:, 80:] = np.nan
    np.testing.assert_array_equal(heed.log_linear_attention(q, k, bad, scales, log_decay=g)[:, :80], o[:, :80])
    g[:, 50] = -np.inf
    cut = heed.log_linear_attention(*given, log_decay=g)
    assert np.isfinite(cut).all()
    scale_of_both = np.ones_like(scales)
    parts = heed.log_linear_attention(q, k, v, scale_of_both, log_decay=g)[:, 50:]
    alone = heed.simple_gla(*(x[:, 50:] for x in (q, k, v, g)), scale=1)
    np.testing.assert_allclose(parts, alone, rtol=0, atol=1e-12)
    gradients = heed.log_linear_attention_backward(np.ones_like(v), *given, log_decay=g)
    assert all(np.isfinite(x).all() for x in gradients if x is not None)


@pytest.mark.parametrize("position", [None, 5, 64])
def test_gradients_agree_with_finite_differences(position):
    rng = np.random.default_rng(1)
    T = 4 if position is None else 3
    *given, g = inputs(B=1, T=T, H=1, HV=2, K=2, V=2, L=8)
    given.append(g)
    options = {}
    if position is not None:
        given.append(rng.standard_normal((1, 2, 8, 2, 2)))
        options = {"positions": [position]}
    do, dstate = rng.standard_normal((1, T, 2, 2)), rng.standard_normal((1, 2, 8, 2, 2))

    def loss():
        more = {"initial_state": given[5]} if position is not None else {}
        o, state = heed.log_linear_attention(*given[:4], log_decay=given[4], scale=0.7, return_state=True, **more,
                                             **options)
        return (o * do).sum() + (state * dstate).sum()

    more = {"initial_state": given[5]} if position is not None else {}
    gradients = heed.log_linear_attention_backward(do, *given[:4], log_decay=given[4], scale=0.7, dstate=dstate, **more,
                                                   **options)
    assert type(gradients) is heed.LogLinearAttentionGradients
    for x, gradient in zip(given, gradients):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=1e-7)


def test_errors():
    q, k, v, scales, g = inputs(T=9)
    state = np.zeros((2, 4, 10, 6, 5))
    for call, message in [
        (lambda: heed.log_linear_attention(q[0], k, v, scales), r"q has shape \[9,2,6\], expected \[B, T, H, K\]"),
        (lambda: heed.log_linear_attention(q, k[:, 1:], v, scales), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.log_linear_attention(q, k, v[:, :, :3], scales), "v has 3 heads, expected a multiple of the 2"),
        (lambda: heed.log_linear_attention(q, k, v, scales[..., :4]),
         r"level_scales has 4 levels, expected enough for 9 tokens: L levels are for 2\^\(L - 1\)"),
        (lambda: heed.log_linear_attention(q, k, v, scales, log_decay=g[..., :3]), "log_decay has shape"),
        (lambda: heed.log_linear_attention(q, k, v, scales, initial_state=state), "positions is absent, expected the"),
        (lambda: heed.log_linear_attention(q, k, v, scales, positions=[0, 2]),
         r"positions\[1\] is 2, expected 0 without initial_state"),
        (lambda: heed.log_linear_attention(q, k, v, scales, positions=[0, -1], initial_state=state),
         r"positions\[1\] is -1, expected 0 or more"),
        (lambda: heed.log_linear_attention(q, k, v, scales, positions=[0, 510], initial_state=state), "for 519 tokens"),
        (lambda: heed.log_linear_attention(q, k, v, scales, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.log_linear_attention(q, k, v, scales, initial_state=state[:1], positions=[1, 1]),
         "initial_state has shape"),
        (lambda: heed.log_linear_attention_backward(v[:1], q, k, v, scales), "do has shape"),
        (lambda: heed.log_linear_attention_step(q[:, 0], k[:, 0], v[:, 0], scales[:, 0], state[:1], positions=[0, 0]),
         "has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def test_values_and_gradients(self):
        import heed.torch

        torch = self.torch
        arrays = inputs(B=1, T=5, H=1, HV=2, K=2, V=3, L=5)
        given = [torch.from_numpy(x).requires_grad_() for x in arrays]
        state = torch.randn(1, 2, 5, 2, 3, dtype=torch.float64, requires_grad=True)
        function = lambda *x: heed.torch.log_linear_attention(*x[:4], log_decay=x[4])  # noqa: E731
        np.testing.assert_array_equal(function(*given).detach().numpy(),
                                      heed.log_linear_attention(*arrays[:4], log_decay=arrays[4]))
        assert torch.autograd.gradcheck(function, given)
        with_states = lambda *x: heed.torch.log_linear_attention(  # noqa: E731
            *x[:4], log_decay=x[4], initial_state=x[5], positions=[3], return_state=True)
        assert torch.autograd.gradcheck(with_states, (*given, state))
        assert torch.autograd.gradcheck(lambda *x: with_states(*x)[1], (*given, state))
        none = (None,) * 8
        torch.library.opcheck(torch.ops.heed.log_linear_attention.default, (*given[:4], *none))

    @pytest.mark.parametrize("options", [
        {"scale": -0.7}, {"log_decay": None}, {"lengths": [4, 2], "starts": [1, 2]},
        {"cu_seqlens": [0, 2, 2, 5]}, {"positions": [3, 64]},
        {"positions": [1, 0, 6], "cu_seqlens": [0, 3, 3, 5], "scale": 0.5}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch = self.torch
        torch.manual_seed(3)
        batch = 1 if "cu_seqlens" in options else 2
        given = [torch.from_numpy(x) for x in inputs(B=batch, T=5, H=1, HV=2, K=2, V=3, L=8)]
        if "log_decay" in options:
            given.pop()
        if "positions" in options:
            given.append(torch.randn(len(options["positions"]), 2, 8, 2, 3, dtype=torch.float64))

        def function(*x):
            state = {"initial_state": x[-1]} if "positions" in options else {}
            decay = {} if "log_decay" in options else {"log_decay": x[4]}
            return heed.torch.log_linear_attention(*x[:4], return_state=True, **options | decay | state)

        for x in given:
            x.requires_grad_()
        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

        def gradients(*x):
            return torch.autograd.grad(sum(y.square().sum() for y in function(*x)), x, create_graph=True)

        assert torch.autograd.gradgradcheck(gradients, given, atol=1e-5, rtol=1e-3, fast_mode=True)

    def test_hessians(self):
        import heed.torch

        torch = self.torch
        q, k, v, scales, g = (torch.from_numpy(x) for x in inputs(B=1, T=3, H=1, HV=2, K=2, V=3, L=3))

        def loss(x):
            return heed.torch.log_linear_attention(q, x, v, scales, log_decay=g).sin().sum()

        forward_over_reverse = torch.func.hessian(loss)(k)
        torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(k), forward_over_reverse)
        torch.testing.assert_close(torch.autograd.functional.hessian(loss, k), forward_over_reverse)
        assert forward_over_reverse.abs().max() > 1e-3

    def test_a_gradient_penalty_in_bfloat16(self):
        import heed.torch

        torch = self.torch
        wide = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=70, H=2, HV=4, K=16, V=16, L=8)]

        def penalty(q, *others):
            o = heed.torch.log_linear_attention(q, *others[:3], log_decay=others[3])
            (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
            return dq.square().mean(dtype=torch.float64)

        narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
        found = torch.autograd.grad(penalty(*narrow), narrow[1:])
        expected = torch.autograd.grad(penalty(*wide), wide[1:])
        for x, y in zip(found, expected):
            assert x.dtype == torch.bfloat16
            torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.03 * float(y.abs().max()))

    def test_packed_and_stepped(self):
        import heed.torch

        torch = self.torch
        q, k, v, scales, g = (torch.from_numpy(x) for x in inputs(B=1, T=20))
        o = heed.torch.log_linear_attention(q, k, v, scales, log_decay=g, cu_seqlens=torch.tensor([0, 8, 20]))
        state = torch.zeros(1, 4, 10, 6, 5, dtype=torch.float64)
        for t in range(12):
            at = 8 + t
            step = heed.torch.log_linear_attention_step(q[:, at], k[:, at], v[:, at], scales[:, at], state,
                                                        log_decay=g[:, at], positions=[t])
            torch.testing.assert_close(step, o[:, at])

    def test_as_fla_calls_it(self):
        from heed.compat import fla

        arrays = inputs(B=1, T=20)
        q, k, v, scales, g = (self.torch.from_numpy(x) for x in arrays)
        o, state = fla.chunk_log_linear_attn(q, k, v, g, scales, cu_seqlens=self.torch.tensor([0, 20]))
        np.testing.assert_allclose(o.numpy(), naive(*arrays), rtol=0, atol=1e-12)
        assert state is None
        with pytest.raises(heed.Unsupported, match="chunk_log_linear_attn: output_final_state is True"):
            fla.chunk_log_linear_attn(q, k, v, g, scales, output_final_state=True)
        with pytest.raises(heed.InvalidArgument, match="chunk_log_linear_attn: g has shape"):
            fla.chunk_log_linear_attn(q, k, v, g[:, :, :2], scales)
