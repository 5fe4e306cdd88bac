# The attention function of "heed", which models of Transformers call.
"""The attention function that heed.transformers registers."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

import heed.torch  # noqa: F401  (registers the operator)
from heed import Unsupported
from heed.transformers._masks import StructuredMask
from heed.transformers._structure import NO_MASK, Structure, visible

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

_operator = torch.ops.heed.attention.default
_CAUSAL = Structure(causal=True, align="top_left")
_KNOWN = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "softcap", "s_aux",
          "sinks", "position_bias", "sliding_window", "kwargs"}


_refused: dict[type, tuple[str, ...]] = {}


def _refused_options(module: type) -> tuple[str, ...]:
    """Options that change what is computed in a way that heed does not have: arguments of the eager attention beside
    this module that heed does not know, and those that only other attention functions read."""
    if module not in _refused:
        eager = getattr(sys.modules[module.__module__], "eager_attention_forward", None)
        own = () if eager is None else inspect.signature(eager).parameters
        _refused[module] = tuple(sorted({"cache", "block_indices", *own} - _KNOWN))
    return _refused[module]


# torch.compiler.assume_constant_result sets this too, but imports the compiler.
_refused_options._dynamo_marked_constant = True


def _wants_weights(options: dict[str, Any]) -> bool:
    if options.get("output_attentions") or _active_collector is None:
        return bool(options.get("output_attentions"))
    # A model may record weights without passing the option on. Transformers copies the ContextVar for graphs, which
    # cannot read one.
    compiled = torch.compiler.is_compiling()
    collected = getattr(_active_collector, "global_var", None) if compiled else _active_collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Structure, bias: Tensor | None, scaling: float | None,
    dropout: float, softcap: float | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention in PyTorch's own operations, as the eager attention of models has it."""
    (batch, heads, rows, dim), keys = query.shape, key.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    keep = visible(mask, rows, keys, *map(torch.arange, (batch, rows, keys)))
    if mask.mask is not None:
        keep = keep & mask.mask
    # In a key that no row sees, neither a weight of 0 nor the least logit hides NaN or infinity.
    unseen = ~keep.any(2)[..., None]
    key, value = (x.masked_fill(unseen & ~x.isfinite(), 0) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits + logits.new_zeros(()).where(keep, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype).expand(batch, heads, rows, 1)], -1)
    weights = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)
    weights = torch.nn.functional.dropout(weights[..., :keys], dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of [B, H, T, D]: ([B, Tq, Hq, Dv] contiguous, weights [B, Hq, Tq, Tk] if requested, else None).

    Arguments mean what they mean to the eager attention of models: s_aux [Hq] and sinks [B, Hq, Tq, 1] are logits
    without a value, indices [B, Tq, n] keys that an indexer chose, position_bias and a floating-point mask are added.
    Without a mask, queries are causal as Transformers' "sdpa" has it. A row that sees no key is 0.
    """
    for name in _refused_options(type(module)):
        if options.get(name) is not None:
            raise Unsupported(f"attention: {name} was given by {type(module).__name__}, expected None")
    if key.shape[0] != query.shape[0]:  # learned queries, say
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    if not module.training:
        dropout = 0.0
    rows, keys = query.shape[2], key.shape[2]
    biases = [] if position_bias is None else [position_bias]

    mask: Structure | Tensor | None = attention_mask
    if isinstance(mask, StructuredMask):
        structure, shape = mask.structure, (query.shape[0], 1, rows, keys)
        fits = structure is NO_MASK or (structure is not None and mask.shape == shape)
        mask = structure if fits else mask.dense
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        mask = _CAUSAL if causal and rows > 1 else NO_MASK
    elif isinstance(mask, Tensor):
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.is_floating_point():
            biases.append(mask)
            mask = NO_MASK
        else:
            mask = NO_MASK._replace(mask=mask)
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
        mask = mask._replace(mask=chosen if mask.mask is None else mask.mask & chosen)

    bias = sum(biases[1:], biases[0]) if biases else None
    if _wants_weights(options):
        if s_aux is not None:
            sinks = s_aux[:, None, None]
        return _with_weights(query, key, value, mask, bias, scaling, dropout, softcap, sinks)
    arguments = (query, key, value, True, scaling, *mask[:4], bias, s_aux, None, softcap)
    if dropout:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
        arguments += (*mask[4:], 0, dropout, seed)
    elif any(option is not None for option in mask[4:]):
        arguments += mask[4:]
    o, lse = _operator(*arguments)
    if sinks is not None:
        o = o * torch.sigmoid(lse[..., None] - sinks).to(o.dtype)
    return o.transpose(1, 2), None
