# Second derivatives and forward mode of heed.torch's mechanisms: compositions against kernels, numerical checks.
import itertools
import os
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import heed.torch  # noqa: E402
from heed import _core  # noqa: E402
from heed.torch import _second_derivatives  # noqa: E402
from heed.torch._mechanisms import mechanisms  # noqa: E402

SIZES = {"B": 2, "T": 5, "H": 1, "HV": 2, "K": 2, "V": 3, "R": 3, "C": 7, "M": 4, "D": 2, "n": 2, "P": 3, "G": 1,
         "N": 2, "W": 3, "L": 3, "d": 2, "2": 2}
OWN = {"rwkv4": {"C": 3}, "ssd": {"H": 2}, "mamba3": {"K": 5, "P": 2, "R": 2}}
SEQUENCES = {
    "whole": {}, "one empty": {"lengths": [5, 0], "starts": [2, 0]}, "reverse": {"reverse": True},
    "reverse, starts": {"reverse": True, "lengths": [4, 3], "starts": [1, 2]}, "packed": {"cu_seqlens": [0, 3, 3, 5]},
}
# Settings with equations of their own.
SETTINGS = {
    "linear_attention": [{"feature_map": x} for x in ("elu1", "relu_sq", "exp", "softmax")] + [
        {"feature_map": "identity", "normalize": False}, {"causal": False}],
    "based": [{}, {"normalize": False}], "s4d": [{}, {"discretization": "bilinear"}],
    "performer": [{"causal": x, "kernel": y} for x in (True, False) for y in ("softmax", "relu")] + [{"scale": -0.4}],
    "ssd": [{}, {"dt_softplus": True}, {"dt_limit": [0.2, 0.4]}], "selective_scan": [{}, {"delta_softplus": True}],
    "causal_conv1d": [{}, {"activation": "silu"}],
}
NAMES = sorted(mechanisms)
RANDOM_CALLS = int(os.environ.get("HEED_TEST_CALLS", 10))


def tensor(name, argument, shape):
    x = torch.randn(shape, dtype=torch.float64)
    if argument in _core._mechanisms[name]["masks"]:
        return x < 0.7
    if argument.startswith("log_decay"):
        return -0.3 * x.exp()
    if argument in ("dt", "delta", "dt_bias", "delta_bias"):
        return 0.2 * x.abs() + 0.1
    if argument in ("beta", "beta_A", "erase", "write"):
        return x.sigmoid()
    if argument.startswith("log_"):
        return 0.3 * x - 1
    if argument == "A":
        return -x.abs() - 0.3
    if name == "rwkv7" and argument in "ab":
        return 0.4 * x
    return x / x.norm(dim=-1, keepdim=True) if argument == "k" and "beta" in mechanisms[name].inputs else x


def call(name, with_states=False, sizes=(), **options):
    """The arguments of a mechanism's operator, by name."""
    torch.manual_seed(1)
    mechanism, of = mechanisms[name], _core._mechanisms[name]
    sizes = SIZES | OWN.get(name, {}) | dict(sizes) | ({"B": 1} if "cu_seqlens" in options else {})
    inputs = [tensor(name, x, [sizes[axis] for axis in of["axes"][x].split("|")[0].replace("W - 1", "w").split(", ")])
              for x in mechanism.inputs]
    arguments = dict(zip(mechanism.names, mechanism.complete(tuple(inputs))))
    arguments |= {key: torch.tensor(x) if key in ("lengths", "starts", "cu_seqlens") else x
                  for key, x in options.items() if key in arguments}
    if with_states:
        _, *states = mechanism.new_results(tuple(arguments.values()))
        for state, like in zip(mechanism.states, states):
            x = torch.randn(like.shape, dtype=torch.float64)
            x = x.abs() + 1.5 if state.name in ("z", "den", "A") else x
            arguments[f"initial_{state.name}"] = x if like.dim() > 1 else None
    return arguments


def cases(name):
    mechanism = mechanisms[name]
    for (title, options), own in itertools.product(SEQUENCES.items(), SETTINGS.get(name, [{}])):
        if "reverse" in options and "reverse" not in mechanism.options:
            continue
        causal = own.get("causal", mechanism.settings.get("causal", True))
        for with_states in (False, True) if mechanism.states and causal else (False,):
            yield f"{title} {own} {'with' if with_states else 'without'} states", call(
                name, with_states, **own, **options)


def of_results(mechanism, results, o_alone=False):
    """The results that gradients arrive at."""
    results = results if isinstance(results, tuple) else (results,)
    results = results[: 1 if o_alone else None]
    return [x for i, x in enumerate(results)
            if i == 0 or (x is not None and x.dim() > 1 and mechanism.states[i - 1].has_gradient)]


