# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of a gloo process group."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from conftest import DEVICE
from processes import finish, restore_ctrl_c


PREAMBLE = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
import libep, libep.torch as ep
from libep import EpError, Status
rank, size, device = {rank}, {size}, {device!r}
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
def say(*words):
    print(*words, flush=True)
"""


def start(rank, size, source, port):
    """Start a rank: `source` runs after PREAMBLE. Its stdout and stderr are pipes."""
    backend = f"libep.Backend.{'CUDA' if DEVICE == 'cuda' else 'HOST'}"
    text = PREAMBLE.format(rank=rank, size=size, port=port, device=DEVICE, backend=backend)
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
    if DEVICE == "cuda":
        environment["LIBEP_SHARE_GPUS"] = "yes"  # there may be fewer GPUs than ranks
    return subprocess.Popen(
        [sys.executable, "-c", text + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=restore_ctrl_c,
    )


def start_all(*sources):
    """Start one rank for each source."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [start(r, len(sources), source, port) for r, source in enumerate(sources)]


def run(*sources, seconds=120):
    """Run one rank for each source and return their results, each (status, stdout, stderr)."""
    started = start_all(*sources)
    try:
        return [finish(process, seconds) for process in started]
    finally:
        for process in started:
            process.kill()


def good(result):
    """What a rank printed that ended well. On stderr there may be warnings of libep and PyTorch."""
    status, out, err = result
    assert status == 0, err
    allowed = re.compile(r"$|libep: warn: |(\[rank\d\]:)?\[?W\d|\[Gloo\]")
    assert [line for line in err.splitlines() if not allowed.match(line)] == [], err
    return out
