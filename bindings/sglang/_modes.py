# SPDX-License-Identifier: Apache-2.0
"""Normal and low-latency mode: what SGLang's outputs are, in calls of libep.deep_ep.Buffer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.environ import envs  # type: ignore[import-not-found]
from sglang.srt.eplb.expert_distribution import (  # type: ignore[import-not-found]
    get_global_expert_distribution_recorder,
)
from sglang.srt.layers import deep_gemm_wrapper  # type: ignore[import-not-found]
from sglang.srt.layers.moe.token_dispatcher.deepep import (  # type: ignore[import-not-found]
    DeepEPConfig,
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
    _deepep_precompile_tp_barrier,
)
from sglang.srt.layers.moe.utils import (  # type: ignore[import-not-found]
    DeepEPMode,
    DispatcherOutputDtype,
    get_deepep_config,
    get_deepep_output_dtype,
    is_tbo_enabled,
)

from .._abi import Quant, Status
from .._library import EpError
from ..deep_ep import Buffer

if TYPE_CHECKING:
    from typing import Any, ContextManager, Optional

    from torch import Tensor

    from ..deep_ep import EventOverlap

_ALIGNMENT = 128  # of DeepGEMM's slabs
_PACK = 4  # UE8M0 scales in an int32


class Layer(NamedTuple):
    """What both modes know of an MoE layer."""

    buffer: Buffer
    num_experts: int
    top_k: int
    hidden: int
    runner_backend: Any


class _Mode:
    """The type of rows, which SGLang computes from these attributes."""

    dispatch_mode: Any

    def __init__(self, layer: Layer) -> None:
        self._handle: Any = None  # of the dispatch, for the combine
        self.layer = layer
        self.runner_backend = layer.runner_backend
        self.set_quant_config({})

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config
        chosen = get_deepep_output_dtype(self)
        if chosen not in (DispatcherOutputDtype.BF16, DispatcherOutputDtype.FP8):
            raise EpError(
                Status.UNSUPPORTED,
                "Dispatcher: expected rows of bf16 or fp8 (--deepep-dispatcher-output-dtype), got "
                f"{chosen.value}",
            )
        self.is_fp8 = chosen == DispatcherOutputDtype.FP8


class Normal(_Mode):
    """Exactly as many rows as come, one for each (token, rank). The host waits for their number.

    Operations run beside the current stream where another batch computes there, else on it.
    """

    dispatch_mode = DeepEPMode.NORMAL

    def dispatch_a(self, x: Tensor, topk: Any) -> Any:
        ready = self.layer.buffer.capture() if is_tbo_enabled() else None
        return x, topk.topk_ids, topk.topk_weights, ready

    def dispatch_b(self, pending: Any) -> Any:
        x, topk_ids, topk_weights, ready = pending
        layer, quant = self.layer, self._quant()
        _deepep_precompile_tp_barrier()
        sent, event = layer.buffer.dispatch_rows(
            x,
            topk_ids,
            topk_weights,
            layer.num_experts,
            _ALIGNMENT if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1,
            quant,
            _count_sms(),
            previous_event=ready,
            async_finish=ready is not None,
        )
        _wait(event)
        self._handle = sent.handle
        self._record(sent.num_recv_tokens_per_expert, topk_ids)
        scales, ids = sent.scales, sent.topk_idx
        assert ids is not None
        if scales is not None and quant == Quant.FP8_UE8M0:
            scales = scales.view(torch.int32)
        return DeepEPNormalDispatchOutput(
            sent.x,
            scales,
            ids.to(torch.int64),
            sent.topk_weights,
            sent.num_recv_tokens_per_expert,
        )

    def _quant(self) -> Quant:
        """How dispatch quantises: as SGLang would before it."""
        if not (deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and self.is_fp8):
            return Quant.NONE
        if not deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
            return Quant.FP8
        _require_packs(self.layer.hidden)
        return Quant.FP8_UE8M0

    def _record(self, counts: Any, topk_ids: Tensor) -> None:
        recorder = get_global_expert_distribution_recorder()
        if not recorder.recording:
            return
        layout = self.layer.buffer.get_dispatch_layout(topk_ids, self.layer.num_experts)
        recorder.on_deepep_dispatch_normal(
            counts,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2],
        )

    def combine_a(self, given: Any, overlap: Any, _: Any) -> tuple[Tensor, EventOverlap]:
        handle, self._handle = self._handle, None
        _deepep_precompile_tp_barrier()
        out, _, event = self.layer.buffer.combine(
            given.hidden_states, handle, async_finish=is_tbo_enabled()
        )
        return out, event

    def combine_b(self, pending: tuple[Tensor, EventOverlap]) -> Tensor:
        out, event = pending
        _wait(event)
        return out


class LowLatency(_Mode):
    """A slab of a fixed size for each expert. Nothing waits on the host."""

    dispatch_mode = DeepEPMode.LOW_LATENCY

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.max_tokens = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        """Most tokens of a rank in a step."""

    def dispatch_a(self, x: Tensor, topk: Any) -> Any:
        layer = self.layer
        is_packed = (
            self.is_fp8
            and deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM
            and deep_gemm_wrapper.DEEPGEMM_BLACKWELL
        )
        _deepep_precompile_tp_barrier()
        rows, counts, self._handle, _, receive = layer.buffer.low_latency_dispatch(
            x,
            topk.topk_ids,
            self.max_tokens,
            layer.num_experts,
            use_fp8=self.is_fp8,
            round_scale=is_packed,
            use_ue8m0=is_packed,
            return_recv_hook=True,
        )
        entries = x.shape[0] * layer.buffer.group_size * layer.top_k
        expected_m = (entries + layer.num_experts) // layer.num_experts
        return rows, topk, counts, expected_m, receive

    def dispatch_b(self, pending: Any) -> Any:
        rows, topk, counts, expected_m, receive = pending
        receive()
        get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(counts)
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        return DeepEPLLDispatchOutput(
            x, scales, topk.topk_ids, topk.topk_weights, counts, expected_m
        )

    def combine_a(self, given: Any, overlap: Any, meta: Any) -> Any:
        handle, self._handle = self._handle, None
        signals = _signals(overlap, meta)
        with _beside(overlap, bool(signals)):
            _deepep_precompile_tp_barrier()
            out, _, receive = self.layer.buffer.low_latency_combine(
                given.hidden_states,
                given.topk_ids,
                given.topk_weights,
                handle,
                return_recv_hook=True,
                **signals,
            )
        return out, receive, given  # which the other stream may still read

    def combine_b(self, pending: Any) -> Tensor:
        out, receive, _ = pending
        receive()
        combined: Tensor = out
        return combined


def _wait(event: EventOverlap) -> None:
    if event.event is not None:
        event.current_stream_wait()


def _count_sms() -> int:
    """Multiprocessors of normal mode: those of --deepep-config, or DeepEP's number where another
    batch computes at the same time. 0: as many as libep likes."""
    if get_deepep_config():
        chosen: int = DeepEPConfig.get_instance().num_sms
        return chosen
    return Buffer.num_sms if is_tbo_enabled() else 0


def _require_packs(hidden: int) -> None:
    if hidden % (_ALIGNMENT * _PACK):
        raise EpError(
            Status.SHAPE,
            f"dispatch: expected a hidden size that is a multiple of {_ALIGNMENT * _PACK}, for "
            f"{_PACK} scales in an int32, got {hidden}",
        )


def _signals(overlap: Optional[Any], meta: Any) -> dict[str, Any]:
    """The words of the last GEMM, which it sets by blocks on Hopper, and by experts on Blackwell."""
    signal = getattr(overlap, "signal", None)
    if overlap is None or not overlap.overlap or signal is None:
        return {}
    given = dict(overlap=True, num_sms=overlap.num_sms)
    if meta and "block_m" in meta:
        return given | dict(
            comp_signal=signal, block_m=meta["block_m"], threshold=meta["threshold"]
        )
    return given | dict(src_signals=signal, src_signal_expect_value=overlap.threshold)


def _beside(overlap: Optional[Any], has_signals: bool) -> ContextManager[object]:
    """The stream of SGLang's overlap of combine with the shared experts or the last GEMM.

    Without the GEMM's signals combine waits for all work before.
    """
    if overlap is None:
        return contextlib.nullcontext()
    if overlap.overlap and not has_signals:
        overlap.stream.wait_stream(torch.cuda.current_stream())
    else:
        overlap.stream.wait_event(overlap.wait_event)
    return torch.cuda.stream(overlap.stream)
