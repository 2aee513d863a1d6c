# SPDX-License-Identifier: Apache-2.0
"""The operations on torch tensors, straight onto the core: what the ops run, and eager autograd.

They write into given outputs, on the current stream of the group's device. Arguments are those of
the ops (_ops.py), except that `handle` is the Handle itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import Status, Type
from .._handle import Handle as CoreHandle
from .._handle import Prepare
from .._library import EpError
from .._tensor import Tensor as CoreTensor
from .._tensor import register_converter
from . import _checks, _fast
from ._group import current_stream

if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from torch import Tensor

    from ._group import Group
    from ._handle import Handle

TYPES = {
    torch.bfloat16: Type.BF16,
    torch.float16: Type.FP16,
    torch.float32: Type.FP32,
    torch.float8_e4m3fn: Type.FP8_E4M3,
    torch.float8_e5m2: Type.FP8_E5M2,
    torch.uint8: Type.UINT8,
    torch.int32: Type.INT32,
    torch.int64: Type.INT64,
}
for _name in ("float8_e8m0fnu", "float4_e2m1fn_x2"):  # of newer versions; libep sees plain bytes
    if hasattr(torch, _name):
        TYPES[getattr(torch, _name)] = Type.UINT8


def _convert(tensor: Tensor) -> CoreTensor:
    kind = TYPES.get(tensor.dtype)
    if kind is None:
        raise TypeError(_describe_types(tensor))
    if not tensor.is_contiguous():
        raise TypeError(_describe_strides(tensor))
    return CoreTensor(tensor.data_ptr(), kind, tensor.shape, tensor)


def _describe_types(tensor: Tensor) -> str:
    names = ", ".join(str(dtype) for dtype in TYPES)
    return f"expected elements of one of the types {names}, got {tensor.dtype}"


def _describe_strides(tensor: Tensor) -> str:
    return (
        f"expected a C-contiguous tensor, got strides {tuple(tensor.stride())} for shape "
        f"{tuple(tensor.shape)}: call contiguous()"
    )


register_converter(torch.Tensor, _convert)


ROW_UNIT, SCALE_UNIT = 16, 4  # on whose multiples rows and scales start
_HALVES = (torch.bfloat16, torch.float16)
WEIGHTS = (torch.float32, *_HALVES)


def _given(
    owner: Union[Handle, Group], tensor: Optional[Tensor], name: str, unit: int = 0
) -> Optional[CoreTensor]:
    """The argument `name` for the core. None stays None.

    unit  of an input: it is copied unless it is contiguous and starts on a multiple of this.
          0: an output
    """
    if tensor is None:
        return None
    try:
        kind = refuse_memory(owner, tensor, name)
        if unit:
            tensor = _place(tensor, unit)
        else:
            refuse_strides(tensor, name)
        pointer = tensor.data_ptr()
    except AttributeError:
        _checks.require_tensor(name, tensor)
        raise
    except RuntimeError:  # of tensors that have no memory
        _checks.refuse_derivatives(name, tensor)
        _checks.refuse_layout(name, tensor)
        raise
    try:
        return CoreTensor(pointer, kind, tensor.shape, tensor)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _place(tensor: Tensor, unit: int) -> Tensor:
    """The tensor, or a copy that is contiguous and starts on a multiple of `unit`."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % unit else tensor


def _input(
    owner: Union[Handle, Group], tensor: Optional[Tensor], name: str
) -> Optional[CoreTensor]:
    """An input of rows or scales. Those that do not start as they should the library refuses."""
    return _given(owner, tensor, name, 1)


def _gradient(handle: Handle, tensor: Optional[Tensor], name: str) -> Optional[CoreTensor]:
    """An input of gradients, which PyTorch may make anywhere in its memory."""
    return _given(handle, tensor, name, ROW_UNIT)


def _weights(handle: Handle, tensor: Optional[Tensor], name: str) -> Optional[CoreTensor]:
    """An input of weights. bfloat16 and float16 become float32."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype in _HALVES:
        tensor = tensor.float()
    return _given(handle, tensor, name, 4)


def _indices(
    owner: Union[Handle, Group], tensor: Optional[Tensor], name: str, is_kept: bool = False
) -> Optional[CoreTensor]:
    """An input of integers.

    is_kept  whether later calls read the tensor's memory again: then no copy serves
    """
    if tensor is None:
        return None
    _checks.require_tensor(name, tensor)
    if tensor.dtype not in TYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {tensor.dtype}")
    return _given(owner, tensor, name, 0 if is_kept else tensor.dtype.itemsize)


def is_here(owner: Union[Handle, Group], tensor: Tensor) -> bool:
    """Whether the tensor lies on the group's device. Meta tensors have a CPU's number, too."""
    ordinal = owner.ordinal
    return tensor.is_cpu if ordinal < 0 else tensor.get_device() == ordinal


def refuse_memory(owner: Union[Handle, Group], tensor: Tensor, name: str) -> Type:
    """The tensor's type. TypeError if the tensor is elsewhere or of no known type."""
    if not is_here(owner, tensor):
        raise TypeError(
            f"{name}: expected a tensor on {owner.device}, where the group is, got one on "
            f"{tensor.device}"
        )
    # As _convert, whose call would take as long as the checks.
    kind = TYPES.get(tensor.dtype)
    if kind is None:
        raise TypeError(f"{name}: {_describe_types(tensor)}")
    return kind


