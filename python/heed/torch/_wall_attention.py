# wall_attention as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.wall_attention`, its gradients, and heed.torch.wall_attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import heed
from heed import _signatures
from heed.torch import _transitions
from heed.torch._functions import _without_gradient
from heed.torch._scans import Sequences

_TILE = 32  # tokens whose pairs have decays of their own in the composition


def _sums_between(x):
    """sum of x_t over j < t <= i, [..., i, j, channels] of [..., t, channels], without cancellation; 0 for j >= i."""
    later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril(-1)
    return torch.where(later[..., None], x[..., :, None, :], 0).cumsum(-3)


def _products(query, key, log_decay):
    """q_i . (k_j decayed by the tokens j < t <= i), [N, H, T, T] of [N, H, T, D]; values for j > i are undefined."""
    tokens = query.shape[2]
    pad = -tokens % _TILE
    query, key, log_decay = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, _TILE)) for x in (query, key, log_decay))
    own = (query[..., :, None, :] * key[..., None, :, :] * _sums_between(log_decay).exp()).sum(-1)
    # Keys leave their tile and queries enter theirs; in between, both decay by whole tiles.
    totals = log_decay.sum(-2)
    later = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1))  # log decays of the next token
    leaving = key * later.flip(-2).cumsum(-2).flip(-2).exp()
    entering = query * log_decay.cumsum(-2).exp()
    between = _sums_between(totals).roll(1, -3).exp()
    earlier = torch.ones(totals.shape[-2:-1] * 2, dtype=torch.bool, device=key.device).tril(-1)
    between = torch.where(earlier[..., None], between, 0)
    logits = torch.einsum("nhaid,nhabd,nhbjd->nhaibj", entering, between, leaving)
    logits = logits + torch.diag_embed(own.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 5, 3)
    return logits.flatten(4, 5).flatten(2, 3)[..., :tokens, :tokens]


def _composition(q, k, v, log_decay, log_forget, scale, lengths, starts, cu_seqlens, threads):
    """o and lse from the logits of all pairs, so that memory is quadratic in the tokens of a sequence."""
    of_o, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = Sequences(*q.shape[:2], lengths, starts, cu_seqlens, False, q.device)
    valid = sequences.scatter(sequences.gather(torch.ones_like(q[..., 0], dtype=wide)))

    def by_head(x):
        """[N, H, T, ...] of the sequences in order."""
        return sequences.gather(x.to(wide)).transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)

    logits = _products(by_head(q), by_head(k), by_head(log_decay)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    if log_forget is not None:
        gate = by_head(log_forget)
        cut = torch.isneginf(gate)
        sums, cuts = torch.where(cut, 0, gate).cumsum(-1), cut.cumsum(-1)
        logits = logits + sums[..., None] - sums[..., None, :]
        hidden = hidden | (cuts[..., None] != cuts[..., None, :])
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    o = sequences.scatter(((logits - lse[..., None]).exp() @ by_head(v)).transpose(1, 2)).to(of_o)
    lse = sequences.scatter(lse.transpose(1, 2)).masked_fill(valid == 0, -torch.inf)
    return o, lse.transpose(1, 2)


_operator = _transitions.Operator(
    "wall_attention", "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? log_forget", _composition)


@functools.wraps(heed.wall_attention, assigned=("__name__",))
def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "log_forget": log_forget}
    return _operator(tensors, scale, lengths, starts, cu_seqlens, threads, return_lse)


wall_attention.__module__ = "heed.torch"
wall_attention.__doc__ = _signatures.text_on_tensors(heed.wall_attention) + """

In PyTorch. Gradients reach q, k, v, log_decay and log_forget through o and lse. Second derivatives and forward mode are
those of a composition of PyTorch's functions, whose memory is quadratic in the tokens of the longest sequence. The
operator is torch.ops.heed.wall_attention."""
wall_attention.__signature__ = _signatures.of_tensors(heed.wall_attention)

wall_attention_keys = _without_gradient("wall_attention_keys", "keys", "log_decay")
