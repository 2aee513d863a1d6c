# SPDX-License-Identifier: Apache-2.0
"""The libep groups of a Buffer, made when calls first need them.

A call tells what a group must know: experts, top-k, hidden size and, in latency mode, the most
tokens. All of it is equal on all ranks, so that they create the same groups in the same order.
The exception is the number of tokens in normal mode, which may differ. Ranks agree on the largest
when the group is made, and again when one of them needs more: see NormalGroup.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import (
    DEFAULT,
    Backend,
    Late,
    Layout,
    Mode,
    Quant,
    ScaleOrder,
    Status,
    Sums,
    Tail,
)
from .._library import EpError
from ..torch import Handle, _fast, create_group
from ._keywords import refuse

if TYPE_CHECKING:
    from typing import Any, Optional

    from torch import Tensor

    from .._bootstrap import Bootstrap
    from ..torch import Group

_LEAST_TOKENS = 1024  # of a group's capacity, so that small first batches do not make it grow often
_AGREED = struct.Struct("=qQ")  # tokens of a rank, and a bit for each of its groups with plans
_SCALE_BLOCK = 128  # elements, of 4 bytes of scales
WORDS = 4  # a row has a multiple of so many words of 4 bytes
_ORDERS = {Quant.FP8_UE8M0: ScaleOrder.BY_ROW, Quant.NVFP4: ScaleOrder.SWIZZLED}


class NormalKey(NamedTuple):
    """What a group of normal mode is made for."""

    experts_per_rank: int
    top_k: int
    hidden: int
    element_bytes: int
    device: torch.device


class LatencyKey(NamedTuple):
    """What a group of latency mode is made for."""

    experts_per_rank: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    max_tokens: int
    device: torch.device
    sums: Sums


class HostNumbers:
    """Memory of the host for Plan.numbers, which the GPU reaches.

    Make it before the group: later its allocation could wait for a peer's kernel.
    """

    def __init__(self, num_local_experts: int, num_ranks: int, device: torch.device) -> None:
        count, is_pinned = 3 * num_local_experts + 4 + num_ranks, device.type == "cuda"
        self.tensor = torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self.address = self.tensor.data_ptr()


class Token:
    """What callers' handles hold, so that its references tell whether there are any."""

    def __init__(self, layer: Optional[Handle]) -> None:
        self.layer = layer


