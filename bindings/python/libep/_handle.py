# SPDX-License-Identifier: Apache-2.0
"""Handles: the configuration of a layer, and the operations of a step."""

from __future__ import annotations

from ctypes import POINTER, byref, c_int32, c_void_p, cast, sizeof
from typing import TYPE_CHECKING, NamedTuple

from . import _abi
from ._abi import Mode, Status, Type
from ._config import handle_config
from ._group import Group
from ._library import EpError, OfProcess, last_error, library, public_name
from ._operations import calls_library
from ._tensor import Tensor, read, written

if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Optional, TypeVar

    from typing_extensions import Unpack

    from ._config import HandleFields
    from ._tensor import TensorLike

    AnyHandle = TypeVar("AnyHandle", bound="Handle")


class HandleInfo(NamedTuple):
    """The numbers of a handle's own plan. See EpHandleInfo in ep.h."""

    step: int
    num_tokens: int
    top_k: int
    recv_rows: int
    needed_rows: int
    dropped_slots: int
    remote_rows_sent: int
    remote_rows_received: int
    local_rows: int
    num_local_experts: int
    expert_counts: tuple[int, ...]
    expert_padded: tuple[int, ...]
    expert_offsets: tuple[int, ...]
    mode: Mode


_tensor_at = POINTER(_abi.EpTensor)
_plan_tensors_at = POINTER(_abi.EpPlanTensors)


def _at(tensor: Optional[Tensor]) -> Any:
    """The tensor's address, as a field of a struct. It keeps the tensor alive."""
    return None if tensor is None else _tensor_at(tensor)


class PlanTensors(_abi.EpPlanTensors):
    """Outputs of prepare; each is INT32 or INT64, and may be left out.

    expert_counts   [L] slots of each local expert, without lost ones
    expert_padded   [L] rows of each slab, padding included
    expert_offsets  [L + 1] first row of each slab, then recv_rows; or [L]: the first rows alone
    totals          [3]: recv_rows, needed_rows, dropped_slots
    source_counts   [L, R] slots of each expert from each source rank
    recv_rows, needed_rows, dropped_slots   [1] each, as in totals
    source_rows     [R] receive rows that each source rank's tokens fill

    May be made once and used in many calls. Keeps the tensors alive.
    """

    def __init__(
        self,
        *,
        expert_counts: Optional[TensorLike] = None,
        expert_padded: Optional[TensorLike] = None,
        expert_offsets: Optional[TensorLike] = None,
        totals: Optional[TensorLike] = None,
        source_counts: Optional[TensorLike] = None,
        recv_rows: Optional[TensorLike] = None,
        needed_rows: Optional[TensorLike] = None,
        dropped_slots: Optional[TensorLike] = None,
        source_rows: Optional[TensorLike] = None,
    ) -> None:
        outputs = {
            "expert_counts": expert_counts,
            "expert_padded": expert_padded,
            "expert_offsets": expert_offsets,
            "totals": totals,
            "source_counts": source_counts,
            "recv_rows": recv_rows,
            "needed_rows": needed_rows,
            "dropped_slots": dropped_slots,
            "source_rows": source_rows,
        }
        super().__init__(struct_size=sizeof(_abi.EpPlanTensors))
        for name, value in outputs.items():
            setattr(self, name, _at(written(value, name)))


class Prepare(_abi.EpPrepare):
    """The routing of a dispatch in latency mode that needs no prepare; arguments as of prepare.

    May be made once and used in many calls. Keeps the tensors alive.
    """

    def __init__(
        self,
        topk_idx: TensorLike,
        num_tokens: Optional[TensorLike] = None,
        out: Optional[PlanTensors] = None,
    ) -> None:
        super().__init__(struct_size=sizeof(_abi.EpPrepare))
        self.topk_idx = _at(read(topk_idx, "topk_idx"))
        self.num_tokens = _at(read(num_tokens, "num_tokens"))
        if out is not None:
            self.out = _plan_tensors_at(out)


