# heed.compat.flash_attn: the functions of flash-attn on heed.
"""The functions of `flash_attn`, as of version 2.8.4: [B, T, H, D] or [T_total, H, D], causal from the bottom right.

The functions of `flash_attn.bert_padding` and `apply_rotary_emb` are here too.

A log-sum-exp of a row without a key is -inf, with ALiBi it is that of the full bias, and it has a gradient.
`return_attn_probs` with dropout is refused: the matrix of probabilities exists nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed.torch
from heed import InvalidArgument, Unsupported
from heed.compat import _padding, _rotary
from heed.compat._door import Arguments, door, in_words_of, lacking, speaking
from heed.compat._rotary import check_tables, turned
from heed.torch import _dispatch

__version__ = "2.8.4"  # whose functions these are

_NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes"}


def _options(a: Arguments) -> dict[str, Any]:
    left, right = a.pop("window_size")
    softcap = a.pop("softcap")
    return {
        "scale": a.pop("softmax_scale"),
        "causal": a.pop("causal"),
        "alibi": a.pop("alibi_slopes"),
        "window": None if left < 0 and right < 0 else (max(left, -1), max(right, -1)),
        "softcap": softcap if softcap > 0 else None,
    }


def _rows_of_pages(name: str, table: Tensor, lengths: list[int], pages: int, page: int) -> Tensor:
    """The places of packed sequences' tokens in consecutive pages."""
    if table.dim() != 2 or table.shape[0] != len(lengths) or max(lengths, default=0) > table.shape[1] * page:
        raise InvalidArgument(
            f"{name}: block_table has shape {list(table.shape)}, expected [{len(lengths)}, pages of {page} keys] "
            f"for lengths of {lengths}"
        )
    at = [torch.arange(n) for n in lengths]
    used = [table[b, t // page].long() for b, t in enumerate(at)]
    if any(bool(((x < 0) | (x >= pages)).any()) for x in used):
        raise InvalidArgument(f"{name}: block_table is {table.tolist()}, expected pages from 0 to {pages - 1}")
    return torch.cat([x * page + t % page for x, t in zip(used, at)])


# The positions of q, k and v in a packed tensor, by the function's word for it.
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
        raise Unsupported(
            f"{name}: return_attn_probs is True with dropout_p, expected False: heed keeps no probabilities"
        )
    for key, of_heed in (
        ("cu_seqlens", "cu_seqlens_q"),
        ("cu_seqlens_q", "cu_seqlens_q"),
        ("cu_seqlens_k", "cu_seqlens_k"),
    ):
        if key in a:
            options[of_heed] = a.pop(key)
    table = a.pop("block_table", None)
    if table is not None:
        lengths = torch.as_tensor(options["cu_seqlens_k"]).diff().tolist()
        rows = _rows_of_pages(name, table, lengths, *inputs[1].shape[:2])
        inputs[1:] = (x.flatten(0, 1)[rows] for x in inputs[1:])

    def call() -> Any:
        try:
            o, lse = heed.torch.attention(*inputs, **options, dropout=dropout, return_lse=True)
        except (InvalidArgument, Unsupported) as error:
            raise in_words_of(name, _NAMES, error) from None
        return (o, lse, o.new_empty(0)) if wants_more else o

    return call


_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
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
    return door(
        name,
        signature,
        lambda a: _prepare(name, a),
        f"{name} of flash_attn on the CPU, by heed.torch.attention. See heed.compat.flash_attn.",
    )


# --- a cache in the caller's memory -----------------------------------------------------------------------------------


def _expect(name: str, **shapes: tuple[Tensor | None, list[int]]) -> None:
    for key, (x, shape) in shapes.items():
        if x is not None and (not isinstance(x, Tensor) or list(x.shape) != shape):
            got = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
            raise InvalidArgument(f"{name}: {key} {got}, expected {shape}")


class _Places:
    """The places of each sequence's rows in the caller's caches: in a cache of its own, a chosen one, or pages."""

    def __init__(self, name: str, B: int, cache: Tensor, chosen: Tensor | None, table: Tensor | None):
        self.name, self.size, self.table, self.chosen = name, cache.shape[1], table, chosen
        if table is not None and chosen is not None:
            raise Unsupported(f"{name}: cache_batch_idx is given beside block_table, expected one of them")
        if table is not None and (table.dim() != 2 or table.shape[0] != B):
            raise InvalidArgument(
                f"{name}: block_table has shape {list(table.shape)}, expected [{B}, pages of a sequence]"
            )
        _expect(name, cache_batch_idx=(chosen, [B]))
        if chosen is not None and bool(((chosen < 0) | (chosen >= cache.shape[0])).any()):
            raise InvalidArgument(
                f"{name}: cache_batch_idx is {chosen.tolist()}, expected from 0 to {cache.shape[0] - 1}"
            )
        if table is None and chosen is None and cache.shape[0] != B:
            raise InvalidArgument(f"{name}: k_cache has shape {list(cache.shape)}, expected {B} sequences as q")
        self.room = self.size if table is None else table.shape[1] * self.size
        self.sequences = torch.arange(B) if chosen is None else chosen.long()

    def check_pages(self, lengths: Tensor, pages: int) -> None:
        """Checks the pages that hold a row; the others are never read, and become page 0."""
        if self.table is None:
            return
        holds = torch.arange(self.table.shape[1]) * self.size < lengths[:, None]
        if bool((holds & ((self.table < 0) | (self.table >= pages))).any()):
            raise InvalidArgument(
                f"{self.name}: block_table is {self.table.tolist()}, expected pages from 0 to {pages - 1} "
                f"for lengths of {lengths.tolist()}"
            )
        self.table = torch.where(holds, self.table, 0).long()

    def of_rows(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The index of the rows at these places [B, T] of their sequences."""
        if self.table is None:
            return self.sequences[:, None], at
        return self.table.gather(1, at // self.size), at % self.size

    def gathered(self, cache: Tensor) -> Tensor:
        """All rows of each sequence; the cache itself where nothing is chosen."""
        if self.table is not None:
            return cache[self.table].flatten(1, 2)
        return cache if self.chosen is None else cache[self.sequences]


@speaking(**_NAMES, key_lengths="cache_seqlens", key_starts="cache_leftpad", k="k_cache", v="v_cache")
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of q [B, T, H, D] with keys and values in a cache, of pages or not, to which k and v are appended.

    The caches change in place. No gradient passes. Pages, and sequences chosen by cache_batch_idx, are gathered for the
    call.
    """
    name = "flash_attn_with_kvcache"
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    _dispatch.check_tensors(name, **{key: x for key, x in given.items() if x is not None or key not in "kv"})
    q, k_cache, v_cache, k, v = (_dispatch.bare(name, key, x, written="_" in key) for key, x in given.items())
    for key in ("q", "k_cache", "v_cache"):
        if given[key].dim() != 4:
            raise InvalidArgument(f"{name}: {key} has shape {list(given[key].shape)}, expected four axes")
    if (k is None) != (v is None):
        missing, other = ("k", "v") if k is None else ("v", "k")
        raise InvalidArgument(f"{name}: {missing} is None, expected a tensor beside {other}")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise InvalidArgument(f"{name}: rotary_cos or rotary_sin is given alone, expected both, and k and v")
    B, T = q.shape[:2]
    new = 0 if k is None else k.shape[1]
    _expect(
        name,
        k=(k, [B, new, *k_cache.shape[2:]]),
        v=(v, [B, new, *v_cache.shape[2:]]),
        cache_leftpad=(cache_leftpad, [B]),
    )
    places = _Places(name, B, k_cache, cache_batch_idx, block_table)
    before = torch.as_tensor(
        places.room - new if cache_seqlens is None else cache_seqlens, dtype=torch.int64, device="cpu"
    )
    before = before.expand(B) if before.dim() == 0 else before
    _expect(name, cache_seqlens=(before, [B]))
    lengths = before + new
    if bool(((before < 0) | (lengths > places.room)).any()):
        raise InvalidArgument(
            f"{name}: cache_seqlens is {before.tolist()} before {new} new tokens, expected at least 0 and room for "
            f"{places.room}"
        )
    places.check_pages(lengths, k_cache.shape[0])

    at = before[:, None] + torch.arange(new)
    if rotary_cos is not None:
        rows = max(int(lengths.max()), int(before.max()) + T)
        check_tables(name, rotary_cos, rotary_sin, rows, q.shape[-1], "rotary_")
        k = turned(k, at, rotary_cos, rotary_sin, rotary_interleaved)
        local = causal or tuple(window_size) != (-1, -1)
        q = turned(q, before[:, None] + torch.arange(T) * int(local), rotary_cos, rotary_sin, rotary_interleaved)
    options = _options(
        {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
        }
    )
    where = places.of_rows(at)
    replaced = [(cache, cache[where], x.to(cache.dtype)) for cache, x in ((k_cache, k), (v_cache, v)) if x is not None]
    for cache, _, x in replaced:
        cache[where] = x
    try:
        o, lse = heed.torch.attention(
            q,
            places.gathered(k_cache),
            places.gathered(v_cache),
            **options,
            align=lengths - T,
            key_lengths=lengths,
            key_starts=cache_leftpad,
            return_lse=True,
        )
    except Exception:
        for cache, x, _ in replaced:  # a call that fails has changed nothing
            cache[where] = x
        raise
    if replaced:
        _dispatch.wrote(given["k_cache"], given["v_cache"])
    return (o, lse) if return_softmax_lse else o


for _name, _signature in _TABLE.items():
    globals()[_name] = _from_table(_name, _signature)

_LACKING = {
    "RotaryEmbedding": "layers.rotary",
    "apply_rotary_emb_kv_": "layers.rotary",
    "apply_rotary_emb_qkv_": "layers.rotary",
}
PLACES: dict[str, str | tuple[str, ...]] = {  # where the library has each
    **dict.fromkeys((*_TABLE, "flash_attn_with_kvcache"), "flash_attn_interface"),
    **_padding.PLACES,
    **_rotary.PLACES,
    **_LACKING,
}
for _of in (_padding, _rotary):
    globals().update({_name: getattr(_of, _name) for _name in _of.PLACES})
for _name in _LACKING:
    globals()[_name] = lacking(_name)
__all__: list[str] = []
__all__ += sorted(PLACES)
for _name in __all__:
    globals()[_name].__module__ = __name__


def __getattr__(name: str) -> Any:
    raise AttributeError(f"heed.compat.flash_attn has no {name!r}")
