# SPDX-License-Identifier: Apache-2.0
"""Normal mode: dispatch and combine with one row for each (token, rank).

Nothing here is recorded by autograd, as in DeepEP: callers define their own functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Quant, Status
from .._library import EpError, last_error, library
from ..torch import Plan, _calls
from ..torch._autograd import make_plan
from ..torch._fast import FORMS
from ..torch._quant import row_scales
from ._groups import WORDS, NormalKey
from ._handles import NormalHandle
from ._streams import keep

if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from torch import Tensor

    from ..torch import Handle
    from ._groups import Groups, NormalGroup

    Tokens = Union[Tensor, tuple[Tensor, Tensor]]
    Received = tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]


class Sent(NamedTuple):
    """The results of a dispatch."""

    x: Tensor
    scales: Optional[Tensor]
    topk_idx: Optional[Tensor]
    topk_weights: Optional[Tensor]
    num_recv_tokens_per_expert: Optional[list[int]]
    handle: Optional[NormalHandle]


class Routed(NamedTuple):
    """A plan, and what the host knows of it."""

    group: NormalGroup
    layer: Handle
    plan: Tensor
    num_recv_tokens: int
    counts: list[int]
    source_rows: Union[Tensor, list[int]]
    received: Optional[Received]
    """None: dispatch has not run yet."""


def route(
    groups: Groups,
    key: NormalKey,
    topk_idx: Tensor,
    num_worst_tokens: int,
    num_sms: int,
    inputs: Optional[tuple[Tensor, Optional[Tensor], Optional[Tensor]]] = None,
) -> Routed:
    """Make a plan. Collective. Grows the group where a rank has more tokens than it has room for.

    Reads the number of rows on the host, unless num_worst_tokens gives it.

    inputs  tokens, weights and scales: a dispatch of them may be part of the call
    """
    num_tokens = topk_idx.shape[0]
    group = groups.normal(key, num_tokens)
    while True:
        layer = group.handle(num_worst_tokens, num_sms)
        is_fitting = num_tokens <= group.capacity
        if not is_fitting and num_worst_tokens:
            _give_up(group, num_tokens)
        routing = group.spread(topk_idx) if is_fitting else group.ask_for_more(topk_idx)
        routed = None
        if inputs is not None and is_fitting and not num_worst_tokens:
            routed = _route_and_send(group, layer, routing, inputs, topk_idx.dtype)
        if routed is None:
            routed = _route(group, layer, routing, num_worst_tokens)
        if num_worst_tokens or not group.is_asked_for_more(routed.counts, routed.source_rows):
            return routed
        group = groups.grow(key, num_tokens)


def grow(groups: Groups, tokens: Any, topk_idx: Any, num_tokens_per_expert: Any) -> None:
    """Make a larger group, which a rank has asked for. Collective."""
    each = len(num_tokens_per_expert) // groups.bootstrap.size
    groups.grow(_key(each, topk_idx.shape[1], tokens), len(tokens))


def _route(group: NormalGroup, layer: Handle, routing: Tensor, num_worst_tokens: int) -> Routed:
    plan = _prepare(layer, routing)
    if num_worst_tokens:
        return Routed(group, layer, plan.bytes, num_worst_tokens, [], plan.source_rows, None)
    numbers, local = plan.numbers.tolist(), plan.num_local_experts
    rows, sources = numbers[3 * local + 1], numbers[3 * local + 4 :]
    return Routed(group, layer, plan.bytes, rows, numbers[:local], sources, None)


def _route_and_send(
    group: NormalGroup,
    layer: Handle,
    routing: Tensor,
    inputs: tuple[Tensor, Optional[Tensor], Optional[Tensor]],
    id_type: torch.dtype,
) -> Optional[Routed]:
    """In one call of C. None: it must go the slower way."""
    capacity, spare = (-1, group.key.experts_per_rank) if group.has_spare else (group.capacity, -1)
    is_small = id_type is torch.int32
    sent = layer.send_fast(group.numbers.address, capacity, spare, is_small, routing, *inputs)
    if sent is None:
        return None
    recv, weights, scales, idx, plan, rows, counts, sources = sent
    if rows < 0:
        _report(group)
        raise EpError(
            Status.NOT_PREPARED,
            "dispatch: expected a plan that prepare has written, got one that it has not",
        )
    received = None if recv is None else (recv, weights, scales, idx)
    return Routed(group, layer, plan, rows, counts, sources, received)


def _prepare(layer: Handle, routing: Tensor) -> Plan:
    made = layer.make_fast(FORMS["prepare"], routing, None, 0, 0)
    if made is not None:
        return Plan(made[0], made[1], routing.shape[0], layer.group.num_local_experts)
    plan = make_plan(layer, routing)
    _calls.prepare(layer, routing, None, plan.bytes, plan.numbers)
    return plan


def _give_up(group: NormalGroup, num_tokens: int) -> None:
    """Abort the group, since its other ranks wait for this one, which cannot go on."""
    sentence = (
        f"dispatch: expected at most {group.capacity} tokens on each rank where num_worst_tokens is "
        f"given, since the host reads nothing then and the Buffer cannot grow, got {num_tokens}: "
        "dispatch once without num_worst_tokens, or begin with the largest batch"
    )
    group.group.abort(sentence)
    raise EpError(Status.TOKENS, f"rank {group.group.rank}: {sentence}")


def _key(experts_per_rank: int, top_k: int, tokens: Tensor) -> NormalKey:
    # At least 2 bytes: a combine of bf16 rows follows a dispatch of fp8 rows.
    element_bytes = max(2, tokens.element_size())
    return NormalKey(experts_per_rank, top_k, tokens.shape[1], element_bytes, tokens.device)


def dispatch(
    groups: Groups,
    tokens: Tensor,
    scales: Optional[Tensor],
    topk_idx: Tensor,
    topk_weights: Optional[Tensor],
    is_token_in_rank: Optional[Tensor],
    experts_per_rank: int,
    expert_alignment: int,
    num_worst_tokens: int,
    num_sms: int,
    quant: Quant = Quant.NONE,
) -> Sent:
    """Send rows by a new routing. Arguments as of Buffer.dispatch and Buffer.dispatch_rows."""
    key = _key(experts_per_rank, topk_idx.shape[1], tokens)
    inputs = (tokens, topk_weights, scales) if quant == Quant.NONE else None
    routed = route(groups, key, topk_idx, num_worst_tokens, num_sms, inputs)
    rows, layer = routed.num_recv_tokens, routed.layer
    if routed.received is not None:
        recv, recv_weights, recv_scales, recv_idx = routed.received
    elif inputs is not None:
        recv, recv_weights, recv_scales, recv_idx = _send(
            layer, routed.plan, tokens, topk_weights, scales, rows, topk_idx.dtype
        )
    else:
        sender = routed.group.handle(num_worst_tokens, num_sms, quant)
        recv, recv_weights, recv_scales, recv_idx = _send_quantised(
            sender, routed.plan, tokens, topk_weights, rows
        )
    if not num_worst_tokens:
        _report(routed.group)  # the host has waited for the plan already
        groups.remember(routed.group, layer, expert_alignment, num_sms)
    counts = _align(routed.counts[:experts_per_rank], expert_alignment)
    num_tokens, sources = tokens.shape[0], routed.source_rows
    handle = NormalHandle.make(
        routed.group, layer, routed.plan, sources, rows, num_tokens, is_token_in_rank
    )
    return Sent(recv, recv_scales, recv_idx, recv_weights, counts, handle)


def _report(group: NormalGroup) -> None:
    """Raise EpError for an expert that does not exist, or rows that num_worst_tokens has lost."""
    core = group.group
    status = core.run(library.ep_group_status, core.require(), None)
    if status:
        error = last_error(status)
        if not group.has_spare:
            raise error
        raise EpError(
            status,
            f"{error} (libep counts {group.key.experts_per_rank + 1} experts on each rank here, one "
            "more than the program)",
        )


def _align(counts: list[int], alignment: int) -> list[int]:
    return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]


def dispatch_to_ranks(
    groups: Groups,
    tokens: Tensor,
    scales: Optional[Tensor],
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    expert_alignment: int,
    num_sms: int,
) -> Sent:
    """Send rows to ranks, where nobody says to which experts. Arguments as of Buffer.dispatch.

    To libep every token names the first expert of each of its ranks. The counts of the list are
    those that the caller gave, which the ranks exchange in a second operation.
    """
    size = groups.bootstrap.size
    each = num_tokens_per_expert.numel() // size
    firsts = torch.arange(size, device=is_token_in_rank.device) * each
    topk_idx = torch.where(is_token_in_rank, firsts, -1)
    sent = dispatch(groups, tokens, scales, topk_idx, None, is_token_in_rank, each, 1, 0, num_sms)
    counts = num_tokens_per_expert.int().view(size, each)
    padded = torch.nn.functional.pad(counts, (0, -each % WORDS))
    to_each = torch.where(torch.eye(size, dtype=torch.bool, device=firsts.device), firsts, -1)
    key = _key(each, size, tokens)
    routed = route(groups, key, to_each, 0, num_sms)
    received = _send(routed.layer, routed.plan, padded, None, None, size)
    totals = received[0].sum(0)[:each].tolist()
    return sent._replace(topk_idx=None, num_recv_tokens_per_expert=_align(totals, expert_alignment))


def dispatch_again(handle: NormalHandle, tokens: Tensor, scales: Optional[Tensor]) -> Sent:
    """Send rows by the routing of a dispatch before."""
    keep(handle.plan, handle.stream)
    recv, _, recv_scales, _ = _send(
        handle.layer, handle.plan, tokens, None, scales, handle.num_recv_tokens
    )
    return Sent(recv, recv_scales, None, None, None, None)


def _send(
    layer: Handle,
    plan: Tensor,
    tokens: Tensor,
    weights: Optional[Tensor],
    scales: Optional[Tensor],
    rows: int,
    id_type: torch.dtype = torch.int64,
) -> Received:
    """Dispatch. Returns rows, weights, scales and expert ids."""
    is_small = id_type is torch.int32
    made: Optional[Received] = layer.make_fast(
        FORMS["dispatch"], plan, tokens, weights, scales, rows, is_small
    )
    if made is not None:
        return made
    recv = tokens.new_empty((rows, tokens.shape[1]))
    recv_weights = None
    if weights is not None:
        recv_weights = weights.new_empty((rows, layer.top_k), dtype=torch.float32)
    recv_scales = None if scales is None else scales.new_empty((rows, scales.shape[1]))
    recv_idx = tokens.new_empty((rows, layer.top_k), dtype=id_type)
    _calls.dispatch(layer, plan, tokens, weights, scales, recv, recv_weights, recv_scales, recv_idx)
    return recv, recv_weights, recv_scales, recv_idx


def _send_quantised(
    layer: Handle, plan: Tensor, tokens: Tensor, weights: Optional[Tensor], rows: int
) -> Received:
    """Dispatch on a handle that quantises."""
    recv = tokens.new_empty((rows, tokens.shape[1]), dtype=torch.float8_e4m3fn)
    count, scale_type = row_scales(layer.quant, tokens.shape[1])
    scales = tokens.new_empty(layer.scales_shape(rows, count), dtype=scale_type)
    recv_weights = None
    if weights is not None:
        recv_weights = weights.new_empty((rows, layer.top_k), dtype=torch.float32)
    idx = tokens.new_empty((rows, layer.top_k), dtype=torch.int64)
    _calls.dispatch(layer, plan, tokens, weights, None, recv, recv_weights, scales, idx)
    return recv, recv_weights, scales, idx


def combine(
    handle: NormalHandle, x: Tensor, topk_weights: Optional[Tensor], bias: tuple[Tensor, ...]
) -> tuple[Tensor, Optional[Tensor]]:
    """Return rows to their tokens, and sum them. Arguments as of Buffer.combine."""
    keep(handle.plan, handle.stream)
    out = _sum(handle, x, *bias)
    return out, None if topk_weights is None else _sum_weights(handle, topk_weights)


def _sum(
    handle: NormalHandle,
    rows: Tensor,
    bias0: Optional[Tensor] = None,
    bias1: Optional[Tensor] = None,
) -> Tensor:
    made = handle.layer.make_fast(
        FORMS["combine"], handle.plan, rows, None, None, bias0, bias1, handle.num_tokens, 0
    )
    if made is not None:
        summed: Tensor = made[0]
        return summed
    out = rows.new_empty((handle.num_tokens, rows.shape[1]))
    _calls.combine(handle.layer, handle.plan, rows, None, None, bias0, bias1, out)
    return out


def _sum_weights(handle: NormalHandle, weights: Tensor) -> Tensor:
    """Add the weights of all ranks, entries without an expert included, as DeepEP does."""
    top_k = weights.shape[1]
    missing = -top_k % WORDS
    if not missing:
        return _sum(handle, weights.float())
    rows = torch.nn.functional.pad(weights.float(), (0, missing))
    return _sum(handle, rows)[:, :top_k].contiguous()
