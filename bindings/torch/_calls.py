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
from .._handle import Extras, PlanTensors, Prepare
from .._library import EpError
from .._operations import COUNTERS, OPERATIONS, SCALES, compile_call
from .._tensor import Tensor as CoreTensor
from .._tensor import register_converter
from . import _checks, _fast
from ._group import current_stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Callable, Optional, Union

    from torch import Tensor

    from .._operations import Operation
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


def _kept(handle: Handle, tensor: Optional[Tensor], name: str) -> Optional[CoreTensor]:
    """Integers of prepare, whose memory dispatch reads in latency mode."""
    return _indices(handle, tensor, name, handle.is_latency)


def _extras(
    handle: Handle,
    bias0: Optional[Tensor],
    bias1: Optional[Tensor],
    *counters: Optional[Tensor],
    global_scale: Optional[Tensor] = None,
    grad_scales: Optional[Tensor] = None,
    words: Optional[Tensor] = None,
    block_rows: int = 0,
    expected: int = 0,
) -> Optional[Extras]:
    """The biases of a sum, which PyTorch may make anywhere in its memory, counters, and scales, if
    any.

    words  of blocks of rows: done if some value is expected, else ready
    """
    given: dict[str, Any]
    given = {
        name: _given(handle, tensor, name)
        for name, tensor in zip(COUNTERS, counters)
        if tensor is not None
    }
    if global_scale is not None:
        given["global_scale"] = _given(handle, global_scale, "global_scale", 4)
    if grad_scales is not None:
        given["grad_scales"] = _given(handle, grad_scales, "grad_scales")
    if words is not None:
        given["done" if expected else "ready"] = _given(handle, words, "words")
        given.update(block_rows=block_rows, expected=expected)
    if bias0 is None and bias1 is None and not given:
        return None
    biases = _gradient(handle, bias0, "bias0"), _gradient(handle, bias1, "bias1")
    return Extras(*biases, **given)


def _numbers(handle: Handle, tensor: Optional[Tensor], name: str) -> Optional[PlanTensors]:
    """Plan.numbers, as the outputs of prepare."""
    return handle.outputs(_given(handle, tensor, name))


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


# How an argument becomes the core's, by its kind.
_CONVERTERS = {
    "to_plan": _given,
    "to_rows": _input,
    "to_gradient": _gradient,
    "to_weights": _weights,
    "to_indices": _indices,
    "to_kept": _kept,
    "to_numbers": _numbers,
    "to_output": _given,
}


def _make_slow(operation: Operation) -> Callable[..., None]:
    """The way tensor by tensor, through the core's Handle."""
    arguments = operation.inputs + operation.outputs
    given = {each.name: f"to_{each.kind}(handle, {each.name}, '{each.name}')" for each in arguments}
    taken = ["handle", *given, *(f"{name}=None" for name in COUNTERS)]
    taken += ["words=None", "block_rows=0", "expected=0"]
    if operation.of_kind("indices"):
        routing = ", ".join(given.pop(each) for each in ("topk_idx", "num_tokens", "numbers"))
        given["prepare"] = f"Prepare({routing})"
    elif operation.of_kind("kept"):
        given["out"] = given.pop("numbers")
    biases = [name if given.pop(name, None) else "None" for name in ("bias0", "bias1")]
    blocks = [f"{name}={name}" for name in ("words", "block_rows", "expected")]
    scaled = [f"{scale}={scale}" for name, scale in SCALES.items() if name == operation.name]
    taken += [f"{each.split('=')[0]}=None" for each in scaled]
    given["extras"] = f"extras(handle, {', '.join((*biases, *COUNTERS, *blocks, *scaled))})"
    given["stream"] = "handle.stream()"
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    run = getattr(CoreHandle, operation.function)
    names = dict(run=run, extras=_extras, Prepare=Prepare)
    call: Callable[..., None] = compile_call(taken, f"run(handle, {text})", **names, **_CONVERTERS)
    return call


def _make(name: str) -> Callable[..., None]:
    """The call of an operation: its arguments are a handle, what the table says, and perhaps
    counters, and behind these words of blocks, their rows, and what is expected of them. Those of
    SCALES also take these scales, by their name."""
    operation = OPERATIONS[name]
    slow, form = _make_slow(operation), _fast.FORMS.get(name)
    if form is None:
        return slow
    keeps = bool(operation.of_kind("kept"))

    def call(handle: Handle, *tensors: Any, **scaled: Optional[Tensor]) -> None:
        # In latency mode prepare records the tensors, which somebody must keep.
        if keeps and handle.is_latency or scaled or not handle.call_fast(form, tensors):
            slow(handle, *tensors, **scaled)

    return call


prepare = _make("prepare")
dispatch = _make("dispatch")
dispatch_routed = _make("dispatch_routed")
combine = _make("combine")
combine_backward = _make("combine_backward")
dispatch_backward = _make("dispatch_backward")
dispatch_send = _make("dispatch_send")
dispatch_wait = _make("dispatch_wait")
combine_send = _make("combine_send")
combine_wait = _make("combine_wait")


def sum_biased(
    handle: Handle,
    plan: Tensor,
    rows: Tensor,
    slot_weights: Tensor,
    biases: Sequence[Tensor],
    out: Tensor,
    out_weights: Optional[Tensor],
) -> None:
    """dispatch_backward with up to two biases: the sums of an unweighted combine, with slot_weights
    that return to their entries."""
    CoreHandle.dispatch_backward(
        handle,
        _input(handle, rows, "x"),
        _weights(handle, slot_weights, "topk_weights"),
        grad_tokens=_given(handle, out, "out"),
        grad_topk_weights=_given(handle, out_weights, "out_weights"),
        plan=_given(handle, plan, "plan"),
        extras=_extras(handle, *(*biases, None)[:2]),
        stream=handle.stream(),
    )


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
