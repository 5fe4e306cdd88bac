# The modules of fla that model files import beside its operators: short convolutions, rotary positions, losses.
"""Functions and classes of `fla.modules`, but for the norms, which are in _fla_norms.

Short convolutions run on heed, the rest is PyTorch. State dicts are the originals'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.compat import _rotary
from heed.compat._door import refuse, speaking
from heed.compat._norms import wide
from heed.torch import _dispatch

# --- short convolutions -----------------------------------------------------------------------------------------------

_in_their_words = speaking(initial_state="initial_state", state="cache")


def _last_inputs(x: Tensor, before: Tensor | None, bounds: Tensor, size: int) -> Tensor:
    """The last `size` rows of each packed sequence in x [T_total, D], after `before` [N, D, size]: [N, D, size]."""
    begins, ends = bounds[:-1].long(), bounds[1:].long()
    at = ends[:, None] + torch.arange(-size, 0)  # [N, size]
    short = begins[:, None] - at  # how far before the sequence's first
    own = x[at.clamp(min=0, max=max(len(x) - 1, 0))] if len(x) else x.new_zeros(*at.shape, x.shape[-1])
    if before is None:
        earlier = torch.zeros_like(own)
    else:
        place = (size - short).clamp(min=0, max=size - 1)
        earlier = before.to(x.dtype).transpose(1, 2).gather(1, place[..., None].expand(-1, -1, x.shape[-1]))
    return torch.where((short > 0)[..., None], earlier, own).transpose(1, 2)


@_in_their_words
def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
):
    """A short depthwise causal convolution of x [B, T, D] by weight [D, W], plus residual.

    States are the last W inputs, [N, D, W]. Returns (y, the final state or None).
    """
    name = "causal_conv1d"
    refuse(name, "cp_context", cp_context, None)
    _dispatch.check_tensors(name, x=x, weight=weight)
    if x.dim() != 3 or weight.dim() != 2:
        raise InvalidArgument(f"{name}: x has shape {list(x.shape)} and weight {list(weight.shape)}, "
                              "expected [B, T, D] and [D, W]")
    B, T = x.shape[:2]
    bounds = torch.arange(B + 1) * T if cu_seqlens is None else torch.as_tensor(cu_seqlens)
    W = weight.shape[1]
    expected = [len(bounds) - 1, x.shape[2], W]
    if initial_state is not None and list(initial_state.shape) != expected:
        raise InvalidArgument(f"{name}: initial_state has shape {list(initial_state.shape)}, expected {expected}")
    before = None if initial_state is None else initial_state[..., 1:].to(wide(x))
    parameters = [y if y is None or y.dtype == x.dtype else y.to(wide(x)) for y in (weight, bias)]
    y = heed.torch.causal_conv1d(
        x.transpose(1, 2), *parameters, activation="silu" if activation == "swish" else activation,
        initial_state=before, cu_seqlens=cu_seqlens,
    ).transpose(1, 2)
    y = y if residual is None else y + residual
    return y, _last_inputs(x.flatten(0, 1), initial_state, bounds, W) if output_final_state else None


@_in_their_words
def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    """One token of each sequence, x [N, D], [N, 1, D] or [1, N, D], behind the last W inputs, cache [N, D, W].

    The cache changes in place. Returns (y, cache).
    """
    rows = x.reshape(-1, 1, x.shape[-1])
    y, last = causal_conv1d(rows, weight, bias, None, cache, True, activation)
    with torch.no_grad():
        cache.copy_(last)
    y = y.reshape(x.shape)
    return y if residual is None else y + residual, cache


class ShortConvolution(nn.Conv1d):
    """causal_conv1d as a module: weight [D, 1, W], and bias."""

    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", backend="triton", device=None,
                 dtype=None, **kwargs):
        if activation not in (None, "silu", "swish"):
            raise InvalidArgument(f"ShortConvolution: activation is {activation!r}, expected 'silu', 'swish' or None")
        if unknown := kwargs.keys() - {"use_fast_conv1d"}:
            raise TypeError(f"ShortConvolution() got an unexpected keyword argument {min(unknown)!r}")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1,
                         device=device, dtype=dtype)
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None,
                chunk_indices=None, **kwargs):
        """x [B, T, D] to (y, the last W inputs or None). A call of one token per sequence updates its cache."""
        if mask is not None:
            if cu_seqlens is not None:
                raise InvalidArgument("ShortConvolution: mask is given beside cu_seqlens, expected one of them")
            x = x.masked_fill((mask == 0).unsqueeze(-1), 0)
        count = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        steps = x.shape[0] * x.shape[1] == count and cache is not None
        y, last = causal_conv1d(x, self.weight.squeeze(1), self.bias, residual, cache, output_final_state or steps,
                                self.activation, cu_seqlens=cu_seqlens, **kwargs)
        if steps:
            with torch.no_grad():
                cache.copy_(last)
            last = cache
        return y, last if output_final_state else None

    def step(self, x, residual, cache, output_final_state=False, cu_seqlens=None):
        """One token of each sequence."""
        return self(x, residual, cache=cache, output_final_state=output_final_state, cu_seqlens=cu_seqlens)

    @property
    def state_size(self):
        return self.hidden_size * self.kernel_size[0]


# --- rows -------------------------------------------------------------------------------------------------------------


def l2norm(x, eps=1e-6, output_dtype=None):
    """x / sqrt(|x|^2 + eps), over the last axis."""
    y = x.to(wide(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


class L2Norm(nn.Module):
    """l2norm as a module."""

    def __init__(self, eps=1e-6, output_dtype=None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x):
        return l2norm(x, self.eps, self.output_dtype)


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None):
    """The token before each of x [B, T, D] less the token itself; `cache` [N, D] is the one before each first.

    With output_cache also the last tokens, [N, D].
    """
    if x.dim() != 3 or (cu_seqlens is not None and x.shape[0] != 1):
        raise InvalidArgument(f"token_shift: x has shape {list(x.shape)}, expected [B, T, D], B = 1 with cu_seqlens")
    B, T, D = x.shape
    bounds = torch.arange(B + 1) * T if cu_seqlens is None else cu_seqlens.long()
    rows = x.reshape(-1, D)
    filled = bounds[:-1] < bounds[1:]
    begins, ends = bounds[:-1][filled], bounds[1:][filled] - 1
    first = rows.new_zeros(len(begins), D) if cache is None else cache.reshape(-1, D)[filled].to(x.dtype)
    before = torch.cat((rows[:1], rows[:-1])).index_copy(0, begins, first)
    delta = (before - rows).reshape(x.shape)
    if not output_cache:
        return delta
    last = rows.new_zeros(len(bounds) - 1, D) if cache is None else cache.reshape(-1, D).to(x.dtype)
    return delta, last.index_copy(0, filled.nonzero().squeeze(1), rows[ends])


def swish(x):
    """x sigmoid(x)."""
    return F.silu(x)


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def logsigmoid(x, temperature=1.0):
    """log(sigmoid(x)) / temperature."""
    return F.logsigmoid(x) / temperature


def sqrelu(x):
    """max(x, 0)^2."""
    return F.relu(x).square()


def swiglu(x, y):
    """x sigmoid(x) y."""
    return F.silu(x) * y


def swiglu_linear(x, y, weight, bias):
    """swiglu(x, y), and a product with a matrix."""
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def fast_gelu_impl(x):
    """GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


