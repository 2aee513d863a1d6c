# SPDX-License-Identifier: Apache-2.0
"""How DeepEP's own programs begin: a process for each GPU of the machines that take part."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing import Any

    from torch.distributed import ProcessGroup

__all__ = ["init_dist", "init_seed"]


def init_seed(global_seed: int) -> None:
    """Seed PyTorch and Python with a number that differs between ranks."""
    seed = global_seed + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, ProcessGroup]:
    """Make the process group of a rank, over nccl; over gloo on a machine without GPUs.

    The environment may have MASTER_ADDR and MASTER_PORT, and of several machines their number
    WORLD_SIZE and this one's RANK. New tensors are bfloat16 then, and on the rank's GPU.

    Returns the rank, the number of ranks, and a group of all of them.
    """
    address, port = os.getenv("MASTER_ADDR", "127.0.0.1"), os.getenv("MASTER_PORT", "8361")
    machines, machine = int(os.getenv("WORLD_SIZE", "1")), int(os.getenv("RANK", "0"))
    size = machines * num_local_ranks
    has_gpu = torch.cuda.is_available()
    device: dict[str, Any] = {}
    if has_gpu:
        torch.cuda.set_device(local_rank)
        device["device_id"] = torch.device("cuda", local_rank)
    dist.init_process_group(
        backend="nccl" if has_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=size,
        rank=machine * num_local_ranks + local_rank,
        **device,
    )
    torch.set_default_dtype(torch.bfloat16)
    if has_gpu:
        torch.set_default_device("cuda")
    init_seed(seed)
    group = dist.new_group(list(range(size)))
    assert group is not None
    return dist.get_rank(), size, group
