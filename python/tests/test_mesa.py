# heed.mesa: against a direct solution per token, its states and steps, gradients, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=2, K=6, V=5, dtype=np.float64, seed=0):
    """q, k, v, beta, lamb, log_decay."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, H, D)) for D in (K, K, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    rest = rng.random((B, T, H)), 0.5 + rng.random((H, K)), -rng.exponential(0.1, (B, T, H))
    return [x.astype(dtype) for x in (q, k, v, *rest)]


def random_state(N=2, H=2, K=6, V=5, seed=1):
    rows = np.random.default_rng(seed).standard_normal((N, H, K, K + V)) / K**0.5
    return rows[..., :K].swapaxes(-1, -2) @ rows


def exact(q, k, v, beta, lamb, log_decay=None, initial_state=None):
    """o and the state, by a direct solution of each token's system."""
    q, k, v, beta, lamb = (x.astype(np.float64) for x in (q, k, v, beta, lamb))
    B, T, H, K = q.shape
    S = np.zeros((B, H, K, K + v.shape[3])) if initial_state is None else initial_state.astype(np.float64)
    o = np.zeros(v.shape)
    for t in range(T):
        if log_decay is not None:
            S = S * np.exp(log_decay[:, t].astype(np.float64))[..., None, None]
        row = np.concatenate([k[:, t], v[:, t]], -1)
        S = S + (beta[:, t, :, None] * k[:, t])[..., None] * row[..., None, :]
        A = S[..., :K] + lamb[:, :, None] * np.eye(K)
        x = np.linalg.solve(A, q[:, t, ..., None])
        o[:, t] = (S[..., K:].swapaxes(-1, -2) @ x)[..., 0]
    return o, S


def conjugate_gradients(A, b, iterations, eps):
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    for _ in range(iterations):
        Ap, rr = A @ p, r @ r
        x, r = x + rr / (p @ Ap + eps) * p, r - rr / (p @ Ap + eps) * Ap
        p = r + r @ r / (rr + eps) * p
    return x


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 2e-2)])
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 70])
def test_it_is_the_direct_solution(T, dtype, atol):
    *given, g = inputs(T=T, dtype=dtype)
    for options in ({}, {"log_decay": g}, {"log_decay": g, "initial_state": random_state()}):
        expected, last = exact(*given, **options)
        if dtype != np.float64 and "initial_state" in options:
            options["initial_state"] = options["initial_state"].astype(np.float32)
        o, state = heed.mesa(*given, **options, iterations=60, return_state=True)
        np.testing.assert_allclose(o, expected, rtol=0, atol=atol)
        np.testing.assert_allclose(state, last, rtol=0, atol=1e-12 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
def test_each_iteration_is_one_of_conjugate_gradients(iterations, eps):
    q, k, v, beta, lamb, g = inputs(B=1, H=1, T=20, K=9)
    o, x = heed.mesa(q, k, v, beta, lamb, log_decay=g, iterations=iterations, eps=eps, return_solution=True)
    for t in range(20):
        _, S = exact(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1], beta[:, : t + 1], lamb, g[:, : t + 1])
        expected = conjugate_gradients(S[0, 0, :, :9] + np.diag(lamb[0]), q[0, t, 0], iterations, eps)
        np.testing.assert_allclose(x[0, t, 0], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(o[0, t, 0], S[0, 0, :, 9:].T @ expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [(16, 48), (1, 2), (37, 61)])
def test_parts_with_states_are_the_whole(cuts):
    q, k, v, beta, lamb, g = inputs()
    whole, last = heed.mesa(q, k, v, beta, lamb, log_decay=g, return_state=True)
    state, parts = None, []
    for begin, end in zip((0, *cuts), (*cuts, 70)):
        cut = [x[:, begin:end] for x in (q, k, v, beta, g)]
        o, state = heed.mesa(*cut[:4], lamb, log_decay=cut[4], initial_state=state, return_state=True)
        parts.append(o)
    if cuts == (16, 48):
        np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
        np.testing.assert_array_equal(state, last)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-11)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-12)


