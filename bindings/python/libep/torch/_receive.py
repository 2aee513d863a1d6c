# SPDX-License-Identifier: Apache-2.0
"""Memory that peers reach, as torch tensors."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

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
        self.group = group
        self.bytes = bytes
        self._address: Optional[int] = group.mem_alloc(bytes)
        self._owner: Optional[weakref.ref[Any]] = None
        group.receive_memory.append(self)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Make a tensor over a part of the memory. Its contents are what the memory has.

        shape, dtype  of the tensor
        offset        in bytes, from the start; a multiple of 16. Tensors may overlap.
        """
        if self._address is None or self.group.pointer is None:
            raise EpError(Status.DESTROYED, f"rank {self.group.rank}: the receive memory was freed")
        size = dtype.itemsize
        for length in shape:
            size *= length
        if offset % 16 or offset < 0 or offset + size > self.bytes:
            raise EpError(
                Status.RANGE,
                f"rank {self.group.rank}: receive memory: expected a tensor within {self.bytes} "
                f"bytes, at a multiple of 16, got {size} bytes at {offset}",
            )
        return self._whole()[offset : offset + size].view(dtype).view(tuple(shape))

    def _whole(self) -> Tensor:
        owner = None if self._owner is None else self._owner()
        assert self._address is not None
        if self.group.device.type == "cpu":
            if owner is None:
                owner = (ctypes.c_uint8 * self.bytes).from_address(self._address)
            whole = torch.frombuffer(owner, dtype=torch.uint8)
        else:
            if owner is None:
                owner = _Memory(self._address, self.bytes)
            whole = torch.as_tensor(owner, device=self.group.device)
        self._owner = weakref.ref(owner)
        return whole

    def is_used(self) -> bool:
        """Whether a tensor lies in the memory."""
        return self._owner is not None and self._owner() is not None

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
