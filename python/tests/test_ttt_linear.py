# heed.ttt_linear: against a plain recurrence, its states and steps, gradients, PyTorch, flash-linear-attention's calls.
import numpy as np
import pytest

import heed


def inputs(B=2, T=70, H=2, K=6, dtype=np.float64, seed=0):
    """q, k, v, weight, bias, eta, lr."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, B, T, H, K))
    rest = (0.5 + rng.random((H, K)), 0.3 * rng.standard_normal((H, K)), 0.05 * rng.random((B, T, H)),
            0.5 + rng.random((B, T, H)))
    return [x.astype(dtype) for x in (q, k / K**0.5, v, *rest)]


def random_state(N=2, H=2, K=6, seed=1):
    return np.random.default_rng(seed).standard_normal((N, H, 2, K + 1, K))


def normalised(z, eps):
    return (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + eps)


def one_by_one(q, k, v, weight, bias, eta, lr=None, initial_state=None, position=0, mini_batch=16, eps=1e-6, scale=1.0,
               residual="query"):
    """o and the state, token by token: each takes the gradient of its loss by z with the weights of the mini-batch."""
    q, k, v, weight, bias, eta = (x.astype(np.float64) for x in (q, k, v, weight, bias, eta))
    B, T, H, K = q.shape
    state = np.zeros((B, H, 2, K + 1, K)) if initial_state is None else initial_state.astype(np.float64).copy()
    W, G = state[:, :, 0], state[:, :, 1]
    if position % mini_batch == 0:
        G = np.zeros_like(G)
    o = np.zeros(q.shape)
    for t in range(T):
        key, query = (np.concatenate([x, np.ones((B, H, 1))], -1) for x in (k[:, t], scale * q[:, t]))
        z = np.einsum("bhk,bhkv->bhv", key, W)
        r = 1 / np.sqrt(z.var(-1, keepdims=True) + eps)
        x = (z - z.mean(-1, keepdims=True)) * r
        e = weight * x + bias - (v[:, t] - k[:, t])
        J = r[..., None] * (np.eye(K) - 1 / K - x[..., None] * x[..., None, :] / K)  # of the norm
        g = np.einsum("bhvw,bhv->bhw", J, weight * e)
        G = G + (1 if lr is None else lr[:, t, :, None, None]) * key[..., None] * g[..., None, :]
        now = W - eta[:, t, :, None, None] * G
        y = np.einsum("bhk,bhkv->bhv", query, now)
        o[:, t] = (query[..., :-1] if residual == "query" else y) + weight * normalised(y, eps) + bias
        if (position + t + 1) % mini_batch == 0:
            W, G = now, np.zeros_like(G)
    return o, np.stack([W, G], 2)


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-10), (np.float32, 1e-3), (np.float16, 2e-2)])
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 50])
def test_it_is_the_recurrence(T, dtype, atol):
    *given, lr = inputs(T=T, dtype=dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    state = random_state().astype(wide)
    for options in ({"eps": 0.1}, {"lr": lr, "initial_state": state}, {"initial_state": state, "residual": "output"},
                    {"initial_state": state, "mini_batch": 7, "scale": -0.5, "lr": lr},
                    {"initial_state": state, "mini_batch": 30, "eps": 0.01}):
        expected, last = one_by_one(*given, **options)
        o, after = heed.ttt_linear(*given, **options, return_state=True)
        assert o.dtype == dtype and after.dtype == wide
        np.testing.assert_allclose(o, expected, rtol=1e-2 if dtype == np.float16 else 1e-4, atol=atol)
        np.testing.assert_allclose(after, last, rtol=1e-3, atol=atol)


def test_the_gradient_is_that_of_the_loss():
    """G of one token is the derivative of half the squared error by W and b."""
    q, k, v, weight, bias, eta, _ = inputs(B=1, T=1, H=1, K=5)
    W = random_state(1, 1, 5)[:, :, :1]
    state = np.concatenate([W, np.zeros_like(W)], 2)
    _, after = heed.ttt_linear(q, k, v, weight, bias, eta, initial_state=state, eps=0.01, return_state=True)
    key = np.append(k[0, 0, 0], 1)

    def loss(W):
        return 0.5 * np.square(k[0, 0, 0] + weight[0] * normalised(key @ W, 0.01) + bias[0] - v[0, 0, 0]).sum()

    for i in range(6):
        for j in range(5):
            step = np.zeros((6, 5))
            step[i, j] = 1e-6
            difference = (loss(W[0, 0, 0] + step) - loss(W[0, 0, 0] - step)) / 2e-6
            assert after[0, 0, 1, i, j] == pytest.approx(difference, abs=1e-7)


@pytest.mark.parametrize("mini_batch", [1, 5, 16, 40])
def test_steps_are_the_sequence(mini_batch):
    *given, lr = inputs(T=40)
    options = {"mini_batch": mini_batch, "residual": "output", "scale": 0.7}
    state = random_state()
    state[:, :, 1] = 0
    o, last = heed.ttt_linear(*given, lr=lr, initial_state=state, return_state=True, **options)
    for t in range(40):
        token = [x[:, t] for x in given[:3]] + given[3:5] + [given[5][:, t]]
        o_t = heed.ttt_linear_step(*token, state, lr=lr[:, t], positions=[t, t], **options)
        np.testing.assert_allclose(o_t, o[:, t], rtol=0, atol=1e-9)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-9)


def test_any_split_is_the_whole():
    *given, lr = inputs()
    state = random_state()
    for mini_batch, cuts in ((16, (16, 48)), (16, (3, 37)), (40, (50, 60)), (7, (6, 8))):
        whole, last = heed.ttt_linear(*given, lr=lr, initial_state=state, mini_batch=mini_batch, return_state=True)
        now, parts = state, []
        for begin, end in zip((0, *cuts), (*cuts, 70)):
            q, k, v, eta, own_lr = (x[:, begin:end] for x in (*given[:3], given[5], lr))
            o, now = heed.ttt_linear(q, k, v, *given[3:5], eta, lr=own_lr, initial_state=now, positions=[begin] * 2,
                                     mini_batch=mini_batch, return_state=True)
            parts.append(o)
        if cuts == (16, 48):
            np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
            np.testing.assert_array_equal(now, last)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-9)
        np.testing.assert_allclose(now, last, rtol=0, atol=1e-9)


def test_packed_sequences_and_padding():
    q, k, v, weight, bias, eta, lr = inputs(B=1)
    states = random_state(3)
    o, last = heed.ttt_linear(q, k, v, weight, bias, eta, lr=lr, cu_seqlens=[0, 40, 40, 70], initial_state=states,
                              positions=[3, 4, 16], return_state=True)
    for i, (begin, end, position) in enumerate([(0, 40, 3), (40, 40, 4), (40, 70, 16)]):
        cut = [x[:, begin:end] for x in (q, k, v, eta, lr)]
        part, state = heed.ttt_linear(*cut[:3], weight, bias, cut[3], lr=cut[4], initial_state=states[i: i + 1],
                                      positions=[position], return_state=True)
        np.testing.assert_array_equal(o[:, begin:end], part)
        np.testing.assert_array_equal(last[i: i + 1], state)
    q, k, v, weight, bias, eta, lr = inputs()
    o = heed.ttt_linear(q, k, v, weight, bias, eta, lr=lr, starts=[5, 0], lengths=[60, 30])
    cut = [x[:1, 5:60] for x in (q, k, v, eta, lr)]
    np.testing.assert_array_equal(o[:1, 5:60], heed.ttt_linear(*cut[:3], weight, bias, cut[3], lr=cut[4]))
    assert not o[0, :5].any() and not o[0, 60:].any() and not o[1, 30:].any()


@pytest.mark.parametrize("options", [{}, {"residual": "output", "scale": -0.7}, {"mini_batch": 1}, {"mini_batch": 20}],
                         ids=str)
@pytest.mark.parametrize("position", [0, 2])
def test_gradients_agree_with_finite_differences(options, position):
    rng = np.random.default_rng(1)
    options = {"mini_batch": 4, "eps": 0.02} | options
    given = inputs(B=2, T=9, H=1, K=3)
    do, dstate = rng.standard_normal((2, 9, 1, 3)), rng.standard_normal((2, 1, 2, 4, 3))
    initial = random_state(H=1, K=3)

    def loss():
        o, state = one_by_one(*given, initial, position=position, **options)
        return (o * do).sum() + (state * dstate).sum()

    gradients = heed.ttt_linear_backward(do, *given[:6], lr=given[6], initial_state=initial, dstate=dstate,
                                         positions=[position] * 2, **options)
    assert type(gradients) is heed.TttLinearGradients
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
    q, k, v, weight, bias, eta, lr = inputs(T=9)
    state = random_state()
    given = (q, k, v, weight, bias, eta)
    for call, message in [
        (lambda: heed.ttt_linear(q[0], *given[1:]), r"q has shape \[9,2,6\], expected \[B, T, H, K\]"),
        (lambda: heed.ttt_linear(q, k[:, 1:], *given[2:]), r"k has shape \[2,8,2,6\], expected \[2,9,2,6\]"),
        (lambda: heed.ttt_linear(q, k, v[..., :5], *given[3:]), r"v has shape \[2,9,2,5\], expected \[2,9,2,6\]"),
        (lambda: heed.ttt_linear(q, k, v, weight[:1], bias, eta), r"weight has shape \[1,6\], expected \[2,6\]"),
        (lambda: heed.ttt_linear(q, k, v, weight, bias, eta[..., None]), "eta has shape"),
        (lambda: heed.ttt_linear(*given, lr=lr[..., :1]), "lr has shape"),
        (lambda: heed.ttt_linear(*given, mini_batch=0), "mini_batch is 0, expected"),
        (lambda: heed.ttt_linear(*given, eps=-1), "eps is -1, expected a finite number >= 0"),
        (lambda: heed.ttt_linear(*given, residual="q"), "residual is 'q', expected"),
        (lambda: heed.ttt_linear(*given, lengths=[10, 1]), r"lengths\[0\] is 10"),
        (lambda: heed.ttt_linear(*given, initial_state=state[:, :, 0]), "initial_state has shape"),
        (lambda: heed.ttt_linear(*given, positions=[0, 1]), r"positions\[1\] is 1, expected 0 without initial_state"),
        (lambda: heed.ttt_linear(*given, initial_state=state, positions=[0]), r"positions has shape \[1\]"),
        (lambda: heed.ttt_linear_backward(v[:1], *given), "do has shape"),
        (lambda: heed.ttt_linear_step(*(x[:, 0] for x in given[:3]), weight, bias, eta[:, 0], state[:1]),
         "state has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()


class TestTorch:
    torch = pytest.importorskip("torch")

    def plain(self, q, k, v, weight, bias, eta, lr, state, mini_batch=16, eps=1e-6, residual="query"):
        """o and the state, whose gradients in the mini-batch are autograd's of the loss."""
        torch = self.torch
        B, T, H, K = q.shape
        W, G, o = state[:, :, 0], torch.zeros_like(state[:, :, 0]), []

        def norm(x):
            return torch.nn.functional.layer_norm(x, (K,), eps=eps)

        for t in range(T):
            z = (k[:, t, :, None] @ W[..., :-1, :])[..., 0, :] + W[..., -1, :]
            loss = 0.5 * (k[:, t] + weight * norm(z) + bias - v[:, t]).square().sum()
            (g,) = torch.autograd.grad(loss, z, create_graph=True)
            key = torch.cat([k[:, t], torch.ones_like(k[:, t, :, :1])], -1)
            G = G + lr[:, t, :, None, None] * key[..., None] * g[..., None, :]
            now = W - eta[:, t, :, None, None] * G
            y = (q[:, t, :, None] @ now[..., :-1, :])[..., 0, :] + now[..., -1, :]
            o.append((q[:, t] if residual == "query" else y) + weight * norm(y) + bias)
            if (t + 1) % mini_batch == 0:
                W, G = now, torch.zeros_like(G)
        return torch.stack(o, 1), torch.stack([W, G], 2)

    @pytest.mark.parametrize("options", [{}, {"residual": "output"}, {"mini_batch": 40}, {"mini_batch": 3}], ids=str)
    def test_values_and_gradients_are_those_of_autograd(self, options):
        import heed.torch

        torch = self.torch
        options = {"eps": 0.01} | options
        results = []
        for ours in (True, False):
            given = [torch.from_numpy(x).requires_grad_() for x in (*inputs(T=90, K=20), random_state(K=20))]
            if ours:
                o, S = heed.torch.ttt_linear(*given[:6], lr=given[6], initial_state=given[7], return_state=True,
                                             **options)
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
            return heed.torch.ttt_linear(*x[:6], lr=x[6], initial_state=x[7], mini_batch=3, eps=0.01,
                                         return_state=True)

        assert torch.autograd.gradcheck(function, given)
        none = (None, 3, 0.1, 1.0, "query") + (None,) * 6
        torch.library.opcheck(torch.ops.heed.ttt_linear.default, (*given[:6], *none))

    @pytest.mark.parametrize("options", [{}, {"residual": "output", "scale": 0.7}, {"mini_batch": 2}], ids=str)
    def test_second_derivatives_and_forward_mode(self, options):
        import heed.torch

        torch = self.torch
        given = [torch.from_numpy(x).requires_grad_() for x in (*inputs(B=1, T=5, H=1, K=3), random_state(1, 1, 3))]

        def function(*x):
            return heed.torch.ttt_linear(*x[:6], lr=x[6], initial_state=x[7], eps=0.1, return_state=True,
                                         **{"mini_batch": 3} | options)

        assert torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    def test_the_composition_is_the_operator(self):
        import heed.torch
        from heed.torch import _ttt_linear

        torch = self.torch
        for dtype, atol in ((torch.float64, 1e-9), (torch.bfloat16, 0.05)):
            given = [torch.from_numpy(x).to(dtype) for x in inputs(T=40)]
            state = torch.from_numpy(random_state()).to(torch.float64 if dtype == torch.float64 else torch.float32)
            options = {"mini_batch": 7, "eps": 0.01, "scale": 0.5, "residual": "output"}
            o, S = heed.torch.ttt_linear(*given[:6], lr=given[6], initial_state=state, return_state=True, **options)
            same, S_same = _ttt_linear._composition(*given, state, **options)
            assert same.dtype == o.dtype
            torch.testing.assert_close(o, same, rtol=0.02 if dtype == torch.bfloat16 else 1e-9, atol=atol)
            torch.testing.assert_close(S, S_same, rtol=1e-2, atol=atol)

    def test_derivatives_that_do_not_exist_are_refused_by_name(self):
        import heed.torch

        torch = self.torch
        *given, _ = (torch.from_numpy(x).requires_grad_() for x in inputs(B=1, T=8))
        o = heed.torch.ttt_linear(*given, cu_seqlens=[0, 3, 8])
        (dq,) = torch.autograd.grad(o.sum(), given[0], create_graph=True)
        with pytest.raises(heed.Unsupported, match="a second or forward derivative was asked for with cu_seqlens"):
            dq.sum().backward()
        for name, wrong in (("k", 1), ("v", 2), ("weight", 3), ("eta", 5)):
            bad = [x.detach()[..., :1] if i == wrong else x.detach() for i, x in enumerate(given)]
            with pytest.raises(heed.InvalidArgument, match=f"ttt_linear: {name} has shape"):
                torch.func.jvp(lambda q: heed.torch.ttt_linear(q, *bad[1:]), (bad[0],), (bad[0],))

    def test_packed_and_stepped(self):
        import heed.torch

        torch = self.torch
        *given, _ = (torch.from_numpy(x) for x in inputs(B=1, T=30))
        o = heed.torch.ttt_linear(*given, cu_seqlens=torch.tensor([0, 8, 30]))
        state = torch.zeros(1, 2, 2, 7, 6, dtype=torch.float64)
        for t in range(8, 30):
            token = (*(x[:, t] for x in given[:3]), *given[3:5], given[5][:, t])
            step = heed.torch.ttt_linear_step(*token, state, positions=[t - 8])
            torch.testing.assert_close(step, o[:, t], rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("name", ["chunk_ttt_linear", "fused_chunk_ttt_linear"])
    def test_as_fla_calls_it(self, name):
        from heed.compat import fla

        torch, function = self.torch, getattr(fla, name)
        arrays = inputs(B=2, T=37)[:6]
        *given, eta = (torch.from_numpy(x).float() for x in arrays)
        state = torch.from_numpy(random_state()).float()
        W, b = state[:, :, 0, :-1], state[:, :, 0, -1:]
        o, last_W, last_b = function(*given, eta[..., None], initial_state=W, initial_state_bias=b, eps=0.01,
                                     output_final_state=True)
        expected, last = one_by_one(*arrays, initial_state=state.numpy(), scale=6**-0.5, eps=0.01, residual="output")
        last = last[:, :, 0] - arrays[5][:, -1, :, None, None] * last[:, :, 1]  # the model after the last token
        np.testing.assert_allclose(o.numpy(), expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(torch.cat([last_W, last_b], 2).numpy(), last, rtol=1e-3, atol=1e-3)
        packed = function(*(x.flatten(0, 1)[None] for x in given[:3]), *given[3:], eta.flatten(0, 1)[None, ..., None],
                          initial_state=W, initial_state_bias=b, eps=0.01, output_final_state=True,
                          cu_seqlens=torch.tensor([0, 37, 74]))
        for ours, theirs in zip((o.flatten(0, 1)[None], last_W, last_b), packed):
            torch.testing.assert_close(ours, theirs)
        assert function(*given, eta[..., None])[1:] == (None, None)
        constant = torch.full_like(eta[..., None], 0.02)
        torch.testing.assert_close(function(*given, 0.02)[0], function(*given, constant)[0])
        with pytest.raises(heed.InvalidArgument, match=f"{name}: w has shape"):
            function(*given[:3], given[3][:, :1], given[4], eta[..., None])
        with pytest.raises(heed.InvalidArgument, match=f"{name}: eta has shape"):
            function(*given, eta)
        with pytest.raises(heed.InvalidArgument, match=f"{name}: initial_state has shape"):
            function(*given, eta[..., None], initial_state=W[..., :1])
        with pytest.raises(heed.Unsupported, match="head_first"):
            function(*given, eta[..., None], head_first=True)
