# heed as an implementation of PyTorch's attention operators, for the registry of torch.nn.attention.
"""The implementations "heed" and "heed-wide" of torch.nn.attention's registry, and heed.torch.provider_stats.

"heed" replaces the CPU kernels of aten::_scaled_dot_product_flash_attention_for_cpu and of its backward, which
PyTorch's scaled_dot_product_attention calls, and gives the backward the derivatives that PyTorch's lacks. "heed-wide"
also replaces aten::scaled_dot_product_attention itself, for the calls that PyTorch would compute by its math path,
without these operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _C

from heed import InvalidArgument, Unsupported, _core
from heed.torch._operators import OPTIONS, _DIFFERENTIABLE
from heed.torch._sdpa import scaled_dot_product_attention

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"
_DIFFERENTIABLE_BACKWARD = f"{_BACKWARD} under autograd"
_SDPA = "scaled_dot_product_attention"

_CPU = _C.DispatchKeySet(_C.DispatchKey.CPU)
_LSE_DTYPE = {x: torch.float64 if x is torch.float64 else torch.float32
              for x in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
_UP_TO_BIAS = (None,) * (OPTIONS.index("bias") - OPTIONS.index("align") - 1)
_NO_GRADIENTS = (None,) * len(_DIFFERENTIABLE)
_OF_Q_K_V = [True] * 3 + [False] * len(_DIFFERENTIABLE)
_MOST_REASONS = 100

_attention, _attention_backward = _core._torch_attention, _core._torch_attention_backward
_empty_like, _is_profiling = torch.empty_like, _C._autograd._profiler_enabled
_flash_is_enabled, _is_grad_enabled = _C._get_flash_sdp_enabled, _C.is_grad_enabled
_any_requires_grad = _C._any_requires_grad
_DECLINES = (ValueError, KeyError, Unsupported)  # heed.InvalidArgument is a ValueError


def _empty_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


# Inductor's allocator takes a third of the time of torch.empty_strided.
_empty_strided = getattr(getattr(_C._dynamo, "guards", None), "_empty_strided_cpu", _empty_strided)


class _Stats:
    """Counts of calls since the last activation."""

    def __init__(self) -> None:
        self.forward = self.backward = self.widened = 0
        self.declined: dict[str, int] = {}

    def decline(self, reason: str) -> None:
        if reason not in self.declined and len(self.declined) >= _MOST_REASONS:
            reason = "other reasons"
        self.declined[reason] = self.declined.get(reason, 0) + 1


_stats = _Stats()
_replaced: dict[str, Any] = {}  # the kernels that heed's are in place of


def _pass_on(name: str, error: Exception, first: Tensor, *arguments: Any, **options: Any) -> Any:
    """Calls the kernel that heed's is in place of, and counts the reason. `first` is query, or the gradient of o."""
    if first.dim() != 4:
        error = InvalidArgument(f"attention: query has {first.dim()} axes, expected 4")
    elif type(error) is KeyError:
        error = InvalidArgument(f"attention: query has dtype {error}, expected a float dtype of 64, 32 or 16 bits")
    _stats.decline(str(error))
    try:
        return _replaced[name].call_boxed(_CPU, first, *arguments, **options)
    except RuntimeError as failure:
        if "invalidated" not in str(failure):
            raise
        raise Unsupported(f"{error}; aten::{name} had another library's kernel when heed's was activated, which is "
                          "gone: expected torch.nn.attention.restore_flash_attention_impl() before that") from None


def _options(dropout_p: float, is_causal: bool, attn_mask: Tensor | None, scale: float | None) -> tuple[Any, ...]:
    """Arguments of heed's kernels after the tensors."""
    if attn_mask is None and dropout_p == 0:
        return (True, scale, True, "top_left") if is_causal else (True, scale)
    if dropout_p != 0:
        raise InvalidArgument(f"attention: dropout_p is {dropout_p}, expected 0")
    if attn_mask.dtype is torch.bool or attn_mask.dim() not in (2, 4):
        raise InvalidArgument(f"attention: attn_mask is {attn_mask.dtype} with {attn_mask.dim()} axes, "
                              "expected a float mask with 2 or 4")
    return (True, scale, is_causal, "top_left", *_UP_TO_BIAS, attn_mask)


