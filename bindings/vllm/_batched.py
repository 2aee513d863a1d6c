# SPDX-License-Identifier: Apache-2.0
"""The backend "libep_batched": a slab of fixed size for each expert, for experts of that format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.fused_moe.utils import normalize_batched_scales_shape
from vllm.v1.worker import ubatching

from .._abi import Quant, Status
from .._library import EpError
from . import _quant
from ._standard import Answers, do_nothing, most_tokens, too_many, weigh

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from ..deep_ep import Buffer

    Hook = Callable[[], None]


class BatchedPrepareAndFinalize(Answers):
    """Dispatch and combine of a layer, all of it in latency mode. Sizes are static.

    buffer      what the layer sends with, in its low-latency mode
    max_tokens  most tokens of a rank in a step
    sp_size     ranks that share the tokens of a data-parallel rank

    Dispatch quantises to fp8. Combine applies the weights at the token's rank.
    """

    def __init__(self, buffer: Buffer, max_tokens: int, sp_size: int = 1) -> None:
        super().__init__(buffer.group_size)
        self._buffer = buffer
        self._max_tokens = max_tokens
        self._sp_size = sp_size
        self._packs_scales = False
        self._handles: dict[int, Any] = {}  # by the number of the micro-batch

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Give experts that want them powers of two as scales, four in an int32."""
        self._packs_scales = fused_experts.supports_packed_ue8m0_act_scales()

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """BatchedExperts: [L, R * max_tokens, H]."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int:
        """Rows of each rank in an expert's slab."""
        return self._max_tokens

    def prepare(self, *given: Any, **named: Any) -> mk.PrepareResultType:
        """prepare_async, in one operation."""
        _, receive = self._prepare(False, *given, **named)
        return receive()

    def prepare_async(self, *given: Any, **named: Any) -> tuple[Hook, mk.ReceiverType]:
        """Send the tokens. Collective. Arguments as of FusedMoEPrepareAndFinalizeModular.prepare.

        The hook is the receive phase. Results are slabs, their scales in column-major order, and
        the counts of local experts. EpError on all ranks if one has more tokens than max_tokens.
        """
        return self._prepare(True, *given, **named)

    def _prepare(
        self,
        is_split: bool,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Optional[Tensor],
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[Hook, mk.ReceiverType]:
        most = most_tokens(a1.shape[0], self._sp_size)
        if most > self._max_tokens:
            raise EpError(Status.RANGE, too_many(self._max_tokens, most))
        if apply_router_weight_on_input:
            a1 = weigh(a1, topk_weights)
        quant = _quant.choose(quant_config, a1.shape[1], defer_input_quant)
        is_fp8 = quant in (Quant.FP8, Quant.FP8_POW2)
        packs = is_fp8 and self._packs_scales
        rows, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            a1,
            topk_ids,
            self._max_tokens,
            num_experts,
            use_fp8=is_fp8,
            round_scale=packs or quant == Quant.FP8_POW2,
            use_ue8m0=packs,
            return_recv_hook=is_split,
        )
        self._handles[ubatching.dbo_current_ubatch_id()] = handle

        def receive() -> mk.PrepareResultType:
            meta = mk.ExpertTokensMetadata(counts, None)
            if isinstance(rows, tuple):
                return *rows, meta, None, None
            return *_quantise(quant_config, defer_input_quant, rows), meta, None, None

        return hook or do_nothing, receive

    def finalize(self, *given: Any, **named: Any) -> None:
        """Return the experts' outputs, weigh and sum them. Collective.

        Arguments as of FusedMoEPrepareAndFinalizeModular.finalize: outputs [L, R * max_tokens, H]
        of the type of `output`, which is written in place.
        """
        self._finalize(False, *given, **named)

    def finalize_async(self, *given: Any, **named: Any) -> tuple[Hook, Hook]:
        """The send phase of finalize. `output` is complete after the hook."""
        return self._finalize(True, *given, **named), do_nothing

    def _finalize(
        self,
        is_split: bool,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Hook:
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            kind = type(weight_and_reduce_impl).__name__
            raise EpError(
                Status.UNSUPPORTED,
                f"finalize: expected experts that leave weights and sums to combine, got {kind}",
            )
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        handle = self._handles.pop(ubatching.dbo_current_ubatch_id())
        ubatching.dbo_maybe_run_recv_hook()
        _, _, hook = self._buffer.low_latency_combine(
            fused_expert_output,
            topk_ids,
            topk_weights,
            handle,
            return_recv_hook=is_split,
            out=output,
        )
        return hook or do_nothing


def _quantise(
    config: FusedMoEQuantConfig, defer: bool, slabs: Tensor
) -> tuple[Tensor, Optional[Tensor]]:
    """Quantise rows that came as they were, as experts of this format take them. Those for nvfp4
    do it themselves."""
    if config.quant_dtype == "nvfp4":
        return slabs, None
    experts, rows, hidden = slabs.shape
    flat, scales = _quant.finish(config, defer, slabs.view(-1, hidden), None)
    if scales is not None:
        scales = normalize_batched_scales_shape(scales, experts)
    return flat.view(experts, rows, -1), scales
