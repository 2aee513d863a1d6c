# SPDX-License-Identifier: Apache-2.0
"""Send and receive phases of latency mode: the receive phase is a hook, called when it suits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._library import EpError
from . import _calls, _checks
from ._autograd import (
    Received,
    make_plan,
    make_received,
    mark_written,
    needs_grad,
    require_given,
    require_indices,
    take_biases,
)
from ._counters import as_given
from ._quant import as_scaled

if TYPE_CHECKING:
    from typing import Callable, Optional

    from torch import Tensor

    from ._autograd import Bias
    from ._counters import Blocks, Counters
    from ._handle import Handle, Plan


class Hook:
    """The receive phase of an operation. Call it once: then its outputs are complete.

    On GPUs it enqueues the receive phase on the current stream, which may be another one than that
    of the send phase, if it is ordered after it.
    """

    def __init__(
        self, handle: Handle, receive: Callable[[], None], tensors: tuple[Optional[Tensor], ...]
    ) -> None:
        self._handle = handle
        self._receive: Optional[Callable[[], None]] = receive
        self._tensors = tensors
        self._stream = handle.stream()

    def __call__(self) -> None:
        """Complete the outputs. EpError ORDER if it was called before."""
        receive = self._receive
        if receive is None:
            raise EpError(Status.ORDER, "hook: expected one call, got a second one")
        receive()
        if self._handle.stream() != self._stream:
            # The allocator would reuse the memory in the order of the stream that it came from.
            stream = torch.cuda.current_stream(self._handle.device)
            for tensor in self._tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
        self._receive, self._tensors = None, ()


def _require_plain(call: str, name: str, rows: Tensor, *others: Optional[Tensor]) -> None:
    """Refuse rows, the argument `name`, that libep would read wrongly, and tensors with gradient."""
    if not torch.compiler.is_compiling():
        _checks.require_usable(name, rows)
    if needs_grad(rows, *others):
        raise EpError(
            Status.UNSUPPORTED,
            f"{call}: expected tensors without gradient: call it under torch.no_grad(), or detach "
            "them",
        )


def dispatch_send(
    handle: Handle,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Optional[Tensor] = None,
    scales: Optional[Tensor] = None,
    *,
    num_tokens: Optional[Tensor] = None,
    recv_tokens: Optional[Tensor] = None,
    global_scale: Optional[Tensor] = None,
    counters: Optional[Counters] = None,
    ready: Optional[Blocks] = None,
) -> tuple[Received, Hook]:
    """The send phase of a dispatch, in latency mode. Arguments as of dispatch.

    Returns what the dispatch delivers, and the hook that completes it, the plan's numbers included.
    Until then the handle takes no other operation; other handles do. Inputs may be overwritten once
    the send phase has run. No gradient. Either phase adds to the counters what it does itself. The
    receive phase stores the words of `ready`.
    """
    _require_plain("dispatch_send", "tokens", tokens, topk_weights, scales)
    idx = require_indices(topk_idx)
    inputs = tokens, topk_weights, scales, recv_tokens
    require_given(handle, idx, inputs, num_tokens is not None)
    scaled = as_scaled(handle, "dispatch_send", global_scale)
    plan = make_plan(handle, idx)
    received = make_received(handle, plan, tokens, topk_weights, scales, recv_tokens)
    sends = () if counters is None else counters.without_experts
    receives = as_given(None if counters is None else counters.of_receiving, ready)
    _calls.dispatch_send(
        *(handle, idx, num_tokens, tokens, topk_weights, scales, plan.bytes, plan.numbers),
        *sends,
        **scaled,
    )

    def receive() -> None:
        _calls.dispatch_wait(
            handle,
            received.tokens,
            received.topk_weights,
            received.scales,
            received.topk_idx,
            *receives,
        )
        mark_written(handle, recv_tokens)

    tensors: tuple[Optional[Tensor], ...]
    tensors = plan.bytes, plan.numbers, idx, num_tokens, received.tokens
    tensors += received.topk_weights, received.scales, received.topk_idx, *receives[:6]
    return received, Hook(handle, receive, tensors)


def combine_send(
    handle: Handle,
    plan: Plan,
    expert_out: Tensor,
    weights: Optional[Tensor] = None,
    *,
    topk_weights: Optional[Tensor] = None,
    bias: Bias = None,
    counters: Optional[Counters] = None,
    done: Optional[Blocks] = None,
) -> tuple[Tensor, Hook]:
    """The send phase of a combine, in latency mode. Arguments as of combine.

    The receive phase reads bias, so it may be written until the hook is called. Either phase adds to
    the counters what it does itself, and the send phase waits for the words of `done`. Returns
    [T, H], and the hook that completes it. No gradient.
    """
    biases = take_biases(bias)
    _require_plain("combine_send", "expert_out", expert_out, weights, topk_weights, *biases)
    out = expert_out.new_empty((plan.num_tokens, expert_out.shape[-1]))
    sends = as_given(None if counters is None else counters.without_experts, done)
    waits = () if counters is None else counters.of_waits
    _calls.combine_send(handle, plan.bytes, expert_out, weights, topk_weights, *sends)

    def receive() -> None:
        _calls.combine_wait(handle, *biases, out, *waits)

    return out, Hook(handle, receive, (plan.bytes, out, *biases, *waits))
