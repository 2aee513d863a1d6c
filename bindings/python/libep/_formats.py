# SPDX-License-Identifier: Apache-2.0
"""Rows that dispatch quantises: the one table from which PyTorch and JAX make their arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ._abi import Quant, ScaleOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

_TILE = (128, 4)  # rows and scales of a tile of ScaleOrder.SWIZZLED


class Format(NamedTuple):
    """A line of the table."""

    values: str
    """The type of a row's values."""

    packed: int
    """Elements in one of them."""

    block: int
    """Elements that share a scale."""

    scales: str
    """The type of scales. What a framework lacks is uint8 there."""

    unit: int
    """A row has a multiple of so many elements."""


FORMATS = {
    Quant.FP8: Format("float8_e4m3fn", 1, 128, "float32", 16),
    Quant.FP8_UE8M0: Format("float8_e4m3fn", 1, 128, "float8_e8m0fnu", 16),
    Quant.MXFP8: Format("float8_e4m3fn", 1, 32, "float8_e8m0fnu", 16),
    Quant.FP8_POW2: Format("float8_e4m3fn", 1, 128, "float32", 16),
    Quant.NVFP4: Format("uint8", 2, 16, "uint8", 32),
}


def count_scales(quant: Quant, hidden: int) -> int:
    """Scales of a row of `hidden` elements."""
    return -(-hidden // FORMATS[quant].block)


def scales_shape(order: ScaleOrder, lead: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of recv_scales: `lead` is that of rows, without their elements."""
    *lead, rows = lead
    if order == ScaleOrder.BY_COLUMN:
        return (*lead, count, rows)
    if order == ScaleOrder.SWIZZLED:  # whole tiles
        length, width = _TILE
        return (*lead, -(-rows // length) * length, -(-count // width) * width)
    return (*lead, rows, count)
