# The second derivative of selective scans.
"""Equations of `_second_derivatives.py` for a selective scan whose B and C are given per token:

  h_t = a_t h_{t-1} + x_t B_t,  y_t = <C_t, h_t>,  with a_t = exp(s_t A) and x_t = s_t u_t         h_t: [D, N]

In a direction (s', u', A', B', C') with x' = s' u + s u' and g' = s' A + s A', and with the gradient q_t of h_t,

  h'_t = a_t h'_{t-1} + x'_t B_t + x_t B'_t + g'_t a_t h_{t-1}
  q_t  = a_{t+1} q_{t+1} + dy_t C_t
  q'_t = a_{t+1} q'_{t+1} + dy_t C'_t + g'_{t+1} a_{t+1} q_{t+1}

the gradients of <dy, y'> are the derivatives of those of <dy, y>:

  ddy_t = <C'_t, h_t> + <C_t, h'_t>        dC_t = sum over channels of dy_t h'_t
  dx_t  = <q'_t, B_t> + <q_t, B'_t>        dB_t = sum over channels of q'_t x_t + q_t x'_t
  dx'_t = <q_t, B_t>                       dg_t = q'_t a_t h_{t-1} + q_t (a_t h_{t-1})',  dg'_t = q_t a_t h_{t-1}
  ds_t  = <dg_t, A> + <dg'_t, A'>          dA   = sum over tokens of dg_t s_t + dg'_t s'_t

Each of the four recurrences is hgrn, for one state number n at a time, so that memory is that of a few [B, T, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed import _core
from heed.torch._compositions import Scan


def _recur(scan: Scan, x: Tensor, g: Tensor, h: Any, out: Tensor, last: Any = None) -> Tensor:
    _core._torch_hgrn(x, g, h, *scan.rest(), out, last)
    return out


def twice(scan: Scan, dy: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
          needed_along: Sequence[bool], scale: float):
    """Not differentiable: it works in place."""
    u, s, A, B, C, h0 = tensors
    du, ds, dA, dB, dC, dh0 = along
    count, tokens, D = u.shape
    N, back = A.shape[1], scan.reversed()

    def sums(shape: Sequence[int]) -> Tensor:
        return u.new_zeros(shape)

    u, s, dy, du, ds = (None if z is None else z.contiguous() for z in (u, s, dy, du, ds))
    if scan.lengths is not None:
        valid = scan.is_valid(s)
        s, ds = s * valid, None if ds is None else ds * valid
    x, x_along = s * u, None
    if ds is not None:
        x_along = ds * u
    if du is not None:
        x_along = s * du if x_along is None else x_along.addcmul_(s, du)
    # Decays and their tangents have a token more, whose decay is 0: a reversed recurrence begins one later.
    g_more = sums((count, tokens + 1, D))
    moves = ds is not None or dA is not None
    g_along_more = torch.zeros_like(g_more) if moves else None
    g, g_next = g_more[:, :-1], g_more[:, 1:]
    g_along, g_along_next = (g_along_more[:, :-1], g_along_more[:, 1:]) if moves else (None, None)
    h, h_along, q, q_along, w, w_along, e, r, t = (torch.empty_like(x) for _ in range(9))
    y_along, of_x, of_x_along, of_s = (torch.zeros_like(x) for _ in range(4))
    of_s_along = torch.zeros_like(x) if needed_along[1] else None
    of_A, of_B, of_C = torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C)
    last, of_h0 = sums((count, D, N)), None if h0 is None else torch.zeros_like(h0)
    of_dh0 = None if dh0 is None else torch.zeros_like(dh0)
    zero = sums((count, D))
    for n in range(N):
        A_n, dA_n = (None if z is None else z[:, n].contiguous() for z in (A, dA))
        B_n, C_n, dB_n, dC_n = (None if z is None else z[..., n, None] for z in (B, C, dB, dC))
        h0_n, dh0_n = (None if z is None else z[..., n].contiguous() for z in (h0, dh0))
        W_n = None if W is None else W[..., n].contiguous()
        end = torch.empty_like(zero)
        torch.mul(s, A_n, out=g)  # hgrn takes a positive one for 0
        torch.mul(x, B_n, out=w)
        _recur(scan, w, g, h0_n, h)
        torch.sub(h, w, out=e)
        # Writes of h', of which e' is h' without what B and x write.
        if x_along is None:
            w_along.zero_()
        else:
            torch.mul(x_along, B_n, out=w_along)
        if dB is not None:
            w_along.addcmul_(x, dB_n)
        written = w_along
        if moves:
            if ds is None:
                torch.mul(s, dA_n, out=g_along)
            else:
                torch.mul(ds, A_n, out=g_along)
                if dA is not None:
                    g_along.addcmul_(s, dA_n)
            written = torch.addcmul(w_along, g_along, e, out=t)
        _recur(scan, written, g, dh0_n, h_along, end)
        last[..., n] = end
        y_along.addcmul_(h_along, C_n)
        if dC is not None:
            y_along.addcmul_(h, dC_n)
        torch.sum(torch.mul(dy, h_along, out=t), 2, out=of_C[..., n])
        torch.mul(dy, C_n, out=w)
        _recur(back, w, g_next, W_n, q)
        if dC is None:
            t.zero_()
        else:
            torch.mul(dy, dC_n, out=t)
        if moves:
            t.addcmul_(g_along_next, torch.sub(q, w, out=w))
        _recur(back, t, g_next, None, q_along)
        torch.mul(x, q_along, out=t)
        if x_along is not None:
            t.addcmul_(x_along, q)
        torch.sum(t, 2, out=of_B[..., n])
        of_x.addcmul_(q_along, B_n)
        of_x_along.addcmul_(q, B_n)
        if dB is not None:
            of_x.addcmul_(q, dB_n)
        torch.mul(q, e, out=r)
        torch.mul(q_along, e, out=t).addcmul_(q, h_along.sub_(w_along))
        of_s.addcmul_(t, A_n)
        if dA is not None:
            of_s.addcmul_(r, dA_n)
        if of_s_along is not None:
            of_s_along.addcmul_(r, A_n)
        of_A[:, n] = torch.mul(t, s, out=t).sum((0, 1))
        if ds is not None:
            of_A[:, n] += torch.mul(r, ds, out=r).sum((0, 1))
        first = torch.exp(scan.first(g).clamp(max=0))
        if of_h0 is not None:
            of_h0[..., n] = first * scan.first(q_along)
            if moves:
                of_h0[..., n] += first * scan.first(g_along) * scan.first(q)
        if of_dh0 is not None:
            of_dh0[..., n] = first * scan.first(q)
    of_u = s * of_x
    of_s.addcmul_(u, of_x)
    if ds is not None:
        of_u.addcmul_(ds, of_x_along)
    if du is not None:
        of_s.addcmul_(du, of_x_along)
    if of_s_along is not None:
        of_s_along.addcmul_(u, of_x_along)
    return (y_along, last), (of_u, of_s, of_A, of_B, of_C, of_h0), (None, of_s_along, None, None, None, of_dh0)
