# SPDX-License-Identifier: Apache-2.0
"""prepare, dispatch and combine as differentiable functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._abi import Quant, ScaleOrder, Status
from .._library import EpError
from . import _calls, _checks, _fast, _inputs, _ops
from ._counters import as_given
from ._handle import Handle, Plan
from ._quant import GradientForm, as_scaled, row_scales, row_values

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Callable, Optional, Union

    from torch import Tensor

    from ._counters import Blocks, Counters, Given
    from ._quant import Scaled

    Shape = tuple[int, ...]
    _Shapes = tuple[Shape, Optional[Shape], Optional[Shape]]
    _Outputs = tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]
    Biases = tuple[Optional[Tensor], ...]  # two of them
    Bias = Union[Tensor, Sequence[Optional[Tensor]], None]


class Received(NamedTuple):
    """What dispatch delivers: one row for each slot. ep.h gives the shapes of the other layouts."""

    tokens: Tensor
    """[rows, H] of the tokens' type; float8_e4m3fn if the handle quantises, with Quant.NVFP4
    [rows, H / 2] uint8, of which float4_e2m1fn_x2 is a view."""

    topk_weights: Optional[Tensor]
    """[rows] float32, FLAT [rows, K]; None if dispatch got none."""

    plan: Plan
    """The step's routing, for combine."""

    scales: Optional[Tensor]
    """[rows, S], BY_COLUMN [S, rows], SWIZZLED whole tiles; None if there are none. Those of
    Quant.NVFP4 are uint8, of which float8_e4m3fn is a view."""

    topk_idx: Optional[Tensor]
    """FLAT and RANK_MAJOR: [rows, K], local experts or -1. Else None."""


# Eager calls go straight to the core, with the handle. Compiled and traced ones go through ops,
# with its key. Either is passed as `which`.
_EAGER = (torch.Tensor, torch.nn.Parameter)

_PREPARE, _DISPATCH = _fast.FORMS["prepare"], _fast.FORMS["dispatch"]
_DISPATCH_BACKWARD = _fast.FORMS["dispatch_backward"]
_COMBINE, _COMBINE_BACKWARD = _fast.FORMS["combine"], _fast.FORMS["combine_backward"]

# Dispatch modes that watch eager calls, such as that of a selective checkpoint.
_is_grad_enabled = torch.is_grad_enabled
_count_modes = torch._C._len_torch_dispatch_stack


def _choose(handle: Handle, name: str, tensor: Tensor) -> Union[Handle, int]:
    if is_compiling():
        return handle.key
    if type(tensor) in _EAGER and forward_ad._current_level < 0 and not tensor.is_neg():
        return handle
    _checks.require_usable(name, tensor)
    return handle if type(tensor) in _EAGER else handle.key


def _is_traced(tensor: Tensor) -> bool:
    """Whether a call only records what it does, with tensors that have no elements."""
    if is_compiling():
        return True
    return type(tensor) not in _EAGER and detect_fake_mode((tensor,)) is not None


def _is_latency(handle: Handle) -> bool:
    """TypeError for what is no handle."""
    try:
        return handle.is_latency
    except AttributeError:
        _checks.require_handle(handle)
        raise


def _through(which: Union[Handle, int]) -> Any:
    if type(which) is Handle:
        return _calls
    if isinstance(which, int):
        return _ops
    _checks.require_handle(which)
    return _calls


def needs_grad(*tensors: Optional[Tensor]) -> bool:
    """Whether autograd follows one. EpError for tensors of forward mode and of torch.func."""
    if forward_ad._current_level >= 0 and not is_compiling():
        for given in tensors:
            if given is not None:
                _checks.refuse_derivatives("weights", given)
    if not _is_grad_enabled():
        return False
    tensor = None
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                if not is_compiling():
                    _checks.refuse_transforms()
                return True
    except AttributeError:
        _checks.require_tensor("weights", tensor)
        raise
    return False


def _find_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's apply() for eager calls, without what that does for torch.func."""
    apply: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply")
    return apply


def _refuse_second_derivative(name: str) -> None:
    if _is_grad_enabled() and not is_compiling():
        raise EpError(
            Status.UNSUPPORTED,
            f"{name}: expected first derivatives alone, got create_graph=True: libep has no second "
            "derivatives",
        )


