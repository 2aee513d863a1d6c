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


def dispatch(layer: Handle, given: Given, most: int) -> Step:
    """Send rows. With two micro-batches the other one's turn comes first, and the stream is that of
    communication."""
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    record(*given)
    tokens, weights, idx = given
    plan, counts = make_plan(layer, idx), None
    numbers = plan.bytes, plan.numbers
    lead: tuple[int, ...] = (layer.group.size, most)
    if layer.is_latency:
        received = _make_received(layer, lead, given)
        _calls.dispatch_routed(layer, idx, None, tokens, weights, None, *numbers, *received)
    else:
        _calls.prepare(layer, idx, None, *numbers)
        if layer.is_exact:
            read = plan.numbers.cpu()
            lead = (_calls.count_rows(layer, read),)
            counts = read[: plan.num_local_experts]
        received = _make_received(layer, lead, given)
        _calls.dispatch(layer, plan.bytes, tokens, weights, None, *received)
    ubatching.dbo_switch_to_compute_sync()
    record(*received, *numbers)
    return Step(layer, plan, received, counts)


def combine(step: Step, rows: Tensor, output: Tensor) -> None:
    """Sum rows into `output`, on the current stream."""
    _calls.combine(step.layer, step.plan.bytes, rows, None, None, None, None, output)


def combine_in_turn(step: Step, rows: Tensor, output: Tensor) -> Hook:
    """combine, of one of two micro-batches. Returns what lets it wait for `output`."""
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    record(rows, output, step.plan.bytes)
    combine(step, rows, output)
    ubatching.dbo_switch_to_compute()

    def join() -> None:
        ubatching.dbo_switch_to_comm()
        ubatching.dbo_yield_and_switch_from_comm_to_compute()

    return join


def combine_send(step: Step, rows: Tensor, output: Tensor) -> Hook:
    """The send phase of combine, in latency mode. Returns the receive phase."""
    _calls.combine_send(step.layer, step.plan.bytes, rows, None, None)
    return lambda: _calls.combine_wait(step.layer, None, None, output)  # it keeps the step's plan


def combine_beside(step: Step, rows: Tensor, output: Tensor, beside: torch.cuda.Stream) -> Hook:
    """combine on another stream. Returns what lets the current one wait for `output`."""
    current = torch.cuda.current_stream(rows.device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        combine(step, rows, output)
    for tensor in (rows, output, step.plan.bytes):
        tensor.record_stream(beside)
    return lambda: current.wait_stream(beside)
