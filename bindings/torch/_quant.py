# SPDX-License-Identifier: Apache-2.0
"""Quantised values and their scales: types, shapes, and quantising what experts compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Blocks, Quant, ScaleOrder, Status
from .._formats import FORMATS, count_scales
from .._library import EpError
from . import _calls, _checks

if TYPE_CHECKING:
    from typing import Optional

    from torch import Tensor

    from ._group import Group
    from ._handle import Handle

    Scaled = dict[str, Tensor]

_KINDS = {  # types of values and of scales
    quant: (getattr(torch, each.values), getattr(torch, each.scales, torch.uint8))
    for quant, each in FORMATS.items()
}


def row_scales(quant: Quant, hidden: int) -> tuple[int, torch.dtype]:
    """Scales of a row of `hidden` elements, and their type."""
    return count_scales(quant, hidden), _KINDS[quant][1]


def row_values(quant: Quant, hidden: int) -> tuple[int, torch.dtype]:
    """Elements of a tensor that a row of `hidden` elements becomes, and their type."""
    return hidden // FORMATS[quant].packed, _KINDS[quant][0]


def scale_type(quant: Quant) -> torch.dtype:
    """The type of a quantisation's scales."""
    return _KINDS[quant][1]


def as_scaled(handle: Handle, call: str, global_scale: Optional[Tensor]) -> Scaled:
    """The last argument of a dispatch; none without a global scale.

    EpError where one is missing, or not used. The library says the same, after prepare.
    """
    if (global_scale is None) == (handle.quant == Quant.NVFP4):
        expected, got = ("one", "None") if global_scale is None else ("None", "one")
        raise EpError(
            Status.NULL if global_scale is None else Status.UNSUPPORTED,
            f"{call}: global_scale: expected {expected}, since the handle's quant is "
            f"{Quant(handle.quant).name}, got {got}",
        )
    return {} if global_scale is None else {"global_scale": global_scale}


class GradientForm(NamedTuple):
    """How the gradients of a handle's combine travel."""

    quant: Quant
    order: ScaleOrder
    scales_shape: tuple[int, ...]

    @classmethod
    def of(cls, handle: Handle, shape: tuple[int, ...]) -> GradientForm:
        """For rows of this shape."""
        count, _ = row_scales(handle.grad_quant, shape[-1])
        rows = handle.scales_shape(shape[-2], count)
        return cls(Quant(handle.grad_quant), ScaleOrder(handle.scale_order), rows)

    def make(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """What combine_backward writes: values of the rows, and scales."""
        values, scales = _KINDS[self.quant]
        return like.new_empty(shape, dtype=values), like.new_empty(self.scales_shape, dtype=scales)

    def dequantise(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows for which they stand."""
        if self.order == ScaleOrder.BY_COLUMN:
            scales = scales.mT
        each = scales.float().repeat_interleave(FORMATS[self.quant].block, -1)
        return (values.float() * each[..., : values.shape[-1]]).to(dtype)


def _form(quant: Quant) -> tuple[int, torch.dtype]:
    names = [known.name for known in FORMATS if known != Quant.NVFP4]
    if quant not in FORMATS or quant == Quant.NVFP4:
        raise TypeError(f"quant: expected one of {', '.join(names)}, got {quant!r}")
    return FORMATS[quant].block, _KINDS[quant][1]


def _require_rows(rows: Tensor) -> None:
    _checks.require_usable("rows", rows)
    if rows.ndim not in (2, 3):
        raise EpError(Status.NDIM, f"rows: expected 2 or 3 dimensions, got {rows.ndim}")
    if torch.is_grad_enabled() and rows.requires_grad:
        raise EpError(
            Status.UNSUPPORTED,
            "rows: expected a tensor without gradient, got one that requires it: call "
            "quantise_rows under torch.no_grad(), or detach it",
        )


def quantise_rows(
    group: Group,
    rows: Tensor,
    num_rows: Optional[Tensor] = None,
    *,
    quant: Quant = Quant.FP8,
    blocks: Blocks = Blocks.ROWS,
    transposed: bool = False,
    scale_order: ScaleOrder = ScaleOrder.BY_ROW,
) -> tuple[Tensor, Tensor]:
    """Quantise receive rows, such as activations between the experts' GEMMs. Local; no gradient.

    rows         [N, H], slabs one after the other; or [L, P, H], batched; bfloat16, float16 or
                 float32
    num_rows     int32 or int64: how many rows there are, [1] (Plan.totals[:1]) or [L]
                 (Plan.expert_counts); what other rows would become is not written. None: all.
    blocks       ROWS: a scale for 128 elements (MXFP8: 32) along the last dimension of the result;
                 TILES: for 128 x 128 of its last two
    transposed   swap the last two dimensions: for a GEMM that sums over rows
    scale_order  BY_COLUMN: swap the last two dimensions of the scales

    Returns (values, scales): float8_e4m3fn, and float32 or float8_e8m0fnu. ep_quant.h gives their
    shapes. EpError ALIGNMENT if a block would have rows of two experts.
    """
    block, dtype = _form(quant)
    _require_rows(rows)
    *lead, first, last = rows.shape
    if transposed:
        first, last = last, first
    shape = [-(-first // block) if blocks == Blocks.TILES else first, -(-last // block)]
    if scale_order == ScaleOrder.BY_COLUMN:
        shape.reverse()
    values = rows.new_empty((*lead, first, last), dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((*lead, *shape), dtype=dtype)
    form = dict(quant=quant, blocks=blocks, transposed=transposed, scale_order=scale_order)
    _calls.quantise_rows(group, rows, num_rows, values, scales, form)
    return values, scales
