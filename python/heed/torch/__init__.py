# The package heed.torch: heed's mechanisms on PyTorch tensors, with gradients.
"""Attention mechanisms on PyTorch tensors, with gradients.

The functions of the package heed by the same names, with torch tensors in and out. Work runs on PyTorch's threads.
"""

from heed.torch._attention import attention
from heed.torch._block_mask import pattern_from_block_mask
from heed.torch._caches import KVCache, LatentKVCache, RingKVCache, load_cache
from heed.torch._causal_conv1d import causal_conv1d, causal_conv1d_step
from heed.torch._functions import (
    alibi_slopes,
    attention_map,
    attention_weights,
    merge_attention,
    orthogonal_features,
    rotary,
    s4d_kernel,
    sinusoidal,
    t5_bias,
)
from heed.torch import _recurrent, _scanning, _stateless
from heed.torch._longformer import longformer
from heed.torch._multihead import MultiheadAttention
from heed.torch._sdpa import replace_sdpa, scaled_dot_product_attention

__all__ = [
    "KVCache",
    "LatentKVCache",
    "MultiheadAttention",
    "RingKVCache",
    "alibi_slopes",
    "attention",
    "attention_map",
    "attention_weights",
    "causal_conv1d",
    "causal_conv1d_step",
    "load_cache",
    "longformer",
    "merge_attention",
    "orthogonal_features",
    "pattern_from_block_mask",
    "replace_sdpa",
    "rotary",
    "s4d_kernel",
    "scaled_dot_product_attention",
    "sinusoidal",
    "t5_bias",
]

# Mechanisms with a state and without: whichever the extension module has.
for _functions in (_recurrent.functions, _scanning.functions, _stateless.functions):
    globals().update(_functions)
    __all__ += sorted(_functions)
