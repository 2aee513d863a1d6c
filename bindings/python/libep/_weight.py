# SPDX-License-Identifier: Apache-2.0
"""Sharded weights: gathered for use, gradients reduced, magnitudes. See ep_weight.h."""

from __future__ import annotations

import math
from ctypes import byref, c_void_p, sizeof
from typing import TYPE_CHECKING, NamedTuple, Optional

from . import _abi, _process
from ._abi import AmaxScope, Backend, Blocks, Quant, Status, TensorKind, Type
from ._group import Shared
from ._library import EpError, OfProcess, last_error, library
from ._operations import calls_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._bootstrap import Bootstrap
    from ._mesh import Mesh, Spec
    from ._tensor import TensorLike


class WeightSizes(NamedTuple):
    """Shapes and bytes of a gathered weight: EpWeightSizes of ep_weight.h."""

    shape: tuple[int, ...]
    type: Type
    scale_shape: Optional[tuple[int, ...]]
    """Of the scales; None where nothing is quantised."""
    scale_type: Type
    gather_workspace: int
    """Bytes that gather needs."""
    reduce_workspace: int
    """Bytes that reduce needs."""


class MeshComm(Shared):
    """The communicators of a mesh, for its weights. Creating and closing it are collective.

    world    of all ranks of the mesh; closed after this
    backend, device, timeout_seconds   as in GroupFields

    EpError MISMATCH: ranks gave different meshes. RANGE: a mesh of another number of ranks.
    """

    kind = "mesh_comm"

    def __init__(
        self,
        world: Bootstrap,
        mesh: Mesh,
        *,
        backend: Backend = Backend.AUTO,
        device: int = _abi.DEFAULT,
        timeout_seconds: float = _abi.DEFAULT,
    ) -> None:
        world.require_open()
        super().__init__(world)
        self.mesh = mesh
        config = _abi.EpMeshCommConfig(
            sizeof(_abi.EpMeshCommConfig), backend, device, timeout_seconds
        )
        out = c_void_p()
        given = byref(world.struct), byref(mesh._struct), byref(config), byref(out)
        world.check(library.ep_mesh_comm_create(*given))
        self.pointer = out.value
        _process.add(self)

    def __repr__(self) -> str:
        return f"<libep.MeshComm: rank {self.rank} of {self.size}, {self.mesh!r}>"

    def check(self) -> None:
        """Raise the EpError of the first group that has failed. Local; waits for nothing."""
        self.call(library.ep_mesh_comm_status, self.require())


class Weight(OfProcess):
    """A weight whose shards the ranks of a mesh store. It owns no tensor. Creating it is collective.

    comm          keeps the weight until it is closed
    name          for sentences, as "layers.3.w1"
    spec, shape   of the whole tensor: how it is sharded (libep.Mesh), and its dimensions
    kind          TensorKind.WEIGHT or EXPERT_WEIGHT
    type          of shards: BF16, FP16 or FP32
    grad_type     of gradients of the gathered weight; None: that of shards
    reduced_type  of gradients of shards: FP32, or grad_type

    The operations are those of ep_weight.h, with its tensors, ranks and errors. `stream` is a
    cudaStream_t as an int.
    """

    def __init__(
        self,
        comm: MeshComm,
        name: str,
        spec: Spec,
        shape: Sequence[int],
        *,
        kind: TensorKind = TensorKind.EXPERT_WEIGHT,
        type: Type = Type.BF16,
        grad_type: Optional[Type] = None,
        reduced_type: Type = Type.FP32,
    ) -> None:
        config, out = _abi.initialized(_abi.EpWeightConfig), c_void_p()
        config.name, config.kind = name.encode(), kind
        config.spec, sizes = comm.mesh._parse(spec, shape)
        config.shape[: len(shape)] = sizes
        config.type, config.reduced_type = type, reduced_type
        config.grad_type = type if grad_type is None else grad_type
        comm.call(library.ep_weight_create, comm.require(), byref(config), byref(out))
        self.comm, self.name, self._pointer = comm, name, out.value
        self.sharding = comm.mesh.sharding(spec, shape, kind, name)
        """What happens to it: libep.Sharding."""

    def __repr__(self) -> str:
        return f"<libep.Weight {self.name}: {self.sharding}>"

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        if self.comm.pointer is None:
            raise EpError(Status.DESTROYED, f"{self.name}: the mesh_comm is closed")
        status = self.comm.run(function, self._pointer, *arguments)
        if status:
            raise last_error(status)

    @staticmethod
    def form(
        quant: Quant = Quant.NONE,
        blocks: Blocks = Blocks.ROWS,
        transposed: bool = False,
        by_rank: bool = False,
    ) -> _abi.EpWeightForm:
        """The form in which a weight is gathered: see EpWeightForm. A transposed one has the last
        two dimensions swapped."""
        return _abi.EpWeightForm(sizeof(_abi.EpWeightForm), quant, blocks, transposed, by_rank)

    def sizes(self, form: Optional[_abi.EpWeightForm] = None) -> WeightSizes:
        """Shapes and workspaces of this rank's calls. Local."""
        made = _abi.initialized(_abi.EpWeightSizes)
        self._call(library.ep_weight_sizes, None if form is None else byref(form), byref(made))
        scales = tuple(made.scale_shape[: made.ndim])
        return WeightSizes(
            tuple(made.shape[: made.ndim]),
            Type(made.type),
            scales if math.prod(scales) else None,
            Type(made.scale_type),
            made.gather_workspace,
            made.reduce_workspace,
        )

    @calls_library
    def gather(
        self,
        form: Optional[_abi.EpWeightForm],
        shard: TensorLike,
        workspace: Optional[TensorLike] = None,
        *,
        out: TensorLike,
        scales: Optional[TensorLike] = None,
        stream: int = 0,
    ) -> None:
        """Gather the weight for use. Collective over Sharding's scattered axes.

        form       None: in the shards' type
        shard      [Sharding.stored]
        workspace  UINT8, [>= gather_workspace] on a multiple of 64 bytes; None if that is 0
        out        [WeightSizes.shape]
        scales     [WeightSizes.scale_shape], where it is quantised
        """

    @calls_library
    def reduce(
        self,
        grad: TensorLike,
        accumulate: bool,
        workspace: Optional[TensorLike] = None,
        *,
        out: TensorLike,
        stream: int = 0,
    ) -> None:
        """Sum a gradient over the ranks that have a part of it. Collective over Sharding's scattered
        and summed axes.

        grad        [Sharding.used] of grad_type
        accumulate  whether the sum is added to what `out` has
        workspace   UINT8, [>= reduce_workspace]
        out         [Sharding.stored] of reduced_type
        """

    @calls_library
    def amax(
        self, scope: AmaxScope, *, amax: TensorLike, stream: int = 0
    ) -> None:
        """Reduce magnitudes to their maximum, in place. Collective over Sharding's amax axes.

        amax  FP32, [1] with AmaxScope.TENSOR, [stored[0]] with EXPERT; each >= 0. NaN wins
        """
