# heed.torch's caches of keys and values: heed's own, on tensors.
"""KVCache, RingKVCache, LatentKVCache, NSACache and load_cache with torch tensors in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core, _signatures
from heed.torch import _cache_operators, _dispatch, _distributed_attention, _group

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _call(function: Any, cache: Any, operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    """function(cache, **tensors, **options), of which nothing may require a gradient."""
    given = {**tensors, **options}
    if torch.is_grad_enabled():
        for name, x in given.items():
            if isinstance(x, Tensor) and x.requires_grad:
                raise InvalidArgument(
                    f"{operation}: {name} requires a gradient, expected a detached tensor or torch.no_grad(): "
                    "what is computed on a cache has none"
                )
    given = {name: _dispatch.bare(operation, name, x, written=name in ("out", "lse", "bound"))
             for name, x in given.items()}
    try:
        function(cache, **given)
    except InvalidArgument:
        raise
    except (BufferError, RuntimeError):  # from PyTorch, for tensors whose memory it does not give
        _dispatch.refuse(tuple(given), tuple(given.values()), operation)
        raise
    _dispatch.wrote(given.get("out"))


def _under_autocast(cache: Any, *tensors: Any) -> list[Any]:
    """Under autocast, rows and queries in the dtype of the cache. float64 stays as it is, as autocast leaves it."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    return [x.to(cache._dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
            for x in tensors]


def _written(operation: str, out: Any, o: Tensor) -> Tensor:
    """`out` with the content of `o`, in a graph."""
    if not isinstance(out, Tensor) or out.dtype != o.dtype or out.shape != o.shape:
        what = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InvalidArgument(f"{operation}: out is {what}, expected {o.dtype} {list(o.shape)}")
    return out.copy_(o)


def _dtype_name(operation: str, dtype: Any) -> Any:
    if isinstance(dtype, torch.dtype) and dtype not in _NAMES:
        raise InvalidArgument(f"{operation}: dtype is {dtype}, expected a float dtype of 64, 32 or 16 bits")
    return _NAMES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype


_is_compiling = torch.compiler.is_compiling


def _name_for_graphs(cache: Any) -> None:
    """Sets the attributes of a cache that compiled functions read."""
    cache._handle, cache._width, cache._dtype = _cache_operators.new_handle(cache), cache.value_dim, cache.dtype


def _adopted(cache: Any, cls: Any) -> Any:
    """A fork of a cache of heed, or of one here, as an object of `cls`."""
    fork = cache._fork_as(cls)
    _name_for_graphs(fork)
    return fork


def _on_tensors(cls: Any) -> Any:
    """Gives a subclass of a cache of heed its methods on tensors; what it defines itself stays."""
    base = cls.__mro__[1]
    name = base.__name__

    def __init__(self: Any, *sizes: int, dtype: Any = "f32", **options: Any) -> None:
        base.__init__(self, *sizes, dtype=_dtype_name(name, dtype), **options)
        _name_for_graphs(self)

    def fork(self: Any, memo: Any = None) -> Any:  # memo: of copy.deepcopy
        return _adopted(self, type(self))

    def append(self: Any, k: Tensor, v: Tensor, lengths: Any = None, **log_decay: Any) -> None:
        k, v = _under_autocast(self, k, v)
        if _is_compiling():
            _cache_operators.append(self._handle, k, v, lengths, **log_decay)
        else:
            _call(_core._append_torch, self, f"{name}.append", {"k": k, "v": v}, {"lengths": lengths, **log_decay})

    def append_latent(self: Any, rows: Tensor, lengths: Any = None) -> None:
        rows, = _under_autocast(self, rows)
        if _is_compiling():
            _cache_operators.append(self._handle, rows, None, lengths)
        else:
            _call(_core._append_torch, self, f"{name}.append", {"rows": rows}, {"lengths": lengths})

    def attend(self: Any, q: Tensor, *, return_lse: bool = False, return_bound: bool = False, out: Tensor | None = None,
               group: Any = None, **options: Any) -> Any:
        if not isinstance(q, Tensor):
            raise InvalidArgument(f"{name}.attend: q is of type {type(q).__name__}, expected a tensor")
        _dispatch.check_bools(f"{name}.attend", return_lse=return_lse, return_bound=return_bound)
        (q,), lse, bound = _under_autocast(self, q), None, None
        if group is not None:
            for option in ("epsilon", "return_bound"):
                if return_bound if option == "return_bound" else options.get(option) is not None:
                    raise Unsupported(f"{name}.attend: {option} is given with a group, expected None")
            options["comm"] = _group.Transport(_group.Group(f"{name}.attend", group))
        elif _is_compiling():
            if return_bound is not False:
                options["return_bound"] = return_bound
            o, lse = _cache_operators.attend(self._handle, q, self._width, options)
            o = o if out is None else _written(f"{name}.attend", out, o)
            return (o, lse) if return_lse else o
        if q.dim() == 4:  # else the call below says what is wrong
            batch, rows, heads, _ = q.shape
            if out is None:
                out = q.new_empty((batch, rows, heads, self.value_dim))
            if return_lse:
                lse = q.new_empty((batch, heads, rows), dtype=q.dtype if q.dtype == torch.float64 else torch.float32)
            if return_bound:
                bound = q.new_empty((batch, heads, rows), dtype=torch.float32)
        given = {"q": q, "out": out, "lse": lse}
        if return_bound is not False:
            given |= {"bound": bound} if options.get("epsilon") is not None else {"return_bound": return_bound}
        _call(_core._attend_torch, self, f"{name}.attend", given, options)
        results = (out, *(x for x, asked in ((bound, return_bound), (lse, return_lse)) if asked))
        return results if len(results) > 1 else out

    rows = append_latent if base is heed.LatentKVCache else append
    methods = {"__init__": __init__, "fork": fork, "append": rows, "attend": attend}
    for of, method in methods.items():
        method = vars(cls).get(of, method)
        method.__name__, method.__doc__ = of, _signatures.text_on_tensors(
            base if of == "__init__" else getattr(base, of), without=("comm",) if of == "attend" else ())
        method.__qualname__ = f"{name}.{of}"
        divided = of == "attend" and base is not heed.NSACache
        keywords = _signatures.CACHE_IN_A_GROUP if divided else ()
        method.__signature__ = _signatures.of_tensors(getattr(base, of), without=("comm",), keywords=keywords)
        if divided:
            method.__doc__ += "\n\n" + _distributed_attention.TEXT_OF_CACHES
        setattr(cls, of, method)
    cls.__copy__ = cls.__deepcopy__ = fork
    for of in ("share", "import_pages"):
        if of in vars(cls):
            getattr(cls, of).__doc__ = _signatures.text_on_tensors(getattr(base, of))
            getattr(cls, of).__signature__ = _signatures.of_tensors(getattr(base, of))
    cls.lengths = property(lambda self: torch.from_numpy(base.lengths.__get__(self)), doc=base.lengths.__doc__)
    cls.appended = property(lambda self: torch.from_numpy(base.appended.__get__(self)), doc=base.appended.__doc__)
    cls.dtype = property(lambda self: _DTYPES[base.dtype.__get__(self)], doc="Of rows given, and of queries.")
    cls.__doc__ = _signatures.text_on_tensors(base) + _IN_PYTORCH
    cls.__module__ = "heed.torch"
    return cls


