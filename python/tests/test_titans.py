# heed.titans: against a plain recurrence, its states and steps, gradients, PyTorch.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=2, K=6, dtype=np.float64, seed=0):
    """q, k, v, weight, bias, theta, alpha, eta."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, B, T, H, K))
    gates = (size * rng.random((B, T, H)) for size in (0.01, 0.05, 0.9))
    return [x.astype(dtype) for x in (q, k / K**0.5, v, 0.5 + rng.random((H, K)), 0.3 * rng.standard_normal((H, K)),
                                      *gates)]


def random_state(N=2, H=2, K=6, seed=1):
    return np.random.default_rng(seed).standard_normal((N, H, 3, K, K))


def normalised(z, eps):
    return (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + eps)


def one_by_one(q, k, v, weight, bias, theta, alpha, eta, initial_state=None, position=0, mini_batch=16, eps=1e-6,
               scale=1.0):
    """o and the state, token by token: each takes the gradient of its loss at the memory before its mini-batch."""
    q, k, v, weight, bias = (x.astype(np.float64) for x in (q, k, v, weight, bias))
    theta, alpha, eta = (x.astype(np.float64)[..., None, None] for x in (theta, alpha, eta))
    B, T, H, K = q.shape
    state = np.zeros((B, H, 3, K, K)) if initial_state is None else initial_state.astype(np.float64)
    M, S, A = state[:, :, 0], state[:, :, 1], state[:, :, 2]
    o = np.zeros(q.shape)
    for t in range(T):
        if (position + t) % mini_batch == 0:
            A = M
        z = np.einsum("bhk,bhkv->bhv", k[:, t], A)
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + eps)
        x = (z - z.mean(-1, keepdims=True)) * r
        e = weight * x + bias - (v[:, t] - k[:, t])
        J = r[..., None] * (np.eye(K) - 1 / K - x[..., None] * x[..., None, :] / K)  # of the norm
        g = np.einsum("bhvw,bhv->bhw", J, weight * e)
        S = eta[:, t] * S - theta[:, t] * 2 * k[:, t, :, :, None] * g[..., None, :]
        M = (1 - alpha[:, t]) * M + S
        y = scale * np.einsum("bhk,bhkv->bhv", q[:, t], M)
        o[:, t] = y + weight * normalised(y, eps) + bias
    if (position + T) % mini_batch == 0:
        A = np.zeros_like(M)
    return o, np.stack([M, S, A], 2)


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-10), (np.float32, 1e-3), (np.float16, 2e-2)])
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 50])
def test_it_is_the_recurrence(T, dtype, atol):
    given = inputs(T=T, dtype=dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    state = random_state().astype(wide)
    for options in ({"eps": 0.1}, {"initial_state": state}, {"initial_state": state, "mini_batch": 7, "scale": -0.5},
                    {"initial_state": state, "mini_batch": 30, "eps": 0.01}):
        expected, last = one_by_one(*given, **options)
        o, after = heed.titans(*given, **options, return_state=True)
        assert o.dtype == dtype and after.dtype == wide
        np.testing.assert_allclose(o, expected, rtol=1e-2 if dtype == np.float16 else 1e-4, atol=atol)
        np.testing.assert_allclose(after, last, rtol=1e-3, atol=atol)


def test_the_step_is_the_gradient_of_the_loss():
    """Without momentum, S of one token is -theta times the derivative of the squared error by the memory."""
    q, k, v, weight, bias, theta, alpha, eta = inputs(B=1, T=1, H=1, K=5)
    state = random_state(1, 1, 5)
    _, after = heed.titans(q, k, v, weight, bias, theta, alpha, 0 * eta, initial_state=state, eps=0.01,
                           return_state=True)

    def loss(M):
        return np.square(k[0, 0, 0] + weight[0] * normalised(k[0, 0, 0] @ M, 0.01) + bias[0] - v[0, 0, 0]).sum()

    for i in range(5):
        for j in range(5):
            step = np.zeros((5, 5))
            step[i, j] = 1e-6
            difference = (loss(state[0, 0, 0] + step) - loss(state[0, 0, 0] - step)) / 2e-6
            assert after[0, 0, 1, i, j] == pytest.approx(-theta[0, 0, 0] * difference, abs=1e-8)
    np.testing.assert_allclose(after[:, :, 0], (1 - alpha[0, 0, 0]) * state[:, :, 0] + after[:, :, 1], rtol=1e-12)


def test_a_token_without_momentum_and_decay_is_one_of_ttt_linear():
    """Later tokens differ by the bias of TTT's model, which a token without one reads as 0."""
    q, k, v, weight, bias, theta, *_ = inputs(T=1)
    none, state = np.zeros_like(theta), random_state()
    _, own = heed.titans(q, k, v, weight, bias, theta, none, none, initial_state=state, return_state=True)
    model = np.zeros((2, 2, 2, 7, 6))
    model[:, :, 0, :6] = state[:, :, 0]
    _, last = heed.ttt_linear(q, k, v, weight, bias, 2 * theta, initial_state=model, return_state=True)
    np.testing.assert_allclose(own[:, :, 0], state[:, :, 0] - 2 * theta[:, 0, :, None, None] * last[:, :, 1, :6],
                               rtol=0, atol=1e-12)


