# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine of an ElasticBuffer do, once their arguments are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from .._abi import Status
from .._library import EpError, last_error, library
from ..torch import _calls
from ..torch._counters import Counters, as_given
from ..torch._fast import FORMS
from ._elastic_handle import EPHandle, LatePlan, Sizes
from ._normal import _align, _prepare
from ._streams import keep
from .utils.math import align

if TYPE_CHECKING:
    from typing import Optional

    from torch import Tensor

    from ..torch import Handle, Plan
    from ._elastic_groups import ElasticGroup, Form

_NO_CAPACITY = 1 << 31  # rows of a rank
_SCALE_ROWS = 4  # on whose multiples columns of scales start: 16 bytes, as TMA needs


class Given(NamedTuple):
    """The tensors that a dispatch sends."""

    tokens: Tensor
    scales: Optional[Tensor]
    topk_weights: Optional[Tensor]


class Received(NamedTuple):
    """The tensors that a dispatch delivers."""

    tokens: Tensor
    scales: Optional[Tensor]
    topk_idx: Optional[Tensor]
    topk_weights: Optional[Tensor]


def most_slots(num_tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """The most slots of a rank that receives from so many tokens, padding included."""
    most = num_tokens * min(top_k, num_local_experts)
    return align(most + (alignment - 1) * num_local_experts, alignment)


def route(
    group: ElasticGroup, form: Form, topk_idx: Tensor, most: Sizes, alignment: int
) -> tuple[Plan, Sizes]:
    """Make a plan. Collective.

    most  the sizes of the worst case, which a form with max_recv_rows has

    Where the form has none, the host reads the sizes.
    """
    layer = group.layer(form)
    plan = _prepare(layer, topk_idx)
    return plan, most if form.max_recv_rows else _read(layer, plan, form.do_expand, alignment)


def route_and_send(
    group: ElasticGroup, form: Form, topk_idx: Tensor, given: Given, alignment: int
) -> Optional[tuple[Plan, Sizes, Received]]:
    """`route` and `send` in one call of C, where the host reads the sizes. Collective.

    None: it must go the slower way.
    """
    layer, (tokens, scales, weights) = group.layer(form), given
    if scales is not None and form.is_by_column:
        return None
    limits = _NO_CAPACITY, -1, topk_idx.dtype is torch.int32
    sent = layer.send_fast(group.numbers.address, *limits, topk_idx, tokens, weights, scales)
    if sent is None:
        return None
    recv, recv_weights, recv_scales, recv_idx, plan, rows, counts, _ = sent
    if recv is None:
        report(group)
        raise EpError(Status.NOT_PREPARED, "dispatch: expected a plan, got one without numbers")
    numbers = group.numbers.tensor.clone()
    sizes = _count_sizes(rows, _align(counts, alignment), form.do_expand)
    received = Received(recv, recv_scales, recv_idx, recv_weights)
    late = LatePlan(plan, numbers, tokens.shape[0], len(counts))
    return cast("Plan", late), sizes, received


def _count_sizes(rows: int, counts: list[int], do_expand: bool) -> Sizes:
    if do_expand:
        return Sizes(rows, None, rows, counts)
    return Sizes(rows, rows, sum(counts), counts)


def _read(layer: Handle, plan: Plan, do_expand: bool, alignment: int) -> Sizes:
    local = plan.num_local_experts
    numbers = plan.numbers.tolist()
    rows = numbers[3 * local + 1]
    if not 0 <= rows <= layer.most_rows:
        rows = _calls.count_rows(layer, plan.numbers)  # which says why
    return _count_sizes(rows, _align(numbers[:local], alignment), do_expand)


def send(handle: EPHandle, form: Form, given: Given, stats: Optional[Tensor]) -> Received:
    """Send rows by the handle's plan, and add the rows of each expert to `stats`. Collective."""
    layer, plan, rows = handle.group.layer(form), handle.plan, handle.num_rows
    tokens, scales, weights = given
    keep(plan.bytes, handle.stream)
    is_small = handle.topk_idx.dtype is torch.int32
    if stats is None:
        given_rows = plan.bytes, tokens, weights, scales, rows
        fast = layer.make_fast(FORMS["dispatch"], *given_rows, is_small)
        if fast is not None:
            recv, recv_weights, recv_scales, recv_idx = fast
            return Received(recv, recv_scales, recv_idx, recv_weights)
    recv = tokens.new_empty((rows, tokens.shape[1]))
    recv_idx = recv_weights = recv_scales = None
    if not form.do_expand:
        recv_idx = handle.topk_idx.new_empty((rows, layer.top_k))
    if weights is not None:
        recv_weights = weights.new_empty(layer.weights_shape(rows), dtype=torch.float32)
    if scales is not None:
        lead = align(rows, _SCALE_ROWS) if form.is_by_column else rows
        recv_scales = scales.new_empty(layer.scales_shape(lead, scales.shape[1]))
    made = recv, recv_weights, recv_scales, recv_idx
    counters = as_given(Counters(stats))
    _calls.dispatch(layer, plan.bytes, tokens, weights, scales, *made, *counters)
    if form.is_by_column and recv_scales is not None:
        recv_scales = recv_scales.t()[:rows]
    return Received(recv, recv_scales, recv_idx, recv_weights)


def report(group: ElasticGroup) -> None:
    """Raise EpError for an expert that does not exist. The host has waited for the plan."""
    core = group.group
    status = core.run(library.ep_group_status, core.require(), None)
    if status:
        raise last_error(status)


def combine(
    handle: EPHandle,
    form: Form,
    x: Tensor,
    topk_weights: Optional[Tensor],
    biases: tuple[Tensor, ...],
) -> tuple[Tensor, Optional[Tensor]]:
    """Return rows to their tokens and sum them, unweighted. Weights go back to their entries."""
    keep(handle.plan.bytes, handle.stream)
    layer, plan = handle.group.layer(form), handle.plan
    terms = *biases, None, None
    if topk_weights is None:
        made = layer.make_fast(
            FORMS["combine"], plan.bytes, x, None, None, *terms[:2], plan.num_tokens, 0
        )
        if made is not None:
            return made[0], None
        out = x.new_empty((plan.num_tokens, x.shape[1]))
        _calls.combine(layer, plan.bytes, x, None, None, *terms[:2], out)
        return out, None
    # One operation, whose sums are those of an unweighted combine.
    if not biases:
        made = layer.make_fast(
            FORMS["dispatch_backward"], plan.bytes, x, topk_weights, plan.num_tokens, 0
        )
        if made is not None:
            return made[0], made[1]
    out = x.new_empty((plan.num_tokens, x.shape[1]))
    out_weights = topk_weights.new_empty(handle.topk_idx.shape, dtype=torch.float32)
    if biases:
        _calls.sum_biased(layer, plan.bytes, x, topk_weights, biases, out, out_weights)
    else:
        _calls.dispatch_backward(layer, plan.bytes, x, topk_weights, out, out_weights)
    return out, out_weights