# ---- prepare ------------------------------------------------------------------------------------


def prepare(
    handle: Handle,
    topk_idx: Tensor,
    num_tokens: Optional[Tensor] = None,
    *,
    counters: Optional[Counters] = None,
) -> Plan:
    """Make a plan from a step's routing. Collective. Throughput mode alone.

    topk_idx    [T, K] int32 or int64: the expert of each entry; negative: none
    num_tokens  [1] int32 or int64: only the first num_tokens rows count; None: all
    counters    of waits; None: not counted

    dispatch calls it by itself, unless it is given a plan.
    """
    which = _choose(handle, "topk_idx", topk_idx)
    if _is_latency(handle):
        raise EpError(
            Status.UNSUPPORTED,
            "prepare: expected a handle in throughput mode: in latency mode dispatch prepares",
        )
    given = as_given(counters)
    if type(which) is Handle and not given:
        if _count_modes():
            made = _ops.prepare_new(handle.key, topk_idx, num_tokens)
        else:
            made = handle.make_fast(_PREPARE, topk_idx, num_tokens, 0, 0)
        if made is not None:
            return Plan(made[0], made[1], topk_idx.shape[0], handle.group.num_local_experts)
    plan = make_plan(handle, topk_idx)
    _through(which).prepare(which, topk_idx, num_tokens, plan.bytes, plan.numbers, *given)
    return plan


def make_plan(handle: Handle, topk_idx: Tensor) -> Plan:
    """A plan with memory of its own, not yet written."""
    return Plan(
        topk_idx.new_empty((handle.plan_bytes,), dtype=torch.uint8),
        topk_idx.new_empty((handle.num_numbers,), dtype=torch.int32),
        topk_idx.shape[0],
        handle.group.num_local_experts,
    )


def count_rows(handle: Handle, plan: Plan) -> int:
    """The rows of the receive buffer: the capacity, or with exact sizing those that come."""
    if not handle.is_exact:
        return handle.capacity
    if _is_traced(plan.numbers):
        traced: int = _ops.count_rows(handle.key, plan.numbers)
        torch._check(traced >= 0)
        return traced
    return _calls.count_rows(handle, plan.numbers)


def _refuse_capture(handle: Handle) -> None:
    """EpError while a graph is captured, where the host would read the number of rows."""
    if handle.ordinal >= 0 and torch.cuda.is_current_stream_capturing():
        raise EpError(
            Status.UNSUPPORTED,
            "dispatch: expected a static size (max_recv_rows) while a CUDA graph is captured, got "
            "exact sizing, where the host reads the number of rows",
        )


# ---- dispatch -----------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        which: Union[Handle, int],
        plan: Tensor,
        tokens: Tensor,
        topk_weights: Optional[Tensor],
        size: Any,
        given: Optional[Tensor],
        *counters: Optional[Tensor],
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """size: the rows of the outputs, or their _Shapes where `which` is a key."""
        outputs = None
        if type(which) is Handle:
            if given is None and not counters:
                outputs = _dispatch_new(which, plan, tokens, topk_weights, None, size)
            size = _find_shapes(which, size, tokens, topk_weights) if outputs is None else size
        if outputs is None:
            outputs = recv, weights, _, idx = _make_outputs(tokens, size, given)
            _through(which).dispatch(
                which, plan, tokens, topk_weights, None, recv, weights, None, idx, *counters
            )
        recv, weights, _, idx = outputs
        ctx.save_for_backward(plan)
        ctx.rest = (None,) * (2 + len(counters))
        ctx.facts = which, tokens.shape, None if topk_weights is None else topk_weights.shape
        if idx is not None:
            ctx.mark_non_differentiable(idx)
        return recv, weights, idx

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor, grad_weights: Optional[Tensor], _: Any) -> Any:
        _refuse_second_derivative("dispatch")
        which, shape, weights_shape = ctx.facts
        (plan,) = ctx.saved_tensors
        if weights_shape is None or not ctx.needs_input_grad[3]:
            grad_weights = None
        made = _dispatch_gradients(which, plan, grad_tokens, grad_weights, shape, weights_shape)
        return None, None, *made, *ctx.rest


