# Scans in heed.torch: bits of NumPy's, gradients, PyTorch's checks of operators.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scans import (  # noqa: E402
    DESCRIPTIONS, NAMES, SIZES, arguments, arrays_of, at_tokens, close_enough, of_each, output_at, state_of,
)

import heed  # noqa: E402
import heed.torch  # noqa: E402

SETTINGS = {"selective_scan": {"delta_softplus": True}, "rg_lru": {"c": 4.0}, "hgrn": {},
            "s4d": {"discretization": "bilinear", "method": "auto"}, "h3": {"method": "auto"}}
each = pytest.mark.parametrize("name", NAMES)


def tensors(name, dtype=torch.float64, **options):
    values = {key: torch.from_numpy(x).to(dtype) for key, x in arguments(name, **options).items()}
    state = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = {key: x for key, x in options.items() if key in SIZES}
    return values, of_each(lambda x: torch.from_numpy(x).to(state), state_of(name, **sizes))


def function(name):
    return getattr(heed.torch, name)


def channels_last(x):
    return x.swapaxes(-1, -2).contiguous().swapaxes(-1, -2) if x.dim() > 2 else x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@each
def test_bits_are_those_of_numpy(name, dtype):
    values, initial = tensors(name, dtype, D=34, T=50)
    options = {"return_state": True, "lengths": [50, 33], **SETTINGS[name]}
    o, state = function(name)(**values, initial_state=initial, **options)
    arrays = {key: x.numpy() for key, x in values.items()}
    expected, last = getattr(heed, name)(**arrays, initial_state=of_each(torch.Tensor.numpy, initial), **options)
    assert o.dtype == dtype and np.array_equal(o.numpy(), expected)
    assert type(state) is type(of_each(torch.from_numpy, last))
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(arrays_of(state), arrays_of(last), strict=True))


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"lengths": [9, 2], "starts": [2, 0]}])
@each
def test_gradcheck_with_states(name, options):
    for rank in (2, 3, 4) if name == "selective_scan" else (None,):
        values, initial = tensors(name, rank=rank, D=4, T=9, N=3)
        for change in (lambda x: x, channels_last):
            leaves = [change(x).detach().requires_grad_() for x in (*values.values(), *arrays_of(initial))]

            def run(*leaves):
                state = iter(leaves[len(values):])
                given = dict(zip(values, leaves)) | {"initial_state": of_each(lambda x: next(state), initial)}
                o, last = function(name)(**given, return_state=True, **SETTINGS[name], **options)
                return o, *arrays_of(last)

            assert torch.autograd.gradcheck(run, leaves, atol=1e-6, rtol=1e-5)


@each
def test_only_what_needs_a_gradient_gets_one(name):
    values, initial = tensors(name)
    last = list(values)[-1]
    values[last].requires_grad_()
    o, state = function(name)(**values, initial_state=initial, return_state=True)
    (gradient,) = torch.autograd.grad(o.sum(), values[last])
    assert gradient.shape == values[last].shape
    state = function(name)(**values, initial_state=of_each(torch.Tensor.requires_grad_, initial), return_state=True)[1]
    last = arrays_of(initial)[-1]
    (gradient,) = torch.autograd.grad(arrays_of(state)[-1].sum(), last)  # o has no gradient
    assert gradient.abs().min() > 0
    with torch.no_grad():
        assert not function(name)(**values).requires_grad


@each
def test_opcheck(name):
    operator = getattr(torch.ops.heed, name).default
    values, initial = tensors(name, D=4, T=9)
    leaves = [x.requires_grad_() for x in values.values()]
    settings = list(SETTINGS[name].values())
    required = len(leaves) - len(DESCRIPTIONS[name]["optional"])
    torch.library.opcheck(operator, tuple(leaves[:required]))
    torch.library.opcheck(operator, (*leaves, *settings, *(x.requires_grad_() for x in arrays_of(initial))))
    values, _ = tensors(name, B=1, D=4, T=9)
    leaves = [channels_last(x).detach().requires_grad_() for x in values.values()]
    torch.library.opcheck(operator, (*leaves, *settings, *arrays_of(initial), None, None, torch.tensor([0, 4, 9])))


@each
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()  # graphs of other mechanisms count against a limit

    def run(values, initial):
        return function(name)(**values, initial_state=initial, return_state=True, **SETTINGS[name])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for change in (lambda x: x, channels_last):
        results = []
        for f in (compiled, run):
            values, initial = tensors(name)
            leaves = {key: change(x).requires_grad_() for key, x in values.items()}
            o, state = f(leaves, of_each(torch.Tensor.requires_grad_, initial))
            states = arrays_of(state)
            (o.square().sum() + sum(x.square().sum() for x in states)).backward()
            results.append((o, *states, *(x.grad for x in (*arrays_of(initial), *leaves.values()))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@each
def test_results_lie_as_the_input_does(name):
    values, _ = tensors(name, torch.float32)
    first = next(iter(values))
    last = {key: channels_last(x).requires_grad_() for key, x in values.items()}
    o = function(name)(**last)
    assert o.stride() == last[first].stride() and torch.equal(o, function(name)(**values))
    o.sum().backward()
    assert last[first].grad.stride() == last[first].stride()


@each
def test_autocast_and_errors(name):
    values, _ = tensors(name, torch.float32)
    first = next(iter(values))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = function(name)(**values)
        assert o.dtype == torch.bfloat16
    rounded = {key: x.bfloat16() if x.dim() > 2 else x for key, x in values.items()}
    assert torch.equal(o, function(name)(**rounded))
    with pytest.raises(heed.InvalidArgument, match=rf"{name}: lengths\[0\] is 22, expected 0 to T = 21"):
        function(name)(**values, lengths=[22, 1])
    with pytest.raises(heed.InvalidArgument, match=f"{name}: {first} has shape"):
        function(name)(**values | {first: values[first][0]})
    with pytest.raises(TypeError, match="nonsense"):
        function(name)(**values, nonsense=1)
    with pytest.raises(TypeError, match=first):
        function(name)()


@each
def test_steps_update_tensors_in_place(name):
    values, initial = tensors(name, torch.float32)
    whole, last = function(name)(**values, initial_state=initial, return_state=True)
    _, state = function(name)(**at_tokens(name, values, slice(20)), initial_state=initial, return_state=True)
    token = at_tokens(name, values, 20)
    o = getattr(heed.torch, f"{name}_step")(**token, state=state)
    torch.testing.assert_close(o, output_at(name, whole, 20), **close_enough(name))
    for a, b in zip(arrays_of(state), arrays_of(last), strict=True):
        torch.testing.assert_close(a, b, **close_enough(name))
