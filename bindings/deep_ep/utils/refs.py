# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine compute, by plain gathers of torch.distributed. For tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .envs import get_global_seed

if TYPE_CHECKING:
    from typing import Optional, Union

    from torch import Tensor

    Tokens = Union[Tensor, tuple[Tensor, Tensor]]

__all__ = ["combine", "dispatch", "generate_pre_combine_data", "ordered_accumulate"]

_PRIME = 131071


def _gather(tensor: Tensor, most: int) -> list[Tensor]:
    """The tensors of all ranks, whose numbers of rows differ, as far as `most`."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(tensor))
    # As bytes, since not every backend knows every type.
    block = tensor.contiguous().view(torch.uint8)
    padded = block.new_zeros((most, *block.shape[1:]))
    padded[: len(block)] = block
    blocks = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(blocks, padded)
    return [each[:count].view(tensor.dtype) for each, count in zip(blocks, counts)]


def dispatch(
    x: Tokens,
    topk_idx: Tensor,
    topk_weights: Optional[Tensor],
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Tokens, Tensor, Optional[Tensor], Tensor, Tensor]:
    """The rows that a dispatch without do_expand delivers to this rank, by (source rank, token).

    Returns them, their local experts or -1, all their weights, each row's source rank *
    num_max_tokens_per_rank + token, int32, and the rows of each rank, [R] int32 on the CPU.
    """
    each = num_experts // dist.get_world_size()
    first = dist.get_rank() * each
    most = num_max_tokens_per_rank
    all_idx = _gather(topk_idx, most)
    is_mine = [(idx >= first) & (idx < first + each) for idx in all_idx]
    kept = [mine.any(1).nonzero()[:, 0] for mine in is_mine]

    def receive(tensor: Tensor) -> Tensor:
        return torch.cat([rows[at] for rows, at in zip(_gather(tensor, most), kept)])

    idx = torch.cat([torch.where(m, i - first, -1)[at] for m, i, at in zip(is_mine, all_idx, kept)])
    received = tuple(receive(part) for part in x) if isinstance(x, tuple) else receive(x)
    weights = None if topk_weights is None else receive(topk_weights)
    numbers = torch.cat([rank * most + at for rank, at in enumerate(kept)]).int()
    counts = torch.tensor([len(at) for at in kept], dtype=torch.int32, device="cpu")
    return received, idx, weights, numbers, counts  # type: ignore[return-value]


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Rows [n, K, hidden] bfloat16 that follow from the tokens' numbers, alike on all ranks."""
    device = src_token_global_idx.device
    entries = src_token_global_idx.long()[:, None] * num_topk
    entries = entries + torch.arange(num_topk, device=device)
    period = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    phases = ((entries * _PRIME % period).float() + 1) / period
    places = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    rows = torch.sin(phases[:, :, None] * places + math.sin(get_global_seed()))
    return rows.to(torch.bfloat16)


def ordered_accumulate(data: Tensor, initial_value: Optional[Tensor] = None) -> Tensor:
    """Sum data [n, K, hidden] over K in ascending order, in float32, and round once.

    initial_value  [n, hidden] float32, where the sums begin; None: 0
    """
    if initial_value is None:
        total = torch.zeros_like(data[:, 0], dtype=torch.float32)
    else:
        total = initial_value.clone()
    for k in range(data.shape[1]):
        total += data[:, k]
    return total.to(data.dtype)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Union[Tensor, tuple[Tensor, Tensor], None],
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """The sums [T, hidden] that combine returns for rows y [T, K, hidden] of all entries.

    reduce_in_local    entries on one rank are summed and rounded first
    reduce_in_scaleup  and then those of one scaleup domain
    """
    each = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _reduce(y, topk_idx.div(each, rounding_mode="floor"))
    if reduce_in_scaleup:
        y = _reduce(y, topk_idx.div(each * num_scaleup_ranks, rounding_mode="floor"))
    if bias is None:
        return ordered_accumulate(y)
    terms = bias if isinstance(bias, tuple) else (bias,)
    initial = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for term in terms:
        initial += term
    return ordered_accumulate(y, initial)


def _reduce(y: Tensor, owner: Tensor) -> Tensor:
    """Sum the entries of a token that have one owner, into the last of them. Others become 0."""
    out = torch.zeros_like(y)
    top_k = y.shape[1]
    for k in range(top_k):
        is_same = owner == owner[:, k : k + 1]
        is_last = ~is_same[:, k + 1 :].any(1)
        total = ordered_accumulate(torch.where(is_same[:, :, None], y, 0))
        out[:, k] = torch.where(is_last[:, None], total, 0)
    return out
