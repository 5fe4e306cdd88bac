# heed.torch.scaled_dot_product_attention: PyTorch's function of that name on heed, and its replacement in a block.
"""heed.torch.scaled_dot_product_attention and heed.torch.replace_sdpa."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from heed import InvalidArgument, Unsupported
from heed.torch import _dispatch
from heed.torch._attention import call_operator
from heed.torch._operators import OPTIONS
from heed.torch._options import seed_tensor

_NAME = "scaled_dot_product_attention"
_UP_TO_BIAS, _UP_TO_MASK = ((None,) * (OPTIONS.index(name) - OPTIONS.index("align") - 1) for name in ("bias", "mask"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on heed: its arguments, results and gradients.

    query is [..., L, E], key [..., S, E], value [..., S, Ev] and the result [..., L, Ev]. Their other axes broadcast;
    with enable_gqa the last of these, the heads, may be fewer in key and value. attn_mask broadcasts to [..., L, S]:
    bool, where True attends, or float, which is added to the scaled products and may require a gradient; or an object
    of torch.nn.attention.bias. is_causal lets query i see the keys 0 to i. A query that sees no key gets 0. Tensors
    are read in place, whatever axes of them broadcast; one whose last axis is not contiguous is copied.

    Every shape, dtype and dropout_p is taken that PyTorch's math backend takes on the CPU, and what it refuses is a
    heed.InvalidArgument. Dropout drops as often, but other pairs; torch.manual_seed reproduces them. Second
    derivatives and forward mode are those of heed.torch.attention, and scale has to be finite.
    """
    try:
        q, k, v = query.shape, key.shape, value.shape
        plain = (
            dropout_p == 0
            and is_causal.__class__ is enable_gqa.__class__ is bool
            and len(q) == len(k) == len(v) == 4
            and q[0] == k[0] == v[0]
            and k[1] == v[1]
            and (q[1] == k[1] or enable_gqa)
            and q[3]
            and v[3]
            and (attn_mask is None or _is_plain_mask(attn_mask, query, is_causal))
        )
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        plain = False
    if plain:
        try:
            if attn_mask is not None:
                return call_operator(query, key, value, True, scale, False, "top_left", *_mask_options(attn_mask))[0]
            if is_causal:
                return call_operator(query, key, value, True, scale, True, "top_left")[0]
            if scale is not None:
                return call_operator(query, key, value, True, scale)[0]
            return call_operator(query, key, value, True)[0]
        except InvalidArgument:  # about q, k and v, which are not the caller's words
            pass
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_plain_mask(mask: Tensor, query: Tensor, is_causal: bool) -> bool:
    is_kind = mask.dtype is torch.bool or mask.dtype is torch.float32 or mask.dtype is query.dtype
    return is_kind and mask.dim() == 4 and type(mask) is Tensor and not is_causal


def _mask_options(mask: Tensor) -> tuple[Tensor | None, ...]:
    """The operator's options after `align`, up to the mask, or to the bias that it is."""
    if mask.dtype is torch.bool:
        return (*_UP_TO_MASK, mask)
    return (*_UP_TO_BIAS, mask)