def _dispatch_gradients(
    which: Union[Handle, int],
    plan: Tensor,
    grad_tokens: Tensor,
    grad_weights: Optional[Tensor],
    shape: Shape,
    weights_shape: Optional[Shape],
) -> tuple[Tensor, Optional[Tensor]]:
    if type(which) is Handle and not _count_modes():
        made: Any = which.make_fast(
            _DISPATCH_BACKWARD, plan, grad_tokens, grad_weights, shape[0], 0
        )
        if made is not None:
            return made  # type: ignore[no-any-return]
    out, out_weights = grad_tokens.new_empty(shape), None
    if grad_weights is not None and weights_shape is not None:
        grad_weights = grad_weights.contiguous()
        out_weights = grad_weights.new_empty(weights_shape)
    _through(which).dispatch_backward(
        which, plan, grad_tokens.contiguous(), grad_weights, out, out_weights
    )
    return out, out_weights


class _Dispatched(torch.autograd.Function):
    """_Dispatch of an eager call that has been made already. Less Python: it runs in every step."""

    @staticmethod
    def forward(ctx: Any, made: Any, tokens: Tensor, topk_weights: Optional[Tensor]) -> Any:
        handle, plan, recv, weights = made
        ctx.save_for_backward(plan.bytes)
        ctx.facts = handle, plan.num_tokens
        return recv, weights

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor, grad_weights: Optional[Tensor]) -> Any:
        if _is_grad_enabled():
            _refuse_second_derivative("dispatch")
        handle, num_tokens = ctx.facts
        (plan,) = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            grad_weights = None
        if not _count_modes():
            made = handle.make_fast(
                _DISPATCH_BACKWARD, plan, grad_tokens, grad_weights, num_tokens, 0
            )
            if made is not None:
                return None, *made
        shape, weights_shape = (num_tokens, grad_tokens.shape[-1]), (num_tokens, handle.top_k)
        made = _dispatch_gradients(handle, plan, grad_tokens, grad_weights, shape, weights_shape)
        return None, *made


_apply_dispatch, _apply_dispatched = _find_apply(_Dispatch), _find_apply(_Dispatched)


def _find_shapes(
    handle: Handle, rows: int, tokens: Tensor, topk_weights: Optional[Tensor]
) -> _Shapes:
    """The shapes of what a dispatch delivers: rows, weights, expert ids."""
    lead = handle.lead(rows)
    return (
        (*lead, tokens.shape[-1]),
        None if topk_weights is None else handle.weights_shape(rows),
        (*lead, handle.top_k) if handle.is_per_token else None,
    )


def _make_outputs(tokens: Tensor, shapes: _Shapes, given: Optional[Tensor]) -> _Outputs:
    rows, weights_shape, idx_shape = shapes
    # detach: the tensor that is returned gets a history, the caller's keeps none
    recv = tokens.new_empty(rows) if given is None else given.detach()
    weights = idx = None
    if weights_shape is not None:
        weights = tokens.new_empty(weights_shape, dtype=torch.float32)
    if idx_shape is not None:
        idx = tokens.new_empty(idx_shape, dtype=torch.int64)
    return recv, weights, None, idx


def _dispatch_new(
    handle: Handle,
    plan: Tensor,
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    rows: int,
) -> Optional[_Outputs]:
    """Dispatch eagerly into new outputs. None: it must go the slower way."""
    if not _count_modes():
        made: Optional[_Outputs] = handle.make_fast(
            _DISPATCH, plan, tokens, topk_weights, scales, rows, 0
        )
        return made
    if scales is not None:
        return None
    # An op that returns its outputs, which a dispatch mode can keep.
    given = _ops.dispatch_new(handle.key, plan, tokens, topk_weights, rows)
    recv, weights, idx = _ops.split_received(given, topk_weights is not None)
    return recv, weights, None, idx


def make_received(
    handle: Handle,
    plan: Plan,
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    given: Optional[Tensor],
) -> Received:
    """The outputs of a dispatch without gradient, not yet written."""
    rows = _rows(handle, plan, given)
    recv_scales, width, dtype = None, tokens.shape[-1], tokens.dtype
    if handle.quantises:
        count, scale_dtype = row_scales(handle.quant, width)
        width, dtype = row_values(handle.quant, width)
        recv_scales = tokens.new_empty(handle.scales_shape(rows, count), dtype=scale_dtype)
    elif scales is not None:
        recv_scales = scales.new_empty(handle.scales_shape(rows, scales.shape[-1]))
    recv, weights, idx = given, None, None
    if recv is None:
        recv = tokens.new_empty((*handle.lead(rows), width), dtype=dtype)
    if topk_weights is not None:
        weights = topk_weights.new_empty(handle.weights_shape(rows), dtype=torch.float32)
    if handle.is_per_token:
        idx = tokens.new_empty((*handle.lead(rows), handle.top_k), dtype=torch.int64)
    return Received(recv, weights, plan, recv_scales, idx)