def refuse_strides(tensor: Tensor, name: str) -> None:
    """TypeError unless an output is contiguous."""
    if not tensor.is_contiguous():
        raise TypeError(f"{name}: {_describe_strides(tensor)}")


def prepare(
    handle: Handle,
    topk_idx: Tensor,
    num_tokens: Optional[Tensor],
    plan: Tensor,
    numbers: Optional[Tensor],
) -> None:
    # In latency mode prepare records the tensors, which somebody must keep.
    if not handle.is_latency and handle.call_fast(
        _fast.PREPARE, topk_idx, num_tokens, plan, numbers
    ):
        return
    CoreHandle.prepare(
        handle,
        _indices(handle, topk_idx, "topk_idx", handle.is_latency),
        _indices(handle, num_tokens, "num_tokens", handle.is_latency),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
        out=handle.outputs(_given(handle, numbers, "numbers")),
    )


def count_rows(handle: Handle, numbers: Tensor) -> int:
    """The rows that come, read on the host. What a failed prepare leaves there is no number of
    rows."""
    rows: int = numbers.tolist()[3 * handle.group.num_local_experts + 1]
    if not 0 <= rows <= handle.most_rows:
        finding = handle.group.status()
        raise EpError(
            finding.status or Status.NOT_PREPARED,
            finding.sentence
            or "dispatch: expected a plan that prepare has written, got one that it has not",
        )
    return rows


def dispatch(
    handle: Handle,
    plan: Tensor,
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    recv_tokens: Tensor,
    recv_topk_weights: Optional[Tensor],
    recv_scales: Optional[Tensor],
    recv_topk_idx: Optional[Tensor],
) -> None:
    if handle.call_fast(
        _fast.DISPATCH,
        plan,
        tokens,
        topk_weights,
        scales,
        recv_tokens,
        recv_topk_weights,
        recv_scales,
        recv_topk_idx,
    ):
        return
    CoreHandle.dispatch(
        handle,
        _input(handle, tokens, "tokens"),
        _weights(handle, topk_weights, "topk_weights"),
        _input(handle, scales, "scales"),
        recv_tokens=_given(handle, recv_tokens, "recv_tokens"),
        recv_topk_weights=_given(handle, recv_topk_weights, "recv_topk_weights"),
        recv_scales=_given(handle, recv_scales, "recv_scales"),
        recv_topk_idx=_given(handle, recv_topk_idx, "recv_topk_idx"),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
    )


def _routing(
    handle: Handle, topk_idx: Tensor, num_tokens: Optional[Tensor], numbers: Optional[Tensor]
) -> Prepare:
    return Prepare(
        _indices(handle, topk_idx, "topk_idx"),
        _indices(handle, num_tokens, "num_tokens"),
        handle.outputs(_given(handle, numbers, "numbers")),
    )


def dispatch_routed(
    handle: Handle,
    topk_idx: Tensor,
    num_tokens: Optional[Tensor],
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    plan: Tensor,
    numbers: Optional[Tensor],
    recv_tokens: Tensor,
    recv_topk_weights: Optional[Tensor],
    recv_scales: Optional[Tensor],
    recv_topk_idx: Optional[Tensor],
) -> None:
    if handle.call_fast(
        _fast.DISPATCH_ROUTED,
        topk_idx,
        num_tokens,
        tokens,
        topk_weights,
        scales,
        plan,
        numbers,
        recv_tokens,
        recv_topk_weights,
        recv_scales,
        recv_topk_idx,
    ):
        return
    CoreHandle.dispatch(
        handle,
        _input(handle, tokens, "tokens"),
        _weights(handle, topk_weights, "topk_weights"),
        _input(handle, scales, "scales"),
        recv_tokens=_given(handle, recv_tokens, "recv_tokens"),
        recv_topk_weights=_given(handle, recv_topk_weights, "recv_topk_weights"),
        recv_scales=_given(handle, recv_scales, "recv_scales"),
        recv_topk_idx=_given(handle, recv_topk_idx, "recv_topk_idx"),
        plan=_given(handle, plan, "plan"),
        prepare=_routing(handle, topk_idx, num_tokens, numbers),
        stream=handle.stream(),
    )


