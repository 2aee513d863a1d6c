# SPDX-License-Identifier: Apache-2.0
"""The arguments of calls, checked before the first operation: a refused call took no part."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._library import EpError, last_error
from ..torch._calls import ROW_UNIT, SCALE_UNIT, TYPES, WEIGHTS
from ..torch._counters import Blocks

if TYPE_CHECKING:
    from typing import Any, Container, NoReturn, Optional, Union

    from torch import Tensor

    from ._handles import LatencyHandle, NormalHandle

    Shape = tuple[Union[int, str], ...]  # a text is the name of a dimension of any length

_INDICES = (torch.int32, torch.int64)
_SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_BLOCK = 128  # elements that have one scale
_QUANT_UNIT = 16  # elements, of which a row that is quantised has a multiple
_MOST_TOP_K = 32
_MOST_ROW_BYTES = 65536  # EP_MAX_ROW_BYTES


def _refuse(status: Status, call: str, name: str, expected: str, got: object) -> NoReturn:
    raise EpError(status, f"{call}: {name}: expected {expected}, got {got}")


def _tensor(
    call: str,
    name: str,
    value: Any,
    shape: Shape,
    dtypes: Container[torch.dtype],
    device: Optional[torch.device] = None,
) -> None:
    """EpError unless the argument is a tensor of this shape, type and device."""
    if not isinstance(value, torch.Tensor):
        kind = type(value)
        _refuse(Status.TYPE, call, name, "a tensor", f"{kind.__module__}.{kind.__qualname__}")
    if value.layout != torch.strided:
        _refuse(Status.TYPE, call, name, "a dense tensor", f"one of layout {value.layout}")
    if value.device != device if device else not (value.is_cpu or value.is_cuda):
        _refuse(Status.ADDRESS, call, name, f"a tensor on {device or 'a CPU or GPU'}", value.device)
    if value.dtype not in dtypes:
        _refuse(Status.TYPE, call, name, _words(dtypes), value.dtype)
    sizes = value.shape
    if not _fits(sizes, shape):
        status = Status.SHAPE if len(sizes) == len(shape) else Status.NDIM
        _refuse(status, call, name, f"[{', '.join(map(str, shape))}]", list(sizes))


def _fits(sizes: tuple[int, ...], shape: Shape) -> bool:
    """Whether sizes are those of a shape, whose names stand for any number."""
    for size, length in zip(sizes, shape):  # without a generator, which takes as long as the rest
        if size != length and not isinstance(length, str):
            return False
    return len(sizes) == len(shape)


def _words(dtypes: Any) -> str:
    *some, last = (str(dtype).replace("torch.", "") for dtype in dtypes)
    return f"{', '.join(some)} or {last}" if some else last


def _rows(call: str, name: str, tensor: Tensor, unit: int, most: int) -> None:
    """EpError for rows of a size or at an address that libep cannot move."""
    size = tensor.shape[-1] * tensor.element_size()
    if size % unit or not 0 < size <= most:
        expected = f"rows of a multiple of {unit} bytes, up to {most}"
        _refuse(Status.ROW_BYTES, call, name, expected, size)
    if tensor.data_ptr() % unit and tensor.is_contiguous():
        expected = f"memory on a multiple of {unit} bytes, such as that of clone()"
        _refuse(Status.ADDRESS, call, name, expected, hex(tensor.data_ptr()))


def _number(call: str, name: str, value: Any, least: int) -> None:
    try:
        is_right = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        is_right = False
    if not is_right:
        _refuse(Status.RANGE, call, name, f"a whole number of at least {least}", repr(value))


def settle(made: Any) -> None:
    """Raise what a call in C has returned, if it is an error. None: it has done nothing."""
    if made is None:
        return
    if made > 0:
        raise last_error(made)
    raise torch.OutOfMemoryError("PyTorch has no memory for the outputs of the call")


# ---- normal mode --------------------------------------------------------------------------------


def routing(
    call: str,
    topk_idx: Any,
    num_tokens: Union[int, str] = "tokens",
    device: Optional[torch.device] = None,
) -> None:
    """Check topk_idx."""
    _tensor(call, "topk_idx", topk_idx, (num_tokens, "top-k"), _INDICES, device)
    if not 0 < topk_idx.shape[1] <= _MOST_TOP_K:
        _refuse(Status.TOP_K, call, "topk_idx", f"1 .. {_MOST_TOP_K} columns", topk_idx.shape[1])


def tokens(call: str, x: Any, num_tokens: Union[int, str] = "tokens") -> tuple[Tensor, Any]:
    """Check the rows that a dispatch sends. Returns them and their scales, or None."""
    rows, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    _tensor(call, "x", rows, (num_tokens, "hidden"), TYPES)
    _rows(call, "x", rows, ROW_UNIT, _MOST_ROW_BYTES)
    if scales is not None:
        _tensor(call, "scales of x", scales, (rows.shape[0], "scales"), TYPES, rows.device)
        most = SCALE_UNIT * -(-rows.shape[1] // _SCALE_BLOCK)
        _rows(call, "scales of x", scales, SCALE_UNIT, most)
    return rows, scales


def is_plain_dispatch(rows: Any, topk_idx: Any, topk_weights: Any, per_expert: Any = None) -> bool:
    """A quick test that `tokens` and `dispatch` refuse nothing. Arguments may be anything.

    per_expert  num_tokens_per_expert; None: topk_idx has what is asked of it
    """
    try:
        num_tokens, hidden = rows.shape
        shape, kind, device = topk_idx.shape, rows.dtype, rows.device
        count, top_k = shape
        size = hidden * kind.itemsize
        return (
            kind in TYPES
            and 0 < size <= _MOST_ROW_BYTES
            and size % ROW_UNIT == 0
            and rows.data_ptr() % ROW_UNIT == 0
            and (rows.is_cuda or rows.is_cpu)
            and count == num_tokens
            and 0 < top_k <= _MOST_TOP_K
            and (per_expert is None or _is_vector(per_expert, device))
            and _is_alike(topk_idx, shape, _INDICES, device)
            and (topk_weights is None or _is_alike(topk_weights, shape, WEIGHTS, device))
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False  # other types or dimensions, or no memory


def is_plain_combine(handle: NormalHandle, x: Any, topk_weights: Any) -> bool:
    """A quick test that `combine` refuses nothing where there is no bias."""
    try:
        rows, hidden = x.shape
        kind, device = x.dtype, x.device
        size = hidden * kind.itemsize
        return (
            kind in _SUMMABLE
            and rows == handle.num_recv_tokens
            and 0 < size <= handle.layer.max_row_bytes
            and size % ROW_UNIT == 0
            and x.data_ptr() % ROW_UNIT == 0
            and device == handle.layer.device
            and (
                topk_weights is None
                or _is_alike(topk_weights, (rows, handle.layer.top_k), WEIGHTS, device)
            )
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


def _is_vector(tensor: Tensor, device: torch.device) -> bool:
    return len(tensor.shape) == 1 and tensor.dtype in _INDICES and tensor.device == device


def _is_alike(
    tensor: Tensor, shape: tuple[int, ...], dtypes: Container[torch.dtype], device: torch.device
) -> bool:
    return (
        tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
        and tensor.layout is torch.strided
    )


def dispatch(
    rows: Tensor,
    topk_idx: Any,
    topk_weights: Any,
    is_token_in_rank: Any,
    num_tokens_per_expert: Any,
    num_ranks: int,
) -> None:
    """Check the routing of a dispatch without handle."""
    call, count, device = "dispatch", rows.shape[0], rows.device
    _tensor(call, "num_tokens_per_expert", num_tokens_per_expert, ("experts",), _INDICES, device)
    if topk_idx is None:
        shape: Shape = count, num_ranks
        _tensor(call, "is_token_in_rank", is_token_in_rank, shape, (torch.bool,), device)
        return
    routing(call, topk_idx, count, device)
    if topk_weights is not None:
        _tensor(call, "topk_weights", topk_weights, tuple(topk_idx.shape), WEIGHTS, device)


def dispatch_rows(x: Any, topk_idx: Any, topk_weights: Any, is_quantised: bool) -> None:
    """Check what dispatch_rows sends."""
    call = "dispatch_rows"
    _tensor(call, "x", x, ("tokens", "hidden"), _SUMMABLE if is_quantised else TYPES)
    _rows(call, "x", x, ROW_UNIT, _MOST_ROW_BYTES)
    if is_quantised and x.shape[1] % _QUANT_UNIT:
        expected = f"rows of a multiple of {_QUANT_UNIT} elements, to quantise them"
        _refuse(Status.ROW_BYTES, call, "x", expected, x.shape[1])
    routing(call, topk_idx, x.shape[0], x.device)
    if topk_weights is not None:
        _tensor(call, "topk_weights", topk_weights, tuple(topk_idx.shape), WEIGHTS, x.device)


def dispatch_numbers(expert_alignment: Any, num_worst_tokens: Any) -> None:
    """Check the numbers of a dispatch."""
    if type(expert_alignment) is type(num_worst_tokens) is int:
        if expert_alignment >= 1 and num_worst_tokens >= 0:
            return
    _number("dispatch", "expert_alignment", expert_alignment, 1)
    _number("dispatch", "num_worst_tokens", num_worst_tokens, 0)


def combine(handle: NormalHandle, x: Any, topk_weights: Any, biases: tuple[Any, ...]) -> None:
    """Check what combine sends and adds."""
    device, rows = handle.plan.device, handle.num_recv_tokens
    _tensor("combine", "x", x, (rows, "hidden"), _SUMMABLE, device)
    _rows("combine", "x", x, ROW_UNIT, handle.layer.max_row_bytes)
    if topk_weights is not None:
        _tensor("combine", "topk_weights", topk_weights, (rows, "top-k"), WEIGHTS, device)
        if topk_weights.shape[1] != handle.layer.top_k:
            expected = f"{handle.layer.top_k} columns"
            _refuse(Status.SHAPE, "combine", "topk_weights", expected, topk_weights.shape[1])
    if len(biases) > 2:
        _refuse(Status.SHAPE, "combine", "bias", "up to 2 tensors", len(biases))
    for bias in biases:
        _tensor("combine", "bias", bias, (handle.num_tokens, x.shape[1]), (x.dtype,), device)


# ---- low-latency mode ---------------------------------------------------------------------------


def latency_dispatch(x: Any, topk_idx: Any, most_tokens: Any, stats: Any, num_local: int) -> None:
    """Check what low_latency_dispatch sends, and the statistics that it adds to."""
    call = "low_latency_dispatch"
    _number(call, "num_max_dispatch_tokens_per_rank", most_tokens, 1)
    _tensor(call, "x", x, ("tokens", "hidden"), _SUMMABLE)
    _rows(call, "x", x, ROW_UNIT, _MOST_ROW_BYTES)
    routing(call, topk_idx, x.shape[0], x.device)
    if stats is not None:
        name = "cumulative_local_expert_recv_stats"
        _tensor(call, name, stats, (num_local,), _INDICES, x.device)


def global_scale(x: Tensor, use_nvfp4: bool, scale: Any) -> None:
    """Check x_global_scale, and the rows that it multiplies."""
    call, name = "low_latency_dispatch", "x_global_scale"
    if not use_nvfp4:
        if scale is not None:
            _refuse(Status.UNSUPPORTED, call, name, "None without use_nvfp4", "one")
        return
    if x.shape[1] % 32:
        expected = "a multiple of 32 elements with use_nvfp4"
        _refuse(Status.ROW_BYTES, call, "x", expected, x.shape[1])
    if scale is not None:
        shape: Shape = () if getattr(scale, "ndim", 1) == 0 else (1,)
        _tensor(call, name, scale, shape, (torch.float32,), x.device)


def waits(call: str, name: str, given: Any, num_ranks: int, device: torch.device) -> None:
    """Check a tensor that waits are added to, if there is one."""
    if given is not None:
        _tensor(call, name, given, (num_ranks,), (torch.int64,), device)


def mask_status(call: str, given: Any, num_ranks: int) -> None:
    """Check the tensor that masks are written to."""
    device = getattr(given, "device", torch.device("cpu"))
    _tensor(call, "mask_status", given, (num_ranks,), (torch.int32,), device)


def signals(
    handle: LatencyHandle,
    by_block: Optional[Tensor],
    block_rows: Any,
    threshold: Any,
    by_expert: Optional[Tensor],
    expected: Any,
) -> Blocks:
    """The words that a GEMM sets, of blocks or of experts."""
    call, device, group = "low_latency_combine", handle.plan.device, handle.group
    words = by_expert if by_block is None else by_block
    name = "src_signals" if by_block is None else "comp_signal"
    if words is None:
        _refuse(Status.NULL, call, "overlap", "comp_signal or src_signals with it", "neither")
    if by_block is None:
        block_rows, threshold = group.rows_per_expert, expected
    _tensor(call, name, words, ("words",), (torch.int32, torch.uint32), device)
    return Blocks(words.view(torch.int32), operator.index(block_rows), operator.index(threshold))


def latency_combine(handle: LatencyHandle, x: Any, topk_weights: Any, out: Any) -> None:
    """Check what low_latency_combine sends and writes."""
    call, device, key = "low_latency_combine", handle.plan.device, handle.group.key
    shape: Shape = key.experts_per_rank, handle.group.rows_per_expert, key.hidden
    _tensor(call, "x", x, shape, _SUMMABLE, device)
    _rows(call, "x", x, ROW_UNIT, _MOST_ROW_BYTES)
    shape = handle.num_tokens, key.top_k
    _tensor(call, "topk_weights", topk_weights, shape, WEIGHTS, device)
    if out is not None:
        _tensor(call, "out", out, (handle.num_tokens, key.hidden), (x.dtype,), device)
        if not out.is_contiguous():
            _refuse(Status.SHAPE, call, "out", "a contiguous tensor", f"strides {out.stride()}")
        _rows(call, "out", out, ROW_UNIT, _MOST_ROW_BYTES)
