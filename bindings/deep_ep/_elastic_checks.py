# SPDX-License-Identifier: Apache-2.0
"""The arguments of an ElasticBuffer's calls, checked before the first operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._library import EpError
from ..torch._calls import ROW_UNIT, TYPES, WEIGHTS
from . import _checks
from ._checks import _SUMMABLE, _number, _refuse, _rows, _tensor
from ._elastic_groups import SCALE_BLOCK

if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from torch import Tensor

    from ._checks import Shape
    from ._elastic_handle import EPHandle
    from .hybrid_ep_buffer import _State

    Names = tuple[str, str]

_SCALES = (torch.float32, torch.int32)
_MOST_ROW_BYTES = 65536  # EP_MAX_ROW_BYTES


def tokens(
    x: Any, num_tokens: Union[int, str], call: str = "dispatch", names: Names = ("x", "scales of x")
) -> tuple[Tensor, Optional[Tensor]]:
    """Check the rows that dispatch sends. Returns them and their scales, or None.

    names  of the arguments, as a caller knows them
    """
    sent, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    _tensor(call, names[0], sent, (num_tokens, "hidden"), TYPES)
    _rows(call, names[0], sent, ROW_UNIT, _MOST_ROW_BYTES)
    if scales is not None:
        shape: Shape = sent.shape[0], "scales"
        _tensor(call, names[1], scales, shape, _SCALES, sent.device)
        _rows(call, names[1], scales, 4, 4 * -(-sent.shape[1] // SCALE_BLOCK))
    return sent, scales


def weights(topk_weights: Any, topk_idx: Tensor, device: torch.device) -> None:
    """Check the weights that dispatch sends, if there are any."""
    if topk_weights is not None:
        shape: Shape = tuple(topk_idx.shape)
        _tensor("dispatch", "topk_weights", topk_weights, shape, WEIGHTS, device)


def stats(given: Any, num_local_experts: int, device: torch.device) -> None:
    """Check the tensor that dispatch adds its counts to, if there is one."""
    if given is not None:
        name = "cumulative_local_expert_recv_stats"
        _tensor("dispatch", name, given, (num_local_experts,), (torch.int32, torch.int64), device)


def routing(topk_idx: Any, num_tokens: int, device: torch.device) -> None:
    """Check topk_idx."""
    _checks.routing("dispatch", topk_idx, num_tokens, device)


def numbers(expert_alignment: Any, num_max_tokens_per_rank: Any, do_expand: bool) -> None:
    """Check the numbers of a dispatch without handle."""
    _number("dispatch", "num_max_tokens_per_rank", num_max_tokens_per_rank, 1)
    _number("dispatch", "expert_alignment", expert_alignment, 1)
    if do_expand and expert_alignment & (expert_alignment - 1):
        _refuse(
            Status.ALIGNMENT,
            "dispatch",
            "expert_alignment",
            "a power of two with do_expand",
            expert_alignment,
        )


def same_form(handle: EPHandle, given: dict[str, Any]) -> None:
    """Check arguments that a dispatch with a handle repeats."""
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            expected = f"the handle's, {getattr(handle, name)}"
            _refuse(Status.RANGE, "dispatch", name, expected, value)


def rows_of(handle: Union[EPHandle, _State], sent: Tensor, scales: Optional[Tensor]) -> None:
    """Check rows that are sent by the routing of a handle."""
    key = handle.group.key
    if sent.device != key.device:
        _refuse(Status.ADDRESS, "dispatch", "x", f"a tensor on {key.device}", sent.device)
    _rows("dispatch", "x", sent, ROW_UNIT, key.row_bytes)
    if scales is not None:
        _rows("dispatch", "scales of x", scales, 4, key.scale_bytes)


def combine(
    handle: Union[EPHandle, _State],
    x: Any,
    topk_weights: Any,
    biases: tuple[Any, ...],
    call: str = "combine",
    names: Names = ("x", "topk_weights"),
) -> None:
    """Check what combine sends and adds. names: of the arguments, as a caller knows them."""
    device = handle.topk_idx.device
    _tensor(call, names[0], x, ("rows", "hidden"), _SUMMABLE, device)
    _rows(call, names[0], x, ROW_UNIT, handle.group.key.row_bytes)
    count, least = x.shape[0], handle.num_rows
    if count < least or count > least and not handle.do_expand:
        expected = f"{'at least ' if handle.do_expand else ''}{least} rows"
        _refuse(Status.SHAPE, call, names[0], expected, count)
    if topk_weights is not None:
        top_k = handle.topk_idx.shape[1]
        shape: Shape = (count,) if handle.do_expand else (count, top_k)
        _tensor(call, names[1], topk_weights, shape, WEIGHTS, device)
    if len(biases) > 2:
        _refuse(Status.SHAPE, "combine", "bias", "up to 2 tensors", len(biases))
    for bias in biases:
        _tensor("combine", "bias", bias, (len(handle.topk_idx), x.shape[1]), (x.dtype,), device)


def handle(call: str, given: Any, owner: object, kind: type[EPHandle]) -> EPHandle:
    """EpError unless it is a handle of this buffer."""
    if not isinstance(given, kind):
        name = type(given).__qualname__
        _refuse(Status.TYPE, call, "handle", "one that dispatch returned", name)
    if given.owner is not owner:
        _refuse(Status.FOREIGN, call, "handle", "one of this ElasticBuffer", "one of another")
    return given


def no_routing(topk_idx: Any, do_cpu_sync: Optional[bool]) -> None:
    """Refuse what a dispatch with a handle does not take."""
    if topk_idx is not None:
        raise EpError(
            Status.UNSUPPORTED,
            "dispatch: topk_idx: expected None with a handle, whose routing is used, got a tensor",
        )
    if do_cpu_sync:
        raise EpError(
            Status.UNSUPPORTED,
            "dispatch: do_cpu_sync: expected False or None with a handle, which has the numbers, "
            "got True",
        )
