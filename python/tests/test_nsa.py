# heed.nsa: against plain NumPy, with attention, from files and in PyTorch.
import json
import subprocess

import numpy as np
import pytest

import heed
from cli_program import HEED, document, load, needs_program, save

RNG = np.random.default_rng(0)


def inputs(B=2, Tq=40, Tk=40, H=4, Hkv=2, D=6, Dv=5, dtype=np.float64):
    """q, k, v, gates."""
    return [RNG.standard_normal(shape).astype(dtype)
            for shape in ((B, Tq, H, D), (B, Tk, Hkv, D), (B, Tk, Hkv, Dv), (B, Tq, H, 3))]


def means(x, length, stride):
    windows = max(0, (x.shape[1] - length) // stride + 1)
    return np.stack([x[:, w * stride:w * stride + length].mean(1) for w in range(windows)], 1) if windows else x[:, :0]


def softmax_rows(q, k, v, keep, scale):
    s = np.where(keep, np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", p, v), p


def importances(p, block, length, stride, blocks):
    """The double sum of the paper, where stride divides both."""
    B, H, Tq, windows = p.shape
    found = np.zeros((B, H, Tq, blocks))
    for j in range(blocks):
        for m in range(block // stride):
            for n in range(length // stride):
                w = block // stride * j + m - n
                if 0 <= w < windows:
                    found[..., j] += p[..., w]
    return found


def naive(q, k, v, gates, *, block=64, stride=None, count=16, window=512, compressed=None, length=None, scale=None):
    """o from the definition."""
    (B, Tq, H, D), Tk, Hkv = q.shape, k.shape[1], k.shape[2]
    length, stride, scale = length or block, stride or block, D**-0.5 if scale is None else scale
    k_cmp, v_cmp = compressed or (means(k, length, stride), means(v, length, stride))
    wide = lambda x: np.repeat(x, H // Hkv, axis=2)  # noqa: E731
    p, j = np.arange(Tk - Tq, Tk)[:, None], np.arange(Tk)
    complete = np.arange(k_cmp.shape[1]) * stride + length - 1 <= p
    o_cmp, weights = softmax_rows(q, wide(k_cmp), wide(v_cmp), complete, scale)
    blocks = -(-Tk // block)
    importance = importances(weights, block, length, stride, blocks).reshape(B, Hkv, H // Hkv, Tq, blocks).sum(2)
    chosen = np.zeros((B, Hkv, Tq, blocks), bool)
    for b, h, i in np.ndindex(B, Hkv, Tq):
        own = (Tk - Tq + i) // block
        kept = {0, own, max(own - 1, 0)}
        others = sorted(set(range(own)) - kept, key=lambda x: (-importance[b, h, i, x], x))
        chosen[b, h, i, list(kept) + others[:max(count - 3, 0)]] = True
    keep = np.repeat(chosen, H // Hkv, axis=1)[..., j // block] & (j <= p)
    o_slc, _ = softmax_rows(q, wide(k), wide(v), keep, scale)
    o_win, _ = softmax_rows(q, wide(k), wide(v), (j <= p) & (j > p - window), scale)
    return gates[..., :1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:] * o_win


OPTIONS = [
    {"block": 4, "count": 4, "window": 6},
    {"block": 4, "count": 3, "window": 1},
    {"block": 4, "count": 1, "window": 100},  # the three that are never left out
    {"block": 8, "stride": 2, "length": 4, "count": 4, "window": 5},
    {"block": 4, "stride": 2, "length": 8, "count": 5, "window": 3, "scale": 0.7},
    {"block": 64},
]


@pytest.mark.parametrize("Tq", [40, 7, 1])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_definition(options, given, Tq):
    q, k, v, gates = inputs(Tq=Tq)
    if given:
        stride = options.get("stride") or options["block"]
        windows = max(0, (40 - (options.get("length") or options["block"])) // stride + 1)
        options = {**options, "compressed": [RNG.standard_normal((2, windows, 2, channels)) for channels in (6, 5)]}
    expected = naive(q, k, v, gates, **options)
    np.testing.assert_allclose(heed.nsa(q, k, v, gates, **options), expected, rtol=0, atol=1e-13)


def test_the_importance_of_windows_that_overlap_is_the_papers():
    """length 32, stride 16, block 64: weights 1, 2, 2, 2, 1 of five windows."""
    p = np.arange(1.0, 12)[None, None, None]
    assert importances(p, 64, 32, 16, 3)[0, 0, 0].tolist() == [
        1 * 2 + 2 * 2 + 3 * 2 + 4, 4 + 5 * 2 + 6 * 2 + 7 * 2 + 8, 8 + 9 * 2 + 10 * 2 + 11 * 2]
    q, k, v, gates = inputs(B=1, Tq=512, Tk=512)
    options = {"length": 32, "stride": 16, "count": 5, "window": 64}
    np.testing.assert_allclose(heed.nsa(q, k, v, gates, **options), naive(q, k, v, gates, **options), rtol=0,
                               atol=1e-13)


@pytest.mark.parametrize("branch", range(3))
def test_a_gate_alone_is_attention(branch):
    q, k, v, _ = inputs()
    gates = np.zeros((2, 40, 4, 3))
    gates[..., branch] = 1
    o = heed.nsa(q, k, v, gates, block=4, count=10, window=7)
    complete = np.arange(10) * 4 + 3 <= np.arange(40)[:, None]
    expected = [
        lambda: heed.attention(q, means(k, 4, 4), means(v, 4, 4), mask=complete),
        lambda: heed.attention(q, k, v, causal=True),  # all blocks are chosen
        lambda: heed.attention(q, k, v, causal=True, window=(6, 0)),
    ][branch]()
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-14)


def test_equal_importances_go_to_the_lower_block():
    q, k, v, _ = inputs(B=1, D=4)
    gates = np.zeros((1, 40, 4, 3))
    gates[..., 1] = 1
    o = heed.nsa(0 * q, k, v, gates, block=4, count=5)  # all keys alike
    keep = np.isin(np.arange(40) // 4, [0, 1, 2, 8, 9]) & (np.arange(40) <= 39)
    np.testing.assert_allclose(o[0, 39], np.repeat(v[0, keep].mean(0), 2, axis=0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("given", [False, True])
def test_gradients_agree_with_finite_differences(given):
    q, k, v, gates = inputs(B=1, Tq=24, Tk=30, H=2, Hkv=1, D=3, Dv=2)
    options = {"block": 3, "stride": 2, "length": 4, "count": 5, "window": 4}
    compressed = [RNG.standard_normal((1, 14, 1, 3)), RNG.standard_normal((1, 14, 1, 2))] if given else None
    do = RNG.standard_normal((1, 24, 2, 2))
    g = heed.nsa_backward(do, q, k, v, gates, compressed=compressed, **options)
    assert type(g) is heed.NSAGradients and g._fields == ("dq", "dk", "dv", "dgates", "dcompressed")
    assert (g.dcompressed is None) == (compressed is None)
    for x, gradient in zip([q, k, v, gates, *(compressed or ())], [*g[:4], *(g.dcompressed or ())], strict=True):
        for at in RNG.choice(x.size, 8, replace=False):
            flat, sides = x.reshape(-1), []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append((heed.nsa(q, k, v, gates, compressed=compressed, **options) * do).sum())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=1e-7)


def test_explain():
    shape = (1, 8192, 4, 64)
    report = heed.explain("nsa", q=shape, k=(1, 8192, 1, 64), v=(1, 8192, 1, 64), gates=(1, 8192, 4, 3))
    assert report["kernel"].startswith("nsa on softmax_") and report["visited_pairs"] < 4 * 8192 * 2100
    more = heed.explain("nsa", q=shape, k=(1, 8192, 1, 64), v=(1, 8192, 1, 64), gates=(1, 8192, 4, 3), count=32)
    assert more["flops"] > report["flops"]


def test_errors():
    q, k, v, gates = inputs()
    c = RNG.standard_normal((2, 10, 2, 6))
    for call, message in [
        (lambda: heed.nsa(q, k, v, gates[..., :2]), r"nsa: gates has shape \[2,40,4,2\], expected \[2,40,4,3\]"),
        (lambda: heed.nsa(q, k, v, gates.astype(np.float32)), "nsa: gates has dtype f32, expected f64"),
        (lambda: heed.nsa(q[0], k, v, gates), r"nsa: q has shape \[40,4,6\], expected \[B, Tq, Hq, D\]"),
        (lambda: heed.nsa(q, k[:, :39], v[:, :39], gates), "nsa: q has 40 tokens, expected at most the 39 of k"),
        (lambda: heed.nsa(q, k, v, gates, block=0), "nsa: block is 0, expected an int"),
        (lambda: heed.nsa(q, k, v, gates, count=0), "nsa: count is 0, expected an int"),
        (lambda: heed.nsa(q, k, v, gates, window=0), "nsa: window is 0, expected an int"),
        (lambda: heed.nsa(q, k, v, gates, stride=0), "nsa: stride is 0, expected an int"),
        (lambda: heed.nsa(q, k, v, gates, length=-3), "nsa: length is -3, expected an int"),
        (lambda: heed.nsa(q, k, v, gates, scale=float("nan")), "nsa: scale is nan"),
        (lambda: heed.nsa(q, k, v, gates, compressed=3),
         r"nsa: compressed is 3, expected a pair \(k_cmp, v_cmp\), or None"),
        (lambda: heed.nsa(q, k, v, gates, block=4, compressed=(c[:, :9], c[:, :9])),
         r"nsa: compressed\[0\] has shape \[2,9,2,6\], expected \[2,N,2,6\] with N = 10 or more windows"),
        (lambda: heed.nsa(q, k, v, gates, block=4, compressed=(c, c)),
         r"nsa: compressed\[1\] has shape \[2,10,2,6\], expected \[2,N,2,5\]"),
        (lambda: heed.nsa(q, k, v, gates, out=np.zeros((2, 40, 4, 4))), r"nsa: out has shape \[2,40,4,4\]"),
        (lambda: heed.nsa_backward(q, q, k, v, gates),
         r"nsa_backward: do has shape \[2,40,4,6\], expected \[2,40,4,5\]"),
    ]:
        with pytest.raises(heed.InvalidArgument, match=message):
            call()
    with pytest.raises(TypeError, match="gates"):
        heed.nsa(q, k, v)


@needs_program
def test_from_a_file(tmp_path):
    given = inputs(B=1, Tq=1300, Tk=1300, dtype=np.float32)
    file, out = tmp_path / "x.safetensors", tmp_path / "o.safetensors"
    save(file, {name: ("F32", x) for name, x in zip(("q", "k", "v", "gates"), given, strict=True)})
    assert document("run", "nsa", file, "-o", out)["output"]["shape"] == [1, 1300, 4, 5]
    np.testing.assert_array_equal(load(out)[0]["o"], heed.nsa(*given))
    (row,) = document("compare", file, "-m", "nsa", "--dtype", "f32")["rows"]
    assert row["max_error"] > 1e-3
    command = [HEED, "run", "nsa", file, "--heads", "0"]
    message = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "--heads is 0, expected all heads, which share k" in message
    listed = json.loads(subprocess.run([HEED, "list", "--json"], capture_output=True, check=True, text=True).stdout)
    assert [x["passes"] for x in listed if x["name"] == "nsa"] == [["forward", "backward"]]


def test_in_torch():
    torch = pytest.importorskip("torch")
    import heed.torch

    arrays = inputs(B=1, H=2, Hkv=1)
    c = [RNG.standard_normal((1, 10, 1, d)) for d in (6, 5)]
    options = {"block": 4, "count": 4, "window": 6}
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays + c]
    o = heed.torch.nsa(*leaves[:4], compressed=leaves[4:], **options)
    np.testing.assert_array_equal(o.detach().numpy(), heed.nsa(*arrays, compressed=c, **options))
    do = RNG.standard_normal(o.shape)
    o.backward(torch.from_numpy(do))
    g = heed.nsa_backward(do, *arrays, compressed=c, **options)
    for leaf, expected in zip(leaves, [*g[:4], *g.dcompressed], strict=True):
        np.testing.assert_array_equal(leaf.grad.numpy(), expected)
    small = [torch.from_numpy(x).requires_grad_() for x in inputs(B=1, Tq=9, Tk=12, H=2, Hkv=1, D=3, Dv=2)]
    assert torch.autograd.gradcheck(lambda *x: heed.torch.nsa(*x, block=2, count=4, window=3), small)
    torch.library.opcheck(torch.ops.heed.nsa.default, (*small, None, None, 2, None, 4, 3, None, None, None))
    with pytest.raises(heed.InvalidArgument, match="nsa: compressed is of type"):
        heed.torch.nsa(*small, compressed=3)
    with pytest.raises(heed.InvalidArgument, match="nsa: block is 0"):
        heed.torch.nsa(*small, block=0)


SECOND = {  # sizes and options
    "windows are blocks": (dict(B=1, Tq=5, Tk=7, H=2, Hkv=1, D=3, Dv=2), dict(block=2, count=4, window=3)),
    "windows overlap": (dict(B=2, Tq=6, Tk=6, H=2, Hkv=2, D=2, Dv=2),
                        dict(block=3, count=3, window=2, stride=2, length=3, scale=0.6)),
    "windows are apart": (dict(B=1, Tq=9, Tk=9, H=2, Hkv=1, D=2, Dv=2), dict(block=2, window=3, stride=3, length=1)),
    "no window is complete": (dict(B=1, Tq=3, Tk=3, H=2, Hkv=1, D=2, Dv=2), dict(block=4, count=3, window=2)),
    "compressed": (dict(B=1, Tq=3, Tk=9, H=4, Hkv=2, D=2, Dv=1), dict(block=2, count=3, window=4, stride=1, length=4)),
}


def with_leaves(sizes, options, compressed, dtype=None):
    """A function of tensors, and these."""
    torch = pytest.importorskip("torch")
    import heed.torch

    arrays = inputs(**sizes)
    if compressed:
        arrays += [RNG.standard_normal((sizes["B"], 8, sizes["Hkv"], sizes[d])) for d in ("D", "Dv")]
    leaves = [torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays]
    return lambda *x: heed.torch.nsa(*x[:4], **options, compressed=x[4:] or None), leaves


@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives_and_forward_mode(case):
    torch = pytest.importorskip("torch")
    function, leaves = with_leaves(*SECOND[case], case == "compressed")
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_hessians():
    torch = pytest.importorskip("torch")
    function, (q, k, v, gates) = with_leaves(dict(B=1, Tq=5, Tk=5, H=2, Hkv=1, D=2, Dv=2),
                                             dict(block=2, count=3, window=2), False)
    q, v, gates, k = (x.detach() for x in (q, v, gates, k))

    def loss(k):
        return function(q, k, v, gates).sin().sum()

    hessian = torch.func.hessian(loss)(k)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(k), hessian)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(k), hessian)
    assert hessian.abs().max() > 1e-3
    along = torch.randn_like(k)
    product = torch.func.jvp(torch.func.grad(loss), (k,), (along,))[1]
    torch.testing.assert_close(product, torch.einsum("abcdefgh,efgh->abcd", hessian, along))
    with pytest.raises(heed.Unsupported, match="nsa: a third derivative"):
        torch.func.grad(lambda k: torch.func.grad(lambda k: torch.func.grad(loss)(k).sum())(k).square().sum())(k)


def test_second_derivatives_are_those_of_a_composition():
    """The composition takes the blocks that nsa chooses, and has masks of all pairs."""
    torch = pytest.importorskip("torch")
    sizes, options = dict(B=2, Tq=40, Tk=40, H=4, Hkv=2, D=6, Dv=5), dict(block=4, count=4, window=6)
    function, leaves = with_leaves(sizes, options, False)
    blocks = torch.ops.heed.nsa(*(x.detach() for x in leaves), None, None, 4, None, 4, 6, None, None, None)[3]
    t, j = torch.arange(40)[:, None], torch.arange(40)
    chosen = (blocks[..., None] == j // 4).any(-2).movedim(2, 1).repeat_interleave(2, 1) & (j <= t)
    windowed, seen = (j <= t) & (j > t - 6), 4 * torch.arange(10) + 3 <= t

    def branch(q, k, v, mask):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / 6**0.5
        logits = torch.where(mask, logits, -1e30)
        p = torch.softmax(logits, -1) * mask
        return torch.einsum("bhij,bjhd->bihd", p, v)

    def composed(q, k, v, gates):
        means = (x.unflatten(1, (-1, 4)).mean(2) for x in (k, v))
        parts = branch(q, *means, seen), branch(q, k, v, chosen), branch(q, k, v, windowed)
        return sum(gates[..., c, None] * x for c, x in enumerate(parts))

    results = []
    for of in (function, composed):
        gradients = torch.autograd.grad(of(*leaves).sin().sum(), leaves, create_graph=True)
        results.append([*gradients, *torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, share", [("float32", 1e-5), ("bfloat16", 0.03)])
def test_a_gradient_penalty_in_other_dtypes(dtype, share):
    torch = pytest.importorskip("torch")
    sizes = dict(B=1, Tq=40, Tk=40, H=2, Hkv=1, D=16, Dv=16)
    # With all blocks the choice does not depend on rounding.
    function, narrow = with_leaves(sizes, dict(block=4, count=10, window=6), False, getattr(torch, dtype))

    def penalty(*x):
        gradients = torch.autograd.grad(function(*x).sin().sum(), x, create_graph=True)
        return sum(y.square().sum(dtype=torch.float64) for y in gradients)

    wide = [x.detach().double().requires_grad_() for x in narrow]
    found, expected = torch.autograd.grad(penalty(*narrow), narrow), torch.autograd.grad(penalty(*wide), wide)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == getattr(torch, dtype)
        assert (x.double() - y).norm() <= share * y.norm()


def test_compiled_and_under_autocast():
    torch = pytest.importorskip("torch")
    import heed.torch

    q, k, v, gates = (torch.from_numpy(x) for x in inputs(dtype=np.float32))
    options = {"block": 4, "count": 4, "window": 6}
    compiled = torch.compile(lambda *x: heed.torch.nsa(*x, **options), backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, gates)]
    others = [x.clone().requires_grad_() for x in (q, k, v, gates)]
    o, expected = compiled(*leaves), heed.torch.nsa(*others, **options)
    assert torch.equal(o, expected)
    o.square().sum().backward()
    expected.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, others, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        o = heed.torch.nsa(q, k, v, gates, **options)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, heed.torch.nsa(*(x.bfloat16() for x in (q, k, v, gates)), **options))


class TestCache:
    """heed.NSACache: token by token what heed.nsa is over the whole."""

    OPTIONS = {"block": 4, "stride": 2, "length": 6, "count": 4, "window": 7}

    def test_token_by_token_and_in_chunks(self):
        for dtype, atol in ((np.float64, 1e-14), (np.float32, 2e-6)):
            q, k, v, gates = inputs(dtype=dtype)
            whole = heed.nsa(q, k, v, gates, **self.OPTIONS)
            for sizes in ([1] * 40, [7, 1, 20, 12], [40]):
                cache, t = heed.NSACache(2, 2, 6, 5, dtype="f64" if dtype == np.float64 else "f32", page=16,
                                         **self.OPTIONS), 0
                for n in sizes:
                    rows = slice(t, t + n)
                    cache.append(k[:, rows], v[:, rows])
                    np.testing.assert_allclose(cache.attend(q[:, rows], gates[:, rows]), whole[:, rows], rtol=0,
                                               atol=atol)
                    t += n
                assert cache.lengths.tolist() == [40, 40] and cache.appended.tolist() == [sizes[-1]] * 2

    def test_windows_of_a_model(self):
        q, k, v, gates = inputs()
        c = RNG.standard_normal((2, 18, 2, 6)), RNG.standard_normal((2, 18, 2, 5))
        whole = heed.nsa(q, k, v, gates, compressed=c, **self.OPTIONS)
        cache, done = heed.NSACache(2, 2, 6, 5, dtype="f64", **self.OPTIONS), 0
        for begin, end in ((0, 11), (11, 12), (12, 40)):
            now = max(0, (end - 6) // 2 + 1)
            cache.append(k[:, begin:end], v[:, begin:end], compressed=[x[:, done:now] for x in c])
            o = cache.attend(q[:, begin:end], gates[:, begin:end])
            np.testing.assert_allclose(o, whole[:, begin:end], rtol=0, atol=1e-14)
            done = now
        message = r"^NSACache.append: compressed\[0\] has shape \[2,0,2,6\], expected \[2,n,2,6\] with n = 1"
        with pytest.raises(heed.InvalidArgument, match=message):
            cache.append(k[:, :2], v[:, :2], compressed=[x[:, :0] for x in c])
        assert cache.lengths.tolist() == [40, 40]

    def test_sequences_of_different_lengths(self):
        q, k, v, gates = inputs(B=3)
        ends, new = (40, 23, 33), (5, 0, 3)
        cache = heed.NSACache(3, 2, 6, 5, dtype="f64", **self.OPTIONS)
        cache.append(k, v, [end - n for end, n in zip(ends, new)])
        rows = [RNG.standard_normal((3, 5, *x.shape[2:])) for x in (q, k, v, gates)]
        for to, x in zip(rows, (q, k, v, gates)):
            for b, (end, n) in enumerate(zip(ends, new)):
                to[b, :n] = x[b, end - n:end]
        cache.append(rows[1], rows[2], new)
        o = cache.attend(rows[0], rows[3], scale=0.3)
        for b, (end, n) in enumerate(zip(ends, new)):
            assert not o[b, n:].any()
            alone = [x[b:b + 1, :end] for x in (q, k, v, gates)]
            np.testing.assert_allclose(o[b, :n], heed.nsa(*alone, scale=0.3, **self.OPTIONS)[0, end - n:], rtol=0,
                                       atol=1e-14)

    def test_forks_and_trimmed_caches_go_their_own_ways(self):
        q, k, v, gates = inputs(B=1)
        cache = heed.NSACache(1, 2, 6, 5, dtype="f64", **self.OPTIONS)
        cache.append(k[:, :30], v[:, :30])
        fork, nbytes = cache.fork(), cache.nbytes
        assert nbytes > 0 and type(fork) is heed.NSACache
        fork.append(-k[:, 30:], -v[:, 30:])
        cache.append(k[:, 30:39], v[:, 30:39])
        fork.trim([30])
        for each in (fork, cache):
            new = slice(int(each.lengths[0]), None)
            each.append(k[:, new], v[:, new])
            o = each.attend(q[:, new], gates[:, new])
            np.testing.assert_allclose(o, heed.nsa(q, k, v, gates, **self.OPTIONS)[:, new], rtol=0, atol=1e-14)

    def test_errors(self):
        q, k, v, gates = inputs(dtype=np.float32)
        cache = heed.NSACache(2, 2, 6, 5, capacity=50)
        cache.append(k[:, :9], v[:, :9])
        for call, message in [
            (lambda: heed.NSACache(2, 2, 0), "NSACache: dim is 0, expected an int"),
            (lambda: heed.NSACache(2, 2, 6, block=0), "NSACache: block is 0, expected an int"),
            (lambda: heed.NSACache(2, 2, 6, page=None), "NSACache: page is None without a capacity"),
            (lambda: cache.append(k, v[..., :4]), r"NSACache.append: v has shape \[2,40,2,4\]"),
            (lambda: cache.append(np.zeros((2, 42, 2, 6), "f"), np.zeros((2, 42, 2, 5), "f")), "NSACache.append: "),
            (lambda: cache.append(k, v, compressed=3), "NSACache.append: compressed is 3, expected a pair"),
            (lambda: cache.attend(q, gates), "NSACache.attend: q has 40 tokens, expected at most the 9 that were"),
            (lambda: cache.attend(q[:, :9, :3], gates[:, :9, :3]),
             r"NSACache.attend: q has shape \[2,9,3,6\], expected \[2,T,H,6\] with H a multiple of 2"),
            (lambda: cache.attend(q[:, :9], gates[:, :8]),
             r"NSACache.attend: gates has shape \[2,8,4,3\], expected \[2,9,4,3\]"),
            (lambda: cache.attend(np.float64(q[:, :9]), gates[:, :9]),
             "NSACache.attend: q has dtype f64, expected f32"),
            (lambda: cache.attend(q[:, :9], gates[:, :9], scale=float("inf")), "NSACache.attend: scale is inf"),
            (lambda: cache.trim([10, 9]), "NSACache.trim: lengths"),
        ]:
            with pytest.raises(heed.InvalidArgument, match="^" + message):
                call()
        assert cache.lengths.tolist() == [9, 9]
        assert repr(cache) == "<heed.NSACache: batch=2, heads=2, dim=6, value_dim=5, dtype='f32', lengths=[9, 9]>"
