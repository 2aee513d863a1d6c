# SPDX-License-Identifier: Apache-2.0
"""Where received rows and expert outputs lie: memory that peers reach, cut for each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor

from ..torch import ReceiveMemory

if TYPE_CHECKING:
    from ..torch import Group

    Kind = tuple[torch.dtype, int]
    """The type of a row's elements, and their number."""


class Received(NamedTuple):
    """What a dispatch fills."""

    rows: Tensor
    """[R, N, ...]"""
    ids: Tensor
    """[R, N, K] int32"""
    weights: Optional[Tensor]
    """[R, N, K] float32"""
    scales: Optional[Tensor]
    """[R, N, S]"""
    flat: tuple[Optional[Tensor], ...]
    """The four of them, as [R * N, ...]."""


class Memory:
    """The tensors of a group's steps. Collective to make.

    Tensors of a step are views of memory for the largest step, so all steps share it. They are made
    once for each form of step.

    group        whose peers reach the memory
    max_tokens   of a rank in a step
    row_bytes    of the largest rows, of dispatch and of combine
    scale_bytes  of the largest scales of a row
    """

    def __init__(
        self, group: Group, max_tokens: int, top_k: int, row_bytes: int, scale_bytes: int
    ) -> None:
        self._size, self._top_k = group.size, top_k
        rows = group.size * max_tokens
        self._rows = ReceiveMemory(group, rows * row_bytes)
        self._outputs = ReceiveMemory(group, rows * row_bytes)
        with torch.inference_mode(False):
            new = torch.empty((2, rows * top_k), dtype=torch.int32, device=group.device)
            self._ids, self._weights = new[0], new[1].view(torch.float32)
            self._scales = new.new_empty((rows * scale_bytes,), dtype=torch.uint8)
        self._received: dict[tuple[int, Kind, Optional[Kind], bool], Received] = {}
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def received(self, bound: int, row: Kind, scale: Optional[Kind], has_weights: bool) -> Received:
        """The tensors of a step of `bound` tokens per rank."""
        key = bound, row, scale, has_weights
        found = self._received.get(key)
        if found is None:
            found = self._received[key] = self._cut(*key)
        return found

    def _cut(self, bound: int, row: Kind, scale: Optional[Kind], has_weights: bool) -> Received:
        lead = (self._size, bound)
        count = self._size * bound * self._top_k
        scales = None
        if scale is not None:
            dtype, width = scale
            size = self._size * bound * width * dtype.itemsize
            scales = self._scales[:size].view(dtype).view(*lead, width)
        rows = self._rows.tensor((*lead, row[1]), row[0])
        ids = self._ids[:count].view(*lead, self._top_k)
        weights = self._weights[:count].view(*lead, self._top_k) if has_weights else None
        flat = [
            None if part is None else part.flatten(0, 1) for part in (rows, ids, weights, scales)
        ]
        return Received(rows, ids, weights, scales, tuple(flat))

    def output(self, bound: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """[R * bound, hidden]: for the experts' outputs of a step, read in place by combine."""
        key = bound, hidden, dtype
        found = self._buffers.get(key)
        if found is None:
            rows = self._outputs.tensor((self._size * bound, hidden), dtype)
            found = self._buffers[key] = rows
        return found
