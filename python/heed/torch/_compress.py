# The learned compression of tokens that compressed_attention attends to, as a composition of PyTorch's functions.
"""heed.torch.compress: keys, values or an indexer's keys, each of `ratio` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from heed import InvalidArgument
from heed.torch import _dispatch


def compress(values: Tensor, gates: Tensor, bias: Tensor | None = None, *, ratio: int, overlap: bool = False) -> Tensor:
    """Compresses every `ratio` tokens to one, by a softmax over them for each channel.

      y_c = sum_t p_ct values_t,   p_c = softmax_t(gates_t + bias_(t mod ratio)),   t in [c ratio, (c + 1) ratio)

    With overlap=True, values and gates have two series of D channels. The softmax is over 2 ratio tokens: the first
    series of window c - 1, and the second series of window c; window -1 does not exist. To continue a sequence, pass
    its last `ratio` tokens again and drop the first result.

    Tokens behind the last whole window are not used. The softmax and the sums are in float32, or float64, and are
    rounded once. Norms and rotary positions that a model applies to the result are its own. Gradients reach all three
    tensors, and are PyTorch's.

    Source: DeepSeek-AI, "DeepSeek-V4: towards highly efficient million-token context intelligence", technical report,
    2026, sections 2.3.1 (overlap, ratio 4) and 2.3.2 (ratio 128).

    Args:
      `values`: [B, T, ..., D], with overlap [B, T, ..., 2 D]; up to two axes of heads
      `gates`: logits, in the shape of values
      `bias`: [ratio, ..., D], added to the gates by position in the window, with the channels of values; None: zeros
      `ratio`: tokens per compressed one
      `overlap`: whether windows overlap

    Returns y [B, T // ratio, ..., D] in the dtype of values."""
    _dispatch.check_tensors("compress", values=values, gates=gates)
    if bias is not None:
        _dispatch.check_tensors("compress", bias=bias)
    _dispatch.check_int("compress", "ratio", ratio, 1)
    _dispatch.check_bools("compress", overlap=overlap)
    has_rank = 3 <= values.dim() <= 5
    channels = values.shape[-1] if has_rank else 0
    if not has_rank or (overlap and channels % 2) or not values.is_floating_point():
        expected = "[B, T, ..., 2 D]" if overlap else "[B, T, ..., D]"
        raise InvalidArgument(f"compress: values is {values.dtype} of shape {list(values.shape)}, "
                              f"expected floats {expected}")
    for name, x in (("gates", gates), ("bias", bias)):
        if x is not None and not x.is_floating_point():
            raise InvalidArgument(f"compress: {name} is {x.dtype}, expected floats")
    if gates.shape != values.shape:
        raise InvalidArgument(f"compress: gates has shape {list(gates.shape)}, expected {list(values.shape)} as values")
    if bias is not None and (bias.dim() > values.dim() - 1 or bias.dim() < 2 or bias.shape[0] != ratio
                             or bias.shape[-1] != channels):
        raise InvalidArgument(f"compress: bias has shape {list(bias.shape)}, expected [{ratio}, ..., {channels}]")
    windows = values.shape[1] // ratio
    wide = torch.promote_types(values.dtype, torch.float32)
    x, logits = (t[:, :windows * ratio].to(wide).unflatten(1, (windows, ratio)) for t in (values, gates))
    if bias is not None:
        between = (1,) * (values.dim() - 1 - bias.dim())
        logits = logits + bias.to(wide).reshape(ratio, *between, *bias.shape[1:])
    if overlap:
        x, logits = _with_previous(x, 0.0), _with_previous(logits, -torch.inf)
    return (torch.softmax(logits, 2) * x).sum(2).to(values.dtype)


def _with_previous(x: Tensor, missing: float) -> Tensor:
    """[B, windows, ratio, ..., 2 D] as [B, windows, 2 ratio, ..., D]: the first series of the window before, and the
    second series of the window."""
    first, second = x.chunk(2, -1)
    before = torch.cat([torch.full_like(first[:, :1], missing), first[:, :-1]], 1)
    return torch.cat([before, second], 2)
