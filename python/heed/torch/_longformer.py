# longformer as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.longformer`, its gradients, and heed.torch.longformer. `_dispatch.py` describes operators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core, _signatures
from heed.torch import _dispatch, _longformer_derivatives
from heed.torch._branch_derivatives import Derivatives
from heed.torch._options import Options

_options = Options("longformer", _core._longformer_options)
_OPTIONS = f"int window, Tensor tokens, {_options.schema}"
_NAMES = ("window", "tokens", *_options.names)
_INPUTS = ("q", "k", "v", "qg", "kg", "vg")
_PACKED = _NAMES.index("cu_seqlens_q")


def _results(q, v, options):
    """New tensors for o and lse."""
    packed = len(options) > _PACKED and options[_PACKED] is not None
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 and not (packed and x.dim() == 3):
            expected = "[T_total, H, D] or [1, T_total, H, D]" if packed else "[B, T, H, D]"
            raise InvalidArgument(f"longformer: {name} has shape {list(x.shape)}, expected {expected}")
    *batch, rows, heads, _ = q.shape
    lse_shape = (heads, rows) if packed else (*batch, heads, rows)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*batch, rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


def _forward(q, k, v, qg, kg, vg, *options):
    o, lse = _results(q, v, options)
    _core._torch_longformer(q, k, v, qg, kg, vg, o, lse, *options)
    return o, lse


def _fake(q, k, v, qg, kg, vg, *options):
    return _results(q, v, options)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad_o, grad_lse, q, k, v, qg, kg, vg, o, lse, needed, *options):
    inputs = (q, k, v, qg, kg, vg)
    gradients = _new_gradients(inputs, needed)
    _core._torch_longformer_backward(grad_o, grad_lse, *inputs, o, lse, *gradients, *options)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_lse, q, k, v, qg, kg, vg, o, lse, needed, *options):
    return [x for x in _new_gradients((q, k, v, qg, kg, vg), needed) if x is not None]


def _differentiate(needed, of_results, *arguments_and_results):
    *arguments, o, lse = arguments_and_results
    grad_o, grad_lse = of_results
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    wanted = [bool(need) for need in needed[:6]]
    found = _backward_operator(grad_o, grad_lse, *arguments[:6], o, lse, wanted, *arguments[6:])
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _tangents(of_arguments, *arguments_and_results):
    return _derivatives.tangents(of_arguments, 2, *arguments_and_results)


def _second(along, incoming, tensors, saved, needed, window, tokens, *options):
    given = dict(zip(_options.names, _options.defaults)) | dict(zip(_options.names, options))
    return _longformer_derivatives.kernel(along, incoming, tensors, saved, needed, window, tokens, options=given)


_derivatives = Derivatives(
    "longformer", ("o", "lse"), ("q", "k", "v", "qg?", "kg?", "vg?"), ("o", "lse"), _OPTIONS, _second,
    lambda *saved: saved, lambda *arguments: _backward_operator(*arguments),
)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? qg, Tensor? kg, Tensor? vg"
_backward_operator = _dispatch.define(
    "longformer_backward",
    f"(Tensor grad_o, Tensor? grad_lse, {_TENSORS}, Tensor o, Tensor lse, bool[] needed, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_derivatives.differentiate_twice,
    tangents=_derivatives.tangents_of_gradients,
    names=("the gradient of o", "the gradient of lse", *_INPUTS, "o", "lse", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "longformer",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _forward,
    _fake,
    gradients=_differentiate,
    tangents=_tangents,
    keeps_results=True,
    num_cast=6,
)


@functools.wraps(heed.longformer, assigned=("__name__",))
def longformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qg: Tensor | None = None,
    kg: Tensor | None = None,
    vg: Tensor | None = None,
    *,
    window: int,
    tokens: Any,
    return_lse: bool = False,
    **keywords: Any,
) -> Any:
    for name in keywords:
        if name in _core._torch_longformer_refused:
            raise Unsupported(_core._torch_longformer_refused[name])
    _dispatch.check_bools("longformer", return_lse=return_lse)
    _dispatch.check_tensors("longformer", q=q, k=k, v=v)
    own = {name: x for name, x in (("qg", qg), ("kg", kg), ("vg", vg)) if x is not None}
    _dispatch.check_tensors("longformer", **own)
    tokens = _dispatch.numbers("longformer", "tokens", tokens, torch.int64)
    inputs = (q, k, v, qg, kg, vg)
    o, lse = _dispatch.call("longformer", _operator, *inputs, window, tokens, *_options.given(keywords, longformer))
    return (o, lse) if return_lse else o


longformer.__module__ = "heed.torch"
longformer.__doc__ = _signatures.text_on_tensors(heed.longformer) + """

In PyTorch. Gradients reach q, k, v, qg, kg, vg, through lse too, those of second derivatives and of forward mode as
well. seed=None draws from PyTorch's generator. Under autocast inputs and results take its dtype. The operator is
torch.ops.heed.longformer."""
longformer.__signature__ = _signatures.of_tensors(heed.longformer, without=("out",))
