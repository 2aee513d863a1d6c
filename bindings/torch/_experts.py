# SPDX-License-Identifier: Apache-2.0
"""The products of experts: rows that dispatch delivers, slab after slab, by an expert's matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._handle import Plan

if TYPE_CHECKING:
    from typing import Any, Optional

    from torch import Tensor

GROUPED_ALIGNMENT = 8
"""Rows of a slab, of which PyTorch's grouped product wants a multiple: 16 bytes of bfloat16, in its
gradient of the weights."""


def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has one kernel for the products of all experts, whose bounds lie on the
    device."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def grouped_mm(rows: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """Multiply the rows of each local expert by its matrix: [rows, in] by [L, in, out].

    Rows behind the last slab are not multiplied: what stands there in the result is zero, or with
    PyTorch's grouped product anything.
    """
    if has_grouped(rows.device, rows.dtype):
        return F.grouped_mm(rows, weight, offs=plan.expert_ends)
    counts = plan.expert_padded.tolist()
    parts = torch.split(rows, [*counts, len(rows) - sum(counts)])
    tail = rows.new_zeros(len(parts[-1]), weight.shape[-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight)] + [tail])


def sum_slabs(rows: Tensor, plan: Plan) -> Tensor:
    """The sum of each local expert's rows, [L, out]."""
    if has_grouped(rows.device, rows.dtype):
        ones = rows.new_ones(len(rows), GROUPED_ALIGNMENT)  # 16 bytes of a row, whatever the rows
        return F.grouped_mm(ones.t(), rows, offs=plan.expert_ends)[:, 0]
    counts = plan.expert_padded.tolist()
    parts = torch.split(rows, [*counts, len(rows) - sum(counts)])[:-1]
    return torch.stack([part.sum(0, dtype=torch.float32) for part in parts]).to(rows.dtype)


def sum_products(rows: Tensor, grads: Tensor, plan: Plan) -> Tensor:
    """For each local expert its rows, transposed, by the gradients of what they became."""
    if has_grouped(rows.device, rows.dtype):
        return F.grouped_mm(rows.t(), grads, offs=plan.expert_ends)
    counts = plan.expert_padded.tolist()
    sizes = [*counts, len(rows) - sum(counts)]
    pairs = zip(torch.split(rows, sizes)[:-1], torch.split(grads, sizes))
    return torch.stack([part.t() @ grad for part, grad in pairs])


class _Spread(torch.autograd.Function):
    """A row of bias [L, out] for each of so many rows: that of its expert."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, plan: Plan, rows: int) -> Tensor:
        ctx.save_for_backward(*plan[:2])
        ctx.rest = plan[2:]
        numbers = torch.arange(rows, device=bias.device, dtype=torch.int32)
        experts = torch.searchsorted(plan.expert_ends, numbers, right=True)
        return bias[experts.clamp_(max=len(bias) - 1)]  # anything behind the last slab

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sum_slabs(grad.contiguous(), Plan(*ctx.saved_tensors, *ctx.rest)), None, None


def add_bias(rows: Tensor, bias: Tensor, plan: Plan, factors: Optional[Tensor] = None) -> Tensor:
    """rows plus, for each row, its expert's [out] of bias [L, out], times factors [rows]."""
    added: Tensor = _Spread.apply(bias, plan, len(rows))  # type: ignore[no-untyped-call]
    return rows + (added if factors is None else (added * factors[:, None]).to(rows.dtype))


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 F], gate first."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up