def _rows(handle: Handle, plan: Plan, given: Optional[Tensor]) -> int:
    return count_rows(handle, plan) if given is None else given.shape[-2]


def dispatch(
    handle: Handle,
    tokens: Tensor,
    routing: Union[Tensor, Plan],
    topk_weights: Optional[Tensor] = None,
    scales: Optional[Tensor] = None,
    *,
    num_tokens: Optional[Tensor] = None,
    recv_tokens: Optional[Tensor] = None,
    global_scale: Optional[Tensor] = None,
    counters: Optional[Counters] = None,
    ready: Optional[Blocks] = None,
) -> Received:
    """Send token rows, and their weights, to the ranks that own their experts. Collective.

    tokens        [T, H] of any type; rows of a multiple of 16 bytes
    routing       topk_idx, [T, K] int32 or int64: the expert of each entry; negative: none. Or the
                  plan that prepare made from it.
    topk_weights  [T, K] float32, bfloat16 or float16, which travel along as float32; None: the
                  caller weights elsewhere
    scales        [T, S] of any type, rows of a multiple of 4 bytes, of tokens that are quantised
                  already; None: no scales
    num_tokens    [1] int32 or int64: only the first num_tokens rows count; None: all. With a plan,
                  prepare has taken it.
    recv_tokens   where the rows go, such as a tensor in ReceiveMemory; None: new memory. The result
                  shares this memory. With exact sizing it may have more rows than come.
    global_scale  [1] float32, by which Quant.NVFP4 multiplies: commonly 448 * 6 / (the largest
                  magnitude of the tokens of all ranks). Else None.
    counters      what it adds to, and its prepare to the waits; its derivative to nothing. None: not
                  counted
    ready         words that it stores as the rows of their blocks come. None: none

    Returns a Received. Its tensors are new, except tokens in recv_tokens. Differentiable with
    respect to tokens and topk_weights in throughput mode, without scales and quantising.
    """
    which = _choose(handle, "tokens", tokens)
    is_latency = _is_latency(handle)
    has_gradient = needs_grad(tokens, topk_weights)
    if has_gradient and (is_latency or scales is not None or handle.quantises):
        raise EpError(
            Status.UNSUPPORTED,
            "dispatch: expected tensors without gradient in latency mode, and where rows are "
            "quantised or have scales: call it under torch.no_grad(), or detach them",
        )
    scaled, counted = as_scaled(handle, "dispatch", global_scale), as_given(counters, ready)
    if is_latency:
        given = topk_weights, scales, num_tokens, recv_tokens
        return _dispatch_routed(handle, which, tokens, routing, *given, scaled, counted)
    if handle.is_exact and recv_tokens is None and not is_compiling():
        _refuse_capture(handle)
    if isinstance(routing, Plan):
        plan = routing
    else:
        if not _is_traced(tokens) and (
            scales is not None
            or recv_tokens is not None
            or not _inputs.are_plain(handle, routing, tokens, topk_weights)
        ):
            inputs = tokens, topk_weights, scales, recv_tokens
            _inputs.require(handle, routing, inputs, has_count=num_tokens is not None)
        waits = None if counters is None else counters.of_waits
        plan = prepare(handle, routing, num_tokens, counters=waits)
    if has_gradient:
        return _dispatch_followed(handle, which, plan, tokens, topk_weights, recv_tokens, counted)
    if type(which) is Handle and recv_tokens is None and not handle.quantises and not counted:
        rows = count_rows(handle, plan) if handle.is_exact else handle.capacity
        made = _dispatch_new(handle, plan.bytes, tokens, topk_weights, scales, rows)
        if made is not None:
            return Received(made[0], made[1], plan, made[2], made[3])
    received = make_received(handle, plan, tokens, topk_weights, scales, recv_tokens)
    _through(which).dispatch(
        which,
        plan.bytes,
        tokens,
        topk_weights,
        scales,
        received.tokens,
        received.topk_weights,
        received.scales,
        received.topk_idx,
        *counted,
        **scaled,
    )
    mark_written(which, recv_tokens)
    return received


