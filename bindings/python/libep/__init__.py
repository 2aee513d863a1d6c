# SPDX-License-Identifier: Apache-2.0
"""libep: expert-parallel communication for Mixture-of-Experts models, from Python.

    bootstrap  how the ranks meet: threads, a key-value store, callables, NCCL    Bootstrap
    group      the ranks that share experts                                       Group
    handle     a layer's configuration, and the operations of its steps           Handle
    tensors    pointer, type and shape; arrays with an array interface            Tensor

Names, order and rules are those of ep.h. This core imports no framework. docs/python.md of the
source tree is the manual.
"""

from ._abi import (
    DEFAULT,
    Backend,
    Blocks,
    Duplicates,
    ExpertIds,
    Layout,
    Mode,
    Overflow,
    Padding,
    Plans,
    Quant,
    Rows,
    ScaleOrder,
    Status,
    Tail,
    Type,
)
from ._bootstrap import Bootstrap, poll_abort
from ._config import ExpertRange, GroupFields, HandleFields, expert_range, max_recv_rows
from ._group import Finding, Group, GroupInfo, GroupMemory, Located
from ._handle import Handle, HandleInfo, PlanTensors, Prepare
from ._info import Setting, info, nccl_ep_home, settings
from ._library import EpError, version
from ._tensor import Tensor, register_converter, tensor
from ._version import __version__

__all__ = [
    "DEFAULT",
    "Backend",
    "Blocks",
    "Bootstrap",
    "Duplicates",
    "EpError",
    "ExpertIds",
    "ExpertRange",
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
    "Mode",
    "Overflow",
    "Padding",
    "PlanTensors",
    "Plans",
    "Prepare",
    "Quant",
    "Rows",
    "ScaleOrder",
    "Setting",
    "Status",
    "Tail",
    "Tensor",
    "Type",
    "__version__",
    "expert_range",
    "info",
    "max_recv_rows",
    "nccl_ep_home",
    "poll_abort",
    "register_converter",
    "settings",
    "tensor",
    "version",
]
