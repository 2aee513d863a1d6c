# SPDX-License-Identifier: Apache-2.0
"""A program for DeepEP, with a pair of autograd functions. It knows nothing of libep.

deep_ep_program.py RANK SIZE PORT DEVICE [early]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from deep_ep import Buffer
from deep_ep.utils import EventHandle, EventOverlap

EXPERTS, HIDDEN, TOP_K = 8, 32, 2


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, idx, weights):
        per_rank, per_rdma_rank, per_expert, is_in, event = buffer.get_dispatch_layout(
            idx,
            EXPERTS,
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        rx, ridx, rweights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ridx)
        return rx, ridx, rweights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, *rest):
        grad_x, grad_weights, event = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float(), async_finish=True
        )
        event.current_stream_wait()
        return None, grad_x, None, grad_weights


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle):
        out, _, event = buffer.combine(x, handle, async_finish=True)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return out

    @staticmethod
    def backward(ctx, grad):
        grad, *_, event = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, async_finish=True
        )
        event.current_stream_wait()
        return None, grad, None


def layer(buffer, x, idx, weights, scales):
    """Experts multiply rows by their scale; scales [L] are those of this rank."""
    rx, ridx, rweights, counts, handle = Dispatch.apply(buffer, x, idx, weights)
    assert counts.tolist() == [(ridx == e).sum().item() for e in range(len(scales))]
    factors = torch.where(ridx >= 0, rweights * scales[ridx.clamp(min=0)], 0).sum(1, keepdim=True)
    return Combine.apply(buffer, rx * factors.to(rx.dtype), handle)


def dense(x, idx, weights, scales):
    """The same on one rank; scales [EXPERTS] are those of all ranks."""
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
        grad = torch.randint(-4, 5, (tokens, HIDDEN)).float().to(device)
        results = []
        for function in (lambda *a: layer(buffer, *a, local), lambda *a: dense(*a, all_scales)):
            x, weights = data.clone().requires_grad_(), given.clone().requires_grad_()
            y = function(x, idx, weights)
            y.backward(grad)
            results.append((y, x.grad, weights.grad))
        for got, expected in zip(*results):
            assert torch.equal(got, expected), (got, expected)
    print(f"rank {rank}: equal", flush=True)
    if "open" not in options:
        buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
