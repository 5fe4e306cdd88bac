# Types of heed's arguments and results: for type checkers, and for who asks for a signature.
"""Types of heed's arguments and results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from numpy.typing import NDArray

from heed._core import Pattern


class SupportsDLPack(Protocol):
    """NumPy arrays, PyTorch tensors, JAX arrays."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsBuffer(Protocol):
    """What memoryview accepts."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


Array: TypeAlias = SupportsDLPack | SupportsBuffer
Ints: TypeAlias = Array | Sequence[int]
Positions: TypeAlias = Ints | Sequence[Sequence[int]]
Floats: TypeAlias = Array | Sequence[float]
Align: TypeAlias = Literal["bottom_right", "top_left"] | Ints
Segments: TypeAlias = Array | Sequence[Sequence[int]] | tuple[Array, Array]
Part: TypeAlias = tuple[Array, Array] | list[NDArray[Any]]
FloatName: TypeAlias = Literal["f64", "f32", "bf16", "f16"]
Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
OutArray: TypeAlias = Any  # returned as it is
Result: TypeAlias = NDArray[Any]
State: TypeAlias = Array | tuple[Array, Array] | tuple[Array, Array, Array | None]  # S, (S, z), (S, z, m) or (tail, S)
StateResult: TypeAlias = Any  # the same, NumPy arrays


class _CacheRotary(TypedDict, total=False):
    base: float
    dim: int | None
    scaling: dict[str, Any] | None


class CacheRotary(_CacheRotary):
    """The keywords of heed.rotary that a cache takes."""

    interleaved: bool


class WeightsOptions(TypedDict, total=False):
    """The keywords of heed.attention that attention_weights and attention_map take."""

    scale: float | None
    causal: bool
    align: Align
    window: tuple[int, int] | None
    sink_tokens: int
    prefix: Ints | None
    chunk: int | None
    segments: Segments | None
    key_lengths: Ints | None
    key_starts: Ints | None
    query_lengths: Ints | None
    mask: Array | None
    bias: Array | None
    alibi: Floats | None
    softcap: float | None
    sinks: Floats | None
    log_decay: Array | None
    pattern: Pattern | None
    dropout: float
    seed: int | None
    dropout_offset: int
    precision: Literal["highest", "high"]
    invariant: bool
    threads: int | None


class BackwardOptions(WeightsOptions, total=False):
    """The keywords of heed.attention that attention_backward takes."""

    cu_seqlens_q: Ints | None
    cu_seqlens_k: Ints | None


class AttentionOptions(BackwardOptions, total=False):
    """The keywords of heed.attention, but return_lse."""

    out: OutArray | None


class LatentAttendOptions(TypedDict, total=False):
    """The keywords of heed.attention that a cache's attend takes, but scale and return_lse."""

    window: tuple[int, int] | None
    sink_tokens: int
    prefix: Ints | None
    chunk: int | None
    segments: Segments | None
    key_starts: Ints | None
    mask: Array | None
    bias: Array | None
    alibi: Floats | None
    softcap: float | None
    sinks: Floats | None
    pattern: Pattern | None
    precision: Literal["highest", "high"]
    invariant: bool
    out: OutArray | None
    threads: int | None


class AttendOptions(LatentAttendOptions, total=False):
    """The same with a scale."""

    scale: float | None
