# Second derivatives and forward mode of operators that consist of a few calls of attention.
"""A softmax over a pattern has the derivatives of attention: `torch.ops.heed.attention_derivatives` gives the tangents
of a call in a direction and the gradients of <do, o'> + <dlse, lse'>. An operator that puts several calls together has
one of the same kind, `torch.ops.heed.<name>_derivatives`, which is forward mode, the derivative of its backward pass in
both modes, and the gradient of forward mode. It works on plain memory, where patterns can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, _C

from heed import Unsupported
from heed.torch import _dispatch, _operators

_COUNT = len(_operators._AT)  # of what attention has gradients of: q, k, v and some options


class Branch(NamedTuple):
    """A call of attention, its results and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    options: dict[str, Any]

    def _rest(self, needed: Sequence[bool]) -> tuple[Any, ...]:
        table = _operators.attention_options
        options = [self.options.get(name, default) for name, default in zip(table.names, table.defaults)]
        return *self[:5], [*needed, *[False] * (_COUNT - 3)], *options

    def gradients(self, do: Tensor, needed: Sequence[bool]) -> list[Any]:
        """Returns those of q, k and v, None for what is not needed."""
        with _C._AutoDispatchBelowAutograd():
            found = iter(_operators._attention_backward(do.contiguous(), None, *self._rest(needed)))
        return [next(found) if need else None for need in needed]

    def derivatives(self, along: Sequence[Any], do: Any, dlse: Any,
                    needed: Sequence[bool]) -> tuple[Tensor, Tensor, list[Any]]:
        """Returns o', lse', and the gradients of q, k and v."""
        none = [None] * (_COUNT - 3)
        with _C._AutoDispatchBelowAutograd():
            o, lse, *found = _operators._derivatives(*along, *none, do, dlse, *self._rest(needed))
        return o, lse, [found.pop(0) if need else None for need in needed]


