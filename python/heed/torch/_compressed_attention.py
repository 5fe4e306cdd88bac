# compressed_attention as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.compressed_attention`, its gradients, and heed.torch.compressed_attention. How an operator is made is
in `_dispatch.py`.

Tangents and second derivatives are those of one call of attention over keys, then compressed keys, under a pattern that
lists the keys of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, _C

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _operators
from heed.torch._branch_derivatives import Derivatives

_INPUTS = ("q", "k", "v", "k_cmp", "v_cmp", "sinks", "chosen")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor k_cmp, Tensor v_cmp, Tensor? sinks, Tensor? chosen"
_OPTIONS = ("int ratio, int window, int? start, float? scale, Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, "
            "int? threads")
_NAMES = ("ratio", "window", "start", "scale", "lengths", "starts", "cu_seqlens", "threads")
_COUNT = 6  # of tensors with gradients


def _results(q, v):
    """New tensors for o and its log-sum-exp."""
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4:
            raise InvalidArgument(f"compressed_attention: {name} has shape {list(x.shape)}, expected [B, T, H, D]")
    batch, rows, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, rows, heads, v.shape[-1])), q.new_empty((batch, heads, rows), dtype=wide)


def _forward(q, k, v, k_cmp, v_cmp, sinks, chosen, *options):
    results = _results(q, v)
    _core._torch_compressed_attention(q, k, v, k_cmp, v_cmp, sinks, chosen, *results, *options)
    return results


def _fake(q, k, v, *others):
    return _results(q, v)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs[:_COUNT], needed)
    ]


def _backward(grad_o, grad_lse, *arguments):
    inputs, (o, lse, needed), options = arguments[:7], arguments[7:10], arguments[10:]
    gradients = _new_gradients(inputs, needed)
    _core._torch_compressed_attention_backward(grad_o, grad_lse, *inputs, o, lse, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_lse, *arguments):
    return [x for x in _new_gradients(arguments[:7], arguments[9]) if x is not None]


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, o, lse = arguments_and_results
    wanted = [bool(need) for need in needed[:_COUNT]]
    of_o, of_lse = of_results
    of_o = torch.zeros_like(o) if of_o is None else of_o
    found = _backward_operator(of_o, of_lse, *arguments[:7], o, lse, [*wanted, False], *arguments[7:])
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _tangents(of_arguments, *arguments_and_results):
    return _derivatives.tangents(of_arguments, 2, *arguments_and_results)


def _sequence_of_rows(tokens: Tensor, all_tokens: int, ratio: int, lengths: Any, starts: Any,
                      cu_seqlens: Any) -> tuple[Any, Any, Any]:
    """The sequence of each row at one of these tokens, as its first token, its end and its first compressed key:
    numbers or [B, 1], or [1, Tq] of packed sequences."""
    if cu_seqlens is None:
        begin, end = (default if x is None else x.to(tokens.device)[:, None]
                      for x, default in ((starts, 0), (lengths, all_tokens)))
        return begin, end, 0
    bounds = cu_seqlens.to(tokens.device, torch.int64)
    bounds = torch.cat([bounds, bounds[-1:]])  # tokens beyond the last sequence are in an empty one
    sequence = (torch.searchsorted(bounds, tokens, right=True) - 1).clamp(max=len(bounds) - 2)
    counts = bounds.diff() // ratio
    return tuple(x[sequence][None] for x in (bounds[:-1], bounds[1:], counts.cumsum(0) - counts))


def _keys_of_rows(q: Tensor, k: Tensor, k_cmp: Tensor, chosen: Any, ratio: int, window: int, start: Any, lengths: Any,
                  starts: Any, cu_seqlens: Any) -> Tensor:
    """The keys that each row sees, of k followed by k_cmp: [B, Tq, n] or [B, Tq, Hkv, n], -1 for absent ones."""
    (batch, rows), (tokens, heads) = q.shape[:2], k.shape[1:3]
    numbers = functools.partial(torch.arange, device=q.device)
    first = tokens - rows if start is None else start
    token = first + numbers(rows)
    begin, end, first_key = _sequence_of_rows(token, first + rows, ratio, lengths, starts, cu_seqlens)
    position = torch.where((begin <= token) & (token < end), token - begin, -1).expand(batch, -1)[..., None]
    before = numbers(min(window, tokens))  # tokens between a key and the row
    in_window = (numbers(tokens - rows, tokens)[:, None] - before).expand(batch, -1, -1)
    in_window = torch.where(before <= position, in_window, -1).clamp(min=-1)
    if chosen is None:
        compressed = numbers(k_cmp.shape[1])
        chosen = torch.where((compressed + 1) * ratio <= position + 1, compressed, -1)
    first_key = torch.as_tensor(first_key, device=q.device).expand(batch, rows)[..., None]
    if chosen.dim() == 4:
        in_window = in_window[:, :, None].expand(-1, -1, heads, -1)
        position, first_key = position[:, :, None], first_key[:, :, None]
    chosen = torch.where((chosen < 0) | (position < 0), -1, chosen + first_key + tokens)
    return torch.cat([in_window, chosen], -1)


