# Signatures of all public names agree with inspect and type checkers, and types can be pickled.
import ast
import builtins
import collections.abc
import copy
import inspect
import io
import pathlib
import pickle
import re
import typing

import numpy as np
import pytest

import heed
import heed.capture
import heed.plot
import heed.torch
import heed.torch.nn
import heed.transformers
import torch
from heed import _core, _typing
from mechanisms import DESCRIPTIONS, arguments
from type_checker import check_types

MODULES = (heed, heed.torch, heed.torch.nn, heed.transformers, heed.capture, heed.plot)
FOLDER = pathlib.Path(heed.__file__).parent


def public():
    """{name: function, class or method} of everything public that can be called."""
    found = {}
    for module in MODULES:
        names = getattr(module, "__all__", None) or [name for name, x in vars(module).items()
                                                     if name[0] != "_" and getattr(x, "__module__", "")
                                                     == module.__name__]
        for name in names:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            found[f"{module.__name__}.{name}"] = thing
            if isinstance(thing, type) and not issubclass(thing, (tuple, torch.nn.Module)):
                found |= {f"{module.__name__}.{name}.{key}": getattr(thing, key)
                          for cls in thing.__mro__ for key in vars(cls)
                          if key[0] != "_" and cls.__module__.startswith("heed") and callable(getattr(thing, key))}
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_has_a_signature(name):
    signature = inspect.signature(PUBLIC[name])
    assert [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD] == [] or name in (
        "heed.explain", "heed.torch.MultiheadAttention", "heed.plot.attention_map", "heed.plot.explained_costs")
    if "heed.capture" not in name and not issubclass(type(PUBLIC[name]), type):
        assert signature.return_annotation is not inspect.Signature.empty


def test_nothing_is_left_out():
    for name in ("heed.gla", "heed.gla_step", "heed.torch.gla", "heed.torch.gla_step", "heed.KVCache.attend",
                 "heed.KVCache.share", "heed.torch.KVCache.attend", "heed.GlaGradients", "heed.LinearAttentionState",
                 "heed.InvalidArgument", "heed.capture.capture", "heed.transformers.register", "heed.view",
                 "heed.View.save", "heed.plot.cost_curves"):
        assert name in PUBLIC


