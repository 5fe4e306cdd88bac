# titans as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.titans`, its gradients, heed.torch.titans and its step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import _signatures
from heed.torch._functions import _without_gradient
from heed.torch._test_time_training import Memory, check_shapes, normalised, wide


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
    B, T, H, K = check_shapes("titans", q, lambda B, T, H, K: {
        "k": (k, q.shape), "v": (v, q.shape), "weight": (weight, (H, K)), "bias": (bias, (H, K)),
        "theta": (theta, (B, T, H)), "alpha": (alpha, (B, T, H)), "eta": (eta, (B, T, H)),
        "initial_state": (initial_state, (B, H, 3, K, K))})  # fmt: skip
    dtype, of_state = q.dtype, wide(q)
    q, k, v = (x.to(of_state).transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    theta, alpha, eta = (x.to(of_state).transpose(1, 2) for x in (theta, alpha, eta))
    w, c = (x.to(of_state)[:, None] for x in (weight, bias))
    q = scale * q
    if initial_state is None:
        M = S = q.new_zeros((B, H, K, K))
    else:
        M, S = initial_state[:, :, 0], initial_state[:, :, 1]
    A, o = torch.zeros_like(M), []
    for begin in range(0, T, mini_batch):
        end = min(begin + mini_batch, T)
        queries, keys, values = (x[:, :, begin:end] for x in (q, k, v))
        x, r = normalised(keys @ M, eps)
        u = w * (w * x + c - (values - keys))
        g = 2 * theta[:, :, begin:end, None] * r * (u - u.mean(-1, keepdim=True) - x * (x * u).mean(-1, keepdim=True))
        b, f, h, of_M, of_S = _coefficients(alpha[:, :, begin:end], eta[:, :, begin:end])
        y = b * (queries @ M) + f * (queries @ S) - (of_M * (queries @ keys.mT)) @ g
        o.append(y + w * normalised(y, eps)[0] + c)
        A = M if end - begin < mini_batch else torch.zeros_like(M)
        change, step = ((keys * of[:, :, -1, :, None]).mT @ g for of in (of_M, of_S))
        M, S = b[:, :, -1:] * M + f[:, :, -1:] * S - change, h[:, :, -1:] * S - step
    o = torch.cat(o, 2) if o else torch.zeros_like(q)
    return o.transpose(1, 2).to(dtype), torch.stack([M, S, A], 2)


_memory = Memory(
    "titans",
    "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor bias, Tensor theta, Tensor alpha, Tensor eta",
    "int mini_batch, float eps, float scale, Tensor? positions, Tensor? initial_state, Tensor? lengths, "
    "Tensor? starts, Tensor? cu_seqlens, int? threads",
    lambda K: (3, K, K),
    _composition,
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
    return _memory(return_state, q=q, k=k, v=v, weight=weight, bias=bias, theta=theta, alpha=alpha, eta=eta,
                   mini_batch=mini_batch, eps=eps, scale=scale, positions=positions, initial_state=initial_state,
                   lengths=lengths, starts=starts, cu_seqlens=cu_seqlens, threads=threads)


titans.__module__ = "heed.torch"
titans.__doc__ = _signatures.text_on_tensors(heed.titans) + """

In PyTorch. Gradients reach q, k, v, weight, bias, theta, alpha, eta and initial_state; also second ones and those of
forward mode, without positions, lengths, starts and cu_seqlens. The operator is torch.ops.heed.titans."""
titans.__signature__ = _signatures.of_tensors(heed.titans)

titans_step = _without_gradient("titans_step", "q", "k", "v", "weight", "bias", "theta", "alpha",
                                "eta", "state")