@pytest.mark.parametrize("mini_batch", [1, 5, 16, 40])
def test_steps_are_the_sequence(mini_batch):
    given = inputs(T=40)
    options = {"mini_batch": mini_batch, "scale": 0.7}
    state = random_state()
    state[:, :, 2] = 0
    o, last = heed.titans(*given, initial_state=state, return_state=True, **options)
    for t in range(40):
        token = [x[:, t] for x in given[:3]] + given[3:5] + [x[:, t] for x in given[5:]]
        o_t = heed.titans_step(*token, state, positions=[t, t], **options)
        np.testing.assert_allclose(o_t, o[:, t], rtol=0, atol=1e-9)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-9)


def test_any_split_is_the_whole():
    given = inputs()
    state = random_state()
    for mini_batch, cuts in ((16, (16, 48)), (16, (3, 37)), (40, (50, 60)), (7, (6, 8))):
        whole, last = heed.titans(*given, initial_state=state, mini_batch=mini_batch, return_state=True)
        now, parts = state, []
        for begin, end in zip((0, *cuts), (*cuts, 70)):
            part = [x if x.ndim == 2 else x[:, begin:end] for x in given]
            o, now = heed.titans(*part, initial_state=now, positions=[begin] * 2, mini_batch=mini_batch,
                                 return_state=True)
            parts.append(o)
        if cuts == (16, 48):
            np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
            np.testing.assert_array_equal(now, last)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-9)
        np.testing.assert_allclose(now, last, rtol=0, atol=1e-9)


