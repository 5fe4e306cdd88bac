# Finds the models that call Transformers' attention interface, and the masks that their own code understands.
"""Families of Transformers models, told apart by the source of their modeling files."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.M)
_INTERFACE = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b")
_BY_NAME = re.compile(r"_CLASSES\[[\w.]*_attn_implementation\]")


def kind(source: str) -> str:
    """The attention layers of a modeling file: they call the "interface", "own" code, both ("mixed"), or are "none"."""
    if _BY_NAME.search(source):  # a table of classes, in which no registered name is
        return "mixed" if _INTERFACE.search(source) else "own"
    if not _ATTENTION.search(source):
        return "none"
    return "interface" if _INTERFACE.search(source) else "own"


@functools.cache
def _source(module: str) -> str | None:
    """The text of a module, None where there is none to read."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None


@functools.cache
def _kind_of_module(name: str) -> str:
    return kind(_source(name) or "")


def calls_interface(model: type) -> bool:
    """Returns whether attention layers of a model class, or of its base class, call the attention interface."""
    for base in model.__mro__:
        if issubclass(base, PreTrainedModel) and (found := _kind_of_module(base.__module__)) != "none":
            return found == "interface"
    return True  # no attention layers of its own: those of the models inside it count


_mask_kinds: dict[type, str] = {}  # by class of configuration, of every model made since `watch`


def mask_dtype(config: Any, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of masks for models of a configuration; None if they never call the attention interface.

    bool is what models understand that support PyTorch's attention; the others were only ever given 0 and finfo.min.
    """
    kind = _mask_kinds.get(type(config), "bool")
    return torch.bool if kind == "bool" else dtype if kind == "float" else None


@functools.cache
def _warn(family: str, why: str) -> None:
    warnings.warn(f'heed.transformers: "{family}" {why}', stacklevel=3)


def _family(model: PreTrainedModel) -> str:
    return type(model).__module__.rpartition("modeling_")[2]


@functools.cache
def _asks(module: str) -> bool:
    """Returns whether a layer of a Python module may call the attention interface; True if its text cannot be read."""
    source = _source(module)
    return source is None or _INTERFACE.search(source) is not None


def _warn_if_nothing_asks(model: PreTrainedModel) -> None:
    """Transformers accepts any implementation for models without attention: nothing of Mamba-2 would run on heed."""
    if not any(_asks(name) for name in {type(layer).__module__ for layer in model.modules()}):
        _warn(_family(model), "has no layer that asks Transformers for attention, so nothing of it runs on heed")


def _note_kind(config: type, kind: str) -> None:
    if kind != "bool" or _mask_kinds.get(config) != "float":
        _mask_kinds[config] = kind


def _registered(kind: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """The configuration that `make` makes, after registering "heed" in this process, which may only unpickle."""
    from heed.transformers import register

    if "heed" not in AttentionInterface():
        register()
    config = make(*arguments)
    _note_kind(type(config), kind)
    return config


def watch() -> None:
    """Makes models of which heed runs nothing warn, once a family: models that never call the interface and take
    Transformers' default instead of "heed", and models without attention. A configuration with "heed" then registers it
    wherever it is unpickled."""
    original, built = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init
    if hasattr(original, "heed"):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, is_init_check: bool = False, **kwargs: Any
    ) -> str:
        kind = "own" if not calls_interface(type(self)) else "bool" if self._supports_sdpa else "float"
        _note_kind(type(self.config), kind)
        if requested_attention == "heed" and kind == "own":
            _warn(_family(self), "has attention that does not call Transformers' attention interface, "
                  "so heed cannot run it; its own code does")
            requested_attention = None
        elif requested_attention == "heed" and not is_init_check:  # else there are no layers yet
            _warn_if_nothing_asks(self)
        return original(self, requested_attention, is_init_check, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, arguments, *rest = object.__reduce_ex__(self, protocol)
        if getattr(self, "_attn_implementation_internal", None) == "heed":
            make, arguments = _registered, (_mask_kinds.get(type(self), "bool"), make, *arguments)
        return make, arguments, *rest

    @functools.wraps(built)
    def post_init(self: Any) -> None:
        built(self)
        if self.config._attn_implementation == "heed":
            _warn_if_nothing_asks(self)

    get_correct_attn_implementation.heed = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
    PreTrainedConfig.__reduce_ex__ = __reduce_ex__  # type: ignore[method-assign]
