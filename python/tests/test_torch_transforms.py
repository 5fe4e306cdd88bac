# PyTorch's transforms of every operator of heed are right or refused in a sentence; no gradient is silently zero.
import pytest

torch = pytest.importorskip("torch")

import mechanisms  # noqa: E402
import scans  # noqa: E402
from mechanisms import NAMES, OPTIONAL, WITH_STATE  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import heed.torch  # noqa: E402
from heed.torch._layer_rows import gated_rows, token_shift  # noqa: E402

SMALL = {"B": 2, "T": 9, "H": 1, "HV": 2, "K": 3, "V": 4}


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mechanism(name):
    arrays = mechanisms.arguments(name, **SMALL)
    tensors = {key: torch.from_numpy(x) for key, x in arrays.items()}
    floats = [key for key, x in tensors.items() if x.is_floating_point()]

    def function(*given):
        values = tensors | dict(zip(floats, given))
        positional = [x for key, x in values.items() if key not in OPTIONAL[name]]
        return getattr(heed.torch, name)(*positional, **{key: values[key] for key in OPTIONAL[name] if key in values})

    return function, [tensors[key].double() for key in floats]


def scan(name):
    arrays = scans.arguments(name, D=4, T=5, N=3, rank=3 if name == "selective_scan" else None)
    return lambda *given: getattr(heed.torch, name)(**dict(zip(arrays, given))), [
        torch.from_numpy(x) for x in arrays.values()]


def case(name):
    """(function of tensors, its tensors)."""
    if name in NAMES:
        return mechanism(name)
    if name in scans.DESCRIPTIONS:
        return scan(name)
    q, k, v = normal(2, 5, 2, 4), normal(2, 6, 1, 4, seed=2), normal(2, 6, 1, 3, seed=3)
    positions = torch.arange(5)
    return {
        "attention": (lambda *x: heed.torch.attention(*x, causal=True, window=(3, 1)), [q, k, v]),
        "causal_conv1d": (lambda *x: heed.torch.causal_conv1d(*x, activation="silu"),
                          [normal(2, 3, 7), normal(3, 4), normal(3)]),
        "gated_rows": (lambda *x: gated_rows(*x, norm="rms", eps=0.1), [q, normal(2, 5, 2, 4, seed=2), normal(4)]),
        "compressed_attention": (lambda *x: heed.torch.compressed_attention(*x[:5], sinks=x[5], ratio=2, window=2),
                                 [normal(2, 5, 2, 4), k, v, normal(2, 3, 1, 4), normal(2, 3, 1, 3), normal(2)]),
        "deltaformer": (heed.torch.deltaformer,
                        [q, normal(2, 5, 1, 4, seed=2), normal(2, 5, 1, 3, seed=3), normal(2, 5, 1),
                         normal(2, 5, 1, 4, seed=4)]),
        "linformer": (heed.torch.linformer, [normal(2, 6, 1, 4), k, v, normal(3, 6), normal(3, 6, seed=4)]),
        "longformer": (lambda *x: heed.torch.longformer(*x, window=2, tokens=[1]),
                       [normal(2, 6, 2, 4), k, v, normal(2, 6, 2, 4, seed=4), normal(2, 6, 1, 4, seed=5),
                        normal(2, 6, 1, 3, seed=6)]),
        "attention_residual": (heed.torch.attention_residual, [normal(4), normal(3, 2, 5, 4), normal(4, seed=2)]),
        "log_linear_attention": (lambda *x: heed.torch.log_linear_attention(*x[:4], log_decay=-x[4].exp()),
                                 [q, normal(2, 5, 2, 4, seed=2), normal(2, 5, 4, 3, seed=3), normal(2, 5, 4, 4),
                                  normal(2, 5, 4)]),
        "mesa": (lambda *x: heed.torch.mesa(*x[:3], x[3].square(), x[4].exp(), log_decay=-x[5].exp()),
                 [q, normal(2, 5, 2, 4, seed=2), normal(2, 5, 2, 3, seed=3), normal(2, 5, 2), normal(2, 4),
                  normal(2, 5, 2, seed=4)]),
        "merge_linear": (lambda o, lse, num, den, gate: heed.torch.merge_linear(
            o, lse, num, den.exp(), gate=gate.exp()),
                         [q, normal(2, 2, 5), normal(2, 5, 2, 4, seed=5), normal(2, 5, 2), normal(2)]),
        "nsa": (lambda *x: heed.torch.nsa(*x[:4], compressed=x[4:], block=2, count=4, window=2),
                [normal(2, 9, 2, 4), normal(2, 9, 1, 4), normal(2, 9, 1, 3), normal(2, 9, 2, 3), normal(2, 4, 1, 4),
                 normal(2, 4, 1, 3)]),
        "parallax_attention": (lambda *x: heed.torch.parallax_attention(*x, window=4),
                               [q, normal(2, 5, 2, 4, seed=4), k, v]),
        "path_attention": (lambda *x: heed.torch.path_attention(*x[:3], 0.3 * x[3], x[4].square(), -x[5].exp()),
                           [q, normal(2, 5, 1, 4, seed=2), normal(2, 5, 1, 3, seed=3), normal(2, 5, 1, 4, seed=4),
                            normal(2, 5, 1), normal(2, 5, 2)]),
        "wall_attention": (lambda *x: heed.torch.wall_attention(*x[:3], -x[3].square(), -x[4].exp()),
                           [q, normal(2, 5, 1, 4, seed=2), normal(2, 5, 1, 3, seed=3), normal(2, 5, 2, 4, seed=4),
                            normal(2, 5, 2)]),
        "rotary": (lambda x: heed.torch.rotary(x, positions, interleaved=True), [q]),
        "t5_bias": (lambda x: heed.torch.t5_bias(x, 4, 6, bidirectional=True), [normal(8, 2)]),
        "titans": (lambda *x: heed.torch.titans(*x, mini_batch=3, eps=0.1),
                   [q, normal(2, 5, 2, 4, seed=2), normal(2, 5, 2, 4, seed=3), normal(2, 4), normal(2, 4, seed=2),
                    *(0.1 * normal(2, 5, 2, seed=i) for i in (4, 5, 6))]),
        "ttt_linear": (lambda *x: heed.torch.ttt_linear(*x[:6], lr=x[6], mini_batch=3, eps=0.1),
                       [q, normal(2, 5, 2, 4, seed=2), normal(2, 5, 2, 4, seed=3), normal(2, 4), normal(2, 4, seed=2),
                        0.1 * normal(2, 5, 2), normal(2, 5, 2, seed=4)]),
        "token_shift": (token_shift, [normal(2, 5, 3), normal(2, 3), normal(2, 3, seed=2)]),
    }[name]


