# SPDX-License-Identifier: Apache-2.0
"""Sharded weights of experts, [E, ...]: gathered for use, their gradients reduce-scattered.

The rules are those of docs/mesh.md. The first dimension of a weight is sharded by the axes of the
group, which stay. Of the other axes, those that split the tokens are gathered: along them, devices
have other tokens and the same experts. The rest, as in tensor parallelism, stay.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._abi import Status
from .._library import EpError
from ._regions import Regions, is_array, kind_of, product, spec_axes, vary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

BLOCK = 128  # elements along the last dimension that share a scale
_LARGEST = 448.0  # of e4m3
_LEAST_AMAX = 2.0**-100


Steps = tuple[tuple[int, tuple[str, ...]], ...]
"""Dimensions, and the axes over which each is gathered, one after the other."""


class Gather(NamedTuple):
    """How a weight is gathered, over which axes it stays sharded, and whether it is quantised."""

    steps: Steps
    stays: tuple[str, ...]
    quantised: bool


def names_of(weights: Any) -> list[str]:
    """How sentences call the weights of a tree."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
    return [f"weights{jax.tree_util.keystr(path)}" for path in paths]


def specs_of(weights: Any, specs: Any) -> list[Any]:
    """The spec of each weight of a tree."""
    tree: Any = jax.tree.structure(weights)
    for name, weight in zip(names_of(weights), jax.tree.leaves(weights)):
        if not is_array(weight):
            given = f"experts: {name}: expected an array, got {kind_of(weight)}"
            raise EpError(Status.TYPE, given)
    if isinstance(specs, PartitionSpec):
        return [specs] * tree.num_leaves
    try:
        return list(tree.flatten_up_to(specs))
    except ValueError as error:
        raise EpError(
            Status.SHAPE,
            f"experts: specs: expected a PartitionSpec for all weights, or a tree of them like the "
            f"weights: {error}",
        ) from None


@contextlib.contextmanager
def explained(gathers: Sequence[Gather]) -> Iterator[None]:
    """What a function of sharded weights raises says that they are sharded."""
    stays = tuple(dict.fromkeys(axis for how in gathers for axis in how.stays))
    try:
        yield
    except (TypeError, ValueError) as error:
        if not stays:
            raise
        raise EpError(
            Status.SHAPE,
            f"experts: the function failed: {error}. It got weights that stay sharded over {stays}, "
            f"which do not split the tokens. Name these in token_axes of bootstrap to have the "
            f"weights gathered over them, or gather the weights before",
        ) from error


def gather_of(
    regions: Regions,
    name: str,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    num_experts: int,
    is_shard: bool,
    quantise: bool,
) -> Gather:
    """How a weight is gathered, and whether it is quantised. EpError if it cannot be.

    name   how sentences call it
    shape  of the whole weight, or with is_shard of a device's shard

    A weight of less than three dimensions is not quantised.
    """
    given = f"experts: {name} {list(shape)}, {spec}"
    if not isinstance(spec, PartitionSpec):
        raise EpError(Status.TYPE, f"{given}: expected a PartitionSpec, got {type(spec).__name__}")
    if not shape:
        raise EpError(
            Status.SHAPE,
            f"{given}: expected the {num_experts} experts as first dimension, got a scalar",
        )
    if len(spec) > len(shape):
        raise EpError(
            Status.SHAPE,
            f"{given}: expected a spec of 1 .. {len(shape)} entries, got {len(spec)}: weights of "
            f"different dimensions, as biases, need a tree of specs",
        )
    entries = spec_axes(spec, len(shape))
    _check_axes(given, regions, entries)
    parts = [product(regions.mesh, axes) for axes in entries]
    if is_shard:
        shape = tuple(length * part for length, part in zip(shape, parts))
    _check_shape(given, shape, parts, num_experts)
    entries[0] = entries[0][len(regions.axes) :]
    steps: list[tuple[int, tuple[str, ...]]] = []
    stays: list[str] = []
    for dimension, axes in enumerate(entries):
        gathered = tuple(axis for axis in axes if axis in regions.token_axes)
        if gathered and gathered != axes:
            raise EpError(
                Status.UNSUPPORTED,
                f"{given}: expected dimension {dimension} either gathered, over axes that split "
                f"the tokens, or staying sharded, got {axes}",
            )
        if gathered:
            steps.append((dimension, gathered))
        elif axes and dimension == 0:
            raise EpError(
                Status.UNSUPPORTED,
                f"{given}: expected all of a device's experts to be gathered, got {axes}, which do "
                f"not split the tokens: name these in token_axes of bootstrap, or leave them out",
            )
        else:
            stays += axes
    quantised = quantise and bool(steps) and len(shape) > 2
    if quantised:
        _check_blocks(given, shape[-1], parts[-1])
    return Gather(tuple(steps), tuple(stays), quantised)