class Extras(_abi.EpExtras):
    """Tensors that a call takes besides its own. Keeps them alive.

    biases  up to two tensors [T, H] of the rows' type: out = round(sum + bias0 + bias1), added in
            float32 in this order. Their gradient is that of the output.

    global_scale  [1] FP32, of the tokens of a dispatch with Quant.NVFP4

    grad_scales  of grad_expert_out, where the handle has a grad_quant: combine_backward writes them

    The others are counters of INT64, to which a call adds what it has done:

    expert_tokens         [L] slots of each local expert; INT32 serves, too
    peer_rows             [R] rows sent to each rank, those that stay included
    peer_bytes            [R] their bytes
    peer_wait_ns          [R] nanoseconds waited for each rank
    peer_longest_wait_ns  [R] becomes the longest wait of one call

    Two more are words of INT32 of blocks of block_rows receive rows:

    ready  [words] which dispatch stores as rows come
    done   [words] for which combine waits, until each is at least `expected`

    ep.h says which call takes which.
    """

    def __init__(
        self,
        *biases: Optional[TensorLike],
        expert_tokens: Optional[TensorLike] = None,
        peer_rows: Optional[TensorLike] = None,
        peer_bytes: Optional[TensorLike] = None,
        peer_wait_ns: Optional[TensorLike] = None,
        peer_longest_wait_ns: Optional[TensorLike] = None,
        global_scale: Optional[TensorLike] = None,
        ready: Optional[TensorLike] = None,
        done: Optional[TensorLike] = None,
        block_rows: int = 0,
        expected: int = 0,
        grad_scales: Optional[TensorLike] = None,
    ) -> None:
        super().__init__(
            struct_size=sizeof(_abi.EpExtras), block_rows=block_rows, expected=expected
        )
        if len(biases) > 2:
            raise TypeError(f"biases: expected at most 2, got {len(biases)}")
        for name, bias in zip(("bias0", "bias1"), biases):
            setattr(self, name, _at(read(bias, name)))
        self.global_scale = _at(read(global_scale, "global_scale"))
        self.expert_tokens = _at(written(expert_tokens, "expert_tokens"))
        self.peer_rows = _at(written(peer_rows, "peer_rows"))
        self.peer_bytes = _at(written(peer_bytes, "peer_bytes"))
        self.peer_wait_ns = _at(written(peer_wait_ns, "peer_wait_ns"))
        self.peer_longest_wait_ns = _at(written(peer_longest_wait_ns, "peer_longest_wait_ns"))
        self.grad_scales = _at(written(grad_scales, "grad_scales"))
        self.ready = _at(written(ready, "ready"))
        self.done = _at(read(done, "done"))


def _host_row(value: TensorLike, name: str) -> Tensor:
    made = written(value, name)
    if made is None or made.type != Type.INT32 or made.ndim != 1:
        raise TypeError(f"{name}: expected an INT32 tensor of 1 dimension, got {made}")
    return made