def function_of(name, arguments):
    """The operator as a function of its differentiable tensors, and these. Final states that are relative to a maximum
    are left out: it counts as a constant, which a numerical derivative does not know."""
    mechanism = mechanisms[name]
    names = [mechanism.names[i] for i in mechanism.differentiable]
    names = [x for x in names if arguments[x] is not None]

    keywords = {x: arguments[x] for x in mechanism.options if x != "initial_state"}
    states = [f"initial_{state.name}" for state in mechanism.states]
    returns_state = bool(states) and arguments.get("causal", True)

    def function(*tensors):
        given = arguments | dict(zip(names, tensors))
        options = keywords | {x: given[x] for x in mechanism.inputs[mechanism.positional:]}
        initial = [given[x] for x in states if given[x] is not None]
        if returns_state:
            options |= {"return_state": True, "initial_state": initial[0] if len(initial) == 1 else initial or None}
        results = mechanism.call([given[x] for x in mechanism.inputs[: mechanism.positional]], options)
        o, state = results if returns_state else (results, ())
        results = (o, *(state if isinstance(state, tuple) else (state,)))
        return tuple(of_results(mechanism, results, mechanism.has_exponent))

    return function, [arguments[x].clone().requires_grad_() for x in names]


def check_composition(name, title, arguments):
    """o, the final states and all gradients are those of the kernels."""
    mechanism, values = mechanisms[name], list(arguments.values())
    results = mechanism.forward(*values)
    composed = _second_derivatives._composed(mechanism, arguments)
    for x, y in zip(of_results(mechanism, results), of_results(mechanism, composed), strict=True):
        torch.testing.assert_close(y, x, atol=1e-10, rtol=1e-10, msg=title)
    incoming = [torch.randn_like(x) for x in of_results(mechanism, results)]
    incoming += [None] * (mechanism.num_incoming - len(incoming))
    needed = [values[i] is not None for i in mechanism.differentiable]
    expected = mechanism.backward(*incoming, needed, *values)
    found = _second_derivatives.Gradients(mechanism, [*incoming, needed, *values])(*incoming, needed, *values)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, atol=1e-9, rtol=1e-9, msg=title)


@pytest.mark.parametrize("name", NAMES)
def test_compositions_are_what_kernels_compute(name):
    """In every way that sequences are given and with every setting."""
    for title, arguments in cases(name):
        check_composition(name, title, arguments)


def test_the_derivative_of_the_root_is_bounded_at_a_closed_gate():
    arguments = call("rg_lru")
    arguments["recurrence_gate"][:, 2] = -20  # 1 - exp(2 g) is about 1e-8, where sqrt has a derivative of 5000
    arguments["recurrence_gate"][:, 4] = -1000
    check_composition("rg_lru", "closed gates", arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"lengths": [3, 2], "reverse": True}], ids=str)
def test_gradgradcheck_and_forward_mode(name, options):
    with_states = bool(mechanisms[name].states) and name != "performer"
    own = {"causal": True} if name == "performer" else {}
    sizes = {"T": 3, "d": 1, "D": 1} if name == "h3" else {"T": 3}
    function, tensors = function_of(name, call(name, with_states, sizes, **own, **options))
    assert torch.autograd.gradgradcheck(function, tensors, atol=1e-6, rtol=1e-4, fast_mode=True)
    assert torch.autograd.gradcheck(function, tensors, atol=1e-6, rtol=1e-4, fast_mode=True, check_forward_ad=True,
                                    check_backward_ad=False)


@pytest.mark.parametrize("name", ["gla", "rwkv7", "hgrn"])
def test_recurrences_of_compositions_have_all_derivatives(name):
    """The equations hold for calls that compositions make: one head per value head, a scale of 1."""
    arguments = call(name, True, {"T": 3, "H": 1, "HV": 1, "B": 1})
    if "scale" in arguments:
        arguments["scale"] = 1.0
    assert _second_derivatives._is_plain(mechanisms[name], arguments)
    function, tensors = function_of(name, arguments)
    assert torch.autograd.gradgradcheck(function, tensors, atol=1e-6, rtol=1e-4)

    if name == "rwkv7":  # minutes
        return

    def gradients(*tensors):
        results = function(*tensors)
        return torch.autograd.grad(sum(x.square().sum() for x in results), tensors, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, tensors, atol=1e-5, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("name", ["linear_attention", "gla", "kda", "selective_scan", "ssd"])
def test_hessians_of_torch_func(name):
    function, tensors = function_of(name, call(name, sizes={"T": 3, "B": 1}))
    x, *others = (x.detach() for x in tensors)

    def loss(x):
        return function(x, *others)[0].sin().sum()

    forward_over_reverse = torch.func.hessian(loss)(x)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(x), forward_over_reverse)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, x), forward_over_reverse)
    assert forward_over_reverse.abs().max() > 1e-3


