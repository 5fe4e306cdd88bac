# deltaformer as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.deltaformer`, its gradients, and heed.torch.deltaformer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch
from heed.torch._functions import _without_gradient
from heed.torch._scans import Sequences

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? w"
_OPTIONS = "float? scale, Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads"
_NAMES = ("q", "k", "v", "beta", "w", "scale", "lengths", "starts", "cu_seqlens", "threads")
_INPUTS = 5  # the first arguments, which have gradients


def _results(q, k, v, *others):
    """New tensors for o, u and lse."""
    for name, x, axes in (("q", q, "H, D"), ("v", v, "Hkv, Dv")):
        if x.dim() != 4:
            raise InvalidArgument(f"deltaformer: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = q.shape
    return (q.new_empty((batch, tokens, heads, v.shape[3])), q.new_empty(v.shape),
            q.new_empty((batch, heads, tokens), dtype=wide))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_deltaformer(*arguments[:_INPUTS], *results, *arguments[_INPUTS:])
    return results


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad_o, grad_u, grad_lse, o, u, lse, needed, *arguments):
    inputs, options = arguments[:_INPUTS], arguments[_INPUTS:]
    gradients = _new_gradients(inputs, needed)
    _core._torch_deltaformer_backward(grad_o, grad_u, grad_lse, *inputs, o, u, lse, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_u, grad_lse, o, u, lse, needed, *arguments):
    return [x for x in _new_gradients(arguments[:_INPUTS], needed) if x is not None]


def _composition(q, k, v, beta, w, scale, lengths, starts, cu_seqlens, threads):
    """o, u and lse by products of whole sequences, so that memory is quadratic in their number of tokens."""
    of_o, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = Sequences(*q.shape[:2], lengths, starts, cu_seqlens, False, q.device)
    valid = sequences.scatter(sequences.gather(torch.ones_like(q[..., 0], dtype=wide)))

    def by_head(x):
        """[N, H, T, ...] of the sequences in order."""
        return sequences.gather(x.to(wide)).transpose(1, 2)

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = by_head(q), by_head(k), by_head(v)
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=q.device).triu()
    of_values = scale * ((key if w is None else by_head(w)) @ key.mT)
    weights = of_values.masked_fill(hidden, -torch.inf)[..., 1:, :].softmax(-1)  # the first token reads nothing
    if beta is not None:
        weights = by_head(beta)[..., 1:, None] * weights
    read = torch.nn.functional.pad(weights, (0, 0, 1, 0))
    identity = torch.eye(query.shape[2], dtype=wide, device=q.device)
    values = torch.linalg.solve_triangular(identity + read, value, upper=False, unitriangular=True)
    key, of_heads = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (key, values))
    logits = (scale * (query @ key.mT)).masked_fill(hidden.triu(1), -torch.inf)
    lse = logits.logsumexp(-1)
    o = sequences.scatter(((logits - lse[..., None]).exp() @ of_heads).transpose(1, 2)).to(of_o)
    lse = sequences.scatter(lse.transpose(1, 2)).masked_fill(valid == 0, -torch.inf)
    return o, sequences.scatter(values.transpose(1, 2)).to(of_o), lse.transpose(1, 2)


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, o, u, lse = arguments_and_results
    wanted = [bool(need) for need in needed[:_INPUTS]]
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    of_o, of_u, of_lse = of_results
    if _dispatch.in_forward_mode():
        found = _composed_derivatives.gradients(_composition, (of_o, of_u, of_lse), wanted, tensors, options)
    else:
        of_o = torch.zeros_like(o) if of_o is None else of_o
        found = _backward_operator(of_o, of_u, of_lse, o, u, lse, wanted, *arguments)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


_FIRST = 7  # of the backward operator's arguments that are the forward's


def _differentiate_twice(needed, of_results, of_o, of_u, of_lse, o, u, lse, computed, *arguments):
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    places = (0, 1, 2, *range(_FIRST, _FIRST + _INPUTS))
    found = _composed_derivatives.of_gradients(_composition, [needed[i] for i in places], of_results,
                                               (of_o, of_u, of_lse), computed, tensors, options)
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "deltaformer_backward",
    "(Tensor grad_o, Tensor? grad_u, Tensor? grad_lse, Tensor o, Tensor u, Tensor lse, bool[] needed, "
    f"{_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of u", "the gradient of lse", "o", "u", "lse", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "deltaformer",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor u, Tensor lse)",
    _forward,
    _results,
    gradients=_differentiate,
    keeps_results=True,
)


@functools.wraps(heed.deltaformer, assigned=("__name__",))
def deltaformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_u: bool = False,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    _dispatch.check_bools("deltaformer", return_u=return_u, return_lse=return_lse)
    given = {name: x for name, x in (("beta", beta), ("w", w)) if x is not None}
    _dispatch.check_tensors("deltaformer", q=q, k=k, v=v, **given)
    lengths, starts, cu_seqlens = (
        _dispatch.numbers("deltaformer", key, x, torch.int64)
        for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, k, v, beta, w, scale, lengths, starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode():
        o, u, lse = _composition(*arguments)
    else:
        o, u, lse = _dispatch.call("deltaformer", _operator, *arguments)
    results = (o, *([u] if return_u else []), *([lse] if return_lse else []))
    return results if len(results) > 1 else o


deltaformer.__module__ = "heed.torch"
deltaformer.__doc__ = _signatures.text_on_tensors(heed.deltaformer) + """

In PyTorch. Gradients reach q, k, v, beta and w through o, u and lse. Second derivatives and forward mode are those of a
composition of PyTorch's functions, whose memory is quadratic in the tokens of the longest sequence. The operator is
torch.ops.heed.deltaformer."""
deltaformer.__signature__ = _signatures.of_tensors(heed.deltaformer)

deltaformer_values = _without_gradient("deltaformer_values", "u", "k", "v", "beta", "w", changed=("u",))
