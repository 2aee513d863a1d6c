# SPDX-License-Identifier: Apache-2.0
"""What get_dispatch_layout computes: how many tokens go where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._library import EpError

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
    if num_experts < 1 or num_experts % num_ranks:
        raise EpError(
            Status.RANGE,
            f"{call}: expected equally many experts on each of {num_ranks} ranks, got "
            f"{num_experts} experts",
        )
    return num_experts // num_ranks


def count(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the tokens for each rank and expert, without waiting for a GPU.

    topk_idx  [T, K] int64 or int32: the expert of each entry; negative: none
    """
    each = experts_per_rank("get_dispatch_layout", num_experts, num_ranks)
    idx = topk_idx.long()
    is_live = idx >= 0
    # Entries without an expert count for one more expert and rank, which are then left out.
    expert = torch.where(is_live, idx, num_experts)
    rank = torch.where(is_live, idx.div(each, rounding_mode="floor"), num_ranks)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=idx.device)
    counts.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten(), dtype=torch.int32))
    is_in = torch.zeros((idx.shape[0], num_ranks + 1), dtype=torch.bool, device=idx.device)
    is_in = is_in.scatter_(1, rank, True)[:, :num_ranks].contiguous()
    return Layout(is_in.sum(0, dtype=torch.int32), counts[:num_experts].contiguous(), is_in)
