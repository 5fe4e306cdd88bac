# path_attention as an operator of PyTorch, and the function of heed.torch.
"""`torch.ops.heed.path_attention`, its gradients, and heed.torch.path_attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import _signatures
from heed.torch import _transitions
from heed.torch._functions import _without_gradient
from heed.torch._scans import Sequences


def _composition(q, k, v, w, beta, log_forget, scale, lengths, starts, cu_seqlens, threads):
    """o and lse: all tokens of a sequence as one block, so that memory is quadratic in their number."""
    of_o, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences = Sequences(*q.shape[:2], lengths, starts, cu_seqlens, False, q.device)
    valid = sequences.scatter(sequences.gather(torch.ones_like(q[..., 0], dtype=wide)))

    def by_head(x, heads):
        """[N, H, T, ...] of the sequences in order."""
        return sequences.gather(x.to(wide)).transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)

    heads, key_heads = q.shape[2], k.shape[2]
    query, value = by_head(q, heads), by_head(v, heads)
    key, direction, factor = (by_head(x, key_heads) for x in (k, w, beta))
    # With A = I + tril(diag(beta) W W^T, -1) the logits are tril(Q K^T) - tril(Q W^T) A^-1 diag(beta) tril(W K^T, -1).
    square = (factor[..., None] * (direction @ direction.mT)).tril(-1)
    identity = torch.eye(square.shape[-1], dtype=wide, device=q.device)
    within = torch.linalg.solve_triangular(identity + square, factor[..., None] * (direction @ key.mT).tril(-1),
                                           upper=False, unitriangular=True)
    key, direction, within = (x.repeat_interleave(heads // key_heads, 1) for x in (key, direction, within))
    logits = query @ key.mT - (query @ direction.mT).tril() @ within
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    if log_forget is not None:
        gate = by_head(log_forget, heads)
        cut = torch.isneginf(gate)
        sums, cuts = torch.where(cut, 0, gate).cumsum(-1), cut.cumsum(-1)
        logits = logits + sums[..., None] - sums[..., None, :]
        hidden = hidden | (cuts[..., None] != cuts[..., None, :])
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    o = sequences.scatter(((logits - lse[..., None]).exp() @ value).transpose(1, 2)).to(of_o)
    lse = sequences.scatter(lse.transpose(1, 2)).masked_fill(valid == 0, -torch.inf)
    return o, lse.transpose(1, 2)


_operator = _transitions.Operator(
    "path_attention", "Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? log_forget", _composition)


@functools.wraps(heed.path_attention, assigned=("__name__",))
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    tensors = {"q": q, "k": k, "v": v, "w": w, "beta": beta, "log_forget": log_forget}
    return _operator(tensors, scale, lengths, starts, cu_seqlens, threads, return_lse)


path_attention.__module__ = "heed.torch"
path_attention.__doc__ = _signatures.text_on_tensors(heed.path_attention) + """

In PyTorch. Gradients reach q, k, v, w, beta and log_forget through o and lse. Second derivatives and forward mode are
those of a composition of PyTorch's functions, whose memory is quadratic in the tokens of the longest sequence. The
operator is torch.ops.heed.path_attention."""
path_attention.__signature__ = _signatures.of_tensors(heed.path_attention)

path_attention_keys = _without_gradient("path_attention_keys", "keys", "w", "beta")
