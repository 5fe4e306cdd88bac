# Gated rows and token shift, operators behind heed.torch.nn, against their compositions, with all derivatives.
import itertools

import pytest

torch = pytest.importorskip("torch")

from heed import InvalidArgument  # noqa: E402
from heed.torch._layer_rows import composed_gated_rows, composed_token_shift, gated_rows, token_shift  # noqa: E402

NORMS, ACTIVATIONS = ("none", "rms", "unit"), ("silu", "sigmoid", "log_sigmoid")
OPTIONS = {"eps": 0.2, "factor": 0.7}


def tensors(norm, activation, dtype=torch.float64, shape=(2, 3, 2, 5), weight=(5,)):
    """x, a gate that lies between other channels, and a weight where there is a norm."""
    generator = torch.Generator().manual_seed(len(norm) + len(activation))

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    gate = normal(*shape[:-1], shape[-1] + 3)[..., 1:shape[-1] + 1].detach()
    return [x if x is None else x.requires_grad_()
            for x in (normal(*shape), gate, normal(*weight) if norm != "none" else None)]


@pytest.mark.parametrize("norm, activation, gate_first", list(itertools.product(NORMS, ACTIVATIONS, (False, True))))
def test_derivatives(norm, activation, gate_first):
    options = {"norm": norm, "activation": activation, "gate_first": gate_first, **OPTIONS}
    for weight in ((5,), (2, 5)):
        given = tensors(norm, activation, shape=(2, 2, 5), weight=weight)
        inputs = [x for x in given if x is not None]

        def function(*inputs):
            return gated_rows(*inputs, *(None,) * (3 - len(inputs)), **options)

        y = composed_gated_rows(*given, norm, activation, gate_first, 0.2, 0.7)
        torch.testing.assert_close(function(*inputs), y, rtol=1e-13, atol=1e-13)
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_narrow_dtypes_are_rounded_once(dtype, tolerance):
    for norm, activation, gate_first in itertools.product(NORMS, ACTIVATIONS, (False, True)):
        given = tensors(norm, activation, dtype, shape=(3, 4, 37), weight=(37,))
        wide = [x if x is None else x.detach().double().requires_grad_() for x in given]
        y = gated_rows(*given, norm=norm, activation=activation, gate_first=gate_first, **OPTIONS)
        expected = composed_gated_rows(*wide, norm, activation, gate_first, 0.2, 0.7)
        assert y.dtype == dtype and y.is_contiguous()
        arriving = torch.randn_like(expected).to(dtype)
        ours = torch.autograd.grad(y, [x for x in given if x is not None], arriving)
        theirs = torch.autograd.grad(expected, [x for x in wide if x is not None], arriving.double())
        for a, b in zip((y, *ours), (expected, *theirs), strict=True):
            a, b = a.detach().double(), b.detach()
            assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def test_a_gate_alone():
    gate = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    options = {"activation": "log_sigmoid", "factor": 1 / 16}
    torch.testing.assert_close(gated_rows(None, gate, **options), torch.nn.functional.logsigmoid(gate) / 16)
    assert torch.autograd.gradcheck(lambda x: gated_rows(None, x, **options), (gate,))
    assert torch.autograd.gradgradcheck(lambda x: gated_rows(None, x, **options), (gate,))


def test_any_strides_shapes_and_dtypes():
    x, gate, weight = torch.randn(5, 3, 2), torch.randn(2, 5, 1), torch.randn(3).bfloat16()
    turned, repeated = x.movedim(0, -1)[:, :, :3].movedim(0, 1), gate.movedim(1, 1).expand(2, 5, 3)[:, :3]
    y = gated_rows(turned, repeated, weight, norm="rms")
    torch.testing.assert_close(y, composed_gated_rows(turned, repeated, weight.float(), "rms", "silu", False, 0.0, 1.0))
    assert y.dtype == torch.float32
    for shape in ((0, 4), (3, 0), (2, 0, 4), (1,), (1, 1)):
        x = torch.randn(shape, requires_grad=True)
        weight = torch.ones(shape[-1], requires_grad=True)
        y = gated_rows(x, x.detach(), weight, norm="rms", eps=1.0)
        y.sum().backward()
        assert y.shape == shape and x.grad.shape == shape and weight.grad.shape == weight.shape
        assert gated_rows(x, x).shape == shape


