# Recurrences, delta rules, scans and filters over a sequence that the processes of a group hold in parts.
"""heed.torch.<mechanism>(group=): each rank has the inputs of its tokens. heed/distributed/sequence.h divides the call,
checks what ranks agree on, and sends by the methods of _group.Transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument
from heed.torch import _group

TEXT = """With group=, a ProcessGroup or a DeviceMesh of one dimension, each rank gives and receives its part of the
tokens, in the order of ranks; lengths, starts and cu_seqlens are those of the whole. initial_state is that of rank 0
(with reverse=True of the last rank); return_state=True returns the final state on the last rank and None on others,
return_state="all" on every rank. States are composed at every `segment` tokens (4096 by default) and at the borders of
ranks; relay=True passes them from rank to rank instead. Gradients of tensors without tokens are this rank's part.

Without a group, segment=, a multiple of 64, computes segments of so many tokens at once, so that a head occupies more
threads (docs/reproducibility.md)."""
NUMBERS = ("lengths", "starts", "cu_seqlens")  # those of the whole sequence


class _InGroup(torch.autograd.Function):
    """o of the tokens here, and the final states if `returns_state`. `how` are the arguments of heed._core that a call
    of one process has not."""

    @staticmethod
    def forward(ctx: Any, mechanism: Any, how: tuple[Any, ...], is_first: bool, returns_state: bool,
                *arguments: Any) -> Any:
        given = _given(mechanism, is_first, arguments)
        try:
            results = mechanism.new_results(given)
        except InvalidArgument:  # of inputs that heed._core refuses on every rank
            results = (None,) * (1 + len(mechanism.states))
        o, *states = results
        states = [x if returns_state and x is not None and x.dim() > 1 else None for x in states]
        ctx.kept = mechanism.in_group(*how, *given, o, *states)
        ctx.call = mechanism, how, is_first, [x is not None for x in states]
        ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)))
        ctx.is_tensor = [isinstance(x, Tensor) for x in arguments]
        ctx.mark_non_differentiable(*(x for x, state in zip(states, mechanism.states)
                                      if x is not None and not state.has_gradient))
        return o, *states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, *d_states: Tensor | None) -> Any:
        mechanism, how, is_first, returned = ctx.call
        tensors = iter(ctx.saved_tensors)
        arguments = [next(tensors) if is_tensor else x for is_tensor, x in zip(ctx.is_tensor, ctx.others)]
        given = _given(mechanism, is_first, arguments)
        needed = [ctx.needs_input_grad[4 + i] for i in mechanism.differentiable]
        wanted = [need and given[i] is not None for need, i in zip(needed, mechanism.differentiable)]
        gradients = mechanism.new_gradients(wanted, given)
        d_states = [x if has else None for x, has, state in zip(d_states, returned, mechanism.states)
                    if state.has_gradient]
        mechanism.backward_in_group(*how, ctx.kept, d_o, *d_states, *given, *gradients)
        result: list[Any] = [None] * len(arguments)
        for i, need, x in zip(mechanism.differentiable, needed, gradients):
            result[i] = torch.zeros_like(arguments[i]) if need and x is None else x  # a state that another rank gives
        return None, None, None, None, *result


def _given(mechanism: Any, is_first: bool, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments that count on this rank: initial states on the first one alone."""
    states = range(mechanism.first_state, mechanism.first_state + len(mechanism.states))
    return tuple(x if is_first or i not in states else None for i, x in enumerate(arguments))


def call(
    mechanism: Any, arguments: Sequence[Any], return_state: Any, *, group: Any, relay: bool, segment: int
) -> Any:
    """o of the tokens here, and the final states: on the last rank, or with return_state="all" everywhere."""
    of = _group.Group(mechanism.name, group)
    arguments = mechanism.complete(tuple(arguments))
    given = dict(zip(mechanism.names, arguments))
    first, last = (of.size - 1, 0) if given.get("reverse") else (0, of.size - 1)
    states = [f"initial_{state.name}" for state in mechanism.states]
    with_gradients = [name for name, x in given.items()
                      if isinstance(x, Tensor) and x.requires_grad and name not in states]
    note = f"gradients of {', '.join(with_gradients)}" if with_gradients and torch.is_grad_enabled() else ""
    how = (_group.Transport(of), relay, segment, note)
    returns_state = return_state == "all" or (bool(return_state) and of.rank == last)
    o, *final = _InGroup.apply(mechanism, how, of.rank == first, returns_state, *arguments)
    return o, (final if returns_state else None)
