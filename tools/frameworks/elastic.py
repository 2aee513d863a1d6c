# SPDX-License-Identifier: Apache-2.0
"""Print what dispatch and combine of libep.deep_ep.ElasticBuffer take on GPUs.

    torchrun --nproc-per-node N elastic.py [tokens [num_sms]]

8,192 tokens of 7168 bfloat16 a rank, top-8 of 256 experts, drawn evenly. Expanded rows, weights beside
them, sums without weights. Times are microseconds of the GPU between two events, the median of 50
calls, then the largest of the ranks. The first dispatch of a line makes the routing as well.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any, Callable

import torch
import torch.distributed as dist

from libep.deep_ep import ElasticBuffer

TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
NUM_SMS = int(sys.argv[2]) if len(sys.argv) > 2 else 64
HIDDEN, TOP_K, EXPERTS, CALLS, WARM = 7168, 8, 256, 50, 10


def measure(call: Callable[[], Any]) -> float:
    """Microseconds of the GPU; see above."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
              for _ in range(WARM + CALLS)]
    for begin, end in events:
        # The GPU is kept busy until the host has enqueued the call, so its time is not in it.
        torch.cuda._sleep(400_000)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    mine = statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events[WARM:])
    slowest = torch.tensor([mine], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN,
                           num_topk=TOP_K)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    idx = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K)[1]
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    routing = dict(topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_sms=NUM_SMS)
    rows, _, row_weights, handle, _ = buffer.dispatch(x, **routing, do_expand=True)
    rows = rows.clone()

    def dispatch(is_read: bool) -> Any:
        return buffer.dispatch(x, **routing, do_expand=True, do_cpu_sync=is_read)

    times = {
        "dispatch, sizes of the worst case": measure(lambda: dispatch(False)),
        "dispatch, exact sizes": measure(lambda: dispatch(True)),
        "dispatch by a handle": measure(
            lambda: buffer.dispatch(x, handle=handle, do_expand=True, num_sms=NUM_SMS)
        ),
        "combine": measure(lambda: buffer.combine(rows, handle, num_sms=NUM_SMS)),
        "combine, with weights": measure(
            lambda: buffer.combine(rows, handle, topk_weights=row_weights, num_sms=NUM_SMS)
        ),
    }
    if rank == 0:
        print(f"# {dist.get_world_size()} ranks, {TOKENS} tokens, {NUM_SMS} SMs; us")
        for name, time in times.items():
            print(f"{name:36}{time:10.1f}")
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
