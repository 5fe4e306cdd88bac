# heed.torch.MultiheadAttention: PyTorch's module of that name on heed.
"""heed.torch.MultiheadAttention."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heed.torch._attention import attention
from heed.torch._sdpa import DTYPES


class _OfThread(threading.local):
    runs_pytorch = False  # while code of nn.MultiheadAttention does


_thread = _OfThread()


@contextlib.contextmanager
def _as_pytorch() -> Iterator[None]:
    before, _thread.runs_pytorch = _thread.runs_pytorch, True
    try:
        yield
    finally:
        _thread.runs_pytorch = before


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention on heed: its constructor, state dict, arguments, results and gradients.

    Trained weights load unchanged, and `module.__class__ = heed.torch.MultiheadAttention` converts a module in place.

    heed computes when need_weights is False, which is not the default; the second result is None then. Masks are read
    as they are: key_padding_mask is never repeated for each query or head, nor is attn_mask for each sequence or head
    (only two float masks at once are added, to [N, 1, L, S]). A query that sees no key gets 0 from the attention. With
    is_causal=True attn_mask is taken to be the causal mask, as PyTorch takes it, here with a key_padding_mask too.

    The forward of torch.nn.MultiheadAttention runs, by PyTorch's own kernels: with need_weights=True, since a dense
    tensor of weights is requested; for nested tensors, devices other than the CPU, dtypes that heed does not have,
    float masks of another dtype than query's, and dropout=1; and for arguments that PyTorch refuses, with its error.

    In eval mode without gradients nn.TransformerEncoderLayer would read the weights of its self_attn and never call it;
    of this class it calls it. An nn.TransformerEncoder with a src_key_padding_mask makes nested tensors of the batch if
    its layers were converted after it was built: give it enable_nested_tensor=False.
    """

    @functools.wraps(nn.MultiheadAttention.__init__)
    def __init__(self, *args, **kwargs) -> None:
        with _as_pytorch():
            super().__init__(*args, **kwargs)

    def _reset_parameters(self) -> None:
        with _as_pytorch():
            super()._reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """True if in_proj_weight has all of the weights; always False to other code, as that keeps
        nn.TransformerEncoderLayer from reading the weights instead of calling the module."""
        return _thread.runs_pytorch and self.__dict__["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See torch.nn.MultiheadAttention.forward."""
        if need_weights or not self._runs_on_heed(query, key, value, key_padding_mask, attn_mask, is_causal):
            with _as_pytorch():
                return super().forward(
                    query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
                )
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in self._project(query, key, value))
        if query.dim() == 2:  # one sequence
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

        num_keys = k.shape[1]
        k, v = self._more_keys(k, self.bias_k), self._more_keys(v, self.bias_v)
        num_more = k.shape[1] - num_keys
        if is_causal and (key_padding_mask is None or q.shape[1] == num_keys == k.shape[1]):
            attn_mask = None
        else:
            is_causal = False
        if num_more:  # these are visible
            key_padding_mask, attn_mask = (
                None if x is None else F.pad(x, (0, num_more)) for x in (key_padding_mask, attn_mask)
            )
        o = attention(
            q,
            k,
            v,
            causal=is_causal,
            align="top_left",
            dropout=self.dropout if self.training else 0.0,
            **_mask_options(q, key_padding_mask, attn_mask),
        ).flatten(2)
        if query.dim() == 2:
            o = o.squeeze(0)
        elif not self.batch_first:
            o = o.transpose(0, 1)
        return F.linear(o, self.out_proj.weight, self.out_proj.bias), None

    def _runs_on_heed(self, query, key, value, key_padding_mask, attn_mask, is_causal) -> bool:
        """Returns whether the arguments are valid and of a kind that heed reads; PyTorch handles all others."""
        inputs = (query, key, value)
        if any(x.is_nested or x.device.type != "cpu" or x.dim() != query.dim() for x in inputs):
            return False
        if query.dim() not in (2, 3) or query.dtype not in DTYPES or (self.training and self.dropout >= 1):
            return False
        widths = [x.shape[-1] for x in inputs]
        if widths != [self.embed_dim, self.kdim, self.vdim] or key.shape[:-1] != value.shape[:-1]:
            return False
        sequence, batch = (0, 1) if query.dim() == 2 or not self.batch_first else (1, 0)
        pairs = (query.shape[sequence], key.shape[sequence])
        sizes = () if query.dim() == 2 else (query.shape[batch],)
        if sizes and key.shape[batch] != sizes[0]:
            return False
        heads = self.num_heads * sizes[0] if sizes else self.num_heads
        masks = ((key_padding_mask, [(*sizes, pairs[1])]), (attn_mask, [pairs, (heads, *pairs)]))
        for mask, shapes in masks:
            if mask is not None and (mask.dtype not in (torch.bool, query.dtype) or tuple(mask.shape) not in shapes):
                return False
        return attn_mask is not None or not is_causal

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The inputs times their weights: one product for inputs that are the same tensor."""
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and key is value:
            if query is key:
                return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
            sizes = [self.embed_dim, 2 * self.embed_dim]
            weights = self.in_proj_weight.split(sizes)
            q_bias, kv_bias = (None, None) if bias is None else bias.split(sizes)
            return F.linear(query, weights[0], q_bias), *F.linear(key, weights[1], kv_bias).chunk(2, -1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _more_keys(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [B, S, H, D] with the key of add_bias_kv and that of add_zero_attn behind it."""
        if bias is not None:
            row = bias.unflatten(-1, (self.num_heads, self.head_dim))
            x = torch.cat([x, row.expand(x.shape[0], -1, -1, -1)], 1)
        return F.pad(x, (0, 0, 0, 0, 0, 1)) if self.add_zero_attn else x


def _mask_options(q: Tensor, padding: Tensor | None, mask: Tensor | None) -> dict[str, object]:
    """PyTorch's masks, where True hides, as options of heed.torch.attention; q is [B, L, H, D]."""
    options: dict[str, object] = {}
    batch, rows, heads, _ = q.shape
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
        options = {"mask": ~mask} if mask.dtype is torch.bool else {"bias": mask}
    if padding is None:
        return options
    by_key = padding[:, None, None]
    if padding.dtype is not torch.bool:
        options["bias"] = options["bias"] + by_key if "bias" in options else by_key
    elif "mask" not in options:
        options["mask"] = ~by_key
    else:  # two masks would become one of all pairs; hidden keys are of another segment than the queries
        options["segments"] = (torch.zeros((batch, rows), dtype=torch.int32, device=q.device), padding.to(torch.int32))
    return options
