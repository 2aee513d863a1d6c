# SPDX-License-Identifier: Apache-2.0
"""Buffer: DeepEP's interface to dispatch and combine, on libep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._abi import DEFAULT, Mode, Quant, Status, Sums
from .._bootstrap import Bootstrap
from .._group import Group as CoreGroup
from .._library import EpError, OfProcess
from ..torch import _fast, from_process_group
from . import _checks, _latency, _layout, _normal
from ._config import Config
from ._groups import Groups, LatencyKey
from ._keywords import ignore, mention, refuse
from ._handles import LatencyHandle, NormalHandle
from ._streams import EventHandle, EventOverlap, Lane, Used, find_current, find_stream

if TYPE_CHECKING:
    from typing import Any, Callable, NoReturn, Optional, Union

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ._normal import Tokens

    Hook = Callable[[], None]

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

_new = object.__new__
_LEAST_SMS = 2  # multiprocessors of an operation
_HINT_TOP_K = 8  # experts per token in get_low_latency_rdma_size_hint, which is not told


class Buffer(OfProcess):
    """Dispatch and combine for the ranks of a process group. See docs/deep_ep.md.

    group               a torch.distributed ProcessGroup of any backend, or a libep.Bootstrap
    num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank,
    allow_nvlink_for_low_latency_mode, allow_mnnvl, explicitly_destroy
                        not used: memory is allocated at the first call of each configuration
    enable_shrink       low-latency calls go on without ranks that are late: see
                        low_latency_late_us
    comm                EpError UNSUPPORTED if given without a group

    Not collective. Each first call of a configuration is: it makes a libep group. All calls are in
    the same order on every rank, as in DeepEP. Waits end at libep's deadline (LIBEP_TIMEOUT).
    """

    num_sms: int = 20
    """Multiprocessors of dispatch and combine where no config is given. See set_num_sms."""

    low_latency_sums: Sums = Sums.BY_RANK
    """How low_latency_combine adds. BY_ENTRY: all of a token's rows on its own rank, in the order of
    topk_idx, as DeepEP does: more bytes travel. Set it on all ranks before their first call."""

    low_latency_late_us: int = 100_000_000
    """With enable_shrink, how long low-latency calls wait for a rank before they go on without it,
    in microseconds. DeepEP waits for 100 s, too. Set it on all ranks before they make the Buffer."""

    def __init__(
        self,
        group: Union[ProcessGroup, Bootstrap, None],
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Optional[object] = None,
        **unknown: Any,
    ) -> None:
        ignore("Buffer", unknown)
        if group is None:
            refuse(
                "Buffer: expected a torch.distributed process group, got "
                + ("None" if comm is None else "an MPI communicator alone")
            )
        bootstrap = group if isinstance(group, Bootstrap) else _meet(group)
        self.group = group
        self.rank = bootstrap.rank
        self.group_size = bootstrap.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._groups = Groups(bootstrap, Buffer.low_latency_late_us if enable_shrink else None)
        self._lane = Lane()

    def destroy(self) -> None:
        """Close the libep groups. Collective. Twice does nothing.

        Without it they are closed at the end of the process.
        """
        self._groups.close()

    # ---- settings and sizes -----------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: libep's kernels are for sm_90."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the multiprocessors of dispatch and combine without config: an even number."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise EpError(
                Status.RANGE, f"set_num_sms: expected an even number >= 2, got {new_num_sms}"
            )
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The config of a dispatch of any number of ranks, with Buffer.num_sms."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The config of a combine of any number of ranks, with Buffer.num_sms."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes that libep allocates on a rank for low-latency bf16 rows, 8 experts per token.

        It allocates them whatever num_rdma_bytes a Buffer is given.
        """
        memory = CoreGroup.memory(
            num_ranks,
            num_experts=num_experts,
            max_tokens=num_max_dispatch_tokens_per_rank,
            max_top_k=min(_HINT_TOP_K, num_experts),
            max_row_bytes=2 * hidden,
            mode=Mode.LATENCY,
            sums=Buffer.low_latency_sums,
        )
        return memory.shared_bytes + memory.private_bytes

    # ---- streams ----------------------------------------------------------------------------------

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of operations with async_finish. EpError without a GPU."""
        if not torch.cuda.is_available():
            refuse("get_comm_stream: expected a GPU, got a machine without one")
        return self._lane.stream()

    # ---- normal mode ------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Count where this rank's tokens go. Local; dispatch does not need the numbers.

        topk_idx  [T, K] int64 or int32; negative: no expert

        Returns num_tokens_per_rank [R] int32, None, num_tokens_per_expert [E] int32,
        is_token_in_rank [T, R] bool, and the event.
        """
        if unknown:
            ignore("get_dispatch_layout", unknown)
        if not (async_finish or previous_event and previous_event.event):
            made = _layout.count_fast(topk_idx, num_experts, self.group_size)
            if type(made) is tuple:
                per_rank, per_expert, is_in = made
                return per_rank, None, per_expert, is_in, _new(EventOverlap)
        _checks.routing("get_dispatch_layout", topk_idx)

        # A count is over before a stream could be changed for it.
        if previous_event is not None and previous_event.event is not None:
            previous_event.event.current_stream_wait()
        per_rank, per_expert, is_in = _layout.count(topk_idx, num_experts, self.group_size)
        return (
            per_rank,
            None,
            per_expert,
            is_in,
            EventOverlap(EventHandle() if async_finish else None),
        )

    def dispatch(
        self,
        x: Tokens,
        handle: Optional[NormalHandle] = None,
        num_tokens_per_rank: Optional[Tensor] = None,
        num_tokens_per_rdma_rank: Optional[Tensor] = None,
        is_token_in_rank: Optional[Tensor] = None,
        num_tokens_per_expert: Optional[Tensor] = None,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[
        Tokens,
        Optional[Tensor],
        Optional[Tensor],
        Optional[list[int]],
        Optional[NormalHandle],
        EventOverlap,
    ]:
        """Send each token once to every rank that owns one of its experts. Collective.

        x                      [T, H] of any type, or with scales: ([T, H], [T, S])
        handle                 of a dispatch before: send by its routing, with x alone
        num_tokens_per_expert  [E]; its length is the number of experts
        topk_idx               [T, K] int64 or int32; negative: no expert. None: tokens go to the
                               ranks of is_token_in_rank [T, R], which takes a second operation
        topk_weights           [T, K] float32, bfloat16 or float16, or None
        expert_alignment       the list's counts are rounded up to multiples of this
        num_worst_tokens       rows of the outputs; 0: exactly as many as come, which the host reads

        T may differ between ranks, 0 included. Returns

        recv_x             [rows, H], or the pair, ordered by (source rank, token)
        recv_topk_idx      [rows, K]: local experts, or -1; None without topk_idx
        recv_topk_weights  [rows, K] float32, 0 where recv_topk_idx is -1; or None
        list               [L]: tokens of each local expert; empty with num_worst_tokens
        handle             for combine, and for dispatch again; None with a handle
        event              of the operation

        EpError if the routing is refused or a rank does not arrive.
        """
        if unknown:
            ignore("dispatch", unknown)
        num_sms = Buffer.num_sms if config is None else config.num_sms
        is_beside = async_finish or previous_event and previous_event.event
        if not (is_beside or num_worst_tokens):
            made: Any = _fast.normal_dispatch(
                NormalHandle,
                handle,
                self._lane.only,
                _new(EventOverlap),
                self._groups.steps_at,
                num_sms,
                expert_alignment,
                x,
                topk_idx,
                topk_weights,
                num_tokens_per_expert,
                is_token_in_rank,
            )
            if type(made) is tuple:
                return made
            self._settle_dispatch(made, x, topk_idx, num_tokens_per_expert)
        used = None if handle is None else _require_handle("dispatch", handle)
        is_plain = (
            used is None
            and num_tokens_per_expert is not None
            and _checks.is_plain_dispatch(x, topk_idx, topk_weights, num_tokens_per_expert)
        )
        tokens: Any = x
        scales: Optional[Tensor] = None
        if not is_plain:
            tokens, scales = _checks.tokens(
                "dispatch", x, "tokens" if used is None else used.num_tokens
            )
        if used is None:
            _checks.dispatch_numbers(expert_alignment, num_worst_tokens)
        inputs = (tokens, scales, topk_idx, topk_weights)

        def body() -> Used:
            if is_beside and scales is None and not num_worst_tokens:
                # The operations before ran on this stream, or it waits for them.
                made = _fast.normal_dispatch(
                    NormalHandle,
                    handle,
                    find_stream(tokens.device),
                    None,
                    self._groups.steps_at,
                    num_sms,
                    expert_alignment,
                    x,
                    topk_idx,
                    topk_weights,
                    num_tokens_per_expert,
                    is_token_in_rank,
                )
                if type(made) is tuple:
                    sent = _normal.Sent(made[0], None, *made[1:5])
                    return Used(sent, inputs, sent[:4])
                self._settle_dispatch(made, x, topk_idx, num_tokens_per_expert)
            if used is not None:
                sent = _normal.dispatch_again(used, tokens, scales)
            else:
                sent = self._dispatch(
                    tokens,
                    scales,
                    is_token_in_rank,
                    num_tokens_per_expert,
                    topk_idx,
                    topk_weights,
                    expert_alignment,
                    num_worst_tokens,
                    config,
                    is_plain,
                )
            return Used(sent, inputs, sent[:4])

        if handle is not None and (topk_idx is not None or topk_weights is not None):
            raise EpError(
                Status.UNSUPPORTED,
                "dispatch: expected x alone with a handle, whose routing is used, got topk_idx or "
                "topk_weights as well",
            )
        sent, event = self._lane.run(tokens.device, previous_event, async_finish, body)
        recv_x = sent.x if sent.scales is None else (sent.x, sent.scales)
        return (
            recv_x,
            sent.topk_idx,
            sent.topk_weights,
            sent.num_recv_tokens_per_expert,
            sent.handle,
            event,
        )

    def _settle_dispatch(self, made: Any, x: Any, topk_idx: Any, per_expert: Any) -> None:
        """Raise what a dispatch in C has returned, or do what it asks for. The slower way follows."""
        if made is True:
            _normal.grow(self._groups, x, topk_idx, per_expert)
        else:
            _checks.settle(made)

    def _dispatch(
        self,
        tokens: Tensor,
        scales: Optional[Tensor],
        is_token_in_rank: Optional[Tensor],
        num_tokens_per_expert: Optional[Tensor],
        topk_idx: Optional[Tensor],
        topk_weights: Optional[Tensor],
        expert_alignment: int,
        num_worst_tokens: int,
        config: Optional[Config],
        is_checked: bool,
    ) -> _normal.Sent:
        if num_tokens_per_expert is None:
            refuse(
                "dispatch: expected num_tokens_per_expert of get_dispatch_layout, or a handle, got "
                "neither"
            )
        has_ranks = is_token_in_rank is not None and topk_weights is None and not num_worst_tokens
        if topk_idx is None and not has_ranks:
            refuse(
                "dispatch: expected topk_idx, or is_token_in_rank without topk_weights and "
                "num_worst_tokens, got no topk_idx"
            )
        if not is_checked:
            _checks.dispatch(
                tokens,
                topk_idx,
                topk_weights,
                is_token_in_rank,
                num_tokens_per_expert,
                self.group_size,
            )
        if not num_worst_tokens:
            _refuse_capture("dispatch: expected num_worst_tokens", tokens)
        each = _layout.experts_per_rank("dispatch", num_tokens_per_expert.numel(), self.group_size)
        num_sms = Buffer.num_sms if config is None else config.num_sms
        if topk_idx is not None:
            return _normal.dispatch(
                self._groups,
                tokens,
                scales,
                topk_idx,
                topk_weights,
                is_token_in_rank,
                each,
                expert_alignment,
                num_worst_tokens,
                num_sms,
            )
        assert is_token_in_rank is not None
        return _normal.dispatch_to_ranks(
            self._groups,
            tokens,
            scales,
            is_token_in_rank,
            num_tokens_per_expert,
            expert_alignment,
            num_sms,
        )

    def dispatch_rows(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Optional[Tensor],
        num_experts: int,
        expert_alignment: int = 1,
        quant: Quant = Quant.NONE,
        num_sms: int = 0,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
    ) -> tuple[_normal.Sent, EventOverlap]:
        """dispatch without get_dispatch_layout. Not of DeepEP's interface. Collective.

        x        [T, H]; with `quant` bfloat16, float16 or float32
        quant    how dispatch quantises rows to float8_e4m3fn; scales are [rows, S]
        num_sms  multiprocessors, of the combine as well; 0: LIBEP_NUM_SMS

        Other arguments as of dispatch. Returns what dispatch does, in one tuple, and the event.
        """
        each = _layout.experts_per_rank("dispatch_rows", num_experts, self.group_size)
        _checks.dispatch_rows(x, topk_idx, topk_weights, quant != Quant.NONE)
        _checks.dispatch_numbers(expert_alignment, 0)
        _refuse_capture("dispatch_rows: expected another call", x)

        def body() -> Used:
            sent = _normal.dispatch(
                self._groups,
                x,
                None,
                topk_idx,
                topk_weights,
                None,
                each,
                expert_alignment,
                0,
                num_sms,
                quant,
            )
            return Used(sent, (x, topk_idx, topk_weights), sent[:4])

        sent, event = self._lane.run(x.device, previous_event, async_finish, body)
        return sent, event

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Optional[Tensor] = None,
        bias: Union[Tensor, tuple[Tensor, Tensor], None] = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **unknown: Any,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Return rows to the ranks of their tokens, and sum them, unweighted. Collective.

        x             [rows, H] bfloat16, float16 or float32, shaped like recv_x
        topk_weights  [rows, K] float32, bfloat16 or float16 to return as well, such as gradients;
                      None: none
        bias          [T, H], or two of them, to add to the sum

        Returns the sums [T, H]; the sums of the weights over the token's rows, [T, K] float32, or
        None; the event.
        """
        if unknown:
            ignore("combine", unknown)
        is_beside = async_finish or previous_event and previous_event.event
        if not (is_beside or bias is not None):
            only, event = self._lane.only, _new(EventOverlap)
            made = _fast.normal_combine(NormalHandle, handle, only, event, x, topk_weights)
            if type(made) is tuple:
                return made
            _checks.settle(made)
        biases: tuple[Tensor, ...] = ()
        if bias is not None:
            given = bias if isinstance(bias, (tuple, list)) else (bias,)
            biases = tuple(term for term in given if term is not None)
        used = _require_handle("combine", handle)
        if biases or not _checks.is_plain_combine(used, x, topk_weights):
            _checks.combine(used, x, topk_weights, biases)

        def body() -> Used:
            made = None
            if is_beside and not biases:
                stream = find_stream(x.device)
                made = _fast.normal_combine(NormalHandle, used, stream, None, x, topk_weights)
                if type(made) is not tuple:
                    _checks.settle(made)
            sums = _normal.combine(used, x, topk_weights, biases) if made is None else made[:2]
            return Used(sums, (x, topk_weights, *biases), sums)

        (out, weights), event = self._lane.run(x.device, previous_event, async_finish, body)
        return out, weights, event

    # ---- low-latency mode -------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: Optional[Tensor] = None,
        **unknown: Any,
    ) -> tuple[Tokens, Tensor, LatencyHandle, EventOverlap, Optional[Hook]]:
        """Send tokens to slabs of a fixed size, one for each local expert. Collective.

        x                                   [T, H] bfloat16, T up to the maximum
        topk_idx                            [T, K] int64 or int32; negative: no expert
        num_max_dispatch_tokens_per_rank    N, equal on all ranks
        cumulative_local_expert_recv_stats  [L] int32, to which the counts are added; or None
        dispatch_wait_recv_cost_stats       [R] int64, to which the nanoseconds are added for which
                                            each rank was waited for; or None
        use_fp8                             quantise rows: one float32 scale per 128 elements;
                                            round_scale: powers of two; use_ue8m0: their exponents
        return_recv_hook                    send alone; the hook receives, and completes the outputs
        use_nvfp4                           in place of use_fp8: quantise rows to e2m1, with an e4m3
                                            scale per 16 elements; H a multiple of 32
        x_global_scale                      [1] float32, by which use_nvfp4 multiplies, commonly
                                            448 * 6 / (the largest magnitude); None: 1

        Returns

        recv_x  [L, R * N, H], or with use_fp8 the pair of float8_e4m3fn [L, R * N, H] and scales
                [L, R * N, H / 128] float32 (use_ue8m0: [L, R * N, H / 512] int32), whose last two
                dimensions are in column-major order. Rows past an expert's count are not written.
                With use_nvfp4 the pair of uint8 [R * N, H / 2, L] and float8_e4m3fn
                [32, 4, rm, 4, rk, L], views of [L, R * N, H / 2] and of tiles
                [L, rm, rk, 32, 4, 4]; rm = ceil(R * N / 128), rk = ceil(H / 64).
        count   [L] int32
        handle  for low_latency_combine
        event   of the operation
        hook    None without return_recv_hook
        """
        ignore("low_latency_dispatch", unknown)
        _require_one_end("low_latency_dispatch", async_finish, return_recv_hook)
        each = _layout.experts_per_rank("low_latency_dispatch", num_experts, self.group_size)
        _checks.latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats, each
        )
        _checks.global_scale(x, use_nvfp4, x_global_scale)
        name = "dispatch_wait_recv_cost_stats"
        _checks.waits(
            "low_latency_dispatch", name, dispatch_wait_recv_cost_stats, self.group_size, x.device
        )
        quant = _latency.choose_quant(use_fp8, round_scale, use_ue8m0, use_nvfp4, x.shape[-1])
        group = self._groups.latency(
            LatencyKey(
                each,
                topk_idx.shape[-1],
                x.shape[-1],
                x.dtype,
                num_max_dispatch_tokens_per_rank,
                x.device,
                Buffer.low_latency_sums,
            )
        )

        def body() -> Used:
            scale = x_global_scale
            stats, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            made, operation = _latency.dispatch(group, x, topk_idx, quant, scale, stats, waits)
            (operation.send if return_recv_hook else operation.whole)()
            inputs = x, topk_idx, scale, stats, waits
            return Used((made, operation), inputs, made.tensors)

        (made, operation), event = self._lane.run(x.device, None, async_finish, body)
        hook = self._hook(x.device, operation) if return_recv_hook else None
        return made.x, made.counts, made.handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[Tensor] = None,
        combine_wait_recv_cost_stats: Optional[Tensor] = None,
        overlap: bool = False,
        packed_recv_count: Optional[Tensor] = None,
        comp_signal: Optional[Tensor] = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: Optional[Tensor] = None,
        src_signal_expect_value: int = 0,
        **unknown: Any,
    ) -> tuple[Tensor, EventOverlap, Optional[Hook]]:
        """Return the experts' rows to the ranks of their tokens, and sum them, weighted. Collective.

        x                 [L, R * N, H] bfloat16; with zero_copy the rows are in the buffer of
                          get_next_low_latency_combine_buffer instead
        topk_idx          not used: the handle has the routing
        topk_weights      [T, K] float32, of this rank's tokens
        use_logfmt        not used: rows travel in their own type, which is more precise
        out               [T, H], where the sums go; None: new memory
        return_recv_hook  as in low_latency_dispatch
        combine_wait_recv_cost_stats
                          as dispatch_wait_recv_cost_stats there
        overlap           whether a GEMM still writes x. Its start must precede this call on the
                          stream. Either it adds to comp_signal [L * ceil(R * N / block_m)], a word
                          for each block of block_m rows, up to `threshold`; or to src_signals [L], a
                          word for each expert, up to src_signal_expect_value. Words are 32 bits.
        packed_recv_count not used: the handle has the counts
        num_sms           multiprocessors of this operation beside the GEMM; 0: all

        Returns the sums [T, H], the event, and the hook or None.
        """
        ignore("low_latency_combine", unknown)
        _require_one_end("low_latency_combine", async_finish, return_recv_hook)
        if use_logfmt:
            mention("low_latency_combine", "use_logfmt", "rows travel in their own type")
        made_by = _require_latency_handle("low_latency_combine", handle)
        rows = made_by.group.combine_buffer() if zero_copy else x
        _checks.latency_combine(made_by, rows, topk_weights, out)
        waits = combine_wait_recv_cost_stats
        name = "combine_wait_recv_cost_stats"
        _checks.waits("low_latency_combine", name, waits, self.group_size, rows.device)

        signals = comp_signal, block_m, threshold, src_signals, src_signal_expect_value
        done = _checks.signals(made_by, *signals) if overlap else None
        sms = max(num_sms, _LEAST_SMS) if overlap and num_sms else DEFAULT

        def body() -> Used:
            combined, operation = _latency.combine(
                made_by, rows, topk_weights, out, waits, done, sms
            )
            (operation.send if return_recv_hook else operation.whole)()
            words = None if done is None else done.words
            return Used((combined, operation), (rows, topk_weights, out, waits, words), (combined,))

        (combined, operation), event = self._lane.run(rows.device, None, async_finish, body)
        hook = self._hook(rows.device, operation) if return_recv_hook else None
        return combined, event, hook

    def _hook(self, device: torch.device, operation: _latency.Operation) -> Hook:
        """The receive phase, once, on the stream of the send phase."""
        stream = None if device.type == "cpu" else find_current(device.index)
        pending = [operation.receive]

        def hook() -> None:
            if not pending:
                raise EpError(Status.ORDER, "hook: expected one call, got a second one")
            receive = pending.pop()
            if stream is None:
                receive()
                return
            self._lane.run_on(stream, receive)
            current = find_current(device.index)
            if current is not stream:
                current.wait_stream(stream)

        return hook

    def get_next_low_latency_combine_buffer(self, handle: LatencyHandle) -> Tensor:
        """[L, R * N, H]: memory to fill for the next low_latency_combine with zero_copy."""
        call = "get_next_low_latency_combine_buffer"
        return _require_latency_handle(call, handle).group.combine_buffer()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing: libep's buffers need no cleaning."""

    # ---- ranks that are late or gone --------------------------------------------------------------

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Optional[torch.Size] = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory that nothing uses, which callers may clean after a rank has been lost.

        EpError UNSUPPORTED without enable_shrink: libep has no communication buffer for callers.

        dtype   the tensor's type
        size    its shape; None: one element
        """
        if not self.enable_shrink:
            refuse(
                "get_local_buffer_tensor: libep has no communication buffer that callers may use"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(size or (1,), dtype=dtype, device=device)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Let low-latency calls of this rank go on without another one, from now on. Local.

        mask  True. EpError UNSUPPORTED for False where the rank is masked: ranks come back together,
              by low_latency_clean_mask_buffer.
        """
        call = "low_latency_update_mask_buffer"
        self._require_shrink(call)
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            raise EpError(
                Status.RANGE,
                f"{call}: rank_to_mask: expected another rank below {self.group_size}, got "
                f"{rank_to_mask}",
            )
        if mask and not self._groups.cut(rank_to_mask):
            refuse(f"{call}: expected a low-latency call before, got none: nothing can be masked")
        if mask:
            return
        if rank_to_mask in self._groups.masked():
            refuse(
                f"{call}: expected mask to be True, got False: to bring rank {rank_to_mask} back, "
                "all ranks call low_latency_clean_mask_buffer"
            )

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for each rank that low-latency calls of this rank go on without, else 0. Local.

        mask_status  [R] int32

        On GPUs it waits for the current stream, whose operations may find that a rank is late.
        """
        call = "low_latency_query_mask_buffer"
        self._require_shrink(call)
        _checks.mask_status(call, mask_status, self.group_size)
        if mask_status.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                refuse(f"{call}: expected a call outside of captures, got one in a capture")
            torch.cuda.current_stream(mask_status.device).synchronize()
        masked = self._groups.masked()
        words = [int(rank in masked) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(words, dtype=torch.int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """Bring all ranks back that come. Collective over the ranks that live.

        Waits for each other rank until libep's deadline (LIBEP_TIMEOUT). One that does not come is
        masked on all others.
        """
        self._require_shrink("low_latency_clean_mask_buffer")
        self._groups.readmit()

    def _require_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            refuse(f"{call}: expected a Buffer with enable_shrink, got one without")


def _meet(group: ProcessGroup) -> Bootstrap:
    try:
        return from_process_group(group)
    except TypeError as error:
        raise EpError(Status.TYPE, f"Buffer: {error}") from None


def _refuse_capture(expected: str, tokens: Tensor) -> None:
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse(
            f"{expected} while a CUDA graph is captured, got none: the host would read the number of "
            "rows"
        )


def _require_handle(call: str, handle: object) -> NormalHandle:
    if not isinstance(handle, NormalHandle):
        _refuse_handle(call, "dispatch", handle)
    used: NormalHandle = handle
    return used


def _require_latency_handle(call: str, handle: object) -> LatencyHandle:
    if not isinstance(handle, LatencyHandle):
        _refuse_handle(call, "low_latency_dispatch", handle)
    return handle


def _refuse_handle(call: str, made_by: str, handle: object) -> NoReturn:
    raise EpError(
        Status.TYPE,
        f"{call}: handle: expected one that {made_by} returned, got {type(handle).__qualname__}",
    )


def _require_one_end(call: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        refuse(f"{call}: expected async_finish or return_recv_hook, got both")
