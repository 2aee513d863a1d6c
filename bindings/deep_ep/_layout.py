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
    # How often each token names each expert. Column 0 is for entries without one.
    columns = (topk_idx.long() + 1).clamp_(min=0)
    named = columns.new_zeros((columns.shape[0], num_experts + 1), dtype=torch.uint8)
    named.scatter_(1, columns, 1, reduce="add")
    named = named[:, 1:]
    is_in = named.unflatten(1, (num_ranks, each)).any(2).view(torch.bool)
    return Layout(is_in.sum(0, dtype=torch.int32), named.sum(0, dtype=torch.int32), is_in)
