# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine of the backend "libep" do, once a step's form is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.worker import ubatching

from ..torch import _calls
from ..torch._autograd import make_plan
from ..torch._quant import row_scales

if TYPE_CHECKING:
    from typing import Callable, Optional

    from torch import Tensor

    from ..torch import Handle, Plan

    Hook = Callable[[], None]


class Given(NamedTuple):
    """The tensors that a dispatch sends."""

    tokens: Tensor
    topk_weights: Tensor
    topk_idx: Tensor


class Received(NamedTuple):
    """The tensors that a dispatch delivers, in the order of its outputs."""

    tokens: Tensor
    topk_weights: Tensor
    scales: Optional[Tensor]
    topk_idx: Tensor


class Step(NamedTuple):
    """A dispatch whose combine is still to come."""

    layer: Handle
    plan: Plan
    received: Received
    counts: Optional[Tensor]
    """On the host: rows of each local expert, where the host has read them."""


def _make_received(layer: Handle, lead: tuple[int, ...], given: Given) -> Received:
    """Memory for the rows. `lead`: the dimensions before the elements of a row."""
    tokens, scales, dtype = given.tokens, None, given.tokens.dtype
    hidden, top_k = tokens.shape[1], given.topk_idx.shape[1]
    if layer.quantises:
        count, kind = row_scales(layer.quant, hidden)
        scales = tokens.new_empty((*lead, count), dtype=kind)
        dtype = torch.float8_e4m3fn
    return Received(
        tokens.new_empty((*lead, hidden), dtype=dtype),
        given.topk_weights.new_empty((*lead, top_k), dtype=torch.float32),
        scales,
        given.topk_idx.new_empty((*lead, top_k)),
    )


def record(*tensors: Optional[Tensor]) -> None:
    """Keep tensors' memory until the current stream has used it, where there are two streams."""
    if ubatching.dbo_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


# ---- latency mode -------------------------------------------------------------------------------


def dispatch_small(
    layer: Handle, given: Given, most: int, is_split: bool
) -> tuple[Step, Optional[Hook]]:
    """One operation. is_split: its receive phase is the hook."""
    tokens, weights, idx = given
    plan = make_plan(layer, idx)
    received = _make_received(layer, (layer.group.size, most), given)
    step = Step(layer, plan, received, None)
    if is_split:
        _calls.dispatch_send(layer, idx, None, tokens, weights, None, plan.bytes, plan.numbers)
        return step, lambda: _calls.dispatch_wait(layer, *received)
    _calls.dispatch_routed(
        layer, idx, None, tokens, weights, None, plan.bytes, plan.numbers, *received
    )
    return step, None


def combine_small(step: Step, rows: Tensor, output: Tensor, is_split: bool) -> Optional[Hook]:
    """As dispatch_small."""
    layer, plan = step.layer, step.plan.bytes
    if is_split:
        _calls.combine_send(layer, plan, rows, None, None)
        return lambda: _calls.combine_wait(step.layer, output)  # which keeps the plan
    _calls.combine(layer, plan, rows, None, None, output)
    return None


# ---- throughput mode ----------------------------------------------------------------------------


def dispatch_large(layer: Handle, given: Given, most: int) -> Step:
    """With two micro-batches the other one's turn comes first, and the stream is another one."""
    tokens, weights, idx = given
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    record(*given)
    plan = make_plan(layer, idx)
    _calls.prepare(layer, idx, None, plan.bytes, plan.numbers)
    lead: tuple[int, ...] = (layer.group.size, most)
    counts = None
    if layer.is_exact:
        numbers = plan.numbers.cpu()
        lead = (_calls.count_rows(layer, numbers),)
        counts = numbers[: plan.num_local_experts]
    received = _make_received(layer, lead, given)
    _calls.dispatch(layer, plan.bytes, tokens, weights, None, *received)
    ubatching.dbo_switch_to_compute_sync()
    record(*received, *plan[:2])
    return Step(layer, plan, received, counts)


def combine_large(
    step: Step, rows: Tensor, output: Tensor, beside: Optional[torch.cuda.Stream]
) -> Hook:
    """Returns what lets the current stream wait for `output`.

    beside  the stream to run on, unless micro-batches have theirs; None: the current one
    """

    def run() -> None:
        _calls.combine(step.layer, step.plan.bytes, rows, None, None, output)

    if ubatching.dbo_enabled():
        ubatching.dbo_yield_and_switch_from_compute_to_comm()
        record(rows, output)
        run()
        ubatching.dbo_switch_to_compute()
        return _join_micro_batch
    if beside is None:
        run()
        return _join_nothing
    current = torch.cuda.current_stream(rows.device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        run()
    for tensor in (rows, output, step.plan.bytes):
        tensor.record_stream(beside)
    return lambda: current.wait_stream(beside)


def _join_micro_batch() -> None:
    ubatching.dbo_switch_to_comm()
    ubatching.dbo_yield_and_switch_from_comm_to_compute()


def _join_nothing() -> None:
    pass
