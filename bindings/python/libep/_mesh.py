# SPDX-License-Identifier: Apache-2.0
"""Meshes: expert parallelism beside FSDP and data parallelism. See ep_mesh.h and docs/mesh.md."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64
from typing import Iterable, NamedTuple, Optional, Sequence, Union

from . import _abi
from ._abi import AxisRole, Status, TensorKind, initialized
from ._bootstrap import Bootstrap
from ._library import EpError, check, library

Axes = Union[str, Sequence[str]]
"""Axes by name, outermost first: "expert", "(fsdp,expert)", ("fsdp", "expert"), or () for none."""

# Iterable, since a PartitionSpec is no Sequence.
Spec = Union[str, Iterable[Optional[Axes]]]
"""For each dimension of a tensor the axes that shard it, "expert,fsdp,_" or
("expert", "fsdp", None). A PartitionSpec of JAX is one, too, if it has an entry for each
dimension."""

_TEXT_BYTES = 4096  # enough for any sharding in words


class Axis(NamedTuple):
    """A named axis of a mesh."""

    name: str
    size: int
    role: AxisRole


class MeshGroup(NamedTuple):
    """The group of a rank along some axes."""

    place: int
    """The rank's number in the group."""
    ranks: tuple[int, ...]
    """The ranks of the mesh in the group, in its order."""


class Shard(NamedTuple):
    """A rank's part of a tensor: elements begin[d] .. begin[d] + shape[d] of each dimension d."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]


class Sharding(NamedTuple):
    """What happens to a tensor in a step: EpSharding of ep_mesh.h. str() is the same in words."""

    stored: tuple[int, ...]
    """The shape of a rank's shard, and of its gradient."""
    used: tuple[int, ...]
    """The shape that a rank computes with."""
    gathered: tuple[tuple[str, ...], ...]
    """For each dimension the axes over which it is gathered for use."""
    kept: tuple[tuple[str, ...], ...]
    """For each dimension the axes that shard it in use, too."""
    scattered: tuple[str, ...]
    """The gradient is reduce-scattered over these."""
    summed: tuple[str, ...]
    """The same sum goes over these, too."""
    amax: tuple[str, ...]
    """One scale for the tensor: its amax is max-reduced over these."""
    amax_per_expert: tuple[str, ...]
    """One scale for each expert."""
    words: str

    def __str__(self) -> str:
        return self.words


