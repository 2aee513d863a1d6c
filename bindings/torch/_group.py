# SPDX-License-Identifier: Apache-2.0
"""Groups of libep.torch: a core group that knows its torch device."""

from __future__ import annotations

import ctypes
import gc
import math
from typing import TYPE_CHECKING

import torch

from .._abi import Backend, Status
from .._bootstrap import Bootstrap
from .._config import max_recv_rows as worst_case_rows
from .._config import name_members
from .._group import Group as CoreGroup
from .._library import EpError
from . import _fast
from ._bootstrap import from_process_group, nccl_comm

if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Optional, Sequence, Union

    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from .._config import GroupFields
    from ._receive import ReceiveMemory


def current_stream(ordinal: int) -> int:
    """The current stream of a device, a cudaStream_t as an int; 0 on CPUs (-1).

    torch.cuda.current_stream makes an object, which takes ten times as long.
    """
    return 0 if ordinal < 0 else int(torch._C._cuda_getCurrentRawStream(ordinal))


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The bytes of a tensor, [places, bytes of one]."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    rows = tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    return rows.view(torch.uint8)


class Group(CoreGroup):
    """A set of ranks that share experts. Creating and closing it are collective. See libep.Group.

    bootstrap  how the ranks meet
    fields     the configuration (libep.GroupFields)

    create_group makes one from a process group.

    Closing is refused with EpError ORDER while tensors lie in the group's receive memory
    (ReceiveMemory): drop them first, and close again. At the end of a `with` block this also aborts
    the group, so that the peers do not wait.
    """

    def __init__(self, bootstrap: Bootstrap, **fields: Unpack[GroupFields]) -> None:
        name_members(fields)
        if fields.get("backend") != Backend.HOST and torch.cuda.is_available():
            fields.setdefault("device", torch.cuda.current_device())
        self.in_calls = _fast.GroupFacts()
        """What calls in C know of the group, and which thread is in one."""
        self._calls_at = ctypes.addressof(self.in_calls)
        super().__init__(bootstrap, **fields)
        self.fields = fields
        """The configuration."""
        info = self.query()
        self.num_local_experts = info.num_local_experts
        """L: experts of this rank."""
        self.first_expert = info.first_expert
        """This rank owns the experts first_expert .. + num_local_experts - 1."""
        self.device = torch.device("cuda", info.device) if info.device >= 0 else torch.device("cpu")
        """Where the tensors of operations lie."""
        self.ordinal = info.device
        """The number of the GPU, or -1."""
        self.receive_memory: list[ReceiveMemory] = []
        """What is not freed yet."""
        self.in_calls.group = self.pointer

    @property
    def caller(self) -> int:  # type: ignore[override]
        caller: int = self.in_calls.caller
        return caller

    @property
    def began(self) -> float:  # type: ignore[override]
        began: float = self.in_calls.began
        return began

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of the library on the group, alone. As libep.Group.run."""
        if not _fast.enter(self._calls_at):
            raise self._second_caller(function)
        try:
            return function(*arguments)
        finally:
            _fast.leave(self._calls_at)

    def place(  # type: ignore[override]  # on the current stream
        self, map: Union[torch.Tensor, Sequence[int]]
    ) -> None:
        """Place the experts anew, on the current stream, in a group with num_physical. Collective.

        map  the expert that each of the num_physical places holds, or -1; equal on all ranks. A
             tensor on the group's device is read when the stream gets there.

        Weights do not move by it: move_weights does that. libep.placement_balance makes maps.
        """
        tensor = torch.as_tensor(map, dtype=torch.int32).to(self.device).contiguous()
        super().place(tensor, stream=current_stream(self.ordinal))

    def move_weights(  # type: ignore[override]  # on the current stream
        self,
        before: Sequence[int],
        after: Sequence[int],
        weights: Sequence[torch.Tensor],
        *,
        out: Optional[Sequence[torch.Tensor]] = None,
        workspace: Optional[torch.Tensor] = None,
    ) -> None:
        """Move experts' weights from one placement to another, on the current stream. Collective.

        before, after  the expert that each of the num_physical places holds, and shall hold, or -1;
                       equal on all ranks
        weights        contiguous tensors [num_local_experts, ...] of any types and dimensions, such
                       as parameters, their codes and scales: row i is of place i
        out            tensors like them, for the rows by `after`; None: `weights`, in place
        workspace      uint8, as long on all ranks; None: in place, one is made, of at most 8 MiB
                       for each place

        Autograd does not see it. See ep_weight_move in ep_weight.h.
        """
        moved = [_rows(each, f"weights[{i}]") for i, each in enumerate(weights)]
        outs = None if out is None else [_rows(each, f"out[{i}]") for i, each in enumerate(out)]
        if outs is None and workspace is None and moved:
            slot = min(max(64, *(rows.shape[1] for rows in moved)), 8 << 20)
            places = -(-self.query().num_physical // self.size)
            workspace = torch.empty(
                places * ((slot + 63) // 64 * 64), dtype=torch.uint8, device=self.device
            )
        stream = current_stream(self.ordinal)
        super().move_weights(before, after, moved, out=outs, workspace=workspace, stream=stream)

    def mask(self, alive: Iterable[int]) -> None:  # type: ignore[override]  # as place
        """Make these ranks the ones that take part, this rank among them, on the current stream.

        All of them call it. See libep.Group.mask.
        """
        super().mask(alive, current_stream(self.ordinal))

    def cut(self, rank: int) -> None:  # type: ignore[override]  # as place
        """Go on without a rank until the next mask(), on this rank alone. See ep_group_cut. Local."""
        super().cut(rank, current_stream(self.ordinal))

    def close(self) -> None:
        """Destroy the group and its handles. A second call does nothing. See libep.Group.close."""
        if self.pointer is not None:
            self._refuse_used_memory()
        super().close()

    def lose(self, why: str) -> None:
        """Forget it, without destroying it. See libep.Group."""
        self.in_calls.group = None
        super().lose(why)

    def leave(self) -> None:
        """Close the group at the end of the process, when no program reads tensors any more."""
        self.receive_memory.clear()
        super().leave()

    def _refuse_used_memory(self) -> None:
        if any(memory.is_used() for memory in self.receive_memory):
            gc.collect()  # tensors in reference cycles, such as those of exceptions
        used = sum(memory.is_used() for memory in self.receive_memory)
        if used:
            raise EpError(
                Status.ORDER,
                f"rank {self.rank}: close: expected no tensor in the group's receive memory, got "
                f"some in {used} of its pieces: drop them first",
            )

    def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        try:
            self.close()
        except EpError as refused:
            self.abort(str(refused))
            # The exception itself may hold the tensors. The end of the process closes the group.
            if error is None or refused.status != Status.ORDER:
                raise


def create_group(
    process_group: Union[ProcessGroup, Bootstrap, None] = None,
    *,
    num_experts: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    max_recv_rows: Optional[int] = 0,
    lend_nccl: bool = False,
    **fields: Any,
) -> Group:
    """Create a group from a process group. Collective over it.

    process_group  how the ranks meet: a ProcessGroup, None for the default one, or a
                   libep.Bootstrap, such as those of ranks that are threads (libep.Bootstrap.local)
    num_experts    experts of all ranks together; each rank owns a contiguous block
    max_tokens     most tokens of a rank in one call
    hidden, dtype  the largest row, gradients included, and its type
    top_k          experts per token
    max_recv_rows  rows of the receive buffer. 0: exactly as many as come, which the host reads in
                   every dispatch. None: so many that no row is ever lost.
    lend_nccl      lend the process group's NCCL communicator to libep
    fields         more of the configuration (libep.GroupFields): alignment, mode, backend, ...

    All ranks call it in the same order, relative to other groups of the same process group. Waits
    for them up to `timeout_seconds`. EpError if the configuration is refused or ranks disagree.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    config: dict[str, Any] = {
        **fields,
        "num_experts": num_experts,
        "max_tokens": max_tokens,
        "max_top_k": top_k,
        "max_row_bytes": hidden * dtype.itemsize,
    }
    if lend_nccl:
        config["nccl_comm"] = nccl_comm(process_group)
    if isinstance(process_group, Bootstrap):
        bootstrap = process_group
    else:
        bootstrap = from_process_group(process_group)
    if max_recv_rows is None:
        max_recv_rows = max(
            worst_case_rows(bootstrap.size, rank, **config) for rank in range(bootstrap.size)
        )
    config["max_recv_rows"] = max_recv_rows
    return Group(bootstrap, **config)
