# The operators that a compiled function calls on a cache: append and attend without a break of the graph.
"""Operators of PyTorch on the caches of heed.torch.

A cache is an object that changes, which no operator can take. Each has a tensor, its handle, whose one element says
which cache is meant. Both operators claim to change the handle, so that every transform of PyTorch leaves them in the
order in which they were written, and drops none.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument, _core
from heed.torch import _dispatch, _operators

_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# {name: "type name=None"} of the options that caches take; None leaves one to the cache.
_OPTIONS = {"tree": "Tensor? tree=None"}
for _option in _operators.attention_options.table:
    if _option.on_caches:
        _kind = _option.schema.partition(" ")[0].rstrip("?")
        _OPTIONS[_option.name] = f"{_kind}? {_option.name}=None"

_library = _dispatch.library
_library.define("cache_append(Tensor(a!) handle, Tensor k, Tensor? v=None, Tensor? lengths=None, "
                "Tensor? log_decay=None, Tensor? k_cmp=None, Tensor? v_cmp=None) -> ()")
_library.define(
    f"cache_attend(Tensor(a!) handle, Tensor q, int width, {', '.join(_OPTIONS.values())}) -> (Tensor o, Tensor lse)"
)
_library.define("nsa_cache_attend(Tensor(a!) handle, Tensor q, Tensor gates, int width, float? scale=None, "
                "int? threads=None) -> Tensor")


def new_handle(cache: Any) -> Tensor:
    """The tensor that represents `cache` in a graph."""
    number = next(_numbers)
    _caches[number] = cache
    return torch.tensor([number], device="cpu")


def _cache(handle: Tensor) -> Any:
    return _caches[int(handle)]


def _append(handle: Tensor, k: Tensor, v: Tensor | None = None, lengths: Tensor | None = None,
            log_decay: Tensor | None = None, k_cmp: Tensor | None = None, v_cmp: Tensor | None = None) -> None:
    rows: dict[str, Any] = {"rows": k} if v is None else {"k": k, "v": v}
    if log_decay is not None:
        rows["log_decay"] = log_decay
    if k_cmp is not None:
        rows["compressed"] = k_cmp, v_cmp
    _core._append_torch(_cache(handle), **rows, lengths=lengths)


def _results(handle: Tensor, q: Tensor, width: int, *options: Any) -> tuple[Tensor, Tensor]:
    """New tensors for o and lse."""
    if q.dim() != 4:
        raise InvalidArgument(f"attend: q has shape {list(q.shape)}, expected [B, T, H, D]")
    batch, rows, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, rows, heads, width)), q.new_empty((batch, heads, rows), dtype=wide)


def _attend(handle: Tensor, q: Tensor, width: int, *options: Any) -> tuple[Tensor, Tensor]:
    given = {name: x for name, x in zip(_OPTIONS, options) if x is not None}
    if "segments_q" in given:
        given["segments"] = given.pop("segments_q"), given.pop("segments_k")
    if "pattern" in given:
        given["pattern"] = _core._pattern_of(given["pattern"]) or _core._parse_pattern(given["pattern"])
    o, lse = _results(handle, q, width)
    _core._attend_torch(_cache(handle), q=q, out=o, lse=lse, **given)
    return o, lse


def _nsa_result(handle: Tensor, q: Tensor, gates: Tensor, width: int, *options: Any) -> Tensor:
    if q.dim() != 4:
        raise InvalidArgument(f"attend: q has shape {list(q.shape)}, expected [B, T, H, D]")
    return q.new_empty((*q.shape[:3], width))


def _nsa_attend(handle: Tensor, q: Tensor, gates: Tensor, width: int, scale: float | None = None,
                threads: int | None = None) -> Tensor:
    o = _nsa_result(handle, q, gates, width)
    _core._attend_torch(_cache(handle), q=q, gates=gates, out=o, scale=scale, threads=threads)
    return o


def _tensor(value: Any) -> Tensor | None:
    return value if value is None or isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def append(handle: Tensor, k: Tensor, v: Tensor | None, lengths: Any, log_decay: Tensor | None = None,
           compressed: tuple[Tensor, Tensor] | None = None) -> None:
    """Appends in a compiled function, where an eager one calls the cache itself."""
    torch.ops.heed.cache_append(handle, k, v, _tensor(lengths), log_decay, *(compressed or ()))


def attend(handle: Tensor, q: Tensor, width: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    options = dict(options)
    segments = options.pop("segments", None)
    if segments is not None:
        pair = segments if isinstance(segments, tuple) else (segments, segments)
        options["segments_q"], options["segments_k"] = pair
    if options.get("pattern") is not None:
        options["pattern"] = _dispatch.pattern_key(options["pattern"])
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"attend() got an unexpected keyword argument {name!r} in a compiled function")
    given = [_tensor(options.get(name)) if kind.startswith("Tensor") else options.get(name)
             for name, kind in _OPTIONS.items()]
    return torch.ops.heed.cache_attend(handle, q, width, *given)


def _no_gradient(kernel: Any, operation: str, names: tuple[str, ...]) -> Any:
    def refuse(keyset: Any, *arguments: Any) -> Any:
        for name, x in zip(names, arguments):
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                raise InvalidArgument(f"{operation}: {name} requires a gradient, which what is computed on a "
                                      "cache has not")
        with torch._C._AutoDispatchBelowAutograd():
            return kernel.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return refuse


def _register() -> None:
    for name, cpu, fake in (("cache_append", _append, lambda *arguments: None), ("cache_attend", _attend, _results),
                            ("nsa_cache_attend", _nsa_attend, _nsa_result)):
        operator, method = getattr(torch.ops.heed, name).default, name.rpartition("_")[2]
        names = tuple(argument.name for argument in operator._schema.arguments)
        _library.impl(name, cpu, "CPU")
        _library.impl(name, _no_gradient(operator, method, names), "Autograd", with_keyset=True)
        _library.impl(name, lambda *given, of=(method, names): _dispatch.refuse(of[1], given, of[0]),
                      "CompositeExplicitAutograd")
        torch.library.register_fake(f"heed::{name}", fake, lib=_library)


_register()
