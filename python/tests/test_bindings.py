# Behaviour shared by the bindings of all mechanisms: positions of arguments, states, tokens, warnings.
import inspect
import subprocess
import sys

import numpy as np
import pytest

import heed
import mechanisms
import scans
from heed import _core

NAMES = sorted(_core._mechanisms)
rng = np.random.default_rng(3)


def values_of(name):
    """Inputs by name; None of those that have tests of their own."""
    module = mechanisms if name in mechanisms.NAMES else scans if name in scans.DESCRIPTIONS else None
    return module and module.arguments(name, T=5)


@pytest.mark.parametrize("function, names", [
    ("gla_step", "q k v log_decay state"),
    ("delta_product_step", "q k v log_decay beta state"),
    ("selective_scan_step", "u delta A B C state D z"),
    ("h3_step", "q k v shift log_dt log_A_real A_imag C state D"),
    ("causal_conv1d_step", "x weight bias state"),
    ("causal_conv1d_backward", "do x weight bias dstate"),
    ("rwkv7", "r log_decay k v a b"),
    ("retention", "q k v"),
])
def test_places_of_arguments(function, names):
    parameters = inspect.signature(getattr(heed, function)).parameters.values()
    assert " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == names


@pytest.mark.parametrize("name", NAMES)
def test_each_required_argument_is_missed(name):
    function, values = getattr(heed, name), values_of(name) or {}
    required = [x for x in _core._mechanisms[name]["inputs"] if x not in _core._mechanisms[name]["optional"]]
    for missing in required:
        others = {key: values.get(key, np.zeros((2, 2), np.float32)) for key in required if key != missing}
        with pytest.raises(TypeError, match=rf"^{name}\(\) missing required argument: '{missing}'"):
            function(**others)


@pytest.mark.parametrize("name", NAMES)
def test_operators_take_what_the_description_says(name):
    torch = pytest.importorskip("torch", reason="optional: PyTorch")
    import heed.torch

    of = _core._mechanisms[name]
    schema = getattr(torch.ops.heed, name).default._schema
    states = [f"initial_{'state' if i == 0 else x[0]}" for i, x in enumerate(of["states"])]
    options = [*of["settings"], *["scale"] * of["scale"], *states, "lengths", "starts", "cu_seqlens",
               *["reverse"] * of["direction"], "threads", *["segment"] * bool(of["states"])]
    assert [x.name for x in schema.arguments] == [*of["inputs"], *options]
    assert len(schema.returns) == 1 + len(states)
    keywords = inspect.signature(getattr(heed, name)).parameters
    of_arrays = {"out", "return_state", "comm", "relay"}
    assert {x.name for x in schema.arguments} - set(states[1:]) == set(keywords) - of_arrays


@pytest.mark.parametrize("name", [name for name in NAMES if values_of(name)])
def test_states_have_the_axes_that_the_description_says(name):
    of, values = _core._mechanisms[name], values_of(name)
    if not of["states"]:
        return
    sizes = {"2": 2}
    for key, x in values.items():
        form = next(form.split(", ") for form in of["axes"][key].split("|") if form.count(",") + 1 == x.ndim)
        sizes |= dict(zip(form, x.shape))
    sizes["W - 1"], sizes["F"] = sizes.get("W", 1) - 1, of["features"] and of["features"](sizes["K"])
    causal = {"causal": True} if "causal" in of["settings"] else {}
    o, state = getattr(heed, name)(**values, return_state=True, **causal)
    assert o.shape == tuple(sizes[axis] for axis in of["output_axes"].split(", "))
    for part, (_, axes, *_) in zip(state if isinstance(state, tuple) else (state,), of["states"], strict=True):
        assert part.shape == tuple(sizes[axis] for axis in axes.split(", "))


def test_a_tuple_of_states_is_what_is_in_it():
    values = mechanisms.arguments("gla", T=5)
    state = rng.standard_normal((2, 4, 12, 10))
    o = heed.gla(**values, initial_state=state)
    assert np.array_equal(heed.gla(**values, initial_state=(state, None)), o)
    for wrong in ((state, state), (state,), ()):
        with pytest.raises(heed.InvalidArgument, match=r"^gla: initial_state is .*, expected an array$"):
            heed.gla(**values, initial_state=wrong)
    values = mechanisms.arguments("linear_attention", T=5)
    with pytest.raises(heed.InvalidArgument,
                       match=r"linear_attention: initial_state is .*, expected an array, or arrays \(S, z\)"):
        heed.linear_attention(**values, initial_state=(state,) * 4)
    with pytest.raises(heed.InvalidArgument, match=r"hgrn_step: state is .*, expected an array on the CPU"):
        heed.hgrn_step(np.ones((2, 3)), -np.ones((2, 3)), (np.zeros((2, 3)),))