class NormalGroup:
    """A group for dispatch and combine, with room for `capacity` tokens of each rank.

    A rank that has more tokens than the capacity asks for more room, by a routing that no rank has
    otherwise. All ranks see that in their plans, and make a larger group together. So the capacity
    costs nothing as long as it is enough.

    The routing sends one row more than the capacity to every rank, for which the group has room.
    That takes as many entries of a token as there are ranks. With fewer entries every rank owns one
    expert more than the caller has there, its last, and the routing goes to these.
    """

    def __init__(self, bootstrap: Bootstrap, key: NormalKey, capacity: int) -> None:
        self.key = key
        self.capacity = capacity
        self.has_spare = key.top_k < bootstrap.size
        """Whether every rank owns one expert more than the caller has there."""
        local = key.experts_per_rank + self.has_spare
        self.numbers = HostNumbers(local, bootstrap.size, key.device)
        # Rows of weights, and of the counts of ranks' experts, travel as well.
        words = -(-max(key.top_k, key.experts_per_rank) // WORDS) * WORDS
        self.group = create_group(
            bootstrap,
            num_experts=(key.experts_per_rank + self.has_spare) * bootstrap.size,
            max_tokens=capacity + (not self.has_spare),
            hidden=max(key.hidden * key.element_bytes, 4 * words),
            dtype=torch.uint8,
            top_k=key.top_k,
            max_scale_bytes=4 * -(-key.hidden // _SCALE_BLOCK),
            backend=_backend(key.device),
            device=_ordinal(key.device),
        )
        self._tokens: dict[Optional[Handle], Token] = {None: Token(None)}
        self._handles: dict[tuple[int, int, Quant], Handle] = {}

    def handle(self, num_worst_tokens: int, num_sms: int, quant: Quant = Quant.NONE) -> Handle:
        """The handle of steps of this size.

        num_worst_tokens  rows of the receive buffer; 0: exactly as many as come
        quant             how dispatch quantises; plans serve all of these handles
        """
        key = num_worst_tokens, num_sms, quant
        found = self._handles.get(key)
        if found is None:
            found = self._handles[key] = Handle(
                self.group,
                layout=Layout.FLAT,
                max_recv_rows=num_worst_tokens,
                num_sms=num_sms,
                quant=quant,
                zero_tail=Tail.IDS,
            )
        return found

    def token(self, layer: Handle) -> Token:
        """What callers' handles of a libep handle hold."""
        found = self._tokens.get(layer)
        if found is None:
            found = self._tokens[layer] = Token(layer)
        return found

    def has_plans(self) -> bool:
        """Whether callers have handles of the group that they have not dropped."""
        least, *counts = [sys.getrefcount(token) for token in self._tokens.values()]
        return any(count > least for count in counts)  # the first one is nobody's

    def spread(self, topk_idx: Tensor) -> Tensor:
        """The caller's experts as experts of the group. Negative ones stay negative."""
        if not self.has_spare:
            return topk_idx
        ranks = topk_idx.div(self.key.experts_per_rank, rounding_mode="floor")
        return (topk_idx + ranks).contiguous()

    def ask_for_more(self, topk_idx: Tensor) -> Tensor:
        """A routing that tells all ranks to grow."""
        size = self.group.size
        each = self.key.experts_per_rank + self.has_spare
        lasts = torch.arange(1, size + 1, device=topk_idx.device) * each - 1
        rows = size if self.has_spare else self.capacity + 1
        routing = topk_idx.new_full((rows, self.key.top_k), -1)
        if self.has_spare:
            routing[:, 0] = lasts
        else:
            routing[:, :size] = lasts
        return routing

    def is_asked_for_more(self, counts: list[int], source_rows: Any) -> bool:
        """Whether a rank asks for more. By parts of Plan, on the host; equal on all ranks."""
        if self.has_spare:
            return counts[self.key.experts_per_rank] != 0
        return bool(max(source_rows) > self.capacity)


class LatencyGroup:
    """A group for low-latency dispatch and combine."""

    def __init__(self, bootstrap: Bootstrap, key: LatencyKey, late_us: Optional[int]) -> None:
        self.key = key
        masks: dict[str, Any] = {}
        if late_us is not None:
            masks = dict(masks=1, on_late=Late.MASK, late_us=late_us)
        self.rows_per_expert = bootstrap.size * key.max_tokens
        self.group = create_group(
            bootstrap,
            num_experts=key.experts_per_rank * bootstrap.size,
            max_tokens=key.max_tokens,
            hidden=key.hidden,
            dtype=key.dtype,
            top_k=key.top_k,
            mode=Mode.LATENCY,
            sums=key.sums,
            backend=_backend(key.device),
            device=_ordinal(key.device),
            **masks,
        )
        self._idle: dict[tuple[Quant, int], list[Handle]] = {}
        self._combine_buffer: Optional[Tensor] = None

    def take(self, quant: Quant, num_sms: int = DEFAULT) -> Handle:
        """A handle without a pending operation. give_back() it after the receive phase."""
        idle = self._idle.setdefault((quant, num_sms), [])
        if idle:
            return idle.pop()
        return Handle(
            self.group,
            layout=Layout.BATCHED,
            rows_per_expert=self.rows_per_expert,
            quant=quant,
            scale_order=_ORDERS.get(quant, ScaleOrder.BY_COLUMN),
            num_sms=num_sms,
        )

    def read_sources(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """The source rank and token of each row of a plan, [L * rows]. Waits for the plan."""
        handle = self.take(Quant.NONE)
        found = handle.read_sources(plan, self.key.experts_per_rank * self.rows_per_expert)
        self.give_back(handle)
        return found

    def give_back(self, handle: Handle, num_sms: int = DEFAULT) -> None:
        """Let others take the handle."""
        self._idle[Quant(handle.quant), num_sms].append(handle)

    def readmit(self) -> None:
        """Bring all ranks back. Collective over the ranks that live.

        A rank that does not come within the deadline is left out, by another attempt without it.
        Ranks that waited for different ones then differ, and leave out what another one has.
        """
        alive = set(range(self.group.size))
        while True:
            if self.group.rank not in alive:
                raise EpError(
                    Status.TIMEOUT,
                    f"rank {self.group.rank}: low_latency_clean_mask_buffer: others go on "
                    "without this rank, which came too late: call it on all ranks again",
                )
            try:
                self.group.mask(sorted(alive))
                return
            except EpError as error:
                found = self.group.status()
                if error.status == Status.TIMEOUT:
                    alive.discard(found.peer)
                elif error.status == Status.ORDER:
                    alive.discard(found.expected)  # which another rank has left out
                else:
                    raise

    def combine_buffer(self) -> Tensor:
        """[L, rows, H]: memory for the experts' outputs, always the same."""
        if self._combine_buffer is None:
            key = self.key
            shape = (key.experts_per_rank, self.rows_per_expert, key.hidden)
            self._combine_buffer = torch.empty(shape, dtype=key.dtype, device=key.device)
        return self._combine_buffer


class Groups:
    """The groups of a Buffer."""

    def __init__(self, bootstrap: Bootstrap, late_us: Optional[int]) -> None:
        self.bootstrap = bootstrap
        self.late_us = late_us
        """Microseconds after which latency mode goes on without a rank; None: it never does."""
        self._is_open = True
        self._all: list[Group] = []  # in the order in which all ranks made them
        self._normal: dict[NormalKey, list[NormalGroup]] = {}  # the newest last
        self._steps: dict[object, _fast.StepFacts] = {}
        self.steps_at = 0
        """The address of the EpTorchStep of the newest dispatch, which leads to the others."""
        self._latency: dict[LatencyKey, LatencyGroup] = {}

    def normal(self, key: NormalKey, num_tokens: int) -> NormalGroup:
        """The group of a key. Collective where the key is new."""
        found = self._normal.get(key)
        return found[-1] if found else self.grow(key, num_tokens)

    def grow(self, key: NormalKey, num_tokens: int) -> NormalGroup:
        """Make a group that has room for the tokens of every rank. Collective.

        Smaller groups that no rank has plans of are closed. Others stay open for their steps.
        """
        self._require("dispatch", key.device)
        self._steps.clear()
        self.steps_at = 0
        groups = self._normal.setdefault(key, [])
        used = sum(1 << i for i, group in enumerate(groups) if group.has_plans())
        texts = self.bootstrap.allgather(_AGREED.pack(num_tokens, used))
        wishes = [_AGREED.unpack(text) for text in texts]
        for i in reversed(range(len(groups))):
            if not any(used >> i & 1 for _, used in wishes):
                closed = groups.pop(i).group
                self._all.remove(closed)
                closed.close()
        most = max(_LEAST_TOKENS, self.bootstrap.size, *(tokens for tokens, _ in wishes))
        made = NormalGroup(self.bootstrap, key, 1 << (most - 1).bit_length())
        groups.append(made)
        self._all.append(made.group)
        return made

    def remember(self, group: NormalGroup, layer: Handle, alignment: int, num_sms: int) -> None:
        """Let C make dispatches of this form, of as many rows as come."""
        key, name = group.key, (group.key, layer, alignment, num_sms)
        if group.has_spare or name in self._steps or group is not self._normal[key][-1]:
            return
        made = _fast.StepFacts(
            next=self.steps_at or None,
            object=id(group.token(layer)),
            send=layer.facts_at,
            numbers=group.numbers.address,
            width=key.hidden,
            row_bytes=key.hidden * key.element_bytes,
            bound=group.capacity,
            alignment=alignment,
            send_sms=num_sms,
        )
        self._steps[name], self.steps_at = made, ctypes.addressof(made)

    def latency(self, key: LatencyKey) -> LatencyGroup:
        """The group of a key. Collective where the key is new."""
        found = self._latency.get(key)
        if found is None:
            self._require("low_latency_dispatch", key.device)
            masked = self.masked() if self.late_us is not None else None
            if masked:
                refuse(
                    "low_latency_dispatch: expected a configuration that was used before, since a "
                    f"new one needs all ranks, and rank {min(masked)} is masked: call "
                    "low_latency_clean_mask_buffer on all ranks first"
                )
            found = self._latency[key] = LatencyGroup(self.bootstrap, key, self.late_us)
            self._all.append(found.group)
        return found

    def masked(self) -> set[int]:
        """The ranks that some group of latency mode goes on without. Local."""
        everyone = set(range(self.bootstrap.size))
        alive = (made.group.alive() for made in self._latency.values())
        return everyone - everyone.intersection(*alive)

    def cut(self, rank: int) -> bool:
        """Let all groups of latency mode go on without a rank. Local. False: there are none."""
        for made in self._latency.values():
            made.group.cut(rank)
        return bool(self._latency)

    def readmit(self) -> None:
        """See LatencyGroup.readmit."""
        for made in self._latency.values():
            made.readmit()

    def _require(self, call: str, device: torch.device) -> None:
        if not self._is_open:
            raise EpError(
                Status.DESTROYED, f"rank {self.bootstrap.rank}: {call}: the Buffer was destroyed"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            refuse(
                f"{call}: expected a configuration that was used before, while a CUDA graph is "
                "captured, got a new one, which allocates: run one step before the capture"
            )

    def close(self) -> None:
        """Close all groups. Collective. Twice does nothing."""
        self._is_open = False
        while self._all:
            self._all.pop(0).close()
        self._normal.clear()
        self._latency.clear()


def _backend(device: torch.device) -> Backend:
    return Backend.HOST if device.type == "cpu" else Backend.CUDA


def _ordinal(device: torch.device) -> int:
    return DEFAULT if device.type == "cpu" else device.index
