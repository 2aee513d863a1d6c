# SPDX-License-Identifier: Apache-2.0
"""What get_dispatch_layout computes: how many tokens go where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._library import EpError
from ..torch._group import current_stream
from ._checks import _number

if TYPE_CHECKING:
    from torch import Tensor


class Layout(NamedTuple):
    """Where this rank's tokens go."""

    num_tokens_per_rank: Tensor
    """[R] int32."""

    num_tokens_per_expert: Tensor
    """[E] int32."""

    is_token_in_rank: Tensor
    """[T, R] bool."""


def experts_per_rank(call: str, num_experts: int, num_ranks: int) -> int:
    """The experts of each rank. EpError RANGE unless all ranks have equally many."""
    _number(call, "num_experts", num_experts, 1)
    if num_experts % num_ranks:
        raise EpError(
            Status.RANGE,
            f"{call}: expected equally many experts on each of {num_ranks} ranks, got "
            f"{num_experts} experts",
        )
    return num_experts // num_ranks


_numbers: dict[tuple[int, int, int], Tensor] = {}


def _experts(num_experts: int, topk_idx: Tensor) -> Tensor:
    """The numbers of all experts, made once for each stream: an operation less in every step."""
    ordinal = topk_idx.device.index if topk_idx.is_cuda else -1
    key = num_experts, ordinal, current_stream(ordinal)
    found = _numbers.get(key)
    if found is None:
        found = torch.arange(num_experts, device=topk_idx.device)
        # A graph that is captured owns what it allocates.
        if ordinal < 0 or not torch.cuda.is_current_stream_capturing():
            _numbers[key] = found
    return found


def count(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the tokens for each rank and expert, without waiting for a GPU.

    topk_idx  [T, K] int64 or int32: the expert of each entry; negative: none

    Four operations of PyTorch, whose launches take most of the time. The first makes T * K * E bytes.
    """
    each = experts_per_rank("get_dispatch_layout", num_experts, num_ranks)
    names = topk_idx.unsqueeze(2) == _experts(num_experts, topk_idx)
    is_in = names.unflatten(2, (num_ranks, each)).any((1, 3))
    return Layout(is_in.sum(0, dtype=torch.int32), names.sum((0, 1), dtype=torch.int32), is_in)
