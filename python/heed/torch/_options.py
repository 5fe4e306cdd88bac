# The options of an operator, as heed._core describes them: schema and values of keywords.
"""Keywords of Python as arguments of an operator whose options are a table of heed._core."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heed import InvalidArgument, _core
from heed.torch import _dispatch


class Option(NamedTuple):
    """An argument of the operator."""

    name: str
    schema: str  # "type name=default"
    takes_numbers: bool  # as a list too
    has_gradient: bool
    on_caches: bool


def seed_tensor(seed: int | Tensor | None, operation: str = "attention") -> Tensor:
    """A seed as an operator takes it: 64 bits in an int64 tensor, by default from PyTorch's generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgument(f"{operation}: seed is {seed!r}, expected None or an int from 0 to 2^64 - 1")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


class Options:
    """The options of an operator, in the order of its schema and of the functions of heed._core."""

    def __init__(self, operation: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self.table = [Option(*row) for row in rows]
        self.names = tuple(option.name for option in self.table)
        self.schema = ", ".join(option.schema for option in self.table)
        self._operation = operation
        self.defaults = tuple(ast.literal_eval(option.schema.partition("=")[2]) for option in self.table)
        self._places = {name: place for place, name in enumerate(self.names)}
        # Names in Python are looked up here, as torch.compile traces no call of heed._core.
        self._numbers = {o.name: _core._name_in_python(operation, o.name) for o in self.table if o.takes_numbers}
        self._flags = {option.name for option in self.table if option.schema.startswith("bool ")}
        self._keywords = {*self.names, "segments"} - {"heads_first", "segments_q", "segments_k", "query_starts"}
        if "segments_q" not in self.names:
            self._keywords -= {"segments"}

    def given(self, keywords: dict[str, Any], function: Any) -> list[Any]:
        """The operator's arguments for these keywords of `function`, up to the last that is given: each argument that
        PyTorch need not look at saves time."""
        operation, drops, given = self._operation, keywords.get("dropout"), []
        for name, value in keywords.items():
            if name not in self._keywords:
                raise _dispatch.unexpected(operation, name, inspect.signature(function).parameters)
            if name in self._flags:
                _dispatch.check_bools(operation, **{name: value})
            if name == "segments":
                pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
                given += zip(("segments_q", "segments_k"), pair)
            elif name == "align" and value.__class__ is not str:
                if value is None:
                    raise InvalidArgument(f"{operation}: align is None, expected 'bottom_right', "
                                          "'top_left' or an int array [B]")
                given.append(("query_starts", value))
            elif name == "pattern" and value is not None:
                given.append((name, _dispatch.pattern_key(value)))
            elif name != "seed":
                given.append((name, value))
            elif value is not None:
                seed_tensor(value, operation)  # the seed is checked even without dropout
        if drops:
            given.append(("seed", seed_tensor(keywords.get("seed"), operation)))
        options, end = list(self.defaults), 0
        for name, value in given:
            place = self._places[name]
            if value is self.defaults[place]:
                continue
            if name in self._numbers:
                value = _dispatch.numbers(operation, self._numbers[name], value)
            options[place] = value
            end = max(end, place + 1)
        return options[:end]