def _problem(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> InvalidArgument | None:
    """The error for invalid inputs, in the caller's words, or None."""
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items() if attn_mask is None else (inputs | {"attn_mask": attn_mask}).items():
        if not isinstance(x, Tensor):
            return InvalidArgument(f"{_NAME}: {name} is of type {type(x).__name__}, expected a tensor")
        if x.is_nested:
            return InvalidArgument(f"{_NAME}: {name} is a nested tensor, expected a strided one")
        if x.layout is not torch.strided:
            return InvalidArgument(f"{_NAME}: {name} is a {str(x.layout).removeprefix('torch.')} tensor, "
                                   "expected a strided one")
    if query.dtype not in DTYPES:
        return InvalidArgument(f"{_NAME}: query has dtype {query.dtype}, expected a float dtype of 64, 32 or 16 bits")
    rank = 3 if enable_gqa else 2
    for name, x in inputs.items():
        if x.dim() < rank:
            return _shape_error(name, x, f"at least {rank} axes")
        if x.dtype != query.dtype and not torch.is_autocast_enabled("cpu"):
            return InvalidArgument(f"{_NAME}: {name} has dtype {x.dtype}, expected {query.dtype} as query")
    if key.shape[-1] != query.shape[-1]:
        return _shape_error("key", key, f"a last axis of {query.shape[-1]} as query")
    if value.shape[-2] != key.shape[-2]:
        return _shape_error("value", value, f"{key.shape[-2]} rows as key")
    if enable_gqa and query.shape[-3]:
        for name, x in (("key", key), ("value", value)):
            if x.shape[-3] == 0 or query.shape[-3] % x.shape[-3]:
                return _shape_error(name, x, f"a number of heads that divides the {query.shape[-3]} of query")
    return None


def _wrong_number(dropout_p: Any, scale: Any) -> InvalidArgument | None:
    number = (Real, torch.SymFloat, torch.SymInt)
    if not isinstance(dropout_p, number) or not dropout_p <= 1:
        return InvalidArgument(f"{_NAME}: dropout_p is {dropout_p!r}, expected a number of at most 1")
    if scale is not None and (not isinstance(scale, number) or not -math.inf < scale < math.inf):
        return InvalidArgument(f"{_NAME}: scale is {scale!r}, expected a finite number or None")
    return None


def _shape_error(name: str, x: Tensor, expected: str) -> InvalidArgument:
    return InvalidArgument(f"{_NAME}: {name} has shape {list(x.shape)}, expected {expected}")


def _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    """Any mask, dropout, any number of batch axes, axes of size 0."""
    _dispatch.check_bools(_NAME, is_causal=is_causal, enable_gqa=enable_gqa)
    if problem := _problem(query, key, value, attn_mask, enable_gqa) or _wrong_number(dropout_p, scale):
        raise problem
    if is_causal and attn_mask is not None:
        raise InvalidArgument(f"{_NAME}: is_causal is {is_causal}, expected False where attn_mask is given")

    # The axes before the last two, heads included: `batch` of the result, `scores` of what a mask applies to.
    rank = 3 if enable_gqa else 2
    scores = _broadcast("key", key, query.shape[:-rank], key.shape[:-rank])
    batch = _broadcast("value", value, scores, value.shape[:-rank])
    if enable_gqa:
        scores, batch = (*scores, query.shape[-3]), (*batch, query.shape[-3])
        key_heads = math.lcm(key.shape[-3], value.shape[-3])
        if key.shape[-3] != value.shape[-3]:  # the one copy there is: heed has as many heads of either
            key, value = (x.repeat_interleave(key_heads // x.shape[-3], -3) for x in (key, value))
    else:
        shared = all(x.dim() == 2 or x.shape[-3] == 1 for x in (key, value))
        key_heads = 1 if shared else batch[-1]
    scores = (*scores, query.shape[-2], key.shape[-2])

    align = "top_left"
    if _is_causal_bias(attn_mask):
        is_causal, align, attn_mask = True, _alignment(attn_mask, scores), None
    elif attn_mask is not None:
        _check_mask(attn_mask, query, scores)
    if dropout_p == 1:  # nothing is left of any weight
        attn_mask = query.new_zeros((), dtype=torch.bool)

    columns = value.shape[-1]
    if query.shape[-1] == key.shape[-1] == 0:
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
    if columns == 0:
        value = F.pad(value, (0, 1))
    tensors = [query, key, value, attn_mask]
    without_heads = len(batch) < 2 and not enable_gqa
    if without_heads:
        batch, key_heads = (*batch, 1), 1
        tensors = [x if x is None or x.dim() < 3 else x.unsqueeze(-3) for x in tensors]
    *outer, heads = batch
    rank = len(outer) + 3
    tensors = [x if x is None or x.dim() == rank else x[(None,) * (rank - x.dim())] for x in tensors]
    options = (True, scale, is_causal, align)
    o = _attend(outer, (heads, key_heads), tensors, options, dropout_p if 0 < dropout_p != 1 else 0.0)
    if columns == 0:
        o = o[..., :0]
    return o.squeeze(-3) if without_heads else o


def _broadcast(name: str, x: Tensor, before: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    pairs = list(itertools.zip_longest(reversed(before), reversed(shape), fillvalue=1))[::-1]
    if any(n != m and n != 1 and m != 1 for n, m in pairs):
        raise _shape_error(name, x, f"first axes that broadcast with {list(before)}")
    return tuple(m if n == 1 else n for n, m in pairs)


def _is_causal_bias(x: Any) -> bool:
    """Returns whether x is one of PyTorch's objects for causal masks, whose elements mean nothing.

    Their module is slow to import.
    """
    module = None if type(x) is Tensor else sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(x, module.CausalBias)


def _alignment(bias: Any, scores: Sequence[int]) -> str:
    size = [bias.seq_len_q, bias.seq_len_kv]
    if bias.variant.name == "UPPER_LEFT" or size[0] == size[1]:
        return "top_left"
    if size != list(scores[-2:]):
        raise InvalidArgument(f"{_NAME}: attn_mask has shape {size}, expected {list(scores[-2:])}")
    return "bottom_right"


def _check_mask(mask: Tensor, query: Tensor, scores: Sequence[int]) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not torch.is_autocast_enabled("cpu"):
        expected = f"torch.bool, torch.float32 or {query.dtype} as query"
        raise InvalidArgument(f"{_NAME}: attn_mask has dtype {mask.dtype}, expected {expected}")
    if mask.dim() > len(scores) or any(n != 1 and n != m for n, m in zip(mask.shape[::-1], scores[::-1])):
        raise _shape_error("attn_mask", mask, f"one that broadcasts to {list(scores)}")


def _attend(outer: list[int], heads: tuple[int, int], tensors: list[Tensor | None], options, dropout: float) -> Tensor:
    """One call of the operator if that needs no copy of a tensor whose axes broadcast; else one per slice."""
    if not all(x is None or _merges(x, outer) for x in tensors):
        axis = outer.index(min(n for n in outer if n != 1))
        slices = zip(*(_slices(x, axis, outer[axis]) for x in tensors))
        rest = outer[:axis] + outer[axis + 1 :]
        return torch.stack([_attend(rest, heads, list(part), options, dropout) for part in slices], axis)
    query, key, value, mask = (None if x is None else _merge(x, outer) for x in tensors)
    batch = math.prod(outer)
    query, key, value = (_expand(x, batch, n) for x, n in ((query, heads[0]), (key, heads[1]), (value, heads[1])))
    if mask is not None:
        options += _mask_options(mask)
    if dropout:
        options += (None,) * (OPTIONS.index("sink_tokens") - len(options)) + (0, dropout, seed_tensor(None))
    o = call_operator(query, key, value, *options)[0]
    return o if len(outer) == 1 else o.unflatten(0, outer) if outer else o.squeeze(0)


def _merges(x: Tensor, outer: list[int]) -> bool:
    """Returns whether the first axes of x, broadcast to `outer`, merge into one axis without a copy."""
    if len(outer) < 2 or 0 in outer:
        return True
    sizes_and_strides = [(n, 0 if x.shape[i] == 1 else x.stride(i)) for i, n in enumerate(outer) if n != 1]
    return all(s == n * t for (_, s), (n, t) in zip(sizes_and_strides, sizes_and_strides[1:]))


def _merge(x: Tensor, outer: list[int]) -> Tensor:
    """[*outer, ...] as [B, ...], or as [1, ...] what is the same for all."""
    count = len(outer)
    if count == 1:
        return x
    if count == 0:
        return x.unsqueeze(0)
    if any(n != 1 for n in x.shape[:count]):
        x = x.expand(*outer, *x.shape[count:])
    return x.flatten(0, count - 1)


def _slices(x: Tensor | None, axis: int, count: int) -> Sequence[Tensor | None]:
    if x is None:
        return [None] * count
    return [x.squeeze(axis)] * count if x.shape[axis] == 1 else x.unbind(axis)


def _expand(x: Tensor, batch: int, heads: int) -> Tensor:
    return x if x.shape[0] == batch and x.shape[1] == heads else x.expand(batch, heads, -1, -1)


# --- in place of PyTorch's function -----------------------------------------------------------------------------------


class SdpaCall(NamedTuple):
    """One call of scaled_dot_product_attention in a block of replace_sdpa."""

    ran: bool  # on heed
    reason: str | None  # why not
    shapes: tuple[tuple[int, ...] | None, ...]  # query, key, value and attn_mask; None: no tensor, or a nested one


class _Thread(threading.local):
    """The blocks that this thread is in, and whether it is in a call that was passed on to PyTorch."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.passing = False


_thread = _Thread()
_sdpa_of_torch = F.scaled_dot_product_attention


def _in_block() -> bool:
    return bool(_thread.blocks) and not _thread.passing


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else None


def _has_own_function(x: Any) -> bool:
    """Returns whether the class of x overrides PyTorch's functions, as by __torch_function__."""
    function = getattr(getattr(type(x), "__torch_function__", None), "__func__", None)
    return function not in (None, Tensor.__torch_function__.__func__) and not _is_causal_bias(x)


class _Block(TorchFunctionMode):
    """Handles the calls inside a block. As a mode it sees the calls of PyTorch's own function object."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict
        self.record: list[SdpaCall] = []
        self.call = torch.compiler.disable(self._call)  # not as a decorator, which makes the import of heed.torch slow

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return _handle(func, *args, **kwargs) if func is _sdpa_of_torch and _in_block() else func(*args, **kwargs)

    def _call(self, replaced, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        shapes = tuple(_shape(x) for x in arguments[:4])
        try:
            for name, x in zip(("query", "key", "value", "attn_mask"), arguments):
                if _has_own_function(x) and not x.is_nested:
                    kind = type(x).__name__
                    raise Unsupported(f"{_NAME}: {name} is of type {kind}, which overrides PyTorch's functions")
            o = scaled_dot_product_attention(*arguments, **options)
        except (InvalidArgument, Unsupported, NotImplementedError) as error:
            if self.strict:
                raise Unsupported(str(error)) from error
            self.record.append(SdpaCall(False, str(error), shapes))
        else:
            self.record.append(SdpaCall(True, None, shapes))
            return o
        _thread.passing = True
        try:
            if _is_causal_bias(attn_mask):  # it knows PyTorch's function by the attribute, which is replaced now
                types = (type(attn_mask),)
                return attn_mask.__torch_function__(F.scaled_dot_product_attention, types, arguments, options)
            return replaced(*arguments, **options)
        finally:
            _thread.passing = False


def _handle(replaced: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A call in a block. In a graph it is no more than the operator, if that can run it."""
    if torch.compiler.is_compiling() and _can_be_in_graph(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)
    return _thread.blocks[-1].call(replaced, *args, **kwargs)


def _can_be_in_graph(query, key, value, attn_mask=None, *args, **kwargs) -> bool:
    """Checks the kinds of tensors, which the operator would otherwise find out only when it runs."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    return (
        all(x.device.type == "cpu" and x.layout is torch.strided and not x.is_nested for x in tensors)
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
    )


def _in_place_of(replaced: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(*args, **kwargs):
        return _handle(replaced, *args, **kwargs) if _in_block() else replaced(*args, **kwargs)

    return scaled_dot_product_attention


class _Attribute:
    """torch.nn.functional.scaled_dot_product_attention, replaced while any thread is in a block."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_blocks = 0

    def replace(self) -> None:
        with self.lock:
            self.num_blocks += 1
            if self.num_blocks == 1:
                self.replaced = F.scaled_dot_product_attention
                self.ours = F.scaled_dot_product_attention = _in_place_of(self.replaced)

    def restore(self) -> None:
        with self.lock:
            self.num_blocks -= 1
            if self.num_blocks == 0 and F.scaled_dot_product_attention is self.ours:
                F.scaled_dot_product_attention = self.replaced


_attribute = _Attribute()


@contextlib.contextmanager
def replace_sdpa(strict: bool = False) -> Iterator[list[SdpaCall]]:
    """A block in which torch.nn.functional.scaled_dot_product_attention runs on heed.

        with heed.torch.replace_sdpa() as record:
            model(x)

    Calls of the function by whatever name are replaced, also those inside of PyTorch's own modules. `record` is a list
    with an entry for each: `ran` (on heed), `reason` (why not, else None), `shapes` (of query, key, value and
    attn_mask). PyTorch runs the calls that heed cannot (other devices and dtypes, nested and sparse tensors, classes
    with a __torch_function__ of their own, second derivatives in forward mode), and refuses invalid ones; with
    strict=True both are a heed.Unsupported. The innermost of nested blocks counts.

    A block is for the thread that entered it. The function's name in torch.nn.functional changes for the whole
    process, but in other threads it computes as before. A backward pass that computes again what the forward pass
    computed (torch.utils.checkpoint) belongs into the block.

    torch.compile: enter the block outside of the compiled function. Functions called in the block are compiled once
    more, with heed's operator in the graph, and outside of the block PyTorch's function is back. Calls in a graph are
    not recorded, or once, when they are compiled. A call that heed cannot run is in no graph: it runs between two of
    them and is recorded; with fullgraph=True it is an error.

    In eval mode without gradients nn.MultiheadAttention and nn.TransformerEncoder have a fast path that does without
    the function. PyTorch does not take it in a block, but in compiled code it does, unless
    torch.backends.mha.set_fastpath_enabled(False) forbids it. torch.ops.aten.scaled_dot_product_attention is not
    replaced.
    """
    _dispatch.check_bools("replace_sdpa", strict=strict)
    block = _Block(strict)
    _attribute.replace()
    try:
        with block:
            _thread.blocks.append(block)
            try:
                yield block.record
            finally:
                _thread.blocks.pop()
    finally:
        _attribute.restore()