def _dispatch_followed(
    handle: Handle,
    which: Union[Handle, int],
    plan: Plan,
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    recv_tokens: Optional[Tensor],
    counted: Given,
) -> Received:
    """With a gradient."""
    rows = _rows(handle, plan, recv_tokens)
    if type(which) is Handle:
        if recv_tokens is None and not counted and not _count_modes():
            made = handle.make_fast(_DISPATCH, plan.bytes, tokens, topk_weights, None, rows, 0)
            if made is not None:
                recv, weights, _, idx = made
                recv, weights = _apply_dispatched(
                    (handle, plan, recv, weights), tokens, topk_weights
                )
                return Received(recv, weights, plan, None, idx)
        recv, weights, idx = _apply_dispatch(
            which, plan.bytes, tokens, topk_weights, rows, recv_tokens, *counted
        )
    else:
        shapes = _find_shapes(handle, rows, tokens, topk_weights)
        recv, weights, idx = _Dispatch.apply(  # type: ignore[no-untyped-call]
            which, plan.bytes, tokens, topk_weights, shapes, recv_tokens, *counted
        )
    mark_written(which, recv_tokens)
    return Received(recv, weights, plan, None, idx)


def mark_written(which: Union[Handle, int], given: Optional[Tensor]) -> None:
    """Let autograd notice that a tensor which it may have saved was overwritten."""
    if given is not None and not isinstance(which, int):
        torch.autograd.graph.increment_version(given)


def _dispatch_routed(
    handle: Handle,
    which: Union[Handle, int],
    tokens: Tensor,
    topk_idx: Union[Tensor, Plan],
    topk_weights: Optional[Tensor],
    scales: Optional[Tensor],
    num_tokens: Optional[Tensor],
    given: Optional[Tensor],
    scaled: Scaled,
    counted: Given,
) -> Received:
    idx = require_indices(topk_idx)
    require_given(handle, idx, (tokens, topk_weights, scales, given), num_tokens is not None)
    plan = make_plan(handle, idx)
    received = make_received(handle, plan, tokens, topk_weights, scales, given)
    _through(which).dispatch_routed(
        which,
        idx,
        num_tokens,
        tokens,
        topk_weights,
        scales,
        plan.bytes,
        plan.numbers,
        received.tokens,
        received.topk_weights,
        received.scales,
        received.topk_idx,
        *counted,
        **scaled,
    )
    mark_written(which, given)
    return received


def require_given(
    handle: Handle, topk_idx: Tensor, inputs: _inputs.Inputs, has_count: bool
) -> None:
    """Check where the rows go, if the caller says so: a receive phase would refuse it too late."""
    tokens, _, _, recv_tokens = inputs
    if recv_tokens is not None and not _is_traced(tokens):
        _inputs.require(handle, topk_idx, inputs, has_count)


def require_indices(routing: Union[Tensor, Plan]) -> Tensor:
    """The routing of a dispatch in latency mode, which makes its plan itself."""
    if type(routing) in _EAGER:
        return routing  # type: ignore[return-value]
    if isinstance(routing, Plan):
        raise EpError(
            Status.UNSUPPORTED,
            "dispatch: routing: expected topk_idx in latency mode, got a Plan: each dispatch makes "
            "its own",
        )
    if not is_compiling():
        _checks.require_tensor("topk_idx", routing)
    return routing


