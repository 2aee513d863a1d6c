# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate that sends more tokens to the first rank than to others."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["get_unbalanced_scores"]

_HALVINGS = 20
_MOST_FACTOR = 100.0
_CHOSEN = 1.0  # added to the scores of chosen experts, above all others


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Scores [T, E] float32, of whose top-k the first rank gets `ratio` times the mean of others.

    precise  tokens are dealt out to ranks so that the ratio holds as exactly as it can
    """
    _require_ratio(ratio)
    shape = num_tokens, num_experts
    if not precise:
        return _scaled(shape, num_ranks, _find_factor(shape, num_ranks, num_topk, ratio))
    scores = _uniform(shape)
    first = _deal(shape, num_ranks, num_topk, ratio)
    each = num_experts // num_ranks
    # A token takes all its experts from the first rank, or none of them, as far as these suffice.
    scores[:, :each] += torch.where(first, _CHOSEN, -_CHOSEN)[:, None]
    return scores


def _require_ratio(ratio: float) -> None:
    if ratio < 1:
        raise ValueError(f"ratio: expected at least 1, got {ratio}")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _uniform(shape: tuple[int, int]) -> Tensor:
    return torch.rand(shape, dtype=torch.float32, device=_device())


def _scaled(shape: tuple[int, int], num_ranks: int, factor: float) -> Tensor:
    """Scores below 1, those of the first rank below `factor`."""
    scores = _uniform(shape)
    scores[:, : shape[1] // num_ranks] *= factor
    return scores


def _count(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """[R] tokens that go to each rank."""
    ranks = scores.topk(num_topk, 1).indices // (scores.shape[1] // num_ranks)
    is_sent = torch.zeros((len(scores), num_ranks), dtype=torch.float32, device=scores.device)
    return is_sent.scatter_(1, ranks, 1).sum(0)


def _find_factor(shape: tuple[int, int], num_ranks: int, num_topk: int, ratio: float) -> float:
    """The factor of the first rank's scores that brings the ratio about."""
    low, high = 1.0, _MOST_FACTOR
    if ratio == 1 or num_ranks == 1:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        counts = _count(_scaled(shape, num_ranks, middle), num_ranks, num_topk)
        if counts[0] > counts[1:].mean() * ratio:
            high = middle
        else:
            low = middle
    return low


def _deal(shape: tuple[int, int], num_ranks: int, num_topk: int, ratio: float) -> Tensor:
    """[T] bool: the tokens that go to the first rank, so many that the ratio holds."""
    tokens, experts = shape
    each = experts // num_ranks
    with_first, without = _uniform(shape), _uniform(shape)
    with_first[:, :each] += _CHOSEN
    without[:, :each] -= _CHOSEN
    # How many of the other ranks a token of either kind goes to, on average.
    others = [
        float(_count(scores, num_ranks, num_topk)[1:].sum()) / max(1, (num_ranks - 1) * tokens)
        for scores in (with_first, without)
    ]
    # n tokens go there: n = ratio * (n * others[0] + (tokens - n) * others[1])
    slope = 1 - ratio * (others[0] - others[1])
    number = tokens if slope <= 0 else min(tokens, round(ratio * tokens * others[1] / slope))
    return torch.randperm(tokens, device=_device()) < number
