# SPDX-License-Identifier: Apache-2.0
"""Sharded weights of experts, [E, ...]: gathered for use, their gradients reduce-scattered.

The rules are those of docs/mesh.md. The first dimension of a weight is sharded by the axes of the
group, which stay. Of the other axes, those that split the tokens are gathered: along them, devices
have other tokens and the same experts. The rest, as in tensor parallelism, stay.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, NamedTuple, Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._abi import Blocks, Quant, Status
from .._formats import FORMATS
from .._layer import E4M3
from .._library import EpError
from ._regions import Regions, is_array, kind_of, product, spec_axes, vary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

BLOCK = 128  # elements along the last dimension that share a scale, but with MXFP8
_EXPONENT_BIAS = 127  # of UE8M0
_LARGEST = 448.0  # of e4m3
_LEAST_AMAX = 2.0**-100


Steps = tuple[tuple[int, tuple[str, ...]], ...]
"""Dimensions, and the axes over which each is gathered, one after the other."""


class Form(NamedTuple):
    """How a weight is quantised: as EpWeightForm, without transposing."""

    quant: Quant = Quant.FP8
    blocks: Blocks = Blocks.ROWS

    @property
    def wide(self) -> int:
        """Elements of a block along the last dimension."""
        return FORMATS[self.quant].block

    @property
    def high(self) -> int:
        """Along the dimension before."""
        return self.wide if self.blocks == Blocks.TILES else 1

    @property
    def has_exponents(self) -> bool:
        """Whether scales are UE8M0, in a byte."""
        return self.quant in (Quant.FP8_UE8M0, Quant.MXFP8)


def form_of(given: Any) -> Optional[Form]:
    """What `quantise` of Ep.experts means. EpError for what it cannot be."""
    if isinstance(given, bool) or given is None or given == Quant.NONE:
        return Form() if given is True else None
    try:
        form = Form(*given) if isinstance(given, tuple) else Form(given)
        form = Form(Quant(form.quant), Blocks(form.blocks))
        known = form.quant in E4M3
    except (TypeError, ValueError):
        known = False
    if not known:
        raise EpError(
            Status.RANGE,
            "experts: quantise: expected a bool, a libep.Quant, or one with libep.Blocks, got "
            f"{given!r}",
        )
    if form.quant == Quant.MXFP8 and form.blocks == Blocks.TILES:
        raise EpError(
            Status.UNSUPPORTED, "experts: quantise: expected blocks of rows with MXFP8, got TILES"
        )
    return form


class Gather(NamedTuple):
    """How a weight is gathered, over which axes it stays sharded, and whether it is quantised."""

    steps: Steps
    stays: tuple[str, ...]
    form: Optional[Form]


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
    form: Optional[Form],
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
    if not steps or len(shape) < 3:
        form = None
    if form is not None:
        _check_blocks(given, "the last dimension", form.wide, shape[-1], parts[-1])
        _check_blocks(given, "the dimension before", form.high, shape[-2], parts[-2])
    return Gather(tuple(steps), tuple(stays), form)


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


def _check_blocks(given: str, which: str, block: int, length: int, parts: int) -> None:
    """Refuse to quantise shards that share a block."""
    if parts > 1 and length // parts % block:
        raise EpError(
            Status.UNSUPPORTED,
            f"{given}: expected shards of a multiple of {block} elements along {which} to quantise, "
            f"got {length // parts}",
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
    if how.form is None:
        return _all_gather(shard, how.steps)
    whole: jax.Array = _gather_quantised(shard, how.steps, how.form)
    return whole


def _all_gather(array: jax.Array, steps: Steps) -> jax.Array:
    for dimension, axes in steps:
        array = jax.lax.all_gather(array, axes, axis=dimension, tiled=True)
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_quantised(shard: jax.Array, steps: Steps, form: Form) -> jax.Array:
    elements, scales = quantise(shard, form)
    # As bytes, since some of XLA's backends widen fp8 in collectives.
    numbers = jax.lax.bitcast_convert_type(elements, jnp.uint8)
    numbers, scales = _all_gather(numbers, steps), _all_gather(scales, steps)
    elements = jax.lax.bitcast_convert_type(numbers, elements.dtype)
    return dequantise(elements, scales, shard.dtype, form)


def _reduce_scatter(steps: Steps, _form: Form, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    for dimension, axes in reversed(steps):
        gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
    return (gradient,)


_gather_quantised.defvjp(
    lambda shard, *how: (_gather_quantised(shard, *how), None), _reduce_scatter
)


def quantise(array: jax.Array, form: Form = Form()) -> tuple[jax.Array, jax.Array]:
    """[..., N] as e4m3 [..., N] and its scales, a float32 or uint8 (UE8M0) for each block: of rows
    [..., ceil(N / B)], of tiles [..., ceil(M / B), ceil(N / B)].

    The arithmetic is that of docs/semantics.md. But XLA's divisions on GPUs are off by a unit in the
    last place at times.
    """
    shape, high, wide = array.shape, form.high, form.wide
    blocks = _divide(array.astype(jnp.float32), high, wide)
    magnitudes = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), 0)
    amax = jnp.maximum(magnitudes.max((-3, -1), keepdims=True), _LEAST_AMAX)
    # Not a constant: XLA replaces a division by one with a product with its rounded reciprocal.
    largest = jnp.where(amax > 0, _LARGEST, 1)
    scales, factors = amax / largest, _LARGEST / amax
    if form.quant != Quant.FP8:  # the next power of two
        mantissa, exponent = jnp.frexp(scales)
        exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
        scales = jnp.ldexp(jnp.ones_like(scales), exponent)
        factors = jnp.ldexp(jnp.ones_like(scales), -exponent)
        if form.has_exponents:
            scales = (exponent + _EXPONENT_BIAS).astype(jnp.uint8)
    scaled = jnp.clip(blocks * factors, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    return _join(scaled, shape), scales[..., 0, :, 0]


def dequantise(
    elements: jax.Array, scales: jax.Array, dtype: jnp.dtype, form: Form = Form()
) -> jax.Array:
    """What quantise returned, as an array of type dtype."""
    if form.has_exponents:
        exponents = scales.astype(jnp.int32) - _EXPONENT_BIAS
        scales = jnp.ldexp(jnp.ones(scales.shape, jnp.float32), exponents)
    blocks = _divide(elements.astype(jnp.float32), form.high, form.wide)
    return _join(blocks * scales[..., :, None, :, None], elements.shape).astype(dtype)


def _divide(array: jax.Array, high: int, wide: int) -> jax.Array:
    """[..., M, N] as [..., M / high, high, N / wide, wide], padded with zeros."""
    *lead, height, width = array.shape
    padding = [(0, 0)] * len(lead) + [(0, -height % high), (0, -width % wide)]
    return jnp.pad(array, padding).reshape(*lead, -(-height // high), high, -(-width // wide), wide)


def _join(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *lead, tall, high, many, wide = blocks.shape
    return blocks.reshape(*lead, tall * high, many * wide)[..., : shape[-2], : shape[-1]]


# ---- magnitudes ----------------------------------------------------------------------------------


def amax(
    regions: Regions, weight: jax.Array, spec: PartitionSpec, per_expert: bool, is_shard: bool
) -> jax.Array:
    """The largest magnitude of a weight, or of each expert of the array that is given."""
    magnitudes = jnp.abs(jax.lax.stop_gradient(weight)).astype(jnp.float32)
    found = magnitudes.max(tuple(range(1, weight.ndim)) if per_expert else None)
    if not is_shard:
        return found  # XLA's reduction is over all devices
    first, *others = spec_axes(spec, weight.ndim)
    axes = [axis for entry in ([] if per_expert else [first]) + others for axis in entry]
    axes += [axis for axis in regions.token_axes if axis not in (*first, *axes)]
    bound = jax.sharding.get_abstract_mesh().manual_axes
    axes = [axis for axis in axes if axis in bound]
    return jax.lax.pmax(vary(found, axes), tuple(axes)) if axes else found
