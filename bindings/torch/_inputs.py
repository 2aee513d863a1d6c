# SPDX-License-Identifier: Apache-2.0
"""What dispatch is given, checked before it prepares: a refused call took no part.

The library makes the same checks, after prepare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import MAX_DIMS, Status
from .._formats import FORMATS
from .._library import EpError
from . import _checks
from ._calls import (
    ROW_UNIT,
    SCALE_UNIT,
    TYPES,
    WEIGHTS,
    is_here,
    refuse_memory,
    refuse_strides,
)
from ._quant import row_values

if TYPE_CHECKING:
    from typing import NoReturn, Optional

    from torch import Tensor

    from ._handle import Handle

    # tokens, topk_weights, scales, recv_tokens
    Inputs = tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]

_SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)


def are_plain(handle: Handle, topk_idx: Tensor, tokens: Tensor, weights: Optional[Tensor]) -> bool:
    """A quick test that nothing is to be refused. Arguments may be anything."""
    try:
        rows, width = tokens.shape
        shape, kind = topk_idx.shape, tokens.dtype
        size = width * kind.itemsize
        return (
            kind in TYPES
            and is_here(handle, tokens)
            and rows == shape[0]
            and not handle.quantises
            and size % ROW_UNIT == 0
            and 0 < size <= handle.max_row_bytes
            and tokens.data_ptr() % ROW_UNIT == 0
            and (
                weights is None
                or (
                    weights.shape == shape
                    and weights.dtype is torch.float32
                    and weights.layout is torch.strided
                    and is_here(handle, weights)
                )
            )
        )
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return False  # other types or dimensions, or no memory


def require(handle: Handle, topk_idx: Tensor, inputs: Inputs, has_count: bool) -> None:
    """Raise what dispatch would raise after prepare, as far as this rank can tell.

    has_count  whether num_tokens is given: then tokens may have other rows than topk_idx
    """
    tokens, weights, scales, recv = inputs
    _checks.require_usable("topk_idx", topk_idx)
    for name, value in zip(("tokens", "topk_weights", "scales", "recv_tokens"), inputs):
        if value is not None:
            _checks.require_usable(name, value)
            refuse_memory(handle, value, name)
            _require_dims(name, value, 1, MAX_DIMS)
    if topk_idx.ndim != 2:
        return  # prepare refuses it
    _require_tokens(handle, topk_idx, tokens, has_count)
    if weights is not None:
        _require_weights(topk_idx, weights, has_count)
    if scales is not None:
        _require_scales(handle, topk_idx, scales, has_count)
    if recv is not None:
        _require_recv_tokens(handle, tokens, recv)


def _refuse(status: Status, name: str, expected: str, got: object) -> NoReturn:
    raise EpError(status, f"dispatch: {name}: expected {expected}, got {got}")


def _require_dims(name: str, tensor: Tensor, least: int, most: int) -> None:
    if not least <= tensor.ndim <= most:
        words = str(least) if least == most else f"{least} to {most}"
        _refuse(Status.NDIM, name, f"{words} dimensions", tensor.ndim)


def _require_rows(name: str, tensor: Tensor, topk_idx: Tensor, has_count: bool) -> None:
    _require_dims(name, tensor, 2, 2)
    if not has_count and tensor.shape[0] != topk_idx.shape[0]:
        rows = f"as many rows as topk_idx, {topk_idx.shape[0]}"
        _refuse(Status.SHAPE, name, rows, tensor.shape[0])


def _require_bytes(name: str, tensor: Tensor, unit: int, most: int) -> None:
    size = tensor.shape[-1] * tensor.dtype.itemsize
    if size % unit or not unit <= size <= most:
        expected = f"rows of a multiple of {unit} in {unit} .. {most} bytes"
        _refuse(Status.ROW_BYTES, name, expected, size)


def _require_start(name: str, tensor: Tensor, unit: int) -> None:
    """Refuse rows at another address. Others than contiguous ones are copied, and so start well."""
    address = tensor.data_ptr()
    if address % unit and tensor.is_contiguous():
        expected = f"memory on a multiple of {unit} bytes, such as that of clone()"
        _refuse(Status.ADDRESS, name, expected, hex(address))


def _require_tokens(handle: Handle, topk_idx: Tensor, tokens: Tensor, has_count: bool) -> None:
    _require_rows("tokens", tokens, topk_idx, has_count)
    _require_bytes("tokens", tokens, ROW_UNIT, handle.max_row_bytes)
    _require_start("tokens", tokens, ROW_UNIT)
    if handle.quantises:
        if tokens.dtype not in _SUMMABLE:
            _refuse(Status.TYPE, "tokens", "bfloat16, float16 or float32", tokens.dtype)
        unit = FORMATS[handle.quant].unit
        if tokens.shape[1] % unit:
            expected = f"a multiple of {unit} elements where rows are quantised"
            _refuse(Status.ROW_BYTES, "tokens", expected, tokens.shape[1])


def _require_weights(topk_idx: Tensor, weights: Tensor, has_count: bool) -> None:
    _require_rows("topk_weights", weights, topk_idx, has_count)
    if weights.shape[1] != topk_idx.shape[1]:
        columns = f"as many columns as topk_idx, {topk_idx.shape[1]}"
        _refuse(Status.SHAPE, "topk_weights", columns, weights.shape[1])
    if weights.dtype not in WEIGHTS:
        _refuse(Status.TYPE, "topk_weights", "float32, bfloat16 or float16", weights.dtype)


def _require_scales(handle: Handle, topk_idx: Tensor, scales: Tensor, has_count: bool) -> None:
    most = handle.group.fields.get("max_scale_bytes", 0)
    if handle.quantises:
        _refuse(Status.UNSUPPORTED, "scales", "None on a handle that quantises", "a tensor")
    if most == 0:
        expected = "None, since the group's max_scale_bytes is 0"
        _refuse(Status.ROW_BYTES, "scales", expected, "a tensor")
    _require_rows("scales", scales, topk_idx, has_count)
    _require_bytes("scales", scales, SCALE_UNIT, most)
    _require_start("scales", scales, SCALE_UNIT)


def _require_recv_tokens(handle: Handle, tokens: Tensor, recv: Tensor) -> None:
    width, dtype = tokens.shape[-1], tokens.dtype
    if handle.quantises:
        width, dtype = row_values(handle.quant, width)
    if recv.dtype != dtype:
        _refuse(Status.TYPE, "recv_tokens", str(dtype), recv.dtype)
    refuse_strides(recv, "recv_tokens")
    _require_start("recv_tokens", recv, ROW_UNIT)
    lead = handle.lead(handle.capacity)
    _require_dims("recv_tokens", recv, len(lead) + 1, len(lead) + 1)
    if recv.shape[-1] != width:
        expected = f"H = {width} in the last dimension"
        _refuse(Status.SHAPE, "recv_tokens", expected, recv.shape[-1])
    if handle.has_blocks:
        if tuple(recv.shape[:-1]) != lead:
            _refuse(Status.SHAPE, "recv_tokens", f"{lead} rows", tuple(recv.shape[:-1]))
    elif recv.shape[0] < handle.capacity:  # 0 with exact sizing
        expected = f"at least {handle.capacity} rows"
        _refuse(Status.BUFFER_SIZE, "recv_tokens", expected, recv.shape[0])