_IN_PYTORCH = """

In PyTorch. dtype is one of PyTorch's or its name here. Tensors are on the CPU and read in place, lengths are int64
tensors. Nothing that is computed on a cache has a gradient: a tensor that requires one is refused unless gradients are
off. Work runs on PyTorch's threads, at most `threads` of them. Under autocast rows and queries take the cache's dtype.
Otherwise as in heed."""


@_on_tensors
class KVCache(heed.KVCache):
    @staticmethod
    def share(prefix_cache: heed.KVCache, batch: int) -> KVCache:
        return _adopted(heed.KVCache.share(prefix_cache, batch), KVCache)

    @staticmethod
    def import_pages(*tables: Any, **options: Any) -> KVCache:
        tables = tuple(_dispatch.bare("KVCache.import_pages", "a pool", x, written=True) for x in tables)
        options = {name: _dispatch.bare("KVCache.import_pages", name, x) for name, x in options.items()}
        return _adopted(heed.KVCache.import_pages(*tables, **options), KVCache)


@_on_tensors
class RingKVCache(heed.RingKVCache):
    pass


@_on_tensors
class LatentKVCache(heed.LatentKVCache):
    @staticmethod
    def share(prefix_cache: heed.LatentKVCache, batch: int) -> LatentKVCache:
        return _adopted(heed.LatentKVCache.share(prefix_cache, batch), LatentKVCache)


@_on_tensors
class NSACache(heed.NSACache):
    def append(self, k: Tensor, v: Tensor, lengths: Any = None, *, compressed: Any = None) -> None:
        k, v = _under_autocast(self, k, v)
        if isinstance(compressed, (tuple, list)):
            compressed = tuple(_under_autocast(self, *compressed))
        if _is_compiling():
            _cache_operators.append(self._handle, k, v, lengths, compressed=compressed)
        else:
            _call(_core._append_torch, self, "NSACache.append", {"k": k, "v": v},
                  {"lengths": lengths, "compressed": compressed})

    def attend(self, q: Tensor, gates: Tensor, *, scale: float | None = None, out: Tensor | None = None,
               threads: int | None = None) -> Tensor:
        _dispatch.check_tensors("NSACache.attend", q=q, gates=gates)
        q, gates = _under_autocast(self, q, gates)
        if _is_compiling():
            o = torch.ops.heed.nsa_cache_attend(self._handle, q, gates, self._width, scale, threads)
            return o if out is None else _written("NSACache.attend", out, o)
        if out is None and q.dim() == 4:  # else the call below says what is wrong
            out = q.new_empty((*q.shape[:3], self.value_dim))
        _call(_core._attend_torch, self, "NSACache.attend", {"q": q, "gates": gates, "out": out},
              {"scale": scale, "threads": threads})
        return out


_CLASSES = {cls.__mro__[1]: cls for cls in (KVCache, RingKVCache, LatentKVCache)}


def load_cache(path: Any, *, max_bytes: int | None = None) -> KVCache | RingKVCache | LatentKVCache:
    cache = heed.load_cache(path, max_bytes=max_bytes)
    return _adopted(cache, _CLASSES[type(cache)])


load_cache.__doc__ = _signatures.text_on_tensors(heed.load_cache)
