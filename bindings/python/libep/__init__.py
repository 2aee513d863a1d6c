# SPDX-License-Identifier: Apache-2.0
"""libep: expert-parallel communication for Mixture-of-Experts models, from Python.

    bootstrap  how the ranks meet: threads, a key-value store, callables, NCCL    Bootstrap
    group      the ranks that share experts                                       Group
    handle     a layer's configuration, and the operations of its steps           Handle
    tensors    pointer, type and shape; arrays with an array interface            Tensor
    mesh       expert parallelism beside FSDP and data parallelism                Mesh
    weights    shards that are gathered for use, and gradients of them            Weight

Names, order and rules are those of ep.h and ep_mesh.h. This core imports no framework. docs/python.md of the
source tree is the manual.
"""

from ._abi import (
    DEFAULT,
    WINDOW_PAIRED,
    AmaxScope,
    AxisRole,
    Backend,
    Blocks,
    CopyChoice,
    Duplicates,
    ExpertIds,
    Layout,
    Mode,
    Overflow,
    Padding,
    Plans,
    Quant,
    Rows,
    RowWeights,
    ScaleOrder,
    Status,
    Sums,
    Tail,
    TensorKind,
    Type,
)
from ._bootstrap import Bootstrap, poll_abort
from ._config import (
    ExpertRange,
    GroupFields,
    HandleFields,
    expert_range,
    max_recv_rows,
    placement_balance,
)
from ._group import Finding, Group, GroupInfo, GroupMemory, Located
from ._handle import Extras, Handle, HandleInfo, PlanTensors, Prepare
from ._info import Setting, info, nccl_ep_home, settings
from ._library import EpError, version
from ._mesh import Axis, Mesh, MeshGroup, Shard, Sharding
from ._tensor import Tensor, register_converter, tensor
from ._version import __version__
from ._weight import MeshComm, Weight, WeightSizes

__all__ = [
    "DEFAULT",
    "WINDOW_PAIRED",
    "AmaxScope",
    "Axis",
    "AxisRole",
    "Backend",
    "Blocks",
    "Bootstrap",
    "CopyChoice",
    "Duplicates",
    "EpError",
    "ExpertIds",
    "ExpertRange",
    "Extras",
    "Finding",
    "Group",
    "GroupFields",
    "GroupInfo",
    "GroupMemory",
    "Handle",
    "HandleFields",
    "HandleInfo",
    "Layout",
    "Located",
    "Mesh",
    "MeshComm",
    "MeshGroup",
    "Mode",
    "Overflow",
    "Padding",
    "PlanTensors",
    "Plans",
    "Prepare",
    "Quant",
    "RowWeights",
    "Rows",
    "ScaleOrder",
    "Setting",
    "Shard",
    "Sharding",
    "Status",
    "Sums",
    "Tail",
    "Tensor",
    "TensorKind",
    "Type",
    "Weight",
    "WeightSizes",
    "__version__",
    "expert_range",
    "info",
    "max_recv_rows",
    "nccl_ep_home",
    "placement_balance",
    "poll_abort",
    "register_converter",
    "settings",
    "tensor",
    "version",
]
