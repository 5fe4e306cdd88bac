# The mask function of "heed": masks hold their structure, and become dense only when their elements are read.
"""The mask function that heed.transformers registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import masking_utils as hf
from transformers.utils.import_utils import is_tracing

from heed.transformers import _families, _structure
from heed.transformers._structure import Call, Structure

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class _Content:
    """The content that a mask and its aliases share."""

    __slots__ = ("call", "structure", "tensor")

    def __init__(self, call: Call | None, structure: Structure | None, tensor: Tensor | None = None) -> None:
        self.call, self.structure, self.tensor = call, structure, tensor


class StructuredMask(Tensor):
    """An attention mask [B, 1, Tq, Tk] that is not in memory: it knows the equal options of heed's attention.

    bool, True to attend; or floating point, 0 to attend, for models that know no other. Any operation of PyTorch finds
    the tensor that Transformers itself would have made.
    """

    __slots__ = ("_content",)
    __torch_function__ = torch._C._disabled_torch_function_impl  # as PyTorch documents it for tensors like this
    _content: _Content

    @staticmethod
    def __new__(cls, content: _Content, shape: Any, dtype: torch.dtype, device: Any = "cpu") -> StructuredMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask._content = content
        return mask

    @property
    def structure(self) -> Structure | None:
        """The structure that the mask represents; None once it has been written to."""
        return self._content.structure

    @property
    def dense(self) -> Tensor:
        """The mask in memory."""
        content = self._content
        if content.tensor is None:
            content.tensor = make_dense(content.call, self.dtype)
        return content.tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            mask = args[0]
            return cls(mask._content, mask.shape, mask.dtype)
        written = func._schema.is_mutable

        def in_memory(x: Any) -> Any:
            if isinstance(x, StructuredMask):
                dense = x.dense
                if written:
                    x._content.structure = None
                return dense
            return x

        args, kwargs = pytree.tree_map(in_memory, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"StructuredMask({list(self.shape)}, {self.dtype}, {self.structure})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["dense"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> StructuredMask:
        dense = inner["dense"]
        return cls(_Content(None, None, dense), dense.shape, dense.dtype, dense.device)


def _on_dense(name: str) -> Callable:
    def method(self: StructuredMask, *args: Any, **options: Any) -> Any:
        return getattr(self.dense, name)(*args, **options)

    return method


for _name in ("numpy", "tolist", "data_ptr", "__array__", "__deepcopy__", "__reduce_ex__"):
    setattr(StructuredMask, _name, _on_dense(_name))  # these read memory without an operation


def make_dense(call: Call, dtype: torch.dtype) -> Tensor:
    """The mask that Transformers makes for "sdpa" (bool), or for "eager" (floating point)."""
    make, options = (hf.sdpa_mask, {}) if dtype is torch.bool else (hf.eager_mask, {"dtype": dtype})
    return make(
        batch_size=call.batch, q_length=call.rows, kv_length=call.keys, q_offset=call.q_offset, kv_offset=call.k_offset,
        mask_function=call.function, attention_mask=call.padding, allow_is_causal_skip=False, **options,
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask of one forward pass, as transformers.masking_utils calls for it.

    None where no key is masked and the caller allows it; a StructuredMask where the mask function is known; else, and
    under tracing, what Transformers makes for "sdpa" or, for models that cannot take that, for "eager".
    """
    wanted = _families.mask_dtype(config, dtype)
    # Attention layers of a decoder that was made bidirectional say that they are causal, which None would mean to them.
    skips = allow_is_bidirectional_skip and getattr(config, "is_causal", True)
    if (
        wanted is not None
        and not is_tracing(attention_mask)
        and torch.device(device).type == "cpu"
        and (attention_mask is None or (len(attention_mask) == batch_size and attention_mask.dtype is torch.bool))
        and q_length and kv_length
    ):
        call = Call(batch_size, q_length, kv_length, int(q_offset), kv_offset, mask_function, attention_mask)
        structure = _structure.structure(call)
        if structure is not None:
            if _structure.masks_nothing(structure):
                if skips or (allow_is_causal_skip and q_length == 1 and wanted is torch.bool):
                    return None
                if allow_is_bidirectional_skip:
                    structure = _structure.NO_MASK
            return StructuredMask(_Content(call, structure), (batch_size, 1, q_length, kv_length), wanted)
        allow_is_causal_skip = False
    return (hf.sdpa_mask if wanted is torch.bool else hf.eager_mask)(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=skips, dtype=dtype, device=device, **options,
    )
