# SPDX-License-Identifier: Apache-2.0
"""What get_dispatch_layout computes: how many tokens go where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Backend, Status
from .._library import EpError, check, library
from .._tensor import read, written
from ..torch import _fast
from ..torch._group import current_stream
from ._checks import _number
from ._streams import current_device

if TYPE_CHECKING:
    from typing import Any

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


def count_fast(topk_idx: Any, num_experts: Any, num_ranks: int) -> Any:
    """`count` in one call of C. Not a tuple: Python must look at the arguments."""
    if _fast.count is None or type(topk_idx) is not torch.Tensor or type(num_experts) is not int:
        return None
    ordinal = topk_idx.get_device()
    if num_experts % num_ranks or ordinal >= 0 and current_device() != ordinal:
        return None
    return _fast.count(_fast.functions, ordinal, topk_idx, num_ranks, num_experts)


def count(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the tokens for each rank and expert, without waiting for a GPU.

    topk_idx  [T, K] int64 or int32: the expert of each entry; negative: none
    """
    experts_per_rank("get_dispatch_layout", num_experts, num_ranks)
    ordinal = topk_idx.get_device() if topk_idx.is_cuda else -1
    if ordinal >= 0 and current_device() != ordinal:
        with torch.cuda.device(ordinal):
            return count(topk_idx, num_experts, num_ranks)
    if _fast.count is not None:
        made = _fast.count(_fast.functions, ordinal, topk_idx, num_ranks, num_experts)
        if type(made) is tuple:
            return Layout(*made)
        check(made or 0)
    return _count_slowly(topk_idx.contiguous(), num_experts, num_ranks, ordinal)


def _count_slowly(topk_idx: Tensor, num_experts: int, num_ranks: int, ordinal: int) -> Layout:
    made = Layout(
        topk_idx.new_empty(num_ranks, dtype=torch.int32),
        topk_idx.new_empty(num_experts, dtype=torch.int32),
        topk_idx.new_empty((topk_idx.shape[0], num_ranks), dtype=torch.bool),
    )
    per_rank, per_expert, is_in = made
    check(
        library.ep_count_routing(
            Backend.HOST if ordinal < 0 else Backend.CUDA,
            read(topk_idx, "topk_idx"),
            current_stream(ordinal),
            written(per_rank, "num_tokens_per_rank"),
            written(per_expert, "num_tokens_per_expert"),
            written(is_in.view(torch.uint8), "is_token_in_rank"),
        )
    )
    return made