class Handle(OfProcess):
    """A configuration of a layer or micro-batch, and the operations of its steps. Local.

    group   the handle keeps it alive; closing the group ends its handles
    fields  the configuration: see HandleFields

    Tensors of the operations are Tensor objects, objects of a registered type, or arrays with
    __array_interface__ or __cuda_array_interface__. They are C-contiguous. ep.h gives their shapes;
    the letters: T tokens, K experts per token, H elements per row, S scales per row, L local
    experts, R ranks.

    Operations are collective, in the same order on every rank. On the host backend they have
    finished when they return. On the CUDA backend they are enqueued on `stream`, a cudaStream_t as
    an int, and the memory of their tensors must stay valid until they have run.

    plan    the plan that a call uses: [plan_bytes] UINT8 on a multiple of 64, of the caller; None
            is the handle's own (Plans.OWNED)

    A refused call raises EpError, took no part and left its outputs unchanged: correct the argument
    and call again. TypeError: an object is no tensor that libep can use.
    """

    def __init__(self, group: Group, **fields: Unpack[HandleFields]) -> None:
        config, out = handle_config(fields), c_void_p()
        cost = _abi.initialized(_abi.EpHandleCost)
        self._group = group
        self._fields: Mapping[str, object] = fields
        self._pointer: Optional[int] = None
        parent = group.require()
        while group.orphans:
            group.run(library.ep_handle_destroy, group.orphans.pop())
        group.call(library.ep_handle_cost, parent, byref(config), byref(cost))
        group.call(library.ep_handle_create, parent, byref(config), byref(out))
        self._pointer = out.value
        self.mode = Mode(cost.mode)
        """THROUGHPUT or LATENCY."""
        self.plan_bytes: int = cost.plan_bytes
        """Bytes of a plan of this handle, on this rank."""
        self._recorded: object = None  # what later dispatches read, since prepare recorded it
        self._sent: object = None  # what a pending dispatch writes

    def __repr__(self) -> str:
        fields = "".join(
            f", {name}={getattr(value, 'name', str(value)).lower()}"
            for name, value in self._fields.items()
        )
        end = "" if self._pointer is not None else "; it is closed"
        return (
            f"<{public_name(self)}: {self.mode.name.lower()} mode{fields}, of {self._group!r}{end}>"
        )

    # ---- facts --------------------------------------------------------------------------------

    def _require(self) -> int:
        self._group.require()
        if self._pointer is None:
            raise EpError(Status.DESTROYED, f"rank {self._group.rank}: the handle is closed")
        return self._pointer

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        if self._pointer is None or self._group.pointer is None:
            self._require()
        status = self._group.run(function, self._pointer, *arguments)
        if status:
            raise last_error(status)

    def plan(self) -> Tensor:
        """The handle's own plan, which other handles of an equal configuration may use.

        Its memory is the library's and is valid until this handle is closed.
        """
        plan = Tensor(0, Type.UINT8, (0,), owner=self)
        self._call(library.ep_handle_plan, byref(plan))
        return plan

    def info(self) -> HandleInfo:
        """Read the numbers of the handle's own plan, after prepare has finished on its stream.

        In latency mode, after dispatch or dispatch_wait has.
        """
        info = _abi.initialized(_abi.EpHandleInfo)
        self._call(library.ep_handle_info, byref(info))
        experts = info.num_local_experts
        values = {name: getattr(info, name) for name in HandleInfo._fields}
        values.update(
            mode=Mode(info.mode),
            expert_counts=tuple(info.expert_counts[:experts]),
            expert_padded=tuple(info.expert_padded[:experts]),
            expert_offsets=tuple(info.expert_offsets[: experts + 1]),
        )
        return HandleInfo(**values)

    def plan_sources(
        self,
        *,
        ranks: TensorLike,
        tokens: TensorLike,
        entries: Optional[TensorLike] = None,
        plan: Optional[TensorLike] = None,
        stream: int = 0,
    ) -> None:
        """Read which token each receive row is of, after the work on `stream`. Local.

        ranks, tokens  outputs on the host, [rows] INT32: the source rank and the token's number
                       there; -1 for rows that have no token
        entries        the same: which entry of its token the row is of; -1 in layouts with a row
                       for several entries. None: not asked for.
        """
        to = [_host_row(ranks, "ranks"), _host_row(tokens, "tokens")]
        if entries is not None:
            to.append(_host_row(entries, "entries"))
        rows = min(made.shape[0] for made in to)
        self._call(
            library.ep_plan_sources if entries is None else library.ep_plan_entries,
            read(plan, "plan"),
            stream,
            rows,
            *(cast(made.data, POINTER(c_int32)) for made in to),
        )

    def plan_source_tokens(
        self, *, counts: TensorLike, plan: Optional[TensorLike] = None, stream: int = 0
    ) -> None:
        """Read how many tokens of each rank have come, each counted once. Local.

        counts  an output on the host, [R] INT32
        """
        to = _host_row(counts, "counts")
        if to.shape[0] < self._group.size:
            raise EpError(
                Status.BUFFER_SIZE,
                f"plan_source_tokens: counts: expected at least {self._group.size} elements, got "
                f"{to.shape[0]}",
            )
        self._call(
            library.ep_plan_source_tokens,
            read(plan, "plan"),
            stream,
            cast(to.data, POINTER(c_int32)),
        )

    # ---- the five operations: calls_library makes their bodies ---------------------------------

    def prepare(
        self,
        topk_idx: TensorLike,
        num_tokens: Optional[TensorLike] = None,
        *,
        plan: Optional[TensorLike] = None,
        stream: int = 0,
        out: Optional[PlanTensors] = None,
        extras: Optional[Extras] = None,
    ) -> None:
        """Make a plan from a step's routing.

        topk_idx    [T, K] INT32 or INT64: the expert of each entry; negative: none
        num_tokens  [1] INT32 or INT64: only the first num_tokens rows count; None: all
        out         outputs: see PlanTensors
        extras      counters of waits, in throughput mode; or None

        In latency mode this records the tensors, and the dispatch that follows reads them and
        writes `out`. The handle keeps the objects alive until then.
        """
        idx, tokens = read(topk_idx, "topk_idx"), read(num_tokens, "num_tokens")
        block = written(plan, "plan")
        self._call(library.ep_prepare_with, block, idx, tokens, stream, out, extras)
        if self.mode is Mode.LATENCY:
            self._recorded = (topk_idx, num_tokens, idx, tokens, out)

    @calls_library
    def dispatch(
        self,
        tokens: TensorLike,
        topk_weights: Optional[TensorLike] = None,
        scales: Optional[TensorLike] = None,
        *,
        recv_tokens: TensorLike,
        recv_topk_weights: Optional[TensorLike] = None,
        recv_scales: Optional[TensorLike] = None,
        recv_topk_idx: Optional[TensorLike] = None,
        plan: Optional[TensorLike] = None,
        prepare: Optional[Prepare] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """Send token rows, their weights and scales to the slots of their experts.

        tokens             [T, H] of any type; rows of a multiple of 16 bytes
        topk_weights       [T, K] FP32, or None
        scales             [T, S] of any type, or None
        recv_tokens        output [rows, H]; BATCHED [L, rows, H]; RANK_MAJOR [R, max_tokens, H]
        recv_topk_weights  output [rows] FP32; FLAT [rows, K]; required with topk_weights
        recv_scales        output [rows, S]; required with scales, and if the handle quantises
        recv_topk_idx      output, FLAT and RANK_MAJOR: [rows, K] INT32 or INT64, or None
        prepare            latency mode: the routing, or None for that of the last prepare
        extras             counters, and the global scale of Quant.NVFP4; or None
        """

    @calls_library
    def combine(
        self,
        expert_out: TensorLike,
        slot_weights: Optional[TensorLike] = None,
        topk_weights: Optional[TensorLike] = None,
        *,
        out: TensorLike,
        plan: Optional[TensorLike] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """Return the experts' outputs to the ranks of their tokens, and sum them.

        expert_out    [rows, H] BF16, FP16 or FP32, shaped like recv_tokens
        slot_weights  [rows] FP32, as dispatch delivered them, or None for 1
        topk_weights  latency mode or sums by entry, in place of slot_weights: [T, K] FP32 at the
                      token's rank
        out           output [T, H] of the same type: sum of weight times row over the token's slots
        extras        biases that are added to the sums, and counters; or None
        """

    @calls_library
    def dispatch_backward(
        self,
        grad_recv_tokens: TensorLike,
        grad_slot_weights: Optional[TensorLike] = None,
        *,
        grad_tokens: TensorLike,
        grad_topk_weights: Optional[TensorLike] = None,
        plan: Optional[TensorLike] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """Compute the derivative of dispatch.

        grad_recv_tokens   [rows, H] BF16, FP16 or FP32, shaped like recv_tokens
        grad_slot_weights  gradient of recv_topk_weights, of its shape, FP32, or None
        grad_tokens        output [T, H]
        grad_topk_weights  output [T, K] FP32; required with grad_slot_weights, otherwise None
        extras             biases that are added to grad_tokens, the same sum, and counters; or None
        """

    @calls_library
    def combine_backward(
        self,
        grad_out: TensorLike,
        slot_weights: Optional[TensorLike] = None,
        expert_out: Optional[TensorLike] = None,
        *,
        grad_expert_out: TensorLike,
        grad_slot_weights: Optional[TensorLike] = None,
        plan: Optional[TensorLike] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """Compute the derivative of combine.

        grad_out           [T, H] BF16, FP16 or FP32
        slot_weights       as in combine, or None if it was unweighted
        expert_out         as in combine; required with grad_slot_weights, otherwise None
        grad_expert_out    output shaped like expert_out; FP8_E4M3 where the handle has a grad_quant
        grad_slot_weights  output shaped like slot_weights, FP32, or None
        extras             grad_scales, and counters; or None
        """

    # ---- send and receive phases, in latency mode ---------------------------------------------

    @calls_library
    def dispatch_send(
        self,
        tokens: TensorLike,
        topk_weights: Optional[TensorLike] = None,
        scales: Optional[TensorLike] = None,
        *,
        plan: Optional[TensorLike] = None,
        prepare: Optional[Prepare] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """The send phase of dispatch. Inputs may be overwritten once it has run."""

    @calls_library
    def dispatch_wait(
        self,
        *,
        recv_tokens: TensorLike,
        recv_topk_weights: Optional[TensorLike] = None,
        recv_scales: Optional[TensorLike] = None,
        recv_topk_idx: Optional[TensorLike] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """The receive phase of dispatch, with the plan of the send phase."""

    @calls_library
    def combine_send(
        self,
        expert_out: TensorLike,
        slot_weights: Optional[TensorLike] = None,
        topk_weights: Optional[TensorLike] = None,
        *,
        plan: Optional[TensorLike] = None,
        extras: Optional[Extras] = None,
        stream: int = 0,
    ) -> None:
        """The send phase of combine. Inputs may be overwritten once it has run."""

    @calls_library
    def combine_wait(
        self, *, out: TensorLike, extras: Optional[Extras] = None, stream: int = 0
    ) -> None:
        """The receive phase of combine, which takes its biases."""

    # ---- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy the handle. Waits for nobody. A second call does nothing.

        Operations under way still run. The handle's own plan is gone; named plans stay.
        """
        handle, self._pointer = self._pointer, None
        self._recorded = self._sent = None
        if handle is not None and self._group.pointer is not None:
            self._group.run(library.ep_handle_destroy, handle)

    def __del__(self) -> None:
        # The collector may run on any thread, while another one is in a call on the group. So leave
        # the work to the next handle's creation, or to the group's end.
        handle = getattr(self, "_pointer", None)
        if handle is not None:
            self._group.orphans.append(handle)

    def __enter__(self: AnyHandle) -> AnyHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
