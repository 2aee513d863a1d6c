# SPDX-License-Identifier: Apache-2.0
"""The operations as ops of PyTorch's dispatcher, torch.ops.libep.*: what compiled programs call.

They write into given outputs, which their schemas declare as mutated. `handle` is Handle.key, since
an op takes no object. Made by Library.define and Library.impl: a call costs a third of one through
torch.library.custom_op.

prepare_new, dispatch_new and combine_new return new outputs instead. Eager calls use them where a
dispatch mode is active: a selective checkpoint keeps what an op returns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .._abi import Status
from .._library import EpError
from .._operations import COUNTERS, OPERATIONS, SCALES
from . import _calls
from ._handle import find_handle

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor

    from .._operations import Argument, Operation
    from ._handle import Handle

_library = torch.library.Library("libep", "DEF")


def _schema(operation: Operation) -> str:
    """The op's arguments: outputs, counters and words are what it mutates. Words that are expected
    to be something are only read: but then the op must stay behind what changes them."""
    inputs = [f"Tensor{_mark(each)} {each.name}" for each in operation.inputs]
    outputs = zip("abcdefgh", operation.outputs)
    mutated = [f"Tensor({letter}!){_mark(each)} {each.name}" for letter, each in outputs]
    mutated += [f"Tensor({letter}!)? {name}=None" for letter, name in zip("vwxyz", COUNTERS)]
    blocks = "Tensor(u!)? words=None", "int block_rows=0", "int expected=0"
    scale = SCALES.get(operation.name, "")
    mark = "(t!)" if scale == "grad_scales" else ""
    named = ["*", f"Tensor{mark}? {scale}=None"] if scale else []
    return ", ".join(["int handle", *inputs, *mutated, *blocks, *named])


def _mark(argument: Argument) -> str:
    return "" if argument.is_required else "?"


def _define(operation: Operation) -> None:
    name = operation.name
    call: Callable[..., None] = getattr(_calls, name)

    def run(handle: int, *tensors: object, **scaled: object) -> None:
        call(find_handle(handle), *tensors, **scaled)

    def fake(handle: int, *tensors: object, **scaled: object) -> None:
        return None

    _library.define(f"{name}({_schema(operation)}) -> ()")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"libep::{name}", fake, lib=_library)


for _operation in OPERATIONS.values():
    if not _operation.is_phase:
        _define(_operation)


# ---- the number of rows, which is data ----------------------------------------------------------


def _count_rows(handle: int, numbers: Tensor) -> int:
    return _calls.count_rows(find_handle(handle), numbers)


def _any_rows(handle: int, numbers: Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size()


_library.define("count_rows(int handle, Tensor numbers) -> SymInt")
_library.impl("count_rows", _count_rows, "CompositeExplicitAutograd")
torch.library.register_fake("libep::count_rows", _any_rows, lib=_library)


# ---- with new outputs ---------------------------------------------------------------------------


def _define_new(schema: str, make: Callable[..., Any], call: Callable[..., None]) -> None:
    """An op whose outputs `make` allocates and `call` writes. Without `call` it is the fake."""

    def run(handle: int, *given: Any) -> Any:
        found = find_handle(handle)
        outputs = make(found, *given)
        call(found, given, outputs)
        return outputs

    def fake(handle: int, *given: Any) -> Any:
        return make(find_handle(handle), *given)

    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"libep::{name}", fake, lib=_library)


def _make_plan(handle: Handle, topk_idx: Tensor, _: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    return (
        topk_idx.new_empty((handle.plan_bytes,), dtype=torch.uint8),
        topk_idx.new_empty((handle.num_numbers,), dtype=torch.int32),
    )


def _make_received(
    handle: Handle,
    plan: Tensor,
    tokens: Tensor,
    topk_weights: Optional[Tensor],
    rows: int,
) -> list[Tensor]:
    lead = handle.lead(rows)
    outputs = [tokens.new_empty((*lead, tokens.shape[-1]))]
    if topk_weights is not None:
        outputs.append(tokens.new_empty(handle.weights_shape(rows), dtype=torch.float32))
    if handle.is_per_token:
        outputs.append(tokens.new_empty((*lead, handle.top_k), dtype=torch.int64))
    return outputs


def split_received(
    outputs: list[Tensor], has_weights: bool
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """tokens, topk_weights and topk_idx of what dispatch_new returns, which has no None."""
    rest = outputs[1:]
    weights = rest.pop(0) if has_weights else None
    return outputs[0], weights, rest[0] if rest else None


def _call_dispatch(handle: Handle, given: tuple[Any, ...], outputs: list[Tensor]) -> None:
    plan, tokens, topk_weights, _ = given
    recv, weights, idx = split_received(outputs, topk_weights is not None)
    _calls.dispatch(handle, plan, tokens, topk_weights, None, recv, weights, None, idx)


def _make_sums(
    handle: Handle,
    plan: Tensor,
    expert_out: Tensor,
    weights: Optional[Tensor],
    bias0: Optional[Tensor],
    bias1: Optional[Tensor],
    num_tokens: int,
) -> Tensor:
    return expert_out.new_empty((num_tokens, expert_out.shape[-1]))


def _call_combine(handle: Handle, given: tuple[Any, ...], out: Tensor) -> None:
    plan, expert_out, weights, bias0, bias1, _ = given
    _calls.combine(handle, plan, expert_out, weights, None, bias0, bias1, out)


_define_new(
    "prepare_new(int handle, Tensor topk_idx, Tensor? num_tokens) -> (Tensor, Tensor)",
    _make_plan,
    lambda handle, given, outputs: _calls.prepare(handle, *given, *outputs),
)
_define_new(
    "dispatch_new(int handle, Tensor plan, Tensor tokens, Tensor? topk_weights, SymInt rows)"
    " -> Tensor[]",
    _make_received,
    _call_dispatch,
)
_define_new(
    "combine_new(int handle, Tensor plan, Tensor expert_out, Tensor? weights, Tensor? bias0,"
    " Tensor? bias1, SymInt num_tokens) -> Tensor",
    _make_sums,
    _call_combine,
)

prepare = torch.ops.libep.prepare.default
dispatch = torch.ops.libep.dispatch.default
dispatch_routed = torch.ops.libep.dispatch_routed.default
combine = torch.ops.libep.combine.default
combine_backward = torch.ops.libep.combine_backward.default
dispatch_backward = torch.ops.libep.dispatch_backward.default
count_rows = torch.ops.libep.count_rows.default
prepare_new = torch.ops.libep.prepare_new.default
dispatch_new = torch.ops.libep.dispatch_new.default
combine_new = torch.ops.libep.combine_new.default

EXCHANGES = [prepare_new, dispatch_new, combine_new]
"""For torch.utils.checkpoint.create_selective_checkpoint_contexts: keep what ranks exchange, so that
backward computes the rest of a layer again and sends no row twice."""

_KEPT = {"dispatch": dispatch_new, "combine": combine_new}


def keep(*names: str) -> Callable[[], Any]:
    """The context_fn of torch.utils.checkpoint.checkpoint that keeps the results of operations.

    names  "dispatch", "combine", both or none. Operations that are not named run again in backward

    Plans are kept in any case, and with them the results of torch.topk: an operation that runs again
    exchanges no routing, and weights stay those of the experts of the plan.
    """
    for name in names:
        if name not in _KEPT:
            known = " or ".join(map(repr, _KEPT))
            raise EpError(Status.RANGE, f"keep: names: expected {known}, got {name!r}")
    kept = [prepare_new, torch.ops.aten.topk.default, *(_KEPT[name] for name in names)]
    return functools.partial(create_selective_checkpoint_contexts, kept)
