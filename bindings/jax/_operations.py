# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on one device: arguments are checked, and calls of _calls are made.

libep.jax.Ep describes the arguments.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._abi import Quant, ScaleOrder, Status
from .._formats import FORMATS, count_scales, scales_shape
from .._library import EpError
from ._calls import CALLS
from ._regions import axes_of, is_array, kind_of, vary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Optional, Union

    Received = Union[jax.Array, tuple[jax.Array, jax.Array]]

DISPATCHED = "libep_dispatch"
"""The name by which policies of jax.checkpoint save what dispatch returns, rows and weights."""

ROW_TYPES = ("float32", "bfloat16", "float16")
_PLAN_ARRAYS = ("bytes", "expert_counts", "expert_padded", "expert_offsets", "totals")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's routing, made by dispatch: an ordinary value, which may be saved and passed on.

    bytes           uint8, what libep reads
    expert_counts   [L] int32: rows of each local expert, without padding and lost rows
    expert_padded   [L] int32: rows of each local expert, padding included. Expert after expert they
                    fill recv_tokens from its start: the group sizes of jax.lax.ragged_dot
    expert_offsets  [L + 1] int32: first row of each expert, then the number of rows filled
    totals          [3] int32: rows filled, rows needed, slots lost to the capacity
    num_tokens      T, a Python int
    group           a number of the Ep that made it
    """

    bytes: jax.Array
    expert_counts: jax.Array
    expert_padded: jax.Array
    expert_offsets: jax.Array
    totals: jax.Array
    num_tokens: int = dataclasses.field(metadata=dict(static=True))
    group: int = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a group, by its sizes. Programs find the group by `key`."""

    key: int
    axes: tuple[str, ...]
    on_host: bool
    num_local_experts: int
    num_places: int  # P; 0: the group has no placement
    max_tokens: int
    top_k: int
    max_recv_rows: int
    max_row_bytes: int
    largest: str  # the largest row, as bootstrap got it
    plan_bytes: int
    quant: Quant
    scale_order: ScaleOrder
    grad_quant: Quant

    def dispatch(
        self,
        tokens: jax.Array,
        topk_idx: jax.Array,
        topk_weights: Optional[jax.Array],
        num_tokens: Optional[jax.Array],
        global_scale: Optional[jax.Array],
        placement: Optional[jax.Array] = None,
    ) -> tuple[Received, Optional[jax.Array], Plan]:
        self._check_routing(tokens, topk_idx, topk_weights, num_tokens)
        self._check_scale(tokens, global_scale)
        self._check_placement(placement)
        tokens, topk_idx, *others = _vary_alike(
            self.axes, tokens, topk_idx, topk_weights, global_scale
        )
        routing = _vary_alike(self.axes, topk_idx, self._place(), num_tokens, placement)
        placed = {} if placement is None else dict(placed=1)
        numbers = self._bind("prepare", *routing, outputs=self._plan_types(), **placed)
        arrays = dict(zip(_PLAN_ARRAYS, numbers))
        plan = Plan(**arrays, num_tokens=tokens.shape[0], group=self.key)
        rows, *scales = self._row_types(tokens)
        weights = [((self.max_recv_rows,), "float32")] if topk_weights is not None else []
        outputs = [rows, *weights, *scales]
        flags = dict(scaled=int(global_scale is not None), quantises=1) if scales else {}
        found = self._bind("dispatch", plan.bytes, tokens, *others, outputs=outputs, **flags)
        received = [checkpoint_name(array, DISPATCHED) for array in found]
        recv_weights = received[1] if weights else None
        return (received[0], received[-1]) if scales else received[0], recv_weights, plan

    def _row_types(self, tokens: jax.Array) -> list[tuple[tuple[int, ...], str]]:
        """Of receive rows and, if they are quantised, of their scales."""
        rows, hidden = self.max_recv_rows, tokens.shape[1]
        if self.quant == Quant.NONE:
            return [((rows, hidden), tokens.dtype.name)]
        return quantised_types(self.quant, self.scale_order, rows, hidden)

    def combine(
        self,
        expert_out: jax.Array,
        plan: Plan,
        recv_weights: Optional[jax.Array],
        *biases: jax.Array,
    ) -> jax.Array:
        self._check_rows(expert_out, recv_weights)
        shape, dtype = (plan.num_tokens, expert_out.shape[1]), expert_out.dtype.name
        for bias in biases:
            _check("combine: bias", bias, (dtype,), shape)
        operands = _vary_alike(self.axes, plan.bytes, expert_out, recv_weights, *biases)
        outputs = [(shape, dtype)]
        flags = dict(biases=len(biases))
        if self.grad_quant != Quant.NONE:
            flags.update(grad_quant=int(self.grad_quant), scale_order=int(self.scale_order))
        return self._bind("combine", *operands, outputs=outputs, **flags)[0]

    def _place(self) -> jax.Array:
        """The device's place in its group, as shard_map has it. prepare compares it on CPUs.

        On GPUs it would be in device memory, and prepare would wait for the stream to read it.
        """
        return jax.lax.axis_index(self.axes) if self.on_host else jnp.int32(0)

    def _bind(
        self, name: str, *operands: jax.Array, outputs: Sequence[Any], **attributes: int
    ) -> list[jax.Array]:
        results: list[jax.Array] = CALLS[name].bind(
            *operands, key=self.key, outputs=tuple(outputs), **attributes
        )
        return results

    def _plan_types(self) -> list[tuple[tuple[int, ...], str]]:
        experts = self.num_local_experts
        return [
            ((self.plan_bytes,), "uint8"),
            ((experts,), "int32"),
            ((experts,), "int32"),
            ((experts + 1,), "int32"),
            ((3,), "int32"),
        ]

    def check_plan(self, name: str, plan: Plan) -> None:
        """Refuse what is no plan, or that of another group."""
        if not isinstance(plan, Plan):
            raise EpError(
                Status.TYPE, f"{name}: plan: expected the Plan of dispatch, got {kind_of(plan)}"
            )
        if plan.group != self.key:
            raise EpError(
                Status.FOREIGN,
                f"{name}: plan: expected one of this Ep's dispatch, got another Ep's",
            )

    def _check_routing(
        self,
        tokens: jax.Array,
        topk_idx: jax.Array,
        topk_weights: Optional[jax.Array],
        num_tokens: Optional[jax.Array],
    ) -> None:
        _check("dispatch: tokens", tokens, ROW_TYPES, (None, None))
        self._check_row("dispatch: tokens", tokens)
        count = tokens.shape[0]
        if count > self.max_tokens:
            raise EpError(
                Status.TOKENS,
                f"dispatch: tokens: expected at most {self.max_tokens} "
                f"tokens (max_tokens), got {count}",
            )
        _check("dispatch: topk_idx", topk_idx, ("int32", "int64"), (count, self.top_k))
        if topk_weights is not None:
            _check("dispatch: topk_weights", topk_weights, ("float32",), (count, self.top_k))
        if num_tokens is not None:
            _check("dispatch: num_tokens", num_tokens, ("int32", "int64"), (1,))

    def _check_scale(self, tokens: jax.Array, global_scale: Optional[jax.Array]) -> None:
        """Check the global scale, and that tokens can be quantised."""
        if (global_scale is None) == (self.quant == Quant.NVFP4):
            expected, got = ("one", "None") if global_scale is None else ("None", "one")
            raise EpError(
                Status.NULL if global_scale is None else Status.UNSUPPORTED,
                f"dispatch: global_scale: expected {expected}, since bootstrap's quant is "
                f"{self.quant.name}, got {got}",
            )
        if global_scale is not None:
            _check("dispatch: global_scale", global_scale, ("float32",), (1,))
        unit = FORMATS[self.quant].unit if self.quant != Quant.NONE else 1
        if tokens.shape[1] % unit:
            raise EpError(
                Status.ROW_BYTES,
                f"dispatch: tokens: expected a multiple of {unit} elements where rows are "
                f"quantised, got {tokens.shape[1]}",
            )

    def _check_placement(self, placement: Optional[jax.Array]) -> None:
        if (placement is None) == (self.num_places > 0):
            expected, got = ("one", "None") if placement is None else ("None", "one")
            raise EpError(
                Status.NULL if placement is None else Status.UNSUPPORTED,
                f"dispatch: placement: expected {expected}, since bootstrap has "
                f"{'a' if placement is None else 'no'} num_physical, got {got}",
            )
        if placement is not None:
            _check("dispatch: placement", placement, ("int32",), (self.num_places,))

    def _check_rows(self, expert_out: jax.Array, recv_weights: Optional[jax.Array]) -> None:
        _check("combine: expert_out", expert_out, ROW_TYPES, (self.max_recv_rows, None))
        self._check_row("combine: expert_out", expert_out)
        if recv_weights is not None:
            _check("combine: recv_weights", recv_weights, ("float32",), (self.max_recv_rows,))

    def _check_row(self, name: str, array: jax.Array) -> None:
        size = array.shape[1] * array.dtype.itemsize
        if size % 16 or not 16 <= size <= self.max_row_bytes:
            raise EpError(
                Status.ROW_BYTES,
                f"{name}: expected rows of a multiple of 16 bytes up to {self.max_row_bytes} "
                f"(bootstrap's hidden, {self.largest}), got {size} ({array.shape[1]} of "
                f"{array.dtype.name})",
            )