def test_overloads_are_one_signature():
    gla = inspect.signature(heed.gla)
    assert list(gla.parameters) == ["q", "k", "v", "log_decay", "log_decay_v", "scale", "initial_state", "return_state",
                                    "lengths", "starts", "cu_seqlens", "reverse", "comm", "relay", "segment", "out",
                                    "threads"]
    assert gla.parameters["return_state"].annotation == "bool" and gla.parameters["return_state"].default is False
    assert gla.return_annotation == "Result | tuple[Result, StateResult]"
    assert gla.parameters["q"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert gla.parameters["scale"].kind is inspect.Parameter.KEYWORD_ONLY and gla.parameters["scale"].default is None
    assert inspect.signature(heed.ssd).parameters["dt_limit"].default == (0.0, float("inf"))
    tensors = inspect.signature(heed.torch.gla)
    assert tensors.parameters["q"].annotation == "Tensor" and not {"out", "comm"} & set(tensors.parameters)
    assert "out" in inspect.signature(heed.torch.gla_step).parameters


def test_methods_of_objects_and_classes():
    cache = heed.KVCache(1, 2, 8)
    assert list(inspect.signature(heed.KVCache.trim).parameters) == ["self", "lengths"]
    assert list(inspect.signature(cache.trim).parameters) == ["lengths"]
    attend = inspect.signature(cache.attend).parameters
    assert ("causal" in attend and "softcap" in attend and "options" not in attend
            and attend["precision"].default == "highest")
    assert list(inspect.signature(heed.KVCache).parameters)[:4] == ["batch", "heads", "dim", "value_dim"]
    assert list(inspect.signature(heed.torch.KVCache).parameters)[:4] == ["batch", "heads", "dim", "value_dim"]
    assert str(inspect.signature(heed.InvalidArgument)).startswith("(*args)")
    assert list(inspect.signature(heed.KVCacheBase).parameters) == []

    class Mine(heed.InvalidArgument):
        def __init__(self, path):
            super().__init__(path)

    assert list(inspect.signature(Mine).parameters) == ["path"]


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_call_by_the_signature_is_a_call(name):
    """Defaults of the signature, given, are those of the call."""
    values = arguments(name, T=3)
    function = getattr(heed, name)
    given = inspect.signature(function).bind(*(x for key, x in values.items()
                                               if key not in DESCRIPTIONS[name]["optional"]))
    given.apply_defaults()
    np.testing.assert_array_equal(function(*given.args, **given.kwargs), function(*given.args))
    with pytest.raises(TypeError):
        inspect.signature(function).bind(**values, no_such_option=1)


def test_types_that_signatures_name_are_defined():
    known = {*vars(_typing), *heed.__all__, *dir(builtins), *dir(typing), *dir(collections.abc), *dir(np), "numpy",
             "NDArray"}
    for name, thing in PUBLIC.items():
        if not hasattr(thing, "__nb_signature__"):
            continue
        signature = inspect.signature(thing)
        for annotation in (signature.return_annotation, *(p.annotation for p in signature.parameters.values())):
            if isinstance(annotation, str):
                words = re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", annotation))
                assert set(words) <= known, (name, annotation)


def stubbed(path):
    """{name: (parameters, those with a default)} of a stub's functions, the first overload of each."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name not in found:
            names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            optional = [a.arg for a in node.args.args[len(node.args.args) - len(node.args.defaults):]]
            optional += [a.arg for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if d]
            found[node.name] = names, set(optional), bool(node.args.kwarg)
    return found


@pytest.mark.parametrize("module, path", [(heed, "_core.pyi"), (heed.torch, "torch/__init__.pyi")])
def test_stubs_have_the_same_functions_and_parameters(module, path):
    stub = stubbed(FOLDER / path)
    names = {name for name in module.__all__
             if callable(getattr(module, name)) and not isinstance(getattr(module, name), type)}
    imported = {"advise", "compress", "pattern_from_block_mask", "provider_stats", "replace_sdpa",
                "scaled_dot_product_attention"}
    assert set(stub) == names - imported
    for name, (parameters, optional, more) in stub.items():
        at_runtime = inspect.signature(getattr(module, name)).parameters
        if more:  # a TypedDict's
            at_runtime = {key: p for key, p in at_runtime.items() if key in parameters}
        assert list(at_runtime) == parameters, name
        assert {key for key, p in at_runtime.items() if p.default is not p.empty} == optional, name


def test_keywords_of_communicators_are_those_of_arrays_alone():
    assert re.search(r"\n +comm  ", (FOLDER / "_core.pyi").read_text())
    assert not re.search(r"\n +comm  ", (FOLDER / "torch/__init__.pyi").read_text())
    assert not re.search(r"\n +(?:comm|relay|segment)  ", heed.torch.gla.__doc__ + heed.torch.attention.__doc__)


ON_TENSORS = """
import torch
import heed.torch
import heed.torch.nn
from torch import Tensor

q = torch.zeros(1, 4, 2, 8)
g = torch.zeros(1, 4, 2, 8)
o: Tensor = heed.torch.gla(q, q, q, g, scale=0.5, lengths=[4], initial_state=None)
p, state = heed.torch.gla(q, q, q, log_decay=g, return_state=True)
p.sum()
heed.torch.gla(q, q, q)  # wrong: call-overload
heed.torch.gla(q, q, q, g, scal=0.5)  # wrong: call-overload
heed.torch.gla(q, q, q, g, out=o)  # wrong: call-overload
s: Tensor = heed.torch.gla_step(q[:, 0], q[:, 0], q[:, 0], g[:, 0], state, out=o)
a: Tensor = heed.torch.attention(q, q, q, causal=True, seed=torch.zeros(()), out=o)
b, lse = heed.torch.attention(q, q, q, return_lse=True, dropout=0.1, seed=torch.zeros(()))
lse.sum()
heed.torch.attention(q, q, q, windw=(3, 0))  # wrong: call-overload
heed.torch.attention(q, q, 3)  # wrong: call-overload
w: Tensor = heed.torch.attention_weights(q, q, causal=True, rows=[0])
r: Tensor = heed.torch.rotary(q, [0, 1, 2, 3], interleaved=True)
heed.torch.rotary(q, [0, 1, 2, 3])  # wrong: call-arg
c, last = heed.torch.causal_conv1d(q[0], q[0, 0], return_state=True)
e: Tensor = heed.torch.linformer(q, q, q, q[0, 0], q[0, 0], lengths=torch.tensor([4]))
f: Tensor = heed.torch.longformer(q, q, q, window=2, tokens=[0])
h, of_h = heed.torch.longformer(q, q, q, q, q, q, window=2, tokens=torch.tensor([0]), return_lse=True)
of_h.sum()
heed.torch.longformer(q, q, q, tokens=[0])  # wrong: call-overload
cache = heed.torch.KVCache(1, 2, 8, dtype=torch.bfloat16)
cache.append(q, q)
t: Tensor = cache.attend(q, window=(3, 0))
n: Tensor = cache.fork().lengths
d: torch.dtype = cache.dtype
x: Tensor = heed.torch.scaled_dot_product_attention(q, q, q)
module = heed.torch.MultiheadAttention(8, 2)
layer = heed.torch.nn.Mamba(8, state_size=4)
held: heed.torch.nn.State = layer.new_state(2)
y: Tensor = layer.step(q[:, 0, 0], held)
heed.torch.nn.Mamba(8, state_siz=4)  # wrong: call-arg
heed.torch.gal  # wrong: attr-defined
"""


def test_mypy_sees_functions_of_tensors(tmp_path):
    pytest.importorskip("mypy", reason="optional: the type checker")
    check_types(ON_TENSORS, tmp_path)


WITH_NORMALIZER = [name for name, of in DESCRIPTIONS.items() if of["state_type"] is not None]


@pytest.mark.parametrize("name", WITH_NORMALIZER)
def test_states_and_gradients_can_be_pickled(name):
    values = arguments(name, T=3)
    options = {"causal": True} if "causal" in DESCRIPTIONS[name]["settings"] else {}
    _, state = getattr(heed, name)(**values, return_state=True, **options)
    kind = getattr(heed, type(state).__name__)
    assert type(state) is kind and kind.__name__ in heed.__all__ and kind.__module__ == "heed" and kind.__doc__
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert type(copied) is kind
        for a, b in zip(copied, state, strict=True):
            np.testing.assert_array_equal(a, b)
    tensors = {key: torch.from_numpy(x) for key, x in values.items()}
    _, state = getattr(heed.torch, name)(**tensors, return_state=True, **options)
    file = io.BytesIO()
    torch.save(state, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded) is kind and all(map(torch.equal, loaded, state))


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_can_be_pickled_by_its_name(name):
    thing = PUBLIC[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(thing, protocol)) is thing
    assert copy.copy(thing) is copy.deepcopy(thing) is thing


def test_methods_of_a_cache_are_pickled_as_far_as_the_cache_is():
    with pytest.raises(TypeError, match="KVCache"):
        pickle.dumps(heed.KVCache(1, 2, 8).trim)


@pytest.mark.parametrize("name",
                         [name for name in heed.__all__ if name.endswith("_backward") and name != "t5_bias_backward"])
def test_gradients_are_of_a_public_type(name):
    kind = getattr(heed, inspect.signature(getattr(heed, name)).return_annotation)
    gradients = kind(*range(len(kind._fields)))
    assert pickle.loads(pickle.dumps(gradients)) == gradients and type(pickle.loads(pickle.dumps(gradients))) is kind
    stub = next(node for node in ast.parse((FOLDER / "_core.pyi").read_text()).body
                if getattr(node, "name", "") == kind.__name__)
    assert tuple(x.target.id for x in stub.body if isinstance(x, ast.AnnAssign)) == kind._fields


def test_nanobind_of_others_is_left_alone():
    """The types that have got a __signature__ are heed's own: nanobind shares its types within a domain alone."""
    assert "__signature__" in vars(type(_core.explain))
    assert inspect.signature(_core.explain) == inspect.signature(heed.explain)
