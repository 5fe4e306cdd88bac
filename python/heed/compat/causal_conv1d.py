# heed.compat.causal_conv1d: the functions of causal-conv1d on heed.
"""The functions of `causal_conv1d`, as of version 1.6.1: x [B, D, T], weight [D, W], last inputs oldest first."""

from __future__ import annotations

import torch
from torch import Tensor

import heed.torch
from heed import InvalidArgument
from heed.compat import _packed
from heed.compat._door import speaking
from heed.torch import _dispatch

__version__ = "1.6.1"  # whose functions these are

_in_their_words = speaking(state="initial_states", initial_state="initial_states", cu_seqlens="seq_idx")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _beside(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Parameters in x's dtype or float32, which is what heed reads; none loses a digit beside 16 bits or float32."""
    return [y if y is None or y.dtype == x.dtype else y.to(_wide(x)) for y in parameters]


@_in_their_words
def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """A short depthwise causal convolution. Where seq_idx [B, T] changes a sequence begins; below 0 it is padding."""
    name = "causal_conv1d_fn"
    _dispatch.check_tensors(name, x=x, weight=weight)
    weight, bias = _beside(x, weight, bias)
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            given = "return_final_states" if initial_states is None else "initial_states"
            raise InvalidArgument(f"{name}: {given} is given beside seq_idx, expected one of them")
        sequences = _packed.Sequences(name, seq_idx, x.shape[0], x.shape[-1])
        o = heed.torch.causal_conv1d(
            sequences.pack(x, 2), weight, bias, activation=activation, cu_seqlens=sequences.bounds
        )
        return sequences.unpack(o, 2).masked_fill((seq_idx < 0).unsqueeze(1), 0)
    if initial_states is not None:
        initial_states = initial_states.to(_wide(x))
    o, states = heed.torch.causal_conv1d(
        x, weight, bias, activation=activation, initial_state=initial_states, return_state=True
    )
    if not return_final_states:
        return o
    states = states.to(x.dtype)
    return o, states if final_states_out is None else final_states_out.copy_(states)


@_in_their_words
def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    """The next tokens, x [B, D] or [B, D, T], after the last inputs, conv_state [B, D, S] with S >= W - 1.

    conv_state changes in place. With cache_seqlens [B] it is a ring: token t of a sequence lies at t mod S. No gradient
    passes.
    """
    name = "causal_conv1d_update"
    _dispatch.check_tensors(name, x=x, conv_state=conv_state, weight=weight)
    given = {"x": x, "conv_state": conv_state, "weight": weight, "bias": bias}
    x, states, weight, bias = (_dispatch.bare(name, key, y, written=key == "conv_state") for key, y in given.items())
    one = x.dim() == 2
    rows = x.unsqueeze(-1) if one else x
    before, size = weight.shape[-1] - 1, states.shape[-1]
    # Sequences whose index is negative are padding: their rows are 0, and no state of theirs exists.
    real = None if conv_state_indices is None else conv_state_indices >= 0
    chosen = states if real is None else states[conv_state_indices.clamp(min=0).long()]
    if chosen.shape[:2] != rows.shape[:2] or size < before:
        raise InvalidArgument(
            f"{name}: conv_state has shape {list(states.shape)}, expected "
            f"[{rows.shape[0]}, {rows.shape[1]}, S], S at least {before}"
        )
    if cache_seqlens is None:
        last = chosen[..., size - before :]
    else:
        at = cache_seqlens.long()[:, None]
        last = chosen.gather(2, _columns(at + torch.arange(-before, 0), size, rows))
    weight, bias = _beside(rows, weight, bias)
    o = heed.torch.causal_conv1d(rows, weight, bias, activation=activation, initial_state=last.to(_wide(rows)))
    if cache_seqlens is None:
        chosen = torch.cat((chosen, rows.to(chosen.dtype)), -1)[..., rows.shape[-1] :]
    else:
        first = max(rows.shape[-1] - size, 0)  # tokens before it would be overwritten in the ring
        places = _columns(at + torch.arange(first, rows.shape[-1]), size, rows)
        chosen = chosen.scatter(2, places, rows[..., first:].to(chosen.dtype))
    if real is None:
        states.copy_(chosen)
    else:
        states[conv_state_indices[real].long()] = chosen[real]
        o = o.masked_fill(~real[:, None, None], 0)
    _dispatch.wrote(conv_state)
    return o.squeeze(-1) if one else o


def _columns(places: Tensor, size: int, rows: Tensor) -> Tensor:
    return torch.remainder(places, size).unsqueeze(1).expand(-1, rows.shape[1], -1)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len inputs of packed sequences: x [T_total, D] to [B, D, state_len], zeros before the first."""
    ends = cu_seqlens[1:].long()
    at = ends[:, None] + torch.arange(-state_len, 0)
    inside = at >= cu_seqlens[:-1, None]
    states = x.new_zeros(*at.shape, x.shape[-1])
    states[inside] = x[at[inside]]
    return states.transpose(1, 2)


__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]
PLACES = {name: "causal_conv1d_interface" for name in __all__} | {"causal_conv1d_varlen_states": "causal_conv1d_varlen"}