class Mesh:
    """The ranks of a program along named axes. All of it is local, apart from bootstrap().

    text  the axes, outermost first: "data=2,fsdp=2,expert=4". An axis has the role of its name, or
          the one that is named: "dp:data=2,ep:expert=8". Any other axis has the role OTHER.
    grid  the rank at each position, row-major, each rank once; None: the position is the rank

    EpError RANGE: no such mesh.
    """

    def __init__(self, text: str, grid: Optional[Sequence[int]] = None) -> None:
        self._struct = initialized(_abi.EpMesh)
        check(library.ep_mesh_parse(text.encode(), byref(self._struct)))
        ranks = c_int32()
        check(library.ep_mesh_ranks(byref(self._struct), byref(ranks)))
        self.num_ranks: int = ranks.value
        self.axes: tuple[Axis, ...] = tuple(
            Axis(axis.name.decode(), axis.size, AxisRole(axis.role))
            for axis in self._struct.axes[: self._struct.num_axes]
        )
        places = None if grid is None else tuple(grid)
        self._made_of = text, places
        if places is not None:
            self._set_grid(list(places))

    def __reduce__(self) -> tuple[type[Mesh], tuple[str, Optional[tuple[int, ...]]]]:
        return type(self), self._made_of

    def _set_grid(self, grid: list[int]) -> None:
        if len(grid) != self.num_ranks:
            raise EpError(
                Status.SHAPE, f"Mesh: grid: expected {self.num_ranks} ranks, got {len(grid)}"
            )
        # The array must outlive the struct.
        self._grid = (c_int32 * len(grid))(*grid)
        self._struct.grid = self._grid
        self.coordinates(0)  # refuses a grid that does not have each rank once

    def __repr__(self) -> str:
        axes = ",".join(f"{a.name}:{a.role.name.lower()}={a.size}" for a in self.axes)
        return f"<libep.Mesh {axes}>"

    # ---- axes and groups ----------------------------------------------------------------------

    def role_axes(self, role: AxisRole) -> tuple[str, ...]:
        """All axes of a role, in the mesh's order. The EP group is that of AxisRole.EXPERT."""
        return tuple(axis.name for axis in self.axes if axis.role == role)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """A rank's place along each axis."""
        out = (c_int32 * len(self.axes))()
        check(library.ep_mesh_coordinates(byref(self._struct), rank, out))
        return tuple(out)

    def group(self, axes: Axes, rank: int) -> MeshGroup:
        """The ranks whose coordinates on all other axes equal the rank's own, ordered by `axes`."""
        found, size, place = self._find(axes), c_int32(), c_int32()
        check(
            library.ep_mesh_group(
                byref(self._struct), byref(found), rank, byref(size), byref(place), None
            )
        )
        ranks = (c_int32 * size.value)()
        check(library.ep_mesh_group(byref(self._struct), byref(found), rank, None, None, ranks))
        return MeshGroup(place.value, tuple(ranks))

    def bootstrap(self, world: Bootstrap, axes: Axes) -> Bootstrap:
        """Make the bootstrap of this rank's group along `axes` from that of all ranks. Collective.

        Close its groups, then it, then `world`. If world's messages are not libep's own (threads
        have such), groups along these axes are independent of each other from then on. Else (a
        store, callables, NCCL) they are created, closed and given memory together.

        EpError MISMATCH: ranks describe different meshes or axes.
        """
        world.require_open()
        out, found = initialized(_abi.EpBootstrap), self._find(axes)
        world.check(
            library.ep_bootstrap_mesh(
                byref(world.struct), byref(self._struct), byref(found), byref(out)
            )
        )
        return Bootstrap(out, world.is_thread, world)

    # ---- tensors ------------------------------------------------------------------------------

    def shard(self, spec: Spec, shape: Sequence[int], rank: int, tensor: str = "tensor") -> Shard:
        """Compute a rank's shard of a tensor of this shape.

        tensor  its name, for sentences. EpError SHAPE: a dimension does not divide.
        """
        parsed, sizes = self._parse(spec, shape)
        begin, local = (c_int64 * len(shape))(), (c_int64 * len(shape))()
        check(
            library.ep_spec_shard(
                byref(self._struct), byref(parsed), tensor.encode(), sizes, rank, begin, local
            )
        )
        return Shard(tuple(begin), tuple(local))

    def sharding(
        self, spec: Spec, shape: Sequence[int], kind: TensorKind, tensor: str = "tensor"
    ) -> Sharding:
        """Say what happens to a tensor in a step: what is gathered, what stays, what is summed.

        EpError SHAPE: a dimension does not divide. UNSUPPORTED: axes that this kind cannot have.
        """
        parsed, sizes = self._parse(spec, shape)
        made, words = initialized(_abi.EpSharding), ctypes.create_string_buffer(_TEXT_BYTES)
        mesh = byref(self._struct)
        check(library.ep_sharding(mesh, byref(parsed), kind, tensor.encode(), sizes, byref(made)))
        check(library.ep_sharding_format(mesh, byref(made), words, _TEXT_BYTES))
        dims = range(made.ndim)
        return Sharding(
            tuple(made.stored[d] for d in dims),
            tuple(made.used[d] for d in dims),
            tuple(self._names(made.gathered[d]) for d in dims),
            tuple(self._names(made.kept[d]) for d in dims),
            self._names(made.scattered),
            self._names(made.summed),
            self._names(made.amax),
            self._names(made.amax_per_expert),
            words.value.decode(),
        )

    # ---- conversions --------------------------------------------------------------------------

    def _find(self, axes: Axes) -> _abi.EpAxes:
        found = _abi.EpAxes()
        check(library.ep_mesh_axes(byref(self._struct), _axes_text(axes).encode(), byref(found)))
        return found

    def _parse(self, spec: Spec, shape: Sequence[int]) -> tuple[_abi.EpSpec, ctypes.Array[c_int64]]:
        text = spec if isinstance(spec, str) else ",".join(_axes_text(entry) for entry in spec)
        parsed = initialized(_abi.EpSpec)
        check(library.ep_spec_parse(byref(self._struct), text.encode(), byref(parsed)))
        if parsed.ndim != len(shape):
            raise EpError(
                Status.NDIM, f"spec {text}: expected {parsed.ndim} dimensions, got {len(shape)}"
            )
        return parsed, (c_int64 * len(shape))(*shape)

    def _names(self, axes: _abi.EpAxes) -> tuple[str, ...]:
        return tuple(self.axes[axes.axis[i]].name for i in range(axes.num))


def _axes_text(axes: Optional[Axes]) -> str:
    if isinstance(axes, str):
        return axes
    return f"({','.join(axes)})" if axes else "_"