# ---- combine ------------------------------------------------------------------------------------


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        which: Union[Handle, int],
        plan: Tensor,
        expert_out: Tensor,
        weights: Optional[Tensor],
        num_tokens: int,
        bias0: Optional[Tensor],
        bias1: Optional[Tensor],
        *counters: Optional[Tensor],
    ) -> Tensor:
        out = None
        biases = bias0, bias1
        ctx.num_counters = len(counters)
        if type(which) is Handle and not counters:
            out = _combine_new(which, plan, expert_out, weights, biases, num_tokens)
        if out is None:
            out = expert_out.new_empty((num_tokens, expert_out.shape[-1]))
            summed = plan, expert_out, weights, None, *biases, out
            _through(which).combine(which, *summed, *counters)
        is_kept = weights is not None and ctx.needs_input_grad[3]
        ctx.facts = which, expert_out.shape
        ctx.save_for_backward(plan, weights, expert_out if is_kept else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        biases = [grad_out if needed else None for needed in ctx.needs_input_grad[5:7]]
        counters = ctx.num_counters * (None,)
        return None, None, *_combine_gradients(ctx, grad_out), None, *biases, *counters


def _combine_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Optional[Tensor]]:
    _refuse_second_derivative("combine")
    plan, weights, expert_out = ctx.saved_tensors
    which, shape = ctx.facts
    if type(which) is Handle and not _count_modes():
        made: Any = which.make_fast(
            _COMBINE_BACKWARD, plan, grad_out, weights, expert_out, shape[0], 0
        )
        if made is not None:
            return made  # type: ignore[no-any-return]
    out, out_weights = grad_out.new_empty(shape), None
    if expert_out is not None:
        out_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    _through(which).combine_backward(
        which, plan, grad_out.contiguous(), weights, expert_out, out, out_weights
    )
    return out, out_weights


