# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of a gloo process group."""

from conftest import DEVICE
from processes import COMMON, finish_all, free_port, spawn

PREAMBLE = COMMON + """
import torch, torch.distributed as dist
torch.set_num_threads(1)
import libep.torch as ep
device = {device!r}
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
def initialize():
    dist.init_process_group("gloo", "tcp://127.0.0.1:{port}", rank=rank, world_size=size)
def group(meeting=None, **fields):
    given = dict(num_experts=6, max_tokens=8, hidden=16, top_k=2, dtype=torch.float32,
                 timeout_seconds=60, backend={backend})
    return ep.create_group(meeting, **dict(given, **fields))
x = torch.arange(64, dtype=torch.float32).view(4, 16).to(device).requires_grad_()
idx = torch.tensor([[0, 1], [2, 3], [4, 5], [5, 0]], device=device)
weights = torch.full((4, 2), 0.5, device=device)
def layer(handle, x):
    received = ep.dispatch(handle, x, idx, weights)
    return ep.combine(handle, received.plan, received.tokens, received.topk_weights)
"""


def start_all(*sources):
    """Start one rank for each source, which runs after PREAMBLE."""
    facts = dict(size=len(sources), port=free_port(), device=DEVICE)
    facts["backend"] = f"libep.Backend.{'CUDA' if DEVICE == 'cuda' else 'HOST'}"
    environment = dict(GLOO_SOCKET_IFNAME="lo")
    if DEVICE == "cuda":
        environment["LIBEP_SHARE_GPUS"] = "yes"  # there may be fewer GPUs than ranks
    return [
        spawn("-c", PREAMBLE.format(rank=rank, **facts) + source, **environment)
        for rank, source in enumerate(sources)
    ]


def run(*sources):
    """Run one rank for each source and return their results, each (status, stdout, stderr)."""
    return finish_all(start_all(*sources), 120)
