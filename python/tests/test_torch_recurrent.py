# heed.torch's recurrent mechanisms: bits of NumPy's, gradients, states, PyTorch's checks of operators.
import fresh
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mechanisms  # noqa: E402
from mechanisms import DESCRIPTIONS, NAMES, OPTIONAL, WITH_STATE, features, state_shape  # noqa: E402

import heed  # noqa: E402
import heed.torch  # noqa: E402

SMALL = {"B": 2, "T": 9, "H": 1, "HV": 2, "K": 3, "V": 4}


def arguments(name, dtype=torch.float64, **sizes):
    """Inputs by name, in order."""
    arrays = mechanisms.arguments(name, **(SMALL | sizes)).items()
    return {key: torch.from_numpy(x) if x.dtype == bool else torch.from_numpy(x).to(dtype) for key, x in arrays}


def leaves(values):
    """Floats that want gradients."""
    return {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in values.items()}


def run(name, values, *more, step=False, **options):
    """A mechanism that a normaliser of signed features would spoil is tested with positive features of q and k."""
    options |= {key: x for key, x in values.items() if key in OPTIONAL[name]}
    positional = (x for key, x in values.items() if key not in OPTIONAL[name])
    return getattr(heed.torch, name + "_step" * step)(*positional, *more, **options)