def test_threads_do_not_change_bits():
    given = tensors("rms", "silu", torch.float32, shape=(3, 100, 4, 37), weight=(4, 37))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y = gated_rows(*given, norm="rms", eps=1e-6)
            found.append((y, *torch.autograd.grad(y.square().sum(), given)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_operator():
    for norm, weight in (("none", None), ("rms", torch.randn(4, requires_grad=True))):
        x, gate = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
        torch.library.opcheck(torch.ops.heed.gated_rows.default, (x, gate, weight, norm, "silu", True, 1e-6, 1.0))
    x, gate = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    compiled = torch.compile(lambda x: gated_rows(x, gate, norm="rms"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), gated_rows(x, gate, norm="rms"))
    assert torch.equal(torch.func.vmap(lambda x, y: gated_rows(x, y))(x, gate), gated_rows(x, gate))
    meta = gated_rows(x.detach().to("meta"), gate.to("meta"), norm="rms")
    assert meta.is_meta and meta.shape == x.shape


def test_errors_name_the_argument():
    x = torch.randn(2, 4)
    for given, options, message in (
            ((x, torch.randn(2, 3)), {}, r"gated_rows: gate has shape \[2,3\], expected \[2,4\]"),
            ((x, None, torch.randn(3)), {"norm": "rms"}, r"gated_rows: weight has shape \[3\], expected \[4\]"),
            ((x, None, torch.randn(4)), {}, "gated_rows: weight is given without a norm"),
            ((None, x), {"norm": "rms"}, "gated_rows: x is absent"),
            ((x,), {"norm": "layer"}, "gated_rows: norm is 'layer', expected"),
            ((x, x), {"activation": "tanh"}, "gated_rows: activation is 'tanh', expected"),
            ((x,), {"norm": "rms", "eps": -1.0}, "gated_rows: eps is -1"),
            ((x.int(),), {}, "gated_rows: x has dtype")):
        with pytest.raises(InvalidArgument, match=message):
            gated_rows(*given, **options)


def test_token_shift():
    x, first, mix = (torch.randn(*sizes, dtype=torch.float64, requires_grad=True)
                     for sizes in ((2, 4, 5), (2, 5), (3, 5)))
    for given in ((x, first, mix), (x, None, mix)):
        inputs = [tensor for tensor in given if tensor is not None]

        def function(x, *rest):
            return token_shift(x, *rest) if len(rest) == 2 else token_shift(x, None, *rest)

        y, expected = function(*inputs), composed_token_shift(*given)
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)
        torch.library.opcheck(torch.ops.heed.token_shift.default, given)
        narrow = [None if tensor is None else tensor.detach().bfloat16() for tensor in given]
        found = token_shift(*narrow)
        assert found.dtype == torch.bfloat16
        of_rounded = composed_token_shift(*(None if tensor is None else tensor.double() for tensor in narrow))
        torch.testing.assert_close(found.double(), of_rounded, rtol=2**-8, atol=1e-6)
    turned = torch.randn(2, 5, 4).transpose(1, 2)
    mixes = torch.randn(3, 5)
    torch.testing.assert_close(token_shift(turned, None, mixes), composed_token_shift(turned, None, mixes))
    for shape in ((0, 4, 5), (2, 0, 5), (2, 4, 0)):
        x, first = torch.randn(shape, requires_grad=True), torch.randn(shape[0], shape[2], requires_grad=True)
        mix = torch.randn(2, shape[2], requires_grad=True)
        token_shift(x, first, mix).sum().backward()
        assert not (first.grad.any() or mix.grad.any())
    with pytest.raises(InvalidArgument, match=r"token_shift: mix has shape \[3,4\], expected \[3,5\]"):
        token_shift(turned, None, mixes[:, :4])
