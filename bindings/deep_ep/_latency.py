# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode: a slab of fixed size for each expert, weights at the token's rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import DEFAULT, Quant, Status
from .._library import EpError
from ..torch import _calls
from ..torch._autograd import make_plan, make_received
from ..torch._counters import Blocks, Counters, as_given
from ._handles import LatencyHandle
from ._streams import keep

if TYPE_CHECKING:
    from typing import Callable, Optional

    from torch import Tensor

    from ._groups import LatencyGroup
    from ._normal import Tokens

_PACK = 4  # UE8M0 scales in an int32
_TILE = (128, 4, 32)  # rows and scales of a tile, and rows that lie side by side


class Operation(NamedTuple):
    """An operation in two phases, which the caller runs on its streams."""

    send: Callable[[], None]
    receive: Callable[[], None]
    whole: Callable[[], None]
    """Both phases in one launch."""


class Dispatched(NamedTuple):
    """The results of a dispatch, complete after its receive phase."""

    x: Tokens
    counts: Tensor
    handle: LatencyHandle
    tensors: tuple[Optional[Tensor], ...]
    """All that dispatch has allocated."""


def choose_quant(
    use_fp8: bool, round_scale: bool, use_ue8m0: bool, use_nvfp4: bool, hidden: int
) -> Quant:
    """How dispatch quantises. EpError for a combination that does not exist."""
    if use_nvfp4:
        if use_ue8m0:
            raise EpError(
                Status.UNSUPPORTED,
                "low_latency_dispatch: use_ue8m0: expected False with use_nvfp4, whose scales are "
                "e4m3",
            )
        return Quant.NVFP4
    if not use_fp8:
        return Quant.NONE
    if use_ue8m0 and not round_scale:
        raise EpError(
            Status.UNSUPPORTED,
            "low_latency_dispatch: use_ue8m0: expected round_scale as well, since UE8M0 scales are "
            "powers of two",
        )
    if use_ue8m0 and hidden % (128 * _PACK):
        raise EpError(
            Status.SHAPE,
            f"low_latency_dispatch: use_ue8m0: expected a hidden size that is a multiple of "
            f"{128 * _PACK}, for {_PACK} scales in an int32, got {hidden}",
        )
    if not round_scale:
        return Quant.FP8
    return Quant.FP8_UE8M0 if use_ue8m0 else Quant.FP8_POW2


def _show_fp4(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [L, P, H / 2] and their tiles of scales, as DeepEP's callers read both."""
    length, below, across = _TILE
    experts, padded, columns = scales.shape
    tiles = scales.view(
        experts, padded // length, columns // below, across, length // across, below
    )
    return rows.permute(1, 2, 0), tiles.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)


def dispatch(
    group: LatencyGroup,
    x: Tensor,
    topk_idx: Tensor,
    quant: Quant,
    global_scale: Optional[Tensor],
    stats: Optional[Tensor],
    waits: Optional[Tensor],
) -> tuple[Dispatched, Operation]:
    """Set a dispatch up. Arguments as of Buffer.low_latency_dispatch.

    global_scale  x_global_scale, of Quant.NVFP4
    stats         cumulative_local_expert_recv_stats
    waits         dispatch_wait_recv_cost_stats
    """
    scaled = {}
    if quant == Quant.NVFP4:
        if global_scale is None:
            global_scale = x.new_ones((1,), dtype=torch.float32)
        scaled["global_scale"] = global_scale.reshape(1)
    layer = group.take(quant)
    plan = make_plan(layer, topk_idx)
    received = make_received(layer, plan, x, None, None, None)
    rows, scales, packed = received.tokens, received.scales, None
    if quant == Quant.FP8_UE8M0:
        assert scales is not None
        packed = scales.new_empty(
            (scales.shape[0], scales.shape[2] // _PACK, scales.shape[1]), dtype=torch.int32
        )

    def finish() -> None:
        group.give_back(layer)
        if packed is not None:
            assert scales is not None
            packed.transpose(1, 2).copy_(scales.view(torch.int32))

    counters = as_given(Counters(stats, peer_wait_ns=waits))

    def send() -> None:
        sends = as_given(Counters(peer_wait_ns=waits))
        _calls.dispatch_send(
            layer, topk_idx, None, x, None, None, plan.bytes, plan.numbers, *sends, **scaled
        )

    def receive() -> None:
        _calls.dispatch_wait(layer, rows, None, scales, None, *counters)
        finish()

    def whole() -> None:
        made = plan.bytes, plan.numbers, rows, None, scales, None
        _calls.dispatch_routed(layer, topk_idx, None, x, None, None, *made, *counters, **scaled)
        finish()

    handle = LatencyHandle(plan.bytes, group, x.shape[0])
    shown: Tokens = rows
    if scales is not None and scaled:
        shown = _show_fp4(rows, scales)
    elif scales is not None:
        shown = (rows, (scales if packed is None else packed).transpose(1, 2))
    tensors = plan.bytes, plan.numbers, rows, scales, packed, *scaled.values()
    return Dispatched(shown, plan.expert_counts, handle, tensors), Operation(send, receive, whole)


def combine(
    handle: LatencyHandle,
    x: Tensor,
    topk_weights: Tensor,
    out: Optional[Tensor],
    waits: Optional[Tensor],
    done: Optional[Blocks] = None,
    num_sms: int = DEFAULT,
) -> tuple[Tensor, Operation]:
    """Set a combine up. Arguments as of Buffer.low_latency_combine.

    waits    combine_wait_recv_cost_stats
    done     the GEMM's words, for which it waits
    num_sms  multiprocessors beside that GEMM

    Returns the output and the operation.
    """
    group = handle.group
    layer = group.take(Quant.NONE, num_sms)
    if out is None:
        out = x.new_empty((handle.num_tokens, x.shape[-1]))
    written = out
    awaited = as_given(Counters(peer_wait_ns=waits), done)

    def send() -> None:
        keep(handle.plan, handle.stream)
        _calls.combine_send(layer, handle.plan, x, None, topk_weights, *awaited)

    def receive() -> None:
        counters = as_given(Counters(peer_wait_ns=waits))
        _calls.combine_wait(layer, None, None, written, *counters)
        group.give_back(layer, num_sms)

    def whole() -> None:
        keep(handle.plan, handle.stream)
        _calls.combine(layer, handle.plan, x, None, topk_weights, None, None, written, *awaited)
        group.give_back(layer, num_sms)

    return out, Operation(send, receive, whole)
