# long_convolution in heed.torch: bits of NumPy's, gradients, PyTorch's checks of operators.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scans import arguments  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402

# Tap by tap, and by transforms.
SIZES = [{"T": 9, "L": 4}, {"T": 300, "L": 300}]
each = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "T{T}_L{L}".format(**sizes))
run = heed.torch.long_convolution


def tensors(dtype=torch.float64, **sizes):
    return {key: torch.from_numpy(x).to(dtype) for key, x in arguments("long_convolution", **sizes).items()}


def channels_last(x):
    return x.swapaxes(-1, -2).contiguous().swapaxes(-1, -2) if x.dim() > 2 else x


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_bits_are_those_of_numpy(dtype, sizes):
    values = tensors(dtype, D=34, **sizes)
    o = run(**values, lengths=[sizes["T"], 5])
    assert o.dtype == dtype
    if dtype != torch.bfloat16:
        arrays = {key: x.numpy() for key, x in values.items()}
        assert np.array_equal(o.numpy(), heed.long_convolution(**arrays, lengths=[sizes["T"], 5]))
    last = {key: channels_last(x).requires_grad_() for key, x in values.items()}
    o = run(**last)
    assert o.stride() == last["u"].stride() and torch.equal(o, run(**values))
    o.sum().backward()
    assert last["u"].grad.stride() == last["u"].stride()


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"lengths": [9, 2], "starts": [2, 0]}])
def test_gradcheck(options):
    for change in (lambda x: x, channels_last):
        leaves = [change(x).detach().requires_grad_() for x in tensors(T=9, D=3, L=4).values()]
        assert torch.autograd.gradcheck(lambda *x: run(*x, **options), leaves)
    leaves = [x.requires_grad_() for x in tensors(B=1, T=140, D=1, L=140).values()]
    assert heed.explain("long_convolution", u=leaves[0].shape,
                        kernel=leaves[1].shape)["kernel"] == "convolution_fourier"
    assert torch.autograd.gradcheck(run, leaves)


@each
def test_it_agrees_with_torch_fft_and_its_gradients(sizes):
    results = []
    for own in (True, False):
        values = {key: x.requires_grad_() for key, x in tensors(**sizes).items()}
        u, kernel, D = values.values()
        if own:
            o = run(u, kernel, D)
        else:
            n = 2 * sizes["T"]
            o = torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(kernel, n=n),
                                n=n)[..., : sizes["T"]] + D[:, None] * u
        o.square().sum().backward()
        results.append((o, *(x.grad for x in values.values())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@each
def test_opcheck(sizes):
    operator = torch.ops.heed.long_convolution.default
    leaves = [x.requires_grad_() for x in tensors(D=4, **sizes).values()]
    torch.library.opcheck(operator, tuple(leaves[:2]))
    torch.library.opcheck(operator, tuple(leaves))
    leaves = [channels_last(x).detach().requires_grad_() for x in tensors(B=1, D=4, **sizes).values()]
    torch.library.opcheck(operator, (*leaves, None, None, torch.tensor([0, 4, sizes["T"]])))


@each
def test_compiles_without_a_graph_break(sizes):
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, run):
        leaves = {key: x.requires_grad_() for key, x in tensors(**sizes).items()}
        o = f(**leaves)
        o.square().sum().backward()
        results.append((o, *(x.grad for x in leaves.values())))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_gradients_autocast_and_errors():
    values = tensors(torch.float32, T=21)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = run(**values)
    rounded = {key: x.bfloat16() if x.dim() > 2 else x for key, x in values.items()}
    assert torch.equal(o, run(**rounded)) and o.dtype == torch.bfloat16
    values["kernel"].requires_grad_()
    (gradient,) = torch.autograd.grad(run(**values).sum(), values["kernel"])
    assert gradient.shape == values["kernel"].shape
    with torch.no_grad():
        assert not run(**values).requires_grad
    with pytest.raises(heed.InvalidArgument, match=r"long_convolution: lengths\[0\] is 22, expected 0 to T = 21"):
        run(**values, lengths=[22, 1])
    with pytest.raises(heed.InvalidArgument, match="long_convolution: u has shape"):
        run(**values | {"u": values["u"][0]})
    for option in ("nonsense", "return_state", "initial_state"):
        with pytest.raises(TypeError, match=option):
            run(**values, **{option: None})
    with pytest.raises(TypeError, match="kernel"):
        run(values["u"])
