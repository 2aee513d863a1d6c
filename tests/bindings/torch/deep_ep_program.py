# SPDX-License-Identifier: Apache-2.0
"""A program for DeepEP, which knows nothing of libep: both buffers equal DeepEP's references.

deep_ep_program.py RANK SIZE PORT [early]
"""

import os
import sys

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import Buffer
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.utils.envs import dist_print, get_logical_domain_size, init_dist
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate

BOUND, HIDDEN, TOP_K = 20, 144, 3


def layer(buffer, x, idx, weights, experts):
    """A layer of Buffer, as trainers have it, whose experts multiply by their number plus one."""
    beside = dict(async_finish=True, allocate_on_comm_stream=True)
    after = EventOverlap(EventHandle())
    *layout, event = buffer.get_dispatch_layout(idx, experts, previous_event=after, **beside)
    names = "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert is_token_in_rank"
    options = dict(zip(names.split(), layout), previous_event=event, **beside)
    given = dict(topk_idx=idx, topk_weights=weights)
    rx, ridx, rweights, counts, handle, event = buffer.dispatch(x, **given, **options)
    event.current_stream_wait()
    assert counts == [(ridx == expert).sum().item() for expert in (0, 1)]
    factors = torch.where(ridx >= 0, ridx + 2 * buffer.rank + 1, 0)
    done = rx * (factors * rweights).sum(1, keepdim=True).to(rx.dtype)
    out, _, event = buffer.combine(done, handle, async_finish=True)
    event.current_stream_wait()
    return out


def main(rank, size, port, *options):
    os.environ["MASTER_PORT"] = port
    rank, size, group = init_dist(int(rank), int(size), 7)
    assert deep_ep.ElasticBuffer is ElasticBuffer
    if not os.environ.get("LIBEP_TOPOLOGY"):
        sizes = get_logical_domain_size(group), deep_ep.get_physical_domain_size(group)
        assert sizes == 2 * ((1, size),)
    experts, tokens = 2 * size, BOUND - 3 * rank
    hint = Buffer.get_dispatch_config(size).get_nvl_buffer_size_hint(HIDDEN, size)
    old = Buffer(group, hint, 0)
    assert (old.rank, old.group_size, old.group) == (rank, size, group)
    if options == ("early",) and rank == 1:
        sys.exit("rank 1 leaves early")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=BOUND, hidden=HIDDEN, num_topk=TOP_K)
    for ratio, precise in ((1.0, False), (2.0, False), (2.0, True)):
        scores = get_unbalanced_scores(tokens, experts, size, TOP_K, ratio, precise)
        weights, idx = scores.topk(TOP_K, 1)
        idx[::4, 1] = -1
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        whole = x.float().round(), weights.mul(4).round() / 4
        expected = whole[0] * torch.where(idx < 0, 0, whole[1] * (idx + 1)).sum(1, keepdim=True)
        assert torch.equal(layer(old, whole[0], idx, whole[1], experts), expected)
        if os.environ.get("LIBEP_TOPOLOGY"):  # DeepEP's references know one node
            continue
        rx, ridx, rweights, handle, _ = buffer.dispatch(x, idx, weights, num_experts=experts)
        ref_x, ref_idx, ref_weights, numbers, counts = dispatch(x, idx, weights, BOUND, experts)
        assert torch.equal(rx, ref_x) and torch.equal(ridx, ref_idx)
        assert torch.equal(rweights, ref_weights.masked_fill(ref_idx < 0, 0))
        assert torch.equal(handle.recv_src_metadata[:, 0], numbers)
        sums = handle.psum_num_recv_tokens_per_scaleup_rank
        assert sums.tolist() == counts.cumsum(0).tolist()
        rows = generate_pre_combine_data(numbers, BOUND, TOP_K, HIDDEN)
        rows[ridx < 0] = 0
        out = buffer.combine(ordered_accumulate(rows), handle)[0]
        mine = torch.arange(rank * BOUND, rank * BOUND + tokens, device=device)
        rows = generate_pre_combine_data(mine, BOUND, TOP_K, HIDDEN)
        rows[idx < 0] = 0
        assert torch.equal(out, combine(rows, idx, 1, size, experts, None, True, False))
    buffer.destroy()
    old.destroy()
    dist_print("equal" if rank == 0 else "", once_in_node=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
