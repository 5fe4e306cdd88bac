# Derivatives of operators that are short compositions of PyTorch's functions.
"""An operator of heed has a kernel for its values and one for its gradients. Where PyTorch's own functions compute the
same with no more memory than a few tensors of the operator's size, derivatives of the gradients, and those of forward
mode, are the derivatives of that composition, which PyTorch has.

A composition is a function of tensors, some of which may be None, and of options, that returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heed.torch import _second_derivatives


def _at(values: Sequence[Any], places: Sequence[int], wanted: Sequence[Tensor]) -> list[Any]:
    complete = list(values)
    for i, x in zip(places, wanted):
        complete[i] = x
    return complete


def gradients(composed: Callable[..., Tensor], grad: Any, needed: Sequence[bool], tensors: Sequence[Any],
              options: Sequence[Any]) -> Any:
    """The gradients of those of the tensors that are needed, given that of the result."""
    places = [i for i, need in enumerate(needed) if need]

    def function(*wanted: Tensor) -> tuple[Tensor, ...]:
        return (composed(*_at(tensors, places, wanted), *options),)

    return _second_derivatives.vjp(function, [tensors[i] for i in places], (grad,))


def of_gradients(composed: Callable[..., Tensor], needed: Sequence[bool], of_results: Sequence[Any], grad: Tensor,
                 computed: Sequence[bool], tensors: Sequence[Any], options: Sequence[Any]) -> dict[int, Any]:
    """The gradients of `grad`, at 0, and of the tensors, after it, that are needed, given those of the gradients of the
    tensors that were computed."""
    variables = (grad, *tensors)
    places = [i for i, need in enumerate(needed) if need]

    def function(*wanted: Tensor) -> Any:
        first, *rest = _at(variables, places, wanted)
        return gradients(composed, first, computed, rest, options)

    return dict(zip(places, _second_derivatives.vjp(function, [variables[i] for i in places], of_results)))
