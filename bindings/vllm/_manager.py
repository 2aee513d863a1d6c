# SPDX-License-Identifier: Apache-2.0
"""The all2all manager of the backends: it makes the libep groups, one pair for equal layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from .._abi import Status
from .._library import EpError
from ..deep_ep import Buffer
from ..torch import from_process_group
from ._batched import BatchedPrepareAndFinalize
from ._groups import Groups, Key
from ._patches import BATCHED
from ._standard import PrepareAndFinalize

if TYPE_CHECKING:
    from typing import Any, Optional

    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from torch.distributed import ProcessGroup
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


class Manager(All2AllManagerBase):  # type: ignore[misc]
    """Makes what layers send with. See All2AllManagerBase.

    cpu_group        the process group of the ranks that share experts; its store alone is used
    tcp_store_group  of elastic groups: EpError UNSUPPORTED
    """

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Optional[object] = None) -> None:
        if tcp_store_group is not None:
            raise EpError(
                Status.UNSUPPORTED, "libep.vllm: expected a group of fixed size, got an elastic one"
            )
        super().__init__(cpu_group)
        self.num_sms = 0
        """Multiprocessors that operations take; 0: LIBEP_NUM_SMS."""
        self._bootstrap = from_process_group(cpu_group)
        self._groups: dict[Key, Groups] = {}
        self._buffer: Optional[Buffer] = None

    def make_layer(self, moe: FusedMoEConfig) -> mk.FusedMoEPrepareAndFinalizeModular:
        """What a layer dispatches and combines with. Collective where its sizes are new."""
        parallel = moe.moe_parallel_config
        if parallel.all2all_backend == BATCHED:
            return BatchedPrepareAndFinalize(
                self._find_buffer(), moe.max_num_tokens, parallel.sp_size
            )
        sizes = Key(
            moe.num_experts,
            moe.experts_per_token,
            moe.hidden_dim,
            moe.in_dtype,
            moe.max_num_tokens,
            torch.device(moe.device).type,
        )
        return PrepareAndFinalize(self, self.get_handle(sizes._asdict()), parallel.sp_size)

    def get_handle(self, kwargs: dict[str, Any]) -> Groups:
        """The groups of layers with these sizes, the fields of Key. Collective where they are new."""
        key = Key(**kwargs)
        if key not in self._groups:
            self._groups[key] = Groups(self._bootstrap, key)
        return self._groups[key]

    def _find_buffer(self) -> Buffer:
        if self._buffer is None:
            self._buffer = Buffer(self._bootstrap)
        return self._buffer

    def set_num_sms(self, num_sms: int) -> None:
        """Let operations from now on take so many multiprocessors, at least 2."""
        self.num_sms = max(num_sms, 2)

    def destroy(self) -> None:
        """Close all groups. Collective."""
        for groups in self._groups.values():
            groups.close()
        self._groups.clear()
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None