def bias_gelu_impl(x, bias):
    """fast_gelu_impl of x + bias."""
    return fast_gelu_impl(x + bias)


ACT2FN = {"relu": F.relu, "sigmoid": sigmoid, "logsigmoid": logsigmoid, "silu": swish, "swish": swish, "sqrelu": sqrelu,
          "gelu": fast_gelu_impl, "bias_gelu": bias_gelu_impl}


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) up_proj(x))."""

    def __init__(self, hidden_size, hidden_ratio=None, intermediate_size=None, hidden_act="swish", fuse_swiglu=True,
                 powglu_power=3.0):
        super().__init__()
        refuse("GatedMLP", "hidden_act", hidden_act, "swish")
        ratio = 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = -(int(hidden_size * ratio * 2 / 3) // -256) * 256
        self.hidden_size, self.hidden_ratio, self.intermediate_size = hidden_size, ratio, intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, **kwargs):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


# --- rotary positions -------------------------------------------------------------------------------------------------


def rotary_embedding(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, chunk_indices=None
):
    """x [B, T, H, D] rotated by its positions; B is 1 with cu_seqlens."""
    if cu_seqlens is None:
        return _rotary.apply("rotary_embedding", x, cos, sin, interleaved, inplace, seqlen_offsets, None)
    y = _rotary.apply("rotary_embedding", x.squeeze(0), cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)
    return x if inplace else y.unsqueeze(0)


class RotaryEmbedding(nn.Module):
    """Queries and keys [B, T, H, D] rotated by their positions, in their first `dim` channels."""

    def __init__(self, dim, base=10000.0, scale_base=None, interleaved=False, pos_idx_in_fp32=True, device=None):
        super().__init__()
        refuse("RotaryEmbedding", "scale_base", scale_base, None)
        refuse("RotaryEmbedding", "pos_idx_in_fp32", pos_idx_in_fp32, True)
        self.dim, self.base, self.interleaved = dim, float(base), interleaved

    def forward(self, q, k, seqlen_offset=0, cu_seqlens=None, max_seqlen=None, chunk_indices=None):
        begins = int(torch.as_tensor(seqlen_offset).max()) if torch.as_tensor(seqlen_offset).numel() else 0
        # Tables of 32 bits, rounded as the original's are.
        frequencies = 1 / self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angles = torch.outer(torch.arange(q.shape[1] + begins, dtype=torch.float32), frequencies)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return tuple(rotary_embedding(x, cos, sin, self.interleaved, seqlen_offsets=seqlen_offset,
                                      cu_seqlens=cu_seqlens) for x in (q, k))


# --- losses -----------------------------------------------------------------------------------------------------------


def cross_entropy_loss(
    logits,
    target,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    logit_softcapping=None,
    ignore_index=-100,
    inplace_backward=False,
    process_group=None,
):
    """Losses [N] of logits [N, classes], and the part of lse_square_scale times the square of their log-sum-exp."""
    refuse("cross_entropy_loss", "process_group", process_group, None)
    ignored = target == ignore_index
    # An ignored row has no loss and no gradient, even if it holds NaN.
    z = (logits.to(wide(logits)) * logit_scale).masked_fill(ignored.unsqueeze(-1), 0)
    if logit_softcapping:
        z = logit_softcapping * torch.tanh(z / logit_softcapping)
    losses = F.cross_entropy(z, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    of_lse = lse_square_scale * torch.logsumexp(z, -1).square().masked_fill(ignored, 0)
    return losses + of_lse, of_lse.detach()


def _reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


class FusedCrossEntropyLoss(nn.Module):
    """Cross entropy of logits [N, classes]."""

    def __init__(self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
                 logit_softcapping=None, inplace_backward=False, process_group=None, return_z_loss=False):
        super().__init__()
        refuse("FusedCrossEntropyLoss", "process_group", process_group, None)
        if reduction not in ("mean", "sum", "none"):
            raise InvalidArgument(f"FusedCrossEntropyLoss: reduction is {reduction!r}, expected 'mean', "
                                  "'sum' or 'none'")
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss
        self.options = {"label_smoothing": label_smoothing,
                        "logit_scale": logit_scale, "lse_square_scale": lse_square_scale,
                        "logit_softcapping": logit_softcapping, "ignore_index": ignore_index}

    def forward(self, input, target):
        losses, of_lse = (_reduced(x, target, self.ignore_index, self.reduction)
                          for x in cross_entropy_loss(input, target, **self.options))
        return (losses, of_lse) if self.return_z_loss else losses


def fused_linear_cross_entropy_loss(
    x,
    target,
    weight,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    logit_scale=1.0,
    logit_softcapping=None,
    num_chunks=8,
    reduction="mean",
    use_l2warp=False,
    l2_penalty_factor=1e-4,
    accumulate_grad_in_fp32=True,
):
    """Cross entropy of the logits x weight^T + bias."""
    refuse("fused_linear_cross_entropy_loss", "use_l2warp", use_l2warp, False)
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f"fused_linear_cross_entropy_loss: reduction is {reduction!r}, expected 'mean' or 'sum'")
    target = target.flatten()
    rows = x.flatten(0, -2).masked_fill((target == ignore_index).unsqueeze(-1), 0)
    losses, _ = cross_entropy_loss(F.linear(rows, weight, bias), target, label_smoothing, logit_scale,
                                   logit_softcapping=logit_softcapping, ignore_index=ignore_index)
    return _reduced(losses, target, ignore_index, reduction)


class FusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of the logits of hidden states x [B, T, D] and a head's weight."""

    def __init__(self, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8,
                 reduction="mean", use_l2warp=False, l2_penalty_factor=1e-4, accumulate_grad_in_fp32=True):
        super().__init__()
        refuse("FusedLinearCrossEntropyLoss", "use_l2warp", use_l2warp, False)
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(f"FusedLinearCrossEntropyLoss: reduction is {reduction!r}, expected 'mean' or 'sum'")
        self.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "logit_scale": logit_scale,
                        "logit_softcapping": logit_softcapping, "reduction": reduction}

    def forward(self, x, target, weight, bias=None):
        return fused_linear_cross_entropy_loss(x, target, weight, bias, **self.options)


