# SPDX-License-Identifier: Apache-2.0
"""The backend "libep": one row for each token and rank, for experts of the Standard format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker import ubatching

from .._abi import LATENCY_TOKENS, Status
from . import _quant, _steps
from ._groups import Form

if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from ._groups import Groups
    from ._manager import Manager

    Hook = Callable[[], None]


def weigh(tokens: Tensor, topk_weights: Tensor) -> Tensor:
    """The tokens times their one weight, for a router whose weights belong to the input."""
    top_k = topk_weights.shape[1]
    if top_k != 1:
        raise ValueError(
            f"prepare: apply_router_weight_on_input: expected one expert per token, got {top_k}"
        )
    return tokens * topk_weights.to(tokens.dtype)


def most_tokens(mine: int, sp_size: int) -> int:
    """The most tokens of a rank in this step, the same on all ranks; at least 1.

    sp_size  ranks that share the tokens of a data-parallel rank
    """
    metadata = get_forward_context().dp_metadata
    if metadata is None:
        return max(mine, 1)
    return max(-(-int(metadata.num_tokens_across_dp_cpu.max()) // sp_size), 1)


def too_many(limit: int, most: int) -> str:
    """The sentence of a step that has more tokens than the layer was made for."""
    return f"prepare: expected at most max_num_tokens of the layer, {limit}, got {most} tokens"


def is_capturing(tensor: Tensor) -> bool:
    """Whether a graph is captured, where the host reads no sizes."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def do_nothing() -> None:
    """A hook with nothing left to do."""


class Answers(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """What vLLM asks both backends. ranks: of the group."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def topk_indices_dtype(self) -> torch.dtype:
        """int32; int64 works as well."""
        return torch.int32

    def num_dispatchers(self) -> int:
        """The ranks."""
        return self._ranks

    def output_is_reduced(self) -> bool:
        """True: finalize sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """True."""
        return True


class PrepareAndFinalize(Answers):
    """Dispatch and combine of a layer. See FusedMoEPrepareAndFinalizeModular.

    manager  whose set_num_sms holds for this layer
    groups   what the layer sends with
    sp_size  ranks that share the tokens of a data-parallel rank

    A step's form depends on the most tokens of a rank, which all ranks know. Up to LATENCY_TOKENS
    it is of latency mode. Sizes are static there, and in any step of a captured graph: a block for
    each rank with as many rows as the most tokens of a rank, whose unused ones have ids of -1. Else
    the host reads the number of rows, and no row is unused.
    """

    def __init__(self, manager: Manager, groups: Groups, sp_size: int = 1) -> None:
        super().__init__(groups.size)
        self._manager = manager
        self._groups = groups
        self._sp_size = sp_size
        self._steps: dict[int, _steps.Step] = {}  # by the number of the micro-batch

    # ---- what vLLM asks ---------------------------------------------------------------------------

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Standard: [rows, H]."""
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> None:
        """None: rows are not in slabs."""

    # ---- prepare ----------------------------------------------------------------------------------

    def prepare(self, *given: Any, **named: Any) -> mk.PrepareResultType:
        """prepare_async, and its receiver."""
        return self.prepare_async(*given, **named)()

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Optional[Tensor],
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> mk.ReceiverType:
        """Send the tokens. Collective. Arguments as of FusedMoEPrepareAndFinalizeModular.prepare.

        The receiver gives rows, their scales, the counts of local experts, global expert ids (-1:
        none, or of another rank) and weights. EpError on all ranks if one has more tokens than the
        layer was made for.
        """
        most = self._most_tokens(a1.shape[0])
        if apply_router_weight_on_input:
            a1 = weigh(a1, topk_weights)
        micro_batch = ubatching.dbo_current_ubatch_id()
        is_small = most <= LATENCY_TOKENS
        is_static = is_small or is_capturing(a1)
        quant = _quant.choose(quant_config, a1.shape[1], defer_input_quant)
        layer = self._groups.handle(Form(not is_static, is_small, quant, self._manager.num_sms))
        given = _steps.Given(a1.contiguous(), topk_weights.contiguous(), topk_ids.contiguous())
        step = self._steps[micro_batch] = _steps.dispatch(layer, given, most)
        return lambda: _finish(step, quant_config, defer_input_quant)

    def _most_tokens(self, mine: int) -> int:
        """The most tokens of a rank in this step. EpError on all ranks if they are too many."""
        limit, most = self._groups.key.max_tokens, most_tokens(mine, self._sp_size)
        if most > limit:
            self._groups.give_up(Status.RANGE, too_many(limit, most))
        if mine > most:
            self._groups.give_up(
                Status.RANGE,
                f"prepare: a1: expected at most {most} rows, by num_tokens_across_dp_cpu, got {mine}",
            )
        return most

    # ---- finalize ---------------------------------------------------------------------------------

    def finalize(self, output: Tensor, *given: Any, **named: Any) -> None:
        """Return the experts' outputs to the ranks of their tokens, and sum them. Collective.

        Arguments as of FusedMoEPrepareAndFinalizeModular.finalize: outputs [rows, H], or
        [rows, top-k, H], of the type of `output`, which is written in place.
        """
        step, rows = self._reduce(output, *given, **named)
        if ubatching.dbo_enabled():
            _steps.combine_in_turn(step, rows, output)()
        else:
            _steps.combine(step, rows, output)

    def finalize_async(
        self, output: Tensor, *given: Any, **named: Any
    ) -> Union[Hook, tuple[Hook, Hook]]:
        """The send phase of finalize, or all of it on another stream.

        `output` is complete after the hook, of small steps, and the receiver.
        """
        step, rows = self._reduce(output, *given, **named)
        if ubatching.dbo_enabled():
            return _steps.combine_in_turn(step, rows, output)
        if step.layer.is_latency:
            return _steps.combine_send(step, rows, output), do_nothing
        if self._groups.stream is not None:
            return _steps.combine_beside(step, rows, output, self._groups.stream)
        _steps.combine(step, rows, output)
        return do_nothing

    def _reduce(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[_steps.Step, Tensor]:
        """The step that ends, and the sums of this rank's experts in its rows."""
        step = self._steps.pop(ubatching.dbo_current_ubatch_id())
        rows = fused_expert_output
        if rows.numel():
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            rows = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=rows,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        if rows.data_ptr() == output.data_ptr():
            rows = rows.clone()  # vLLM lets experts write to `output` where the shapes agree
        return step, rows.reshape(*step.received.tokens.shape[:-1], rows.shape[-1])


def _finish(step: _steps.Step, config: FusedMoEQuantConfig, defer: bool) -> mk.PrepareResultType:
    """What the experts take."""
    tokens, weights, scales, idx = step.received
    if tokens.ndim == 3:
        tokens, weights, idx = (tokens.flatten(0, 1), weights.flatten(0, 1), idx.flatten(0, 1))
        scales = None if scales is None else scales.flatten(0, 1)
    rows, row_scales = _quant.finish(config, defer, tokens, scales)
    meta = mk.ExpertTokensMetadata(step.plan.expert_counts, step.counts)
    return rows, row_scales, meta, idx, weights
