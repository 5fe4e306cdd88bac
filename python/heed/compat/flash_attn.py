# heed.compat.flash_attn: the functions of flash-attn on heed.
"""The functions of `flash_attn`, as of version 2.8.4: [B, T, H, D], packed [T_total, H, D], causal from the bottom right.

A log-sum-exp of a row without a key is -inf, with ALiBi it is that of the full bias, and it has a gradient. `return_attn_probs`
with dropout is refused: the matrix of probabilities exists nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed.torch
from heed import InvalidArgument, Unsupported
from heed.compat._door import Arguments, door, in_words_of, speaking
from heed.torch import _dispatch

__version__ = "2.8.4"  # whose functions these are

_NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes"}


def _options(a: Arguments) -> dict[str, Any]:
    left, right = a.pop("window_size")
    softcap = a.pop("softcap")
    return {
        "scale": a.pop("softmax_scale"), "causal": a.pop("causal"), "alibi": a.pop("alibi_slopes"),
        "window": None if left < 0 and right < 0 else (max(left, -1), max(right, -1)), "softcap": softcap if softcap > 0 else None,
    }


def _rows_of_pages(table: Tensor, lengths: list[int], page: int) -> Tensor:
    """Where the tokens of packed sequences lie in pages that stand one behind the other."""
    of_each = [torch.arange(n) for n in lengths]
    return torch.cat([table[b, t // page].long() * page + t % page for b, t in enumerate(of_each)])


# What is packed in one tensor, by name of the function: where q, k and v are in it.
_PARTS = {"qkv": (0, 1, 2), "kv": (0, 1)}


def _prepare(name: str, a: Arguments) -> Any:
    packed = [key for key in a if key in ("q", "k", "v", "kv", "qkv")]
    _dispatch.check_tensors(name, **{key: a[key] for key in packed})
    inputs = []
    for key in packed:
        x = a.pop(key)
        if key in _PARTS:
            parts = _PARTS[key]
            if x.dim() < 4 or x.shape[-3] != len(parts):
                raise InvalidArgument(f"{name}: {key} has shape {list(x.shape)}, expected [..., {len(parts)}, H, D]")
            inputs += x.unbind(-3)
        else:
            inputs.append(x)
    options, dropout, wants_more = _options(a), a.pop("dropout_p"), a.pop("return_attn_probs")
    if wants_more and dropout > 0:
        raise Unsupported(f"{name}: return_attn_probs is True with dropout_p, expected False: heed keeps no probabilities")
    for key, of_heed in (("cu_seqlens", "cu_seqlens_q"), ("cu_seqlens_q", "cu_seqlens_q"), ("cu_seqlens_k", "cu_seqlens_k")):
        if key in a:
            options[of_heed] = a.pop(key)
    table = a.pop("block_table", None)
    if table is not None:
        lengths = torch.as_tensor(options["cu_seqlens_k"]).diff().tolist()
        rows = _rows_of_pages(table, lengths, inputs[1].shape[1])
        inputs[1:] = (x.flatten(0, 1)[rows] for x in inputs[1:])

    def call() -> Any:
        try:
            o, lse = heed.torch.attention(*inputs, **options, dropout=dropout, return_lse=True)
        except (InvalidArgument, Unsupported) as error:
            raise in_words_of(name, _NAMES, error) from None
        return (o, lse, o.new_empty(0)) if wants_more else o

    return call


_OPTIONS = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False")
_BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_TABLE = {
    "flash_attn_func": f"q, k, v, {_OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {_BOUNDS}, {_OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_BOUNDS}, {_OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
}


def _from_table(name: str, signature: str) -> Any:
    return door(name, signature, lambda a: _prepare(name, a),
                f"{name} of flash_attn on the CPU, by heed.torch.attention. See heed.compat.flash_attn.")


# --- a cache in the caller's memory -------------------------------------------------------------------------------------


def _turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, T, H, D] with its first 2 * width channels turned by the angles of these positions [B, T]."""
    c, s = (table[positions].unsqueeze(2).to(torch.float32) for table in (cos, sin))
    width = cos.shape[-1]
    y = x[..., : 2 * width].float()
    first, second = (y[..., 0::2], y[..., 1::2]) if interleaved else (y[..., :width], y[..., width:])
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * width :]), -1)


@speaking(**_NAMES, key_lengths="cache_seqlens", key_starts="cache_leftpad", k="k_cache", v="v_cache")
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):
    """Attention of q [B, T, H, D] with a cache of keys and values, in pages or not, to which k and v are appended in place.

    No gradient passes. Pages, and sequences chosen by cache_batch_idx, are gathered for the call.
    """
    name = "flash_attn_with_kvcache"
    _dispatch.check_tensors(name, q=q, k_cache=k_cache, v_cache=v_cache)
    B, T = q.shape[:2]
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise InvalidArgument(f"{name}: {missing} is None, expected a tensor beside {given}")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise InvalidArgument(f"{name}: rotary_cos is given, expected it with rotary_sin, k and v")
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    new = 0 if k is None else k.shape[1]
    paged = block_table is not None
    room = block_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]
    if cache_seqlens is None:
        before = torch.full((B,), room - new)
    else:
        before = torch.as_tensor(cache_seqlens, dtype=torch.int64, device="cpu").expand(B)
    if bool((before < 0).any()) or bool((before + new > room).any()):
        raise InvalidArgument(
            f"{name}: cache_seqlens is {before.tolist()} before {new} new tokens, expected at least 0 and room for {room}"
        )
    if new:
        at = before[:, None] + torch.arange(new)
        if rotary_cos is not None:
            k = _turned(k, at, rotary_cos, rotary_sin, rotary_interleaved)
            local = causal or tuple(window_size) != (-1, -1)
            q = _turned(q, before[:, None] + torch.arange(T) * int(local), rotary_cos, rotary_sin, rotary_interleaved)
        if paged:
            page = k_cache.shape[1]
            where = (block_table.long().gather(1, at // page), at % page)
        else:
            sequences = torch.arange(B) if cache_batch_idx is None else cache_batch_idx.long()
            where = (sequences[:, None], at)
        for key, x in (("k_cache", k), ("v_cache", v)):
            of_cache = _dispatch.bare(name, key, caches[key], written=True)
            of_cache[where] = _dispatch.bare(name, key[0], x).to(of_cache.dtype)
    if paged:
        caches = {key: x[block_table.long()].flatten(1, 2) for key, x in caches.items()}
    elif cache_batch_idx is not None:
        caches = {key: x[cache_batch_idx.long()] for key, x in caches.items()}
    lengths = before + new
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
               "alibi_slopes": alibi_slopes}
    with torch.no_grad():
        o, lse = heed.torch.attention(
            q, *caches.values(), **_options(options), align=lengths - T, key_lengths=lengths, key_starts=cache_leftpad,
            return_lse=True,
        )
    return (o, lse) if return_softmax_lse else o


for _name, _signature in _TABLE.items():
    globals()[_name] = _from_table(_name, _signature)

__all__ = sorted([*_TABLE, "flash_attn_with_kvcache"])
PLACES = dict.fromkeys(__all__, "flash_attn_interface")  # where the library has each
for _name in __all__:
    globals()[_name].__module__ = __name__


def __getattr__(name: str) -> Any:
    raise AttributeError(f"heed.compat.flash_attn has no {name!r}")
