# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer: the interface of DeepEP's second version to dispatch and combine, on libep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import Status
from .._bootstrap import Bootstrap
from .._group import Group as CoreGroup
from .._library import OfProcess
from . import _elastic_checks as _checks
from . import _elastic_steps as _steps
from ._checks import is_plain_dispatch
from ._buffer import Buffer, _meet
from ._elastic_groups import SCALE_BLOCK, ElasticGroup, ElasticGroups, Form, Key
from ._elastic_handle import EPHandle, Sizes
from ._keywords import ignore, refuse
from ._layout import experts_per_rank
from ._streams import EventHandle, EventOverlap, Lane, Used
from .utils.math import align

if TYPE_CHECKING:
    from typing import Any, NoReturn, Optional, Union

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ._normal import Tokens

    Event = Union[EventHandle, EventOverlap, None]

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]

_SIZE_UNIT = 2 << 20  # bytes, on whose multiples DeepEP's sizes are
_MOST_TOP_K = 32


class ElasticBuffer(OfProcess):
    """Dispatch and combine for the ranks of a process group. See docs/deep_ep.md.

    group                    a torch.distributed ProcessGroup of any backend, or a libep.Bootstrap
    num_max_tokens_per_rank  for dispatches that name none, equal on all ranks
    num_cpu_bytes            EpError UNSUPPORTED unless 0
    prefer_overlap_with_compute
                             take few multiprocessors where a call names none
    deterministic            not used: results always are
    num_bytes, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction,
    sl_idx, num_allocated_qps, num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy
                             not used: memory is allocated at the first call of each configuration,
                             and waits end at libep's deadline (LIBEP_TIMEOUT)

    Not collective. Each first call of a configuration is: it makes a libep group. All calls are in
    the same order on every rank, as in DeepEP.
    """

    def __init__(
        self,
        group: Union[ProcessGroup, Bootstrap],
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **unknown: Any,
    ) -> None:
        ignore("ElasticBuffer", unknown)
        if num_cpu_bytes:
            refuse(
                f"ElasticBuffer: num_cpu_bytes: expected 0, got {num_cpu_bytes}: libep has no "
                "memory of CPUs that GPUs fetch from"
            )
        bootstrap = group if isinstance(group, Bootstrap) else _meet(group)
        self.group = group
        self.rank_idx = bootstrap.rank
        self.num_ranks = bootstrap.size
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        if num_bytes is None:
            num_bytes = 0
            if num_max_tokens_per_rank and hidden:
                num_bytes = _count_bytes(self.num_ranks, num_max_tokens_per_rank, hidden, num_topk)
        self.num_bytes = num_bytes
        self._groups = ElasticGroups(bootstrap)
        self._lane = Lane()

    def destroy(self) -> None:
        """Close the libep groups. Collective. Twice does nothing.

        Without it they are closed at the end of the process.
        """
        self._groups.close()

    # ---- sizes -----------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: Union[ProcessGroup, Bootstrap],
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """The bytes that libep allocates on a rank for bf16 rows, a multiple of 2 MiB.

        num_topk  experts per token; 0: the most that there may be

        It allocates them whatever num_bytes an ElasticBuffer is given.
        """
        size = group.size if isinstance(group, Bootstrap) else group.size()
        return _count_bytes(size, num_max_tokens_per_rank, hidden, num_topk)

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, **unknown: Any
    ) -> int:
        """The multiprocessors of a call that names none: Buffer.num_sms, or all of the GPU's unless
        the buffer prefers overlap with compute."""
        if self.prefer_overlap_with_compute or not torch.cuda.is_available():
            return Buffer.num_sms
        return int(torch.cuda.get_device_properties("cuda").multi_processor_count)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """num_allocated_qps: libep has no queue pairs."""
        return self.num_allocated_qps

    def get_physical_domain_size(self) -> tuple[int, int]:
        """1, and the number of ranks: handles have the fields of one node."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """1, and the number of ranks."""
        return 1, self.num_ranks

    # ---- streams ---------------------------------------------------------------------------------

    @staticmethod
    def capture() -> EventHandle:
        """An event at this point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of operations with async_with_compute_stream. EpError without a GPU."""
        if not torch.cuda.is_available():
            refuse("get_comm_stream: expected a GPU, got a machine without one")
        return self._lane.stream()

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Let the host wait for this rank's GPU, and then for all ranks. Collective."""
        self._groups.require_open("barrier")
        if torch.cuda.is_initialized():
            if torch.cuda.is_current_stream_capturing():
                refuse(
                    "barrier: expected a call outside of a captured graph, got one inside: the "
                    "host waits"
                )
            torch.cuda.synchronize()
        self._groups.bootstrap.allgather(b"barrier")

    # ---- dispatch and combine --------------------------------------------------------------------

    def dispatch(
        self,
        x: Tokens,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        **unknown: Any,
    ) -> tuple[Tokens, Optional[Tensor], Optional[Tensor], EPHandle, EventOverlap]:
        """Send each token once to every rank that owns one of its experts. Collective.

        x                        [T, H] of any type, or with scales, float32 or int32: ([T, H],
                                 [T, S])
        topk_idx                 [T, K] int64 or int32; negative: no expert. None with a handle
        topk_weights             [T, K] float32, bfloat16 or float16, or None
        cumulative_local_expert_recv_stats
                                 [L] integers, to which the counts of a new routing are added
        num_max_tokens_per_rank  N: most tokens of a rank, equal on all ranks; None: the buffer's
        expert_alignment         counts are rounded up to multiples of this; None: 1
        handle                   of a dispatch before: send by its routing
        do_handle_copy           whether the handle has a copy of topk_idx
        do_cpu_sync              whether the host reads the sizes; None: yes, unless there is a
                                 handle. False: the outputs have the rows of the worst case
        do_expand                a row for each expert of a token, in the experts' order, in place of
                                 one for each token
        do_zero_padding          rows between experts become zero; needs do_expand
        use_tma_aligned_col_major_sf
                                 received scales are in column-major order

        T may differ between ranks, 0 included. Returns

        recv_x             [rows, H], or the pair, ordered by (source rank, token); do_expand: by
                           (expert, source rank, token)
        recv_topk_idx      [rows, K]: local experts, or -1; None with do_expand
        recv_topk_weights  [rows, K] float32; do_expand: [rows]; None without topk_weights
        handle             for combine, and for dispatch again; the one given, if any
        event              of the operation

        EpError if the routing is refused or a rank does not arrive.
        """
        ignore("dispatch", unknown)
        if do_zero_padding and not do_expand:
            refuse("dispatch: do_zero_padding: expected do_expand as well, got it alone")
        if handle is not None:
            _checks.handle("dispatch", handle, self, EPHandle)
            _checks.no_routing(topk_idx, do_cpu_sync)
            repeated = dict(
                num_experts=num_experts,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
                do_expand=do_expand,
            )
            _checks.same_form(handle, repeated)
        self._groups.require_open("dispatch")

        def change(form: Form) -> Form:
            """The form of this dispatch, by that of its plan."""
            if handle is None and not do_zero_padding and not use_tma_aligned_col_major_sf:
                return form
            return form._replace(
                num_sms=num_sms or form.num_sms,
                has_zero_padding=do_zero_padding,
                is_by_column=use_tma_aligned_col_major_sf,
            )

        given = self._check(x, handle, topk_idx, topk_weights)
        is_read = handle is None and do_cpu_sync in (None, True)
        if is_read:
            _refuse_capture(given.tokens)
        plain = None
        if handle is None:
            assert topk_idx is not None
            plain = self._choose(
                given.tokens,
                topk_idx,
                cumulative_local_expert_recv_stats,
                num_experts,
                num_max_tokens_per_rank,
                expert_alignment,
                num_sms,
                do_expand,
                is_read,
            )

        def body() -> Used:
            _wait(previous_event_before_epilogue)
            used, idx, stats, received = handle, topk_idx, None, None
            if used is None:
                assert plain is not None and idx is not None
                group, form, most, bound, alignment = plain
                stats = cumulative_local_expert_recv_stats
                kept = idx.clone() if do_handle_copy else idx
                idx = idx.contiguous()
                fast = None
                if is_read and stats is None:
                    fast = _steps.route_and_send(group, change(form), idx, given, alignment)
                if fast is not None:
                    plan, sizes, received = fast
                else:
                    plan, sizes = _steps.route(group, form, idx, most, alignment)
                used = EPHandle(self, group, form, plan, sizes, kept, bound, alignment)
                used.is_captured = _is_capturing(given.tokens)
            if received is None:
                received = _steps.send(used, change(used.form), given, stats)
            if is_read:
                _steps.report(used.group)
            inputs = *given, idx, cumulative_local_expert_recv_stats
            outputs = *received, used.topk_idx, used.plan.bytes
            return Used((received, used), inputs, outputs)

        (received, used), event = self._lane.run(
            given.tokens.device, _overlap(previous_event), async_with_compute_stream, body
        )
        recv_x = received.tokens
        if received.scales is not None:
            recv_x = received.tokens, received.scales
        return recv_x, received.topk_idx, received.topk_weights, used, event

    def _check(
        self,
        x: Tokens,
        handle: Optional[EPHandle],
        topk_idx: Optional[Tensor],
        topk_weights: Optional[Tensor],
    ) -> _steps.Given:
        if handle is not None:
            topk_idx = handle.topk_idx
        elif is_plain_dispatch(x, topk_idx, topk_weights):
            return _steps.Given(x, None, topk_weights)  # type: ignore[arg-type]
        tokens, scales = _checks.tokens(x, "tokens" if handle is None else handle.topk_idx.shape[0])
        if handle is None:
            _checks.routing(topk_idx, tokens.shape[0], tokens.device)
        else:
            _checks.rows_of(handle, tokens, scales)
        assert topk_idx is not None
        _checks.weights(topk_weights, topk_idx, tokens.device)
        return _steps.Given(tokens, scales, topk_weights)

    def _choose(
        self,
        tokens: Tensor,
        topk_idx: Tensor,
        stats: Optional[Tensor],
        num_experts: Optional[int],
        num_max_tokens_per_rank: Optional[int],
        expert_alignment: Optional[int],
        num_sms: int,
        do_expand: bool,
        is_read: bool,
    ) -> tuple[ElasticGroup, Form, Sizes, int, int]:
        """The group and the form of a dispatch without handle, and the sizes of its worst case."""
        bound = num_max_tokens_per_rank
        if bound is None:
            bound = self.num_max_tokens_per_rank
        alignment = 1 if expert_alignment is None else expert_alignment
        _checks.numbers(alignment, bound, do_expand)
        if num_experts is None:
            refuse("dispatch: num_experts: expected a number, or a handle, got neither")
        local = experts_per_rank("dispatch", num_experts, self.num_ranks)
        _checks.stats(stats, local, tokens.device)
        top_k = topk_idx.shape[1]
        hidden = tokens.shape[1]
        # At least 2 bytes: a combine of bf16 rows follows a dispatch of fp8 rows.
        key = Key(
            local,
            top_k,
            hidden * max(2, tokens.element_size()),
            4 * -(-hidden // SCALE_BLOCK),
            tokens.device,
        )
        group = self._groups.find(key, max(bound, self.num_max_tokens_per_rank))
        if tokens.shape[0] > bound:
            group.give_up(
                Status.TOKENS,
                f"dispatch: expected at most num_max_tokens_per_rank = {bound} tokens on each "
                f"rank, got {tokens.shape[0]} on rank {self.rank_idx}",
            )
        rows = self.num_ranks * bound
        slots = _steps.most_slots(rows, top_k, local, alignment)
        most = Sizes(slots if do_expand else rows, rows, slots, [])
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, top_k)
        fixed = 0 if is_read else most.num_rows
        form = Form(do_expand, alignment if do_expand else 1, fixed, num_sms)
        return group, form, most, bound, alignment

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Optional[Tensor] = None,
        bias: Union[Tensor, tuple[Optional[Tensor], ...], None] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Return rows to the ranks of their tokens, and sum them, unweighted. Collective.

        x             [rows, H] bfloat16, float16 or float32, shaped like recv_x
        topk_weights  [rows, K] of any float type, or [rows] with do_expand, to return as well, such
                      as gradients; None: none
        bias          [T, H], or up to two of them, to add to the sums
        num_sms       0: those of the dispatch

        Returns the sums [T, H]; the weights [T, K] float32, each from the row of its entry, 0 for
        entries without expert, or None; the event.
        """
        ignore("combine", unknown)
        _checks.handle("combine", handle, self, EPHandle)
        self._groups.require_open("combine")
        terms = bias if isinstance(bias, (tuple, list)) else (bias,)
        biases = tuple(term for term in terms if term is not None)
        _checks.combine(handle, x, topk_weights, biases)
        form = handle.form if not num_sms else handle.form._replace(num_sms=num_sms)

        def body() -> Used:
            _wait(previous_event_before_epilogue)
            made = _steps.combine(handle, form, x, topk_weights, biases)
            return Used(made, (x, topk_weights, *biases), made)

        (out, weights), event = self._lane.run(
            x.device, _overlap(previous_event), async_with_compute_stream, body
        )
        return out, weights, event


def _count_bytes(num_ranks: int, max_tokens: int, hidden: int, num_topk: int) -> int:
    top_k = num_topk or _MOST_TOP_K
    memory = CoreGroup.memory(
        num_ranks,
        num_experts=top_k * num_ranks,
        max_tokens=max_tokens,
        max_top_k=top_k,
        max_row_bytes=2 * hidden,
        max_scale_bytes=4 * -(-hidden // SCALE_BLOCK),
    )
    return align(memory.shared_bytes + memory.private_bytes, _SIZE_UNIT)


def _overlap(event: Event) -> Optional[EventOverlap]:
    return EventOverlap(event) if isinstance(event, EventHandle) else event


def _wait(event: Event) -> None:
    """Let the current stream wait for an event, if there is one."""
    given = event.event if isinstance(event, EventOverlap) else event
    if given is not None:
        given.current_stream_wait()


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _refuse_capture(tokens: Tensor) -> None:
    if _is_capturing(tokens):
        refuse(
            "dispatch: do_cpu_sync: expected False while a CUDA graph is captured, got a dispatch "
            "where the host reads the number of rows"
        )


# ---- what libep cannot do ------------------------------------------------------------------------

_MISSING = {
    "engram_write": "no storage that other ranks fetch entries from",
    "engram_fetch": "no storage that other ranks fetch entries from",
    "get_engram_storage_size_hint": "no storage that other ranks fetch entries from",
    "pp_set_config": "no sending of tensors to a neighbour",
    "pp_send": "no sending of tensors to a neighbour",
    "pp_recv": "no sending of tensors to a neighbour",
    "get_pp_buffer_size_hint": "no sending of tensors to a neighbour",
    "create_agrs_session": "no sessions of all-gathers",
    "destroy_agrs_session": "no sessions of all-gathers",
    "agrs_new_session": "no sessions of all-gathers",
    "agrs_set_config": "no sessions of all-gathers",
    "agrs_get_inplace_tensor": "no sessions of all-gathers",
    "all_gather": "no sessions of all-gathers",
    "get_agrs_num_max_session_bytes": "no sessions of all-gathers",
    "get_agrs_buffer_size_hint": "no sessions of all-gathers",
}


def _make_missing(name: str, why: str) -> Any:
    def missing(*_: Any, **__: Any) -> NoReturn:
        refuse(f"{name}: expected a call of dispatch or combine, got another one: libep has {why}")

    missing.__name__ = name
    missing.__doc__ = f"EpError UNSUPPORTED: libep has {why}."
    return staticmethod(missing)


for _name, _why in _MISSING.items():
    setattr(ElasticBuffer, _name, _make_missing(_name, _why))
