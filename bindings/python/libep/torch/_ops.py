# SPDX-License-Identifier: Apache-2.0
"""The operations as ops of PyTorch's dispatcher, torch.ops.libep.*: what compiled programs call.

They write into given outputs, which their schemas declare as mutated. `handle` is Handle.key, since
an op takes no object. Made by Library.define and Library.impl: a call costs a third of one through
torch.library.custom_op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _calls
from ._handle import find_handle

if TYPE_CHECKING:
    from typing import Callable

_SCHEMAS = {
    "prepare": "Tensor topk_idx, Tensor? num_tokens, Tensor(a!) plan, Tensor(b!)? numbers",
    "dispatch": (
        "Tensor plan, Tensor tokens, Tensor? topk_weights, Tensor? scales, "
        "Tensor(a!) recv_tokens, Tensor(b!)? recv_topk_weights, Tensor(c!)? recv_scales, "
        "Tensor(d!)? recv_topk_idx"
    ),
    "dispatch_routed": (
        "Tensor topk_idx, Tensor? num_tokens, Tensor tokens, Tensor? topk_weights, "
        "Tensor? scales, Tensor(a!) plan, Tensor(b!)? numbers, Tensor(c!) recv_tokens, "
        "Tensor(d!)? recv_topk_weights, Tensor(e!)? recv_scales, Tensor(f!)? recv_topk_idx"
    ),
    "combine": (
        "Tensor plan, Tensor expert_out, Tensor? slot_weights, Tensor? topk_weights, Tensor(a!) out"
    ),
    "combine_backward": (
        "Tensor plan, Tensor grad_out, Tensor? slot_weights, Tensor? expert_out, "
        "Tensor(a!) grad_expert_out, Tensor(b!)? grad_slot_weights"
    ),
    "dispatch_backward": (
        "Tensor plan, Tensor grad_recv_tokens, Tensor? grad_slot_weights, "
        "Tensor(a!) grad_tokens, Tensor(b!)? grad_topk_weights"
    ),
}

_library = torch.library.Library("libep", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, arguments: str) -> None:
    call: Callable[..., None] = getattr(_calls, name)

    def run(handle: int, *tensors: object) -> None:
        call(find_handle(handle), *tensors)

    def fake(handle: int, *tensors: object) -> None:
        return None

    _library.define(f"{name}(int handle, {arguments}) -> ()")  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"libep::{name}", fake, lib=_library)


for _name, _arguments in _SCHEMAS.items():
    _define(_name, _arguments)

prepare = torch.ops.libep.prepare.default
dispatch = torch.ops.libep.dispatch.default
dispatch_routed = torch.ops.libep.dispatch_routed.default
combine = torch.ops.libep.combine.default
combine_backward = torch.ops.libep.combine_backward.default
dispatch_backward = torch.ops.libep.dispatch_backward.default
