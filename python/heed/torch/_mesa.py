# mesa as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.mesa`, its gradients, heed.torch.mesa and its step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch, _mesa_derivatives
from heed.torch._functions import _without_gradient

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor lamb"
_OPTIONS = (
    "Tensor? log_decay, int iterations, float eps, Tensor? initial_state, Tensor? lengths, Tensor? starts, "
    "Tensor? cu_seqlens, int? threads"
)
_NAMES = ("q", "k", "v", "beta", "lamb", "log_decay", "iterations", "eps", "initial_state", "lengths", "starts",
          "cu_seqlens", "threads")  # fmt: skip
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 8)
_FIRST = 4  # of the backward operator's arguments that are the forward's


def _results(q, k, v, beta, lamb, *options):
    """New tensors for o, the state and the solutions."""
    for name, x, axes in (("q", q, "H, K"), ("v", v, "H, V")):
        if x.dim() != 4:
            raise InvalidArgument(f"mesa: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = _dispatch.num_sequences("mesa", q.shape[0], options[6])
    heads, channels = q.shape[2:]
    state = q.new_empty((sequences, heads, channels, channels + v.shape[3]), dtype=wide)
    return v.new_empty(v.shape), state, q.new_empty(q.shape, dtype=wide)


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_mesa(*arguments[:5], *results, *arguments[5:])
    return results


def _new_gradients(arguments, needed):
    return [
        torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
        for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o, grad_state, solution, needed, *arguments):
    gradients = _new_gradients(arguments, needed)
    _core._torch_mesa_backward(grad_o, grad_state, solution, *arguments[:5], *gradients, *arguments[5:])
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_state, solution, needed, *arguments):
    return [x for x in _new_gradients(arguments, needed) if x is not None]


def _composition(arguments, *, with_state, solution=None):
    """o, the state if it is wanted, and the solutions, as compositions."""
    iterations, eps, _, lengths, starts, cu_seqlens, threads = arguments[6:]
    return _mesa_derivatives.composition([arguments[i] for i in _DIFFERENTIABLE], (lengths, starts, cu_seqlens),
                                         (threads, iterations, eps), with_state=with_state, solution=solution)


def _composed(arguments, solution, with_state):
    """A composition for `_composed_derivatives`: a function of the tensors."""

    def function(*tensors):
        given = dict(zip(_DIFFERENTIABLE, tensors))
        return _composition([given.get(i, x) for i, x in enumerate(arguments)], with_state=with_state,
                            solution=solution)

    return function, [arguments[i] for i in _DIFFERENTIABLE]


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, _, _, solution = arguments_and_results
    wanted = [bool(needed[i]) for i in _DIFFERENTIABLE]
    of_o, of_state, _ = of_results
    if _dispatch.in_forward_mode():
        composed, tensors = _composed(arguments, solution, of_state is not None)
        found = _composed_derivatives.gradients(composed, (of_o, of_state), wanted, tensors, ())
    else:
        of_o = torch.zeros_like(arguments[2]) if of_o is None else of_o
        found = _backward_operator(of_o, of_state, solution, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


def _differentiate_twice(needed, of_results, of_o, of_state, solution, computed, *arguments):
    composed, tensors = _composed(arguments, solution, of_state is not None)
    places = (0, 1, *(_FIRST + i for i in _DIFFERENTIABLE))
    found = _composed_derivatives.of_gradients(composed, [needed[i] for i in places], of_results, (of_o, of_state),
                                               computed, tensors, ())
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "mesa_backward",
    f"(Tensor grad_o, Tensor? grad_state, Tensor? solution, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of the state", "solution", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "mesa",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor state, Tensor solution)",
    _forward,
    _results,
    gradients=_differentiate,
    keeps_results=True,
    unread=(len(_NAMES), len(_NAMES) + 1),
    constant=(2,),
)


@functools.wraps(heed.mesa, assigned=("__name__",))
def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    log_decay: Tensor | None = None,
    iterations: int = 30,
    eps: float = 0.0,
    initial_state: Tensor | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    return_solution: bool = False,
    threads: int | None = None,
) -> Any:
    _dispatch.check_bools("mesa", return_state=return_state, return_solution=return_solution)
    _dispatch.check_int("mesa", "iterations", iterations, 1)
    _dispatch.check_tensors("mesa", q=q, k=k, v=v, beta=beta, lamb=lamb)
    given = {"log_decay": log_decay, "initial_state": initial_state}
    _dispatch.check_tensors("mesa", **{key: x for key, x in given.items() if x is not None})
    lengths, starts, cu_seqlens = (
        _dispatch.numbers("mesa", key, x, torch.int64)
        for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, k, v, beta, lamb, log_decay, iterations, eps, initial_state, lengths, starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode():
        o, state, solution = _composition(arguments, with_state=return_state)
        solution = solution.detach()
    else:
        o, state, solution = _dispatch.call("mesa", _operator, *arguments)
    more = [x for x, want in ((state, return_state), (solution, return_solution)) if want]
    return (o, *more) if more else o


mesa.__module__ = "heed.torch"
mesa.__doc__ = _signatures.text_on_tensors(heed.mesa) + """

In PyTorch. Gradients reach q, k, v, beta, lamb, log_decay and initial_state by implicit differentiation, those of
second derivatives and of forward mode too, but none the solution. The operator is torch.ops.heed.mesa."""
mesa.__signature__ = _signatures.of_tensors(heed.mesa)

mesa_step = _without_gradient("mesa_step", "q", "k", "v", "beta", "lamb", "state")
