# titans as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.titans`, its gradients, heed.torch.titans and its step.

Second derivatives and forward mode are those of a composition of PyTorch's functions, mini-batch by mini-batch, of
calls whose sequences are whole rows of the batch and begin with a mini-batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch
from heed.torch._functions import _without_gradient
from heed.torch._ttt_linear import _normalised, _wide

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor bias, Tensor theta, Tensor alpha, Tensor eta"
_OPTIONS = (
    "int mini_batch, float eps, float scale, Tensor? positions, Tensor? initial_state, Tensor? lengths, "
    "Tensor? starts, Tensor? cu_seqlens, int? threads"
)
_NAMES = ("q", "k", "v", "weight", "bias", "theta", "alpha", "eta", "mini_batch", "eps", "scale", "positions",
          "initial_state", "lengths", "starts", "cu_seqlens", "threads")  # fmt: skip
_REQUIRED = 8
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 6, 7, 12)
_FIRST = 3  # of the backward operator's arguments that are the forward's


def _complete(arguments):
    """All arguments: PyTorch leaves trailing ones away that have their defaults."""
    return [*arguments, *[None] * (len(_NAMES) - len(arguments))]


def _results(*arguments):
    """New tensors for o and the state."""
    q, v, *_, cu_seqlens, _ = (arguments[0], *_complete(arguments)[2:])
    for name, x, axes in (("q", q, "H, K"), ("v", v, "H, V")):
        if x.dim() != 4:
            raise InvalidArgument(f"titans: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    sequences = _dispatch.num_sequences("titans", q.shape[0], cu_seqlens)
    heads, channels = q.shape[2:]
    return q.new_empty(q.shape), q.new_empty((sequences, heads, 3, channels, channels), dtype=_wide(q))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_titans(*arguments[:_REQUIRED], *results, *arguments[_REQUIRED:])
    return results


def _new_gradients(arguments, needed):
    return [
        torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
        for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o, grad_state, needed, *arguments):
    gradients = _new_gradients(arguments, needed)
    _core._torch_titans_backward(grad_o, grad_state, *arguments[:_REQUIRED], *gradients, *arguments[_REQUIRED:])
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_state, needed, *arguments):
    return [x for x in _new_gradients(arguments, needed) if x is not None]


def _coefficients(alpha, eta):
    """The coefficients of a mini-batch, [B, H, T, 1] and [B, H, T, T]: those of M and S before it in each M, that of S
    before it in each S, and those of the tokens in M and S."""
    size = alpha.shape[2]
    b, f, h = alpha.new_ones(alpha.shape[:2]), alpha.new_zeros(alpha.shape[:2]), alpha.new_ones(alpha.shape[:2])
    C = H = alpha.new_zeros((*alpha.shape[:2], size))
    rows = []
    for t, own in enumerate(torch.eye(size, dtype=alpha.dtype)):
        keep, eta_t = 1 - alpha[:, :, t], eta[:, :, t]
        h = eta_t * h
        b, f = keep * b, keep * f + h
        H = eta_t[..., None] * H + own
        C = keep[..., None] * C + H
        rows.append((b, f, h, C, H))
    b, f, h, C, H = (torch.stack(x, 2) for x in zip(*rows))
    return b[..., None], f[..., None], h[..., None], C, H


def _composition(q, k, v, weight, bias, theta, alpha, eta, initial_state, *, mini_batch, eps, scale):
    """o and the final state, in the equations of titans.h."""
    if q.dim() != 4:
        raise InvalidArgument(f"titans: q has shape {list(q.shape)}, expected [B, T, H, K]")
    B, T, H, K = q.shape
    gate = (B, T, H)
    for name, x, shape in (("k", k, q.shape), ("v", v, q.shape), ("weight", weight, (H, K)), ("bias", bias, (H, K)),
                           ("theta", theta, gate), ("alpha", alpha, gate), ("eta", eta, gate),
                           ("initial_state", initial_state, (B, H, 3, K, K))):
        if x is not None and x.shape != shape:
            raise InvalidArgument(f"titans: {name} has shape {list(x.shape)}, expected {list(shape)}")
    dtype, wide = q.dtype, _wide(q)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    theta, alpha, eta = (x.to(wide).transpose(1, 2) for x in (theta, alpha, eta))
    w, c = (x.to(wide)[:, None] for x in (weight, bias))
    q = scale * q
    if initial_state is None:
        M = S = q.new_zeros((B, H, K, K))
    else:
        M, S = initial_state[:, :, 0], initial_state[:, :, 1]
    A, o = torch.zeros_like(M), []
    for begin in range(0, T, mini_batch):
        end = min(begin + mini_batch, T)
        queries, keys, values = (x[:, :, begin:end] for x in (q, k, v))
        x, r = _normalised(keys @ M, eps)
        u = w * (w * x + c - (values - keys))
        g = 2 * theta[:, :, begin:end, None] * r * (u - u.mean(-1, keepdim=True) - x * (x * u).mean(-1, keepdim=True))
        b, f, h, of_M, of_S = _coefficients(alpha[:, :, begin:end], eta[:, :, begin:end])
        y = b * (queries @ M) + f * (queries @ S) - (of_M * (queries @ keys.mT)) @ g
        o.append(y + w * _normalised(y, eps)[0] + c)
        A = M if end - begin < mini_batch else torch.zeros_like(M)
        change, step = ((keys * of[:, :, -1, :, None]).mT @ g for of in (of_M, of_S))
        M, S = b[:, :, -1:] * M + f[:, :, -1:] * S - change, h[:, :, -1:] * S - step
    o = torch.cat(o, 2) if o else torch.zeros_like(q)
    return o.transpose(1, 2).to(dtype), torch.stack([M, S, A], 2)