def test_packed_sequences_and_padding():
    given = inputs(B=1)
    states = random_state(3)
    o, last = heed.titans(*given, cu_seqlens=[0, 40, 40, 70], initial_state=states, positions=[3, 4, 16],
                          return_state=True)
    for i, (begin, end, position) in enumerate([(0, 40, 3), (40, 40, 4), (40, 70, 16)]):
        cut = [x if x.ndim == 2 else x[:, begin:end] for x in given]
        part, state = heed.titans(*cut, initial_state=states[i: i + 1], positions=[position], return_state=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(last[i: i + 1], state)
    given = inputs()
    o = heed.titans(*given, starts=[5, 0], lengths=[60, 30])
    cut = [x if x.ndim == 2 else x[:1, 5:60] for x in given]
    np.testing.assert_array_equal(o[:1, 5:60], heed.titans(*cut))
    assert not o[0, :5].any() and not o[0, 60:].any() and not o[1, 30:].any()


@pytest.mark.parametrize("options", [{}, {"scale": -0.7}, {"mini_batch": 1}, {"mini_batch": 20}],
                         ids=str)
@pytest.mark.parametrize("position", [0, 2])
def test_gradients_agree_with_finite_differences(options, position):
    rng = np.random.default_rng(1)
    options = {"mini_batch": 4, "eps": 0.02} | options
    given = inputs(B=2, T=9, H=1, K=3)
    do, dstate = rng.standard_normal((2, 9, 1, 3)), rng.standard_normal((2, 1, 3, 3, 3))
    initial = random_state(H=1, K=3)

    def loss():
        o, state = one_by_one(*given, initial, position=position, **options)
        return (o * do).sum() + (state * dstate).sum()

    gradients = heed.titans_backward(do, *given, initial_state=initial, dstate=dstate, positions=[position] * 2,
                                     **options)
    assert type(gradients) is heed.TitansGradients
    for x, gradient in zip([*given, initial], gradients):
        flat = x.reshape(-1)
        for at in range(x.size):
            sides = []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            expected = (sides[0] - sides[1]) / 2e-6
            assert gradient.reshape(-1)[at] == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_errors():
    given = q, k, v, weight, bias, theta, alpha, eta = inputs(T=9)
    state = random_state()
    for call, message in [
        (lambda: heed.titans(q[0], *given[1:]), r"q has shape \[9,2,6\], expected \[B, T, H, K\]"),
        (lambda: heed.titans(q, k[:, 1:], *given[2:]), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.titans(q, k, v[..., :5], *given[3:]), r"v has shape \[2,9,2,5\], expected \[2,9,2,6\]"),
        (lambda: heed.titans(q, k, v, weight[:1], *given[4:]), r"weight has shape \[1,6\], expected \[2,6\]"),
        (lambda: heed.titans(*given[:5], theta[..., None], alpha, eta), "theta has shape"),
        (lambda: heed.titans(*given[:6], alpha[:, 1:], eta), r"alpha has shape \[2,8,2\], expected \[2,9,2\]"),
        (lambda: heed.titans(*given[:7], eta[..., :1]), "eta has shape"),
        (lambda: heed.titans(*given, mini_batch=0), "mini_batch is 0, expected"),
        (lambda: heed.titans(*given, eps=-1), "eps is -1, expected a finite number >= 0"),
        (lambda: heed.titans(*given, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.titans(*given, initial_state=state[:, :, 0]), "initial_state has shape"),
        (lambda: heed.titans(*given, positions=[0, 1]), r"positions\[1\] is 1, expected 0 without initial_state"),
        (lambda: heed.titans(*given, initial_state=state, positions=[0]), r"positions has shape \[1\]"),
        (lambda: heed.titans_backward(v[:1], *given), "do has shape"),
        (lambda: heed.titans_step(*(x[:, 0] for x in given[:3]), weight, bias, *(x[:, 0] for x in given[5:]),
                                  state[:1]), "state has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def plain(self, q, k, v, weight, bias, theta, alpha, eta, state, mini_batch=16, eps=1e-6):
        """o and the state, whose gradients in the mini-batch are autograd's of the loss."""
        torch = self.torch
        K = q.shape[-1]
        M, S, A, o = state[:, :, 0], state[:, :, 1], None, []

        def norm(x):
            return torch.nn.functional.layer_norm(x, (K,), eps=eps)

        for t in range(q.shape[1]):
            if t % mini_batch == 0:
                A = M
            own = 1 * A  # of which the loss of this token is a function
            z = (k[:, t, :, None] @ own)[..., 0, :]
            loss = (k[:, t] + weight * norm(z) + bias - v[:, t]).square().sum()
            (gradient,) = torch.autograd.grad(loss, own, create_graph=True)
            S = eta[:, t, :, None, None] * S - theta[:, t, :, None, None] * gradient
            M = (1 - alpha[:, t, :, None, None]) * M + S
            y = (q[:, t, :, None] @ M)[..., 0, :]
            o.append(y + weight * norm(y) + bias)
        if q.shape[1] % mini_batch == 0:
            A = torch.zeros_like(M)
        return torch.stack(o, 1), torch.stack([M, S, A], 2)

    @pytest.mark.parametrize("options", [{}, {"mini_batch": 40}, {"mini_batch": 3}], ids=str)
    def test_values_and_gradients_are_those_of_autograd(self, options):
        import heed.torch

        torch = self.torch
        options = {"eps": 0.01} | options
        results = []
        for ours in (True, False):
            given = [torch.from_numpy(x).requires_grad_() for x in (*inputs(T=90, K=20), random_state(K=20))]
            if ours:
                o, S = heed.torch.titans(*given[:8], initial_state=given[8], return_state=True, **options)
            else:
                o, S = self.plain(*given, **options)
            ((o * o).sum() + (S.sin()).sum()).backward()
            results.append([o.detach(), S.detach(), *(x.grad for x in given)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8 * float(theirs.abs().max()))

    def test_gradcheck(self):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in (*inputs(B=1, T=5, H=2, K=3), random_state(1, K=3))]

        def function(*x):
            return heed.torch.titans(*x[:8], initial_state=x[8], mini_batch=3, eps=0.01, return_state=True)

        assert torch.autograd.gradcheck(function, given)
        torch.library.opcheck(torch.ops.heed.titans.default, (*given[:8], 3, 0.1, 1.0) + (None,) * 6)

    @pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"mini_batch": 2}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in (*inputs(B=1, T=5, H=1, K=3), random_state(1, 1, 3))]

        def function(*x):
            return heed.torch.titans(*x[:8], initial_state=x[8], eps=0.1, return_state=True,
                                     **{"mini_batch": 3} | options)

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_the_composition_is_the_operator(self):
        import heed.torch
        from heed.torch import _titans

        torch = self.torch
        for dtype, atol in ((torch.float64, 1e-9), (torch.bfloat16, 0.05)):
            given = [torch.from_numpy(x).to(dtype) for x in inputs(T=40)]
            state = torch.from_numpy(random_state()).to(torch.float64 if dtype == torch.float64 else torch.float32)
            options = {"mini_batch": 7, "eps": 0.01, "scale": 0.5}
            o, S = heed.torch.titans(*given, initial_state=state, return_state=True, **options)
            same, S_same = _titans._composition(*given, state, **options)
            assert same.dtype == o.dtype
            torch.testing.assert_close(o, same, rtol=0.02 if dtype == torch.bfloat16 else 1e-9, atol=atol)
            torch.testing.assert_close(S, S_same, rtol=1e-2, atol=atol)

    def test_derivatives_that_do_not_exist_are_refused_by_name(self):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=8)]
        o = heed.torch.titans(*given, cu_seqlens=[0, 3, 8])
        (dq,) = torch.autograd.grad(o.sum(), given[0], create_graph=True)
        with pytest.raises(heed.Unsupported, match="a second or forward derivative was asked for with cu_seqlens"):
            dq.sum().backward()
        for name, wrong in (("k", 1), ("v", 2), ("weight", 3), ("theta", 5), ("eta", 7)):
            bad = [x.detach()[..., :1] if i == wrong else x.detach() for i, x in enumerate(given)]
            with pytest.raises(heed.InvalidArgument, match=f"titans: {name} has shape"):
                torch.func.jvp(lambda q: heed.torch.titans(q, *bad[1:]), (bad[0],), (bad[0],))

    def test_packed_and_stepped(self):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x) for x in inputs(B=1, T=30)]
        o = heed.torch.titans(*given, cu_seqlens=torch.tensor([0, 8, 30]))
        state = torch.zeros(1, 2, 3, 6, 6, dtype=torch.float64)
        for t in range(8, 30):
            token = (*(x[:, t] for x in given[:3]), *given[3:5], *(x[:, t] for x in given[5:]))
            step = heed.torch.titans_step(*token, state, positions=[t - 8])
            torch.testing.assert_close(step, o[:, t], rtol=1e-7, atol=1e-7)

    def test_flash_linear_attention_takes_another_step(self):
        from heed.compat import fla

        with pytest.raises(heed.Unsupported, match="chunk_titans_linear: .* is not the gradient .* heed.torch.titans"):
            fla.chunk_titans_linear(None)
