# heed.compat builds a function of another library from its signature as text, a preparation and heed's function.
"""Functions with the signatures of others.

A signature is a text such as "q, k, v, scale=None": names, order and defaults are the original's; after "*" are
keywords that it takes without listing them. A preparation removes the arguments that it understands and gives the call
to make. The remaining arguments must have their defaults, or no effect here: nothing is ignored that would change a
result.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from heed import InvalidArgument, Unsupported, _signatures
from heed.torch import _dispatch

# Options that choose how a GPU computes: tiles, recomputation, copies of lists on the host, order of sums.
WITHOUT_EFFECT = frozenset(
    {
        "accumulate_grad_in_fp32",
        "backend",
        "checkpoint_lvl",
        "chunk_indices",
        "chunk_size",
        "cu_seqlens_cpu",
        "deterministic",
        "disable_recompute",
        "fuse_swiglu",
        "inplace_backward",
        "max_seqlen",
        "max_seqlen_k",
        "max_seqlen_q",
        "num_chunks",
        "num_splits",
        "safe_gate",
        "sequence_parallel",
        "solve_tril_precision",
        "state_dtype",
        "use_fast_path",
        "use_mem_eff_path",
    }
)

Arguments = dict[str, Any]
Preparation = Callable[[Arguments], Callable[[], Any]]

_FIRST_WORDS = re.compile(r"(\w+): (\w+)(.*)", re.DOTALL)


def in_words_of(function: str, names: Mapping[str, str], error: Exception) -> Exception:
    """heed's error as this function's: `names` are its arguments by heed's. The function's own errors are unchanged."""
    match = _FIRST_WORDS.fullmatch(str(error))
    if match is None or match[1] == function:
        return error
    _, word, rest = match.groups()
    return type(error)(f"{function}: {names.get(word, word)}{rest}")


def speaking(**names: str) -> Callable[[Any], Any]:
    """A decorator: errors of heed name the function, and its arguments, by heed's names in `names`."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (InvalidArgument, Unsupported) as error:
                raise in_words_of(function.__name__, names, error) from None

        return call

    return decorate


def refuse(function: str, name: str, value: Any, default: Any) -> None:
    """Raises Unsupported where an argument requests a feature that heed lacks."""
    if value is default or (not isinstance(value, Tensor) and value == default):
        return
    said = f"given as {type(value).__name__}" if isinstance(value, Tensor) or default is None else repr(value)
    raise Unsupported(f"{function}: {name} is {said}, expected {default!r}: heed has nothing else")


def door(name: str, signature: str, prepare: Preparation, doc: str) -> Any:
    """The function `name` with this signature; `prepare` gives the call for its arguments."""
    parameters = _signatures.parse(f"def {name}({signature})").parameters
    by_position = [x.name for x in parameters.values() if x.kind is not x.KEYWORD_ONLY]
    defaults = {x.name: x.default for x in parameters.values() if x.default is not x.empty}
    required = [key for key in parameters if key not in defaults]

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(by_position):
            raise TypeError(f"{name}() takes {len(by_position)} positional arguments but {len(args)} were given")
        given = dict(zip(by_position, args))
        for key, value in kwargs.items():
            if key not in parameters:
                raise _dispatch.unexpected(name, key, parameters)
            if key in given:
                raise TypeError(f"{name}() got multiple values for argument {key!r}")
            given[key] = value
        for key in required:
            if key not in given:
                raise TypeError(f"{name}() is missing the argument {key!r}")
        arguments = {**defaults, **given}
        call = prepare(arguments)
        for key, value in arguments.items():
            if key not in WITHOUT_EFFECT:
                refuse(name, key, value, defaults.get(key))
        return call()

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    function.__signature__ = inspect.Signature(list(parameters.values()))
    return function


def lacking(name: str, why: str | None = None) -> Any:
    """A function or class of another library that can be imported, and refuses every call."""
    why = why or "heed does not have this mechanism"

    def function(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"{name}: {why}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"A call raises heed.Unsupported: {why}."
    return function
