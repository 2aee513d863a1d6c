# SPDX-License-Identifier: Apache-2.0
"""A program for DeepEP. It knows nothing of libep.

deep_ep_program.py RANK SIZE PORT DEVICE [early]
"""

import sys

import torch
import torch.distributed as dist
from deep_ep import Buffer
from deep_ep.utils import EventHandle, EventOverlap

EXPERTS, HIDDEN, TOP_K = 8, 32, 2


BESIDE = dict(async_finish=True, allocate_on_comm_stream=True)
LAYOUT = "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert is_token_in_rank"


def layer(buffer, x, idx, weights, scales):
    """Experts multiply rows by their scale; scales [L] are those of this rank."""
    after = EventOverlap(EventHandle())
    *layout, event = buffer.get_dispatch_layout(idx, EXPERTS, previous_event=after, **BESIDE)
    options = dict(zip(LAYOUT.split(), layout), previous_event=event, **BESIDE)
    rx, ridx, rweights, counts, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, **options
    )
    event.current_stream_wait()
    assert counts == [(ridx == e).sum().item() for e in range(len(scales))]
    out, _, event = buffer.combine(dense(rx, ridx, rweights, scales), handle, async_finish=True)
    event.current_stream_wait()
    return out


def dense(x, idx, weights, scales):
    """All experts on one rank."""
    factors = torch.where(idx >= 0, weights * scales[idx.clamp(min=0)], 0).sum(1, keepdim=True)
    return x * factors


def main(rank, size, port, device, *options):
    if device == "cuda":
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    rank, size = int(rank), int(size)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = dist.new_group(list(range(size)))
    buffer = Buffer(group, Buffer.get_dispatch_config(size).get_nvl_buffer_size_hint(64, size), 0)
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, size, group)
    if "early" in options and rank == 1:
        sys.exit("rank 1 leaves early")
    all_scales = (torch.arange(EXPERTS) % 3 + 1).float().to(device)
    each = EXPERTS // size
    local = all_scales[rank * each : (rank + 1) * each]
    torch.manual_seed(rank)
    for tokens in (5 * rank, 100 + rank, 9 - 9 * rank):  # one rank has none, and more than before
        data = torch.randint(-8, 9, (tokens, HIDDEN)).float().to(device) / 4
        given = torch.randint(1, 5, (tokens, TOP_K)).float().to(device) / 4
        idx = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.to(device)
        idx[::3, 1] = -1
        got, expected = layer(buffer, data, idx, given, local), dense(data, idx, given, all_scales)
        assert torch.equal(got, expected), (got, expected)
    print(f"rank {rank}: equal", flush=True)
    if "open" not in options:
        buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
