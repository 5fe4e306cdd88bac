# The package heed.torch: heed's mechanisms on PyTorch tensors, with gradients.
"""Attention mechanisms on PyTorch tensors, with gradients.

The functions of the package heed by the same names, with torch tensors in and out. Work runs on PyTorch's threads.
"""

from heed.torch._attention import attention
from heed.torch._attention_residual import attention_residual
from heed.torch._block_mask import pattern_from_block_mask
from heed.torch._caches import KVCache, LatentKVCache, NSACache, RingKVCache, load_cache
from heed.torch._compress import compress
from heed.torch._compressed_attention import compressed_attention
from heed.torch._compressed_cache import CompressedKVCache, Compressor
from heed.torch._deltaformer import deltaformer, deltaformer_values
from heed.torch._functions import (
    alibi_slopes,
    attention_map,
    attention_weights,
    certified_attention,
    merge_attention,
    orthogonal_features,
    rotary,
    s4d_kernel,
    sinusoidal,
    t5_bias,
)
from heed.torch._log_linear_attention import log_linear_attention, log_linear_attention_step
from heed.torch._longformer import longformer
from heed.torch._mechanisms import functions as _of_mechanisms
from heed.torch._merge_linear import merge_linear
from heed.torch._mesa import mesa, mesa_step
from heed.torch._multihead import MultiheadAttention
from heed.torch._nsa import nsa
from heed.torch._parallax_attention import parallax_attention
from heed.torch._path_attention import path_attention, path_attention_keys
from heed.torch._provider import provider_stats
from heed.torch._sdpa import replace_sdpa, scaled_dot_product_attention
from heed.torch._titans import titans, titans_step
from heed.torch._ttt_linear import ttt_linear, ttt_linear_step
from heed.torch._wall_attention import wall_attention, wall_attention_keys

__all__ = [
    "CompressedKVCache",
    "Compressor",
    "KVCache",
    "LatentKVCache",
    "MultiheadAttention",
    "NSACache",
    "RingKVCache",
    "alibi_slopes",
    "attention",
    "attention_map",
    "attention_residual",
    "attention_weights",
    "certified_attention",
    "compress",
    "compressed_attention",
    "deltaformer",
    "deltaformer_values",
    "load_cache",
    "log_linear_attention",
    "log_linear_attention_step",
    "longformer",
    "merge_attention",
    "merge_linear",
    "mesa",
    "mesa_step",
    "nsa",
    "orthogonal_features",
    "parallax_attention",
    "path_attention",
    "path_attention_keys",
    "pattern_from_block_mask",
    "provider_stats",
    "replace_sdpa",
    "rotary",
    "s4d_kernel",
    "scaled_dot_product_attention",
    "sinusoidal",
    "t5_bias",
    "titans",
    "titans_step",
    "ttt_linear",
    "ttt_linear_step",
    "wall_attention",
    "wall_attention_keys",
]

# Mechanisms: whichever the extension module has.
globals().update(_of_mechanisms)
__all__ += sorted(_of_mechanisms)
