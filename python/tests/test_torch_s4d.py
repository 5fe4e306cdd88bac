# S4D's kernel in heed.torch, and both views under autograd. The other tests are in test_torch_scans.py.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scans import arguments  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402

PARAMETERS = ("log_dt", "log_A_real", "A_imag", "C")


def tensors(**sizes):
    return {key: torch.from_numpy(x) for key, x in arguments("s4d", **sizes).items()}


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_the_kernel_has_the_bits_of_numpys_and_its_gradients(discretization):
    values = tensors(D=3, N=4)
    leaves = [values[key].requires_grad_() for key in PARAMETERS]
    kernel = heed.torch.s4d_kernel(*leaves, 20, discretization=discretization)
    arrays = [x.detach().numpy() for x in leaves]
    assert np.array_equal(kernel.detach().numpy(), heed.s4d_kernel(*arrays, 20, discretization=discretization))
    dkernel = torch.randn(3, 20, dtype=torch.float64)
    kernel.backward(dkernel)
    expected = heed.s4d_kernel_backward(dkernel.numpy(), *arrays, discretization=discretization)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert np.array_equal(leaf.grad.numpy(), gradient)
    run = lambda *x: heed.torch.s4d_kernel(*x, 20, discretization=discretization)  # noqa: E731
    assert torch.autograd.gradcheck(run, [x.detach().requires_grad_() for x in leaves], atol=1e-6, rtol=1e-5)
    assert heed.torch.s4d_kernel(*leaves, 0).shape == (3, 0)


@pytest.mark.parametrize("method", ["recurrent", "convolution"])
def test_gradcheck_of_both_views(method):
    leaves = [x.requires_grad_() for x in tensors(B=1, D=2, T=150, N=3).values()]

    def run(*x):
        return heed.torch.s4d(*x, method=method)

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, rtol=1e-5)


def test_a_layer_trains_the_same_by_either_view_and_compiles():
    def loss(values, method):
        kernel = heed.torch.s4d_kernel(*(values[key] for key in PARAMETERS), 30)
        by_kernel = heed.torch.long_convolution(values["u"], kernel, values["D"])
        return by_kernel.square().sum() + heed.torch.s4d(**values, method=method).square().sum()

    gradients = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        for method in ("recurrent", "convolution"):
            values = {key: x.requires_grad_() for key, x in tensors(T=30).items()}
            f(values, method).backward()
            gradients.append([x.grad for x in values.values()])
    for others in gradients[1:]:
        for a, b in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_errors_name_the_argument():
    values = tensors()
    with pytest.raises(heed.InvalidArgument, match="s4d: method is 'fast', expected one of 'auto'"):
        heed.torch.s4d(**values, method="fast")
    with pytest.raises(heed.InvalidArgument, match="s4d_kernel: log_dt is of type ndarray"):
        heed.torch.s4d_kernel(*(values[key].numpy() for key in PARAMETERS), 20)