class Derivatives:
    """The operator `heed::<name>_derivatives`, and the rules of an operator and of its backward operator.

    The backward operator takes what arrived at `incoming`, results of the operator, then its `tensors`, those of its
    results that are `saved`, which tensors have gradients, and the options; a "?" marks what may be None.
    `kernel(along, incoming, tensors, saved, needed, *options)` returns the tangents of the results, which have the
    shapes and dtypes of those that `like(*saved)` returns, and the gradients of the product of both, by tensor.
    """

    def __init__(self, name: str, incoming: Sequence[str], tensors: Sequence[str], saved: Sequence[str], options: str,
                 kernel: Callable[..., Any], like: Callable[..., Sequence[Tensor]], backward: Callable[..., Any]):
        self.name, self.kernel, self.like, self.backward = name, kernel, like, backward
        self.num_incoming, self.num_tensors, self.num_saved = len(incoming), len(tensors), len(saved)
        given = [f"Tensor? {x.rstrip('?')}_along" for x in tensors] + [f"Tensor? grad_{x}" for x in incoming]
        given += [f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in (*tensors, *saved)]
        self.operator = _dispatch.define(
            f"{name}_derivatives", f"({', '.join(given)}, bool[] needed, {options}) -> Tensor[]", self._kernel,
            self._meta, gradients=self._gradients, tangents=self._no_tangents)

    def _split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any], list[bool], Any]:
        """along, incoming, tensors, saved, needed and the options."""
        parts, rest = [], list(arguments)
        for count in (self.num_tensors, self.num_incoming, self.num_tensors, self.num_saved):
            parts.append(rest[:count])
            rest = rest[count:]
        return *parts, rest[0], rest[1:]

    def _meta(self, *arguments: Any) -> list[Tensor]:
        _, _, tensors, saved, needed, _ = self._split(arguments)
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (
            *self.like(*saved), *(x for x, need in zip(tensors, needed) if need))]

    @torch.no_grad()
    def _kernel(self, *arguments: Any) -> list[Tensor]:
        along, incoming, tensors, saved, needed, options = self._split(arguments)
        results, found = self.kernel(along, incoming, tensors, saved, needed, *options)
        return [*results, *(torch.zeros_like(x) if y is None else y.to(x.dtype).contiguous()
                            for x, y, need in zip(tensors, found, needed) if need)]

    def tangents(self, of_arguments: Sequence[Any], num_results: int, *arguments_and_results: Any) -> tuple[Any, ...]:
        """The forward mode of the operator, which keeps its results; those at the front have tangents."""
        arguments, results = arguments_and_results[:-num_results], arguments_and_results[-num_results:]
        count = self.num_tensors
        found = self.operator(*of_arguments[:count], *[None] * self.num_incoming, *arguments[:count],
                              *results[num_results - self.num_saved:], [False] * count, *arguments[count:])
        return *found, *[None] * (num_results - self.num_incoming)

    def differentiate_twice(self, needed: Sequence[bool], of_results: Sequence[Any], *arguments: Any) -> dict[int, Any]:
        _, _, _, _, computed, _ = self._split((*[None] * self.num_tensors, *arguments))
        found, first = iter(of_results), self.num_incoming
        along = [next(found) if has else None for has in computed]
        wanted = [bool(x) for x in needed[first:first + self.num_tensors]]
        results, gradients = self._derivatives(along, arguments, wanted)
        return dict(enumerate(results)) | {first + i: x for i, x in gradients.items()}

    def tangents_of_gradients(self, of_arguments: Sequence[Any], *arguments: Any) -> tuple[Any, ...]:
        """Second derivatives are symmetric, and gradients are linear in what arrived."""
        first = self.num_incoming
        _, _, _, _, computed, _ = self._split((*[None] * self.num_tensors, *arguments))
        _, gradients = self._derivatives(of_arguments[first:first + self.num_tensors], arguments, computed)
        gradients = list(gradients.values())
        if any(x is not None for x in of_arguments[:first]):
            more = self.backward(*self._incoming(of_arguments[:first], arguments[:first]), *arguments[first:])
            gradients = [x + y for x, y in zip(gradients, more)]
        return tuple(gradients)

    def _incoming(self, given: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        return [torch.zeros_like(like[0]) if given[0] is None else given[0], *given[1:]]

    def _derivatives(self, along: Sequence[Any], arguments: Sequence[Any],
                     wanted: Sequence[bool]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The operator for the arguments of a backward operator, with the gradients by number."""
        place = self.num_incoming + self.num_tensors + self.num_saved
        found = self.operator(*along, *arguments[:place], list(wanted), *arguments[place + 1:])
        gradients = iter(found[self.num_incoming:])
        return found[:self.num_incoming], {i: next(gradients) for i, want in enumerate(wanted) if want}

    def _gradients(self, needed: Sequence[bool], of_results: Sequence[Any], *arguments: Any) -> dict[int, Any]:
        """The gradients of the tangents, which are the product L for what arrives there."""
        along, incoming, tensors, saved, _, options = self._split(arguments)
        arrived, others = of_results[:self.num_incoming], of_results[self.num_incoming:]
        if any(x is not None for x in others):
            raise Unsupported(f"{self.name}: a third derivative was asked for, which heed does not have")
        arrived = self._incoming(arrived, self.like(*saved))
        count, first, found = self.num_tensors, self.num_tensors + self.num_incoming, {}
        of_along, wanted = list(needed[:count]), [bool(x) for x in needed[first:first + count]]
        if any(of_along):
            computed = self.backward(*arrived, *tensors, *saved, of_along, *options)
            found = dict(zip((i for i, need in enumerate(of_along) if need), computed))
        if any(wanted):
            _, gradients = self._derivatives(along, (*arrived, *tensors, *saved, wanted, *options), wanted)
            found |= {first + i: x for i, x in gradients.items()}
        return found

    def _no_tangents(self, *_: Any) -> Any:
        raise Unsupported(f"{self.name}: a second forward derivative was asked for, which heed does not have, expected "
                          "one in forward and one in reverse mode, as in torch.func.hessian")
