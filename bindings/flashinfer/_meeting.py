# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a BootstrapConfig meet, and whether all of them can run libep."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._abi import Backend
from .._bootstrap import Bootstrap
from .._group import Group
from ..torch import from_process_group, from_store

if TYPE_CHECKING:
    from typing import Any

_REASON_BYTES = 512


def is_on_host() -> bool:
    """Whether LIBEP_BACKEND asks for CPUs."""
    return os.environ.get("LIBEP_BACKEND") == "host"


def find_obstacle() -> str:
    """Why this rank cannot run libep, or "". Local."""
    if is_on_host():
        return ""
    if not torch.cuda.is_available():
        return "expected a GPU that PyTorch can use, got none (LIBEP_BACKEND=host is for CPUs)"
    alone = Group.memory(1, num_experts=1, max_tokens=1, max_top_k=1, max_row_bytes=16)
    if alone.backend != Backend.CUDA:
        return f"expected a GPU that libep can use, got none: {alone.reason}"
    return ""


def meet(given: Any) -> Bootstrap:
    """The bootstrap of a BootstrapConfig. ValueError if its rank and size are not the group's.

    given.process_group may also be a libep.Bootstrap.
    """
    if isinstance(given.process_group, Bootstrap):
        made = given.process_group
    elif given.process_group is not None:
        made = from_process_group(given.process_group)
    elif given.tcp_store is not None:
        made = from_store(given.tcp_store, given.rank, given.world_size)
    elif given.nccl_comm is not None and not dist.is_initialized():
        made = Bootstrap.from_nccl(given.nccl_comm)
    else:
        made = from_process_group()
    if (made.rank, made.size) != (given.rank, given.world_size):
        raise ValueError(
            f"BootstrapConfig: expected rank {made.rank} of {made.size}, as in its process group, "
            f"got rank {given.rank} of {given.world_size}"
        )
    return made


def require_all(meeting: Bootstrap, obstacle: str) -> None:
    """RuntimeError on all ranks if one of them has an obstacle. Collective."""
    given = obstacle.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
    found = [each.decode(errors="replace").strip() for each in meeting.allgather(given)]
    ranks = [f"rank {rank}: {reason}" for rank, reason in enumerate(found) if reason]
    if ranks:
        raise RuntimeError(f"libep.flashinfer: not all ranks can run it: {'; '.join(ranks)}")
