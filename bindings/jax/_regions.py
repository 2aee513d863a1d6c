# SPDX-License-Identifier: Apache-2.0
"""Where a call runs: inside the caller's shard_map, or in a shard_map of its own.

Outside shard_map an array stands for those of all devices, one after the other along the first
dimension. A region is a shard_map over all axes of the mesh, around one call. So what runs on a
device is the same in both cases, and JAX differentiates it in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, Union

Result = TypeVar("Result")

# Of each Ep, by its key: the axes of its groups, and their devices.
_lines: dict[int, tuple[tuple[str, ...], frozenset[tuple[Any, ...]]]] = {}


def product(mesh: Union[Mesh, AbstractMesh], axes: Sequence[str]) -> int:
    """The number of devices along axes."""
    return int(np.prod([mesh.shape[axis] for axis in axes]))


def lines(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """The devices as [groups, ranks]: along the last dimension only `axes` vary."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    others = [place for place in range(mesh.devices.ndim) if place not in places]
    return mesh.devices.transpose(others + places).reshape(-1, product(mesh, axes))


def remember_devices(key: int, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Let check_devices know the groups of a key."""
    _lines[key] = axes, frozenset(map(tuple, lines(mesh, axes)))


def check_devices(name: str, key: int, mesh: Mesh) -> None:
    """Refuse a shard_map over a mesh whose groups have other devices, or another order of them.

    A device is the rank that it was for bootstrap. shard_map would give it the experts of another.
    """
    axes, expected = _lines[key]
    for line in lines(mesh, axes):
        if tuple(line) not in expected:
            raise EpError(
                Status.FOREIGN,
                f"{name}: expected a shard_map whose devices along {axes} are those of the mesh "
                f"that bootstrap got, in its order, got devices {[device.id for device in line]}",
            )


def is_array(value: Any) -> bool:
    """Whether a value is an array, of JAX or NumPy."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def kind_of(value: Any) -> str:
    """The type and shape of an array, the type of anything else."""
    return f"{value.dtype}{list(value.shape)}" if is_array(value) else type(value).__name__


def axes_of(array: jax.Array) -> frozenset[str]:
    """The mesh axes over which shard_map lets an array vary."""
    kind: Any = jax.typeof(array)
    # Older versions of JAX call it vma.
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)


def vary(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The array, varying over axes too. Its gradient is summed over those that are new."""
    missing = tuple(axis for axis in axes if axis not in axes_of(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


class Regions:
    """The regions of a mesh. Groups are along `axes`; `token_axes` split the tokens."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], token_axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.token_axes = token_axes
        self.spec = PartitionSpec(token_axes)

    def run(
        self,
        name: str,
        body: Callable[..., Result],
        operands: tuple[Any, ...],
        others: Sequence[Any] = (),
        specs: Sequence[PartitionSpec] = (),
    ) -> Result:
        """body(*operands, *others) on each device.

        operands, and what body returns, are split by P(token_axes), others by specs. EpError if the
        caller's shard_map, or its mesh, is another one than the group's.
        """
        if self.is_inside(name):
            return body(*operands, *others)
        for array in jax.tree.leaves(operands):
            self._check_split(name, array)
        split = (self.spec,) * len(operands) + tuple(specs)
        region = jax.shard_map(body, mesh=self.mesh, in_specs=split, out_specs=self.spec)
        result: Result = region(*operands, *others)
        return result

    def is_inside(self, name: str) -> bool:
        """Whether the caller is in a shard_map over the group's axes. EpError if in another one."""
        current = jax.sharding.get_abstract_mesh()
        if not current.manual_axes:
            self._check_mesh(name, current)
            return False
        if not set(self.axes) <= set(current.manual_axes):
            raise EpError(
                Status.RANGE,
                f"{name}: expected a call inside shard_map over the axis {self.axes}, or outside "
                f"of any shard_map, got one inside shard_map over {current.manual_axes}",
            )
        # XLA ends the process where it partitions a program around a token. On GPUs it does so where
        # one device is all of the other axes, too.
        least = 2 if self.mesh.devices.flat[0].platform == "cpu" else 1
        others = [axis for axis in current.axis_names if current.shape[axis] >= least]
        left = tuple(axis for axis in others if axis not in current.manual_axes)
        if left:
            raise EpError(
                Status.UNSUPPORTED,
                f"{name}: expected a shard_map over all axes of the mesh, got one over "
                f"{current.manual_axes} that leaves {left} to XLA: name these in axis_names, too",
            )
        expected, got = product(self.mesh, self.axes), product(current, self.axes)
        if got != expected:
            raise EpError(
                Status.RANGE, f"{name}: expected {expected} devices along {self.axes}, got {got}"
            )
        return True

    def _check_mesh(self, name: str, current: Any) -> None:
        """Refuse a call under jax.set_mesh of another mesh."""
        if current.empty or dict(current.shape) == dict(self.mesh.shape):
            return
        raise EpError(
            Status.RANGE,
            f"{name}: expected the mesh that bootstrap got, {dict(self.mesh.shape)}, "
            f"got that of jax.set_mesh, {dict(current.shape)}",
        )

    def _check_split(self, name: str, array: jax.Array) -> None:
        count = product(self.mesh, self.token_axes)
        if not is_array(array):
            raise EpError(Status.TYPE, f"{name}: expected arrays, got {kind_of(array)}")
        if array.ndim == 0 or array.shape[0] % count:
            raise EpError(
                Status.SHAPE,
                f"{name}: expected a first dimension that is a multiple of the {count} devices "
                f"along {self.token_axes}, got shape {list(array.shape)}",
            )
        # Only axes of type Explicit are known while JAX traces. XLA reshards along the others.
        spec = jax.typeof(array).sharding.spec
        is_known = set(self.token_axes) <= set(self.mesh.abstract_mesh.explicit_axes)
        if is_known and spec_axes(spec, array.ndim)[0] != self.token_axes:
            raise EpError(
                Status.SHAPE,
                f"{name}: expected arrays sharded by {self.spec}, got {spec}: use jax.reshard",
            )


def _names(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The axes that shard each of `ndim` dimensions, outermost first."""
    return [_names(entry) for entry in spec] + [()] * (ndim - len(spec))
