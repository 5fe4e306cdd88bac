# The second derivative of selective scans.
"""Equations of `_second_derivatives.py` for a selective scan whose B and C are given per token:

  h_t = a_t h_{t-1} + x_t B_t,  y_t = <C_t, h_t>,  o_t = silu(z_t) (y_t + D u_t),  with a_t = exp(s_t A), x_t = s_t u_t

In a direction (u', s', A', B', C', D', z') with x' = s' u + s u' and g' = s' A + s A',

  o'_t  = silu(z_t) (y'_t + D' u_t + D u'_t) + silu'(z_t) z'_t (y_t + D u_t)

If w_t arrives at o'_t, then dy_t = silu(z_t) w_t arrives at y'_t and dy'_t = silu'(z_t) z'_t w_t at y_t. With the
gradient q_t of h'_t and q'_t of h_t,

  h'_t = a_t h'_{t-1} + x'_t B_t + x_t B'_t + g'_t a_t h_{t-1}
  q_t  = a_{t+1} q_{t+1} + dy_t C_t
  q'_t = a_{t+1} q'_{t+1} + dy_t C'_t + dy'_t C_t + g'_{t+1} a_{t+1} q_{t+1}
  y'_t  = <C'_t, h_t> + <C_t, h'_t>        dC_t = sum over channels of dy_t h'_t + dy'_t h_t
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
from heed.torch._scans import Scan


def _in_rows(x: Any) -> Any:
    """[S, T, D], contiguous. PyTorch transposes matrices by blocks, but tensors of more axes element by element."""
    if x is None or x.is_contiguous():
        return x
    rows = x.new_empty(x.shape)
    for to, sequence in zip(rows, x):
        to.copy_(sequence)
    return rows


def _recur(scan: Scan, x: Tensor, g: Tensor, h: Any, out: Tensor, last: Any = None) -> None:
    _core._torch_hgrn(x, g, h, *scan.rest(), 0, out, last)  # in no segments


def _recur_along(scan: Scan, x: Tensor, x_along: Tensor, g: Tensor, g_along: Any, h: Any, h_along: Any, out: Tensor,
                 out_along: Tensor, rest: Tensor, scratch: Tensor, last_along: Any = None) -> None:
    """A recurrence and its tangent, whose writes are x' and g'_t a_t h_{t-1}; `rest` takes a_t h_{t-1}."""
    _recur(scan, x, g, h, out)
    torch.sub(out, x, out=rest)
    written = x_along if g_along is None else torch.addcmul(x_along, g_along, rest, out=scratch)
    _recur(scan, written, g, h_along, out_along, last_along)


def twice(scan: Scan, w: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
          needed_along: Sequence[bool], scale: float):
    """o' and the final state's tangent, and the gradients of <w, o'> + <W, h_T'>, without derivatives of their own."""
    u, s, *of_scan, D, z = tensors
    du, ds, *along_scan, dD, dz = along
    w, u, s, z, du, ds, dz = map(_in_rows, (w, u, s, z, du, ds, dz))
    gate = slope = curvature = None
    dy, dy_along = w, None
    if z is not None:
        part = torch.sigmoid(z)
        gate, slope = z * part, part * (1 + z * (1 - part))
        curvature = part * (1 - part) * (2 + z * (1 - 2 * part))
        dy = gate * w
        dy_along = None if dz is None else slope * dz * w
    (y, y_along, last), gradients, of_along = _twice(scan, dy, dy_along, W, (u, s, *of_scan), (du, ds, *along_scan),
                                                       needed_along)
    of_D = of_z = None
    if D is not None:
        if du is not None:
            y_along += D * du
            of_D = (dy * du).sum((0, 1))
        if dD is not None:
            y_along += dD * u
            gradients[0] += dD * dy
        if dy_along is not None:
            y += D * u
            gradients[0] += D * dy_along
            of_D = (dy_along * u).sum((0, 1)) + (0 if of_D is None else of_D)
    o_along = y_along
    if z is not None:
        of_z = slope * y_along
        o_along = gate * y_along
        if dz is not None:
            o_along += slope * dz * y
            of_z += curvature * dz * y
        of_z *= w
    return (o_along, last), (*gradients, of_D, of_z), (*of_along, None, None)


def _twice(scan: Scan, dy: Tensor, dy_along: Any, W: Any, tensors: Sequence[Any], along: Sequence[Any],
           needed_along: Sequence[bool]) -> Any:
    """y, y' and the final state's tangent, and the gradients of <dy, y'> + <dy', y> + <W, h_T'>."""
    u, s, A, B, C, h0 = tensors
    du, ds, dA, dB, dC, dh0 = along
    count, tokens, D = u.shape
    N, back = A.shape[1], scan.reversed()
    if scan.lengths is not None:
        valid = scan.is_valid(s)
        s, ds = s * valid, None if ds is None else ds * valid
    x, x_along = s * u, None
    if ds is not None:
        x_along = ds * u
    if du is not None:
        x_along = s * du if x_along is None else x_along.addcmul_(s, du)
    # Decays and their tangents have a token more, whose decay is 0: a reversed recurrence begins one later.
    g_more = u.new_zeros((count, tokens + 1, D))
    moves = ds is not None or dA is not None
    g_along_more = torch.zeros_like(g_more) if moves else None
    g, g_next = g_more[:, :-1], g_more[:, 1:]
    g_along, g_along_next = (g_along_more[:, :-1], g_along_more[:, 1:]) if moves else (None, None)
    h, h_along, q, q_along, w, w_along, e, t = (torch.empty_like(x) for _ in range(8))
    y_along, of_x, of_s = (torch.zeros_like(x) for _ in range(3))
    y = None if dy_along is None else torch.zeros_like(x)  # y is read by tangents of z alone
    of_x_along = None if x_along is None and not needed_along[1] else torch.zeros_like(x)
    of_s_along = torch.zeros_like(x) if needed_along[1] else None
    of_A, of_B, of_C = torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C)
    last, of_h0 = u.new_zeros((count, D, N)), None if h0 is None else torch.zeros_like(h0)
    of_dh0 = None if dh0 is None else torch.zeros_like(dh0)
    zero = u.new_zeros((count, D))
    for n in range(N):
        A_n, dA_n = (None if z is None else z[:, n].contiguous() for z in (A, dA))
        B_n, C_n, dB_n, dC_n = (None if z is None else z[..., n, None] for z in (B, C, dB, dC))
        h0_n, dh0_n = (None if z is None else z[..., n].contiguous() for z in (h0, dh0))
        W_n = None if W is None else W[..., n].contiguous()
        end = torch.empty_like(zero)
        torch.mul(s, A_n, out=g)  # hgrn takes a positive one for 0
        torch.mul(x, B_n, out=w)
        # w' is the part of h' that B and x write; e' is the rest.
        if x_along is None:
            w_along.zero_()
        else:
            torch.mul(x_along, B_n, out=w_along)
        if dB is not None:
            w_along.addcmul_(x, dB_n)
        if moves:
            if ds is None:
                torch.mul(s, dA_n, out=g_along)
            else:
                torch.mul(ds, A_n, out=g_along)
                if dA is not None:
                    g_along.addcmul_(s, dA_n)
        _recur_along(scan, w, w_along, g, g_along, h0_n, dh0_n, h, h_along, e, t, end)
        last[..., n] = end
        if y is not None:
            y.addcmul_(h, C_n)
        y_along.addcmul_(h_along, C_n)
        if dC is not None:
            y_along.addcmul_(h, dC_n)
        torch.mul(dy, h_along, out=t)
        if dy_along is not None:
            t.addcmul_(dy_along, h)
        torch.sum(t, 2, out=of_C[..., n])
        torch.mul(dy, C_n, out=w)
        if dC is None:
            t.zero_()
        else:
            torch.mul(dy, dC_n, out=t)
        if dy_along is not None:
            t.addcmul_(dy_along, C_n)
        _recur_along(back, w, t, g_next, g_along_next, W_n, None, q, q_along, w, t)
        torch.mul(x, q_along, out=t)
        if x_along is not None:
            t.addcmul_(x_along, q)
        torch.sum(t, 2, out=of_B[..., n])
        of_x.addcmul_(q_along, B_n)
        if of_x_along is not None:
            of_x_along.addcmul_(q, B_n)
        if dB is not None:
            of_x.addcmul_(q, dB_n)
        r = torch.mul(q, e, out=w)
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
    return (y, y_along, last), [of_u, of_s, of_A, of_B, of_C, of_h0], (None, of_s_along, None, None, None, of_dh0)
