# merge_linear as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.merge_linear`, its gradients, and heed.torch.merge_linear. `_dispatch.py` describes operators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch

_TENSORS = "Tensor o, Tensor lse, Tensor num, Tensor den, Tensor? gate"


def _forward(o, lse, num, den, gate):
    out = torch.empty_like(o, memory_format=torch.contiguous_format)
    _core._torch_merge_linear(o, lse, num, den, gate, out)
    return out


def _fake(o, lse, num, den, gate):
    return torch.empty_like(o, memory_format=torch.contiguous_format)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad, o, lse, num, den, gate, needed):
    gradients = _new_gradients((o, lse, num, den, gate), needed)
    _core._torch_merge_linear_backward(grad, o, lse, num, den, gate, *gradients)
    return [x for x in gradients if x is not None]


def _fake_backward(grad, o, lse, num, den, gate, needed):
    return [x for x in _new_gradients((o, lse, num, den, gate), needed) if x is not None]


def _composed(o, lse, num, den, gate):
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    lse, den = lse.mT.double(), den.double()
    # A constant that cancels in the quotient.
    shift = torch.clamp(lse.detach(), min=0)
    exact, scale = torch.exp(lse - shift), torch.exp(-shift)
    exact = exact if gate is None else gate.double() * exact
    total = exact + scale * den
    empty = total == 0
    one = torch.where(empty, 0, 1 / torch.where(empty, 1, total))
    read = torch.where((lse == -torch.inf)[..., None], 0, o.to(wide))
    merged = torch.addcmul((exact * one).to(wide)[..., None] * read, (scale * one).to(wide)[..., None], num.to(wide))
    return (merged.to(o.dtype),)


def _differentiate(needed, of_results, *arguments):
    wanted = [bool(need) for need in needed]
    if _dispatch.in_forward_mode():
        found = _composed_derivatives.gradients(_composed, of_results, wanted, arguments, ())
    else:
        found = _backward_operator(of_results[0], *arguments, wanted)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _differentiate_twice(needed, of_results, grad, *tensors_and_computed):
    *tensors, computed = tensors_and_computed
    return _composed_derivatives.of_gradients(_composed, needed[:6], of_results, [grad], computed, tensors, ())


_backward_operator = _dispatch.define(
    "merge_linear_backward", f"(Tensor grad, {_TENSORS}, bool[] needed) -> Tensor[]", _backward, _fake_backward,
    gradients=_differentiate_twice, names=("the gradient of the result", "o", "lse", "num", "den", "gate", "needed"),
)
_operator = _dispatch.define("merge_linear", f"({_TENSORS}) -> Tensor", _forward, _fake, gradients=_differentiate)


@functools.wraps(heed.merge_linear, assigned=("__name__",))
def merge_linear(o: Tensor, lse: Tensor, num: Tensor, den: Tensor, *, gate: Any = None) -> Tensor:
    _dispatch.check_tensors("merge_linear", o=o, lse=lse, num=num, den=den)
    gate = _dispatch.numbers("merge_linear", "gate", gate)
    if gate is not None and not gate.is_floating_point():
        raise InvalidArgument(f"merge_linear: gate has dtype {gate.dtype}, expected a float dtype")
    if _dispatch.in_forward_mode():
        return _composed(o, lse, num, den, gate)[0]
    return _dispatch.call("merge_linear", _operator, o, lse, num, den, gate)


merge_linear.__module__ = "heed.torch"
merge_linear.__doc__ = _signatures.text_on_tensors(heed.merge_linear) + """

In PyTorch. Gradients reach all five, those of second derivatives and of forward mode too. The operator is
torch.ops.heed.merge_linear."""
merge_linear.__signature__ = _signatures.of_tensors(heed.merge_linear)
