# SPDX-License-Identifier: Apache-2.0
"""Sharded weights as torch tensors: gathered for use, and their gradients reduced to shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import AmaxScope, Blocks, Quant, Status
from .._library import EpError
from .._weight import Weight as CoreWeight
from ._autograd import _refuse_second_derivative
from ._calls import TYPES
from ._group import current_stream
from ._quant import scale_type

if TYPE_CHECKING:
    from typing import Any, Optional

    from torch import Tensor

    from .._mesh import Spec
    from .._weight import MeshComm


class Weight(CoreWeight):
    """A weight whose shards the ranks of a mesh store. See libep.Weight.

    dtype  of shards, gathered weights and gradients
    """

    def __init__(
        self,
        comm: MeshComm,
        name: str,
        spec: Spec,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        **fields: Any,
    ) -> None:
        if dtype not in TYPES:
            raise TypeError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
        kind = TYPES[dtype]
        super().__init__(comm, name, spec, shape, type=kind, reduced_type=kind, **fields)
        self.dtype = dtype

    def whole(self, shard: Tensor) -> Tensor:
        """The weight as this rank uses it. Differentiable. Collective, forward and backward."""
        made: Tensor = _Gather.apply(self, shard)  # type: ignore[no-untyped-call]
        return made

    def quantised(
        self, shard: Tensor, quant: Quant, blocks: Blocks, transposed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weight as e4m3 values and scales, which is what travels, and a stand-in for it.

        The stand-in has the shape and type of the weight, but no memory. A gradient that it gets is
        that of the weight without quantising, and is reduced to the shard.
        """
        apply: Any = _GatherQuantised.apply
        made: tuple[Tensor, Tensor, Tensor] = apply(self, shard, (quant, blocks, transposed))
        return made

    def max_(self, amax: Tensor, per_expert: bool = False) -> Tensor:
        """Reduce magnitudes, [1] or [stored[0]] float32, to their maximum, in place. Collective."""
        scope = AmaxScope.EXPERT if per_expert else AmaxScope.TENSOR
        self.amax(scope, amax=amax, stream=_stream(amax))
        return amax


def _stream(tensor: Tensor) -> int:
    return current_stream(tensor.get_device() if tensor.is_cuda else -1)


def _space(like: Tensor, size: int) -> Optional[Tensor]:
    return like.new_empty(size, dtype=torch.uint8) if size else None


def _reduce(weight: Weight, grad: Tensor) -> Tensor:
    _refuse_second_derivative("weight")
    grad = grad.contiguous()
    out = grad.new_empty(weight.sharding.stored)
    space = _space(grad, weight.sizes().reduce_workspace)
    weight.reduce(grad, False, space, out=out, stream=_stream(grad))
    return out


def stand_in(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros without memory of its own, for what autograd follows."""
    return like.new_zeros(()).expand(shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Weight, shard: Tensor) -> Tensor:
        ctx.weight, sizes = weight, weight.sizes()
        _check(weight, shard)
        out = shard.new_empty(sizes.shape)
        space = _space(shard, sizes.gather_workspace)
        weight.gather(None, shard.contiguous(), space, out=out, stream=_stream(shard))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _reduce(ctx.weight, grad)


class _GatherQuantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Weight, shard: Tensor, given: Any) -> Any:
        quant, blocks, transposed = given
        form = CoreWeight.form(quant, blocks, transposed)
        ctx.weight, sizes = weight, weight.sizes(form)
        _check(weight, shard)
        values = shard.new_empty(sizes.shape, dtype=torch.float8_e4m3fn)
        scales = shard.new_empty(sizes.scale_shape or (), dtype=scale_type(quant))
        space = _space(shard, sizes.gather_workspace)
        shard = shard.contiguous()
        weight.gather(form, shard, space, out=values, scales=scales, stream=_stream(shard))
        ctx.mark_non_differentiable(values, scales)
        return values, scales, stand_in(shard, weight.sharding.used)

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad: Tensor) -> Any:
        return None, _reduce(ctx.weight, grad), None


def _check(weight: Weight, shard: Tensor) -> None:
    """Where the C function would speak of a tensor, EpError speaks of the weight's shard."""
    if tuple(shard.shape) != weight.sharding.stored or shard.dtype != weight.dtype:
        raise EpError(
            Status.SHAPE,
            f"{weight.name}: expected a shard of {list(weight.sharding.stored)} {weight.dtype}, got "
            f"{list(shard.shape)} {shard.dtype}",
        )
