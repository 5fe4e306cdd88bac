# heed.longformer: against plain NumPy, with attention, from files and in PyTorch.
import importlib
import json
import subprocess

import numpy as np
import pytest

import heed
from cli_program import HEED, document, load, needs_program, save

P = heed.patterns
RNG = np.random.default_rng(0)


def inputs(B=2, T=40, H=4, Hkv=2, D=6, Dv=5, dtype=np.float64):
    """q, k, v, qg, kg, vg."""
    shapes = [(B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, Dv)] * 2
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def softmax_rows(q, k, v, keep, scale, softcap):
    s = np.einsum("bihd,bjhd->bhij", q, k) * scale
    s = softcap * np.tanh(s / softcap) if softcap else s
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", p, v), np.where(total[..., 0] > 0, lse, -np.inf)


def naive(q, k, v, qg=None, kg=None, vg=None, *, window, tokens, scale=None, softcap=None, key_lengths=None,
          key_starts=None, query_lengths=None):
    """(o, lse) from the definition, row by row of a mask."""
    B, T, H, D = q.shape
    wide = [x if x is None else np.repeat(x, H // x.shape[2], axis=2) for x in (k, v, kg, vg)]
    tokens = np.broadcast_to(np.asarray(tokens, np.int64), (B, np.shape(tokens)[-1]))
    is_token = np.array([[t in tokens[b] for t in range(T)] for b in range(B)])
    i, j = np.indices((T, T))
    valid = np.ones((B, T), bool)
    if key_lengths is not None:
        valid &= np.arange(T) < np.asarray(key_lengths)[:, None]
    if key_starts is not None:
        valid &= np.arange(T) >= np.asarray(key_starts)[:, None]
    rows = np.ones((B, T), bool) if query_lengths is None else np.arange(T) < np.asarray(query_lengths)[:, None]
    band = (abs(i - j) <= window // 2) | is_token[:, None, :] | is_token[:, :, None]
    keep = (band & valid[:, None] & rows[:, :, None])[:, None]
    scale = D**-0.5 if scale is None else scale
    o, lse = softmax_rows(q, wide[0], wide[1], keep, scale, softcap)
    if qg is None:
        return o, lse
    whole = (valid[:, None] & rows[:, :, None])[:, None]
    own_o, own_lse = softmax_rows(qg, wide[2], wide[3], whole, scale, softcap)
    return np.where(is_token[:, :, None, None], own_o, o), np.where(is_token[:, None], own_lse, lse)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("options", [
    {"window": 8, "tokens": [0, 17]},
    {"window": 0, "tokens": []},
    {"window": 5, "tokens": [[3, -1, 3], [39, 12, 500]]},
    {"window": 400, "tokens": [1], "scale": 0.3, "softcap": 2.0},
    {"window": 6, "tokens": [0, 38], "key_lengths": [40, 30], "key_starts": [2, 0], "query_lengths": [40, 20]},
])
def test_it_is_the_definition(own, options):
    given = inputs()[:6 if own else 3]
    o, lse = heed.longformer(*given, **options, return_lse=True)
    expected_o, expected_lse = naive(*given, **options)
    np.testing.assert_allclose(o, expected_o, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_shared_projections_are_attention_with_the_pattern(dtype):
    q, k, v, *_ = inputs(dtype=dtype)
    options = {"scale": 0.4, "softcap": 3.0, "key_lengths": [40, 31], "dropout": 0.3, "seed": 2}
    o, lse = heed.longformer(q, k, v, window=6, tokens=[2, 30], return_lse=True, **options)
    expected, expected_lse = heed.attention(q, k, v, pattern=P.longformer(6, [2, 30]), return_lse=True, **options)
    assert np.array_equal(o, expected) and np.array_equal(lse, expected_lse)
    do = RNG.standard_normal(o.shape).astype(dtype)
    gradients = heed.longformer_backward(do, q, k, v, window=6, tokens=[2, 30], **options)
    of_attention = heed.attention_backward(do, q, k, v, o, lse, pattern=P.longformer(6, [2, 30]), **options)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(gradients, name), getattr(of_attention, name))
    assert gradients.dqg is gradients.dkg is gradients.dvg is None


def test_packed_is_each_sequence():
    given = inputs(B=1, T=60)
    o, lse = heed.longformer(*given, window=6, tokens=[0, 21], cu_seqlens_q=[0, 25, 25, 60], return_lse=True)
    assert lse.shape == (4, 60)
    for begin, end in ((0, 25), (25, 60)):
        part, of_part = heed.longformer(*(x[:, begin:end] for x in given), window=6, tokens=[0, 21], return_lse=True)
        assert np.array_equal(o[:, begin:end], part) and np.array_equal(lse[:, begin:end], of_part[0])
    without = heed.longformer(*(x[0] for x in given), window=6, tokens=[0, 21], cu_seqlens_q=[0, 25, 25, 60])
    assert np.array_equal(without, o[0])


def test_gradients_agree_with_finite_differences():
    given = inputs(B=1, T=12, H=2, Hkv=1, D=3, Dv=2)
    do, dlse = RNG.standard_normal((1, 12, 2, 2)), RNG.standard_normal((1, 2, 12))
    options = {"window": 4, "tokens": [1, 7], "key_lengths": [11], "softcap": 2.0}
    gradients = heed.longformer_backward(do, *given, dlse=dlse, **options)

    def loss():
        o, lse = heed.longformer(*given, return_lse=True, **options)
        return (o * do).sum() + (lse * dlse).sum()

    for x, gradient in zip(given, gradients, strict=True):
        for at in RNG.choice(x.size, 6, replace=False):
            flat, sides = x.reshape(-1), []
            for step in (1e-6, -1e-6):
                flat[at] += step
                sides.append(loss())
                flat[at] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient.reshape(-1)[at], abs=1e-7)


def test_gradients_of_what_was_returned_and_computed_again():
    given = inputs(dtype=np.float32)
    options = {"window": 6, "tokens": [2], "dropout": 0.2, "seed": 4}
    o, lse = heed.longformer(*given, return_lse=True, **options)
    do = np.ones_like(o)
    again, saved = (heed.longformer_backward(do, *given, **options),
                    heed.longformer_backward(do, *given, o=o, lse=lse, **options))
    assert again._fields == ("dq", "dk", "dv", "dqg", "dkg", "dvg") and type(again) is heed.LongformerGradients
    assert all(np.array_equal(a, b) for a, b in zip(again, saved, strict=True))
    assert not again.dq[:, 2].any() and not np.delete(again.dqg, 2, axis=1).any() and again.dqg[:, 2].all()


def test_explain():
    report = heed.explain("longformer", q=(1, 4096, 4, 64), k=(1, 4096, 4, 64), v=(1, 4096, 4, 64), window=512,
                          tokens=[0, 9])
    assert report["kernel"].startswith("longformer on softmax_") and report["visited_pairs"] < 4 * 4096 * 900
    own = {name: (1, 4096, 4, 64) for name in ("q", "k", "v", "qg", "kg", "vg")}
    longer = heed.explain("longformer", **own, window=512, tokens=[0, 9])
    assert longer["flops"] == pytest.approx(report["flops"],
                                            rel=0.01) and longer["workspace_bytes"] > report["workspace_bytes"]


def test_errors():
    q, k, v, qg, kg, vg = inputs()
    options = {"window": 4, "tokens": [0]}
    for change, message in [
        (lambda: heed.longformer(q, k, v, qg, **options),
         "longformer: kg is absent, expected qg, kg and vg, or none of them"),
        (lambda: heed.longformer(q, k, v, vg=vg, **options), "longformer: qg is absent"),
        (lambda: heed.longformer(q, k, v, qg, kg[:1], vg, **options),
         r"longformer: kg has shape \[1,40,2,6\], expected \[2,40,2,6\] as k"),
        (lambda: heed.longformer(q, k[:, 1:], v[:, 1:], **options), "longformer: k has 39 tokens, expected 40 as q"),
        (lambda: heed.longformer(q[0], k, v, **options),
         r"longformer: q has shape \[40,4,6\], expected \[B, T, Hq, D\]"),
        (lambda: heed.longformer(q, k, v, window=-1, tokens=[0]), "longformer: window is -1, expected an int"),
        (lambda: heed.longformer(q, k, v, window=(2, 2), tokens=[0]),
         r"longformer: window is \(2, 2\), expected an int"),
        (lambda: heed.longformer(q, k, v, window=4, tokens=[-2]),
         "longformer: tokens has -2, expected 0 or more, or -1"),
        (lambda: heed.longformer(q, k, v, window=4, tokens=[0.5]), "longformer: tokens"),
        (lambda: heed.longformer(q, k, v, window=4, tokens=[[0]] * 3),
         r"longformer: tokens has shape \[3,1\], expected \[n\], or \[2, n\]"),
        (lambda: heed.longformer(q, k, v, **options, softcap=0.0), "longformer: softcap is 0.0, expected"),
        (lambda: heed.longformer(q, k, v, **options, precision="low"), "longformer: precision is 'low', expected"),
        (lambda: heed.longformer(q, k, v, **options, dropout=1.0), "longformer: dropout is 1, expected"),
        (lambda: heed.longformer(q, k, v, qg, kg, vg, **options, out=np.zeros((2, 40, 4, 6))),
         "longformer: out has shape"),
        (lambda: heed.longformer_backward(q[..., :5], q, k, v, **options, dropout=0.5),
         "longformer_backward: seed is None"),
        (lambda: heed.longformer_backward(q[..., :5], q, k, v, **options, o=q[..., :5]),
         "longformer_backward: lse is None"),
        (lambda: heed.longformer_backward(q, q, k, v, **options), "longformer_backward: do has shape"),
    ]:
        with pytest.raises(heed.InvalidArgument, match="^" + message):
            change()
    for call in (lambda: heed.longformer(q, k, v, window=4), lambda: heed.longformer(q, k, v, tokens=[0]),
                 lambda: heed.longformer(q, k, window=4, tokens=[0]),
                 lambda: heed.longformer(q, k, v, nonsense=1, **options)):
        with pytest.raises(TypeError, match="longformer"):
            call()


def test_options_of_attention_that_it_lacks_are_refused_by_name():
    q, k, v, *_ = inputs()
    known = set(heed.longformer.__signature__.parameters)
    for name in set(heed.attention.__signature__.parameters) - known:
        with pytest.raises(heed.Unsupported,
                           match=f"^longformer: {name} is an option of attention that longformer does not have"):
            heed.longformer(q, k, v, window=4, tokens=[0], **{name: True})


@needs_program
def test_from_files(tmp_path):
    names = ("q", "k", "v", "qg", "kg", "vg")
    given = inputs(B=1, T=700, H=2, Hkv=2, dtype=np.float32)
    file, out = tmp_path / "x.safetensors", tmp_path / "o.safetensors"
    save(file, {name: ("F32", x) for name, x in zip(names, given, strict=True)})
    run = document("run", "longformer", file, "-o", out)
    assert run["mechanism"] == "longformer" and run["output"]["shape"] == [1, 700, 2, 5]
    assert np.array_equal(load(out)[0]["o"], heed.longformer(*given, window=512, tokens=[0]))
    save(file, {name: ("F32", x) for name, x in zip(names[:3], given[:3], strict=True)})
    document("run", "longformer", file, "-o", out)
    assert np.array_equal(load(out)[0]["o"], heed.longformer(*given[:3], window=512, tokens=[0]))
    (row,) = document("compare", file, "-m", "longformer", "--dtype", "f32")["rows"]
    assert row["state_bytes"] == 0 and row["max_error"] > 1e-3
    listed = json.loads(subprocess.run([HEED, "list", "--json"], check=True, capture_output=True, text=True).stdout)
    (entry,) = [row for row in listed if row["name"] == "longformer"]
    assert entry["family"] == "sparse" and entry["passes"] == ["forward", "backward"]


class TestTorch:
    """heed.torch.longformer."""

    torch = pytest.importorskip("torch")
    if torch is not None:
        import heed.torch

    OPTIONS = {"window": 4, "tokens": [1, 7]}

    def tensors(self, requires_grad=False, dtype=None, **sizes):
        tensors = [self.torch.from_numpy(x)
                   for x in inputs(**({"B": 2, "T": 12, "H": 2, "Hkv": 1, "D": 3, "Dv": 2} | sizes))]
        tensors = tensors if dtype is None else [x.to(dtype) for x in tensors]
        return [x.requires_grad_() for x in tensors] if requires_grad else tensors

    def test_it_is_the_function_on_arrays(self):
        given = self.tensors(T=80)
        options = {"window": 10, "tokens": [[0, 5], [70, -1]], "key_lengths": [80, 66], "dropout": 0.4,
                   "seed": 2**63 + 5}
        o, lse = heed.torch.longformer(*given, **options, return_lse=True)
        expected, expected_lse = heed.longformer(*(x.numpy() for x in given), **options, return_lse=True)
        assert np.array_equal(o.numpy(), expected) and np.array_equal(lse.numpy(), expected_lse)
        tokens = self.torch.tensor(options["tokens"])
        assert self.torch.equal(heed.torch.longformer(*given, **options | {"tokens": tokens}), o)

    @pytest.mark.parametrize("options", [{}, {"key_lengths": [12, 9], "softcap": 2.0}, {"dropout": 0.3, "seed": 3},
                                         {"scale": 0.7}])
    def test_gradcheck(self, options):
        leaves = self.tensors(requires_grad=True)
        for n in (3, 6):
            assert self.torch.autograd.gradcheck(
                lambda *x: heed.torch.longformer(*x, return_lse=True, **self.OPTIONS, **options), leaves[:n], atol=1e-6,
                rtol=1e-4)

    def test_gradcheck_of_packed_sequences(self):
        leaves = self.tensors(requires_grad=True, B=1, T=20)
        assert self.torch.autograd.gradcheck(
            lambda *x: heed.torch.longformer(*x, **self.OPTIONS, cu_seqlens_q=[0, 12, 20]), leaves, atol=1e-6,
            rtol=1e-4)

    def test_gradients_of_some(self):
        given = self.tensors()
        given[4].requires_grad_()
        heed.torch.longformer(*given, **self.OPTIONS).square().sum().backward()
        every = self.tensors(requires_grad=True)
        for x, y in zip(every, given, strict=True):
            x.data.copy_(y)
        heed.torch.longformer(*every, **self.OPTIONS).square().sum().backward()
        assert self.torch.equal(given[4].grad, every[4].grad) and given[0].grad is None

    @pytest.mark.parametrize("n, options", [
        (3, {"tokens": [1]}), (6, {"tokens": [5, 1, 1, -1, 40]}), (6, {"tokens": []}),
        (6, {"tokens": [[0, 3], [2, -1]], "key_lengths": [6, 4], "softcap": 2.0, "query_lengths": [5, 6]}),
        (6, {"tokens": [1, 4], "dropout": 0.3, "seed": 3}),
        (6, {"tokens": [[0, 3], [2, -1], [-1, -1]], "cu_seqlens_q": [0, 4, 8, 9]}),
        (6, {"tokens": [0], "cu_seqlens_q": [0, 4, 9], "dropout": 0.3, "seed": 3, "flat": True})], ids=str)
    def test_second_derivatives_and_forward_mode(self, n, options):
        options = dict(options)
        packed = {"B": 1, "T": 9} if "cu_seqlens_q" in options else {"T": 6}
        given = self.tensors(**packed)[:n]
        given = [x[0] if options.get("flat") else x for x in given]
        options.pop("flat", None)

        def function(*x):
            o, lse = heed.torch.longformer(*x, **options, window=2, scale=0.6, return_lse=True)
            return o, self.torch.where(lse == -self.torch.inf, 0, lse)

        given = [x.clone().requires_grad_() for x in given]
        assert self.torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert self.torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)

    @pytest.mark.parametrize("n, options", [
        (3, {"tokens": [1]}), (6, {"tokens": [7, 0, 7, -1]}), (6, {"tokens": []}),
        (3, {"tokens": [[0, 3], [2, -1]], "key_lengths": [10, 7], "key_starts": [1, 3], "softcap": 2.0}),
        (6, {"tokens": [[0, 9], [5, -1]], "key_lengths": [10, 4], "query_lengths": [9, 11]})], ids=str)
    def test_blocks_of_rows(self, n, options, monkeypatch):
        """Long sequences: windows without tiles of all pairs."""
        derivatives = importlib.import_module("heed.torch._longformer_derivatives")
        calls = []
        blocks = derivatives._Blocks
        monkeypatch.setattr(derivatives, "_ROWS", 2)
        monkeypatch.setattr(derivatives, "_Blocks", lambda *of: calls.append(blocks(*of)) or calls[-1])

        def function(*x):
            o, lse = heed.torch.longformer(*x, **options, window=3, return_lse=True)
            return o, self.torch.where(lse == -self.torch.inf, 0, lse)

        given = [x.requires_grad_() for x in self.tensors(T=11)[:n]]
        assert self.torch.autograd.gradcheck(function, given, check_forward_ad=True, fast_mode=True)
        assert self.torch.autograd.gradgradcheck(function, given, check_fwd_over_rev=True, fast_mode=True)
        assert calls

    def test_hessians(self):
        given = self.tensors(B=1, T=5)

        def loss(x, place):
            moved = [x if i == place else y for i, y in enumerate(given)]
            return heed.torch.longformer(*moved, window=2, tokens=[1, 3]).sin().sum()

        for place in (1, 4):
            hessian = self.torch.func.hessian(loss)(given[place], place)
            for other in (self.torch.func.jacrev(self.torch.func.grad(loss)),
                          self.torch.func.jacrev(self.torch.func.jacfwd(loss))):
                self.torch.testing.assert_close(other(given[place], place), hessian)
            assert hessian.abs().max() > 1e-3

    def test_rows_that_are_not_read_may_be_anything(self):
        given = self.tensors(T=6)
        expected = self.torch.func.grad(self.penalty)(given)
        given[0][:, [1, 4]], given[3][:, [0, 2, 3, 5]] = self.torch.nan, self.torch.inf
        for x, y in zip(self.torch.func.grad(self.penalty)(given), expected, strict=True):
            assert self.torch.equal(x, y)

    def penalty(self, tensors):
        def loss(tensors):
            return heed.torch.longformer(*tensors, window=2, tokens=[1, 4]).sin().sum()

        return sum(x.square().sum(dtype=self.torch.float64) for x in self.torch.func.grad(loss)(tensors))

    @pytest.mark.parametrize("dtype, share", [("float32", 1e-5), ("bfloat16", 0.03)])
    def test_a_gradient_penalty_in_other_dtypes(self, dtype, share):
        dtype = getattr(self.torch, dtype)
        narrow = self.tensors(dtype=dtype, T=80, D=16, Dv=16)
        found = self.torch.func.grad(self.penalty)(narrow)
        expected = self.torch.func.grad(self.penalty)([x.double() for x in narrow])
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype
            assert (x.double() - y).norm() <= share * y.norm()

    def test_third_derivatives_are_refused(self):
        given = self.tensors(T=6)
        with pytest.raises(heed.Unsupported, match="longformer: a third derivative"):
            self.torch.func.grad(lambda x: sum(y.sum() for y in self.torch.func.grad(self.penalty)(x)))(given)

    @pytest.mark.parametrize("n", [3, 6])
    def test_opcheck(self, n):
        own = self.tensors(requires_grad=True)[:n] + [None] * (6 - n)
        self.torch.library.opcheck(self.torch.ops.heed.longformer.default, (*own, 4, self.torch.tensor([1, 7])))
        lengths = self.torch.tensor([12, 9])
        self.torch.library.opcheck(self.torch.ops.heed.longformer.default,
                                   (*own, 4, self.torch.tensor([1]), 0.5, lengths))

    def test_compile_without_a_break(self):
        given = self.tensors(requires_grad=True, dtype=self.torch.float32)

        def loss(*x):
            o, lse = heed.torch.longformer(*x, **self.OPTIONS, scale=0.7, return_lse=True)
            return o.square().sum() + lse.sum()

        compiled = self.torch.compile(loss, fullgraph=True, backend="aot_eager")
        expected = self.torch.autograd.grad(loss(*given), given)
        for a, b in zip(self.torch.autograd.grad(compiled(*given), given), expected, strict=True):
            assert self.torch.equal(a, b)

    def test_autocast_and_errors(self):
        given = self.tensors(dtype=self.torch.float32)
        with self.torch.autocast("cpu", dtype=self.torch.bfloat16):
            assert heed.torch.longformer(*given, **self.OPTIONS).dtype == self.torch.bfloat16
        with pytest.raises(heed.InvalidArgument, match="longformer: qg is absent"):
            heed.torch.longformer(*given[:3], kg=given[4], **self.OPTIONS)
        with pytest.raises(heed.InvalidArgument, match="longformer: v is of type NoneType, expected a tensor"):
            heed.torch.longformer(given[0], given[1], None, **self.OPTIONS)
        with pytest.raises(heed.InvalidArgument, match="longformer: q has shape"):
            heed.torch.longformer(given[0][0], *given[1:], **self.OPTIONS)
        with pytest.raises(heed.Unsupported, match="longformer: causal is an option of attention"):
            heed.torch.longformer(*given, **self.OPTIONS, causal=True)
        with pytest.raises(TypeError, match="nonsense"):
            heed.torch.longformer(*given, **self.OPTIONS, nonsense=1)
        with pytest.raises(TypeError, match="tokens"):
            heed.torch.longformer(*given, window=4)
        with pytest.raises(heed.InvalidArgument, match="longformer: window is 'wide', expected an int"):
            heed.torch.longformer(*given, window="wide", tokens=[0])