def combine(
    handle: Handle,
    plan: Tensor,
    expert_out: Tensor,
    slot_weights: Optional[Tensor],
    topk_weights: Optional[Tensor],
    out: Tensor,
) -> None:
    if handle.call_fast(_fast.COMBINE, plan, expert_out, slot_weights, topk_weights, out):
        return
    CoreHandle.combine(
        handle,
        _input(handle, expert_out, "expert_out"),
        _weights(handle, slot_weights, "slot_weights"),
        _weights(handle, topk_weights, "topk_weights"),
        out=_given(handle, out, "out"),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
    )


def combine_backward(
    handle: Handle,
    plan: Tensor,
    grad_out: Tensor,
    slot_weights: Optional[Tensor],
    expert_out: Optional[Tensor],
    grad_expert_out: Tensor,
    grad_slot_weights: Optional[Tensor],
) -> None:
    if handle.call_fast(
        _fast.COMBINE_BACKWARD,
        plan,
        grad_out,
        slot_weights,
        expert_out,
        grad_expert_out,
        grad_slot_weights,
    ):
        return
    CoreHandle.combine_backward(
        handle,
        _gradient(handle, grad_out, "grad_out"),
        _weights(handle, slot_weights, "slot_weights"),
        _input(handle, expert_out, "expert_out"),
        grad_expert_out=_given(handle, grad_expert_out, "grad_expert_out"),
        grad_slot_weights=_given(handle, grad_slot_weights, "grad_slot_weights"),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
    )


def dispatch_backward(
    handle: Handle,
    plan: Tensor,
    grad_recv_tokens: Tensor,
    grad_slot_weights: Optional[Tensor],
    grad_tokens: Tensor,
    grad_topk_weights: Optional[Tensor],
) -> None:
    if handle.call_fast(
        _fast.DISPATCH_BACKWARD,
        plan,
        grad_recv_tokens,
        grad_slot_weights,
        grad_tokens,
        grad_topk_weights,
    ):
        return
    CoreHandle.dispatch_backward(
        handle,
        _gradient(handle, grad_recv_tokens, "grad_recv_tokens"),
        _weights(handle, grad_slot_weights, "grad_slot_weights"),
        grad_tokens=_given(handle, grad_tokens, "grad_tokens"),
        grad_topk_weights=_given(handle, grad_topk_weights, "grad_topk_weights"),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
    )


def dispatch_send(
    handle: Handle,
    topk_idx: Tensor,
    num_tokens: Optional[Tensor],
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    plan: Tensor,
    numbers: Optional[Tensor],
) -> None:
    CoreHandle.dispatch_send(
        handle,
        _input(handle, tokens, "tokens"),
        _weights(handle, topk_weights, "topk_weights"),
        _input(handle, scales, "scales"),
        plan=_given(handle, plan, "plan"),
        prepare=_routing(handle, topk_idx, num_tokens, numbers),
        stream=handle.stream(),
    )


def dispatch_wait(
    handle: Handle,
    recv_tokens: Tensor,
    recv_topk_weights: Optional[Tensor],
    recv_scales: Optional[Tensor],
    recv_topk_idx: Optional[Tensor],
) -> None:
    CoreHandle.dispatch_wait(
        handle,
        recv_tokens=_given(handle, recv_tokens, "recv_tokens"),
        recv_topk_weights=_given(handle, recv_topk_weights, "recv_topk_weights"),
        recv_scales=_given(handle, recv_scales, "recv_scales"),
        recv_topk_idx=_given(handle, recv_topk_idx, "recv_topk_idx"),
        stream=handle.stream(),
    )


def combine_send(
    handle: Handle,
    plan: Tensor,
    expert_out: Tensor,
    slot_weights: Optional[Tensor],
    topk_weights: Optional[Tensor],
) -> None:
    CoreHandle.combine_send(
        handle,
        _input(handle, expert_out, "expert_out"),
        _weights(handle, slot_weights, "slot_weights"),
        _weights(handle, topk_weights, "topk_weights"),
        plan=_given(handle, plan, "plan"),
        stream=handle.stream(),
    )


def combine_wait(handle: Handle, out: Tensor) -> None:
    CoreHandle.combine_wait(handle, out=_given(handle, out, "out"), stream=handle.stream())


def quantise_rows(
    group: Group, rows: Tensor, num_rows: Optional[Tensor], out: Tensor, scales: Tensor, form: Any
) -> None:
    group.quantise_rows(
        _input(group, rows, "rows"),
        _indices(group, num_rows, "num_rows"),
        out=_given(group, out, "out"),
        scales=_given(group, scales, "scales"),
        stream=current_stream(group.ordinal),
        **form,
    )
