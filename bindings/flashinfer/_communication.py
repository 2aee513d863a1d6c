# SPDX-License-Identifier: Apache-2.0
"""The backend "libep": rank-major dispatch and combine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Backend, ExpertIds, Layout, Mode, Quant, RowWeights, Status, Tail
from .._library import EpError
from ..torch import Handle, create_group
from ..torch import _calls, _checks, _inputs
from . import _release
from ._config import LibepConfig
from ._meeting import find_obstacle, is_on_host, meet, require_all
from ._memory import Memory

if TYPE_CHECKING:
    from typing import Any, Optional

    from torch import Tensor

    from .._bootstrap import Bootstrap
    from ..torch import Group
    from ._memory import Received

_logger = logging.getLogger("libep.flashinfer")
_moe_ep = _release.find()

_ROW_UNIT, _SCALE_UNIT = 16, 4
_LEAST_ELEMENT = 2  # bytes of an element of expert outputs


class _Side(NamedTuple):
    """The steps of up to `max_tokens` tokens per rank, in one mode."""

    max_tokens: int
    group: Group
    layer: Handle
    plan: Tensor


class _Step(NamedTuple):
    """A dispatch without its combine yet."""

    side: _Side
    bound: int
    num_tokens: int


@_moe_ep.register_communication("libep")
class LibepCommunication(_moe_ep.MoEEpCommunication):  # type: ignore[misc, name-defined]
    """Dispatch and combine of flashinfer.moe_ep on libep. Making and destroying it are collective.

    bootstrap  a BootstrapConfig: its process_group, tcp_store or nccl_comm, or the default process
               group. process_group may also be a libep.Bootstrap.
    params     a MoEEpCommParams. Steps of up to config.latency_tokens tokens per rank run in
               latency mode, others in throughput mode.

    Results of dispatch, and the combine input buffer, are views of memory that peers reach: rows
    arrive there, and combine reads there, without a copy between. They end with the next dispatch.
    """

    supports_cuda_graph = True

    def __init__(self, bootstrap: Any, params: Any, config: Optional[LibepConfig] = None) -> None:
        self.config = LibepConfig() if config is None else config
        self._sides: list[_Side] = []
        self._memory: Optional[Memory] = None
        self._step: Optional[_Step] = None
        meeting = meet(bootstrap)
        require_all(meeting, find_obstacle())
        super().__init__(bootstrap, params)
        self._row_bytes = self._count_row_bytes()
        self._scale_bytes = self._count_scale_bytes()
        self._create(meeting)

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether this rank has a GPU that libep can use, or LIBEP_BACKEND=host. Logs why not."""
        obstacle = find_obstacle()
        if obstacle:
            _logger.error("libep is unavailable: %s", obstacle)
        return not obstacle

    def _count_row_bytes(self) -> int:
        """Bytes of the largest row of dispatch or combine."""
        element = max(self.params.token_dtype.itemsize, _LEAST_ELEMENT)
        size: int = -(-self.params.hidden_size * element // _ROW_UNIT) * _ROW_UNIT
        return size

    def _count_scale_bytes(self) -> int:
        """Bytes of the largest scales of a row."""
        if self.config.max_scale_bytes is not None:
            return self.config.max_scale_bytes
        given = self.params.dispatch_format
        if given is None:
            return 0
        bits = {"BF16": 16, "FP16": 16, "NVFP4": 4, "MXFP4": 4}.get(given.name, 8)
        scales: int = self.params.dispatch_bytes_per_token - -(-self.params.hidden_size * bits // 8)
        return -(-scales // _SCALE_UNIT) * _SCALE_UNIT

    def _create(self, meeting: Bootstrap) -> None:
        most, few = self.params.max_tokens_per_rank, self.config.latency_tokens
        if few:
            # On several nodes AUTO is throughput mode above LIBEP_NODE_LATENCY.
            self._sides.append(self._make_side(meeting, min(few, most), Mode.AUTO))
        if most > few:
            self._sides.append(self._make_side(meeting, most, Mode.THROUGHPUT))
        self._memory = Memory(
            self._sides[-1].group, most, self.params.top_k, self._row_bytes, self._scale_bytes
        )

    def _make_side(self, meeting: Bootstrap, max_tokens: int, mode: Mode) -> _Side:
        fields = {
            "backend": Backend.HOST if is_on_host() else Backend.CUDA,
            "device": self.bootstrap.device,
            "nccl_comm": self.bootstrap.nccl_comm,
            "num_sms": self.config.num_sms,
            "timeout_seconds": self.config.timeout_seconds,
            "latency_sets": 0 if mode == Mode.THROUGHPUT else None,
        }
        group = create_group(
            meeting,
            num_experts=self.params.num_experts,
            max_tokens=max_tokens,
            hidden=self._row_bytes,
            dtype=torch.uint8,
            top_k=self.params.top_k,
            max_scale_bytes=self._scale_bytes,
            mode=mode,
            **{name: value for name, value in fields.items() if value is not None},
        )
        layer = Handle(
            group,
            layout=Layout.RANK_MAJOR,
            expert_ids=ExpertIds.GLOBAL,
            row_weights=RowWeights.ALL,
            zero_tail=Tail.IDS,
            sum_quant=Quant.FP8 if self.config.use_low_precision_combine else Quant.NONE,
        )
        with torch.inference_mode(False):
            plan = torch.empty((layer.plan_bytes,), dtype=torch.uint8, device=group.device)
        return _Side(max_tokens, group, layer, plan)

    # ---- a step -----------------------------------------------------------------------------------

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Optional[Tensor] = None,
        *,
        hidden_states_scale: Optional[Tensor] = None,
        max_tokens_per_rank: Optional[int] = None,
        eplb_local_stats: Optional[Tensor] = None,
    ) -> Any:
        """See MoEEpCommunication.dispatch.

        topk_ids             int32 or int64; negative: none. Results have int32.
        topk_weights         of any floating-point type; results have float32
        hidden_states_scale  rows of a multiple of 4 bytes
        eplb_local_stats     EpError UNSUPPORTED if given

        RuntimeError before the combine of the last dispatch. ValueError for shapes and bounds.
        """
        memory = self._require_memory()
        if self._step is not None:
            raise RuntimeError("dispatch: expected a combine after the last dispatch, got none")
        if eplb_local_stats is not None:
            raise EpError(
                Status.UNSUPPORTED, "dispatch: eplb_local_stats: expected None, got a tensor"
            )
        bound = self._require_bound(max_tokens_per_rank)
        num_tokens = self._require_routing(hidden_states, topk_ids, bound)
        if topk_weights is not None:
            topk_weights = topk_weights.to(torch.float32)
        side = next(side for side in self._sides if bound <= side.max_tokens)
        inputs = hidden_states, topk_weights, hidden_states_scale
        if hidden_states_scale is not None or not _inputs.are_plain(
            side.layer, topk_ids, hidden_states, topk_weights
        ):
            _inputs.require(side.layer, topk_ids, (*inputs, None), has_count=False)
        scale = None
        if hidden_states_scale is not None:
            scale = hidden_states_scale.dtype, hidden_states_scale.shape[1]
        row = hidden_states.dtype, hidden_states.shape[1]
        received = memory.received(bound, row, scale, topk_weights is not None)
        self._send(side, topk_ids, inputs, received)
        self._step = _Step(side, bound, num_tokens)
        return self._result(received, bound)

    @staticmethod
    def _send(side: _Side, topk_ids: Tensor, inputs: Any, received: Received) -> None:
        outputs = received.rows, received.weights, received.scales, received.ids
        if side.layer.is_latency:
            _calls.dispatch_routed(side.layer, topk_ids, None, *inputs, side.plan, None, *outputs)
        else:
            _calls.prepare(side.layer, topk_ids, None, side.plan, None)
            _calls.dispatch(side.layer, side.plan, *inputs, *outputs)

    def _result(self, received: Received, bound: int) -> Any:
        none = self.params.invalid_expert_id
        if none != -1:
            received.ids.masked_fill_(received.ids < 0, none)
        rows, ids, weights, scales = received.flat
        return _moe_ep.MoEEpDispatchResult(
            hidden_states=rows,
            topk_ids=ids,
            topk_weights=weights,
            tokens_per_rank=bound,
            hidden_states_scale=scales,
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        """[R * tokens_per_rank, hidden_size]: where combine reads the experts' outputs in place.

        RuntimeError before dispatch. EpError RANGE for a type larger than that of tokens.
        """
        memory, step = self._require_memory(), self._require_step("get_combine_input_buffer")
        return memory.output(step.bound, self.params.hidden_size, dtype)

    def combine(self, expert_output: Tensor, *, output: Optional[Tensor] = None) -> Tensor:
        """See MoEEpCommunication.combine. bfloat16, float16 or float32; sums are in float32.

        RuntimeError before dispatch. ValueError for shapes, and for an output of another type.
        """
        self._require_memory()
        step = self._require_step("combine")
        lead, hidden = (self.ep_size, step.bound), self.params.hidden_size
        flat = (self.ep_size * step.bound, hidden)
        if tuple(expert_output.shape) not in (flat, (*lead, hidden)):
            _refuse("combine: expert_output", f"shape {flat}", tuple(expert_output.shape))
        rows = expert_output.reshape(*lead, hidden)
        shape = (step.num_tokens, hidden)
        if output is None:
            output = rows.new_empty(shape)
        elif tuple(output.shape) != shape or output.dtype != rows.dtype:
            got = f"{output.dtype} of shape {tuple(output.shape)}"
            _refuse("combine: output", f"{rows.dtype} of shape {shape}", got)
        _calls.combine(step.side.layer, step.side.plan, rows, None, None, None, None, output)
        self._step = None
        return output

    def destroy(self) -> None:
        """Close the groups. Collective; twice does nothing. No result may be used any more."""
        self._memory = self._step = None
        while self._sides:
            self._sides.pop().group.leave()

    # ---- what is refused --------------------------------------------------------------------------

    def _require_memory(self) -> Memory:
        if self._memory is None:
            raise RuntimeError("expected a LibepCommunication, got one that has been destroyed")
        return self._memory

    def _require_step(self, call: str) -> _Step:
        if self._step is None:
            raise RuntimeError(f"{call}: expected a dispatch before, got none")
        return self._step

    def _require_bound(self, given: Optional[int]) -> int:
        most: int = self.params.max_tokens_per_rank
        if given is None:
            return most
        if not 0 < given <= most:
            _refuse("dispatch: max_tokens_per_rank", f"1 .. {most}", given)
        return given

    def _require_routing(self, tokens: Tensor, topk_ids: Tensor, bound: int) -> int:
        """T, where the shapes are right."""
        _checks.require_tensor("hidden_states", tokens)
        _checks.require_tensor("topk_ids", topk_ids)
        if tokens.ndim != 2 or tokens.shape[0] > bound:
            expected = f"up to {bound} rows, the step's max_tokens_per_rank"
            _refuse("dispatch: hidden_states", expected, f"shape {tuple(tokens.shape)}")
        num_tokens = tokens.shape[0]
        shape = (num_tokens, self.params.top_k)
        if tuple(topk_ids.shape) != shape:
            _refuse("dispatch: topk_ids", f"shape {shape}", tuple(topk_ids.shape))
        return num_tokens


def _refuse(name: str, expected: str, got: object) -> None:
    raise ValueError(f"{name}: expected {expected}, got {got}")
