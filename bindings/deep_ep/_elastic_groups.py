# SPDX-License-Identifier: Apache-2.0
"""The libep groups and handles behind an ElasticBuffer."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Layout, Overflow, Padding, ScaleOrder, Status, Tail
from .._library import EpError
from ..torch import Handle, create_group
from ._groups import HostNumbers, _backend, _ordinal
from ._keywords import refuse

if TYPE_CHECKING:
    from .._bootstrap import Bootstrap
    from ..torch import Group

_WISH = struct.Struct("=q")  # tokens of a rank
SCALE_BLOCK = 32  # the fewest elements that have 4 bytes of scales


class Key(NamedTuple):
    """What a group is made for, except its number of tokens."""

    experts_per_rank: int
    top_k: int
    row_bytes: int
    scale_bytes: int
    device: torch.device


class Form(NamedTuple):
    """The configuration of a libep handle."""

    do_expand: bool
    alignment: int
    max_recv_rows: int
    """Rows of the receive tensors; 0: exactly as many as come."""

    num_sms: int
    has_zero_padding: bool = False
    is_by_column: bool = False
    """Whether the scales lie in column-major order."""

    can_lose: bool = False
    """Whether rows past max_recv_rows are lost without an error."""


class ElasticGroup:
    """A group with room for `capacity` tokens of each rank."""

    def __init__(self, bootstrap: Bootstrap, key: Key, capacity: int) -> None:
        self.key = key
        self.capacity = capacity
        self.numbers = HostNumbers(key.experts_per_rank, bootstrap.size, key.device)
        self.group: Group = create_group(
            bootstrap,
            num_experts=key.experts_per_rank * bootstrap.size,
            max_tokens=capacity,
            hidden=key.row_bytes,
            dtype=torch.uint8,
            top_k=key.top_k,
            max_scale_bytes=key.scale_bytes,
            backend=_backend(key.device),
            device=_ordinal(key.device),
        )
        self._layers: dict[Form, Handle] = {}

    def layer(self, form: Form) -> Handle:
        """The libep handle of steps of this form."""
        found = self._layers.get(form)
        if found is None:
            found = self._layers[form] = Handle(
                self.group,
                layout=Layout.EXPERT_MAJOR if form.do_expand else Layout.FLAT,
                alignment=form.alignment,
                max_recv_rows=form.max_recv_rows,
                num_sms=form.num_sms,
                zero_tail=Tail.KEEP if form.do_expand else Tail.IDS,
                padding=Padding.ZERO if form.has_zero_padding else Padding.KEEP,
                scale_order=ScaleOrder.BY_COLUMN if form.is_by_column else ScaleOrder.BY_ROW,
                overflow=Overflow.DROP if form.can_lose else Overflow.ERROR,
            )
        return found

    def give_up(self, status: Status, sentence: str) -> None:
        """Abort the group, since its other ranks wait for this one, which cannot go on."""
        self.group.abort(sentence)
        raise EpError(status, f"rank {self.group.rank}: {sentence}")


class ElasticGroups:
    """The groups of an ElasticBuffer."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.bootstrap = bootstrap
        self._is_open = True
        self._all: list[ElasticGroup] = []  # in the order in which all ranks made them

    def find(self, key: Key, most_tokens: int, are_agreed: bool = True) -> ElasticGroup:
        """A group of the key with room for so many tokens of each rank.

        are_agreed  whether the number is equal on all ranks. Else the largest counts.

        Collective where there is none yet.
        """
        self.require_open("dispatch")
        for group in self._all:
            if group.key == key and group.capacity >= most_tokens:
                return group
        if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            refuse(
                "dispatch: expected a configuration that was used before, while a CUDA graph is "
                "captured, got a new one, which allocates: run one step before the capture"
            )
        if not are_agreed:
            wishes = self.bootstrap.allgather(_WISH.pack(most_tokens))
            most_tokens = max(_WISH.unpack(wish)[0] for wish in wishes)
        # A power of two, so that growing bounds make few groups.
        most = max(most_tokens, self.bootstrap.size)
        made = ElasticGroup(self.bootstrap, key, 1 << (most - 1).bit_length())
        self._all.append(made)
        return made

    def require_open(self, call: str) -> None:
        """EpError DESTROYED after close."""
        if not self._is_open:
            raise EpError(
                Status.DESTROYED,
                f"rank {self.bootstrap.rank}: {call}: the buffer was destroyed",
            )

    def close(self) -> None:
        """Close all groups. Collective. Twice does nothing."""
        self._is_open = False
        while self._all:
            self._all.pop(0).group.close()
