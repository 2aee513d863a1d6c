# SPDX-License-Identifier: Apache-2.0
"""Quantised rows and weights of a layer: what travels as e4m3, and products of such.

Forward multiplies e4m3. Gradients are those without quantising: autograd follows stand-ins, which
have the shapes of rows and weights, and no memory. In backward the gradient of the rows is a product
of e4m3, too; that of the weights is one of dequantised rows in the layer's type, since it sums over
rows, along which their blocks do not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .._abi import Blocks, Quant, Status
from .._formats import FORMATS
from .._layer import refuse
from ._autograd import _dispatch_gradients, _refuse_second_derivative, dispatch
from ._experts import grouped_mm, sum_products
from ._group import Group
from ._handle import Plan
from ._quant import quantise_rows
from ._weights import Weight, stand_in

if TYPE_CHECKING:
    from typing import Any

    from ._handle import Handle

ALIGNMENT = 16  # rows of a slab, for the products of e4m3


class Values(NamedTuple):
    """e4m3 values with their scales, and what autograd follows in their place."""

    values: Tensor
    scales: Tensor
    followed: Tensor


class Form(NamedTuple):
    """How a layer quantises, and whether it multiplies what it has dequantised."""

    group: Group
    quant: Quant
    is_dequantised: bool

    @property
    def blocks(self) -> Blocks:
        """Of weights: tiles serve both directions; MXFP8 has none."""
        return Blocks.ROWS if self.quant == Quant.MXFP8 else Blocks.TILES


def require_product(
    device: torch.device, dtype: torch.dtype, quant: Quant, is_dequantised: bool
) -> None:
    """EpError where PyTorch has no product of e4m3 for the device, unless nothing needs one."""
    if is_dequantised:
        return
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if (
        not is_hopper
        or quant not in (Quant.FP8, Quant.FP8_POW2)
        or dtype != torch.bfloat16
        or not hasattr(F, "scaled_mm")
    ):
        refuse(
            Status.UNSUPPORTED,
            "quant",
            "FP8 or FP8_POW2 with bfloat16 on a GPU of compute capability 9.0, since PyTorch has no "
            "other product of such blocks",
            f"{Quant(quant).name} with {dtype} on {device}: dequantise=True multiplies what it has "
            "dequantised",
        )


# ---- what autograd follows ----------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, plan: Plan, tokens: Tensor, topk_weights: Tensor) -> Any:
        received = dispatch(handle, tokens, plan, topk_weights)
        ctx.save_for_backward(plan.bytes)
        ctx.facts = handle, tokens.shape, topk_weights.shape
        ctx.mark_non_differentiable(received.tokens, received.scales)
        followed = stand_in(tokens, tuple(received.tokens.shape))
        return received.tokens, received.scales, followed, received.topk_weights

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad: Tensor, grad_weights: Optional[Tensor]) -> Any:
        _refuse_second_derivative("dispatch")
        (plan,) = ctx.saved_tensors
        handle, *shapes = ctx.facts
        return None, None, *_dispatch_gradients(handle, plan, grad, grad_weights, *shapes)


def dispatch_quantised(
    handle: Handle, plan: Plan, tokens: Tensor, topk_weights: Tensor
) -> tuple[Values, Tensor]:
    """Dispatch of a handle that quantises, with a gradient. Returns rows, and their weights."""
    made = _Dispatch.apply(handle, plan, tokens, topk_weights)  # type: ignore[no-untyped-call]
    return Values(*made[:3]), made[3]


def quantise_weight(form: Form, weight: Tensor, sharded: Optional[Weight]) -> Values:
    """[L, in, out], or its shard, as values [L, out, in]."""
    if sharded is not None:
        return Values(*sharded.quantised(weight, form.quant, form.blocks, transposed=True))
    with torch.no_grad():
        values, scales = quantise_rows(
            form.group, weight, quant=form.quant, blocks=form.blocks, transposed=True
        )
    return Values(values, scales, weight)


def quantise_slabs(form: Form, rows: Tensor, plan: Plan) -> Values:
    """Rows of experts, as dispatch quantises rows."""
    with torch.no_grad():
        values, scales = quantise_rows(form.group, rows, plan.totals[:1], quant=form.quant)
    return Values(values, scales, rows)


# ---- products -----------------------------------------------------------------------------------


def dequantise(values: Tensor, scales: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """What was quantised along the last dimension, in blocks of rows or in tiles."""
    block, scales = FORMATS[form.quant].block, scales.float()
    if scales.shape[-2] != values.shape[-2]:
        scales = scales.repeat_interleave(block, -2)
    blocks: Tensor = values.float().unflatten(-1, (-1, block)) * scales[..., None]
    return blocks.flatten(-2).to(dtype)


def _multiply(
    form: Form, dtype: torch.dtype, rows: Tensor, scales: Tensor, weight: Values, plan: Plan
) -> Tensor:
    """Rows [rows, in] of e4m3 by the transpose of each expert's [out, in]."""
    if form.is_dequantised:
        whole = dequantise(weight.values, weight.scales, form, dtype).mT
        return grouped_mm(dequantise(rows, scales, form, dtype), whole.contiguous(), plan)
    out = rows.new_empty((len(rows), weight.values.shape[1]), dtype=dtype)
    begin, kind = 0, F.ScalingType
    # PyTorch wants a multiple of four scales of a column of tiles.
    tiles = F.pad(weight.scales, (0, -weight.scales.shape[-1] % 4))
    for expert, count in enumerate(plan.expert_padded.tolist()):
        mine, begin = slice(begin, begin + count), begin + count
        if count:
            out[mine] = F.scaled_mm(
                rows[mine],
                weight.values[expert].t(),
                scales[mine].t().contiguous().t(),
                kind.BlockWise1x128,
                tiles[expert].t(),
                kind.BlockWise128x128,
                output_dtype=dtype,
            )
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        plan: Plan,
        rows: Values,
        weight: Values,
        followed: Tensor,
        followed_weight: Tensor,
    ) -> Tensor:
        ctx.form, ctx.rest, dtype = form, plan[2:], followed.dtype
        ctx.save_for_backward(*rows[:2], *weight[:2], *plan[:2])
        return _multiply(form, dtype, *rows[:2], weight, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _refuse_second_derivative("moe")
        values, scales, turned, tiles, *numbers = ctx.saved_tensors
        form, plan, grad = ctx.form, Plan(*numbers, *ctx.rest), grad.contiguous()
        if form.is_dequantised:
            whole = dequantise(turned, tiles, form, grad.dtype)
            grad_rows = grouped_mm(grad, whole, plan)
        else:
            grads = quantise_slabs(form, grad, plan)
            weight = Values(turned.mT.contiguous(), tiles.mT.contiguous(), turned)
            grad_rows = _multiply(form, grad.dtype, *grads[:2], weight, plan)
        rows = dequantise(values, scales, form, grad.dtype)
        return None, None, None, None, grad_rows, sum_products(rows, grad, plan)


def multiply(form: Form, rows: Values, weight: Values, plan: Plan) -> Tensor:
    """Each expert's rows by its matrix: [rows, out] of the type of what autograd follows."""
    apply = _Product.apply
    product: Tensor = apply(  # type: ignore[no-untyped-call]
        form, plan, rows, weight, rows.followed, weight.followed
    )
    return product
