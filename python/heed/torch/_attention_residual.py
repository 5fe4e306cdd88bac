# attention_residual as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.attention_residual`, its gradients, and heed.torch.attention_residual."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch

_TENSORS = "Tensor query, Tensor residuals, Tensor? weight"
_OPTIONS = "float eps, float scale, int? threads"


def _results(residuals):
    """New tensors for o and the probabilities."""
    if residuals.dim() < 3:
        raise InvalidArgument(
            f"attention_residual: residuals has shape {list(residuals.shape)}, "
            "expected [L, ..., D] with 1 to 4 axes of tokens"
        )
    wide = torch.float64 if residuals.dtype == torch.float64 else torch.float32
    return residuals.new_empty(residuals.shape[1:]), residuals.new_empty(residuals.shape[:-1], dtype=wide)


def _forward(query, residuals, weight, eps, scale, threads):
    results = _results(residuals)
    _core._torch_attention_residual(query, residuals, weight, *results, eps, scale, threads)
    return results


def _fake(query, residuals, weight, eps, scale, threads):
    return _results(residuals)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad, query, residuals, weight, needed, eps, scale, threads):
    inputs = (query, residuals, weight)
    gradients = _new_gradients(inputs, needed)
    _core._torch_attention_residual_backward(grad, *inputs, *gradients, eps, scale, threads)
    return [x for x in gradients if x is not None]


def _fake_backward(grad, query, residuals, weight, needed, eps, scale, threads):
    return [x for x in _new_gradients((query, residuals, weight), needed) if x is not None]


def _composition(query, residuals, weight, eps, scale, threads):
    """o and the probabilities."""
    rows, query = residuals.double(), query.double()  # no square overflows
    query = query if weight is None else query * weight.double()
    squares = torch.einsum("...d,...d->...", rows, rows) / rows.shape[-1]
    p = torch.softmax(scale * (rows @ query) * torch.rsqrt(squares + eps), 0)
    wide = torch.promote_types(residuals.dtype, torch.float32)
    p = p.to(wide)
    return torch.einsum("l...,l...d->...d", p, residuals.to(wide)).to(residuals.dtype), p


def _composed(*arguments):
    return _composition(*arguments)[:1]


def _differentiate(needed, of_results, *arguments):
    wanted = [bool(need) for need in needed[:3]]
    tensors, options = arguments[:3], arguments[3:]
    if _dispatch.in_forward_mode():
        found = _composed_derivatives.gradients(_composed, of_results[:1], wanted, tensors, options)
    else:
        found = _backward_operator(of_results[0], *tensors, wanted, *options)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _differentiate_twice(needed, of_results, grad, query, residuals, weight, computed, *options):
    return _composed_derivatives.of_gradients(_composed, needed[:4], of_results, [grad], computed,
                                              (query, residuals, weight), options)


_backward_operator = _dispatch.define(
    "attention_residual_backward",
    f"(Tensor grad, {_TENSORS}, bool[] needed, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "query", "residuals", "weight", "needed", "eps", "scale", "threads"),
)
_operator = _dispatch.define(
    "attention_residual",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor weights)",
    _forward,
    _fake,
    gradients=_differentiate,
    constant=(1,),
)


@functools.wraps(heed.attention_residual, assigned=("__name__",))
def attention_residual(
    query: Tensor,
    residuals: Tensor | Sequence[Tensor],
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    threads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    _dispatch.check_bools("attention_residual", return_weights=return_weights)
    if isinstance(residuals, (list, tuple)):
        _dispatch.check_tensors("attention_residual", **{f"residuals[{i}]": x for i, x in enumerate(residuals)})
        if not residuals:
            raise InvalidArgument("attention_residual: residuals is empty, expected at least one layer")
        residuals = torch.stack(tuple(residuals))
    _dispatch.check_tensors("attention_residual", query=query, residuals=residuals)
    if weight is not None:
        _dispatch.check_tensors("attention_residual", weight=weight)
    arguments = (query, residuals, weight, eps, scale, threads)
    if _dispatch.in_forward_mode():
        o, p = _composition(*arguments)
        results = o, p.detach()
    else:
        results = _dispatch.call("attention_residual", _operator, *arguments)
    return tuple(results) if return_weights else results[0]


attention_residual.__module__ = "heed.torch"
attention_residual.__doc__ = _signatures.text_on_tensors(heed.attention_residual) + """

In PyTorch. residuals may be a list of tensors [..., D], which are copied into one. Gradients reach query, residuals and
weight, those of second derivatives and of forward mode too, but none the probabilities. The operator is
torch.ops.heed.attention_residual."""
attention_residual.__signature__ = _signatures.of_tensors(heed.attention_residual)
