# SPDX-License-Identifier: Apache-2.0
"""The arithmetic by which DeepEP's own programs check results."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "hash_tensor",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]

_BLOCK = 128  # elements that have one scale
_LARGEST = 448.0  # of e4m3
_LEAST = 1e-4  # magnitude of a block, for its scale
_MANTISSA_BITS = 23  # of float32


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The least multiple of y that is at least x."""
    return ceil_div(x, y) * y


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <a, b> / (<a, a> + <b, b>) of a = x + 1 and b = y + 1: 0 for equal ones."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def _blocks(x: Tensor) -> Tensor:
    """[rows, blocks, 128] float32 of [rows, hidden]; the last block is filled up with zeros."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % _BLOCK))
    return padded.view(x.shape[0], -1, _BLOCK)


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows: float8_e4m3fn [rows, hidden], and float32 scales [rows, hidden / 128]."""
    blocks = _blocks(x)
    largest = blocks.abs().amax(2).clamp(min=_LEAST)
    values = (blocks * (_LARGEST / largest)[:, :, None]).to(torch.float8_e4m3fn)
    return values.view(x.shape[0], -1)[:, : x.shape[1]].contiguous(), largest / _LARGEST


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """The bfloat16 rows of quantised ones.

    x_scales  one for 128 elements: float32, or int32 that hold four exponents (UE8M0) each
    """
    rows, hidden = x_fp8.shape
    if rows == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = x_scales.reshape(-1).view(torch.uint8).int()
        x_scales = (exponents << _MANTISSA_BITS).view(torch.float32)
    values = _blocks(x_fp8) * x_scales.reshape(rows, -1, 1)
    return values.view(rows, -1)[:, :hidden].to(torch.bfloat16).contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Keep each number of a row once, in descending order; then comes -1.

    x  [rows, K] integers below num_slots; negative: none
    """
    rows, width = x.shape
    named = x.masked_fill(x < 0, num_slots)
    counts = x.new_zeros((rows, num_slots + 1)).scatter_add_(1, named, torch.ones_like(named))
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    numbers = torch.where(counts[:, :num_slots] > 0, numbers, -1).sort(1, descending=True).values
    kept = min(num_slots, width)
    x.fill_(-1)
    x[:, :kept] = numbers[:, :kept]


def hash_tensor(t: Tensor) -> int:
    """The sum of a tensor's words of 32 bits."""
    return int(t.reshape(-1).view(torch.int32).sum())
