# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of an MoE layer: normal or low-latency mode, by the batch."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.layers.dp_attention import (  # type: ignore[import-not-found]
    get_is_extend_in_batch,
)
from sglang.srt.layers.moe.token_dispatcher.base import (  # type: ignore[import-not-found]
    BaseDispatcher,
)
from sglang.srt.layers.moe.token_dispatcher.deepep import (  # type: ignore[import-not-found]
    DeepEPPDispatchHooks,
)
from sglang.srt.layers.moe.utils import DeepEPMode  # type: ignore[import-not-found]

from .._abi import Status
from .._library import EpError
from ..deep_ep import Buffer
from ._modes import Layer, LowLatency, Normal

if TYPE_CHECKING:
    from typing import Any, Optional

    import torch
    from torch.distributed import ProcessGroup

_buffers: weakref.WeakKeyDictionary[ProcessGroup, Buffer] = weakref.WeakKeyDictionary()


class _Stage(Enum):
    """The calls that come next."""

    DISPATCH_A = "dispatch_a"
    DISPATCH_B = "dispatch_b"
    COMBINE_A = "combine_a"
    COMBINE_B = "combine_b"


class Dispatcher(BaseDispatcher):  # type: ignore[misc]
    """SGLang's DeepEPDispatcher, on libep. Making it is local; its first steps are collective.

    group             the ranks: a process group, of which all dispatchers share one Buffer
    router_topk       experts per token
    num_experts       of all ranks together
    hidden_size       elements of a row
    deepep_mode       AUTO: normal mode where a batch extends a request, else low-latency mode
    runner_backend    what computes the experts, which decides about the type of rows
    other arguments   of DeepEPDispatcher, not used

    A step is dispatch_a, dispatch_b, combine_a, combine_b: `a` sends and `b` receives. dispatch and
    combine are two of these each. Another order is EpError ORDER.
    """

    def __init__(
        self,
        group: ProcessGroup,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: Optional[int] = None,
        num_local_experts: Optional[int] = None,
        hidden_size: Optional[int] = None,
        params_dtype: Optional[torch.dtype] = None,
        deepep_mode: Any = DeepEPMode.AUTO,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
    ) -> None:
        super().__init__()
        if num_experts is None or hidden_size is None:
            raise TypeError("Dispatcher: expected num_experts and hidden_size, got None")
        self.deepep_mode = deepep_mode
        self.runner_backend = runner_backend
        self.expert_mask_gpu = None  # of AITER, an AMD library
        buffer = _buffers.get(group)
        if buffer is None:
            buffer = _buffers[group] = Buffer(group)
        layer = Layer(buffer, num_experts, router_topk, hidden_size, runner_backend)
        self._modes: dict[Any, Any] = {}
        if deepep_mode.enable_normal():
            self._modes[DeepEPMode.NORMAL] = Normal(layer)
        if deepep_mode.enable_low_latency():
            self._modes[DeepEPMode.LOW_LATENCY] = LowLatency(layer)
        self._stage = _Stage.DISPATCH_A
        self._mode: Any = None
        self._pending: Any = None
        self._hooks = DeepEPPDispatchHooks()

    # ---- a step -----------------------------------------------------------------------------------

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Send rows to their experts. Returns a DeepEPNormalDispatchOutput or a
        DeepEPLLDispatchOutput. Hooks run between the halves."""
        self.dispatch_a(hidden_states, topk_output)
        self._hooks(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        """The first half of dispatch."""
        self._require(_Stage.DISPATCH_A)
        self._mode = self._modes[self.deepep_mode.resolve(get_is_extend_in_batch())]
        self._pending = self._mode.dispatch_a(hidden_states, topk_output)
        self._stage = _Stage.DISPATCH_B

    def dispatch_b(self) -> Any:
        """The second half: returns the output."""
        self._require(_Stage.DISPATCH_B)
        output = self._mode.dispatch_b(self._pending)
        self._pending, self._stage = None, _Stage.COMBINE_A
        return output

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Return the experts' rows to their tokens. Returns the sums, [T, H]."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """The first half of combine."""
        self._require(_Stage.COMBINE_A)
        self._pending = self._mode.combine_a(
            combine_input, self.overlap_args, self.meta_overlap_args
        )
        self._stage = _Stage.COMBINE_B

    def combine_b(self) -> torch.Tensor:
        """The second half: returns the sums."""
        self._require(_Stage.COMBINE_B)
        out: torch.Tensor = self._mode.combine_b(self._pending)
        self._pending, self._stage = None, _Stage.DISPATCH_A
        return out

    def _require(self, stage: _Stage) -> None:
        if self._stage is not stage:
            raise EpError(
                Status.ORDER,
                f"{stage.value}: expected a call of {self._stage.value} first, which comes next in "
                "a step",
            )

    # ---- settings ---------------------------------------------------------------------------------

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Choose the type of rows. EpError UNSUPPORTED for others than bf16 and fp8."""
        super().set_quant_config(quant_config)
        for mode in self._modes.values():
            mode.set_quant_config(quant_config)

    def register_deepep_dispatch_hook(self, hook: Any) -> Any:
        """Let dispatch call a function between its halves."""
        return self._hooks.register_hook(hook)
