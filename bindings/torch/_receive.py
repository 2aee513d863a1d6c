# SPDX-License-Identifier: Apache-2.0
"""Memory that peers reach, as torch tensors."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from typing import Optional, Sequence

    from torch import Tensor

    from ._group import Group


class _Memory:
    """What the storage of a tensor on a GPU keeps alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _make_whole(address: int, size: int, device: torch.device) -> Tensor:
    """All of the memory, as bytes. Not an inference tensor, which would have no version counter."""
    with torch.inference_mode(False):
        if device.type == "cpu":
            owner = (ctypes.c_uint8 * size).from_address(address)
            return torch.frombuffer(owner, dtype=torch.uint8)
        return torch.as_tensor(_Memory(address, size), device=device)


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple. TypeError for what is none, EpError RANGE for negative lengths."""
    try:
        lengths = tuple(operator.index(length) for length in shape)
    except TypeError:
        raise TypeError(f"shape: expected a sequence of ints, got {shape!r}") from None
    if any(length < 0 for length in lengths):
        raise EpError(Status.RANGE, f"shape: expected lengths of 0 or more, got {lengths}")
    return lengths


class ReceiveMemory:
    """Memory that the peers of a group reach, for tensors that dispatch fills. Collective to make.

    group  a libep.torch.Group
    bytes  >= 1; may differ between ranks

    On GPUs peers write rows straight to their slots in it, without staging, and expert outputs in
    it are read in place. On CPUs it is plain memory.

    The memory is the group's. Tensors in it keep it from going: free() and Group.close() raise
    EpError ORDER while one is alive, one that autograd has saved included.
    """

    def __init__(self, group: Group, bytes: int) -> None:
        if isinstance(bytes, bool) or not isinstance(bytes, int):
            raise TypeError(f"bytes: expected an int, got {bytes!r}")
        if bytes < 1:
            raise EpError(Status.RANGE, f"bytes: expected at least 1, got {bytes}")
        self.group = group
        self.bytes = bytes
        self._address: Optional[int] = group.mem_alloc(bytes)
        self._whole = _make_whole(self._address, bytes, group.device)
        self._unused = self._count_uses()
        group.receive_memory.append(self)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Make a tensor over a part of the memory. Its contents are what the memory has.

        shape, dtype  of the tensor
        offset        in bytes, from the start; a multiple of 16. Tensors may overlap.

        Autograd notices where a tensor that it has saved was overwritten through another one.
        """
        if self._address is None or self.group.pointer is None:
            raise EpError(Status.DESTROYED, f"rank {self.group.rank}: the receive memory was freed")
        lengths = _lengths(shape)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
        size = dtype.itemsize * math.prod(lengths)
        if offset % 16 or offset < 0 or offset + size > self.bytes:
            raise EpError(
                Status.RANGE,
                f"rank {self.group.rank}: receive memory: expected a tensor within {self.bytes} "
                f"bytes, at a multiple of 16, got {size} bytes at {offset}",
            )
        # All tensors share the version counter of the whole. detach: an operation in place that has
        # a gradient gives this tensor a history, and the whole none.
        with torch.inference_mode(False):
            return self._whole[offset : offset + size].view(dtype).view(lengths).detach()

    def _count_uses(self) -> tuple[int, int]:
        """The references to the storage: of tensors, and of programs that hold it itself."""
        storage = self._whole.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)

    def is_used(self) -> bool:
        """Whether a tensor lies in the memory."""
        return self._count_uses() != self._unused

    def free(self) -> None:
        """Free the memory, after the operations that use it. Collective. Twice does nothing."""
        if self._address is None or self.group.pointer is None:
            return
        if self.is_used():
            raise EpError(
                Status.ORDER,
                f"rank {self.group.rank}: free: expected no tensor in the receive memory, got one: "
                "drop it first",
            )
        address, self._address = self._address, None
        self.group.receive_memory.remove(self)
        self.group.mem_free(address)
