# The functions of mamba_ssm.ops on heed.
"""Selective scans, state updates and state space duality, with the arguments that mamba_ssm gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import heed.torch
from heed import InvalidArgument, Unsupported
from heed.compat import _packed
from heed.compat._door import speaking
from heed.compat.causal_conv1d import causal_conv1d_fn
from heed.torch import _dispatch

_INFINITE = (0.0, float("inf"))
_in_their_words = speaking(initial_state="initial_states", u="u", delta="delta")


def _wide(x: Tensor | None, like: Tensor) -> Tensor | None:
    """A state as heed takes it."""
    return x if x is None else x.to(torch.float64 if like.dtype == torch.float64 else torch.float32)


def _check_real(function: str, A: Tensor) -> None:
    if A.is_complex():
        raise Unsupported(f"{function}: A has dtype {A.dtype}, expected real numbers: heed has nothing else")


# --- Mamba-1 ----------------------------------------------------------------------------------------------------------


@_in_their_words
def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """The selective scan of u, delta, z [B, D, T]; B and C per token and group, per token, or constant."""
    _dispatch.check_tensors("selective_scan_fn", u=u, A=A)
    _check_real("selective_scan_fn", A)
    return heed.torch.selective_scan(
        u, delta, A, B, C, D, z, delta_bias=delta_bias, delta_softplus=bool(delta_softplus),
        return_state=bool(return_last_state)
    )


@_in_their_words
def mamba_inner_fn(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    """A Mamba-1 block between its projections: convolution, selective scan, gate, output projection; xz [B, 2 D, T]."""
    _dispatch.check_tensors("mamba_inner_fn", xz=xz, A=A)
    _check_real("mamba_inner_fn", A)
    rank, N = delta_proj_weight.shape[1], A.shape[-1]
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    of_tokens = F.linear(x.transpose(1, 2), x_proj_weight)  # [B, T, rank + 2 N]

    def normal(y: Tensor, weight: Tensor | None) -> Tensor:
        return y if weight is None else F.rms_norm(y, y.shape[-1:], weight, b_c_dt_rms_eps)

    def rows(given: Tensor | None, first: int, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        if given is not None:
            return given
        y = of_tokens[..., first : first + N]
        return normal(y if bias is None else y + bias, weight).transpose(1, 2)

    delta = normal(F.linear(of_tokens[..., :rank], delta_proj_weight), dt_rms_weight).transpose(1, 2)
    width = of_tokens.shape[-1]
    y = heed.torch.selective_scan(
        x,
        delta,
        A,
        rows(B, rank, B_proj_bias, b_rms_weight),
        rows(C, width - N, C_proj_bias, c_rms_weight),
        D,
        z,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
    )
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


# --- one token of either ----------------------------------------------------------------------------------------------


def _check_shapes(function: str, **of: tuple[Tensor | None, Sequence[int]]) -> None:
    for name, (x, shape) in of.items():
        if x is not None and tuple(x.shape) != tuple(shape):
            raise InvalidArgument(f"{function}: {name} has shape {list(x.shape)}, expected {list(shape)}")


@_in_their_words
def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    """One token: state [B, D, N] or [B, H, P, N] changes in place; x, dt, z and parameters have its axes.

    No gradient passes. A, D, dt and dt_bias may differ within a head.
    """
    name = "selective_state_update"
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _dispatch.check_tensors(name, **{key: y for key, y in given.items() if y is not None})
    _check_real(name, A)
    state, x, dt, A, B, C, D, z, dt_bias = (
        _dispatch.bare(name, key, y, written=key == "state") for key, y in given.items()
    )
    if state.dim() not in (3, 4):
        raise InvalidArgument(f"{name}: state has shape {list(state.shape)}, expected [B, D, N] or [B, H, P, N]")
    channels, N = tuple(state.shape[1:-1]), state.shape[-1]
    rows = x.shape[0]
    if state_batch_indices is None and state.shape[0] != rows:
        raise InvalidArgument(f"{name}: state has shape {list(state.shape)}, expected {rows} sequences as x")
    of_token, of_channel = (rows, *channels), channels
    _check_shapes(
        name,
        x=(x, of_token),
        dt=(dt, of_token),
        A=(A, (*channels, N)),
        D=(D, of_channel),
        z=(z, of_token),
        dt_bias=(dt_bias, of_channel),
        state_batch_indices=(state_batch_indices, (rows,)),
    )
    if state_batch_indices is None:
        chosen, own = state, state.dtype in (torch.float32, torch.float64) and state.is_contiguous()
    else:
        if bool((state_batch_indices < 0).any()):
            raise InvalidArgument(f"{name}: state_batch_indices is {state_batch_indices.tolist()}, expected at least 0")
        chosen, own = state[state_batch_indices.long()], False
    flat = chosen.reshape(rows, -1, N)
    flat = flat if own else _wide(flat, x).clone()

    def per_channel(y: Tensor | None, axis: int) -> Tensor | None:
        return y if y is None else y.flatten(axis, axis + len(channels) - 1)

    o = heed.torch.selective_scan_step(
        per_channel(x, 1),
        per_channel(dt, 1).to(x.dtype),
        per_channel(A, 0),
        B,
        C,
        flat,
        per_channel(D, 0),
        per_channel(z, 1),
        delta_bias=per_channel(dt_bias, 0),
        delta_softplus=dt_softplus,
    )
    if state_batch_indices is not None:
        state[state_batch_indices.long()] = flat.reshape(chosen.shape).to(state.dtype)
    elif not own:
        state.copy_(flat.reshape(chosen.shape))
    else:
        _dispatch.wrote(state)
    return o.reshape(x.shape)


# --- Mamba-2 ----------------------------------------------------------------------------------------------------------


@_in_their_words
def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=_INFINITE,
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):
    """State space duality of Mamba-2. Where seq_idx [B, T] changes, a sequence begins with a state of zeros.

    initial_states [B, H, P, N] are those of the first sequences whose index is 0. return_varlen_states takes the bounds
    of the sequences, cu_seqlens, with a batch of 1, and adds their last states.
    """
    name = "mamba_chunk_scan_combined"
    _dispatch.check_tensors(name, x=x, dt=dt, A=A, B=B, C=C)
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    initial = _wide(initial_states, x)
    if return_varlen_states and (cu_seqlens is None or seq_idx is None):
        missing = "cu_seqlens" if cu_seqlens is None else "seq_idx"
        raise InvalidArgument(f"{name}: {missing} is None, expected a tensor where return_varlen_states is True")
    if seq_idx is None:
        o, final = heed.torch.ssd(x, dt, A, B, C, z=z, **options, initial_state=initial, return_state=True)
        return (o, final) if return_final_states else o

    sequences = _packed.Sequences(name, seq_idx, *x.shape[:2])
    bounds = sequences.bounds
    if return_varlen_states:
        bounds = torch.as_tensor(cu_seqlens).long()
        if x.shape[0] != 1 or bounds.unique().tolist() != sequences.bounds.tolist():
            raise InvalidArgument(
                f"{name}: cu_seqlens is {bounds.tolist()}, expected the bounds that seq_idx has: "
                f"{sequences.bounds.tolist()} of a batch of 1"
            )
    places = torch.searchsorted(bounds, sequences.bounds[1:]) - 1  # sequences that have tokens
    if initial is not None:
        _check_shapes(name, initial_states=(initial_states, (*x.shape[:1], *x.shape[2:], B.shape[-1])))
        begins = initial.masked_fill((seq_idx[:, 0] != 0).reshape(-1, 1, 1, 1), 0)
        initial = initial.new_zeros(len(bounds) - 1, *initial.shape[1:]).index_copy(0, places[sequences.first], begins)
    packed = (None if y is None else sequences.pack(y, 1) for y in (x, dt, B, C, z))
    x, dt, B, C, z = packed
    o, states = heed.torch.ssd(
        x, dt, A, B, C, z=z, **options, initial_state=initial, cu_seqlens=bounds, return_state=True
    )
    results = [sequences.unpack(o, 1)]
    if return_final_states:
        results.append(states[places[sequences.last]])
    if return_varlen_states:
        results.append(states)
    return tuple(results) if len(results) > 1 else results[0]


@_in_their_words
def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=_INFINITE,
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
    state_dtype=None,
):
    """A Mamba-2 block after its input projection, zxbcdt [B, T, z + x + B + C + dt], up to its output projection."""
    name = "mamba_split_conv1d_scan_combined"
    _dispatch.check_tensors(name, zxbcdt=zxbcdt, conv1d_weight=conv1d_weight, A=A, D=D)
    H, P = (D.shape[0], headdim) if D.dim() == 1 else D.shape
    if P is None:
        raise InvalidArgument(f"{name}: headdim is None, expected an int where D is [H]")
    width, wide = H * P, conv1d_weight.shape[0]
    N = (wide - width) // ngroups // 2
    if zxbcdt.shape[-1] != width + wide + H:
        raise Unsupported(
            f"{name}: zxbcdt has shape {list(zxbcdt.shape)}, expected [B, T, {width + wide + H}]: "
            "heed has no gated part beside the state space"
        )
    z, xBC, dt = zxbcdt.split((width, wide, H), dim=-1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation).transpose(
        1, 2
    )
    x, B, C = xBC.split((width, ngroups * N, ngroups * N), dim=-1)
    heads = z.unflatten(-1, (H, P))
    result = mamba_chunk_scan_combined(
        x.unflatten(-1, (H, P)),
        dt,
        A,
        B.unflatten(-1, (ngroups, N)),
        C.unflatten(-1, (ngroups, N)),
        chunk_size,
        D=D,
        z=heads if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    o, final = result
    o = o.flatten(2)
    if rmsnorm_weight is not None:
        gate = F.silu(z)
        y = (o if norm_before_gate else o * gate).unflatten(-1, (ngroups, -1))
        y = F.rms_norm(y, y.shape[-1:], None, rmsnorm_eps).flatten(2) * rmsnorm_weight
        o = (y * gate if norm_before_gate else y).to(o.dtype)
    if outproj_weight is not None:
        o = F.linear(o, outproj_weight, outproj_bias)
    return (o, final) if return_final_states else o


# --- Mamba-3 ----------------------------------------------------------------------------------------------------------

_in_words_of_mamba3 = speaking(initial_state="Input_States", q="Q", k="K", v="V", log_decay="ADT", dt="DT", trap="Trap",
                               theta="Angles", q_bias="Q_bias", k_bias="K_bias")


@_in_words_of_mamba3
def mamba3_siso_combined(
    Q,
    K,
    V,
    ADT,
    DT,
    Trap,
    Q_bias,
    K_bias,
    Angles,
    D=None,
    Z=None,
    Input_States=None,
    chunk_size=64,
    return_final_states=False,
    cu_seqlens=None,
):
    """Mamba-3 with one write per token: Q, K [B, T, G, N]; V, Z [B, T, H, P]; ADT, DT, Trap [B, H, T].

    Angles are rates before pi tanh. Input_States and the final ones, which follow the output, are the angle, between 0
    and 2 pi, S [B, H, P, N], and the rotated key and the value of the last token.
    """
    name = "mamba3_siso_combined"
    _dispatch.check_tensors(name, Q=Q, K=K, V=V, ADT=ADT, DT=DT, Trap=Trap, Q_bias=Q_bias, K_bias=K_bias, Angles=Angles)
    initial = None
    if Input_States is not None:
        angle, S, k, v = (_wide(x, V) for x in Input_States)
        initial = (S.mT, angle, k[:, None], v[:, None])
    o, final = heed.torch.mamba3(
        Q[:, :, None], K[:, :, None], V[:, :, None], ADT.transpose(1, 2), DT.transpose(1, 2), Trap.transpose(1, 2),
        math.pi * torch.tanh(Angles), q_bias=Q_bias[:, None], k_bias=K_bias[:, None], initial_state=initial,
        return_state=True, cu_seqlens=cu_seqlens
    )
    o = o[:, :, 0]
    o = o if D is None else o + D[:, None] * V
    o = (o if Z is None else o * F.silu(Z)).to(V.dtype)
    if not return_final_states:
        return o
    S, angle, k, v = final
    return o, torch.remainder(angle, 2 * math.pi), S.mT, k[:, 0], v[:, 0]


PLACES = {  # where the library has each
    "mamba3_siso_combined": "ops.triton.mamba3.mamba3_siso_combined",
    "mamba_chunk_scan_combined": "ops.triton.ssd_combined",
    "mamba_inner_fn": "ops.selective_scan_interface",
    "mamba_split_conv1d_scan_combined": "ops.triton.ssd_combined",
    "selective_scan_fn": "ops.selective_scan_interface",
    "selective_state_update": "ops.triton.selective_state_update",
}
