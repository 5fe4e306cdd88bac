# parallax_attention as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.parallax_attention`, its gradients, and heed.torch.parallax_attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch
from heed.torch._scans import Sequences

_TENSORS = "Tensor q, Tensor r, Tensor k, Tensor v"
_OPTIONS = "float? scale, int? window, Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads"
_NAMES = ("q", "r", "k", "v", "scale", "window", "lengths", "starts", "cu_seqlens", "threads")
_INPUTS = 4  # the first arguments, which have gradients


def _results(q, r, k, v, *others):
    """New tensors for o, m, a and lse."""
    for name, x, axes in (("q", q, "Tq, H, D"), ("v", v, "Tk, Hkv, Dv")):
        if x.dim() != 4:
            raise InvalidArgument(f"parallax_attention: {name} has shape {list(x.shape)}, expected [B, {axes}]")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = q.shape
    rows, sums = (batch, tokens, heads, v.shape[3]), (batch, heads, tokens)
    return (q.new_empty(rows), *(q.new_empty(shape, dtype=wide) for shape in (rows, sums, sums)))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_parallax_attention(*arguments[:_INPUTS], *results, *arguments[_INPUTS:])
    return results


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad_o, grad_lse, o, m, a, lse, needed, *arguments):
    inputs, options = arguments[:_INPUTS], arguments[_INPUTS:]
    gradients = _new_gradients(inputs, needed)
    _core._torch_parallax_attention_backward(grad_o, grad_lse, *inputs, o, m, a, lse, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_lse, o, m, a, lse, needed, *arguments):
    return [x for x in _new_gradients(arguments[:_INPUTS], needed) if x is not None]


def _composition(q, r, k, v, scale, window, lengths, starts, cu_seqlens, threads):
    """o and lse by products of whole sequences, so that memory is quadratic in their number of tokens."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    first = k.shape[1] - q.shape[1]  # the token of the first row
    sequences = Sequences(*k.shape[:2], lengths, starts, cu_seqlens, False, q.device)
    valid = sequences.scatter(sequences.gather(torch.ones_like(k[..., :1, 0], dtype=wide)))

    def by_head(x):
        """[N, H, T, channels] of the sequences in order; rows before the first are 0."""
        x = F.pad(x.to(wide), (0, 0, 0, 0, k.shape[1] - x.shape[1], 0))
        return sequences.gather(x).transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)

    query, second, key, value = map(by_head, (q, r, k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (query @ key.mT)
    at = torch.arange(logits.shape[-1], device=q.device)
    distance = at[:, None] - at
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    weights, t = (logits - lse[..., None]).exp(), second @ key.mT
    weights = weights * (1 + (weights * t).sum(-1, keepdim=True) - t)
    o = sequences.scatter((weights @ value).transpose(1, 2))[:, first:].to(q.dtype)
    lse = sequences.scatter(lse.transpose(1, 2)).masked_fill(valid == 0, -torch.inf)
    return o, lse[:, first:].transpose(1, 2)


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, o, m, a, lse = arguments_and_results
    wanted = [bool(need) for need in needed[:_INPUTS]]
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    of_o, _, _, of_lse = of_results
    if _dispatch.in_forward_mode():
        found = _composed_derivatives.gradients(_composition, (of_o, of_lse), wanted, tensors, options)
    else:
        of_o = torch.zeros_like(o) if of_o is None else of_o
        found = _backward_operator(of_o, of_lse, o, m, a, lse, wanted, *arguments)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


_FIRST = 7  # of the backward operator's arguments that are the forward's


def _differentiate_twice(needed, of_results, of_o, of_lse, o, m, a, lse, computed, *arguments):
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    places = (0, 1, *range(_FIRST, _FIRST + _INPUTS))
    found = _composed_derivatives.of_gradients(_composition, [needed[i] for i in places], of_results, (of_o, of_lse),
                                               computed, tensors, options)
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "parallax_attention_backward",
    "(Tensor grad_o, Tensor? grad_lse, Tensor o, Tensor m, Tensor a, Tensor lse, bool[] needed, "
    f"{_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of lse", "o", "m", "a", "lse", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "parallax_attention",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor m, Tensor a, Tensor lse)",
    _forward,
    _results,
    gradients=_differentiate,
    keeps_results=True,
    constant=(1, 2),
)


@functools.wraps(heed.parallax_attention, assigned=("__name__",))
def parallax_attention(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_means: bool = False,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    _dispatch.check_bools("parallax_attention", return_means=return_means, return_lse=return_lse)
    _dispatch.check_tensors("parallax_attention", q=q, r=r, k=k, v=v)
    lengths, starts, cu_seqlens = (
        _dispatch.numbers("parallax_attention", key, x, torch.int64)
        for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, r, k, v, scale, window, lengths, starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode() and not return_means:
        o, lse = _composition(*arguments)
        return (o, lse) if return_lse else o
    o, m, a, lse = _dispatch.call("parallax_attention", _operator, *arguments)
    results = (o, *([m, a] if return_means else []), *([lse] if return_lse else []))
    return results if len(results) > 1 else o


parallax_attention.__module__ = "heed.torch"
parallax_attention.__doc__ = _signatures.text_on_tensors(heed.parallax_attention) + """

In PyTorch. Gradients reach q, r, k and v through o and lse; m and a have none. Second derivatives and forward mode are
those of a composition of PyTorch's functions, whose memory is quadratic in the tokens of the longest sequence; forward
mode has no m and a. The operator is torch.ops.heed.parallax_attention."""
parallax_attention.__signature__ = _signatures.of_tensors(heed.parallax_attention)
