# log_linear_attention as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.log_linear_attention`, its gradients, heed.torch.log_linear_attention and its step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch
from heed.torch._functions import _without_gradient
from heed.torch._recurrences import plus, plus_product, sums_of_decays
from heed.torch._scans import Scan, Sequences

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor level_scales"
_OPTIONS = (
    "Tensor? log_decay, float? scale, Tensor? positions, Tensor? initial_state, Tensor? lengths, Tensor? starts, "
    "Tensor? cu_seqlens, int? threads"
)
_NAMES = ("q", "k", "v", "level_scales", "log_decay", "scale", "positions", "initial_state", "lengths", "starts",
          "cu_seqlens", "threads")  # fmt: skip
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 7)
_FIRST = 3  # of the backward operator's arguments that are the forward's


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _results(q, k, v, level_scales, *options):
    """New tensors for o and the states."""
    for name, x, axes in (("q", q, "H, K"), ("v", v, "HV, V"), ("level_scales", level_scales, "HV, L")):
        if x.dim() != 4:
            raise InvalidArgument(f"log_linear_attention: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    cu_seqlens = options[6]
    sequences = _dispatch.num_sequences("log_linear_attention", q.shape[0], cu_seqlens)
    shape = (sequences, v.shape[2], level_scales.shape[3], q.shape[3], v.shape[3])
    return v.new_empty(v.shape), q.new_empty(shape, dtype=_wide(q))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_log_linear_attention(*arguments[:4], *results, *arguments[4:])
    return results


def _new_gradients(arguments, needed):
    return [
        torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
        for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o, grad_state, needed, *arguments):
    gradients = _new_gradients(arguments, needed)
    _core._torch_log_linear_attention_backward(grad_o, grad_state, *arguments[:4], *gradients, *arguments[4:])
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_state, needed, *arguments):
    return [x for x in _new_gradients(arguments, needed) if x is not None]


def _differentiate(needed, of_results, *arguments):
    wanted = [bool(needed[i]) for i in _DIFFERENTIABLE]
    of_o, of_state = of_results
    if of_o is None:
        of_o = torch.zeros_like(arguments[2])
    found = _backward_operator(of_o, of_state, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


class _Run(NamedTuple):
    """One of the operation's calls whose sum is a tangent."""

    replaced: dict[int, Any]  # arguments of its own
    of_o: Any = None  # a factor of its o and, `of_state`, of its states
    of_state: Any = None
    of_v: Any = None  # the factor of v in the argument that replaces it, None for none


def _runs(directions, arguments):
    """The runs of a tangent in these directions, by argument, and the arguments that they share, in wide dtypes.

    R(q, k, v, l, S), the operation, is linear in q, in the scales l, in v with S, and in k with S. With
    c_t = sum_{s <= t} g'_s, the decays between s and t have the tangent c_t - c_s:

      o' = R(q', k, v, l, S) + R(q, k, v, l', S) + R(q, k', v, l, 0) + R(q, k, v' - c v, l, S') + c R(q, k, v, l, S)
    """
    wide = _wide(arguments[0])
    arguments = [x.to(wide) if i in _DIFFERENTIABLE and x is not None else x for i, x in enumerate(arguments)]
    arguments += [None] * (len(_NAMES) - len(arguments))  # PyTorch leaves trailing defaults away
    dq, dk, dv, dscales, dg, dS = (None if directions.get(i) is None else directions[i].to(wide)
                                   for i in _DIFFERENTIABLE)
    v, S = arguments[2], arguments[7]
    no_state = None if S is None else torch.zeros_like(S)
    runs = [_Run({i: x}) for i, x in ((0, dq), (3, dscales)) if x is not None]
    if dk is not None:
        runs.append(_Run({1: dk, 7: no_state}))
    c = None
    if dg is not None:
        sequences = Sequences(*arguments[0].shape[:2], *arguments[8:11], False, dg.device)
        by_sequence = sums_of_decays(Scan(sequences.lengths, None), sequences.gather(dg))
        c = sequences.scatter(by_sequence)[..., None]
        runs.append(_Run({}, c, by_sequence[:, -1, :, None, None, None]))
    if dv is not None or dS is not None or c is not None:
        written = plus_product(dv, c, v, -1)
        runs.append(_Run({2: torch.zeros_like(v) if written is None else written, 7: no_state if dS is None else dS},
                         of_v=None if c is None else -c))
    return runs, arguments


def _times(factor, x):
    return x if factor is None or x is None else factor * x


def _along(directions, arguments):
    """The tangents of o and of the states."""
    o = state = None
    runs, shared = _runs(directions, arguments)
    for run in runs:
        read, written = _operator(*(run.replaced.get(i, x) for i, x in enumerate(shared)))
        o = plus(o, _times(run.of_o, read))
        if run.replaced.keys().isdisjoint((0, 3)):  # states depend on neither
            state = plus(state, _times(run.of_state, written))
    return None if o is None else o.to(arguments[2].dtype), state


def _gradients_along(of_o, of_state, wanted, directions, arguments):
    """The gradients of <of_o, o'> + <of_state, states'>, o' and states' the tangents, None for zeros."""
    total = dict.fromkeys(_DIFFERENTIABLE)
    runs, shared = _runs(directions, arguments)
    for run in runs:
        u, W = _times(run.of_o, of_o.to(_wide(of_o))), None
        if run.replaced.keys().isdisjoint((0, 3)):
            W = _times(run.of_state, of_state)
        reached = [want and (i not in run.replaced or i == 2 and run.of_v is not None)
                   for i, want in zip(_DIFFERENTIABLE, wanted)]
        if not any(reached):
            continue
        found = iter(_backward_operator(u, W, reached, *(run.replaced.get(i, x) for i, x in enumerate(shared))))
        for i, reaches in zip(_DIFFERENTIABLE, reached):
            if reaches:
                total[i] = plus(total[i], _times(run.of_v if i == 2 else None, next(found)))
    return [None if total[i] is None or not want else total[i].to(arguments[i].dtype)
            for i, want in zip(_DIFFERENTIABLE, wanted)]


def _tangents(of_arguments, *arguments):
    found = _along(dict(enumerate(of_arguments)), arguments)
    return tuple(y.zero_() if x is None else x for x, y in zip(found, _results(*arguments)))


def _differentiate_twice(needed, of_results, of_o, of_state, wanted, *arguments):
    directions = dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), of_results))
    found = dict(enumerate(_along(directions, arguments))) if any(needed[:2]) else {}
    needed = [_FIRST + i < len(needed) and needed[_FIRST + i] for i in _DIFFERENTIABLE]
    gradients = _gradients_along(of_o, of_state, needed, directions, arguments)
    return found | {_FIRST + i: x for i, x in zip(_DIFFERENTIABLE, gradients)}