# --- where the library has each ---------------------------------------------------------------------------------------

_CONVOLUTION = ("modules.convolution", "modules.conv")
PLACES: dict[str, str | tuple[str, ...]] = {
    "ACT2FN": "modules.activations",
    "FusedCrossEntropyLoss": "modules.fused_cross_entropy",
    "FusedLinearCrossEntropyLoss": "modules.fused_linear_cross_entropy",
    "GatedMLP": "modules.mlp",
    "L2Norm": "modules.l2norm",
    "RotaryEmbedding": "modules.rotary",
    "ShortConvolution": (*_CONVOLUTION, "modules.conv.short_conv"),
    "causal_conv1d": (*_CONVOLUTION, "modules.conv.causal_conv1d"),
    "causal_conv1d_update": "modules.convolution",
    "cross_entropy_loss": "modules.fused_cross_entropy",
    "fused_linear_cross_entropy_loss": "modules.fused_linear_cross_entropy",
    "l2norm": ("modules.l2norm", "modules.l2norm:l2_norm"),
    "rotary_embedding": "modules.rotary",
    "token_shift": "modules.token_shift",
    **dict.fromkeys(("bias_gelu_impl", "fast_gelu_impl", "logsigmoid", "sigmoid", "sqrelu", "swiglu", "swiglu_linear",
                     "swish"),
                    "modules.activations"),
}
