# nsa as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.nsa`, its gradients, and heed.torch.nsa. How an operator is made is in `_dispatch.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _nsa_derivatives
from heed.torch._branch_derivatives import Derivatives

_INPUTS = ("q", "k", "v", "gates", "k_cmp", "v_cmp")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor gates, Tensor? k_cmp, Tensor? v_cmp"
_OPTIONS = "int block, int? stride, int count, int window, int? length, float? scale, int? threads"
_NAMES = ("block", "stride", "count", "window", "length", "scale", "threads")


def _results(q, k, v, gates, block, count):
    """New tensors for o, the branches that it is the sum of, their log-sum-exps, and the blocks that are chosen."""
    for name, x in (("q", q), ("k", k), ("v", v), ("gates", gates)):
        if x.dim() != 4:
            raise InvalidArgument(f"nsa: {name} has shape {list(x.shape)}, expected [B, T, H, D]")
    for name, x in (("block", block), ("count", count)):
        if x < 1:
            raise InvalidArgument(f"nsa: {name} is {x}, expected 1 or more")
    batch, rows, heads, _ = q.shape
    channels, columns = v.shape[-1], min(max(count, 3), (k.shape[1] + block - 1) // block)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_empty((batch, rows, heads, channels)),
        q.new_empty((3, batch, rows, heads, channels)),
        q.new_empty((3, batch, heads, rows), dtype=lse_dtype),
        q.new_empty((batch, rows, k.shape[2], columns), dtype=torch.int32),
    )


def _forward(q, k, v, gates, k_cmp, v_cmp, block, stride, count, window, length, scale, threads):
    results = _results(q, k, v, gates, block, count)
    _core._torch_nsa(q, k, v, gates, k_cmp, v_cmp, *results, block, stride, count, window, length, scale, threads)
    return results


def _fake(q, k, v, gates, k_cmp, v_cmp, block, stride, count, *others):
    return _results(q, k, v, gates, block, count)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad_o, q, k, v, gates, k_cmp, v_cmp, branches, lse, blocks, needed, *options):
    inputs = (q, k, v, gates, k_cmp, v_cmp)
    gradients = _new_gradients(inputs, needed)
    _core._torch_nsa_backward(grad_o, *inputs, branches, lse, blocks, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, q, k, v, gates, k_cmp, v_cmp, branches, lse, blocks, needed, *options):
    return [x for x in _new_gradients((q, k, v, gates, k_cmp, v_cmp), needed) if x is not None]


def _differentiate(needed, of_results, *arguments_and_results):
    arguments, (_, branches, lse, blocks) = arguments_and_results[:-4], arguments_and_results[-4:]
    wanted = [bool(need) for need in needed[:6]]
    found = _backward_operator(of_results[0], *arguments[:6], branches, lse, blocks, wanted, *arguments[6:])
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _tangents(of_arguments, *arguments_and_results):
    return _derivatives.tangents(of_arguments, 4, *arguments_and_results)


_derivatives = Derivatives(
    "nsa", ("o",), ("q", "k", "v", "gates", "k_cmp?", "v_cmp?"), ("branches", "lse", "blocks"), _OPTIONS,
    _nsa_derivatives.kernel, lambda branches, *others: [branches[0]], lambda *arguments: _backward_operator(*arguments),
)
_backward_operator = _dispatch.define(
    "nsa_backward",
    f"(Tensor grad_o, {_TENSORS}, Tensor branches, Tensor lse, Tensor blocks, bool[] needed, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_derivatives.differentiate_twice,
    tangents=_derivatives.tangents_of_gradients,
    names=("the gradient of o", *_INPUTS, "branches", "lse", "blocks", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "nsa",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor branches, Tensor lse, Tensor blocks)",
    _forward,
    _fake,
    gradients=_differentiate,
    tangents=_tangents,
    keeps_results=True,
    unread=(len(_INPUTS) + len(_NAMES),),  # o
    constant=(1, 2, 3),
    num_cast=6,
)


@functools.wraps(heed.nsa, assigned=("__name__",))
def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    block: int = 64,
    stride: int | None = None,
    count: int = 16,
    window: int = 512,
    compressed: Sequence[Tensor] | None = None,
    length: int | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> Tensor:
    _dispatch.check_tensors("nsa", q=q, k=k, v=v, gates=gates)
    if compressed is not None and not (isinstance(compressed, Sequence) and len(compressed) == 2):
        kind = type(compressed).__name__
        raise InvalidArgument(f"nsa: compressed is of type {kind}, expected a pair (k_cmp, v_cmp), or None")
    k_cmp, v_cmp = (None, None) if compressed is None else compressed
    if compressed is not None:
        _dispatch.check_tensors("nsa", **{"compressed[0]": k_cmp, "compressed[1]": v_cmp})
    inputs = (q, k, v, gates, k_cmp, v_cmp)
    return _dispatch.call("nsa", _operator, *inputs, block, stride, count, window, length, scale, threads)[0]


nsa.__module__ = "heed.torch"
nsa.__doc__ = _signatures.text_on_tensors(heed.nsa) + """

In PyTorch. Gradients reach q, k, v, gates and compressed, those of second derivatives and of forward mode too, but none
the choice of blocks. Under autocast inputs and results take its dtype. The operator is torch.ops.heed.nsa."""
nsa.__signature__ = _signatures.of_tensors(heed.nsa, without=("out",))