def _composed(arguments):
    """The composition as a function of the differentiable arguments, and these."""
    arguments = _complete(arguments)
    options = dict(zip(_NAMES[8:11], arguments[8:11]))
    for i in (11, 13, 14, 15):
        if arguments[i] is not None:
            raise Unsupported(f"titans: a second or forward derivative was asked for with {_NAMES[i]}, which heed "
                              "does not have")
    return functools.partial(_composition, **options), [arguments[i] for i in _DIFFERENTIABLE]


def _differentiate(needed, of_results, *arguments):
    wanted = [i < len(needed) and bool(needed[i]) for i in _DIFFERENTIABLE]
    of_o, of_state = of_results
    if _dispatch.in_forward_mode():
        composed, tensors = _composed(arguments)
        found = _composed_derivatives.gradients(composed, (of_o, of_state), wanted, tensors, ())
    else:
        of_o = torch.zeros_like(arguments[0]) if of_o is None else of_o
        found = _backward_operator(of_o, of_state, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


def _differentiate_twice(needed, of_results, of_o, of_state, computed, *arguments):
    composed, tensors = _composed(arguments)
    places = (0, 1, *(_FIRST + i for i in _DIFFERENTIABLE))
    found = _composed_derivatives.of_gradients(composed, [i < len(needed) and needed[i] for i in places], of_results,
                                               (of_o, of_state), computed, tensors, ())
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "titans_backward",
    f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of the state", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "titans",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor state)",
    _forward,
    _results,
    gradients=_differentiate,
)


@functools.wraps(heed.titans, assigned=("__name__",))
def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    theta: Tensor,
    alpha: Tensor,
    eta: Tensor,
    *,
    mini_batch: int = 16,
    eps: float = 1e-6,
    scale: float = 1.0,
    positions: Any = None,
    initial_state: Tensor | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    threads: int | None = None,
) -> Any:
    name = "titans"
    _dispatch.check_bools(name, return_state=return_state)
    _dispatch.check_int(name, "mini_batch", mini_batch, 1)
    _dispatch.check_tensors(name, q=q, k=k, v=v, weight=weight, bias=bias, theta=theta, alpha=alpha, eta=eta)
    if initial_state is not None:
        _dispatch.check_tensors(name, initial_state=initial_state)
    positions, lengths, starts, cu_seqlens = (
        _dispatch.numbers(name, key, x, torch.int64)
        for key, x in (("positions", positions), ("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, k, v, weight, bias, theta, alpha, eta, mini_batch, eps, scale, positions, initial_state, lengths,
                 starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode():
        composed, tensors = _composed(arguments)
        o, state = composed(*tensors)
    else:
        o, state = _dispatch.call(name, _operator, *arguments)
    return (o, state) if return_state else o


titans.__module__ = "heed.torch"
titans.__doc__ = _signatures.text_on_tensors(heed.titans) + """

In PyTorch. Gradients reach q, k, v, weight, bias, theta, alpha, eta and initial_state; also second ones and those of
forward mode, without positions, lengths, starts and cu_seqlens. The operator is torch.ops.heed.titans."""
titans.__signature__ = _signatures.of_tensors(heed.titans)

titans_step = _without_gradient("titans_step", "q", "k", "v", "weight", "bias", "theta", "alpha",
                                "eta", "state")