def initial(name):
    state = torch.randn(state_shape(name, 2, 2, 3, 4), dtype=torch.float64)
    if not DESCRIPTIONS[name]["settings"].get("normalize"):
        return state
    return state, torch.rand(2, 2, features(name, 3), dtype=torch.float64) + 3


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bits_are_those_of_numpy(name, dtype):
    values = arguments(name, dtype, T=80, K=17, V=33)
    keywords = {"return_state": True, "lengths": [80, 33]}
    o, state = run(name, values, **keywords)
    arrays = {key: x.numpy() for key, x in values.items()}
    keywords |= {key: arrays.pop(key) for key in OPTIONAL[name]}
    expected, last = getattr(heed, name)(*arrays.values(), **keywords)
    assert o.dtype == dtype and np.array_equal(o.numpy(), expected)
    for x, y in zip(state if isinstance(state, tuple) else (state,), last if isinstance(last, tuple) else (last,)):
        assert np.array_equal(x.numpy(), y)


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("options", [{}, {"reverse": True, "scale": 0.6}, {"lengths": [9, 5], "starts": [2, 0]}])
def test_gradcheck_with_states(name, options):
    values = arguments(name)
    states = initial(name)
    states = states if isinstance(states, tuple) else (states,)
    tensors = [x.requires_grad_() for x in (*values.values(), *states)]

    def function(*tensors):
        own = dict(zip(values, tensors))
        state = tensors[len(values):]
        o, last = run(name, own, initial_state=state if len(state) > 1 else state[0], return_state=True, **options)
        return (o, *last) if isinstance(last, tuple) else (o, last)

    assert torch.autograd.gradcheck(function, tensors, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_needs_a_gradient_gets_one(name):
    values = arguments(name)
    q = values[DESCRIPTIONS[name]["query"]].requires_grad_()
    (dq,) = torch.autograd.grad(run(name, values).sum(), q)
    assert dq.shape == q.shape
    with torch.no_grad():
        assert not run(name, values).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    values = arguments(name)
    inputs = tuple(leaves(values).values())
    torch.library.opcheck(getattr(torch.ops.heed, name).default, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name):
    values = arguments(name)
    torch.compiler.reset()  # graphs of other mechanisms would count as recompilations
    state = {"return_state": True} if name in WITH_STATE else {}
    compiled = torch.compile(
        lambda x: run(name, x, **state)[0] if state else run(name, x), fullgraph=True, backend="aot_eager"
    )
    ours, theirs = leaves(values), leaves(values)
    a, b = compiled(ours), run(name, theirs)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for key in values:
        assert not ours[key].requires_grad or torch.equal(ours[key].grad, theirs[key].grad), key


@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_errors(name):
    values = arguments(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(name, values).dtype == torch.bfloat16
    with pytest.raises(heed.InvalidArgument, match=rf"{name}: lengths\[0\] is 10, expected 0 to T = 9"):
        run(name, values, lengths=[10, 1])
    with pytest.raises(TypeError, match="nonsense"):
        run(name, values, nonsense=1)
    query = DESCRIPTIONS[name]["query"]
    with pytest.raises(heed.InvalidArgument, match=f"{name}: {query} has shape"):
        run(name, values | {query: values[query][0]})


@pytest.mark.parametrize("name", WITH_STATE)
def test_steps_update_tensors_in_place(name):
    values = arguments(name, torch.float32)
    whole, last = run(name, values, return_state=True)
    _, state = run(name, mechanisms.at_tokens(values, slice(8)), return_state=True)
    token = {key: x.contiguous() for key, x in mechanisms.at_tokens(values, 8).items()}
    o = run(name, token, state, step=True)
    torch.testing.assert_close(o, whole[:, 8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


GATED = [name for name in WITH_STATE if "log_decay" in DESCRIPTIONS[name]["inputs"]
         and "log_decay" not in OPTIONAL[name]]


@pytest.mark.parametrize("name", GATED)
def test_checks_reach_pytorch(name):
    values = arguments(name)
    values["log_decay"] = -values["log_decay"].abs()
    values["log_decay"].view(-1)[-1] = 0.5
    run(name, values)
    heed.set_checks(True)
    try:
        with pytest.raises(heed.InvalidArgument, match=f"{name}: log_decay has an element 0.5, expected <= 0"):
            run(name, values)
    finally:
        heed.set_checks(False)


FACTORS = """
import sys, warnings
import numpy as np, torch, heed, heed.torch
x = np.ones((1, 40, 2, 4), "f4")
decay = np.full({shape}, 0.9, "f4")
calls = {{
    "numpy": lambda: heed.{name}(x, x, x, decay),
    "torch": lambda: heed.torch.{name}(*map(torch.from_numpy, (x, x, x, decay))),
    "step": lambda: heed.{name}_step(*(a[:, 0].copy() for a in (x, x, x, decay)), np.zeros((1, 2, 4, 4), "f4")),
}}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        calls[sys.argv[1]]()
assert len(seen) == 1, seen
text = str(seen[0].message)
assert "{name}" in text and "log_decay" in text and "are positive" in text and "logarithms" in text, text
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    decay = -decay
    for call in calls.values():
        call()
assert not seen
"""


@pytest.mark.parametrize("door", ["numpy", "torch", "step"])
@pytest.mark.parametrize("name, shape", [("gla", "(1, 40, 2, 4)"), ("simple_gla", "(1, 40, 2)")])
def test_factors_for_logarithms_are_reported_once(name, shape, door):
    program = FACTORS.format(name=name, shape=shape)
    result = fresh.python(program, door)
    assert result.returncode == 0, result.stderr


def test_gradcheck_without_states():
    values = leaves(arguments("efficient_attention"))
    mask = values.pop("kv_mask")
    function = lambda *tensors: run("efficient_attention", dict(zip(values, tensors)) | {"kv_mask": mask})  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(values.values()), atol=1e-6, rtol=1e-4)
    with pytest.raises(TypeError, match="return_state"):
        heed.torch.efficient_attention(*values.values(), return_state=True)


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# A mechanism whose last state is the exponent of the others: its inputs, those states, its options.
RELATIVE = {
    "rwkv4": lambda: ([random(2, 5, 3, seed=1), random(2, 5, 3, seed=2), -random(3, seed=3).abs(), random(3, seed=4)],
                      [random(2, 3, seed=5), random(2, 3, seed=6).abs() + 0.5, random(2, 3, seed=7)], {}),
    "performer": lambda: ([random(2, 5, 3, 4, seed=i) for i in (1, 2, 3)] + [random(6, 4, seed=4)],
                          [random(2, 3, 6, 4, seed=5), random(2, 3, 6, seed=6).abs() + 0.5, random(2, 3, seed=7)],
                          {"causal": True}),
    "mlstm": lambda: ([random(2, 5, 3, 4, seed=i) for i in (1, 2, 3)] + [random(2, 5, 3, seed=i) for i in (4, 8)],
                      [random(2, 3, 4, 4, seed=5), random(2, 3, 4, seed=6), random(2, 3, seed=7)], {"eps": 0.0}),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_an_initial_maximum_has_the_gradient_of_a_free_argument(name):
    inputs, states, options = RELATIVE[name]()
    values = [x.requires_grad_() for x in (*inputs, *states)]
    function = getattr(heed.torch, name)

    def call(*tensors):
        """Outputs, and the sums that the last state represents, with which the next call continues."""
        *given, a, b, c = tensors
        o, (*sums, exponent) = function(*given, **options, initial_state=(a, b, c), return_state=True)
        factor = torch.exp(exponent)
        return o, *(x * factor[(..., *[None] * (x.dim() - factor.dim()))] for x in sums)

    assert torch.autograd.gradcheck(call, values)
    o = function(*values[:-3], **options, initial_state=values[-3:])
    plain = function(*values[:-3], **options, initial_state=[x.detach() for x in values[-3:]])
    assert torch.equal(o, plain)  # to the bit


def test_before_any_token_a_maximum_has_no_gradient():
    inputs, states, _ = RELATIVE["rwkv4"]()
    nothing = [torch.zeros(2, 3), torch.zeros(2, 3), torch.full((2, 3), -torch.inf)]
    nothing = [x.double().requires_grad_() for x in nothing]
    heed.torch.rwkv4(*inputs, initial_state=nothing).sum().backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in nothing) and not nothing[2].grad.any()


def test_performers_without_a_maximum_have_no_gradient_of_it():
    inputs, states, _ = RELATIVE["performer"]()
    exponent = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    o = heed.torch.performer(*inputs, causal=True, kernel="relu",
                             initial_state=(states[0].requires_grad_(), states[1], exponent))
    assert torch.autograd.grad(o.sum(), exponent, allow_unused=True) == (None,)