def test_a_transform_inside_another_sees_the_results_of_a_call():
    """Gradients of gradients reach what is computed from o, not only from the arguments."""
    function, (q, k, v) = function_of("linear_attention", call("linear_attention", normalize=False))
    q, k, v = q.detach(), k.detach(), v.detach()

    def squared(q):
        return torch.func.grad(lambda q: function(q, k, v)[0].square().sum())(q).square().sum()

    step = 1e-5 * torch.randn_like(q)
    expected = squared(q + step) - squared(q - step)
    assert torch.isclose(2 * (torch.func.grad(squared)(q) * step).sum(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_penalty_in_other_dtypes(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16).to(dtype).requires_grad_() for _ in range(3))
    beta = torch.rand(1, 40, 2).to(dtype).requires_grad_()
    keys = torch.nn.functional.normalize(k, dim=-1)

    def penalty(q, keys, v, beta):
        (dq,) = torch.autograd.grad(heed.torch.delta_rule(q, keys, v, beta).sum(), q, create_graph=True)
        return dq.float().square().mean()

    found = torch.autograd.grad(penalty(q, keys, v, beta), (v, beta))
    wide = [x.detach().double().requires_grad_() for x in (q, keys, v, beta)]
    expected = torch.autograd.grad(penalty(*wide).double(), wide[2:])
    for x, y in zip(found, expected):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=0.03, atol=0.02 * float(y.abs().max()))


@pytest.mark.parametrize("name, own", [
    ("linear_attention", {"feature_map": "identity", "normalize": False}), ("simple_gla", {}), ("gla", {}),
    ("delta_rule", {}), ("kda", {}), ("gdn2", {}), ("delta_product", {}), ("linear_attention", {}), ("mlstm", {}),
    ("rwkv6", {}), ("ssd", {})])
def test_equations_of_recurrences_have_derivatives(name, own):
    """Third derivatives, and second ones inside transforms of torch.func."""
    arguments = call(name, False, {"T": 3, "H": 1, "HV": 1, "B": 1}, **own)
    arguments |= {"log_decay_v": None} if name == "gla" else {}
    function, tensors = function_of(name, arguments)

    def gradients(*tensors):
        results = function(*tensors)
        return torch.autograd.grad(sum(x.square().sum() for x in results), tensors, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, tensors, atol=1e-5, rtol=1e-3, fast_mode=True)
    x, *others = (x.detach() for x in tensors)

    def penalty(x):
        return torch.func.grad(lambda x: function(x, *others)[0].sin().sum())(x).square().sum()

    batch = torch.stack([x, 0.5 * x])
    expected = torch.stack([torch.func.grad(penalty)(x) for x in batch])
    torch.testing.assert_close(torch.vmap(torch.func.grad(penalty))(batch), expected)
    step = 1e-5 * torch.randn_like(x)
    moved = (penalty(x + step) - penalty(x - step)) / 2
    torch.testing.assert_close((expected[0] * step).sum(), moved, rtol=1e-5, atol=1e-12)


RECURRENCES = {
    "linear_attention": [{"feature_map": "identity", "normalize": False}, {"normalize": False, "scale": -0.7},
                         {"scale": 0.5}],
    "based": [{}], "performer": [{"causal": True}], "retention": [{}], "simple_gla": [{"scale": 0.5}], "gla": [{}],
    "hgrn2": [{}], "mlstm": [{}], "rwkv5": [{"scale": 0.5}], "rwkv6": [{}], "ssd": [{}, {"dt_softplus": True}],
    "delta_rule": [{}], "gated_delta_rule": [{"scale": 0.5}], "kda": [{}], "gdn2": [{}], "comba": [{}],
    "delta_product": [{}], "selective_scan": [{}, {"delta_softplus": True}],
}


def backward_pass(name, arguments, with_states):
    """The arguments of a mechanism's backward operator, the places of those that depend on a call's tensors, and a
    direction of each of these tensors."""
    mechanism, values = mechanisms[name], list(arguments.values())
    results = of_results(mechanism, mechanism.forward(*values))
    incoming = [torch.randn_like(x) for x in (results if with_states else results[:1])]
    incoming += [None] * (mechanism.num_incoming - len(incoming))
    wanted = [values[i] is not None for i in mechanism.differentiable]
    places = [mechanism.num_incoming + 1 + i for i, want in zip(mechanism.differentiable, wanted) if want]
    variables = [i for i, x in enumerate(incoming) if x is not None] + places
    everything = [*incoming, wanted, *values]
    return everything, variables, [torch.randn_like(everything[i]) for i in places]


