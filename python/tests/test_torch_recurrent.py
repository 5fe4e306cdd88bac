# heed.torch's recurrent mechanisms: bits of NumPy's, gradients, states, what PyTorch asks of an operator.
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402
from heed import _core  # noqa: E402

NAMES = sorted(_core._recurrent)


def arguments(name, dtype=torch.float64, B=2, T=9, H=1, HV=2, K=3, V=4, seed=1):
    """Inputs by name, in order; a mechanism that a normaliser of signed features would spoil is tested without."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "i": (B, T, HV, V)}
    values = {}
    for argument in _core._recurrent[name]["inputs"]:
        if argument == "log_decay":
            by_key = (B, T, HV, K) if name in ("gla", "hgrn2") else (B, T, HV)
            shape = (HV,) if name in ("retention", "lightning") else by_key
            values[argument] = -torch.empty(shape, dtype=dtype).exponential_(2, generator=generator)
        else:
            values[argument] = torch.randn(shapes[argument], dtype=dtype, generator=generator)
    return values


def run(name, values, **options):
    values = dict(values)
    if _core._recurrent[name]["decay_optional"]:
        options["log_decay"] = values.pop("log_decay")
    return getattr(heed.torch, name)(*values.values(), **options)


def initial(name, values, sequences=2):
    features = _core._recurrent[name]["features"](values["q"].shape[3])
    heads, width = list(values.values())[-1 if "v" not in values else list(values).index("v")].shape[2:]
    state = torch.randn(sequences, heads, features, width, dtype=torch.float64)
    if not _core._recurrent[name]["settings"].get("normalize"):
        return state
    return state, torch.rand(sequences, heads, features, dtype=torch.float64) + 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bits_are_those_of_numpy(name, dtype):
    values = arguments(name, dtype, T=80, K=17, V=33)
    keywords = {"return_state": True, "lengths": [80, 33]}
    o, state = run(name, values, **keywords)
    arrays = {key: x.numpy() for key, x in values.items()}
    if _core._recurrent[name]["decay_optional"]:
        keywords["log_decay"] = arrays.pop("log_decay")
    expected, last = getattr(heed, name)(*arrays.values(), **keywords)
    assert o.dtype == dtype and np.array_equal(o.numpy(), expected)
    for x, y in zip(state if isinstance(state, tuple) else (state,), last if isinstance(last, tuple) else (last,)):
        assert np.array_equal(x.numpy(), y)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"reverse": True, "scale": 0.6}, {"lengths": [9, 5], "starts": [2, 0]}])
def test_gradcheck_with_states(name, options):
    values = arguments(name)
    states = initial(name, values)
    states = states if isinstance(states, tuple) else (states,)
    leaves = [x.requires_grad_() for x in (*values.values(), *states)]

    def function(*tensors):
        own = dict(zip(values, tensors))
        state = tensors[len(values):]
        o, last = run(name, own, initial_state=state if len(state) > 1 else state[0], return_state=True, **options)
        return (o, *last) if isinstance(last, tuple) else (o, last)

    assert torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_needs_a_gradient_gets_one_and_there_is_no_second(name):
    values = arguments(name)
    q = values["q"].requires_grad_()
    o = run(name, values)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(heed.Unsupported, match=f"{name}: a second derivative"):
        dq.sum().backward()
    with torch.no_grad():
        assert not run(name, values).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    values = arguments(name)
    inputs = tuple(x.requires_grad_() for x in values.values())
    torch.library.opcheck(getattr(torch.ops.heed, name).default, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name):
    values = arguments(name)
    compiled = torch.compile(lambda x: run(name, x, return_state=True)[0], fullgraph=True, backend="aot_eager")
    ours = {key: x.clone().requires_grad_() for key, x in values.items()}
    theirs = {key: x.clone().requires_grad_() for key, x in values.items()}
    a, b = compiled(ours), run(name, theirs)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for key in values:
        assert torch.equal(ours[key].grad, theirs[key].grad), key


@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_errors(name):
    values = arguments(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(name, values).dtype == torch.bfloat16
    with pytest.raises(heed.InvalidArgument, match=rf"{name}: lengths\[0\] is 10, expected 0 to T = 9"):
        run(name, values, lengths=[10, 1])
    with pytest.raises(TypeError, match="nonsense"):
        run(name, values, nonsense=1)
    with pytest.raises(heed.InvalidArgument, match=f"{name}: q has shape"):
        run(name, dict(values, q=values["q"][0]))


@pytest.mark.parametrize("name", NAMES)
def test_steps_update_tensors_in_place(name):
    values = arguments(name, torch.float32)
    whole, last = run(name, values, return_state=True)
    first = {key: x[:, :8] if x.dim() > 1 else x for key, x in values.items()}
    _, state = run(name, first, return_state=True)
    token = {key: x[:, 8].contiguous() if x.dim() > 1 else x for key, x in values.items()}
    options = {}
    if _core._recurrent[name]["decay_optional"]:
        options["log_decay"] = token.pop("log_decay")
    o = getattr(heed.torch, f"{name}_step")(*token.values(), state, **options)
    torch.testing.assert_close(o, whole[:, 8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)
