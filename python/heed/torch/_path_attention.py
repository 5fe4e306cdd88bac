# path_attention as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.path_attention`, its gradients, and heed.torch.path_attention."""

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

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? log_forget"
_OPTIONS = "float? scale, Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads"
_NAMES = ("q", "k", "v", "w", "beta", "log_forget", "scale", "lengths", "starts", "cu_seqlens", "threads")
_INPUTS = 6  # the first arguments, which have gradients


def _results(q, k, v, *others):
    """New tensors for o and lse."""
    for name, x, axes in (("q", q, "H, D"), ("v", v, "Hkv, Dv")):
        if x.dim() != 4:
            raise InvalidArgument(f"path_attention: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[3])), q.new_empty((batch, heads, tokens), dtype=wide)


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_path_attention(*arguments[:_INPUTS], *results, *arguments[_INPUTS:])
    return results


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad_o, grad_lse, o, lse, needed, *arguments):
    inputs, options = arguments[:_INPUTS], arguments[_INPUTS:]
    gradients = _new_gradients(inputs, needed)
    _core._torch_path_attention_backward(grad_o, grad_lse, *inputs, o, lse, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_lse, o, lse, needed, *arguments):
    return [x for x in _new_gradients(arguments[:_INPUTS], needed) if x is not None]


def _composition(q, k, v, w, beta, log_forget, scale, lengths, starts, cu_seqlens, threads):
    """o and lse: all tokens of a sequence as one block, so that memory is quadratic in their number."""
    of_o, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = Sequences(*q.shape[:2], lengths, starts, cu_seqlens, False, q.device)
    valid = sequences.scatter(sequences.gather(torch.ones_like(q[..., 0], dtype=wide)))

    def by_head(x, heads):
        """[N, H, T, ...] of the sequences in order."""
        return sequences.gather(x.to(wide)).transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)

    heads, key_heads = q.shape[2], k.shape[2]
    query, value = by_head(q, heads), by_head(v, heads)
    key, direction, factor = (by_head(x, key_heads) for x in (k, w, beta))
    # With A = I + tril(diag(beta) W W^T, -1) the logits are tril(Q K^T) - tril(Q W^T) A^-1 diag(beta) tril(W K^T, -1).
    square = (factor[..., None] * (direction @ direction.mT)).tril(-1)
    identity = torch.eye(square.shape[-1], dtype=wide, device=q.device)
    within = torch.linalg.solve_triangular(identity + square, factor[..., None] * (direction @ key.mT).tril(-1),
                                           upper=False, unitriangular=True)
    key, direction, within = (x.repeat_interleave(heads // key_heads, 1) for x in (key, direction, within))
    logits = query @ key.mT - (query @ direction.mT).tril() @ within
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    if log_forget is not None:
        gate = by_head(log_forget, heads)
        cut = torch.isneginf(gate)
        sums, cuts = torch.where(cut, 0, gate).cumsum(-1), cut.cumsum(-1)
        logits = logits + sums[..., None] - sums[..., None, :]
        hidden = hidden | (cuts[..., None] != cuts[..., None, :])
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    o = sequences.scatter(((logits - lse[..., None]).exp() @ value).transpose(1, 2)).to(of_o)
    lse = sequences.scatter(lse.transpose(1, 2)).masked_fill(valid == 0, -torch.inf)
    return o, lse.transpose(1, 2)


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, o, lse = arguments_and_results
    wanted = [bool(need) for need in needed[:_INPUTS]]
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    of_o, of_lse = of_results
    if _dispatch.in_forward_mode():
        found = _composed_derivatives.gradients(_composition, (of_o, of_lse), wanted, tensors, options)
    else:
        of_o = torch.zeros_like(o) if of_o is None else of_o
        found = _backward_operator(of_o, of_lse, o, lse, wanted, *arguments)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


_FIRST = 5  # of the backward operator's arguments that are the forward's


def _differentiate_twice(needed, of_results, of_o, of_lse, o, lse, computed, *arguments):
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    places = (0, 1, *range(_FIRST, _FIRST + _INPUTS))
    found = _composed_derivatives.of_gradients(_composition, [needed[i] for i in places], of_results, (of_o, of_lse),
                                               computed, tensors, options)
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "path_attention_backward",
    f"(Tensor grad_o, Tensor? grad_lse, Tensor o, Tensor lse, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of lse", "o", "lse", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "path_attention",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _forward,
    _results,
    gradients=_differentiate,
    keeps_results=True,
)


@functools.wraps(heed.path_attention, assigned=("__name__",))
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    _dispatch.check_bools("path_attention", return_lse=return_lse)
    _dispatch.check_tensors("path_attention", q=q, k=k, v=v, w=w, beta=beta)
    if log_forget is not None:
        _dispatch.check_tensors("path_attention", log_forget=log_forget)
    lengths, starts, cu_seqlens = (
        _dispatch.numbers("path_attention", key, x, torch.int64)
        for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, k, v, w, beta, log_forget, scale, lengths, starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode():
        results = _composition(*arguments)
    else:
        results = _dispatch.call("path_attention", _operator, *arguments)
    return tuple(results) if return_lse else results[0]


path_attention.__module__ = "heed.torch"
path_attention.__doc__ = _signatures.text_on_tensors(heed.path_attention) + """

In PyTorch. Gradients reach q, k, v, w, beta and log_forget through o and lse. Second derivatives and forward mode are
those of a composition of PyTorch's functions, whose memory is quadratic in the tokens of the longest sequence. The
operator is torch.ops.heed.path_attention."""
path_attention.__signature__ = _signatures.of_tensors(heed.path_attention)

path_attention_keys = _without_gradient("path_attention_keys", "keys", "w", "beta")