def check_equations(name, title, everything, variables, directions, moves, needs, monkeypatch):
    """The gradients of a backward pass by a recurrence's equations are those by the chain rule, with the directions at
    some places alone (`moves`), and some gradients alone (`needs`)."""

    def gradients(moving, needed):
        flags = [i in needed for i in range(len(everything))]
        along = [x if i in moving else None for i, x in enumerate(directions)]
        found = _second_derivatives.of_gradients(mechanisms[name], flags, along, everything)
        return {i: found.get(i) if found.get(i) is not None else torch.zeros_like(everything[i]) for i in needed}

    with torch.no_grad():
        for moving in moves:
            with monkeypatch.context() as patch:
                patch.setattr(_second_derivatives, "_ends_in_a_recurrence", lambda *_: False)
                expected = gradients(moving, variables)
            for needed in needs:
                for i, x in gradients(moving, needed).items():
                    torch.testing.assert_close(x, expected[i], atol=1e-10, rtol=1e-8,
                                               msg=lambda text: f"{title} {moving} {needed}: {i}: {text}")


def without_what_is_general(name, arguments, plain=False):
    """A call whose composition ends in a recurrence."""
    if name == "selective_scan":
        state = arguments["A"].shape[1]
        arguments |= {x: torch.randn(arguments["u"].shape[0], state, arguments["u"].shape[2], dtype=torch.float64)
                      for x in "BC"}
        arguments |= {"D": None, "z": None, "delta_bias": None} if plain else {}
    elif name == "gla":
        arguments["log_decay_v"] = None
    assert _second_derivatives._ends_in_a_recurrence(mechanisms[name], arguments) or torch.is_grad_enabled()
    return arguments


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("options", [{}, {"lengths": [4, 0], "starts": [1, 0], "reverse": True}], ids=str)
def test_equations_of_recurrences_are_those_of_compositions(name, options, monkeypatch):
    """For every direction alone, and every gradient alone."""
    for own, with_states in itertools.product(RECURRENCES[name], (False, True)):
        arguments = call(name, with_states, {"HV": 2, "H": 1 if options else 2}, **own, **options)
        everything, variables, directions = backward_pass(
            name, without_what_is_general(name, arguments, plain=not own), with_states)
        count = len(directions)
        title, given = f"{own} {with_states}", (everything, variables, directions)
        check_equations(name, title, *given, [{i} for i in range(count)], [variables], monkeypatch)
        check_equations(name, title, *given, [set(range(count)), {0, count - 1}], [[i] for i in variables], monkeypatch)


def test_equations_of_random_options(monkeypatch):
    """With gates that decay strongly and weakly."""
    for seed in range(RANDOM_CALLS):
        draw = random.Random(seed)
        name = draw.choice(sorted(RECURRENCES))
        sizes = {axis: draw.randint(1, 4) for axis in ("K", "V", "R", "N", "P", "D", "n")} | {
            "T": draw.randint(1, 9), "B": draw.randint(1, 3), "H": draw.choice((1, 2)), "G": 1, "HV": 2}
        tokens, batch = sizes["T"], sizes["B"]
        options = dict(draw.choice(RECURRENCES[name])) | {"reverse": draw.random() < 0.3}
        how = draw.choice(("whole", "lengths", "packed"))
        if how == "lengths":
            starts = [draw.randint(0, tokens) for _ in range(batch)]
            options |= {"starts": starts, "lengths": [draw.randint(x, tokens) for x in starts]}
        elif how == "packed":
            options["cu_seqlens"] = [0, *sorted(draw.randint(0, tokens) for _ in range(draw.randint(0, 2))), tokens]
        with_states = draw.random() < 0.5
        arguments = call(name, with_states, sizes, **options)
        for gate in ("log_decay", "A"):
            if arguments.get(gate) is not None:
                arguments[gate] = arguments[gate] * draw.choice((0.01, 1, 10))
        everything, variables, directions = backward_pass(name, without_what_is_general(name, arguments), with_states)
        count = len(directions)
        moving = set(draw.sample(range(count), draw.randint(1, count)))
        needed = draw.sample(variables, draw.randint(1, len(variables)))
        check_equations(name, f"{seed}: {name} {sizes} {options}", everything, variables, directions, [moving],
                        [needed], monkeypatch)