class _Combined(torch.autograd.Function):
    """_Combine without bias of an eager call that has been made already."""

    @staticmethod
    def forward(ctx: Any, made: Any, expert_out: Tensor, weights: Optional[Tensor]) -> Any:
        handle, plan, out = made
        is_kept = weights is not None and ctx.needs_input_grad[2]
        ctx.facts = handle, expert_out.shape
        ctx.save_for_backward(plan, weights, expert_out if is_kept else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return None, *_combine_gradients(ctx, grad_out)


class _CombineQuantised(torch.autograd.Function):
    """_Combine without weights on a handle with a grad_quant: gradients travel as e4m3."""

    @staticmethod
    def forward(
        ctx: Any,
        form: GradientForm,
        which: Union[Handle, int],
        plan: Tensor,
        expert_out: Tensor,
        num_tokens: int,
        bias0: Optional[Tensor],
        bias1: Optional[Tensor],
        *counters: Optional[Tensor],
    ) -> Tensor:
        out = expert_out.new_empty((num_tokens, expert_out.shape[-1]))
        summed = plan, expert_out, None, None, bias0, bias1, out
        _through(which).combine(which, *summed, *counters)
        ctx.facts = form, which, expert_out.shape, len(counters)
        ctx.save_for_backward(plan)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        _refuse_second_derivative("combine")
        form, which, shape, num_counters = ctx.facts
        (plan,) = ctx.saved_tensors
        values, scales = form.make(shape, grad_out)
        _through(which).combine_backward(
            which, plan, grad_out.contiguous(), None, None, values, None, grad_scales=scales
        )
        biases = [grad_out if needed else None for needed in ctx.needs_input_grad[5:7]]
        grad = form.dequantise(values, scales, grad_out.dtype)
        return None, None, None, grad, None, *biases, *num_counters * (None,)


def _combine_quantised(
    handle: Handle,
    which: Union[Handle, int],
    plan: Plan,
    expert_out: Tensor,
    weights: Optional[Tensor],
    biases: Biases,
    counted: Given,
) -> Tensor:
    """With a gradient that is quantised. EpError where it cannot be."""
    if weights is not None:
        raise EpError(
            Status.UNSUPPORTED,
            "combine: weights: expected None on a handle with a grad_quant, whose derivative is "
            "unweighted, got a tensor: multiply the rows by their weights before",
        )
    if handle.scale_order == ScaleOrder.SWIZZLED:
        raise EpError(
            Status.UNSUPPORTED,
            "combine: expected a handle whose scale_order is BY_ROW or BY_COLUMN for a gradient that "
            "autograd follows, got SWIZZLED: torch.ops.libep.combine_backward gives both parts",
        )
    combined: Tensor = _CombineQuantised.apply(  # type: ignore[no-untyped-call]
        GradientForm.of(handle, expert_out.shape),
        which,
        plan.bytes,
        expert_out,
        plan.num_tokens,
        *biases,
        *counted,
    )
    return combined


_apply_combine, _apply_combined = _find_apply(_Combine), _find_apply(_Combined)


def _combine_new(
    handle: Handle,
    plan: Tensor,
    expert_out: Tensor,
    weights: Optional[Tensor],
    biases: Biases,
    num_tokens: int,
) -> Optional[Tensor]:
    """Combine eagerly into a new tensor. None: it must go the slower way."""
    if _count_modes():
        watched: Tensor = _ops.combine_new(
            handle.key, plan, expert_out, weights, *biases, num_tokens
        )
        return watched
    made = handle.make_fast(_COMBINE, plan, expert_out, weights, None, *biases, num_tokens, 0)
    return None if made is None else made[0]


_NO_BIASES: Biases = (None, None)


def take_biases(bias: Bias) -> Biases:
    """Up to two biases, as the operations take them."""
    if bias is None:
        return _NO_BIASES
    given = bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise TypeError(f"bias: expected a tensor, or up to two of them, got {len(given)}")
    if is_compiling():
        # Dynamo loses a gradient of a tensor that a Function gets twice.
        given = [each if each is None else each.view_as(each) for each in given]
    else:
        for tensor in given:
            if tensor is not None:
                _checks.require_usable("bias", tensor)
    bias0, bias1 = (*given, None, None)[:2]
    return bias0, bias1


def combine(
    handle: Handle,
    plan: Plan,
    expert_out: Tensor,
    weights: Optional[Tensor] = None,
    *,
    topk_weights: Optional[Tensor] = None,
    bias: Bias = None,
    counters: Optional[Counters] = None,
    done: Optional[Blocks] = None,
) -> Tensor:
    """Return the experts' rows to the ranks of their tokens, and sum them. Collective.

    plan          of the dispatch
    expert_out    [rows, H] bfloat16, float16 or float32, of the shape of Received.tokens
    weights       [rows] float32, bfloat16 or float16, by which rows are multiplied:
                  Received.topk_weights of an expert-major or batched dispatch. None: 1, for rows
                  that are weighted already.
    topk_weights  [T, K], in latency mode or in a group with sums by entry, in place of `weights`:
                  those of this rank's tokens
    bias          [T, H] of the rows' type, or up to two of them, such as what a shared expert
                  returns: added to the sums in float32, in order, before they are rounded. None: no
                  bias. Its gradient is that of the result.
    counters      what it adds to, without expert_tokens; its derivative to nothing. None: not
                  counted
    done          words that it waits for, before it reads the rows of their blocks; their derivative
                  waits for nothing. None: all rows are there

    Returns a new tensor [T, H], zero plus bias for tokens without a slot; zero for those past
    num_tokens. Differentiable with respect to expert_out, weights and bias in throughput mode.
    """
    which = _choose(handle, "expert_out", expert_out)
    try:
        block, num_tokens = plan.bytes, plan.num_tokens
    except AttributeError:
        _checks.refuse_plan(plan)
    counted = as_given(counters, done)
    biases = _NO_BIASES if bias is None else take_biases(bias)
    if not needs_grad(expert_out, weights, topk_weights, *biases):
        if type(which) is Handle and topk_weights is None and not counted:
            made = _combine_new(which, block, expert_out, weights, biases, num_tokens)
            if made is not None:
                return made
        out = expert_out.new_empty((num_tokens, expert_out.shape[-1]))
        summed = block, expert_out, weights, topk_weights, *biases, out
        _through(which).combine(which, *summed, *counted)
        return out
    if handle.is_latency or topk_weights is not None:
        raise EpError(
            Status.UNSUPPORTED,
            "combine: expected tensors without gradient in latency mode, or with topk_weights: call "
            "it under torch.no_grad(), or detach them",
        )
    if handle.grad_quant != Quant.NONE:
        return _combine_quantised(handle, which, plan, expert_out, weights, biases, counted)
    if type(which) is Handle and bias is None and not counted and not _count_modes():
        made = handle.make_fast(
            _COMBINE, block, expert_out, weights, None, None, None, num_tokens, 0
        )
        if made is not None:
            recorded: Tensor = _apply_combined((handle, block, made[0]), expert_out, weights)
            return recorded
    apply = _apply_combine if type(which) is Handle else _Combine.apply
    combined: Tensor = apply(which, block, expert_out, weights, num_tokens, *biases, *counted)
    return combined
