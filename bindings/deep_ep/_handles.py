# SPDX-License-Identifier: Apache-2.0
"""Handles that a dispatch returns: tuples like DeepEP's, whose tensors are computed when read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .._library import OfProcess
from ..torch._group import current_stream
from ._streams import keep

if TYPE_CHECKING:
    from typing import Callable, Iterator, Optional, Union

    from torch import Tensor

    from ..torch import Handle
    from ._groups import LatencyGroup, NormalGroup, Token


class _Fields(OfProcess, tuple[Any, ...]):
    """A tuple whose fields are computed when they are first read.

    Handles that C makes leave __new__ to tuple: then no function of Python runs for it.
    """

    _readers: tuple[Callable[[Any], Any], ...] = ()

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        return self._read(range(len(self))[at])

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} of a dispatch>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _read(self, at: int) -> Any:
        return self._readers[at](self)


def _item(at: int) -> property:
    return property(lambda handle: tuple.__getitem__(handle, at))


class NormalHandle(_Fields):
    """What dispatch returns for combine and for a dispatch with the same routing.

    Its fields are DeepEP's, of a machine of one node: rank_prefix_matrix, channel_prefix_matrix,
    recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank, send_head.
    """

    @classmethod
    def make(
        cls,
        group: NormalGroup,
        layer: Handle,
        plan: Tensor,
        source_rows: Union[Tensor, list[int]],
        num_recv_tokens: int,
        num_tokens: int,
        is_token_in_rank: Optional[Tensor],
    ) -> NormalHandle:
        """source_rows: [R] the rows of each source rank, on the group's device or a list."""
        kept = group.token(layer), source_rows, is_token_in_rank
        items = layer.facts_at, plan, kept, num_recv_tokens, num_tokens, layer.stream()
        made: NormalHandle = cls(items)
        return made

    # The items of the tuple, as normal.c makes and reads them.
    plan: Tensor = _item(1)  # type: ignore[assignment]
    num_recv_tokens: int = _item(3)  # type: ignore[assignment]
    num_tokens: int = _item(4)  # type: ignore[assignment]
    stream: int = _item(5)  # type: ignore[assignment]
    """On which the plan was made."""

    _kept: tuple[Token, Any, Optional[Tensor]] = _item(2)  # type: ignore[assignment]

    @property
    def layer(self) -> Handle:
        """The handle of libep."""
        layer = self._kept[0].layer
        assert layer is not None
        return layer

    @property
    def is_token_in_rank(self) -> Optional[Tensor]:
        """As the dispatch got it."""
        return self._kept[2]

    @functools.cached_property
    def rank_prefix_matrix(self) -> Tensor:
        """[R, R] int32: in this rank's column, the rows that the ranks up to each one have sent to
        it. Other columns are other ranks', which they alone know: -1."""
        group = self.layer.group
        rows = self._kept[1]
        if isinstance(rows, bytes):  # Plan.numbers, whose last part they are
            rows = [*memoryview(rows).cast("i")][-group.size :]
        if isinstance(rows, torch.Tensor):
            keep(rows, self.stream)
        else:
            rows = torch.tensor(rows, dtype=torch.int32, device=self.plan.device)
        matrix: Tensor = rows.new_full((group.size, group.size), -1)
        matrix[:, group.rank] = rows.cumsum(0)
        return matrix

    @functools.cached_property
    def recv_src_idx(self) -> Tensor:
        """[rows] int32: each row's token on its rank; -1 for rows past the last one."""
        return self.layer.read_sources(self.plan, self.num_recv_tokens)[1]

    _readers = (
        lambda self: self.rank_prefix_matrix,
        lambda self: None,  # libep has no channels
        lambda self: None,
        lambda self: self.recv_src_idx,
        lambda self: self.is_token_in_rank,
        lambda self: None,
    )


class LatencyHandle(_Fields):
    """What low_latency_dispatch returns for low_latency_combine.

    Its fields are DeepEP's: src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden,
    num_experts.
    """

    def __new__(cls, *_: object) -> LatencyHandle:
        return super().__new__(cls, cls._readers)

    def __init__(self, plan: Tensor, group: LatencyGroup, num_tokens: int) -> None:
        self.plan = plan
        self.group = group
        self.num_tokens = num_tokens
        self.stream = current_stream(group.group.ordinal)
        """On which the plan was made."""

    @functools.cached_property
    def _sources(self) -> tuple[Tensor, Tensor]:
        shape = self.group.key.experts_per_rank, self.group.rows_per_expert
        ranks, tokens = self.group.read_sources(self.plan)
        return ranks.view(shape), tokens.view(shape)

    @property
    def src_info(self) -> Tensor:
        """[L, R * N] int32: each row's token on its rank; -1 for rows past the last one."""
        return self._sources[1]

    @functools.cached_property
    def layout_range(self) -> Tensor:
        """[L, R] int64: of each expert and source rank, its first row << 32 | its rows."""
        ranks = self._sources[0]
        size = self.group.group.size
        counts = torch.stack([(ranks == rank).sum(1) for rank in range(size)], 1)
        return (counts.cumsum(1) - counts) << 32 | counts

    _readers = (
        lambda self: self.src_info,
        lambda self: self.layout_range,
        lambda self: self.group.key.max_tokens,
        lambda self: self.group.key.hidden,
        lambda self: self.group.key.experts_per_rank * self.group.group.size,
    )
