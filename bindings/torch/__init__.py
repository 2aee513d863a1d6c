# SPDX-License-Identifier: Apache-2.0
"""libep in PyTorch: dispatch and combine as differentiable functions.

    group = libep.torch.create_group(num_experts=64, max_tokens=4096, hidden=7168, top_k=8)
    layer = libep.torch.Handle(group)

    received = libep.torch.dispatch(layer, tokens, topk_idx, topk_weights)
    rows = experts(received.tokens, received.plan.expert_ends)
    out = libep.torch.combine(layer, received.plan, rows, received.topk_weights)

torch.ops.libep has the operations as ops that write into given outputs. docs/torch.md of the source
tree is the manual.
"""

from ._autograd import Received, combine, dispatch, prepare
from ._bootstrap import from_process_group, from_store
from ._counters import Blocks, Counters
from ._group import Group, create_group
from ._handle import Handle, Plan
from ._moe import MoE
from ._ops import EXCHANGES, keep
from ._phases import Hook, combine_send, dispatch_send
from ._quant import quantise_rows
from ._receive import ReceiveMemory
from ._weights import Weight

__all__ = [
    "Blocks",
    "Counters",
    "EXCHANGES",
    "Group",
    "Handle",
    "Hook",
    "MoE",
    "Plan",
    "ReceiveMemory",
    "Received",
    "Weight",
    "combine",
    "combine_send",
    "create_group",
    "dispatch",
    "dispatch_send",
    "from_process_group",
    "from_store",
    "keep",
    "prepare",
    "quantise_rows",
]