def _kernel(along: Sequence[Any], incoming: Sequence[Any], tensors: Sequence[Any], saved: Sequence[Tensor],
            needed: Sequence[bool], ratio: int, window: int, start: Any = None, scale: Any = None, lengths: Any = None,
            starts: Any = None, cu_seqlens: Any = None, threads: Any = None) -> tuple[list[Tensor], list[Any]]:
    q, k, v, k_cmp, v_cmp, sinks, chosen = tensors
    o, lse = saved
    tokens = k.shape[1]
    index = _keys_of_rows(q, k, k_cmp, chosen, ratio, window, start, lengths, starts, cu_seqlens)
    table, at_sinks = _operators.attention_options, _operators._AT.index(3 + _operators.OPTIONS.index("sinks"))
    if not q.numel() or not index.numel():
        return [torch.zeros_like(o), torch.zeros_like(lse)], [None] * 7

    def joined(x: Any, of_compressed: Any) -> Any:
        if x is None and of_compressed is None:
            return None
        x = k.new_zeros((*k.shape[:3], of_compressed.shape[3])) if x is None else x
        if of_compressed is None:
            of_compressed = x.new_zeros((x.shape[0], k_cmp.shape[1], *x.shape[2:]))
        return torch.cat([x, of_compressed], 1)

    given = {"pattern": _dispatch.pattern_key(heed.patterns.keys(index)), "sinks": sinks, "scale": scale,
             "threads": threads}
    options = [given.get(name, default) for name, default in zip(table.names, table.defaults)]
    none = [None] * (len(_operators._AT) - 3)
    directions = [along[0], joined(along[1], along[3]), joined(along[2], along[4]), *none]
    directions[at_sinks] = along[5]
    wanted = [needed[0], needed[1] or needed[3], needed[2] or needed[4], *[False] * len(none)]
    wanted[at_sinks] = needed[5]
    do, dlse = incoming
    with _C._AutoDispatchBelowAutograd():
        of_o, of_lse, *found = _operators._derivatives(
            *directions, do, dlse, q, joined(k, k_cmp), joined(v, v_cmp), o, lse, wanted, *options)
    dq, dk, dv, dsinks = (found.pop(0) if wanted[i] else None for i in (0, 1, 2, at_sinks))

    def part(x: Any, is_compressed: bool) -> Any:
        return None if x is None else x[:, tokens:] if is_compressed else x[:, :tokens]

    return [of_o, of_lse], [dq, part(dk, False), part(dv, False), part(dk, True), part(dv, True), dsinks, None]


_derivatives = Derivatives(
    "compressed_attention", ("o", "lse"), ("q", "k", "v", "k_cmp", "v_cmp", "sinks?", "chosen?"), ("o", "lse"),
    _OPTIONS, _kernel, lambda o, lse: [o, lse], lambda *arguments: _backward_operator(*arguments),
)
_backward_operator = _dispatch.define(
    "compressed_attention_backward",
    f"(Tensor grad_o, Tensor? grad_lse, {_TENSORS}, Tensor o, Tensor lse, bool[] needed, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_derivatives.differentiate_twice,
    tangents=_derivatives.tangents_of_gradients,
    names=("the gradient of o", "the gradient of lse", *_INPUTS, "o", "lse", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "compressed_attention",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _forward,
    _fake,
    gradients=_differentiate,
    tangents=_tangents,
    keeps_results=True,
    num_cast=5,
)


@functools.wraps(heed.compressed_attention, assigned=("__name__",))
def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    ratio: int,
    window: int,
    chosen: Tensor | heed.Pattern | None = None,
    sinks: Tensor | Sequence[float] | None = None,
    start: int | None = None,
    scale: float | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_lse: bool = False,
    threads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    _dispatch.check_bools("compressed_attention", return_lse=return_lse)
    _dispatch.check_tensors("compressed_attention", q=q, k=k, v=v, k_cmp=k_cmp, v_cmp=v_cmp)
    sinks = _dispatch.numbers("compressed_attention", "sinks", sinks, torch.float32)
    if isinstance(chosen, heed.Pattern):
        chosen = torch.from_numpy(_core._keys_of_pattern(chosen))
    elif chosen is not None:
        _dispatch.check_tensors("compressed_attention", chosen=chosen)
    sequences = (
        _dispatch.numbers("compressed_attention", key, x, torch.int64)
        for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    results = _dispatch.call("compressed_attention", _operator, q, k, v, k_cmp, v_cmp, sinks, chosen, ratio, window,
                             start, scale, *sequences, threads)
    return tuple(results) if return_lse else results[0]


compressed_attention.__module__ = "heed.torch"
compressed_attention.__doc__ = _signatures.text_on_tensors(heed.compressed_attention) + """

In PyTorch. Gradients reach q, k, v, k_cmp, v_cmp and sinks, through o and lse, those of second derivatives and of
forward mode too, but none the chosen keys. Under autocast q, k, v, k_cmp, v_cmp and o take its dtype. The operator is
torch.ops.heed.compressed_attention."""
compressed_attention.__signature__ = _signatures.of_tensors(heed.compressed_attention, without=("out",))
