# Types of heed's arguments and results: for type checkers and signatures.
"""Types of heed's arguments and results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from numpy.typing import NDArray

from heed._core import Pattern  # noqa: F401


class SupportsDLPack(Protocol):
    """NumPy arrays, PyTorch tensors, JAX arrays."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsBuffer(Protocol):
    """Objects that memoryview accepts."""

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
StateResult: TypeAlias = Any  # a state's type in a result: NumPy arrays


class _CacheRotary(TypedDict, total=False):
    base: float
    dim: int | None
    scaling: dict[str, Any] | None


class CacheRotary(_CacheRotary):
    """The keywords of heed.rotary that a cache takes."""

    interleaved: bool