def _named(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel in a range of the profiler, inside the range of PyTorch's operator."""

    def run(*arguments: Any) -> None:
        with _C._profiler._RecordFunctionFast(name):
            kernel(*arguments)

    return run


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    try:
        batch, heads, rows, width = query.shape
        dtype = query.dtype
        if query.is_contiguous():  # empty_like(query) at half the time
            step = rows * width
            o = _empty_strided((batch, heads, rows, width), (heads * step, step, width, 1), dtype)
        else:
            o = _empty_like(query)
        lse = _empty_strided((batch, heads, rows), (heads * rows, 1, heads), _LSE_DTYPE[dtype])
        if attn_mask is not None or is_causal or dropout_p or _is_profiling():
            options = _options(dropout_p, is_causal, attn_mask, scale)
            kernel = _named("heed::attention", _attention) if _is_profiling() else _attention
            kernel(query, key, value, o, lse, *options)
            if attn_mask is not None:
                lse.masked_fill_(lse == -torch.inf, 0)  # as PyTorch's kernel has it for a row without keys
        else:
            _attention(query, key, value, o, lse, True, scale)
    except _DECLINES as error:
        return _pass_on(_FORWARD, error, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    _stats.forward += 1
    return o, lse


def _new_gradient(x: Tensor) -> Tensor:
    """[B, H, T, D] in the memory of [B, T, H, D]: the layout of PyTorch's gradients."""
    batch, heads, rows, width = x.shape
    step = heads * width
    return _empty_strided((batch, heads, rows, width), (rows * step, width, step, 1), x.dtype)


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    try:
        dq, dk, dv = _new_gradient(query), _new_gradient(key), _new_gradient(value)
        options = _options(dropout_p, is_causal, attn_mask, scale)
        kernel = _named("heed::attention_backward", _attention_backward) if _is_profiling() else _attention_backward
        kernel(grad_out, None, query, key, value, out, logsumexp, dq, dk, dv, *_NO_GRADIENTS, *options)
    except _DECLINES as error:
        return _pass_on(_BACKWARD, error, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                        attn_mask=attn_mask, scale=scale)
    _stats.backward += 1
    return dq, dk, dv


def _differentiable_backward(keyset: Any, *arguments: Any, **options: Any) -> Any:
    """The backward operator above autograd: heed's own, which has derivatives, where these may be asked for."""
    if arguments[0] is None:  # nothing arrived at o
        return None, None, None
    if _is_grad_enabled() and _any_requires_grad(*arguments):
        grad_out, *tensors, dropout_p, is_causal = arguments
        try:
            rest = _options(dropout_p, is_causal, options.get("attn_mask"), options.get("scale"))
            found = torch.ops.heed.attention_backward(grad_out, None, *tensors, _OF_Q_K_V, *rest)
        except _DECLINES as error:
            _stats.decline(str(error))
            return _replaced[_DIFFERENTIABLE_BACKWARD].call_boxed(keyset, *arguments, **options)
        _stats.backward += 1
        return tuple(found)
    after = keyset & _C._after_autograd_keyset
    if after.raw_repr() == _CPU.raw_repr():  # without another dispatch
        return _backward(*arguments, **options)
    with _C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.aten, _BACKWARD).default.redispatch(after, *arguments, **options)


def _is_for_flash(query, key, value, attn_mask, dropout_p, enable_gqa) -> bool:
    """PyTorch's conditions for its flash kernel on the CPU."""
    return (
        dropout_p == 0
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[3] == key.shape[3] == value.shape[3]
        and key.shape[1] == value.shape[1]
        and (query.shape[1] == key.shape[1] or enable_gqa)
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and (attn_mask is None or attn_mask.dim() in (2, 4) and not attn_mask.requires_grad)
    )


def _wide(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """scaled_dot_product_attention on heed where PyTorch would take its math path without being told to."""
    arguments, options = (query, key, value, attn_mask, dropout_p, is_causal), dict(scale=scale, enable_gqa=enable_gqa)
    if _flash_is_enabled() and not _is_for_flash(query, key, value, attn_mask, dropout_p, enable_gqa):
        try:
            o = scaled_dot_product_attention(*arguments, **options)
        except (InvalidArgument, Unsupported, NotImplementedError) as error:
            _stats.decline(str(error))
        else:
            _stats.widened += 1
            return o
    return torch.ops.aten.scaled_dot_product_attention.default.decompose(*arguments, **options)


# --- the registry -----------------------------------------------------------------------------------------------------


def _forget_dispatch() -> None:
    """Empties the caches in which tracers keep which kernel of an operator they found."""
    for name in (_FORWARD, _BACKWARD, _SDPA):
        getattr(getattr(torch.ops.aten, name).default, "_dispatch_cache", {}).clear()


class _Handle:
    """heed's kernels in PyTorch's dispatcher, until they are removed."""

    def __init__(self, wide: bool) -> None:
        global _active, _stats
        if _active is not None:
            _active.remove()
        for name in (_FORWARD, _BACKWARD):
            _replaced[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        _replaced[_DIFFERENTIABLE_BACKWARD] = torch.library.get_kernel(f"aten::{_BACKWARD}", "AutogradCPU")
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden")
            self._library.impl(_FORWARD, _forward, "CPU")
            self._library.impl(_BACKWARD, _backward, "CPU")
            self._library.impl(_BACKWARD, _differentiable_backward, "AutogradCPU", with_keyset=True)
            for key in ("CPU", "AutogradCPU") if wide else ():
                self._library.impl(_SDPA, _wide, key)
        self._tag = _Tag() if wide else None
        _forget_dispatch()
        _active, _stats = self, _Stats()

    def remove(self) -> None:
        global _active
        self._library = None
        if self._tag is not None:
            self._tag.remove()
        _forget_dispatch()
        if _active is self:
            _active = None


class _Tag:
    """A mark on what torch.compile keeps on disk: graphs of "heed-wide" have heed's operators, others must not."""

    def __init__(self) -> None:
        import torch.compiler.config as config

        self._config, self._before = config, config.cache_key_tag
        self._ours = config.cache_key_tag = f"{self._before} heed-wide".strip()

    def remove(self) -> None:
        if self._config.cache_key_tag == self._ours:
            self._config.cache_key_tag = self._before


_active: _Handle | None = None
_registry = torch.nn.attention
_has_registry = hasattr(_registry, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")
if _has_registry:
    _registry.register_flash_attention_impl("heed", register_fn=lambda: _Handle(wide=False))
    _registry.register_flash_attention_impl("heed-wide", register_fn=lambda: _Handle(wide=True))


def provider_stats() -> dict[str, Any]:
    """Returns the numbers of calls that heed took from PyTorch since "heed" or "heed-wide" was last activated.

    A dict: `forward` and `backward`, the numbers of calls of PyTorch's operators that ran on heed; `widened`, the calls
    that ran on heed instead of PyTorch's math path, for "heed-wide" alone; `declined`, a dict with the number of calls
    that heed passed on to PyTorch's kernels, by the reason. After 100 different reasons the rest are "other reasons".
    """
    if not _has_registry:
        raise Unsupported("provider_stats: this PyTorch lacks torch.nn.attention.register_flash_attention_impl or "
                          "torch.library.get_kernel, expected a version that has both")
    return {"forward": _stats.forward, "backward": _stats.backward, "widened": _stats.widened,
            "declined": dict(_stats.declined)}
