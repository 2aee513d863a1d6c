# SPDX-License-Identifier: Apache-2.0
"""EPHandle: what ElasticBuffer.dispatch returns. Its tensors are computed when they are read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._library import OfProcess
from ..torch import Plan
from ..torch._group import current_stream
from ._keywords import refuse

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor

    from ..torch import Handle
    from ._elastic_groups import ElasticGroup, Form


class Sizes(NamedTuple):
    """What the host knows of a step's rows."""

    num_rows: int
    """Rows of the receive tensors."""

    num_recv_tokens: Optional[int]
    """Tokens with an expert here, or the most of them; None: the host has not counted them."""

    num_expanded_tokens: int
    """Slots of the experts, padding included, or the most of them."""

    counts: list[int]
    """Slots of each local expert, padding included; empty where the host has read nothing."""


class LatePlan:
    """A Plan whose numbers the host has. They go to the device when they are first read."""

    def __init__(self, bytes: Tensor, numbers: Tensor, num_tokens: int, num_local_experts: int):
        self.bytes = bytes
        self.num_tokens = num_tokens
        self.num_local_experts = num_local_experts
        self._on_host = numbers

    @functools.cached_property
    def _whole(self) -> Plan:
        numbers = self._on_host.to(self.bytes.device)
        return Plan(self.bytes, numbers, self.num_tokens, self.num_local_experts)

    def __getattr__(self, name: str) -> Any:
        """The other members of Plan."""
        return getattr(self._whole, name)


class _FromPlan:
    """A tensor that is computed when it is first read, and kept.

    Of a plan that a graph makes it is kept where the graph itself computes it. Read elsewhere it is
    computed each time, since the next replay changes it.
    """

    def __init__(self, make: Callable[[EPHandle], Tensor]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __get__(self, handle: EPHandle, owner: Optional[type] = None) -> Tensor:
        made = self._make(handle)
        if not handle.is_captured or made.is_cuda and torch.cuda.is_current_stream_capturing():
            vars(handle)[self._make.__name__] = made
        return made


class EPHandle(OfProcess):
    """What dispatch returns for combine and for a dispatch with the same routing.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms
                                     of the dispatch
    topk_idx                         [T, K]: a copy, or with do_handle_copy=False the tensor itself
    num_expanded_tokens              slots, padding included; without do_cpu_sync the most of them
    num_recv_tokens_per_expert_list  [L] slots, padding included; empty without do_cpu_sync
    token_metadata_at_forward, channel_linked_list
                                     None: libep has no hybrid mode

    The other fields are computed when they are first read, or, of a plan that a graph makes, at
    each read outside of it, for the last replay. Reading recv_src_metadata, or with
    do_expand any count of tokens, waits for the dispatch.
    """

    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __init__(
        self,
        owner: object,
        group: ElasticGroup,
        form: Form,
        plan: Plan,
        sizes: Sizes,
        topk_idx: Tensor,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
    ) -> None:
        self.do_expand = form.do_expand
        self.num_experts = group.key.experts_per_rank * group.group.size
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = form.num_sms
        self.topk_idx = topk_idx
        self.num_expanded_tokens = sizes.num_expanded_tokens
        self.num_recv_tokens_per_expert_list = sizes.counts
        self.owner = owner
        self.group = group
        self.form = form
        self.plan = plan
        self.stream = current_stream(group.group.ordinal)
        """On which the plan was made."""
        self.num_rows = sizes.num_rows
        self.is_captured = False
        """Whether a graph makes the plan anew at each replay."""
        if sizes.num_recv_tokens is not None:
            self.num_recv_tokens = sizes.num_recv_tokens

    def __repr__(self) -> str:
        return (
            f"<EPHandle: {self.plan.num_tokens} tokens, {self.num_experts} experts, "
            f"do_expand={self.do_expand}>"
        )

    @_FromPlan
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32: the entries that name each local expert."""
        return self.plan.expert_counts.clone()

    @_FromPlan
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32: running sum of the slots of local experts, padding included.

        With do_expand element i is the end of expert i's slots without its padding. So the next
        expert starts at the next multiple of expert_alignment.
        """
        if self.do_expand:
            return self.plan.expert_offsets[:-1] + self.plan.expert_counts
        unit = self.expert_alignment
        padded = (self.plan.expert_counts + (unit - 1)) // unit * unit
        return padded.cumsum(0, dtype=torch.int32)

    @_FromPlan
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """[R] int32: running sum of the tokens that each rank has sent here, each counted once."""
        counts = self._source_tokens if self.do_expand else self.plan.source_rows
        return counts.cumsum(0, dtype=torch.int32).to(self.plan.numbers.device)

    @functools.cached_property
    def num_recv_tokens(self) -> int:
        """The tokens that have an expert here; without do_cpu_sync the most of them."""
        return int(self._source_tokens.sum())

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """[num_recv_tokens, K + 2] int32, a row for each token in the order of (rank, token).

        Column 0 is the token's number, source rank * num_max_tokens_per_rank + token. Column 1 is
        -1. Column 2 + k is the slot of entry k with do_expand; -1: no slot here.
        """
        tokens, slots = self._tokens
        shape = self.num_recv_tokens, slots.shape[1] + 2
        made = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        made[: len(tokens), 0] = tokens
        made[: len(tokens), 2:] = slots
        return made.to(self.plan.numbers.device)

    @_FromPlan
    def dst_buffer_slot_idx(self) -> Tensor:
        """[T, K] int32: this rank * num_max_tokens_per_rank + the token's place among this rank's
        tokens for the expert's rank; -1: no expert."""
        group, idx = self.group.group, self.topk_idx.long()
        is_live = idx >= 0
        each = self.group.key.experts_per_rank
        ranks = torch.where(is_live, idx.div(each, rounding_mode="floor"), group.size)
        is_sent = idx.new_zeros((len(idx), group.size + 1)).scatter_(1, ranks, 1)
        places = (is_sent.cumsum(0) - 1).gather(1, ranks)
        numbers = group.rank * self.num_max_tokens_per_rank + places
        return torch.where(is_live, numbers, -1).int()

    def _layer(self) -> Handle:
        """The libep handle, for what the host reads."""
        if self.plan.numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse(
                "EPHandle: expected recv_src_metadata, and with do_expand the counts of tokens, to "
                "be read outside of a captured graph, got a read inside: the host waits for them"
            )
        return self.group.layer(self.form)

    @functools.cached_property
    def _source_tokens(self) -> Tensor:
        """On the host: [R] the tokens of each rank that have come."""
        layer = self._layer()
        counts = torch.empty(self.group.group.size, dtype=torch.int32, device="cpu")
        layer.plan_source_tokens(counts=counts, plan=self.plan.bytes, stream=layer.stream())
        return counts

    @functools.cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """On the host: the numbers of the tokens that have come, ascending, and [.., K] slots."""
        layer = self._layer()
        ranks, tokens, entries = torch.empty((3, self.num_rows), dtype=torch.int32, device="cpu")
        layer.plan_sources(
            ranks=ranks,
            tokens=tokens,
            entries=entries,
            plan=self.plan.bytes,
            stream=layer.stream(),
        )
        filled = (ranks >= 0).nonzero()[:, 0]
        numbers = ranks[filled] * self.num_max_tokens_per_rank + tokens[filled]
        numbers, places = numbers.unique(return_inverse=True)
        slots = torch.full((len(numbers), layer.top_k), -1, dtype=torch.int32, device="cpu")
        if self.do_expand:
            slots[places, entries[filled].long()] = filled.int()
        return numbers, slots