def test_steps_are_the_sequence():
    q, k, v, beta, lamb, g = inputs(T=40)
    o, last = heed.mesa(q, k, v, beta, lamb, log_decay=g, return_state=True)
    state = np.zeros_like(last)
    for t in range(40):
        o_t = heed.mesa_step(q[:, t], k[:, t], v[:, t], beta[:, t], lamb, state, log_decay=g[:, t])
        np.testing.assert_allclose(o_t, o[:, t], rtol=0, atol=1e-11)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-12)


def test_packed_sequences_and_padding():
    q, k, v, beta, lamb, g = inputs(B=1)
    o, states = heed.mesa(q, k, v, beta, lamb, log_decay=g, cu_seqlens=[0, 40, 40, 70], return_state=True)
    for i, (begin, end) in enumerate([(0, 40), (40, 40), (40, 70)]):
        cut = [x[:, begin:end] for x in (q, k, v, beta, g)]
        part, state = heed.mesa(*cut[:4], lamb, log_decay=cut[4], return_state=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(states[i: i + 1], state)
    q, k, v, beta, lamb, g = inputs()
    o = heed.mesa(q, k, v, beta, lamb, log_decay=g, starts=[5, 0], lengths=[60, 30])
    np.testing.assert_array_equal(o[:1, 5:60], heed.mesa(*(x[:1, 5:60] for x in (q, k, v, beta)), lamb,
                                                         log_decay=g[:1, 5:60]))
    assert not o[0, :5].any() and not o[0, 60:].any() and not o[1, 30:].any()


def test_later_tokens_and_what_a_decay_of_0_clears_do_not_matter():
    q, k, v, beta, lamb, g = inputs()
    o = heed.mesa(q, k, v, beta, lamb, log_decay=g)
    for name in ("k", "v"):
        bad = {"k": k.copy(), "v": v.copy()}
        bad[name][:, 40:] = np.nan
        np.testing.assert_array_equal(heed.mesa(q, bad["k"], bad["v"], beta, lamb, log_decay=g)[:, :40], o[:, :40])
    bad = q.copy()
    bad[:, 40] = np.nan
    others = np.arange(70) != 40
    np.testing.assert_array_equal(heed.mesa(bad, k, v, beta, lamb, log_decay=g)[:, others], o[:, others])
    g[:, 37] = -np.inf
    cut = heed.mesa(q, k, v, beta, lamb, log_decay=g)
    alone = heed.mesa(*(x[:, 37:] for x in (q, k, v, beta)), lamb, log_decay=g[:, 37:])
    np.testing.assert_allclose(cut[:, 37:], alone, rtol=0, atol=1e-11)
    gradients = heed.mesa_backward(np.ones_like(v), q, k, v, beta, lamb, log_decay=g)
    assert all(np.isfinite(x).all() for x in gradients if x is not None)
    assert not gradients.dlog_decay[:, 37].any()


def test_gradients_with_the_solution_have_the_bits_of_those_without():
    q, k, v, beta, lamb, g = inputs(dtype=np.float32)
    _, x = heed.mesa(q, k, v, beta, lamb, log_decay=g, return_solution=True)
    do = np.random.default_rng(3).standard_normal(v.shape).astype(np.float32)
    for ours, theirs in zip(heed.mesa_backward(do, q, k, v, beta, lamb, log_decay=g, solution=x),
                            heed.mesa_backward(do, q, k, v, beta, lamb, log_decay=g)):
        np.testing.assert_array_equal(ours, theirs)


def test_gradients_agree_with_finite_differences():
    rng = np.random.default_rng(1)
    given = inputs(B=2, T=5, H=1, K=3, V=2)
    do, dstate = rng.standard_normal((2, 5, 1, 2)), rng.standard_normal((2, 1, 3, 5))
    initial = random_state(H=1, K=3, V=2)

    def loss():
        o, state = exact(*given, initial)
        return (o * do).sum() + (state * dstate).sum()

    gradients = heed.mesa_backward(do, *given[:5], log_decay=given[5], initial_state=initial, dstate=dstate)
    assert type(gradients) is heed.MesaGradients
    for x, gradient in zip([*given, initial], gradients):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=2e-7)