def _tangents_of_gradients(of_arguments, of_o, of_state, wanted, *arguments):
    """Second derivatives are symmetric: J'^T u is the gradient of <u, J x'>."""
    o, state, _, *along = of_arguments
    total = _gradients_along(of_o, of_state, wanted, dict(enumerate(along)), arguments)
    if o is not None or state is not None:
        found = iter(_backward_operator(torch.zeros_like(of_o) if o is None else o, state, wanted, *arguments))
        total = [plus(x, next(found)) if want else None for x, want in zip(total, wanted)]
    return tuple(torch.zeros_like(arguments[i]) if x is None else x
                 for x, i, want in zip(total, _DIFFERENTIABLE, wanted) if want)


_backward_operator = _dispatch.define(
    "log_linear_attention_backward",
    f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    tangents=_tangents_of_gradients,
    names=("the gradient of o", "the gradient of the state", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "log_linear_attention",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor state)",
    _forward,
    _results,
    gradients=_differentiate,
    tangents=_tangents,
)


@functools.wraps(heed.log_linear_attention, assigned=("__name__",))
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scales: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    positions: Any = None,
    initial_state: Tensor | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    threads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    name = "log_linear_attention"
    _dispatch.check_bools(name, return_state=return_state)
    _dispatch.check_tensors(name, q=q, k=k, v=v, level_scales=level_scales)
    given = {"log_decay": log_decay, "initial_state": initial_state}
    _dispatch.check_tensors(name, **{key: x for key, x in given.items() if x is not None})
    positions, lengths, starts, cu_seqlens = (
        _dispatch.numbers(name, key, x, torch.int64)
        for key, x in (("positions", positions), ("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    o, state = _dispatch.call(name, _operator, q, k, v, level_scales, log_decay, scale, positions, initial_state,
                              lengths, starts, cu_seqlens, threads)
    return (o, state) if return_state else o


log_linear_attention.__module__ = "heed.torch"
log_linear_attention.__doc__ = _signatures.text_on_tensors(heed.log_linear_attention) + """

In PyTorch. Gradients reach q, k, v, level_scales, log_decay and initial_state, also second ones and those of forward
mode. The operator is torch.ops.heed.log_linear_attention."""
log_linear_attention.__signature__ = _signatures.of_tensors(heed.log_linear_attention)

log_linear_attention_step = _without_gradient("log_linear_attention_step", "q", "k", "v", "level_scales", "state")
