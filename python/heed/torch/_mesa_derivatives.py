# Second derivatives and forward mode of mesa: its solver as an operator, and the composition that mesa is.
"""mesa is a recurrence of gla whose queries are solutions: with A_t = H_kk,t + diag(lambda), in the notation of mesa.h,

  A_t x_t = q_t,  o_t = H_kv,t^T x_t

`torch.ops.heed.mesa_solve` computes x by mesa's solver. Its derivatives are solutions with the same matrices, and
products H_kk x are the recurrence R(x, beta k, k) of gla, by implicit differentiation: for what arrives at x, with
y = A^-T dx,

  dq = y,  dlambda = -sum_t y_t x_t,  and those of beta, k, log_decay and H_kk are the gradients of R for -y at it
  x' = A^-1 (q' - lambda' x - R'),  where R' is the tangent of R for a constant x

Both are made of operators that have derivatives, so that mesa has those of every order, whose memory is linear in the
number of tokens. The solver counts as exact, as in mesa's backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heed import InvalidArgument, _core
from heed.torch import _dispatch
from heed.torch._recurrences import GRADIENTS, along_gla, plus_product
from heed.torch._scans import Scan, Sequences, at_most_0


def _solve_kernel(q, k, beta, lamb, log_decay, H_kk, known, lengths, threads, iterations, eps):
    if known is not None:
        return known.clone()
    v = torch.zeros_like(q[..., :1])
    x = torch.empty_like(q, memory_format=torch.contiguous_format)
    state = None if H_kk is None else F.pad(H_kk.detach(), (0, 1))
    _core._torch_mesa(q, k, v, beta, lamb, torch.empty_like(v), None, x, log_decay, iterations, eps, state, lengths,
                      None, None, threads)
    return x


def _transposed(H_kk: Any) -> Any:
    return None if H_kk is None else H_kk.mT


def _solve_gradients(needed, of_results, q, k, beta, lamb, log_decay, H_kk, known, lengths, threads, iterations, eps,
                     x):
    transposed = _transposed(H_kk)
    y = _solve(*of_results, k, beta, lamb, log_decay, transposed, None, lengths, threads, iterations, eps)
    _, need_k, need_beta, need_lamb, need_decay, need_H, *_ = needed
    found = {0: y, 3: -(y * x).sum((0, 1)) if need_lamb else None}
    if need_k or need_beta or need_decay or need_H:
        _, of_key, of_value, found[4], _, of_H = GRADIENTS["gla"](
            Scan(lengths, threads), -y, None, x, beta[..., None] * k, k, log_decay, None, transposed,
            (False, need_k or need_beta, need_k, need_decay, False, need_H))
        found[1] = torch.addcmul(of_value, beta[..., None], of_key) if need_k else None
        found[2] = (k * of_key).sum(-1) if need_beta else None
        found[5] = _transposed(of_H)
    return found


def _solve_tangents(of_arguments, q, k, beta, lamb, log_decay, H_kk, known, lengths, threads, iterations, eps, x):
    dq, dk, dbeta, dlamb, dg, dH = of_arguments[:6]
    dkey = plus_product(None, beta[..., None], dk)
    dkey = dkey if dbeta is None else plus_product(dkey, dbeta[..., None], k)
    right = plus_product(torch.zeros_like(x) if dq is None else dq, dlamb, x, -1)
    if any(y is not None for y in (dkey, dg, dH)):
        right = right - along_gla(Scan(lengths, threads), (None, dkey, dk, dg, None, _transposed(dH)), x,
                                  beta[..., None] * k, k, log_decay, None, _transposed(H_kk))[0]
    return _solve(right, k, beta, lamb, log_decay, H_kk, None, lengths, threads, iterations, eps)


_solve = _dispatch.define(
    "mesa_solve",
    "(Tensor q, Tensor k, Tensor beta, Tensor lamb, Tensor? log_decay, Tensor? H_kk, Tensor? known, Tensor? lengths, "
    "int? threads, int iterations, float eps) -> Tensor",
    _solve_kernel,
    lambda q, *others: torch.empty_like(q, memory_format=torch.contiguous_format),
    gradients=_solve_gradients,
    tangents=_solve_tangents,
    keeps_results=True,
)


def composition(tensors: Sequence[Any], tokens: Sequence[Any], options: Sequence[Any], *, with_state: bool,
                solution: Any = None) -> tuple[Tensor, Any, Tensor]:
    """o, the final state if it is wanted, and the solutions, which may be known.

    `tensors` are q, k, v, beta, lamb, log_decay and the initial state, `tokens` are lengths, starts and cu_seqlens,
    `options` are threads, iterations and eps.
    """
    q, k, v, beta, lamb, log_decay, state = tensors
    if v.shape[:-1] != q.shape[:-1]:
        expected = f"[{','.join(map(str, q.shape[:-1]))},V]"
        raise InvalidArgument(f"mesa: v has shape {list(v.shape)}, expected {expected}")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = Sequences(*q.shape[:2], *tokens, False, q.device)

    def in_order(x: Any) -> Any:
        return None if x is None else sequences.gather(x.to(wide))

    query, key, value, beta, log_decay, solution = map(in_order, (q, k, v, beta, log_decay, solution))
    log_decay = None if log_decay is None else at_most_0(log_decay)
    channels = q.shape[-1]
    H_kk, H_kv = (None, None) if state is None else (state[..., :channels], state[..., channels:])
    x = _solve(query, key, beta, lamb.to(wide), log_decay, H_kk, solution, sequences.lengths, *options)
    values, before = (torch.cat([key, value], -1), state) if with_state else (value, H_kv)
    read, state = Scan(sequences.lengths, options[0]).gla(x, beta[..., None] * key, values, log_decay, None, before)
    o = sequences.scatter(read[..., -v.shape[-1]:]).to(q.dtype)
    return o, state if with_state else None, sequences.scatter(x)
