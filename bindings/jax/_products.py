# SPDX-License-Identifier: Apache-2.0
"""The products of experts: rows that dispatch delivers, slab after slab, by each expert's matrix.

jax.lax.ragged_dot computes them everywhere. But on GPUs XLA makes of it a product of all rows with
all experts, and of its gradient, too (jaxlib 0.11.2). JAX has grouped kernels for Hopper in
jax.experimental.pallas.ops.gpu, which need absl, a package that JAX does not install, and multiply
rows that only pad. So there are two kernels here, in Pallas for Triton, which jaxlib compiles: each
block of rows lies in one slab, and blocks behind the last slab are not multiplied.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as compiler
except ImportError:  # of a jaxlib without GPUs
    compiler = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing import Any

_WIDE, _DEEP = 128, 64  # columns of a block, and elements that a step sums over
_MOST = 2**31 - 1  # elements of an array, whose places are int32
_TYPES = ("bfloat16", "float16")


def rows_of_block(alignment: int) -> int:
    """Rows of a block: the slabs' alignment, up to 128; 0 if it is too small for the kernels."""
    return next((rows for rows in (128, 64) if alignment % rows == 0), 0)


def has_kernels(device: Any, alignment: int, rows: Any, weights: Any) -> bool:
    """Whether the kernels can multiply: on Hopper, with slabs and matrices of whole blocks."""
    capability = getattr(device, "compute_capability", None)  # of GPUs alone, a text
    if compiler is None or capability is None or float(capability) < 9:
        return False
    lengths = [length % _WIDE for length in weights.shape[1:]]
    block = rows_of_block(alignment)
    has_blocks = block > 0 and rows.shape[0] % block == 0 and not any(lengths)
    if max(rows.size, weights.size, rows.shape[0] * weights.shape[2]) > _MOST:
        return False
    return has_blocks and rows.dtype == weights.dtype and rows.dtype.name in _TYPES


def _shape(like: jax.Array, shape: tuple[int, ...]) -> Any:
    """What pallas_call takes as the type of an output, which varies over the axes of `like`."""
    kind: Any = jax.typeof(like)
    name = "manual_axis_type" if hasattr(kind, "manual_axis_type") else "vma"
    return jax.ShapeDtypeStruct(shape, like.dtype, **{name: getattr(kind, name)})


def _call(kernel: Any, grid: int, out: Any, interpret: bool) -> Any:
    options: Any = dict(out_shape=out, grid=(grid,), interpret=interpret)
    if compiler is not None:
        options["compiler_params"] = compiler.CompilerParams(num_warps=8, num_stages=4)
    return pl.pallas_call(kernel, **options)


def _multiply(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, block: int, turned: bool, interpret: bool
) -> jax.Array:
    """Rows by their experts' matrices, or `turned` by the transposed ones."""
    experts, depth, width = weights.shape
    if turned:
        depth, width = width, depth
    count, columns = rows.shape[0] // block, width // _WIDE
    first = jnp.arange(count, dtype=jnp.int32) * block
    # The expert of each block of rows; `experts` behind the last slab.
    owner = jnp.searchsorted(jnp.cumsum(sizes), first, side="right").astype(jnp.int32)

    def kernel(owner_ref: Any, rows_ref: Any, weights_ref: Any, out_ref: Any) -> None:
        # Neighbours share a block of rows, and blocks of an expert follow one another.
        place = pl.program_id(0)
        number, column = place // columns, place % columns
        expert = owner_ref[number]
        mine = pl.ds(number * block, block)
        wide = pl.ds(column * _WIDE, _WIDE)

        @pl.when(expert < experts)
        def _() -> None:
            def step(index: Any, total: Any) -> Any:
                deep = pl.ds(index * _DEEP, _DEEP)
                part = (
                    weights_ref[expert, wide, deep].T if turned else weights_ref[expert, deep, wide]
                )
                return total + compiler.dot(rows_ref[mine, deep], part)

            zeros = jnp.zeros((block, _WIDE), jnp.float32)
            total = jax.lax.fori_loop(0, depth // _DEEP, step, zeros)
            out_ref[mine, wide] = total.astype(out_ref.dtype)

    out = _shape(rows, (rows.shape[0], width))
    result: jax.Array = _call(kernel, count * columns, out, interpret)(owner, rows, weights)
    return result


def _sum_slabs(
    rows: jax.Array, grads: jax.Array, sizes: jax.Array, block: int, interpret: bool
) -> jax.Array:
    """For each expert its rows, transposed, by the gradients of what they became."""
    experts, height, width = len(sizes), rows.shape[1], grads.shape[1]
    down, across = height // _WIDE, width // _WIDE
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    starts = ends - sizes.astype(jnp.int32)

    def kernel(starts_ref: Any, ends_ref: Any, rows_ref: Any, grads_ref: Any, out_ref: Any) -> None:
        place = pl.program_id(0)
        expert, tile = place // (down * across), place % (down * across)
        high = pl.ds(tile // across * _WIDE, _WIDE)
        wide = pl.ds(tile % across * _WIDE, _WIDE)

        def step(index: Any, total: Any) -> Any:
            deep = pl.ds(index * _DEEP, _DEEP)
            return total + compiler.dot(rows_ref[deep, high].T, grads_ref[deep, wide])

        zeros = jnp.zeros((_WIDE, _WIDE), jnp.float32)
        bounds = starts_ref[expert] // _DEEP, ends_ref[expert] // _DEEP
        total = jax.lax.fori_loop(*bounds, step, zeros)
        out_ref[expert, high, wide] = total.astype(out_ref.dtype)

    out = _shape(rows, (experts, height, width))
    tiles = experts * down * across
    result: jax.Array = _call(kernel, tiles, out, interpret)(starts, ends, rows, grads)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_dot(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, block: int, interpret: bool = False
) -> jax.Array:
    """jax.lax.ragged_dot by the kernels. Rows behind the last slab become anything.

    rows [rows, in], weights [L, in, out], sizes [L] int32, multiples of `block`, 64 or 128 rows
    """
    return _multiply(rows, weights, sizes, block, False, interpret)


def _forward(rows: Any, weights: Any, sizes: Any, block: int, interpret: bool) -> Any:
    return _multiply(rows, weights, sizes, block, False, interpret), (rows, weights, sizes)


def _backward(block: int, interpret: bool, kept: Any, grads: jax.Array) -> Any:
    rows, weights, sizes = kept
    return (
        _multiply(grads, weights, sizes, block, True, interpret),
        _sum_slabs(rows, grads, sizes, block, interpret),
        None,
    )


grouped_dot.defvjp(_forward, _backward)
