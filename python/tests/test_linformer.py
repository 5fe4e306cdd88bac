# Linformer from NumPy, PyTorch and the command line: its definition, gradients, options, errors.
import numpy as np
import pytest
from cli_program import document, load, needs_program, save

import heed

SIZES = {"B": 2, "T": 40, "H": 2, "HV": 4, "K": 6, "V": 5, "R": 7}


def arguments(rng, dtype=np.float64, columns=None, **sizes):
    n = {**SIZES, **sizes}
    columns = n["T"] if columns is None else columns
    shapes = {"q": (n["B"], n["T"], n["H"], n["K"]), "k": (n["B"], n["T"], n["H"], n["K"]),
              "v": (n["B"], n["T"], n["HV"], n["V"]), "e": (n["R"], columns), "f": (n["R"], columns)}
    return [rng.standard_normal(shape).astype(dtype) * (0.3 if name in "ef" else 1) for name, shape in shapes.items()]


def naive(q, k, v, e, f, scale=None):
    """K~ = e k, V~ = f v, then softmax attention, by einsum."""
    group, T = v.shape[2] // q.shape[2], q.shape[1]
    keys, values = np.einsum("rt,bthk->brhk", e[:, :T], k), np.einsum("rt,bthv->brhv", f[:, :T], v)
    s = np.einsum("bthk,brhk->bhtr", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhtr,brhv->bthv", np.repeat(p / p.sum(-1, keepdims=True), group, axis=1), values)


@pytest.mark.parametrize("options", [{}, {"scale": 0.9}])
def test_outputs_are_those_of_the_definition(rng, options):
    inputs = arguments(rng, columns=44)
    np.testing.assert_allclose(heed.linformer(*inputs, **options), naive(*inputs, **options), rtol=0, atol=1e-13)


def test_masked_tokens_are_zero_before_the_projection(rng):
    q, k, v, e, f = arguments(rng)
    keep = np.zeros((2, 40, 1, 1))
    keep[0, 3:33] = keep[1] = 1
    o = heed.linformer(q, k, v, e, f, starts=[3, 0], lengths=[33, 40])
    np.testing.assert_allclose(o, naive(q, k * keep, v * keep, e, f) * keep, rtol=0, atol=1e-13)


def test_packed_sequences_begin_at_the_first_column(rng):
    q, k, v, e, f = arguments(rng, B=1, columns=20)
    o = heed.linformer(q, k, v, e, f, cu_seqlens=[0, 15, 15, 35])
    for begin, end in ((0, 15), (15, 35)):
        part = heed.linformer(*(x[:, begin:end] for x in (q, k, v)), e, f)
        assert np.array_equal(o[:, begin:end], part)
    assert not o[:, 35:].any()


def test_matrices_are_read_as_they_lie(rng):
    q, k, v, e, f = arguments(rng, np.float32)
    o = heed.linformer(q, k, v, e, f)
    transposed = np.asfortranarray(e), np.asfortranarray(f)
    assert np.array_equal(heed.linformer(q, k, v, *transposed), o)
    assert heed.explain("linformer", q=q, k=k, v=v, e=transposed[0], f=transposed[1])["copies"] == []


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_dtypes_and_out(rng, dtype):
    q, k, v, e, f = arguments(rng, dtype)
    o = heed.linformer(q, k, v, e, f)
    assert o.dtype == dtype
    np.testing.assert_allclose(o, naive(*(x.astype(np.float64) for x in (q, k, v, e, f))),
                               rtol=0, atol=2e-3 if dtype == np.float16 else 1e-5)
    wide = np.float64 if dtype == np.float64 else np.float32
    assert np.array_equal(heed.linformer(q, k, v, e.astype(wide), f.astype(wide)), o)
    out = np.empty_like(v)
    assert heed.linformer(q, k, v, e, f, out=out, threads=1) is out and np.array_equal(out, o)


@pytest.mark.parametrize("options", [{}, {"starts": [3, 0], "lengths": [33, 40]}])
def test_gradients_are_differences(rng, options):
    inputs = arguments(rng, columns=42)
    do = rng.standard_normal(inputs[2].shape)
    gradients = heed.linformer_backward(do, *inputs, **options)
    assert gradients._fields == ("dq", "dk", "dv", "de", "df")
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        for _ in range(6):
            at = tuple(rng.integers(size) for size in x.shape)
            kept, sides = x[at], []
            for h in (1e-6, -1e-6):
                x[at] = kept + h
                sides.append((heed.linformer(*inputs, **options) * do).sum())
            x[at] = kept
            np.testing.assert_allclose(gradient[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)
    assert not gradients.de[:, 40:].any()


def test_explain():
    report = heed.explain("linformer", q=(1, 100, 4, 8), k=(1, 100, 4, 8), v=(1, 100, 4, 8), e=(16, 100), f=(16, 100))
    assert report["kernel"].startswith("linformer on softmax_") and report["flops"] == 4 * 100 * 16 * 64
    assert report["visited_pairs"] == 100 * 16 * 4 and report["workspace_bytes"] > 0 and not report["invariant"]


def test_errors(rng):
    q, k, v, e, f = arguments(rng)
    for change, message in (
        ((q, k, v, e[:, 1:], f), r"linformer: e has shape \[7,39\], expected \[R >= 1, at least 40 columns\]"),
        ((q, k, v, e, f[1:]), r"linformer: f has shape \[6,40\], expected \[7, at least 40 columns\]"),
        ((q, k[:1], v, e, f), r"linformer: k has shape \[1,40,2,6\], expected \[2,40,2,6\]"),
        ((q, k, v[:, :, :3], e, f), "linformer: v has 3 heads, expected a multiple of the 2 heads of q"),
        ((q, k, v, e.astype(np.float32), f), "linformer: e has dtype f32, expected f64"),
        ((q[0], k, v, e, f), "linformer: q has shape"),
    ):
        with pytest.raises(heed.InvalidArgument, match=message):
            heed.linformer(*change)
    with pytest.raises(heed.InvalidArgument, match=r"linformer: lengths\[0\] is 41"):
        heed.linformer(q, k, v, e, f, lengths=[41, 1])
    with pytest.raises(heed.InvalidArgument, match="linformer: out overlaps v"):
        heed.linformer(q, k, v, e, f, out=v)
    with pytest.raises(heed.InvalidArgument, match="linformer_backward: do has shape"):
        heed.linformer_backward(v[:1], q, k, v, e, f)
    with pytest.raises(TypeError, match="linformer"):
        heed.linformer(q, k, v, e)
    with pytest.raises(TypeError, match="reverse"):
        heed.linformer(q, k, v, e, f, reverse=True)


@needs_program
def test_run_is_the_python_function(rng, tmp_path):
    inputs = dict(zip("qkvef", arguments(rng, np.float32, HV=2)))
    file = save(tmp_path / "x.safetensors", {name: ("F32", x) for name, x in inputs.items()})
    out = tmp_path / "o.safetensors"
    run = document("run", "linformer", file, "-o", out)
    assert run["shapes"] == {name: list(x.shape) for name, x in inputs.items()}
    assert np.array_equal(load(out)[0]["o"], heed.linformer(*inputs.values()))


class TestTorch:
    """heed.torch.linformer."""

    torch = None

    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")
        import heed.torch  # noqa: F401

    def tensors(self, rng, dtype=None, **sizes):
        values = arguments(rng, **{"T": 9, "K": 3, "V": 4, "R": 4, "H": 1, "HV": 2, **sizes})
        return [self.torch.from_numpy(x).to(dtype or self.torch.float64) for x in values]

    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
    def test_bits_are_those_of_numpy(self, rng, dtype):
        values = self.tensors(rng, getattr(self.torch, dtype), T=80, K=17)
        o = heed.torch.linformer(*values, lengths=[80, 33])
        assert np.array_equal(o.numpy(), heed.linformer(*(x.numpy() for x in values), lengths=[80, 33]))

    @pytest.mark.parametrize("options", [{}, {"scale": 0.6}, {"lengths": [9, 5], "starts": [2, 0]}])
    def test_gradcheck(self, rng, options):
        leaves = [x.requires_grad_() for x in self.tensors(rng, columns=11)]
        assert self.torch.autograd.gradcheck(lambda *x: heed.torch.linformer(*x, **options), leaves, atol=1e-6,
                                             rtol=1e-4)

    def test_gradients_of_transposed_matrices_and_of_some_alone(self, rng):
        q, k, v, e, f = self.tensors(rng)
        plain = [x.clone().requires_grad_() for x in (e, f)]
        lying = [x.T.contiguous().requires_grad_() for x in (e, f)]
        heed.torch.linformer(q, k, v, *plain).square().sum().backward()
        heed.torch.linformer(q, k, v, *(x.T for x in lying)).square().sum().backward()
        for a, b in zip(plain, lying):
            assert self.torch.equal(a.grad, b.grad.T)

    def test_opcheck(self, rng):
        inputs = tuple(x.requires_grad_() for x in self.tensors(rng))
        self.torch.library.opcheck(self.torch.ops.heed.linformer.default, inputs)

    def test_compiles_without_a_graph_break(self, rng):
        def loss(*x):
            return heed.torch.linformer(*x, scale=0.7).square().sum()

        ours, theirs = ([x.clone().requires_grad_() for x in values] for values in [self.tensors(rng)] * 2)
        a = self.torch.compile(loss, fullgraph=True, backend="aot_eager")(*ours)
        b = loss(*theirs)
        assert self.torch.equal(a, b)
        a.backward()
        b.backward()
        for x, y in zip(ours, theirs):
            assert self.torch.equal(x.grad, y.grad)

    def test_autocast_and_errors(self, rng):
        values = self.tensors(rng, self.torch.float32)
        with self.torch.autocast("cpu", dtype=self.torch.bfloat16):
            assert heed.torch.linformer(*values).dtype == self.torch.bfloat16
        with pytest.raises(heed.InvalidArgument, match=r"linformer: lengths\[0\] is 10, expected 0 to T = 9"):
            heed.torch.linformer(*values, lengths=[10, 1])
        with pytest.raises(heed.InvalidArgument, match="linformer: q has shape"):
            heed.torch.linformer(values[0][0], *values[1:])
        with pytest.raises(TypeError, match="nonsense"):
            heed.torch.linformer(*values, nonsense=1)
        with pytest.raises(TypeError, match="'f'"):
            heed.torch.linformer(*values[:4])
