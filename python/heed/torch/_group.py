# The processes among which a sequence is divided: what they must agree on, and what they send each other.
"""A group of processes, each of which holds the tokens of one part of a sequence, in the order of ranks."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from heed import InvalidArgument, Unsupported


# The name since PyTorch 2.13, or before.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def as_bytes(x: Tensor) -> Tensor:
    """The elements of x, in order. A contiguous tensor of one element may have any stride, but not as bytes."""
    return x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


class Group:
    """A ProcessGroup, or a DeviceMesh of one dimension. Tensors are sent as bytes, so that any dtype can be."""

    def __init__(self, operation: str, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(f"{operation}: group is given, expected None: torch.distributed is not initialised")
        if isinstance(group, dist.device_mesh.DeviceMesh):
            if group.ndim != 1:
                raise InvalidArgument(f"{operation}: group is a DeviceMesh of {group.ndim} dimensions, expected 1")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(f"{operation}: group is of type {type(group).__name__}, expected a ProcessGroup or a "
                                  "DeviceMesh")
        self.operation, self.group = operation, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: the tensors of all ranks, which have the same shape and dtype."""
        sent = as_bytes(x)
        result = sent.new_empty(self.size * sent.numel())
        if sent.numel():
            _all_gather(result, sent, group=self.group)
        return result.view(x.dtype).view(self.size, *x.shape)

    def gather_rows(self, x: Tensor, dim: int, counts: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, which have `counts` rows."""
        rows = x.detach().movedim(dim, 0)
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        return [part[:count].movedim(0, dim) for part, count in zip(self.gather(padded), counts)]

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends a part to each rank, and returns what each rank sends here, of these shapes."""
        sent = [as_bytes(part) for part in parts]
        size = parts[0].element_size()
        counts = [torch.Size(shape).numel() * size for shape in shapes]
        result = sent[0].new_empty(sum(counts))
        dist.all_to_all_single(result, torch.cat(sent), counts, [x.numel() for x in sent], group=self.group)
        return [x.view(parts[0].dtype).view(*shape) for x, shape in zip(result.split(counts), shapes)]

    def agree(self, numbers: Sequence[int], describe: Callable[[], str]) -> list[list[int]]:
        """The numbers of each rank. Raises InvalidArgument on every rank if the descriptions of their calls
        differ, or if `describe` raises on one of them; nothing else has been sent then."""
        error: Exception | None = None
        text = ""
        if os.environ.get("HEED_DISTRIBUTED_CHECKS") != "0":
            try:
                text = describe()
            except (InvalidArgument, Unsupported, TypeError) as refused:
                error, text = refused, f"refused its arguments: {refused}"
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        headers = self.gather(torch.tensor([digest, error is not None, *numbers], dtype=torch.int64)).tolist()
        if any(header[1] for header in headers) or any(header[0] != headers[0][0] for header in headers):
            texts: list[Any] = [None] * self.size
            dist.all_gather_object(texts, text, group=self.group)
            if error is not None:
                raise error
            other = next((r for r, header in enumerate(headers) if header[1]), None)
            if other is None:
                other = next(r for r in range(self.size) if texts[r] != texts[0])
                raise InvalidArgument(f"{self.operation}: rank {other} calls {texts[other]}, expected the call of rank "
                                      f"0, {texts[0]}")
            raise InvalidArgument(f"{self.operation}: rank {other} {texts[other]}")
        return [header[2:] for header in headers]


class _Started:
    """A message that has begun, as a request of mpi4py."""

    def __init__(self, work: Any) -> None:
        self.Wait = work.wait


class Transport:
    """A group as a communicator of heed._core: the methods of mpi4py's, for buffers of bytes."""

    def __init__(self, group: Group) -> None:
        self._of, self.Get_rank, self.Get_size = group, lambda: group.rank, lambda: group.size

    def _rank(self, rank: int) -> int:
        return dist.get_global_rank(self._of.group, rank)

    def Allgather(self, sent: memoryview, received: memoryview) -> None:
        _all_gather(_bytes_at(received), _bytes_at(sent), group=self._of.group)

    def Send(self, buffer: memoryview, dest: int) -> None:
        dist.send(_bytes_at(buffer), self._rank(dest), self._of.group)

    def Recv(self, buffer: memoryview, source: int) -> None:
        dist.recv(_bytes_at(buffer), self._rank(source), self._of.group)

    def Sendrecv(self, sendbuf: memoryview, dest: int, recvbuf: memoryview, source: int) -> None:
        started = [begin(x, rank) for begin, x, rank in ((self.Irecv, recvbuf, source), (self.Isend, sendbuf, dest))
                   if len(x)]
        for message in started:
            message.Wait()

    def Isend(self, buffer: memoryview, dest: int) -> _Started:
        return _Started(dist.isend(_bytes_at(buffer), self._rank(dest), self._of.group))

    def Irecv(self, buffer: memoryview, source: int) -> _Started:
        return _Started(dist.irecv(_bytes_at(buffer), self._rank(source), self._of.group))

    def Alltoallv(self, sent: Sequence[Any], received: Sequence[Any]) -> None:
        dist.all_to_all_single(_bytes_at(received[0]), _bytes_at(sent[0]), received[1], sent[1], group=self._of.group)

    def Bcast(self, buffer: memoryview, root: int) -> None:
        dist.broadcast(_bytes_at(buffer), self._rank(root), self._of.group)


def _bytes_at(buffer: memoryview) -> Tensor:
    """A tensor of the buffer's memory. torch.frombuffer alone would warn of one that is read only."""
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8)
    address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_uint8 * len(buffer)).from_address(address), dtype=torch.uint8)


def described(names: Sequence[str], values: Sequence[Any], without: Callable[[str, Tensor], int | None]) -> str:
    """A call as ranks compare it: dtypes and shapes of tensors, without the axis that is divided, and other values."""
    parts = []
    for name, x in zip(names, values):
        if isinstance(x, Tensor):
            axis = without(name, x)
            shape = ["T" if i == axis else size for i, size in enumerate(x.shape)]
            value = str(x.tolist()) if x.dim() == 1 and not x.is_floating_point() else ""
            parts.append(f"{name}: {str(x.dtype).removeprefix('torch.')} {shape}{value}{' gradient' * x.requires_grad}")
        elif x is not None:
            parts.append(f"{name}={x!r}")
    return "(" + ", ".join(parts) + ")"