def quantised_types(
    quant: Quant, order: ScaleOrder, rows: int, hidden: int
) -> list[tuple[tuple[int, ...], str]]:
    """Of quantised rows, and of their scales."""
    form = FORMATS[quant]
    kind = "float32" if form.scales == "float32" else "uint8"
    shape = scales_shape(order, (rows,), count_scales(quant, hidden))
    return [((rows, hidden // form.packed), form.values), (shape, kind)]


def dequantise(
    quant: Quant, order: ScaleOrder, values: jax.Array, scales: jax.Array, dtype: Any
) -> jax.Array:
    """The rows [rows, H] for which e4m3 values and their scales stand."""
    if order == ScaleOrder.BY_COLUMN:
        scales = scales.T
    if scales.dtype == jnp.uint8:  # exponents of normal numbers
        scales = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    each = jnp.repeat(scales, FORMATS[quant].block, axis=1)[:, : values.shape[1]]
    return (values.astype(jnp.float32) * each).astype(dtype)


def take_biases(bias: Any) -> tuple[jax.Array, ...]:
    """Up to two biases."""
    given = tuple(bias) if isinstance(bias, (tuple, list)) else () if bias is None else (bias,)
    if len(given) > 2:
        raise EpError(Status.SHAPE, f"combine: bias: expected up to 2 arrays, got {len(given)}")
    return given


def _check(name: str, array: jax.Array, types: tuple[str, ...], shape: tuple[Any, ...]) -> None:
    if not is_array(array):
        raise EpError(Status.TYPE, f"{name}: expected an array, got {kind_of(array)}")
    if array.dtype.name not in types:
        raise EpError(Status.TYPE, f"{name}: expected {' or '.join(types)}, got {array.dtype.name}")
    given = array.shape
    if len(given) != len(shape) or any(w not in (None, g) for g, w in zip(given, shape)):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise EpError(Status.SHAPE, f"{name}: expected shape [{wanted}], got {list(given)}")


# ---- varying axes --------------------------------------------------------------------------------

# shard_map knows over which mesh axes a value may vary. What a call returns varies over the axis of
# the group, and over those over which any operand varies. So operands are first made to vary alike,
# which also gives their gradients the sums that they need.


def _vary_alike(axes: tuple[str, ...], *arrays: Optional[jax.Array]) -> list[jax.Array]:
    """The arrays without None, varying over the same axes."""
    given = [array for array in arrays if array is not None]
    union = sorted(frozenset(axes).union(*map(axes_of, given)))
    return [vary(array, union) for array in given]
