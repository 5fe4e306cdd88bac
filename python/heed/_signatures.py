# Signatures of the extension module's functions, for inspect. The module is imported on first use.
"""inspect.Signature objects of functions that C++ defines.

nanobind keeps the text of each overload, "def f(x: Array) -> Result". Here these become one inspect.Signature,
annotations being strings: names of heed._typing, and of torch for heed.torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from typing import Any

_KINDS = inspect.Parameter
_ON_TENSORS = {"Array": "Tensor", "OutArray": "Tensor", "Result": "Tensor", "Part": "tuple[Tensor, Tensor]",
               "FloatName": "FloatName | torch.dtype"}

# Keywords that functions of heed.torch have beside heed's: (name, type, default).
_GROUP = ("group", "ProcessGroup | DeviceMesh | None", None)
ATTENTION_IN_A_GROUP = (_GROUP, ("method", "Literal['auto', 'all_gather', 'ulysses', 'ring']", "auto"),
                        ("order", "Literal['contiguous', 'zigzag']", "contiguous"))
CACHE_IN_A_GROUP = (_GROUP,)
# Keywords of functions of arrays for processes; tensors have ATTENTION_IN_A_GROUP and STATES_IN_A_GROUP.
ATTENTION_OF_ARRAYS = ("comm", "method", "order")
STATES_OF_ARRAYS = ("comm", "relay", "segment")
STATES_IN_A_GROUP = (_GROUP, ("relay", "bool", False), ("segment", "int | None", None))


def on_tensors(annotation: Any, name: str = "") -> Any:
    """The type that an argument of this name, or a result, has in heed.torch."""
    if annotation is _KINDS.empty:  # self has none
        return annotation
    if name == "seed" and annotation == "int | None":
        return "int | Tensor | None"
    if name == "return_state":
        return {"bool": "bool | Literal['all']", "Literal[True]": "Literal[True, 'all']"}.get(annotation, annotation)
    names = re.sub(r"(?:numpy\.typing\.)?NDArray\[[^]]*\]", "Tensor", annotation)
    return re.sub(r"\b\w+\b", lambda name: _ON_TENSORS.get(name[0], name[0]), names)


def _annotation(node: ast.expr | None) -> Any:
    if node is None:
        return _KINDS.empty
    return re.sub(r"\b(?:numpy\.typing|typing|typing_extensions|collections\.abc)\.", "", ast.unparse(node))


def _default(node: ast.expr | None) -> Any:
    # These texts are our own; infinity has no literal.
    return _KINDS.empty if node is None else eval(ast.unparse(node), {"__builtins__": {}, "float": float})


def parse(text: str) -> inspect.Signature:
    function: Any = ast.parse(text + ": ...").body[0]
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    kinds = [_KINDS.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [_KINDS.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    defaults = [None] * (len(by_position) - len(arguments.defaults)) + arguments.defaults
    parts = list(zip(by_position, kinds, defaults))
    parts += [(arguments.vararg, _KINDS.VAR_POSITIONAL, None)] if arguments.vararg else []
    parts += [(a, _KINDS.KEYWORD_ONLY, default) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    parts += [(arguments.kwarg, _KINDS.VAR_KEYWORD, None)] if arguments.kwarg else []
    parameters = [_KINDS(a.arg, kind, default=_default(default), annotation=_annotation(a.annotation))
                  for a, kind, default in parts]
    return inspect.Signature(parameters, return_annotation=_annotation(function.returns))


def _either(annotations: Iterable[Any]) -> Any:
    different = list(dict.fromkeys(annotations))
    if set(different) == {"Literal[True]", "Literal[False]"}:
        return "bool"
    return different[0] if len(different) == 1 else " | ".join(different)


def of(function: Any) -> inspect.Signature:
    """The signature of a function of the extension module: the first overload's, whose types are those of all."""
    overloads = [parse(text) for text, *_ in function.__nb_signature__]
    parameters = []
    for name, parameter in overloads[0].parameters.items():
        given = (overload.parameters[name].annotation for overload in overloads if name in overload.parameters)
        parameters.append(parameter.replace(annotation=_either(given)))
    if hasattr(function, "__self__"):  # a method of an object
        del parameters[0]
    result = _either(overload.return_annotation for overload in overloads)
    return inspect.Signature(parameters, return_annotation=result)


def of_tensors(
    function: Any, without: Iterable[str] = (), keywords: Iterable[tuple[Any, ...]] = ()
) -> inspect.Signature:
    """The signature of heed.torch's function of the same name, with more keywords: (name, type, default)."""
    signature = of(function)
    parameters = [
        parameter.replace(annotation=on_tensors(parameter.annotation, parameter.name))
        for parameter in signature.parameters.values() if parameter.name not in without
    ]
    parameters += [
        _KINDS(name, _KINDS.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in keywords
    ]
    return inspect.Signature(parameters, return_annotation=on_tensors(signature.return_annotation))


def without_arguments(text: str, names: Iterable[str]) -> str:
    """A docstring without the lines of these arguments."""
    return re.sub(rf"\n( *)(?:{'|'.join(names)})  .*(?:\n\1  .*)*", "", text)


def text_on_tensors(thing: Any, without: Iterable[str] = ()) -> str:
    """The docstring of heed.torch's function or class of the same name, which lacks some arguments; examples are
    heed's, on arrays."""
    text = thing.__nb_signature__[0][1] if hasattr(thing, "__nb_signature__") else thing.__doc__
    text = without_arguments(text, without) if without else text
    return text.partition("\n\nExample:")[0].replace("NumPy array", "tensor").replace("NumPy's global", "PyTorch's")
