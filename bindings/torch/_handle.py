# SPDX-License-Identifier: Apache-2.0
"""Handles of libep.torch: a core handle that knows its device and the shapes of its tensors."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Layout, Mode, Plans, Quant, Rows, ScaleOrder, Status, Tail, Type
from .._config import max_recv_rows, name_members
from .._formats import scales_shape
from .._handle import Handle as CoreHandle
from .._handle import PlanTensors
from .._library import EpError, last_error
from .._tensor import Tensor as CoreTensor
from . import _fast
from ._group import Group, current_stream

if TYPE_CHECKING:
    from typing import Any, Optional

    from torch import Tensor
    from typing_extensions import Unpack

    from .._config import HandleFields

_keys = itertools.count(1)
_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()


def find_handle(key: int) -> Handle:
    """The handle of a key. EpError DESTROYED if nothing refers to it any more."""
    handle = _handles.get(key)
    if handle is None:
        raise EpError(
            Status.DESTROYED,
            f"handle {key} is gone: keep the libep.torch.Handle as long as programs use it",
        )
    return handle


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).replace("torch.", "")
    return f"<{dtype} {list(tensor.shape)} on {tensor.device}>"


class Plan(NamedTuple):
    """A step's routing, made by dispatch: tensors and two ints, which may be saved and passed on.

    Any number may be live. libep reads `bytes` alone, and writes neither after dispatch.
    """

    bytes: Tensor
    """[plan_bytes] uint8: what the operations read. Do not change it."""

    numbers: Tensor
    """int32: the tensors below, one after the other; on the group's device."""

    num_tokens: int
    """T: rows of the tokens, and of combine's output."""

    num_local_experts: int
    """L."""

    def __repr__(self) -> str:
        return (
            f"Plan(num_tokens={self.num_tokens}, num_local_experts={self.num_local_experts}, "
            f"bytes={_describe(self.bytes)}, numbers={_describe(self.numbers)})"
        )

    @property
    def expert_counts(self) -> Tensor:
        """[L] rows of each local expert, without padding and lost rows."""
        return self.numbers[: self.num_local_experts]

    @property
    def expert_padded(self) -> Tensor:
        """[L] rows of each local expert, padding included. They fill the rows from the start."""
        return self.numbers[self.num_local_experts : 2 * self.num_local_experts]

    @property
    def expert_offsets(self) -> Tensor:
        """[L + 1] first row of each expert, then the number of rows filled."""
        return self.numbers[2 * self.num_local_experts : 3 * self.num_local_experts + 1]

    @property
    def expert_ends(self) -> Tensor:
        """[L] row after the last of each expert: the `offs` of torch.nn.functional.grouped_mm."""
        return self.numbers[2 * self.num_local_experts + 1 : 3 * self.num_local_experts + 1]

    @property
    def totals(self) -> Tensor:
        """[3] rows filled, rows needed, slots lost to the capacity."""
        return self.numbers[3 * self.num_local_experts + 1 : 3 * self.num_local_experts + 4]

    @property
    def source_rows(self) -> Tensor:
        """[R] rows that each source rank's tokens fill; RANK_MAJOR: rows of each block."""
        return self.numbers[3 * self.num_local_experts + 4 :]