OPERATORS = [*NAMES, *scans.DESCRIPTIONS, "attention", "attention_residual", "causal_conv1d",
             "compressed_attention", "deltaformer", "gated_rows", "linformer", "log_linear_attention", "longformer",
             "merge_linear", "mesa", "nsa", "parallax_attention", "path_attention", "rotary", "t5_bias", "titans",
             "token_shift", "ttt_linear", "wall_attention"]
LINEAR = ["rotary", "t5_bias"]  # whose derivative of forward mode is the operator itself


def test_every_operator_is_here():
    ours = {x.split("::")[1].split(".")[0] for x in torch._C._dispatch_get_all_op_names() if x.startswith("heed::")}
    ours = {x.removesuffix("_backward").removesuffix("_derivatives").removesuffix("_solve") for x in ours
            if "cache_" not in x}
    assert ours == set(OPERATORS)


def gradients(function, inputs, *more):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    function(*leaves, *more).square().sum().backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_derivatives_are_right(name):
    function, inputs = case(name)
    tangents = [normal(*x.shape, seed=i) for i, x in enumerate(inputs)]
    if name in LINEAR:
        assert torch.allclose(torch.func.jvp(function, tuple(inputs), tuple(tangents))[1], function(*tangents))
        return
    # <u, J t> = <J^T u, t>
    inputs, tangents = [x.double() for x in inputs], [x.double() for x in tangents]
    o, along = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    u = normal(*o.shape, seed=99).double()
    back = torch.func.grad(lambda *x: (function(*x) * u).sum(), argnums=tuple(range(len(inputs))))(*inputs)
    assert torch.isclose((u * along).sum(), sum((x * t).sum() for x, t in zip(back, tangents)), rtol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_functional_gradients_are_those_of_autograd(name):
    function, inputs = case(name)
    expected = gradients(function, inputs)
    got = torch.func.grad(lambda *x: function(*x).square().sum(), argnums=tuple(range(len(inputs))))(*inputs)
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_is_a_loop(name):
    function, inputs = case(name)
    stacked = [torch.stack([x, 0.5 * x, x]) for x in inputs]
    slices = list(zip(*stacked))
    got = torch.vmap(function)(*stacked)
    assert torch.equal(got, torch.stack([function(*x) for x in slices]))
    one = torch.vmap(function, in_dims=(-1, *(None for _ in inputs[1:])))(stacked[0].movedim(0, -1), *inputs[1:])
    assert torch.equal(one, torch.stack([function(x, *inputs[1:]) for x in stacked[0]]))
    got = torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum()))(*stacked)
    assert torch.allclose(got, torch.stack([gradients(function, x)[0] for x in slices]), rtol=1e-12, atol=1e-12)
    none = torch.vmap(function)(*(x[:0] for x in stacked))
    assert none.shape == (0, *function(*inputs).shape)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute(name, reentrant):
    function, inputs = case(name)
    expected = gradients(function, inputs)
    got = gradients(lambda *x: checkpoint(function, *x, use_reentrant=reentrant), inputs)
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_states(name, reentrant):
    q, *rest = mechanism(name)[1]

    def chained(*x):
        """Halves of a sequence, the state handed over, as a long sequence is trained."""
        arrays = mechanisms.arguments(name, **SMALL)
        values = {key: torch.from_numpy(array) for key, array in arrays.items()}
        values |= dict(zip([key for key, v in values.items() if v.is_floating_point()], x))
        state, outputs = None, []
        for part in (slice(0, 4), slice(4, 9)):
            own = mechanisms.at_tokens(values, part)
            positional = [v for key, v in own.items() if key not in OPTIONAL[name]]
            keywords = {key: own[key] for key in OPTIONAL[name] if key in own}
            o, state = getattr(heed.torch, name)(
                *positional, initial_state=state, return_state=True, **keywords
            )
            outputs.append(o)
        return torch.cat(outputs, dim=1)

    expected = gradients(chained, [q, *rest])
    got = gradients(lambda *x: checkpoint(chained, *x, use_reentrant=reentrant), [q, *rest])
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)


# The backward passes of these keep their results.
@pytest.mark.parametrize("name", [x for x in OPERATORS if x not in (
    "attention", "compressed_attention", "deltaformer", "longformer", "parallax_attention", "path_attention",
    "wall_attention")])
def test_a_result_may_be_changed_in_place_before_backward(name):
    function, inputs = case(name)
    expected = gradients(lambda *x: 2 * function(*x), inputs)
    got = gradients(lambda *x: function(*x).mul_(2), inputs)
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)