def _check_axes(given: str, regions: Regions, entries: list[tuple[str, ...]]) -> None:
    names = [name for axes in entries for name in axes]
    for name in names:
        if name not in regions.mesh.axis_names:
            raise EpError(
                Status.RANGE,
                f"{given}: expected the mesh's axes {regions.mesh.axis_names}, got {name!r}",
            )
        if names.count(name) > 1:
            raise EpError(Status.RANGE, f"{given}: expected each axis once, got {name!r} twice")
    if entries[0][: len(regions.axes)] != regions.axes:
        raise EpError(
            Status.UNSUPPORTED,
            f"{given}: expected a first dimension sharded by {regions.axes}, then by others, "
            f"got {entries[0]}",
        )


def _check_shape(given: str, shape: tuple[int, ...], parts: list[int], num_experts: int) -> None:
    if shape[0] != num_experts:
        raise EpError(
            Status.SHAPE,
            f"{given}: expected the {num_experts} experts as first dimension, got {shape[0]}",
        )
    for dimension, (length, part) in enumerate(zip(shape, parts)):
        if length % part:
            raise EpError(
                Status.SHAPE,
                f"{given}: expected dimension {dimension} to be a multiple of the {part} devices "
                f"that share it, got {length}",
            )


def _check_blocks(given: str, length: int, parts: int) -> None:
    """Refuse to quantise shards that share a block of the last dimension."""
    if parts > 1 and length // parts % BLOCK:
        raise EpError(
            Status.UNSUPPORTED,
            f"{given}: expected shards of a multiple of {BLOCK} elements along the last dimension "
            f"to quantise, got {length // parts}",
        )


def gather(regions: Regions, shard: jax.Array, how: Gather) -> jax.Array:
    """The weight as a device uses it. The gradient is reduce-scattered to shards, then summed."""
    bound = jax.sharding.get_abstract_mesh().manual_axes
    for _, axes in how.steps:
        if not set(axes) <= set(bound):
            raise EpError(
                Status.RANGE, f"experts: expected a call inside shard_map over {axes}, got {bound}"
            )
    shard = vary(shard, [axis for axis in regions.token_axes if axis in bound])
    if not how.quantised:
        return _all_gather(shard, how.steps)
    whole: jax.Array = _gather_quantised(shard, how.steps)
    return whole


def _all_gather(array: jax.Array, steps: Steps) -> jax.Array:
    for dimension, axes in steps:
        array = jax.lax.all_gather(array, axes, axis=dimension, tiled=True)
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_quantised(shard: jax.Array, steps: Steps) -> jax.Array:
    elements, scales = quantise(shard)
    # As bytes, since some of XLA's backends widen fp8 in collectives.
    numbers = jax.lax.bitcast_convert_type(elements, jnp.uint8)
    numbers, scales = _all_gather(numbers, steps), _all_gather(scales, steps)
    elements = jax.lax.bitcast_convert_type(numbers, elements.dtype)
    return dequantise(elements, scales, shard.dtype)


def _reduce_scatter(steps: Steps, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    for dimension, axes in reversed(steps):
        gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
    return (gradient,)


_gather_quantised.defvjp(
    lambda shard, steps: (_gather_quantised(shard, steps), None), _reduce_scatter
)


def quantise(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., N] as e4m3 [..., N] and float32 scales [..., ceil(N / BLOCK)].

    The arithmetic is EP_QUANT_FP8's, docs/semantics.md. But XLA's divisions on GPUs are off by a unit
    in the last place at times.
    """
    last = array.shape[-1]
    wide = array.astype(jnp.float32)
    padding = [(0, 0)] * (array.ndim - 1) + [(0, -last % BLOCK)]
    blocks = jnp.pad(wide, padding).reshape(*array.shape[:-1], -1, BLOCK)
    magnitudes = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), 0)
    amax = jnp.maximum(magnitudes.max(-1, keepdims=True), _LEAST_AMAX)
    scaled = jnp.clip(blocks * (_LARGEST / amax), -_LARGEST, _LARGEST)
    elements = scaled.reshape(*array.shape[:-1], -1)[..., :last].astype(jnp.float8_e4m3fn)
    # Not a constant: XLA replaces a division by one with a product with its rounded reciprocal.
    largest = jnp.where(amax > 0, _LARGEST, 1)
    return elements, (amax / largest)[..., 0]


def dequantise(elements: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What quantise returned, as an array of type dtype."""
    factors = jnp.repeat(scales, BLOCK, axis=-1)[..., : elements.shape[-1]]
    return (elements.astype(jnp.float32) * factors).astype(dtype)