class Handle(CoreHandle):
    """A configuration of a layer or micro-batch, for the functions of libep.torch. Local.

    group   a libep.torch.Group, which the handle keeps alive
    fields  the configuration (libep.HandleFields). Differences from ep.h's defaults: plans are
            named by the calls (Plans.NAMED), and in throughput mode rows past the last slab become
            zero (Tail.ZERO), so that NaNs in unused memory do not get into products with zero.
            In latency mode the expert ids of rows that are not used become -1 (Tail.IDS).

    Compiled programs name a handle by its number `key`: keep the object as long as they run.
    """

    _anew = "save the state_dict of a layer, and make handles anew"

    def __init__(self, group: Group, **fields: Unpack[HandleFields]) -> None:
        if not isinstance(group, Group):
            kind = type(group)
            raise TypeError(
                f"group: expected a libep.torch.Group, got {kind.__module__}.{kind.__qualname__}"
            )
        name_members(fields)
        fields.setdefault("plans", Plans.NAMED)
        if fields.get("mode", group.fields.get("mode", Mode.THROUGHPUT)) == Mode.THROUGHPUT:
            fields.setdefault("zero_tail", Tail.ZERO)
        elif fields.get("layout") in (Layout.FLAT, Layout.RANK_MAJOR):
            fields.setdefault("zero_tail", Tail.IDS)
        super().__init__(group, **fields)
        self.key = next(_keys)
        """The number by which ops name the handle."""
        self.group = group
        self.device = group.device
        self.ordinal = group.ordinal
        self.is_latency = self.mode is Mode.LATENCY
        self.layout = fields.get("layout", Layout.EXPERT_MAJOR)
        self.top_k = _given(fields.get("top_k"), group.fields["max_top_k"])
        self.capacity = _given(fields.get("max_recv_rows"), group.fields.get("max_recv_rows", 0))
        self.quant = fields.get("quant", Quant.NONE)
        self.scale_order = fields.get("scale_order", ScaleOrder.BY_ROW)
        # What calls ask for is computed once: comparing enums takes as long as half a call.
        self.grad_quant = fields.get("grad_quant", Quant.NONE)
        self.quantises = self.quant != Quant.NONE
        """Whether dispatch quantises."""
        self.is_exact = self.capacity == 0 and self.layout in (Layout.EXPERT_MAJOR, Layout.FLAT)
        """Whether sizes are exact: dispatch reads the number of rows on the host."""
        self.most_rows = self._count_most_rows(fields) if self.is_exact else self.capacity
        """No step has more receive rows."""
        self.is_per_token = self.layout in (Layout.FLAT, Layout.RANK_MAJOR)
        """Whether a receive row is one of a (token, rank), so that it has K weights."""
        self._own_lead: Optional[tuple[int, ...]] = None
        if self.layout == Layout.BATCHED:
            self._own_lead = (group.num_local_experts, fields.get("rows_per_expert", 0))
        elif self.layout == Layout.RANK_MAJOR:
            self._own_lead = (group.size, group.fields["max_tokens"])
        self.has_blocks = self._own_lead is not None
        """Whether blocks of receive rows have a fixed size."""
        self.max_row_bytes = group.fields["max_row_bytes"]
        """Most bytes of a row of tokens."""
        self.num_numbers = 3 * group.num_local_experts + 4 + group.size
        """Elements of Plan.numbers."""
        self._outputs = threading.local()
        self._facts = self._make_facts()
        self.facts_at = ctypes.addressof(self._facts)
        """The address of what C knows of the handle."""
        _handles[self.key] = self

    def _make_facts(self) -> _fast.HandleFacts:
        blocks, rows_per_block = self._own_lead or (0, 0)
        group_facts = ctypes.addressof(self.group.in_calls)
        return _fast.HandleFacts(
            torch=_fast.functions,
            group=group_facts,
            handle=self._pointer,
            plan_bytes=self.plan_bytes,
            max_row_bytes=self.max_row_bytes,
            blocks=blocks,
            rows_per_block=rows_per_block,
            device=self.ordinal,
            num_local_experts=self.group.num_local_experts,
            num_ranks=self.group.size,
            top_k=self.top_k,
            has_blocks=self.has_blocks,
            is_per_token=self.is_per_token,
            by_column=self.scale_order != ScaleOrder.BY_ROW,
        )

    def _count_most_rows(self, fields: HandleFields) -> int:
        given = self.group.fields.copy()
        given["max_top_k"] = self.top_k
        given["alignment"] = _given(fields.get("alignment"), given.get("alignment", 1))
        return max_recv_rows(
            self.group.size, self.group.rank, self.layout, Rows.DUPLICATES, **given
        )

    def stream(self) -> int:
        """The current stream of the group's device, a cudaStream_t as an int; 0 on CPUs."""
        return current_stream(self.ordinal)

    def call_fast(self, form: int, tensors: tuple[Optional[Tensor], ...]) -> bool:
        """Run one of _fast.FORMS on the current stream, by _fast.call.

        False: it must go the slower way.
        """
        if _fast.call is None or self._pointer is None or self.group.pointer is None:
            return False
        status: int = self.group.run(_fast.call, self.facts_at, form, tensors)
        if status > 0:
            raise last_error(status)
        return status != _fast.LEFT

    def make_fast(self, form: int, *arguments: object) -> Any:
        """Run one of _fast.FORMS on the current stream, by _fast.make, which takes the arguments.

        Returns the new outputs. None: it must go the slower way.
        """
        if _fast.make is None or self._pointer is None or self.group.pointer is None:
            return None
        made = self.group.run(_fast.make, self.facts_at, form, *arguments)
        if type(made) is int:
            raise last_error(made)
        return made

    def send_fast(self, numbers: int, *arguments: object) -> Any:
        """Prepare, wait for the counts and dispatch, by _fast.send, which takes the arguments.

        numbers  the address of memory of the host for Plan.numbers, which the GPU reaches

        None: it must go the slower way.
        """
        if _fast.send is None or self._pointer is None or self.group.pointer is None:
            return None
        sent = self.group.run(
            _fast.send, self.facts_at, _fast.FORMS["dispatch"], numbers, *arguments
        )
        if type(sent) is int:
            raise last_error(sent)
        return sent

    def read_sources(self, plan: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Which token each of `rows` receive rows is of. Waits for the current stream. Local.

        plan  Plan.bytes, after the dispatch

        Returns the source ranks and the tokens' numbers there, [rows] int32; -1: no token.
        """
        ranks, tokens = torch.empty((2, rows), dtype=torch.int32, device="cpu")
        self.plan_sources(ranks=ranks, tokens=tokens, plan=plan, stream=self.stream())
        return ranks.to(self.device), tokens.to(self.device)

    def outputs(self, numbers: Optional[CoreTensor]) -> Optional[PlanTensors]:
        """The outputs of prepare that make up Plan.numbers.

        Made once per thread, since making them costs more than a call.
        """
        if numbers is None:
            return None
        if numbers.type != Type.INT32 or numbers.ndim != 1 or numbers.shape[0] != self.num_numbers:
            raise TypeError(
                f"numbers: expected an int32 tensor of shape [{self.num_numbers}], got {numbers}"
            )
        cached = getattr(self._outputs, "cached", None)
        if cached is None:
            cached = self._outputs.cached = self._make_outputs()
        plan_tensors, parts = cached
        for part, offset in parts:
            part.data = numbers.data + offset
        return plan_tensors

    def _make_outputs(self) -> tuple[PlanTensors, list[tuple[CoreTensor, int]]]:
        local = self.group.num_local_experts
        lengths = {
            "expert_counts": local,
            "expert_padded": local,
            "expert_offsets": local + 1,
            "totals": 3,
            "source_rows": self.group.size,
        }
        tensors, parts, offset = {}, [], 0
        for name, length in lengths.items():
            tensors[name] = CoreTensor(0, Type.INT32, (length,))
            parts.append((tensors[name], 4 * offset))
            offset += length
        return PlanTensors(**tensors), parts

    # ---- shapes of what dispatch delivers -------------------------------------------------------

    def lead(self, rows: int) -> tuple[int, ...]:
        """The dimensions of receive tensors before the elements of a row.

        rows  of the receive buffer; BATCHED and RANK_MAJOR have their own number
        """
        return (rows,) if self._own_lead is None else self._own_lead

    def weights_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of recv_topk_weights."""
        return self.lead(rows) + ((self.top_k,) if self.is_per_token else ())

    def scales_shape(self, rows: int, count: int) -> tuple[int, ...]:
        """The shape of recv_scales, with `count` scales per row."""
        return scales_shape(self.scale_order, self.lead(rows), count)


def _given(value: Optional[int], default: int) -> int:
    """A field of the handle's configuration, where EP_DEFAULT (-1) means the group's."""
    return default if value is None or value < 0 else value
