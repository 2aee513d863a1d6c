# SPDX-License-Identifier: Apache-2.0
"""Counters to which operations add what they have done, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._handle import Handle

    Given = tuple[Any, ...]


class Counters(NamedTuple):
    """int64 tensors on the group's device, to which operations add; None: not counted.

    They may serve many calls, and live as long as CUDA graphs that replay these. ep.h (EpExtras) has
    the exact words.
    """

    expert_tokens: Optional[Tensor] = None
    """[L] rows for each local expert, without lost ones; int32 serves, too. dispatch alone."""

    peer_rows: Optional[Tensor] = None
    """[R] rows sent to each rank; this rank's own place: rows that stay."""

    peer_bytes: Optional[Tensor] = None
    """[R] their bytes as they travel, with scales and weights."""

    peer_wait_ns: Optional[Tensor] = None
    """[R] nanoseconds waited for each rank."""

    peer_longest_wait_ns: Optional[Tensor] = None
    """[R] the longest wait of one operation."""

    @staticmethod
    def zeros(handle: Handle) -> Counters:
        """All of them, for dispatch; combine takes `without_experts`."""
        group = handle.group
        sizes = (group.num_local_experts, *(4 * (group.size,)))
        made = [torch.zeros(size, dtype=torch.int64, device=group.device) for size in sizes]
        return Counters(*made)

    @property
    def without_experts(self) -> Counters:
        """What operations other than dispatch take."""
        return self._replace(expert_tokens=None)

    @property
    def of_waits(self) -> Counters:
        """What prepare takes."""
        return Counters(None, None, None, *self[3:])

    @property
    def of_receiving(self) -> Counters:
        """What the receive phase of a dispatch takes."""
        return self._replace(peer_rows=None, peer_bytes=None)


class Blocks(NamedTuple):
    """Words of blocks of receive rows, so that other kernels work while an operation runs.

    ep.h (EpExtras) says how rows are cut into blocks, and docs/overlap.md shows the kernels. Set the
    words to 0, on the stream of the operation, before it and before the other kernel. On a CPU words
    of a dispatch are full when it returns.
    """

    words: Tensor
    """[words] int32 on the group's device, at least one for each block."""

    block_rows: int
    """Rows of a block. In the expert-major layout it divides the alignment."""

    expected: int = 0
    """Of a combine: it reads a block's rows once its word is at least this. 0 for a dispatch."""


def as_given(counters: Optional[Counters], blocks: Optional[Blocks] = None) -> Given:
    """The last arguments of an operation; none without counters and blocks."""
    if blocks is not None:
        return (*(counters or Counters()), *blocks)
    if counters is not None:
        for each in counters:
            if each is not None:
                return counters
    return ()
