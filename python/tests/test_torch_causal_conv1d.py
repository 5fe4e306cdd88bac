# heed.torch.causal_conv1d: bits of NumPy's, PyTorch's own convolution, gradients, PyTorch's checks of operators.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402


def problem(dtype=torch.float64, B=2, D=5, T=9, W=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, D, T), (D, W), (D,))
    x, weight, bias = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return x, weight, bias, torch.randn((B, D, W - 1), dtype=state, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bits_are_those_of_numpy(dtype):
    x, weight, bias, initial = problem(dtype, D=33, T=80)
    options = {"activation": "silu", "return_state": True, "lengths": [80, 33]}
    o, state = heed.torch.causal_conv1d(x, weight, bias, initial_state=initial, **options)
    arrays = (t.numpy() for t in (x, weight, bias))
    expected, last = heed.causal_conv1d(*arrays, initial_state=initial.numpy(), **options)
    assert o.dtype == dtype and np.array_equal(o.numpy(), expected) and np.array_equal(state.numpy(), last)


def test_agrees_with_a_depthwise_convolution_of_pytorch():
    x, weight, bias, _ = problem(torch.float32, D=32, T=70)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    ours = heed.torch.causal_conv1d(x, weight, bias, activation="silu")
    theirs = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=32)[:, :, :70]
    theirs = torch.nn.functional.silu(theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, gradient), torch.autograd.grad(theirs, leaves, gradient)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"lengths": [9, 2], "starts": [2, 0]}])
@pytest.mark.parametrize("W", [4, 1])
def test_gradcheck_with_states(activation, options, W):
    x, weight, bias, initial = problem(W=W)
    for leaf in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaves = [t.detach().requires_grad_() for t in (leaf, weight, bias, initial)]

        def function(x, weight, bias, initial):
            return heed.torch.causal_conv1d(
                x, weight, bias, activation=activation, initial_state=initial, return_state=True, **options
            )

        assert torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-5)


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias, initial = problem()
    weight.requires_grad_()
    o, state = heed.torch.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial, return_state=True)
    (dw,) = torch.autograd.grad(o.sum(), weight)
    assert dw.shape == weight.shape
    x.requires_grad_()
    _, state = heed.torch.causal_conv1d(x, weight, return_state=True)
    (dx,) = torch.autograd.grad(state.sum(), x)
    assert dx[:, :, -3:].eq(1).all() and dx[:, :, :-3].eq(0).all()
    with torch.no_grad():
        assert not heed.torch.causal_conv1d(x, weight).requires_grad


@pytest.mark.parametrize("W", [4, 1])
def test_opcheck(W):
    x, weight, bias, initial = (t.requires_grad_() for t in problem(W=W))
    operator = torch.ops.heed.causal_conv1d.default
    torch.library.opcheck(operator, (x, weight))
    torch.library.opcheck(operator, (x, weight, bias, "silu", initial))
    packed = torch.tensor([0, 4, 9])
    last = x[:1].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(operator, (last, weight, None, None, initial, None, None, packed))


@pytest.mark.parametrize("W", [4, 1])
def test_compiles_without_a_graph_break(W):
    def function(x, weight, bias, initial):
        return heed.torch.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial, return_state=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for last in (False, True):
        ours, theirs = problem(W=W), problem(W=W)
        results = []
        for f, leaves in ((compiled, ours), (function, theirs)):
            leaves = [leaves[0].transpose(1, 2).contiguous().transpose(1, 2) if last else leaves[0], *leaves[1:]]
            leaves = [t.requires_grad_() for t in leaves]
            o, state = f(*leaves)
            (o.square().sum() + state.square().sum()).backward()
            results.append((o, state, *(t.grad for t in leaves)))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_results_lie_as_x_does():
    x, weight, bias, _ = problem(torch.float32)
    last = x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    o = heed.torch.causal_conv1d(last, weight, bias)
    assert o.stride() == last.stride() and torch.equal(o, heed.torch.causal_conv1d(x, weight, bias))
    o.sum().backward()
    assert last.grad.stride() == last.stride()


def test_autocast_and_errors():
    x, weight, bias, _ = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = heed.torch.causal_conv1d(x, weight, bias)
        assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), heed.torch.causal_conv1d(x, weight, bias), atol=5e-2, rtol=2e-2)
    with pytest.raises(heed.InvalidArgument, match=r"causal_conv1d: lengths\[0\] is 10, expected 0 to T = 9"):
        heed.torch.causal_conv1d(x, weight, bias, lengths=[10, 1])
    with pytest.raises(heed.InvalidArgument, match="causal_conv1d: x has shape"):
        heed.torch.causal_conv1d(x[0], weight)
    with pytest.raises(heed.InvalidArgument, match="activation is 'relu'"):
        heed.torch.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(TypeError, match="nonsense"):
        heed.torch.causal_conv1d(x, weight, nonsense=1)


@pytest.mark.parametrize("W", [4, 1])
def test_steps_update_tensors_in_place(W):
    x, weight, bias, _ = problem(torch.float32, W=W)
    whole, last = heed.torch.causal_conv1d(x, weight, bias, activation="silu", return_state=True)
    _, state = heed.torch.causal_conv1d(x[:, :, :8], weight, bias, return_state=True)
    o = heed.torch.causal_conv1d_step(x[:, :, 8], weight, bias, state, activation="silu")
    assert torch.equal(o, whole[:, :, 8]) and torch.equal(state, last) and state.shape == (2, 5, W - 1)