def test_errors():
    q, k, v, beta, lamb, g = inputs(T=9)
    state = np.zeros((2, 2, 6, 11))
    for call, message in [
        (lambda: heed.mesa(q[0], k, v, beta, lamb), r"q has shape \[9,2,6\], expected \[B, T, H, K\]"),
        (lambda: heed.mesa(q, k[:, 1:], v, beta, lamb), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.mesa(q, k, v[:, :, :1], beta, lamb), "v has shape"),
        (lambda: heed.mesa(q, k, v, beta[:, 1:], lamb), "beta has shape"),
        (lambda: heed.mesa(q, k, v, beta, lamb[:, 1:]), r"lamb has shape \[2,5\], expected \[2,6\]"),
        (lambda: heed.mesa(q, k, v, beta, lamb, log_decay=g[..., :1]), "log_decay has shape"),
        (lambda: heed.mesa(q, k, v, beta, lamb, iterations=0), "iterations is 0, expected"),
        (lambda: heed.mesa(q, k, v, beta, lamb, eps=-1), "eps is -1, expected a finite number >= 0"),
        (lambda: heed.mesa(q, k, v, beta, lamb, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.mesa(q, k, v, beta, lamb, initial_state=state[..., :6]), "initial_state has shape"),
        (lambda: heed.mesa_backward(v[:1], q, k, v, beta, lamb), "do has shape"),
        (lambda: heed.mesa_backward(v, q, k, v, beta, lamb, solution=q[:1]), "solution has shape"),
        (lambda: heed.mesa_step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], lamb, state[:1]), "state has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def exact(self, q, k, v, beta, lamb, log_decay, factors):
        """o and the state, with the initial state R^T [R, U] of factors [R, U], in PyTorch."""
        torch, (T, K) = self.torch, (q.shape[1], q.shape[3])
        S = factors[..., :K].mT @ factors
        o = []
        for t in range(T):
            row = torch.cat([k[:, t], v[:, t]], -1)
            S = log_decay[:, t].exp()[..., None, None] * S
            S = S + (beta[:, t, :, None] * k[:, t])[..., None] * row[..., None, :]
            x = torch.linalg.solve(S[..., :K] + torch.diag_embed(lamb), q[:, t])
            o.append((x[..., None] * S[..., K:]).sum(-2))
        return torch.stack(o, 1), S

    def test_values_and_gradients_are_those_of_autograd(self):
        import heed.torch

        torch = self.torch
        factors = torch.randn(2, 2, 6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 2.4
        results = []
        for ours in (True, False):
            given = [torch.from_numpy(x).requires_grad_() for x in inputs(T=40)]
            R = factors.clone().requires_grad_()
            if ours:
                o, S = heed.torch.mesa(*given[:5], log_decay=given[5], initial_state=R[..., :6].mT @ R, iterations=60,
                                       return_state=True)
            else:
                o, S = self.exact(*given, R)
            ((o * o).sum() + (S.sin()).sum()).backward()
            results.append([o.detach(), S.detach(), *(x.grad for x in given), R.grad])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    def test_gradcheck(self):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=5, H=2, K=2, V=3)]
        R = torch.randn(1, 2, 2, 5, dtype=torch.float64, requires_grad=True)

        def function(*x):
            return heed.torch.mesa(*x[:5], log_decay=x[5], initial_state=x[6][..., :2].mT @ x[6], return_state=True)

        assert torch.autograd.gradcheck(function, (*given, R))
        none = (None, 30, 0.0) + (None,) * 5
        torch.library.opcheck(torch.ops.heed.mesa.default, (*given[:5], *none))

    @pytest.mark.parametrize("options", [
        {}, {"log_decay": None, "return_state": True}, {"lengths": [3, 1], "starts": [0, 1]},
        {"cu_seqlens": [0, 1, 1, 3], "states": 3, "return_state": True}, {"states": 1, "eps": 1e-12}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch = self.torch
        torch.manual_seed(3)
        options = dict(options)
        states = options.pop("states", 0)
        batch = 1 if states else 2
        *given, g = (torch.from_numpy(x).requires_grad_() for x in inputs(B=batch, T=3, H=1, K=2, V=3))
        if "log_decay" not in options:
            given.append(g)
        if states:
            given.append(torch.randn(states, 1, 2, 5, dtype=torch.float64, requires_grad=True))

        def function(*x):
            decay = {} if "log_decay" in options else {"log_decay": x[5]}
            state = {"initial_state": x[-1][..., :2].mT @ x[-1]} if states else {}
            return heed.torch.mesa(*x[:5], **options | decay | state)

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_third_derivatives(self):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=2, H=1, K=2, V=1)]

        def gradients(*x):
            o = heed.torch.mesa(*x[:5], log_decay=x[5])
            return torch.autograd.grad(o.square().sum(), x, create_graph=True)

        assert torch.autograd.gradgradcheck(gradients, given, atol=1e-5, rtol=1e-3, fast_mode=True)

    def test_second_derivatives_are_those_of_the_direct_solution(self):
        import heed.torch

        torch = self.torch
        factors = torch.randn(2, 2, 6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 2.4
        results = []
        for ours in (True, False):
            given = [torch.from_numpy(x).requires_grad_() for x in inputs(T=20)]
            R = factors.clone().requires_grad_()
            if ours:
                o, S = heed.torch.mesa(*given[:5], log_decay=given[5], initial_state=R[..., :6].mT @ R, iterations=60,
                                       return_state=True)
            else:
                o, S = self.exact(*given, R)
            gradients = torch.autograd.grad((o * o).sum() + S.sin().sum(), [*given, R], create_graph=True)
            sum(x.square().sum() for x in gradients).backward()
            results.append([x.grad for x in (*given, R)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))

    def test_hessians(self):
        import heed.torch

        torch = self.torch
        q, k, v, beta, lamb, g = (torch.from_numpy(x) for x in inputs(B=1, T=3, H=1, K=2, V=2))

        def loss(x):
            return heed.torch.mesa(q, x, v, beta, lamb, log_decay=g).sin().sum()

        forward_over_reverse = torch.func.hessian(loss)(k)
        torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(k), forward_over_reverse)
        torch.testing.assert_close(torch.autograd.functional.hessian(loss, k), forward_over_reverse)
        assert forward_over_reverse.abs().max() > 1e-3
        along = torch.randn(k.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        product = torch.func.jvp(torch.func.grad(loss), (k,), (along,))[1]
        torch.testing.assert_close(product, torch.einsum("abcdefgh,efgh->abcd", forward_over_reverse, along))

    @pytest.mark.parametrize("dtype, rtol, share", [("float32", 1e-3, 1e-4), ("bfloat16", 0.05, 0.03)])
    def test_a_gradient_penalty_in_other_dtypes(self, dtype, rtol, share):
        import heed.torch

        torch = self.torch
        dtype = getattr(torch, dtype)
        wide = [torch.from_numpy(x) for x in inputs(B=1, T=70, H=2, K=16, V=16)]
        narrow = [x.to(dtype).requires_grad_() for x in wide]
        wide = [x.detach().double().requires_grad_() for x in narrow]

        def penalty(q, *others):
            o = heed.torch.mesa(q, *others[:4], log_decay=others[4])
            (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
            return dq.square().mean(dtype=torch.float64)

        found = torch.autograd.grad(penalty(*narrow), narrow[1:])
        expected = torch.autograd.grad(penalty(*wide), wide[1:])
        for x, y in zip(found, expected):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), y, rtol=rtol, atol=share * float(y.abs().max()))

    def test_forward_mode_refuses_wrong_shapes(self):
        import heed.torch

        torch = self.torch
        q, k, v, beta, lamb, _ = (torch.from_numpy(x) for x in inputs(B=1, T=3))
        for name, wrong in (("k", {"k": k[:, :, :1]}), ("v", {"v": v[:, :, :1]}), ("lamb", {"lamb": lamb[:1]})):
            given = {"q": q, "k": k, "v": v, "beta": beta, "lamb": lamb} | wrong
            with pytest.raises(heed.InvalidArgument, match=f"mesa: {name} has shape"):
                torch.func.jvp(lambda q: heed.torch.mesa(**given | {"q": q}), (q,), (q,))

    def test_packed_and_stepped(self):
        import heed.torch

        torch = self.torch
        q, k, v, beta, lamb, g = (torch.from_numpy(x) for x in inputs(B=1, T=20))
        o = heed.torch.mesa(q, k, v, beta, lamb, log_decay=g, cu_seqlens=torch.tensor([0, 8, 20]))
        state = torch.zeros(1, 2, 6, 11, dtype=torch.float64)
        for t in range(8, 20):
            step = heed.torch.mesa_step(q[:, t], k[:, t], v[:, t], beta[:, t], lamb, state, log_decay=g[:, t])
            torch.testing.assert_close(step, o[:, t])

    def test_as_fla_calls_it(self):
        from heed.compat import fla

        torch = self.torch
        arrays = inputs(B=1, T=20)
        q, k, v, beta, lamb, g = (torch.from_numpy(x) for x in arrays)
        initial = torch.from_numpy(random_state(N=1))
        kk, kv = initial[..., :6].float(), initial[..., 6:].float()
        given = (x.float() for x in (q, k, v, g, beta, lamb))
        o, last_kk, last_kv = fla.chunk_mesa_net(*given, h_kk_init=kk, h_kv_init=kv, output_final_state=True)
        expected, last = exact(*arrays, initial.numpy())
        np.testing.assert_allclose(o.numpy(), expected, rtol=0, atol=2e-2)  # eps = 1e-5 keeps a residual of about 3e-3
        np.testing.assert_allclose(torch.cat([last_kk, last_kv], -1).numpy(), last, rtol=0, atol=1e-5)
        assert fla.chunk_mesa_net(q, k, v, g, beta, lamb)[1:] == (None, None)
        normed = fla.chunk_mesa_net(5 * q, 3 * k, v, g, beta, lamb, use_qk_l2norm_in_kernel=True)[0]
        unit = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        torch.testing.assert_close(normed, fla.chunk_mesa_net(*unit, v, g, beta, lamb)[0], rtol=1e-4, atol=1e-4)
        one = (x[:, 0] for x in (q, k, v, g))
        o, new_kk, new_kv = fla.mesa_net_decoding_one_step(*one, lamb, beta[:, 0], initial[..., :6], initial[..., 6:])
        np.testing.assert_allclose(o.numpy(), expected[:, 0], rtol=0, atol=2e-2)
        assert new_kk.shape == (1, 2, 6, 6) and new_kv.shape == (1, 2, 6, 5)
        with pytest.raises(heed.InvalidArgument, match="chunk_mesa_net: g has shape"):
            fla.chunk_mesa_net(q, k, v, g[:, :, :1], beta, lamb)
        with pytest.raises(heed.InvalidArgument, match="chunk_mesa_net: h_kv_init is None, expected"):
            fla.chunk_mesa_net(q, k, v, g, beta, lamb, h_kk_init=kk)