def test_the_same_of_tensors():
    torch = pytest.importorskip("torch", reason="optional: PyTorch")
    import heed.torch

    values = {key: torch.from_numpy(x) for key, x in mechanisms.arguments("gla", T=5).items()}
    state = torch.randn(2, 4, 12, 10, dtype=torch.float64)
    o = heed.torch.gla(**values, initial_state=state)
    assert torch.equal(heed.torch.gla(**values, initial_state=(state, None)), o)
    with pytest.raises(heed.InvalidArgument, match="^gla: initial_state is of type tuple, expected an array$"):
        heed.torch.gla(**values, initial_state=(state, state))


@pytest.mark.parametrize("name, argument, spoiled, message", [
    ("gla", "k", lambda k: k[0], r"gla_step: k has shape \[2,12\], expected one token of each sequence: \[B, H, K\]"),
    ("gla", "log_decay", lambda g: g[None],
     r"log_decay has shape \[1,2,4,12\], expected one token of each sequence: \[B, HV, K\]"),
    ("delta_product", "v", lambda v: v[:, 0],
     r"v has shape \[2,4,10\], expected one token of each sequence: \[B, n, HV, V\]"),
    ("rwkv4", "k", lambda k: k[None], r"k has shape \[1,2,40\], expected one token of each sequence: \[B, C\]"),
    ("selective_scan", "B", lambda B: B[None],
     r"expected one token of each sequence: \[B, G, N\], \[B, N\] or \[D, N\]"),
])
def test_a_step_says_what_one_token_is(name, argument, spoiled, message):
    if name in mechanisms.NAMES:
        token = mechanisms.at_tokens(mechanisms.arguments(name, T=1), 0)
        _, state = getattr(heed, name)(**mechanisms.arguments(name, T=1), return_state=True)
    else:
        token, state = scans.at_tokens(name, scans.arguments(name, T=1), 0), scans.state_of(name)
    with pytest.raises(heed.InvalidArgument, match=message):
        getattr(heed, f"{name}_step")(**token | {argument: spoiled(token[argument])}, state=state)


def test_factors_for_logarithms_are_reported_of_scans_too():
    program = """if True:
        import warnings
        import numpy as np, heed
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            heed.hgrn(np.ones((1, 3, 2)), np.full((1, 3, 2), -0.9))
            assert not seen
            heed.hgrn(np.ones((1, 3, 2)), np.full((1, 3, 2), 0.9))
        assert "hgrn: log_decay" in str(seen[0].message) and len(seen) == 1
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_autocast_leaves_constants_alone():
    torch = pytest.importorskip("torch", reason="optional: PyTorch")
    import heed.torch

    values = {key: torch.from_numpy(x)
              for key, x in scans.arguments("selective_scan", dtype=np.float32, rank=2).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = heed.torch.selective_scan(**values)
    rounded = {key: x.bfloat16() if x.dim() > 2 else x for key, x in values.items()}
    assert values["B"].dim() == 2 and torch.equal(o, heed.torch.selective_scan(**rounded))


@pytest.mark.parametrize("name, axis",
                         [("gla", 1), ("linear_attention", 1), ("selective_scan", 2), ("h3", 1), ("causal_conv1d", 2)])
def test_tensors_have_states_of_packed_sequences(name, axis):
    torch = pytest.importorskip("torch", reason="optional: PyTorch")
    import heed.torch

    conv = {"x": rng.standard_normal((1, 6, 5)), "weight": rng.standard_normal((6, 4))}
    axes = _core._mechanisms[name]["axes"]
    values = {key: x[:1] if axes[key].startswith("B, ") else x for key, x in (values_of(name) or conv).items()}
    options = {"cu_seqlens": [0, 2, 5], "return_state": True}
    o, state = getattr(heed, name)(**values, **options)
    tensors = {key: torch.from_numpy(x) for key, x in values.items()}
    ours, ours_state = getattr(heed.torch, name)(**tensors, **options)
    assert o.shape[axis] == 5 and np.array_equal(ours.numpy(), o)
    parts = [x if isinstance(x, tuple) else (x,) for x in (state, ours_state)]
    for a, b in zip(*parts, strict=True):
        assert len(a) == 2 and np.array_equal(a, b.numpy())