def by_token(name, T, x, phi):
    """o of a call with scale 1, token by token, as the READMEs have it."""

    def read(S, key):
        return torch.einsum("bhkv,bhk->bhv", S, key)

    def write(key, value):
        return torch.einsum("bhk,bhv->bhkv", key, value)

    S, z, found = 0 * write(*(x["B"][:, 0], x["x"][:, 0]) if name == "ssd" else (x["k"][:, 0], x["v"][:, 0])), 0, []
    for t in range(T):
        at = SimpleNamespace(**{key: y[:, t] if key not in ("u", "A", "D") else y for key, y in x.items()})
        decay = torch.exp(at.log_decay[..., None] if at.log_decay.dim() == 3 else at.log_decay[..., None, None]) if (
            "log_decay" in x) else 1
        if name == "linear_attention":
            S, z = S + write(phi(at.k), at.v), z + phi(at.k)
            o = read(S, phi(at.q)) / ((phi(at.q) * z).sum(-1, keepdim=True) + 1e-6)
        elif name == "mlstm":
            keep, take = torch.sigmoid(at.f)[..., None], torch.exp(at.i)[..., None]
            S, z = keep[..., None] * S + write(take * at.k, at.v), keep * z + take * at.k
            o = read(S, at.q) / (at.q * z).sum(-1, keepdim=True).abs().clamp(min=1)
        elif name == "rwkv6":
            o = read(S + write(at.u * at.k, at.v), at.r)
            S = decay * S + write(at.k, at.v)
        elif name == "ssd":
            S = torch.exp(at.dt * at.A)[..., None, None] * S + write(at.dt[..., None] * at.B, at.x)
            o = (read(S, at.C) + at.D.reshape(len(at.D), -1) * at.x) * torch.nn.functional.silu(at.z)
        elif name == "rwkv7":
            S = decay * S + write(at.b, read(S, at.a)) + write(at.k, at.v)
            o = read(S, at.r)
        else:
            S = decay * S
            if name == "gdn2":
                S = S + write(at.k, at.write * at.v - read(S, at.erase * at.k))
            else:
                S = S + write(at.k, at.beta[..., None] * (at.v - read(S, at.p if name == "comba" else at.k)))
            o = read(S, at.q)
        found.append(o)
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", ["linear_attention", "mlstm", "rwkv6", "ssd", "delta_rule", "gated_delta_rule", "kda",
                                  "comba", "gdn2", "rwkv7"])
@pytest.mark.parametrize("gate", [0.01, 5.0])
def test_second_derivatives_are_those_of_definitions(name, gate):
    """The derivative in a direction of the gradient of a loop over tokens, whose gates decay weakly and strongly."""
    T = 6
    arguments = call(name, sizes={"T": T, "H": 2, "HV": 2, "B": 1, "G": 2})
    if name == "mlstm":
        arguments |= {"eps": 0.0, "f": (1 if gate < 1 else -1) * (arguments["f"].abs() + 4)}
    arguments |= {key: -gate * torch.rand_like(arguments[key]) for key in ("log_decay", "A")
                  if arguments.get(key) is not None}
    arguments |= {"dt_bias": None} if name == "ssd" else {}
    names = [x for x in mechanisms[name].inputs if arguments[x] is not None]
    tensors = [arguments[x].requires_grad_() for x in names]
    options = {"scale": 1.0} | ({"eps": 0.0} if name == "mlstm" else {})

    def heed_function(*tensors):
        given = dict(zip(names, tensors))
        count = mechanisms[name].positional
        return mechanisms[name].call([given.pop(x) for x in mechanisms[name].inputs[:count]], given | options)

    def loop(*tensors):
        return by_token(name, T, dict(zip(names, tensors)), lambda x: torch.nn.functional.elu(x) + 1)

    o = heed_function(*tensors)
    torch.testing.assert_close(o, loop(*tensors), rtol=1e-9, atol=1e-11)
    do, directions = torch.randn_like(o).requires_grad_(), tuple(torch.randn_like(x) for x in tensors)
    gradients = torch.autograd.grad(o, tensors, do, create_graph=True)
    of_do, *found = torch.autograd.grad(gradients, [do, *tensors], directions)
    tensors, do = tuple(x.detach() for x in tensors), do.detach()
    torch.testing.assert_close(of_do, torch.func.jvp(loop, tensors, directions)[1], rtol=1e-8, atol=1e-10)
    gradient = torch.func.grad(lambda *tensors: (do * loop(*tensors)).sum(), argnums=tuple(range(len(tensors))))
    for x, y in zip(found, torch.func.jvp(gradient, tensors, directions)[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
