# Derivatives of operators that are short compositions of PyTorch's functions.
"""An operator of heed has a kernel for its values and one for its gradients. Where PyTorch's own functions compute the
same with no more memory than a few tensors of the operator's size, derivatives of the gradients, and those of forward
mode, are the derivatives of that composition, which PyTorch has.

A composition is a function of tensors, some of which may be None, and of options, that returns its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heed.torch import _second_derivatives

Composition = Callable[..., Sequence[Any]]


def _at(values: Sequence[Any], places: Sequence[int], wanted: Sequence[Tensor]) -> list[Any]:
    complete = list(values)
    for i, x in zip(places, wanted):
        complete[i] = x
    return complete


def gradients(composed: Composition, incoming: Sequence[Any], needed: Sequence[bool], tensors: Sequence[Any],
              options: Sequence[Any]) -> Any:
    """The gradients of those of the tensors that are needed, given those of the results, None for zeros."""
    places = [i for i, need in enumerate(needed) if need]

    def function(*wanted: Tensor) -> Sequence[Any]:
        return composed(*_at(tensors, places, wanted), *options)

    return _second_derivatives.vjp(function, [tensors[i] for i in places], incoming)


def of_gradients(composed: Composition, needed: Sequence[bool], of_results: Sequence[Any], incoming: Sequence[Any],
                 computed: Sequence[bool], tensors: Sequence[Any], options: Sequence[Any]) -> dict[int, Any]:
    """The gradients of `incoming` and, after them, of the tensors that are needed, given those of the gradients of the
    tensors that were computed."""
    variables = (*incoming, *tensors)
    places = [i for i, need in enumerate(needed) if need]

    def function(*wanted: Tensor) -> Any:
        given = _at(variables, places, wanted)
        return gradients(composed, given[:len(incoming)], computed, given[len(incoming):], options)

    return dict(zip(places, _second_derivatives.vjp(function, [variables[i] for i in places], of_results)))
